"""Who holds what of the KV cache, who waits, and when what a dead request held is free again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgate.core.drain import DrainWatch, LeaseFacts
from kvgate.core.foreign import Tally
from kvgate.core.minute import Charge, Minutes, step_of
from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
    """No place: the queue or the minute is full, or ENGINE_CHANGED where the pool can no longer hold it at all."""

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


@dataclass(slots=True)
class _Held:
    waited: _Waiting
    cells: int
    granted_at_s: float
    handed_over_at_s: float | None = None
    answered_at_s: float | None = None
    draining_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    reservation: Reservation
    since_s: float
    charge: Charge


@dataclass(slots=True)
class Ledger:
    """The rule, for one engine; every method decides at once and returns whom it let in.

    Promises (each a property test): cells held never exceed the pool, sequences never exceed the slots, a
    tenant never exceeds its Quota, a refusal leaves nothing behind, and whatever was granted can be given
    back exactly once. First come, first served among the eligible (inside their own Quota).

    Args:
        pool: what the engine can hold.
        drain_max_s: after this long a drain ends although the engine never showed the slot idle.
        closed: nobody is let in: what others hold is not known yet.
    """

    pool: KvPool
    drain_max_s: float = 120.0
    closed: bool = False
    _held: dict[str, _Held] = field(default_factory=dict)
    _queue: dict[str, _Waiting] = field(default_factory=dict)
    _minutes: dict[str, Minutes] = field(default_factory=dict)
    _drains: DrainWatch = field(default_factory=DrainWatch)
    _hold_s: float = 2.0
    _overdue: int = 0
    leases_expired: int = 0
    _granted: int = 0

    def reserve(self, reservation: Reservation, now_s: float) -> Lease | Ticket | Denied:
        """Take the cells and slots now, or queue, or refuse; check everything first, then take.

        1. What the pool can never hold is told so.
        2. What the tenant's minute does not allow is told when it will.
        3. It fits, and nobody eligible came before it: granted.
        4. The tenant's queue has a place: it waits. What waits counts in the minute, and no more if it leaves.
        """
        if not self._can_ever_fit(reservation):  # 1
            return self._denied(reservation, Reason.ENGINE_CHANGED)
        if (over := self._over_minute(reservation, now_s)) is not None:  # 2
            return over
        waiting = _Waiting(reservation, now_s, _charge(reservation, now_s))
        if self._fits(reservation) and next(self._eligible([*self._queue.values(), waiting]), None) is waiting:  # 3
            self._minutes_of(reservation.tenant).take(waiting.charge)
            return self._take(waiting, now_s)
        if self.waiting_of(reservation.tenant) >= reservation.quota.queue_max:  # 4
            return self._denied(reservation, Reason.QUEUE_FULL)
        ahead = len(self._queue)
        self._minutes_of(reservation.tenant).take(waiting.charge)
        self._queue[reservation.lease_id] = waiting
        return Ticket(reservation.lease_id, ahead)

    def cancel(self, lease_id: str, now_s: float) -> tuple[Lease, ...]:
        """Leave the queue; whoever stood behind may go. Unknown ids are no error."""
        return self.promote(now_s) if self.withdraw(lease_id) else ()

    def hand_over(self, lease_id: str, now_s: float) -> None:
        """The request's bytes go to the engine now: from here on only the engine can tell that it ended."""
        if (held := self._held.get(lease_id)) is not None:
            held.handed_over_at_s = max(now_s, held.handed_over_at_s or now_s)

    def answered(self, lease_id: str, now_s: float) -> None:
        """The engine has begun to answer: the request certainly sits in a slot."""
        if (held := self._held.get(lease_id)) is not None:
            held.answered_at_s = min(now_s, now_s if held.answered_at_s is None else held.answered_at_s)

    def settle(
        self, lease_id: str, now_s: float, *, ended: bool, used_tokens: int | None = None
    ) -> tuple[Lease, ...]:
        """Give back what a lease holds: at once where the engine said that it `ended`, else by draining.

        A lease that was never handed over is free at once, and its tenant's minute is as if it had never asked.
        `used_tokens`, where they are known, correct the minute. Settling twice is no error and frees nothing.
        """
        held = self._held.get(lease_id)
        if held is None or held.draining_since_s is not None:
            return ()
        minutes, charge = self._minutes_of(held.waited.reservation.tenant), held.waited.charge
        if held.handed_over_at_s is None:
            minutes.give_back(charge)
        elif used_tokens is not None:
            minutes.correct(charge, used_tokens)
        if not ended and held.handed_over_at_s is not None:
            self.drain(lease_id, now_s)
            return ()
        self._free(lease_id, now_s)
        return self.promote(now_s)

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
        return self.promote(now_s) if over else ()

    def expire(self, now_s: float) -> tuple[Lease, ...]:
        """End the drains that are older than `drain_max_s`; they are counted as overdue."""
        return self.promote(now_s) if self.end_overdue(now_s) else ()

    def resize(self, pool: KvPool, now_s: float) -> tuple[Lease | Denied, ...]:
        """The engine is another one now. What is held stays counted; who can never fit is told so.

        Cells of what is held keep the figure they were granted with: they end with the old engine's sockets.
        """
        self.pool = pool
        lost = [w.reservation for w in self._queue.values() if not self._can_ever_fit(w.reservation)]
        for reservation in lost:
            self.withdraw(reservation.lease_id)
        return *(self._denied(r, Reason.ENGINE_CHANGED) for r in lost), *self.promote(now_s)

    # -- steps of a step: they let nobody in, `promote` does when all are taken

    def withdraw(self, lease_id: str) -> bool:
        """Take a request out of the queue as if it had never asked; whether it was there."""
        waiting = self._queue.pop(lease_id, None)
        if waiting is not None:
            self._minutes_of(waiting.reservation.tenant).give_back(waiting.charge)
        return waiting is not None

    def take_back(self, lease_id: str) -> None:
        """A grant that nobody claimed: free as if it had never been given."""
        held = self._held.pop(lease_id)
        self._minutes_of(held.waited.reservation.tenant).give_back(held.waited.charge)

    def drain(self, lease_id: str, now_s: float) -> None:
        """From now on only the engine can tell that this lease is over; whoever may have handed it over has."""
        held = self._held[lease_id]
        held.draining_since_s = now_s
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
        waited = _Waiting(reservation, now_s, Charge(step_of(now_s), 0, 0))
        self._granted += reservation.size.sequences
        self._held[reservation.lease_id] = _Held(waited, cells, now_s)

    def promote(self, now_s: float) -> tuple[Lease, ...]:
        """Let in the first eligible one as long as it fits."""
        granted: list[Lease] = []
        while self._queue:
            head = next(self._eligible(self._queue.values()), None)
            if head is None or not self._fits(head.reservation):
                break
            del self._queue[head.reservation.lease_id]
            granted.append(self._take(head, now_s))
        return tuple(granted)

    # -- what is known

    def is_draining(self) -> bool:
        """Whether anything waits for the engine to show an idle slot."""
        return any(held.draining_since_s is not None for held in self._held.values())

    def retry_after_s(self) -> float:
        """Seconds until a slot is likely free: the usual hold, times the rounds that the queue needs."""
        return self._hold_s * (1 + len(self._queue) / self.pool.slots)

    def waiting_of(self, tenant: str) -> int:
        """How many of this tenant's requests wait."""
        return sum(w.reservation.tenant == tenant for w in self._queue.values())

    def tally(self) -> Tally:
        """The sequences held now, and those granted since start: what busy slots are compared with."""
        return Tally(sum(held.waited.reservation.size.sequences for held in self._held.values()), self._granted)

    def minute_of(self, tenant: str, now_s: float) -> tuple[int, int]:
        """Requests and tokens that count in this tenant's minute."""
        minutes = self._minutes_of(tenant)
        return minutes.requests.total(now_s), minutes.tokens.total(now_s)

    def lease(self, lease_id: str) -> Lease | None:
        """The lease of this id while it runs."""
        held = self._held.get(lease_id)
        if held is None or held.draining_since_s is not None:
            return None
        queued_s = held.granted_at_s - held.waited.since_s
        return Lease(lease_id, held.cells, held.waited.reservation.size.sequences, queued_s)

    def holds(self, lease_id: str) -> bool:
        """Whether anything is held under this id, running or draining."""
        return lease_id in self._held

    def waits(self, lease_id: str) -> bool:
        """Whether this id waits."""
        return lease_id in self._queue

    def facts(self) -> list[LeaseFacts]:
        """What is known of every lease that is held."""
        return [
            LeaseFacts.of_size(
                lease_id,
                held.waited.reservation.size,
                held.handed_over_at_s,
                held.answered_at_s,
                held.draining_since_s,
            )
            for lease_id, held in self._held.items()
        ]

    def view(self) -> LedgerView:
        """What is held and who waits, now."""
        running: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        draining = 0
        for held in self._held.values():
            reservation = held.waited.reservation
            tokens[reservation.tenant] += held.cells
            if held.draining_since_s is None:
                running[reservation.tenant] += reservation.size.sequences
            else:
                draining += reservation.size.sequences
        waiting = Counter(w.reservation.tenant for w in self._queue.values())
        return LedgerView(
            pool=self.pool,
            held_tokens=sum(tokens.values()),
            running=sum(running.values()),
            draining=draining,
            waiting=len(self._queue),
            running_by_tenant=tuple(sorted(running.items())),
            waiting_by_tenant=tuple(sorted(waiting.items())),
            held_tokens_by_tenant=tuple(sorted(tokens.items())),
            drains_overdue=self._overdue,
            leases_expired=self.leases_expired,
        )

    # -- what fits

    def _can_ever_fit(self, reservation: Reservation) -> bool:
        size, pool = reservation.size, self.pool
        one = size.prompt_tokens + size.output_tokens + pool.margin_tokens
        return (
            one <= pool.tokens_per_slot and size.sequences <= pool.slots and pool.cells(size) <= pool.grantable_tokens
        )

    def _fits(self, reservation: Reservation) -> bool:
        sequences = sum(h.waited.reservation.size.sequences for h in self._held.values())
        cells = sum(h.cells for h in self._held.values())
        return (
            not self.closed
            and sequences + reservation.size.sequences <= self.pool.slots
            and cells + self.pool.cells(reservation.size) <= self.pool.grantable_tokens
        )

    def _inside_quota(self, reservation: Reservation) -> bool:
        mine = [h for h in self._held.values() if h.waited.reservation.tenant == reservation.tenant]
        sequences = sum(h.waited.reservation.size.sequences for h in mine) + reservation.size.sequences
        cells = sum(h.cells for h in mine) + self.pool.cells(reservation.size)
        quota = reservation.quota
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

    def _eligible(self, queue: Iterable[_Waiting]) -> Iterator[_Waiting]:
        """Those inside their own Quota, in order; nobody overtakes an earlier request of its own tenant."""
        stopped: set[str] = set()
        for waiting in queue:
            tenant = waiting.reservation.tenant
            if tenant in stopped:
                continue
            if self._inside_quota(waiting.reservation):
                yield waiting
            else:
                stopped.add(tenant)

    # -- take and free

    def _minutes_of(self, tenant: str) -> Minutes:
        return self._minutes.setdefault(tenant, Minutes())

    def _take(self, waiting: _Waiting, now_s: float) -> Lease:
        reservation = waiting.reservation
        cells = self.pool.cells(reservation.size)
        self._granted += reservation.size.sequences
        self._held[reservation.lease_id] = _Held(waiting, cells, now_s)
        return Lease(reservation.lease_id, cells, reservation.size.sequences, now_s - waiting.since_s)

    def _free(self, lease_id: str, now_s: float) -> None:
        held = self._held.pop(lease_id)
        self._hold_s += _HOLD_SMOOTHING * (now_s - held.granted_at_s - self._hold_s)

    def _denied(self, reservation: Reservation, reason: Reason) -> Denied:
        waiting = self.waiting_of(reservation.tenant)
        return Denied(reservation.lease_id, reason, waiting, self.retry_after_s())


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
