"""Watches one engine: its state once a second, its slots while it works; keeps what was seen, and tells."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from kvgate.app.health import profile_warnings
from kvgate.core.engine_state import Change, EngineLife, EngineState, Look, change_between, look_refused
from kvgate.core.foreign import ForeignWatch, surplus
from kvgate.core.reason import Reason
from kvgate.ports import LineFailed, Refused

if TYPE_CHECKING:
    from kvgate.core.drain import SlotsSeen
    from kvgate.core.foreign import Tally
    from kvgate.core.ledger import LedgerView
    from kvgate.core.profile import EngineProfile
    from kvgate.engines.llamacpp import LlamaCpp
    from kvgate.metrics import Metrics
    from kvgate.ports import Clock

log = logging.getLogger("kvgate.engine")

ENGINE_POLL_S = 1.0
DRAIN_POLL_S = 0.1
FOREIGN_POLL_S = 2.0


class LifeWatch:
    """The engine's life, and a line in the log for each turn of it.

    Args:
        clock: seconds.
        metrics: counts the changes.
    """

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self.life = EngineLife(clock())
        self._is_first = True

    def looked(self, look: Look) -> None:
        """A look at the engine is over; only the first in a new state is told."""
        before, self.life = self.life, self.life.looked(look, self._clock())
        is_first, self._is_first = self._is_first, False
        if look.state is (EngineState.SERVING if is_first else before.state):
            return
        level = logging.INFO if look.state.is_served else logging.WARNING
        told = {"state": look.state.label, "sentence": self.life.sentence(self._clock())}
        log.log(level, look.state.value.event, extra={**told, **({"cause": look.problem} if look.problem else {})})

    def profile(self, before: EngineProfile | None, now: EngineProfile) -> None:
        """Another profile is in force."""
        fields = {
            "n_ctx_slot": str(now.n_ctx_slot),
            "total_slots": str(now.total_slots),
            "topology": str(now.topology),
            "pool_tokens": str(now.pool_tokens),
            "kv_type": now.kv_type,
            "build": now.build,
            "fingerprint": now.fingerprint,
        }
        changed = None if before is None else change_between(before, now)
        if before is None:
            log.info("engine found", extra=fields)
        elif changed is None:
            log.info("the engine is the same, and more is known of it", extra=fields)
        else:
            self.life = self.life.replaced(before, now, self._clock())
            self._metrics.engine_changed(changed.what, time.time())
            level = logging.INFO if changed.what is Change.RESTARTED else logging.WARNING
            told = {"what": changed.what.label, "sentence": f"the engine was {changed.what.value[1]}{changed.words}"}
            extra = {**fields, **told, "fingerprint_before": before.fingerprint}
            log.log(level, "the engine is another one now", extra=extra)
        for warning in profile_warnings(now):
            log.warning(warning)

    def told(self) -> dict[str, Any]:
        """The life as JSON values."""
        return self.life.told(self._clock())

    def warnings(self) -> list[str]:
        """What readiness warns of."""
        return self.life.warnings(self._clock())


async def look_at(engine: LlamaCpp) -> Look:
    """One look at the engine's state; it neither wakes the engine nor keeps it from sleeping."""
    try:
        await engine.discover()
    except Refused as refused:
        reason = refused.refusal.reason
        problem = refused.refusal.message if reason is Reason.ENGINE_UNKNOWN else refused.detail
        return look_refused(reason, problem, refused.trouble)
    if (undersized := engine.refusal_now()) is not None:
        figures = dict(undersized.refusal.figures)
        problem = (
            f"a slot has {figures['n_ctx_slot']} tokens, and context_tokens_min = {figures['context_tokens_min']}"
        )
        return look_refused(undersized.refusal.reason, problem)
    return Look(EngineState.ASLEEP if engine.is_asleep else EngineState.SERVING)


class SlotsLedger(Protocol):
    """What the watch needs of the ledger; see `store.shared_ledger`."""

    @property
    def draining(self) -> asyncio.Event:
        """Set while anything drains."""

    async def observe(self, seen: SlotsSeen) -> Tally | None:
        """A look at the engine's slots; the tally when it was read, before it ended any drain."""

    async def expire(self) -> None:
        """Have time's own work done."""

    async def tally(self) -> Tally | None:
        """The sequences held now, and those granted so far, of all gates; None where nobody knows."""

    def view(self) -> LedgerView | None:
        """What is held and who waits."""


class SlotsWatch:
    """Looks at the slots: often while something drains, now and then for foreign traffic, never two at once.

    For foreign traffic the slots are looked at while the gate holds leases, once more after it granted some, and as
    long as the matter is open. An idle gate does not look: its looks would keep the engine from sleeping, and who
    uses the engine meanwhile harms nobody.

    Args:
        engine: whose slots.
        ledger: what they are compared with.
        clock: seconds.
    """

    def __init__(self, engine: LlamaCpp, ledger: SlotsLedger, clock: Clock) -> None:
        self._engine = engine
        self._ledger = ledger
        self._clock = clock
        self._blind = False
        self._granted_seen = 0
        self.foreign = ForeignWatch()

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            try:
                async with asyncio.timeout(FOREIGN_POLL_S):
                    await self._ledger.draining.wait()
            except TimeoutError:
                if not await self._wants_look():
                    continue
            await self._look()
            await asyncio.sleep(DRAIN_POLL_S)

    async def _wants_look(self) -> bool:
        now = await self._ledger.tally()
        is_used = now is not None and (now.held > 0 or now.granted != self._granted_seen)
        return is_used or self.foreign.wants_look

    async def _look(self) -> None:
        asked = await self._ledger.tally()
        if asked is not None:
            self._granted_seen = asked.granted
        try:
            seen = await self._engine.look()
        except (Refused, LineFailed) as problem:
            if not self._blind:
                log.warning("the slots cannot be looked at, drains wait", extra={"problem": str(problem)})
            self._blind = True
            self._note(self.foreign.unseen(self._clock()))
            await self._ledger.expire()
            return
        self._blind = False
        if seen is None:
            await self._ledger.expire()
            return
        self._compare(len(seen.busy), asked, await self._ledger.observe(seen), seen.asked_at_s)

    def _compare(self, busy: int, asked: Tally | None, answered: Tally | None, asked_at_s: float) -> None:
        if asked is None or answered is None or answered.granted < asked.granted:  # another ledger, or none
            self._note(self.foreign.unseen(self._clock()))
        else:
            self._note(self.foreign.looked(surplus(busy, asked, answered), asked_at_s, self._clock()))

    def _note(self, foreign: ForeignWatch) -> None:
        before, self.foreign = self.foreign, foreign
        if foreign.is_on and not before.is_on:
            log.warning("somebody uses the engine around this gate", extra={"slots": foreign.slots})
        elif before.is_on and not foreign.is_on:
            log.warning("nobody uses the engine around this gate any more", extra={"slots_most": before.most})

    def warning(self) -> str | None:
        """What readiness says of foreign traffic."""
        view = self._ledger.view()
        return self.foreign.warning(self._clock(), 0 if view is None else view.drains_overdue)
