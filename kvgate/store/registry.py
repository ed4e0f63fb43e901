"""Changes tenants and keys: each change is one atomic step at the store, checked whole before anything is written."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgate.core.guarantee import over_guaranteed
from kvgate.store.errors import StoreUnavailable, store_errors
from kvgate.store.records import (
    ID_DIGITS,
    KeyRecord,
    Names,
    TenantRecord,
    decode_record,
    encode_record,
    key_record,
    key_records,
    script_of,
    settings_of,
    text_of,
    texts_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvgate.core.tenant import Tenant
    from kvgate.store.client import StoreClient

_SHA256 = re.compile(r"[0-9a-f]{64}")


class NotDone(ValueError):
    """The answer is no, and nothing was written; the message says why."""


class TenantsConflict(NotDone):
    """A declaration that would take another tenant's key, or another owner's tenant."""


class OverGuaranteed(NotDone):
    """More of the pool would be guaranteed than there is."""


class UnknownTenant(NotDone):
    """There is no tenant of that name."""


class UnknownKey(NotDone):
    """No key has that ID."""


class Declared(NotDone):
    """What a tenant's owner declares is changed by that owner alone."""

    def __init__(self, message: str, owner: str) -> None:
        super().__init__(message)
        self.owner = owner


@dataclass(frozen=True, slots=True)
class DeclaredTenant:
    """A tenant and the SHA-256 of each of its keys, 64 lower-case hex digits.

    `keys_sha256` None leaves its keys to `create_key`; a tuple, also an empty one, is all of them.
    """

    tenant: Tenant
    keys_sha256: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one tenant; it is new where there is no `before`, and removed where there is no `after`."""

    name: str
    before: TenantRecord | None
    after: TenantRecord | None
    revoked: tuple[KeyRecord, ...] = ()
    granted: tuple[KeyRecord, ...] = ()

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ, by their names in `tenants.toml`: before and after."""
        if self.before is None or self.after is None or self.after.tenant is None:
            return {}
        before = {} if self.before.tenant is None else settings_of(self.before.tenant)
        after = settings_of(self.after.tenant)
        return {name: (before.get(name, "?"), after[name]) for name in after if before.get(name, "?") != after[name]}


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` did, or would do: the store's version after it, and the tenants that it touches, by name."""

    version: int
    changes: tuple[Change, ...] = ()

    @property
    def added(self) -> tuple[Change, ...]:
        """Tenants that were not there before."""
        return tuple(change for change in self.changes if change.before is None)

    @property
    def changed(self) -> tuple[Change, ...]:
        """Tenants with other settings or other keys than before."""
        return tuple(change for change in self.changes if change.before is not None and change.after is not None)

    @property
    def removed(self) -> tuple[Change, ...]:
        """Tenants that are gone."""
        return tuple(change for change in self.changes if change.after is None)


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that the store has, as of one moment."""

    version: int
    tenants: Mapping[str, TenantRecord]
    keys: Mapping[str, KeyRecord]

    def keys_of(self, tenant: str) -> tuple[KeyRecord, ...]:
        """A tenant's keys, the oldest first."""
        found = [key for key in self.keys.values() if key.tenant == tenant]
        return tuple(sorted(found, key=lambda key: (key.created_s or 0, key.sha256)))


class Registry:
    """The tenants and keys of one store, for those who change them.

    Args:
        client: made by `store.client.connect`; its owner closes it.
        names: where they are kept.
        timeout_s: for one step at the store.
    """

    def __init__(self, client: StoreClient, *, names: Names | None = None, timeout_s: float = 2.0) -> None:
        self._client: Any = client  # redis-py types every answer as "awaitable or not"
        self._names = (names or Names()).all
        self._timeout_s = timeout_s
        self._apply = script_of(client, "tenants_apply.lua")
        self._remove = script_of(client, "tenants_remove.lua")
        self._create = script_of(client, "keys_create.lua")
        self._revoke = script_of(client, "keys_revoke.lua")

    async def apply(self, declared: Mapping[str, DeclaredTenant], source: str, *, dry_run: bool = False) -> Applied:
        """Make the store hold, of the tenants that `source` owns, exactly the declared ones.

        Tenants of other owners are left alone. Declaring the same again changes nothing.

        Args:
            declared: by tenant name.
            source: the owner, such as the path of the file that declares them.
            dry_run: tell what would be done, and write nothing.

        Raises:
            TenantsConflict: a key is declared twice or belongs to another owner's tenant, a tenant belongs to
                another owner, or a declaration contradicts itself; nothing was written.
            OverGuaranteed: with those of other owners, more than the pool would be guaranteed; nothing was written.
            StoreUnavailable: the store failed; whether the change was made is unknown, and applying again is safe.
        """
        payload = json.dumps([_declaration(name, one, source) for name, one in declared.items()])
        answer = await self._ask(self._apply, "applying tenants", source, payload, "plan" if dry_run else "write")
        match answer:
            case ["ok", version, tenants, revoked, granted]:
                return Applied(int(version), tuple(_changes(tenants, revoked, granted)))
            case ["owned", name, owner]:
                raise TenantsConflict(
                    f"tenant {name!r} is declared by {owner!r}, so {source!r} cannot declare it too"
                )
            case ["double", name, other]:
                raise TenantsConflict(f"tenants {name!r} and {other!r} have a key in common; a key names one tenant")
            case ["over", *flat]:
                ratios = {name: float(ratio) for name, ratio in _groups(flat, 2)}
                raise OverGuaranteed(over_guaranteed(ratios) or "more than the pool is guaranteed")
            case _:
                raise StoreUnavailable(f"tenants_apply.lua gave {answer!r}")

    async def remove(self, name: str, owner: str) -> Applied:
        """Remove a tenant and all its keys, on behalf of its owner.

        Raises:
            UnknownTenant: there is none of that name.
            Declared: another owner declares it.
            StoreUnavailable: as `apply`.
        """
        answer = await self._ask(self._remove, "removing a tenant", name, owner)
        match answer:
            case ["ok", version, record, revoked]:
                keys = tuple(key_record(sha, name, known) for sha, known in _groups(revoked, 2))
                return Applied(int(version), (Change(name, decode_record(record), None, revoked=keys),))
            case ["unknown"]:
                raise UnknownTenant(f"there is no tenant {name!r}")
            case ["owned", found]:
                raise Declared(f"tenant {name!r} is declared by {found!r}", found)
            case _:
                raise StoreUnavailable(f"tenants_remove.lua gave {answer!r}")

    async def create_key(self, tenant: str, sha256: str, *, label: str = "", created_by: str = "") -> KeyRecord:
        """Give a tenant a key, of which the store gets the SHA-256 alone.

        Raises:
            UnknownTenant: there is none of that name.
            Declared: the tenant's owner declares its keys too.
            StoreUnavailable: the store failed; whether it took the key is unknown.
        """
        answer = await self._ask(self._create, "creating a key", tenant, sha256, label, created_by)
        match answer:
            case ["ok", _, known]:
                return key_record(sha256, tenant, known)
            case ["unknown"]:
                raise UnknownTenant(f"there is no tenant {tenant!r}")
            case ["declared", owner]:
                raise Declared(f"the keys of tenant {tenant!r} are declared by {owner!r}", owner)
            case ["taken"]:
                raise NotDone("this key is in use already")
            case _:
                raise StoreUnavailable(f"keys_create.lua gave {answer!r}")

    async def revoke_key(self, digits: str) -> KeyRecord:
        """Revoke the one key whose SHA-256 begins with these lower-case hex digits; what it was.

        Raises:
            UnknownKey: none does.
            NotDone: several do.
            Declared: its tenant's owner declares it.
            StoreUnavailable: the store failed; whether it is revoked is unknown, and revoking again is safe.
        """
        answer = await self._ask(self._revoke, "revoking a key", digits)
        match answer:
            case ["ok", _, sha256, tenant, known]:
                return key_record(sha256, tenant, known)
            case ["unknown"]:
                raise UnknownKey("no key has this ID")
            case ["ambiguous", *several]:
                ids = ", ".join(sorted(sha256[: max(ID_DIGITS, len(digits) + 4)] for sha256 in several))
                raise NotDone(f"{len(several)} keys have an ID that begins so: {ids}")
            case ["declared", sha256, tenant, owner]:
                key_id = KeyRecord(sha256, tenant, minted=False).key_id
                raise Declared(f"key {key_id} of tenant {tenant!r} is declared by {owner!r}", owner)
            case _:
                raise StoreUnavailable(f"keys_revoke.lua gave {answer!r}")

    async def read(self) -> Holdings:
        """All tenants and keys.

        Raises:
            StoreUnavailable: the store failed.
        """
        tenants_key, keys_key, minted_key, version_key = self._names
        with store_errors("reading the tenants"):
            async with asyncio.timeout(self._timeout_s), self._client.pipeline(transaction=True) as pipe:
                pipe.get(version_key).hgetall(tenants_key).hgetall(keys_key).hgetall(minted_key)
                version, records, keys, minted = await pipe.execute()
        tenants = {name: decode_record(record) for name, record in sorted(texts_of(records).items())}
        return Holdings(int(version or 0), tenants, key_records(texts_of(keys), texts_of(minted)))

    async def _ask(self, script: Any, doing: str, *arguments: str) -> Any:
        with store_errors(doing):
            async with asyncio.timeout(self._timeout_s):
                return _texts(await script(keys=self._names, args=arguments))


def _declaration(name: str, one: DeclaredTenant, source: str) -> dict[str, Any]:
    if name != one.tenant.name:
        raise TenantsConflict(f"tenant {one.tenant.name!r} is declared under the name {name!r}")
    keys = one.keys_sha256
    if not all(_SHA256.fullmatch(key) for key in keys or ()):
        raise TenantsConflict(f"tenant {name!r}: each of keys_sha256 is the 64 lower-case hex digits of a SHA-256")
    record = encode_record(source, one.tenant, keys_declared=keys is not None)
    return {"name": name, "record": record, **({} if keys is None else {"keys": keys})}


def _changes(tenants: Sequence[str], revoked: Sequence[str], granted: Sequence[str]) -> Iterator[Change]:
    lost = sorted((key_record(sha, name, known) for sha, name, known in _groups(revoked, 3)), key=lambda k: k.sha256)
    got = sorted((KeyRecord(sha, name, minted=False) for sha, name in _groups(granted, 2)), key=lambda k: k.sha256)
    for name, before, after in sorted(_groups(tenants, 3)):
        yield Change(
            name,
            decode_record(before) if before else None,
            decode_record(after) if after else None,
            tuple(key for key in lost if key.tenant == name),
            tuple(key for key in got if key.tenant == name),
        )


def _groups(flat: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*[iter(flat)] * size, strict=True))


def _texts(answer: Any) -> Any:
    return [_texts(part) for part in answer] if isinstance(answer, list) else text_of(answer)
