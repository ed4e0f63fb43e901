"""The tenants as a gate sees them: held in the store, looked up in memory, never more than a moment old."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgate.store.errors import StoreUnavailable, store_errors
from kvgate.store.records import Names, decode_record, texts_of
from kvgate.store.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgate.core.tenant import Tenant
    from kvgate.ports import Clock
    from kvgate.store.client import StoreClient
    from kvgate.store.registry import Applied, DeclaredTenant

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    by_name: Mapping[str, Tenant]
    by_key: Mapping[str, Tenant]


class ValkeyTenants:
    """The tenants as the store has them; every lookup is answered from the latest snapshot.

    Args:
        client: made by `store.client.connect`; its owner closes it.
        names: where the tenants and keys are kept.
        clock: what `stale_since` is told in.
        timeout_s: for one step at the store.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        names: Names | None = None,
        clock: Clock = time.monotonic,
        timeout_s: float = 2.0,
    ) -> None:
        self._client: Any = client  # redis-py types every answer as "awaitable or not"
        self._registry = Registry(client, names=names, timeout_s=timeout_s)
        self._names = (names or Names()).all
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

    def all(self) -> tuple[Tenant, ...]:
        """All tenants."""
        return tuple(self._snapshot.by_name.values())

    def names(self) -> tuple[str, ...]:
        """The names of all tenants, sorted."""
        return tuple(sorted(self._snapshot.by_name))

    async def would_remove(self, source: str) -> tuple[str, ...]:
        """The tenants of this owner, which applying an empty declaration would remove."""
        return tuple(change.name for change in (await self._registry.apply({}, source, dry_run=True)).removed)

    async def apply(self, declared: Mapping[str, DeclaredTenant], source: str) -> Applied:
        """As `Registry.apply`, and then a refresh."""
        applied = await self._registry.apply(declared, source)
        await self.refresh()
        return applied

    async def refresh(self) -> bool:
        """Load the snapshot if the store's version is not the one held; returns whether it was loaded.

        Raises:
            StoreUnavailable: the store failed; the snapshot is as it was.
        """
        tenants_key, keys_key, _, version_key = self._names
        with store_errors("reading the tenants"):
            async with asyncio.timeout(self._timeout_s):
                if self._version is not None and int(await self._client.get(version_key) or 0) == self._version:
                    self._seen()
                    return False
                async with self._client.pipeline(transaction=True) as pipe:
                    pipe.get(version_key).hgetall(tenants_key).hgetall(keys_key)
                    version, records, names = await pipe.execute()
        self._snapshot = _snapshot(texts_of(records), texts_of(names))
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


def _snapshot(records: Mapping[str, str], names: Mapping[str, str]) -> _Snapshot:
    by_name: dict[str, Tenant] = {}
    for name, record in records.items():
        if (tenant := decode_record(record).tenant) is not None:
            by_name[name] = tenant
        else:
            # Closed rather than open: its keys are unknown until a version that can read it takes over.
            _log.error("tenant unreadable", extra={"tenant": name})
    return _Snapshot(by_name, {key: by_name[name] for key, name in names.items() if name in by_name})
