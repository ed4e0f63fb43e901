"""Tenants and their keys: held in the store, looked up in memory, changed in one atomic step."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from kvgate.core.tenant import Tenant
from kvgate.store.errors import StoreUnavailable, store_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from redis.asyncio import Redis

    from kvgate.ports import Clock

_log = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_TENANT = TypeAdapter(Tenant)


class TenantsConflict(ValueError):
    """A declaration that would take another tenant's key, or another owner's tenant; nothing was written."""


@dataclass(frozen=True, slots=True)
class DeclaredTenant:
    """A tenant and the SHA-256 of each of its keys, 64 lower-case hex digits."""

    tenant: Tenant
    keys_sha256: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` did: the store's version after it, and how many tenants it touched; all 0 changes nothing."""

    version: int
    added: int
    changed: int
    removed: int


@dataclass(frozen=True, slots=True)
class _Snapshot:
    by_name: Mapping[str, Tenant]
    by_key: Mapping[str, Tenant]


class ValkeyTenants:
    """The tenants as the store has them; every lookup is answered from the latest snapshot.

    Args:
        client: made by `store.client.connect`; its owner closes it.
        prefix: what the three keys begin with. On a cluster they must hash alike: give it a hash tag, `{kvgate}`.
        clock: what `stale_since` is told in.
        timeout_s: for one step at the store.
    """

    def __init__(
        self, client: Redis, *, prefix: str = "kvgate", clock: Clock = time.monotonic, timeout_s: float = 2.0
    ) -> None:
        self._client: Any = client  # redis-py types every answer as "awaitable or not"
        self._keys = (f"{prefix}:tenants", f"{prefix}:keys", f"{prefix}:tenants:version")
        self._apply = self._client.register_script(files("kvgate.store").joinpath("tenants_apply.lua").read_text())
        self._clock = clock
        self._timeout_s = timeout_s
        self._snapshot = _Snapshot({}, {})
        self._version: int | None = None
        self._seen_at = clock()
        self.stale_since: float | None = None
        """While the store is out: the moment of the last look that succeeded, on `clock`; otherwise None."""

    def by_key(self, key_sha256: str) -> Tenant | None:
        """The tenant that a key's SHA-256 (64 lower-case hex digits) belongs to."""
        return self._snapshot.by_key.get(key_sha256)

    def by_name(self, name: str) -> Tenant | None:
        """The tenant of that name."""
        return self._snapshot.by_name.get(name)

    @property
    def has_keys(self) -> bool:
        """Whether anybody has a key."""
        return bool(self._snapshot.by_key)

    def names(self) -> tuple[str, ...]:
        """The names of all tenants, sorted."""
        return tuple(sorted(self._snapshot.by_name))

    async def apply(self, declared: Mapping[str, DeclaredTenant], source: str) -> Applied:
        """Make the store hold, of the tenants that `source` owns, exactly the declared ones.

        One atomic step, and then a refresh. Tenants of other owners are left alone. Declaring the same again
        changes nothing.

        Args:
            declared: by tenant name.
            source: the owner, such as the path of the file that declares them.

        Raises:
            TenantsConflict: a key is declared twice or belongs to another owner's tenant, a tenant belongs to
                another owner, or a declaration contradicts itself; nothing was written.
            StoreUnavailable: the store failed; whether the change was made is unknown, and applying again is safe.
        """
        payload = json.dumps([_declaration(name, one, source) for name, one in declared.items()])
        with store_errors("applying tenants"):
            async with asyncio.timeout(self._timeout_s):
                answer = [_text(part) for part in await self._apply(keys=self._keys, args=(source, payload))]
        match answer:
            case ["ok", *counts]:
                await self.refresh()
                return Applied(*map(int, counts))
            case ["owned", name, owner]:
                raise TenantsConflict(
                    f"tenant {name!r} is declared by {owner!r}, so {source!r} cannot declare it too"
                )
            case ["double", name, other]:
                raise TenantsConflict(f"tenants {name!r} and {other!r} have a key in common; a key names one tenant")
            case _:
                raise StoreUnavailable(f"tenants_apply.lua gave {answer!r}")

    async def refresh(self) -> bool:
        """Load the snapshot if the store's version is not the one held; returns whether it was loaded.

        Raises:
            StoreUnavailable: the store failed; the snapshot is as it was.
        """
        tenants_key, keys_key, version_key = self._keys
        with store_errors("reading the tenants"):
            async with asyncio.timeout(self._timeout_s):
                if self._version is not None and int(await self._client.get(version_key) or 0) == self._version:
                    self._seen()
                    return False
                async with self._client.pipeline(transaction=True) as pipe:
                    pipe.get(version_key).hgetall(tenants_key).hgetall(keys_key)
                    version, records, names = await pipe.execute()
        self._snapshot = _snapshot(_texts(records), _texts(names))
        self._version = int(version or 0)
        self._seen()
        return True

    async def watch(self, interval_s: float = 0.5) -> None:
        """Refresh every `interval_s` seconds until cancelled; an outage leaves the last snapshot in force.

        After an outage the whole snapshot is loaded, whatever its version: another server may have taken over
        with the same count of different changes.
        """
        while True:
            try:
                await self.refresh()
            except StoreUnavailable as problem:
                self._version = None
                if self.stale_since is None:
                    self.stale_since = self._seen_at
                    _log.warning("store out, tenants stay as last seen", extra={"problem": str(problem)})
            await asyncio.sleep(interval_s)

    def _seen(self) -> None:
        self._seen_at = self._clock()
        if self.stale_since is not None:
            _log.info("store back, tenants are current", extra={"stale_s": self._seen_at - self.stale_since})
            self.stale_since = None


