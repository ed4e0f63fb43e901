"""Keeps the store equal to the tenants file: at start, when it changes, on SIGHUP, when the store comes back."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvgate.settings import BadSettings, load_tenants
from kvgate.store.errors import StoreUnavailable
from kvgate.store.registry import DeclaredTenant, OverGuaranteed, TenantsConflict

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.settings import Settings
    from kvgate.store.tenants import ValkeyTenants

log = logging.getLogger("kvgate.app")

POLL_S = 0.5
STORE_TIMEOUT_S = 5.0


class NotApplied(Exception):
    """The tenants file cannot be applied; the message says why and what to do."""


class TenantsFile:
    """The tenants file of one gate; without one, only the anonymous tenant is looked after.

    `problem` is why the file, as it is now, is not in force; None where it is.
    """

    def __init__(self, settings: Settings, tenants: ValkeyTenants) -> None:
        self._path = settings.tenants
        self._owner = settings.tenants_owner or ("" if self._path is None else str(self._path.resolve()))
        self.anonymous = settings.anonymous_tenant
        self._tenants = tenants
        self.reload = asyncio.Event()
        self.problem: str | None = None
        self._declared: frozenset[str] = frozenset()

    async def apply(self) -> None:
        """Make the store hold what the file declares.

        Raises:
            NotApplied: the last one stays in force.
        """
        try:
            if self._path is not None:
                await self._apply(self._path)
        except TimeoutError:
            raise NotApplied(f"the store did not answer within {STORE_TIMEOUT_S:g} s") from None
        except TenantsConflict as error:
            raise NotApplied(f"{error}. Where the file has moved, set tenants_owner to the old path") from None
        except (BadSettings, OverGuaranteed, StoreUnavailable) as error:
            raise NotApplied(str(error)) from None
        if self.anonymous is not None and self._tenants.by_name(self.anonymous) is None:
            raise NotApplied(f"anonymous_tenant = {self.anonymous!r}, but no tenant of that name is declared")
        self.problem = None

    async def watch(self) -> None:
        """Apply the file again whenever there is reason to, until cancelled.

        A store may come back empty, or be emptied while it runs.
        """
        seen, stale = _mtime(self._path), False
        while True:
            was_stale, stale = stale, self._tenants.stale_since is not None
            try:
                async with asyncio.timeout(POLL_S):
                    await self.reload.wait()
            except TimeoutError:
                if _mtime(self._path) == seen and not (was_stale and not stale) and not self._is_lost():
                    continue
            self.reload.clear()
            seen = _mtime(self._path)
            try:
                await self.apply()
            except NotApplied as error:
                self.problem = str(error)
                extra = {"problem": self.problem}
                log.warning("the tenants file was not applied, the last one stays in force", extra=extra)

    def _is_lost(self) -> bool:
        """Whether the store has forgotten what this file declares, though it answers."""
        return self._tenants.stale_since is None and not self._declared <= set(self._tenants.names())

    async def _apply(self, path: Path) -> None:
        declared = load_tenants(path)
        if not declared and (lost := await self._tenants.would_remove(self._owner)):
            # An editor or a deployment that truncates first would revoke everybody, minted keys for good.
            owner = f" --owner {self._owner}"
            raise NotApplied(
                f"{path} declares no tenant at all, which would remove {', '.join(lost[:5])}"
                f"{' and others' if len(lost) > 5 else ''} with their keys. Where that is meant: "
                f"kvgate tenants apply {path}{owner}"
            )
        sections = {name: DeclaredTenant(tenant, keys) for name, (tenant, keys) in declared.items()}
        async with asyncio.timeout(STORE_TIMEOUT_S):
            applied = await self._tenants.apply(sections, source=self._owner)
        self._declared = frozenset(sections)
        extra = {
            "file": str(path),
            "added": len(applied.added),
            "changed": len(applied.changed),
            "removed": len(applied.removed),
        }
        log.info("tenants applied", extra=extra)


def _mtime(path: Path | None) -> int | None:
    try:
        return None if path is None else path.stat().st_mtime_ns
    except OSError:
        return None
