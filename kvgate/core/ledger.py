"""Who holds what of the KV cache, who is next, and when what a dead request held is free again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgate.core.ask import Usage
from kvgate.core.drain import DrainWatch, LeaseFacts
from kvgate.core.fair_queue import FairQueue, Waiting
from kvgate.core.fairness import MILLI, FairRule, FairView, TenantService, Void, weighted
from kvgate.core.foreign import Tally
from kvgate.core.guarantee import Guarantees, Part
from kvgate.core.minute import Charge, Minutes, step_of
from kvgate.core.reason import Reason
from kvgate.core.tenant import Share, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvgate.core.ask import Size
    from kvgate.core.drain import SlotsSeen
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Quota

_HOLD_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one request wants to hold; its id is minted by the gate before it asks."""

    lease_id: str
    tenant: str
    quota: Quota
    size: Size
    share: Share = field(default_factory=Share)


@dataclass(frozen=True, slots=True)
class Lease:
    """A grant: these cells and sequences are held until settled. `queued_s` is how long it waited."""

    lease_id: str
    cells: int
    sequences: int
    queued_s: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue; `ahead` requests stand before it."""

    lease_id: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Denied:
    """No place: the queue or the minute is full, a spot tenant is not to be before others, or the engine has changed.

    ENGINE_CHANGED where the pool can no longer hold it at all.
    """

    lease_id: str
    reason: Reason
    waiting: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger at one moment, for metrics, readiness and people; numbers are sequences and cells."""

    pool: KvPool
    held_tokens: int
    running: int
    draining: int
    waiting: int
    running_by_tenant: tuple[tuple[str, int], ...]
    waiting_by_tenant: tuple[tuple[str, int], ...]
    held_tokens_by_tenant: tuple[tuple[str, int], ...]
    drains_overdue: int
    leases_expired: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """What somebody held, for how long: the KV bill is made of these."""

    tenant: str
    cells: int
    held_s: float


@dataclass(slots=True)
class _Held:
    waited: Waiting
    cells: int
    granted_at_s: float
    handed_over_at_s: float | None = None
    answered_at_s: float | None = None
    draining_since_s: float | None = None
    prefill_tokens: int = 0
    streamed_tokens: int = 0
    service_milli: int = 0

    @property
    def size(self) -> Size:
        return self.waited.reservation.size

    @property
    def filled_tokens(self) -> int:
        return min(sum(self.size.distinct) + self.streamed_tokens, self.cells)