def encode_tenant(tenant: Tenant) -> dict[str, Any]:
    """The tenant as JSON values; equal tenants give equal values."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(tenant), allow_nan=False, default=sorted))
    return values


def decode_tenant(values: object) -> Tenant:
    """The tenant that `encode_tenant` made these values of, perhaps in another version of kvgate.

    A field that is missing, and a word that this version does not know (a later policy), is the default, which
    is the strict choice for every such word; fields unknown here are ignored.

    Raises:
        ValueError: anything else is wrong with them.
    """
    try:
        return _TENANT.validate_python(values)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        if any(problem["type"] != "enum" for problem in problems):
            raise
        known = json.loads(json.dumps(values))
        for *way, last in (problem["loc"] for problem in problems):
            holder = known
            for step in way:
                holder = holder[step]
            del holder[last]
        return _TENANT.validate_python(known)


def _declaration(name: str, one: DeclaredTenant, source: str) -> dict[str, Any]:
    if name != one.tenant.name:
        raise TenantsConflict(f"tenant {one.tenant.name!r} is declared under the name {name!r}")
    if not all(_SHA256.fullmatch(key) for key in one.keys_sha256):
        raise TenantsConflict(f"tenant {name!r}: each of keys_sha256 is the 64 lower-case hex digits of a SHA-256")
    record = {"owner": source, "tenant": encode_tenant(one.tenant)}
    return {"name": name, "record": json.dumps(record, sort_keys=True), "keys": one.keys_sha256}


def _snapshot(records: Mapping[str, str], names: Mapping[str, str]) -> _Snapshot:
    by_name: dict[str, Tenant] = {}
    for name, record in records.items():
        try:
            by_name[name] = decode_tenant(json.loads(record)["tenant"])
        except (ValueError, KeyError, TypeError) as problem:
            # Closed rather than open: its keys are unknown until a version that can read it takes over.
            _log.error("tenant unreadable", extra={"tenant": name, "problem": repr(problem)})
    return _Snapshot(by_name, {key: by_name[name] for key, name in names.items() if name in by_name})


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _texts(mapping: Mapping[object, object]) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in mapping.items()}
