"""The ledger that many gates share: one gate's side of it, in front of the scripts at the store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvgate.core.drain import DrainWatch, SlotsSeen
from kvgate.core.fairness import FairRule
from kvgate.core.ledger import Denied, Lease
from kvgate.core.reason import Reason
from kvgate.ports import LineFailed, nothing_yet
from kvgate.store.errors import StoreUnavailable
from kvgate.store.grants import Grants
from kvgate.store.in_hand import Hand, Settled
from kvgate.store.ledger_link import LedgerLink
from kvgate.store.ledger_scripts import LedgerScripts, fair_view_of, reservation_json, view_of
from kvgate.store.membership import Membership
from kvgate.store.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.ask import Usage
    from kvgate.core.fairness import FairView
    from kvgate.core.foreign import Tally
    from kvgate.core.ledger import Freed, LedgerView, Reservation
    from kvgate.core.pool import KvPool
    from kvgate.ports import Clock
    from kvgate.store.client import StoreClient

POLL_S = 1.0
"""How often one who waits asks, in case its grant's push was lost."""

POLLS_PER_S_MAX = 50
"""However many wait, this gate asks no more often for all of them together."""

CHARGE_S = 1.0
"""How often output that streams is charged, all of this gate's in one step."""

PROBE_S = 0.2
PATIENCE_S = 1.0
"""How long a request waits for a store that has just gone out, before the outage decides about it."""