@dataclass(slots=True)
class _Account:
    """What the ledger keeps of one tenant, in sequences and cells."""

    running: int = 0
    draining: int = 0
    cells: int = 0
    filled: int = 0
    weight_milli: int = MILLI
    minutes: Minutes = field(default_factory=Minutes)

    def add(self, held: _Held, sign: int) -> None:
        sequences = sign * held.size.sequences
        if held.draining_since_s is None:
            self.running += sequences
        else:
            self.draining += sequences
        self.cells += sign * held.cells
        self.filled += sign * held.filled_tokens


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
        closed: nobody is let in: what others hold is not known yet.
        rule: prices and bounds of fairness.
        freed: what was given back, to be taken by whoever keeps the bill.
    """

    pool: KvPool
    drain_max_s: float = 120.0
    closed: bool = False
    rule: FairRule = field(default_factory=FairRule)
    freed: list[Freed] = field(default_factory=list)
    _guarantees: Guarantees = field(default_factory=Guarantees)
    _held: dict[str, _Held] = field(default_factory=dict)
    _queue: FairQueue = field(default_factory=FairQueue)
    _accounts: dict[str, _Account] = field(default_factory=dict)
    _drains: DrainWatch = field(default_factory=DrainWatch)
    _hold_s: float = 2.0
    _overdue: int = 0
    leases_expired: int = 0
    _granted: int = 0
    _sequences: int = 0
    _cells: int = 0
    _prefill_tokens: int = 0
    _clearing: str | None = None
    _kept_out_since_s: float | None = None
    _bypasses: int = 0
    _clearings: int = 0
    _clearing_idle_s: float = 0.0
    _gap_max: int = 0
    _voids: set[Void] = field(default_factory=set)

    def reserve(self, reservation: Reservation, now_s: float) -> Lease | Ticket | Denied:
        """Take the cells and slots now, or queue, or refuse; check everything first, then take.

        1. What the pool can never hold is told so.
        2. What the tenant's minute does not allow is told when it will.
        3. A spot tenant does not begin to wait while others wait.
        4. It fits, and whoever comes before it may be passed: granted.
        5. The tenant's queue has a place: it waits. What waits counts in the minute, and no more if it leaves.
        """
        if not self._can_ever_fit(reservation):  # 1
            return self._denied(reservation, Reason.ENGINE_CHANGED)
        if (over := self._over_minute(reservation, now_s)) is not None:  # 2
            return over
        waiting = Waiting(reservation, now_s, _charge(reservation, now_s))
        if waiting.is_spot and self._queue.line[False]:  # 3
            return self._denied(reservation, Reason.SPOT_REFUSED)
        found, passed = self._next(waiting)
        if found is waiting and self._may_pass(passed):  # 4
            self._minutes_of(reservation.tenant).take(waiting.charge)
            self._pass(passed)
            self._queue.pass_through(waiting)
            lease = self._take(waiting, self.pool.cells(reservation.size), now_s)
            self._note_clearing(now_s)
            self.tidy()
            return lease
        if self.waiting_of(reservation.tenant) >= reservation.quota.queue_max:  # 5
            return self._denied(reservation, Reason.QUEUE_FULL)
        ahead = len(self._queue)
        self._minutes_of(reservation.tenant).take(waiting.charge)
        self._weigh(reservation)
        self._queue.lift(waiting)
        self._queue.add(waiting)
        self._stand(reservation.tenant)
        self._begin_clearing(self._next()[1])
        self._note_clearing(now_s)
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
        before = self._prefill_tokens
        self.hear_answer(lease_id, now_s)
        return self.promote(now_s) if self._prefill_tokens != before else ()

    def streamed(self, lease_id: str, output_tokens: int, now_s: float) -> None:
        """So much output has come until now: it is charged as far as it was not yet."""
        held = self._held.get(lease_id)
        if held is not None and held.draining_since_s is None and output_tokens > held.streamed_tokens:
            account, before = self._accounts[held.waited.tenant], held.filled_tokens
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
        self.pool = pool
        lost = [w.reservation for w in self._queue.in_order() if not self._can_ever_fit(w.reservation)]
        for reservation in lost:
            self.withdraw(reservation.lease_id)
        self._guarantees.size(pool)
        self._stand_all()
        told: list[Lease | Denied] = [self._denied(reservation, Reason.ENGINE_CHANGED) for reservation in lost]
        told += self.promote(now_s)
        self.tidy()
        return tuple(told)

    def guarantee(self, ratios_ppm: Mapping[str, int], now_s: float) -> tuple[Lease, ...]:
        """These tenants, and no others, have these shares of the pool, in millionths, from now on."""
        self._guarantees.ratios_ppm = dict(ratios_ppm)
        self._guarantees.size(self.pool)
        self._stand_all()
        granted = self.promote(now_s)
        self.tidy()
        return granted

    # -- steps of a step: they let nobody in, `promote` does when all are taken, and `tidy` ends the step

    def withdraw(self, lease_id: str) -> bool:
        """Take a request out of the queue as if it had never asked; whether it was there."""
        waiting = self._queue.remove(lease_id)
        if waiting is not None:
            self._minutes_of(waiting.tenant).give_back(waiting.charge)
            self._stand(waiting.tenant)
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
            self._prefill_tokens -= held.prefill_tokens
            held.prefill_tokens = 0

    def charge_reserved(self, lease_id: str, now_s: float) -> None:
        """What it cost nobody will tell: what it reserved stays charged."""
        held = self._held[lease_id]
        size = held.size
        self._charge(held, Usage(sum(size.distinct), size.sequences * size.output_tokens), now_s)

    def drain(self, lease_id: str, now_s: float) -> None:
        """From now on only the engine can tell that this lease is over; whoever may have handed it over has."""
        held = self._held[lease_id]
        account = self._accounts[held.waited.tenant]
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
        self._queue.pass_through(waiting)
        self._take(waiting, cells, now_s)

    def promote(self, now_s: float) -> tuple[Lease, ...]:
        """Let in whoever is next as long as there is room for it."""
        granted: list[Lease] = []
        while True:
            found, passed = self._next()
            if found is None:
                break
            if not self._may_pass(passed):
                self._begin_clearing(passed)
                break
            self._pass(passed)
            self._queue.remove(found.reservation.lease_id)
            granted.append(self._take(found, self.pool.cells(found.reservation.size), now_s))
        self._note_clearing(now_s)
        return tuple(granted)

    def tidy(self) -> None:
        """The end of a step: what nobody needs is forgotten, and where nobody is here all begin alike."""
        if self._held or len(self._queue):
            self._queue.forget(self._is_here)
            self._gap_max = max(self._gap_max, self._queue.gap())
        else:
            self._queue.forget_all()
            self._gap_max = 0
            self._voids.clear()

    # -- what is known

    def is_draining(self) -> bool:
        """Whether anything waits for the engine to show an idle slot."""
        return any(held.draining_since_s is not None for held in self._held.values())

    def is_clearing(self) -> bool:
        """Whether somebody who would fit is kept out for the sake of one that was passed often enough."""
        return self._kept_out_since_s is not None

    def retry_after_s(self) -> float:
        """Seconds until a slot is likely free: the usual hold, times the rounds that the queue needs."""
        return self._hold_s * (1 + len(self._queue) / self.pool.slots)

    def waiting_of(self, tenant: str) -> int:
        """How many of this tenant's requests wait."""
        return self._queue.waiting_of(tenant)

    def tally(self) -> Tally:
        """The sequences held now, and those granted since start: what busy slots are compared with."""
        return Tally(self._sequences, self._granted)

    def minute_of(self, tenant: str, now_s: float) -> tuple[int, int]:
        """Requests and tokens that count in this tenant's minute."""
        minutes = self._minutes_of(tenant)
        return minutes.requests.total(now_s), minutes.tokens.total(now_s)

    def counter_of(self, tenant: str) -> int:
        """The tenant's virtual token counter, in thousandths."""
        return self._queue.counters.get(tenant, 0)

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
        return lease_id in self._queue

    def facts(self) -> list[LeaseFacts]:
        """What is known of every lease that is held."""
        return [
            LeaseFacts.of_size(lease_id, held.size, held.handed_over_at_s, held.answered_at_s, held.draining_since_s)
            for lease_id, held in self._held.items()
        ]

    def view(self) -> LedgerView:
        """What is held and who waits, now."""
        accounts = sorted(self._accounts.items())
        waiting = [(name, self.waiting_of(name)) for name, _ in accounts]
        return LedgerView(
            pool=self.pool,
            held_tokens=self._cells,
            running=sum(one.running for _, one in accounts),
            draining=sum(one.draining for _, one in accounts),
            waiting=len(self._queue),
            running_by_tenant=tuple((name, one.running) for name, one in accounts if one.running),
            waiting_by_tenant=tuple((name, number) for name, number in waiting if number),
            held_tokens_by_tenant=tuple((name, one.cells) for name, one in accounts if one.running or one.draining),
            drains_overdue=self._overdue,
            leases_expired=self.leases_expired,
        )

    def fair_view(self, now_s: float) -> FairView:
        """How fair it is, now."""
        here = sorted(name for name in self._accounts if self._is_here(name))
        return FairView(
            tenants=tuple(self._service_of(name, now_s) for name in here),
            gap_milli=self._queue.gap(),
            gap_max_milli=self._gap_max,
            bypasses=self._bypasses,
            drains=self._clearings,
            drain_idle_s=self._clearing_idle_s,
            prefill_tokens=self._prefill_tokens,
            voids=frozenset(self._voids),
            now_s=now_s,
        )

    # -- who is next

    def _next(self, extra: Waiting | None = None) -> tuple[Waiting | None, Waiting | None]:
        """Who goes in next, and who was to go before it but does not fit; with one that would wait too.

        1. Nobody, while nobody is let in or no slot is free.
        2. Who asks for what is guaranteed to it, as soon as it fits; until then nobody else.
        3. Who was passed too often, as soon as it fits; until then nobody else.
        4. The first in line that fits.
        5. Where nobody else is in line, the first of the spot tenants that fits.
        """
        if self.closed or self._sequences >= self.pool.slots:  # 1
            return None, None
        extra = extra if extra is not None and self._would_stand(extra) else None
        own = extra if extra is not None and self._in_its_share(extra.reservation) else None
        if owners := self._queue.front(self._queue.owners, own):  # 2
            return next((one for one in owners if self._has_room(one.reservation)), None), None
        if (first := self._cleared_for()) is not None:  # 3
            return (first if self._fits(first.reservation) else None), None
        for spot in (False, True):  # 4, 5
            front = self._queue.front(self._queue.line[spot], extra if extra and extra.is_spot is spot else None)
            passed: Waiting | None = None
            for one in front:
                if self._fits(one.reservation):
                    return one, passed
                if passed is None and not spot and self._will_fit(one.reservation):
                    passed = one
            if front:
                break
        return None, None

    def _would_stand(self, extra: Waiting) -> bool:
        return not self._queue.waiting_of(extra.tenant) and self._inside_quota(extra.reservation)

    def _may_pass(self, passed: Waiting | None) -> bool:
        return passed is None or passed.passed < self.rule.bypass_max

    def _pass(self, passed: Waiting | None) -> None:
        if passed is not None:
            passed.passed += 1
            self._bypasses += 1
            self._voids.add(Void.BYPASS)

    def _begin_clearing(self, passed: Waiting | None) -> None:
        """Whoever was passed as often as may be is next, and nobody else goes in until it does.

        Where nobody may ever be passed there is no need: the order is strict, and follows the counters at all times.
        """
        if passed is not None and self.rule.bypass_max and not self._may_pass(passed):
            self._clearing = passed.reservation.lease_id
            self._clearings += 1

    def _cleared_for(self) -> Waiting | None:
        """Whom the gate drains for; nobody where it has left, or could go in only on what is lent."""
        waiting = self._queue.get(self._clearing)
        if waiting is None or not self._queue.stands_first(waiting) or not self._will_fit(waiting.reservation):
            self._clearing = None
            return None
        return waiting

    def _note_clearing(self, now_s: float) -> None:
        """Count the time in which somebody who would fit is kept out."""
        if self._kept_out_since_s is not None:
            self._clearing_idle_s += now_s - self._kept_out_since_s
        self._kept_out_since_s = None
        line = [] if self.closed else self._queue.front(self._queue.line[False], None)
        first = self._cleared_for() or (line[0] if line and not self.rule.bypass_max else None)
        if first is not None and any(self._fits(one.reservation) for one in line if one is not first):
            self._kept_out_since_s = now_s

    def _stand(self, tenant: str) -> None:
        """Have the tenant stand where its first request belongs now, which is nowhere while its Quota is used up."""
        first = self._queue.first_of(tenant)
        if first is not None and not self._inside_quota(first.reservation):
            first = None
            self._voids.add(Void.QUOTA)
        self._queue.stand(tenant, first, owner=first is not None and self._in_its_share(first.reservation))

    def _stand_all(self) -> None:
        for tenant in sorted(self._queue.tenants()):
            self._stand(tenant)

    def _is_here(self, tenant: str) -> bool:
        account = self._accounts.get(tenant)
        return self.waiting_of(tenant) > 0 or (account is not None and account.running + account.draining > 0)

    # -- what fits

    def _can_ever_fit(self, reservation: Reservation) -> bool:
        size, pool = reservation.size, self.pool
        one = size.prompt_tokens + size.output_tokens + pool.margin_tokens
        return (
            one <= pool.tokens_per_slot and size.sequences <= pool.slots and pool.cells(size) <= pool.grantable_tokens
        )

    def _has_room(self, reservation: Reservation) -> bool:
        """Whether slots, cells and prefill have room, whoever they are held back for."""
        size, most = reservation.size, self.rule.prefill_tokens_max
        prefill = self._prefill_tokens
        return (
            self._sequences + size.sequences <= self.pool.slots
            and self._cells + self.pool.cells(size) <= self.pool.grantable_tokens
            and (most is None or prefill == 0 or prefill + sum(size.distinct) <= most)
        )

    def _fits(self, reservation: Reservation) -> bool:
        """Whether it has room beside what is held back for others, or may have that lent."""
        if not self._has_room(reservation):
            return False
        size, back = reservation.size, self._held_back(reservation.tenant)
        beside = (
            self._sequences + size.sequences + back.slots <= self.pool.slots
            and self._cells + self.pool.cells(size) + back.tokens <= self.pool.grantable_tokens
        )
        is_short = size.output_tokens * (1 + size.queued) <= self.rule.lent_output_tokens_max
        return beside or (is_short and reservation.share.tier is not Tier.SPOT)

    def _held_back(self, tenant: str) -> Part:
        """What the others have of guaranteed slots and cells and do not use."""
        slots = tokens = 0
        for name, part in self._guarantees.parts.items():
            if name != tenant:
                account = self._accounts.get(name) or _Account()
                slots += max(part.slots - account.running - account.draining, 0)
                tokens += max(part.tokens - account.cells, 0)
        return Part(slots, tokens)

    def _will_fit(self, reservation: Reservation) -> bool:
        """Whether it fits when all others have ended, without being lent anything: it is worth draining for."""
        size, others = reservation.size, self._guarantees.of_others(reservation.tenant)
        return (
            size.sequences + others.slots <= self.pool.slots
            and self.pool.cells(size) + others.tokens <= self.pool.grantable_tokens
        )

    def _in_its_share(self, reservation: Reservation) -> bool:
        """Whether it is inside what is guaranteed to its tenant, with what that holds already."""
        part = self._guarantees.of(reservation.tenant)
        account = self._accounts.get(reservation.tenant) or _Account()
        return (
            account.running + account.draining + reservation.size.sequences <= part.slots
            and account.cells + self.pool.cells(reservation.size) <= part.tokens
        )

    def _inside_quota(self, reservation: Reservation) -> bool:
        account, quota = self._accounts.get(reservation.tenant) or _Account(), reservation.quota
        sequences = account.running + account.draining + reservation.size.sequences
        cells = account.cells + self.pool.cells(reservation.size)
        return (quota.concurrency_max is None or sequences <= quota.concurrency_max) and (
            quota.kv_tokens_max is None or cells <= quota.kv_tokens_max
        )

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

    def _weigh(self, reservation: Reservation) -> _Account:
        """Its tenant's account, with the weight that it has by now."""
        account = self._accounts.setdefault(reservation.tenant, _Account())
        account.weight_milli = reservation.share.weight_milli
        return account

    def _minutes_of(self, tenant: str) -> Minutes:
        return self._accounts.setdefault(tenant, _Account()).minutes

    def _take(self, waiting: Waiting, cells: int, now_s: float) -> Lease:
        reservation, size = waiting.reservation, waiting.reservation.size
        held = _Held(waiting, cells, now_s, prefill_tokens=sum(size.distinct))
        self._held[reservation.lease_id] = held
        self._granted += size.sequences
        self._sequences += size.sequences
        self._cells += cells
        self._prefill_tokens += held.prefill_tokens
        self._weigh(reservation).add(held, 1)
        if self._guarantees.parts or waiting.is_spot:
            self._voids.add(Void.TIERS)
        self._charge(held, Usage(sum(size.distinct), 0), now_s)
        self._stand(waiting.tenant)
        return Lease(reservation.lease_id, cells, size.sequences, now_s - waiting.since_s)

    def _charge(self, held: _Held, usage: Usage, now_s: float) -> None:
        """Its service is now that of this usage: charge the difference to what was charged."""
        reservation = held.waited.reservation
        service, weight = self.rule.service_milli(usage), reservation.share.weight_milli
        change = service - held.service_milli
        self._queue.charge(reservation.tenant, weighted(service, weight) - weighted(held.service_milli, weight))
        if change:
            self._minutes_of(reservation.tenant).service.add(step_of(now_s), change)
        if usage.cached_tokens and self.rule.cached_input_price_milli != self.rule.input_price_milli:
            self._voids.add(Void.CACHE_DISCOUNT)
        held.service_milli = service

    def _free(self, lease_id: str, now_s: float) -> None:
        held = self._held[lease_id]
        self._hold_s += _HOLD_SMOOTHING * (now_s - held.granted_at_s - self._hold_s)
        self.freed.append(Freed(held.waited.tenant, held.cells, now_s - held.granted_at_s))
        self._give_back(lease_id)

    def _give_back(self, lease_id: str) -> None:
        held = self._held.pop(lease_id)
        self._sequences -= held.size.sequences
        self._cells -= held.cells
        self._prefill_tokens -= held.prefill_tokens
        self._accounts[held.waited.tenant].add(held, -1)
        self._stand(held.waited.tenant)

    def _denied(self, reservation: Reservation, reason: Reason) -> Denied:
        waiting = self.waiting_of(reservation.tenant)
        return Denied(reservation.lease_id, reason, waiting, self.retry_after_s())

    def _service_of(self, name: str, now_s: float) -> TenantService:
        account, first = self._accounts[name], self._queue.first_of(name)
        return TenantService(
            name,
            weight_milli=account.weight_milli,
            counter_milli=self.counter_of(name),
            service_milli=account.minutes.service.total(now_s),
            filled_tokens=account.filled,
            waiting=self.waiting_of(name),
            oldest_since_s=None if first is None else first.since_s,
        )


def asked_tokens(size: Size) -> int:
    """What a request counts as in its tenant's minute until it is known what it took."""
    return sum(size.distinct) + size.sequences * size.output_tokens


def _charge(reservation: Reservation, now_s: float) -> Charge:
    quota = reservation.quota
    return Charge(
        step_of(now_s),
        requests=int(quota.requests_per_minute is not None),
        tokens=0 if quota.tokens_per_minute is None else asked_tokens(reservation.size),
    )
