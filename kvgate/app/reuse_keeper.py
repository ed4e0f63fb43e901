"""Keeps prefix reuse to those who may have it: applies the rule, watches for violations, takes the pin away."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from kvgate.app.canary_schedule import CanarySchedule
from kvgate.core.canary import SUITE_TENANT, Sharers, Violations, is_listed, reuse_of, why_off
from kvgate.core.engine_state import lasting
from kvgate.core.reuse import Reuse
from kvgate.core.tenant import ReusePolicy
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgate.app.canary_schedule import SuiteRunner
    from kvgate.core.canary import CanaryState
    from kvgate.core.profile import EngineProfile
    from kvgate.core.tenant import Tenant
    from kvgate.ports import Clock, RequestRecord, Tenants
    from kvgate.store.canary import CanaryStore, CanaryWatch

log = logging.getLogger("kvgate.reuse")

VIOLATION_WARNED_S: Final = 3600.0
"""How long readiness warns of reuse that should not have been."""

RETRY_S: Final = 1.0

BY: Final = "kvgate"


class ReuseKeeper:
    """Implements `ports.ReuseRule` and `ports.Observer`.

    Args:
        store: where pins are.
        watch: what is known of them.
        tenants: who the names are.
        dedicated_to: the only tenants that the engine serves; empty serves all.
        profile: the engine as it was last seen.
        clock: seconds.
    """

    def __init__(
        self,
        store: CanaryStore,
        watch: CanaryWatch,
        tenants: Tenants,
        *,
        dedicated_to: Sequence[str],
        profile: Callable[[], EngineProfile | None],
        clock: Clock,
    ) -> None:
        self._store = store
        self._watch = watch
        self._tenants = tenants
        self._dedicated_to = frozenset(dedicated_to)
        self._profile = profile
        self._clock = clock
        self._in_a_row = Violations()
        self._violations = 0
        self._violated_at_s = 0.0
        self._unpinning: dict[str, str] = {}
        self._wants = asyncio.Event()
        watch.serving = self._serving

    # -- the rule

    def serves(self, tenant: Tenant) -> bool:
        """Whether the engine is there for this tenant."""
        return not self._dedicated_to or tenant.name in self._dedicated_to or tenant.reuse is ReusePolicy.SUITE

    def of(self, tenant: Tenant, profile: EngineProfile, *, asked: bool) -> Reuse:
        """What a request has on the engine of this very connection."""
        if tenant.reuse is not ReusePolicy.SUITE and profile.fingerprint in self._unpinning:
            return Reuse.OFF
        state = self._watch.state
        return reuse_of(tenant, state, profile, self._sharers(state), asked=asked)

    def _serving(self, state: CanaryState) -> tuple[str | None, frozenset[str], frozenset[str]]:
        profile = self._profile()
        instance = None if profile is None else profile.instance
        known = frozenset(name for name in self._dedicated_to if self._tenants.by_name(name) is not None)
        return instance, self._sharers(state).strangers, known

    def _sharers(self, state: CanaryState | None) -> Sharers:
        known = {name: self._tenants.by_name(name) for name in self._dedicated_to}
        unlisted = (name for name, tenant in known.items() if tenant is not None and not is_listed(tenant, state))
        return Sharers(self._dedicated_to, frozenset(unlisted))

    async def look(self) -> None:
        """Look at the store, and tell it whom this gate's engine serves."""
        await self._watch.refresh()

    def schedule(self, run: SuiteRunner | None, every_h: float) -> CanarySchedule | None:
        """Who repeats the suite, where that is wanted and there is one."""
        if not every_h or run is None:
            return None
        every_s = every_h * 3600
        return CanarySchedule(run, self._store, self._watch, profile=self._profile, every_s=every_s, now=time.time)

    # -- violations

    def request(self, record: RequestRecord) -> None:
        """Another answer: reuse where there should be none is counted, and enough of it in a row unpins."""
        if record.usage is None or record.reuse != Reuse.OFF.value:
            return
        self._in_a_row = self._in_a_row.after(violated=record.reuse_violation)
        if not record.reuse_violation:
            return
        self._violations += 1
        self._violated_at_s = self._clock()
        profile = record.profile
        if self._in_a_row.unpins and profile is not None and profile.fingerprint not in self._unpinning:
            self._unpinning[profile.fingerprint] = (
                f"{self._in_a_row.in_a_row} answers in a row reused although told not to"
            )
            self._wants.set()

    async def run(self) -> None:
        """Carry unpins to the store until cancelled, as long as it takes: until then reuse is off here anyway."""
        while True:
            await self._wants.wait()
            self._wants.clear()
            for fingerprint, why in list(self._unpinning.items()):
                try:
                    gone = await self._store.unpin(fingerprint, by=BY, why=why, doubt=True)
                    await self._watch.refresh()
                except StoreUnavailable:
                    self._wants.set()
                    continue
                log.error("prefix reuse was unpinned", extra={"fingerprint": fingerprint, "why": why, "pins": gone})
                del self._unpinning[fingerprint]
            if self._wants.is_set():
                await asyncio.sleep(RETRY_S)

    # -- what the operator is told

    def warnings(self) -> list[str]:
        """What readiness warns of."""
        warnings = []
        ago_s = self._clock() - self._violated_at_s
        if self._violations and ago_s < VIOLATION_WARNED_S:
            answers = "1 answer" if self._violations == 1 else f"{self._violations} answers"
            warnings.append(
                f"the engine reused a prefix in {answers} although it was told not to, the last {lasting(ago_s)} "
                "ago: what one tenant said may have served another. Start it with --no-cache-prompt --cache-ram 0 "
                "--no-cache-idle-slots; three such answers in a row take its pin away until the suite has passed "
                "again"
            )
        unknown = sorted(name for name in self._dedicated_to if self._tenants.by_name(name) is None)
        return warnings + [f"engine.dedicated_to names {name!r}, and there is no such tenant" for name in unknown]

    def told(self) -> dict[str, Any]:
        """For `/status`: who has reuse, and why the others of the allowlist do not."""
        profile, state = self._profile(), self._watch.state
        pin = None if profile is None or state is None else state.pin_of(profile)
        listed: dict[str, str] = {}
        if profile is not None and state is not None:
            for name in sorted(self._dedicated_to | state.widened):
                if (tenant := self._tenants.by_name(name)) is not None and name != SUITE_TENANT:
                    listed[name] = why_off(tenant, state, profile, self._sharers(state)) or "on"
        return {
            "pin": pin,
            "dedicated_to": sorted(self._dedicated_to),
            "tenants": listed,
            "violations": self._violations,
            "violations_in_a_row": self._in_a_row.in_a_row,
        }
