"""Who holds what of the KV cache, who is next, and when what a dead request held is free again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgate.core.ask import Usage
from kvgate.core.claims import Denied, Freed, Lease, LedgerView, Reservation, Ticket, asked_tokens
from kvgate.core.drain import DrainWatch, LeaseFacts
from kvgate.core.fair_queue import Waiting
from kvgate.core.fairness import FairRule, FairView, TenantService, Void, weighted
from kvgate.core.foreign import Tally
from kvgate.core.minute import Charge, Minutes, step_of
from kvgate.core.next_in_line import NextInLine
from kvgate.core.reason import Reason
from kvgate.core.room import Account, Held, Room

__all__ = ["Denied", "Freed", "Lease", "Ledger", "LedgerView", "Reservation", "Ticket", "asked_tokens"]

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvgate.core.drain import SlotsSeen
    from kvgate.core.pool import KvPool

_HOLD_SMOOTHING = 0.2


@dataclass(slots=True)
class Ledger:
    """The rule, for one engine; every method decides at once and returns whom it let in.

    Promises (each a property test): cells held never exceed the pool, sequences never exceed the slots, a
    tenant never exceeds its Quota, a refusal leaves nothing behind, and whatever was granted can be given
    back exactly once. Of those that wait and may go, the tenant with the least service is next
    (`core.fair_queue`), and what is guaranteed to somebody is there when it comes, or as soon as those end to whom
    it was lent.

    Args:
        pool: what the engine can hold.
        drain_max_s: after this long a drain ends although the engine never showed the slot idle.
        rule: prices and bounds of fairness.
        freed: what was given back, to be taken by whoever keeps the bill.
    """

    pool: KvPool
    drain_max_s: float = 120.0
    rule: FairRule = field(default_factory=FairRule)
    freed: list[Freed] = field(default_factory=list)
    _room: Room = field(init=False)
    _line: NextInLine = field(init=False)
    _held: dict[str, Held] = field(default_factory=dict)
    _drains: DrainWatch = field(default_factory=DrainWatch)
    _hold_s: float = 2.0
    _overdue: int = 0
    leases_expired: int = 0
    _granted: int = 0
    _gap_max: int = 0

    def __post_init__(self) -> None:
        self._room = Room(self.pool, self.rule)
        self._line = NextInLine(self._room)

    @property
    def closed(self) -> bool:
        """Whether nobody is let in: what others hold is not known yet."""
        return self._line.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._line.closed = closed

    def follow(self, rule: FairRule) -> None:
        """Prices and bounds are these from now on."""
        self.rule = self._room.rule = rule

    def reserve(self, reservation: Reservation, now_s: float) -> Lease | Ticket | Denied:
        """Take the cells and slots now, or queue, or refuse; check everything first, then take.

        1. What the pool can never hold is told so.
        2. What the tenant's minute does not allow is told when it will.
        3. A spot tenant does not begin to wait while others wait.
        4. It fits, and whoever comes before it may be passed: granted.
        5. The tenant's queue has a place: it waits. What waits counts in the minute, and no more if it leaves.
        """
        if not self._room.can_ever_fit(reservation):  # 1
            return self._denied(reservation, Reason.ENGINE_CHANGED)
        if (over := self._over_minute(reservation, now_s)) is not None:  # 2
            return over
        waiting = Waiting(reservation, now_s, _charge(reservation, now_s))
        if waiting.is_spot and self._line.queue.line[False]:  # 3
            return self._denied(reservation, Reason.SPOT_REFUSED)
        found, passed = self._line.next(waiting)
        if found is waiting and self._line.may_pass(passed):  # 4
            self._minutes_of(reservation.tenant).take(waiting.charge)
            self._line.let_by(passed)
            self._line.queue.pass_through(waiting)
            lease = self._take(waiting, self.pool.cells(reservation.size), now_s)
            self._line.note_clearing(now_s)
            self.tidy()
            return lease
        if self.waiting_of(reservation.tenant) >= reservation.quota.queue_max:  # 5
            return self._denied(reservation, Reason.QUEUE_FULL)
        ahead = len(self._line.queue)
        self._minutes_of(reservation.tenant).take(waiting.charge)
        self._weigh(reservation)
        self._line.queue.lift(waiting)
        self._line.queue.add(waiting)
        self._line.stand(reservation.tenant)
        self._line.begin_clearing(self._line.next()[1])
        self._line.note_clearing(now_s)
        self.tidy()
        return Ticket(reservation.lease_id, ahead)

    def cancel(self, lease_id: str, now_s: float) -> tuple[Lease, ...]:
        """Leave the queue; whoever stood behind may go. Unknown ids are no error."""
        granted = self.promote(now_s) if self.withdraw(lease_id) else ()
        self.tidy()
        return granted

    def hand_over(self, lease_id: str, now_s: float) -> None:
        """The request's bytes go to the engine now: from here on only the engine can tell that it ended."""
        if (held := self._held.get(lease_id)) is not None:
            held.handed_over_at_s = max(now_s, held.handed_over_at_s or now_s)

    def answered(self, lease_id: str, now_s: float) -> tuple[Lease, ...]:
        """The engine has begun to answer: the request certainly sits in a slot, and its prompt is read."""
        before = self._room.prefill_tokens
        self.hear_answer(lease_id, now_s)
        return self.promote(now_s) if self._room.prefill_tokens != before else ()

    def streamed(self, lease_id: str, output_tokens: int, now_s: float) -> None:
        """So much output has come until now: it is charged as far as it was not yet."""
        held = self._held.get(lease_id)
        if held is not None and held.draining_since_s is None and output_tokens > held.streamed_tokens:
            account, before = self._room.accounts[held.waited.tenant], held.filled_tokens
            held.streamed_tokens = output_tokens
            account.filled += held.filled_tokens - before
            self._charge(held, Usage(sum(held.size.distinct), output_tokens), now_s)

    def settle(self, lease_id: str, now_s: float, *, ended: bool, used: Usage | None = None) -> tuple[Lease, ...]:
        """Give back what a lease holds: at once where the engine said that it `ended`, else by draining.

        A lease that was never handed over is free at once, and its tenant is charged as if it had never asked.
        What it `used`, where that is known, corrects the minute and the service; else it is charged what it reserved.
        Settling twice is no error and frees nothing.
        """
        held = self._held.get(lease_id)
        if held is None or held.draining_since_s is not None:
            return ()
        minutes, charge = self._minutes_of(held.waited.tenant), held.waited.charge
        if held.handed_over_at_s is None:
            minutes.give_back(charge)
            self._charge(held, Usage(0, 0), now_s)
        elif used is not None:
            minutes.correct(charge, used.prompt_tokens + used.output_tokens)
            self._charge(held, used, now_s)
        else:
            self.charge_reserved(lease_id, now_s)
        if not ended and held.handed_over_at_s is not None:
            self.drain(lease_id, now_s)
        else:
            self._free(lease_id, now_s)
        granted = self.promote(now_s)
        self.tidy()
        return granted

    def observe(self, seen: SlotsSeen, now_s: float) -> tuple[Lease, ...]:
        """Free the drains that this look at the engine's slots proves to be over."""
        return self.free(self._drains.observe(self.facts(), seen), now_s)

    def free(self, lease_ids: Iterable[str], now_s: float) -> tuple[Lease, ...]:
        """End these drains; what does not drain stays as it is."""
        over = False
        for lease_id in lease_ids:
            held = self._held.get(lease_id)
            if held is not None and held.draining_since_s is not None:
                self._free(lease_id, now_s)
                over = True
        granted = self.promote(now_s) if over else ()
        self.tidy()
        return granted

    def expire(self, now_s: float) -> tuple[Lease, ...]:
        """End the drains that are older than `drain_max_s`; they are counted as overdue."""
        granted = self.promote(now_s) if self.end_overdue(now_s) else ()
        self.tidy()
        return granted

    def resize(self, pool: KvPool, now_s: float) -> tuple[Lease | Denied, ...]:
        """The engine is another one now. What is held stays counted; who can never fit is told so.

        Cells of what is held keep the figure they were granted with: they end with the old engine's sockets.
        """
        self.pool = self._room.pool = pool
        lost = [w.reservation for w in self._line.queue.in_order() if not self._room.can_ever_fit(w.reservation)]
        for reservation in lost:
            self.withdraw(reservation.lease_id)
        self._room.guarantees.size(pool)
        self._line.stand_all()
        told: list[Lease | Denied] = [self._denied(reservation, Reason.ENGINE_CHANGED) for reservation in lost]
        told += self.promote(now_s)
        self.tidy()
        return tuple(told)

    def guarantee(self, ratios_ppm: Mapping[str, int], now_s: float) -> tuple[Lease, ...]:
        """These tenants, and no others, have these shares of the pool, in millionths, from now on."""
        self._room.guarantees.ratios_ppm = dict(ratios_ppm)
        self._room.guarantees.size(self.pool)
        self._line.stand_all()
        granted = self.promote(now_s)
        self.tidy()
        return granted

    # -- steps of a step: they let nobody in, `promote` does when all are taken, and `tidy` ends the step

    def withdraw(self, lease_id: str) -> bool:
        """Take a request out of the queue as if it had never asked; whether it was there."""
        waiting = self._line.queue.remove(lease_id)
        if waiting is not None:
            self._minutes_of(waiting.tenant).give_back(waiting.charge)
            self._line.stand(waiting.tenant)
        return waiting is not None

    def take_back(self, lease_id: str, now_s: float) -> None:
        """A grant that nobody claimed: free as if it had never been given."""
        held = self._held[lease_id]
        self._minutes_of(held.waited.tenant).give_back(held.waited.charge)
        self._charge(held, Usage(0, 0), now_s)
        self._give_back(lease_id)

    def hear_answer(self, lease_id: str, now_s: float) -> None:
        """The part of `answered` that lets nobody in."""
        if (held := self._held.get(lease_id)) is not None:
            held.answered_at_s = min(now_s, now_s if held.answered_at_s is None else held.answered_at_s)
            self._room.prefill_tokens -= held.prefill_tokens
            held.prefill_tokens = 0

    def charge_reserved(self, lease_id: str, now_s: float) -> None:
        """What it cost nobody will tell: what it reserved stays charged."""
        held = self._held[lease_id]
        size = held.size
        self._charge(held, Usage(sum(size.distinct), size.sequences * size.output_tokens), now_s)

    def drain(self, lease_id: str, now_s: float) -> None:
        """From now on only the engine can tell that this lease is over; whoever may have handed it over has."""
        held = self._held[lease_id]
        account = self._room.accounts[held.waited.tenant]
        account.add(held, -1)
        held.draining_since_s = now_s
        account.add(held, 1)
        held.handed_over_at_s = now_s if held.handed_over_at_s is None else held.handed_over_at_s

    def end_overdue(self, now_s: float) -> bool:
        """Free the drains that are older than `drain_max_s`; whether there was one."""
        late = [
            lease_id
            for lease_id, held in self._held.items()
            if held.draining_since_s is not None and now_s - held.draining_since_s >= self.drain_max_s
        ]
        for lease_id in late:
            self._free(lease_id, now_s)
        self._overdue += len(late)
        return bool(late)

    def restore(self, reservation: Reservation, cells: int, now_s: float) -> None:
        """Count a lease that was granted before the ledger forgot it: whatever fits, it is held."""
        self.withdraw(reservation.lease_id)
        waiting = Waiting(reservation, now_s, Charge(step_of(now_s), 0, 0))
        self._line.queue.pass_through(waiting)
        self._take(waiting, cells, now_s)

    def promote(self, now_s: float) -> tuple[Lease, ...]:
        """Let in whoever is next as long as there is room for it."""
        granted: list[Lease] = []
        while True:
            found, passed = self._line.next()
            if found is None:
                break
            if not self._line.may_pass(passed):
                self._line.begin_clearing(passed)
                break
            self._line.let_by(passed)
            self._line.queue.remove(found.reservation.lease_id)
            granted.append(self._take(found, self.pool.cells(found.reservation.size), now_s))
        self._line.note_clearing(now_s)
        return tuple(granted)

    def tidy(self) -> None:
        """The end of a step: what nobody needs is forgotten, and where nobody is here all begin alike."""
        if self._held or len(self._line.queue):
            self._line.queue.forget(self._is_here)
            self._gap_max = max(self._gap_max, self._line.queue.gap())
        else:
            self._line.queue.forget_all()
            self._gap_max = 0
            self._line.voids.clear()

    # -- what is known

    def is_draining(self) -> bool:
        """Whether anything waits for the engine to show an idle slot."""
        return any(held.draining_since_s is not None for held in self._held.values())

    def is_clearing(self) -> bool:
        """Whether somebody who would fit is kept out for the sake of one that was passed often enough."""
        return self._line.keeps_out

    def retry_after_s(self) -> float:
        """Seconds until a slot is likely free: the usual hold, times the rounds that the queue needs."""
        return self._hold_s * (1 + len(self._line.queue) / self.pool.slots)

    def waiting_of(self, tenant: str) -> int:
        """How many of this tenant's requests wait."""
        return self._line.queue.waiting_of(tenant)

    def tally(self) -> Tally:
        """The sequences held now, and those granted since start: what busy slots are compared with."""
        return Tally(self._room.sequences, self._granted)

    def minute_of(self, tenant: str, now_s: float) -> tuple[int, int]:
        """Requests and tokens that count in this tenant's minute."""
        minutes = self._minutes_of(tenant)
        return minutes.requests.total(now_s), minutes.tokens.total(now_s)

    def counter_of(self, tenant: str) -> int:
        """The tenant's virtual token counter, in thousandths."""
        return self._line.queue.counters.get(tenant, 0)

    def lease(self, lease_id: str) -> Lease | None:
        """The lease of this id while it runs."""
        held = self._held.get(lease_id)
        if held is None or held.draining_since_s is not None:
            return None
        queued_s = held.granted_at_s - held.waited.since_s
        return Lease(lease_id, held.cells, held.size.sequences, queued_s)

    def holds(self, lease_id: str) -> bool:
        """Whether anything is held under this id, running or draining."""
        return lease_id in self._held

    def waits(self, lease_id: str) -> bool:
        """Whether this id waits."""
        return lease_id in self._line.queue

    def facts(self) -> list[LeaseFacts]:
        """What is known of every lease that is held."""
        return [
            LeaseFacts.of_size(lease_id, held.size, held.handed_over_at_s, held.answered_at_s, held.draining_since_s)
            for lease_id, held in self._held.items()
        ]

    def view(self) -> LedgerView:
        """What is held and who waits, now."""
        accounts = sorted(self._room.accounts.items())
        waiting = [(name, self.waiting_of(name)) for name, _ in accounts]
        return LedgerView(
            pool=self.pool,
            held_tokens=self._room.cells,
            running=sum(one.running for _, one in accounts),
            draining=sum(one.draining for _, one in accounts),
            waiting=len(self._line.queue),
            running_by_tenant=tuple((name, one.running) for name, one in accounts if one.running),
            waiting_by_tenant=tuple((name, number) for name, number in waiting if number),
            held_tokens_by_tenant=tuple((name, one.cells) for name, one in accounts if one.running or one.draining),
            drains_overdue=self._overdue,
            leases_expired=self.leases_expired,
        )

    def fair_view(self, now_s: float) -> FairView:
        """How fair it is, now."""
        here = sorted(name for name in self._room.accounts if self._is_here(name))
        return FairView(
            tenants=tuple(self._service_of(name, now_s) for name in here),
            gap_milli=self._line.queue.gap(),
            gap_max_milli=self._gap_max,
            bypasses=self._line.bypasses,
            drains=self._line.clearings,
            drain_idle_s=self._line.clearing_idle_s,
            prefill_tokens=self._room.prefill_tokens,
            voids=frozenset(self._line.voids),
            now_s=now_s,
        )

    # -- parts

    def _is_here(self, tenant: str) -> bool:
        account = self._room.accounts.get(tenant)
        return self.waiting_of(tenant) > 0 or (account is not None and account.running + account.draining > 0)

    def _over_minute(self, reservation: Reservation, now_s: float) -> Denied | None:
        quota, minutes = reservation.quota, self._minutes_of(reservation.tenant)
        requests_s = minutes.requests.wait_s(1, quota.requests_per_minute, now_s)
        tokens_s = minutes.tokens.wait_s(asked_tokens(reservation.size), quota.tokens_per_minute, now_s)
        if not requests_s and not tokens_s:
            return None
        reason = Reason.REQUESTS_PER_MINUTE if requests_s else Reason.TOKENS_PER_MINUTE
        waiting = self.waiting_of(reservation.tenant)
        return Denied(reservation.lease_id, reason, waiting, max(requests_s, tokens_s))

    # -- take, charge and free

    def _weigh(self, reservation: Reservation) -> Account:
        """Its tenant's account, with the weight that it has by now."""
        account = self._room.account(reservation.tenant)
        account.weight_milli = reservation.share.weight_milli
        return account

    def _minutes_of(self, tenant: str) -> Minutes:
        return self._room.account(tenant).minutes

    def _take(self, waiting: Waiting, cells: int, now_s: float) -> Lease:
        reservation, size = waiting.reservation, waiting.reservation.size
        held = Held(waiting, cells, now_s, prefill_tokens=sum(size.distinct))
        self._held[reservation.lease_id] = held
        self._granted += size.sequences
        self._weigh(reservation)
        self._room.add(held, 1)
        if self._room.guarantees.parts or waiting.is_spot:
            self._line.voids.add(Void.TIERS)
        self._charge(held, Usage(sum(size.distinct), 0), now_s)
        self._line.stand(waiting.tenant)
        return Lease(reservation.lease_id, cells, size.sequences, now_s - waiting.since_s)

    def _charge(self, held: Held, usage: Usage, now_s: float) -> None:
        """Its service is now that of this usage: charge the difference to what was charged."""
        reservation = held.waited.reservation
        service, weight = self.rule.service_milli(usage), reservation.share.weight_milli
        change = service - held.service_milli
        self._line.queue.charge(reservation.tenant, weighted(service, weight) - weighted(held.service_milli, weight))
        if change:
            self._minutes_of(reservation.tenant).service.add(step_of(now_s), change)
        if usage.cached_tokens and self.rule.cached_input_price_milli != self.rule.input_price_milli:
            self._line.voids.add(Void.CACHE_DISCOUNT)
        held.service_milli = service

    def _free(self, lease_id: str, now_s: float) -> None:
        held = self._held[lease_id]
        self._hold_s += _HOLD_SMOOTHING * (now_s - held.granted_at_s - self._hold_s)
        self.freed.append(Freed(held.waited.tenant, held.cells, now_s - held.granted_at_s))
        self._give_back(lease_id)

    def _give_back(self, lease_id: str) -> None:
        held = self._held.pop(lease_id)
        self._room.add(held, -1)
        self._line.stand(held.waited.tenant)

    def _denied(self, reservation: Reservation, reason: Reason) -> Denied:
        waiting = self.waiting_of(reservation.tenant)
        return Denied(reservation.lease_id, reason, waiting, self.retry_after_s())

    def _service_of(self, name: str, now_s: float) -> TenantService:
        account, first = self._room.accounts[name], self._line.queue.first_of(name)
        return TenantService(
            name,
            weight_milli=account.weight_milli,
            counter_milli=self.counter_of(name),
            service_milli=account.minutes.service.total(now_s),
            filled_tokens=account.filled,
            waiting=self.waiting_of(name),
            oldest_since_s=None if first is None else first.since_s,
        )


def _charge(reservation: Reservation, now_s: float) -> Charge:
    quota = reservation.quota
    return Charge(
        step_of(now_s),
        requests=int(quota.requests_per_minute is not None),
        tokens=0 if quota.tokens_per_minute is None else asked_tokens(reservation.size),
    )