_REASONS = {reason.label: reason for reason in Reason}


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What the operator says of the shared ledger.

    Args:
        lease_ttl_s: how long a lease outlives the last that was heard of its gate.
        drain_max_s: see `core.ledger.Ledger`.
        local: in an outage, go by what this gate held; else refuse.
        reserve_slots: see `store.outage.Outage`.
        rule: prices and bounds of fairness.
    """

    lease_ttl_s: float = 15.0
    drain_max_s: float = 120.0
    local: bool = True
    reserve_slots: int = 0
    rule: FairRule = field(default_factory=FairRule)


def _nobody_bills(_: Freed) -> None:
    """What was held is told to nobody."""


class SharedLedger:
    """Implements `ports.LedgerPort` over the scripts; it decides nothing, but in an outage.

    A reserve and a settle are one call each. What happens between is remembered here and told with the next
    renewal. `run` must run beside it.

    Args:
        client: of the store.
        engine: the engine's id: gates that name it alike share its ledger.
        clock: seconds.
        settings: the operator's.
        on_freed: told of all that is given back in this gate's steps, whichever gate held it.
    """

    def __init__(
        self,
        client: StoreClient,
        engine: str,
        clock: Clock,
        settings: SharedSettings,
        on_freed: Callable[[Freed], None] = _nobody_bills,
    ) -> None:
        self.link = LedgerLink(client, LedgerScripts(client, engine), clock, on_freed)
        self._clock = clock
        self._settings = settings
        self._member = Membership(self.link, clock, settings.lease_ttl_s, settings.drain_max_s, settings.rule)
        self.draining = self._member.draining
        """Set while anything drains, of whatever gate: the watcher of the engine's slots sleeps on it."""
        self._watch = DrainWatch()
        self._outage: Outage | None = None
        self._view: LedgerView | None = None
        self._fair: FairView | None = None
        self._answered: list[Hand] = []
        self._first_output = asyncio.Event()
        self._closed: Reason | None = None
        self._grants = Grants(client, self.link, self._member.gate, self._member.pushed)

    @property
    def other_pool(self) -> KvPool | None:
        """The pool that is guarded, where it is not the one that this gate would guard."""
        return self._member.other_pool

    @property
    def rule(self) -> FairRule:
        """What the ledger goes by: that of the gate that joined last."""
        return self._member.rule_in_force

    async def run(self) -> None:
        """Keep what this gate holds alive, hear of grants, and come back after an outage; until cancelled."""
        beside = [asyncio.create_task(self._grants.listen()), asyncio.create_task(self._tell_answers())]
        renewed_s = self._clock()
        try:
            while True:
                for task in beside:
                    if task.done():
                        task.result()  # a defect: it runs until it is cancelled
                if self.link.out_since_s is not None:
                    self._begin_outage()
                    with contextlib.suppress(StoreUnavailable):
                        await self._come_back()
                    if self.link.out_since_s is not None:
                        await asyncio.sleep(PROBE_S)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(self._settings.lease_ttl_s / 3, CHARGE_S)):
                        await self.link.out.wait()
                is_due = self._clock() >= renewed_s + self._settings.lease_ttl_s / 3 - CHARGE_S / 2
                if self._member.joined and (is_due or self._member.has_output()):
                    renewed_s = self._clock()
                    with contextlib.suppress(StoreUnavailable):
                        await self._member.renew()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)

    async def _tell_answers(self) -> None:
        """Tell at once whose prompt is read, where prompts that are being read keep others out; until cancelled."""
        while True:
            await self._first_output.wait()
            self._first_output.clear()
            hands, self._answered = self._answered, []
            with contextlib.suppress(StoreUnavailable):
                held = [hand.told(self._clock()) for hand in hands]
                self._member.wake_granted(await self.link.step("answered", held=held))

    async def leave(self) -> None:
        """This gate goes: whatever waits is dropped at once."""
        with contextlib.suppress(StoreUnavailable):
            await self._member.send_settled()
            if self._member.joined:
                await self.link.step("leave", gate=self._member.gate)

    # -- the port

    async def reserve(self, reservation: Reservation, pool: KvPool) -> Lease | Denied:
        """Wait for room, at most `queue_timeout_s`; the settle that follows whatever comes leaves nothing behind."""
        asked_at_s = self._clock()
        deadline_s = asked_at_s + reservation.quota.queue_timeout_s
        hand = self._member.in_hand[reservation.lease_id] = Hand(reservation)
        while True:
            try:
                await self._member.sized(pool)
                found = await self._reserve(hand, deadline_s)
            except StoreUnavailable:
                again = await self._reserve_in_outage(hand, deadline_s)
                if again is None:
                    continue
                found = again
            if isinstance(found, Lease) and hand.waited:
                return replace(found, queued_s=self._clock() - asked_at_s)
            return found

    def hand_over(self, lease_id: str, streamed: Callable[[], int] = nothing_yet) -> None:
        """See `core.ledger.Ledger.hand_over`.

        Raises:
            LineFailed: the lease ran out before it was used, as on a machine that stood still; somebody else may
                hold its KV by now.
        """
        if (hand := self._member.in_hand.get(lease_id)) is None:
            return
        if self._clock() >= hand.good_until_s:
            raise LineFailed("the lease ran out while this gate stood still", sent=False)
        hand.handed_s, hand.streamed = self._clock(), streamed
        if self._outage is not None:
            self._outage.ledger.hand_over(lease_id)

    def answered(self, lease_id: str) -> None:
        """See `core.ledger.Ledger.answered`."""
        if (hand := self._member.in_hand.get(lease_id)) is not None and hand.answered_s is None:
            hand.answered_s = self._clock()
            if self.rule.prefill_tokens_max is not None:
                self._answered.append(hand)
                self._first_output.set()
            if self._outage is not None:
                self._outage.ledger.answered(lease_id)

    async def settle(self, lease_id: str, *, ended: bool, used: Usage | None = None) -> None:
        """See `core.ledger.Ledger.settle`; where the store is out it is told when it is back."""
        if (hand := self._member.in_hand.get(lease_id)) is None:
            return
        if hand.asking is not None:
            await asyncio.wait([hand.asking])
            _hear(hand.asking)
        async with self._member.telling:  # what is being registered must be known before it is over
            self._member.in_hand.pop(lease_id, None)
        if self._outage is not None:
            await self._outage.ledger.settle(lease_id, ended=ended)
            self._member.show_drains(self._outage.ledger.draining.is_set())
        if not hand.at_store and hand.lease is None:
            return
        self._member.settled[lease_id] = settled = Settled(hand, ended, used)
        with contextlib.suppress(StoreUnavailable):
            await self._member.send_one(settled)

    # -- what the app tells and asks

    async def observe(self, seen: SlotsSeen) -> Tally | None:
        """A look at the engine's slots: ends the drains, of any gate, that it proves to be over.

        What it gives is the `tally` from before they ended.
        """
        if self._outage is not None:
            self._outage.ledger.observe(seen)
            self._outage.ledger.expire()
            self._member.show_drains(self._outage.ledger.draining.is_set())
            return None
        if not self._member.joined:
            return None
        tally = None
        with contextlib.suppress(StoreUnavailable):
            facts = await self._member.renew()
            tally = self._member.tally
            at_server = replace(seen, asked_at_s=self.link.server_time_s(seen.asked_at_s))
            if over := self._watch.observe(facts, at_server):
                self._member.wake_granted(await self.link.step("free", ids=list(over)))
        return tally

    async def expire(self) -> None:
        """Have time's own work done: leases that ran out, drains that lasted too long."""
        if self._outage is not None:
            self._outage.ledger.expire()
            self._member.show_drains(self._outage.ledger.draining.is_set())
            return
        with contextlib.suppress(StoreUnavailable):
            await self._member.renew()

    def turn_away(self, reason: Reason) -> None:
        """Every request of this gate that waits is refused with this reason; what is held stays counted."""
        for hand in self._member.in_hand.values():
            if hand.lease is None:
                hand.refused = reason
                hand.woken.set()
        if self._outage is not None:
            self._outage.ledger.turn_away(reason)

    def close_queue(self, reason: Reason) -> None:
        """Nobody of this gate waits any more: who does, and who would, is refused with this reason."""
        self._closed = reason
        self.turn_away(reason)
        if self._outage is not None:
            self._outage.ledger.close_queue(reason)

    async def tally(self) -> Tally | None:
        """The sequences that all gates hold now, and those granted since the ledger was made.

        None where only this gate's own are known.
        """
        if self._outage is None and self._member.joined:
            with contextlib.suppress(StoreUnavailable):
                await self._member.renew()
                return self._member.tally
        return None

    async def resize(self, pool: KvPool) -> None:
        """The engine as this gate sees it now: guard this pool, where this gate has come to see another one."""
        with contextlib.suppress(StoreUnavailable):
            await self._member.sized(pool)

    async def guarantee(self, ratios_ppm: dict[str, int]) -> None:
        """These tenants, and no others, have these shares of the pool from now on (`core.guarantee`)."""
        with contextlib.suppress(StoreUnavailable):
            await self._member.guarantee(ratios_ppm)

    async def refresh(self) -> None:
        """Bring `view` up to date, if the store can."""
        with contextlib.suppress(StoreUnavailable):
            if self._member.joined:
                found = await self.link.step("view")
                self._view, self._fair = view_of(found), fair_view_of(found)

    def view(self) -> LedgerView | None:
        """What is held and who waits as of the last `refresh`; in an outage, at this gate alone."""
        return self._view if self._outage is None else self._outage.ledger.view()

    def fair(self) -> FairView | None:
        """How fair it is as of the last `refresh`; None in an outage."""
        return self._fair if self._outage is None else None

    @property
    def is_out(self) -> bool:
        """Whether the store is out."""
        return self.link.out_since_s is not None

    @property
    def outage_pool(self) -> KvPool | None:
        """In an outage: what this gate goes by; None where it lets nobody in."""
        return None if self._outage is None else self._outage.pool

    # -- at the store

    async def _reserve(self, hand: Hand, deadline_s: float) -> Lease | Denied:
        lease_id, sent_s = hand.reservation.lease_id, self._clock()
        hand.at_store = True
        found = await self._ask(hand, "reserve", gate=self._member.gate, **reservation_json(hand.reservation))
        if "denied" in found:
            hand.at_store = False
            retry_s = (found.get("wait") or found["retry"]) / 1000
            return Denied(lease_id, _REASONS[found["denied"]], found["waiting"], retry_s)
        if "lease" in found:
            return self._leased(hand, found["lease"], sent_s)
        return await self._wait(hand, deadline_s)

    async def _wait(self, hand: Hand, deadline_s: float) -> Lease | Denied:
        """Until it is granted, sent away or late; asks now and then, in case nobody told."""
        lease_id, hand.waited = hand.reservation.lease_id, True
        while (refused := hand.refused or self._closed) is None:
            left_s = deadline_s - self._clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(min(self._poll_s(), left_s), 0)):
                    await hand.woken.wait()
            hand.woken.clear()
            if hand.refused is not None:
                continue
            if self._clock() >= deadline_s:
                found = await self._ask(hand, "cancel", ids=[lease_id], tenant=hand.reservation.tenant)
                return Denied(lease_id, Reason.QUEUE_TIMEOUT, found["waiting"], found["retry"] / 1000)
            sent_s = self._clock()
            found = await self._ask(hand, "claim", id=lease_id)
            if "lease" in found:
                return self._leased(hand, found["lease"], sent_s)
            if "waiting" not in found:  # its grant was not claimed in time, or this gate counted as lost
                return await self._reserve(hand, deadline_s)
        return Denied(lease_id, refused, 0, PATIENCE_S)

    def _poll_s(self) -> float:
        return max(POLL_S, len(self._member.in_hand) / POLLS_PER_S_MAX)

    def _leased(self, hand: Hand, found: dict[str, Any], sent_s: float) -> Lease:
        hand.lease = Lease(hand.reservation.lease_id, found["cells"], found["sequences"], 0.0)
        hand.good_until_s = sent_s + self._settings.lease_ttl_s
        return hand.lease

    async def _ask(self, hand: Hand, step: str, **ask: Any) -> dict[str, Any]:
        """A step that goes to its end although who asked may leave: only then is it known what to settle."""
        hand.asking = asyncio.create_task(self.link.step(step, **ask))
        found = await asyncio.shield(hand.asking)
        self._member.wake_granted(found)
        return found

    # -- outages

    def _begin_outage(self) -> None:
        if self._outage is None and self._settings.local and self._member.pool is not None:
            held = [hand for hand in self._member.in_hand.values() if hand.lease is not None]
            until_s = min((hand.good_until_s for hand in held), default=self._clock())
            settings = self._settings
            self._outage = Outage(
                self._clock,
                settings.drain_max_s,
                pool=self._member.pool,
                held=held,
                until_s=until_s,
                reserve_slots=settings.reserve_slots,
            )

    async def _reserve_in_outage(self, hand: Hand, deadline_s: float) -> Lease | Denied | None:
        """What this gate may do alone; None where the store is back meanwhile."""
        out_since_s = self.link.out_since_s
        patience_s = PATIENCE_S if out_since_s is None else out_since_s + PATIENCE_S - self._clock()
        if patience_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.link.back.wait()
        if self.link.out_since_s is None:
            return None
        self._begin_outage()
        outage, lease_id = self._outage, hand.reservation.lease_id
        if outage is None:
            return Denied(lease_id, Reason.STORE_OUT, 0, PATIENCE_S)
        found = await outage.reserve(hand.reservation, max(deadline_s - self._clock(), 0))
        if isinstance(found, Lease):
            hand.lease, hand.good_until_s = found, outage.good_until_s
        elif self._outage is not outage:
            return None
        return found

    async def _come_back(self) -> None:
        """The store may be another one, or have forgotten: first tell it what this gate holds, then go on."""
        self.link.forget_time()
        outage = self._outage
        if self._member.pool is None:
            await self.link.server()
        else:
            async with self._member.telling:
                await self._member.join(self._member.pool, knew=self._member.joined)
            if outage is not None:
                for lease_id, settled in self._member.settled.items():
                    settled.ended |= outage.saw_the_end_of(lease_id)
            await self._member.register()
        self._outage = None
        self.link.recover()
        if outage is not None:
            outage.end()
        await self._member.send_settled()
        if self._member.joined:
            await self._member.renew()


def engine_id(url: str) -> str:
    """What gates call the engine at this URL; those that spell it alike share its ledger."""
    normal = url.rstrip("/").replace("//localhost", "//127.0.0.1")
    return hashlib.sha256(normal.encode()).hexdigest()[:16]


def _hear(task: asyncio.Task[Any]) -> None:
    """Look at how a step ended that nobody waited for: its failure was told where it happened."""
    if not task.cancelled():
        task.exception()
