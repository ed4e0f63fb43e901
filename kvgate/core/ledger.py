"""Who holds what of the KV cache, who waits, and when what a dead request held is free again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgate.core.foreign import Tally
from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvgate.core.ask import Size
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Quota

HANDOVER_S = 1.5
"""How long after its bytes left the gate a request may still be on its way into a slot.

The engine looks for closed sockets about once a second (ENGINE_FACTS "Hang-up"), and launches a queued task
only between two batches; an idle slot seen earlier than this after the handover proves nothing.
"""

HANDOVER_S_PER_TOKEN = 2e-5
"""And this much longer for each token of the prompt, which the engine counts again first: 5e-6 s measured."""

_HOLD_SMOOTHING = 0.2


def handover_s(size: Size) -> float:
    """How long a request of this size may still be on its way into a slot, in seconds."""
    return HANDOVER_S + HANDOVER_S_PER_TOKEN * sum(size.distinct)


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
    """No place: QUEUE_FULL, or ENGINE_CHANGED where the pool can no longer hold it at all."""

    lease_id: str
    reason: Reason
    waiting: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class BusySlot:
    """A slot seen at work: which slot, on which of the engine's tasks, and under which output limit."""

    slot_id: int
    task_id: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class SlotsSeen:
    """One look at the engine's slots, asked for at `asked_at_s`.

    `identified` is False where only the number of busy slots is known (ids are then made up).
    """

    busy: tuple[BusySlot, ...]
    asked_at_s: float
    identified: bool = True


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


@dataclass(frozen=True, slots=True)
class _Left:
    """What a look of `asked_at_s` found at work: suspects (first seen at `suspected_at_s`) and newer tasks.

    All of them under one output limit; None where looks do not tell it.
    """

    suspects: int
    suspected_at_s: float
    newer: int
    asked_at_s: float
    output_tokens: int | None


@dataclass(slots=True)
class _Held:
    reservation: Reservation
    cells: int
    granted_at_s: float
    handed_over_at_s: float | None = None
    answered_at_s: float | None = None
    draining_since_s: float | None = None
    looks: int = 0
    looks_identified: bool = True
    suspects: frozenset[tuple[int, int | None]] = frozenset()
    suspected_at_s: float = 0.0
    left: _Left | None = None


@dataclass(slots=True)
class _Waiting:
    reservation: Reservation
    since_s: float


@dataclass(slots=True)
class Ledger:
    """The rule, for one engine; every method decides at once and returns whom it let in.

    Promises (each a property test): cells held never exceed the pool, sequences never exceed the slots, a
    tenant never exceeds its Quota, a refusal leaves nothing behind, and whatever was granted can be given
    back exactly once. First come, first served among the eligible (inside their own Quota).

    Args:
        pool: what the engine can hold.
        drain_max_s: after this long a drain ends although the engine never showed the slot idle.
    """

    pool: KvPool
    drain_max_s: float = 120.0
    _held: dict[str, _Held] = field(default_factory=dict)
    _queue: dict[str, _Waiting] = field(default_factory=dict)
    _hold_s: float = 2.0
    _overdue: int = 0
    _granted: int = 0

    def reserve(self, reservation: Reservation, now_s: float) -> Lease | Ticket | Denied:
        """Take the cells and slots now, or queue, or refuse; check everything first, then take."""
        if not self._can_ever_fit(reservation):
            return self._denied(reservation, Reason.ENGINE_CHANGED)
        waiting = _Waiting(reservation, now_s)
        if self._fits(reservation) and next(self._eligible([*self._queue.values(), waiting]), None) is waiting:
            return self._take(waiting, now_s)
        if self.waiting_of(reservation.tenant) >= reservation.quota.queue_max:
            return self._denied(reservation, Reason.QUEUE_FULL)
        ahead = len(self._queue)
        self._queue[reservation.lease_id] = waiting
        return Ticket(reservation.lease_id, ahead)

    def cancel(self, lease_id: str, now_s: float) -> tuple[Lease, ...]:
        """Leave the queue; whoever stood behind may go. Unknown ids are no error."""
        if self._queue.pop(lease_id, None) is None:
            return ()
        return self._promote(now_s)

    def hand_over(self, lease_id: str, now_s: float) -> None:
        """The request's bytes go to the engine now: from here on only the engine can tell that it ended."""
        if (held := self._held.get(lease_id)) is not None:
            held.handed_over_at_s = now_s

    def answered(self, lease_id: str, now_s: float) -> None:
        """The engine has begun to answer: the request certainly sits in a slot."""
        if (held := self._held.get(lease_id)) is not None and held.answered_at_s is None:
            held.answered_at_s = now_s

    def settle(self, lease_id: str, now_s: float, *, ended: bool) -> tuple[Lease, ...]:
        """Give back what a lease holds: at once where the engine said that it `ended`, else by draining.

        A lease that was never handed over is free at once. Settling twice is no error and frees nothing.
        """
        held = self._held.get(lease_id)
        if held is None or held.draining_since_s is not None:
            return ()
        if not ended and held.handed_over_at_s is not None:
            held.draining_since_s = now_s
            return ()
        self._free(lease_id, now_s)
        return self._promote(now_s)

    def observe(self, seen: SlotsSeen, now_s: float) -> tuple[Lease, ...]:
        """Free the drains that this look at the engine's slots proves to be over."""
        over = [
            lease_id
            for lease_id, held in self._held.items()
            if held.draining_since_s is not None and self._is_over(held, seen)
        ]
        for lease_id in over:
            self._free(lease_id, now_s)
        return self._promote(now_s) if over else ()

    def expire(self, now_s: float) -> tuple[Lease, ...]:
        """End the drains that are older than `drain_max_s`; they are counted as overdue."""
        late = [
            lease_id
            for lease_id, held in self._held.items()
            if held.draining_since_s is not None and now_s - held.draining_since_s >= self.drain_max_s
        ]
        for lease_id in late:
            self._free(lease_id, now_s)
        self._overdue += len(late)
        return self._promote(now_s) if late else ()

    def resize(self, pool: KvPool, now_s: float) -> tuple[Lease | Denied, ...]:
        """The engine is another one now. What is held stays counted; who can never fit is told so.

        Cells of what is held keep the figure they were granted with: they end with the old engine's sockets.
        """
        self.pool = pool
        lost = [w.reservation for w in self._queue.values() if not self._can_ever_fit(w.reservation)]
        for reservation in lost:
            del self._queue[reservation.lease_id]
        return *(self._denied(r, Reason.ENGINE_CHANGED) for r in lost), *self._promote(now_s)

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
        return Tally(sum(held.reservation.size.sequences for held in self._held.values()), self._granted)

    def view(self) -> LedgerView:
        """What is held and who waits, now."""
        running: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        draining = 0
        for held in self._held.values():
            sequences = held.reservation.size.sequences
            tokens[held.reservation.tenant] += held.cells
            if held.draining_since_s is None:
                running[held.reservation.tenant] += sequences
            else:
                draining += sequences
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
        )

    # -- what fits

    def _can_ever_fit(self, reservation: Reservation) -> bool:
        size, pool = reservation.size, self.pool
        one = size.prompt_tokens + size.output_tokens + pool.margin_tokens
        return (
            one <= pool.tokens_per_slot and size.sequences <= pool.slots and pool.cells(size) <= pool.grantable_tokens
        )

    def _fits(self, reservation: Reservation) -> bool:
        sequences = sum(h.reservation.size.sequences for h in self._held.values())
        cells = sum(h.cells for h in self._held.values())
        return (
            sequences + reservation.size.sequences <= self.pool.slots
            and cells + self.pool.cells(reservation.size) <= self.pool.grantable_tokens
        )

    def _inside_quota(self, reservation: Reservation) -> bool:
        mine = [h for h in self._held.values() if h.reservation.tenant == reservation.tenant]
        sequences = sum(h.reservation.size.sequences for h in mine) + reservation.size.sequences
        cells = sum(h.cells for h in mine) + self.pool.cells(reservation.size)
        quota = reservation.quota
        return (quota.concurrency_max is None or sequences <= quota.concurrency_max) and (
            quota.kv_tokens_max is None or cells <= quota.kv_tokens_max
        )

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

    def _promote(self, now_s: float) -> tuple[Lease, ...]:
        granted: list[Lease] = []
        while self._queue:
            head = next(self._eligible(self._queue.values()), None)
            if head is None or not self._fits(head.reservation):
                break
            del self._queue[head.reservation.lease_id]
            granted.append(self._take(head, now_s))
        return tuple(granted)

    # -- take and free

    def _take(self, waiting: _Waiting, now_s: float) -> Lease:
        reservation = waiting.reservation
        cells = self.pool.cells(reservation.size)
        self._granted += reservation.size.sequences
        self._held[reservation.lease_id] = _Held(reservation, cells, now_s)
        return Lease(reservation.lease_id, cells, reservation.size.sequences, now_s - waiting.since_s)

    def _free(self, lease_id: str, now_s: float) -> None:
        held = self._held.pop(lease_id)
        self._hold_s += _HOLD_SMOOTHING * (now_s - held.granted_at_s - self._hold_s)

    def _denied(self, reservation: Reservation, reason: Reason) -> Denied:
        waiting = self.waiting_of(reservation.tenant)
        return Denied(reservation.lease_id, reason, waiting, self.retry_after_s())

    # -- draining

    def _is_over(self, held: _Held, seen: SlotsSeen) -> bool:
        """Whether the engine no longer works for a request whose client is gone.

        1. A look from before the drain, or from before the request can have reached a slot, proves nothing.
        2. Only slots under this request's own output limit can be its own: kvgate always sets one, but for requests
           without output (embeddings), which may be in any slot.
        3. Of those, only tasks that the first looks saw: a later task is somebody else's. One look where the
           engine had begun to answer, else two, since a task may be launched right behind a look. A list that waits
           in the engine goes on in later tasks: for it each look begins anew.
        4. None left: over. No more left, at the look before, than leases that ran in them then and still run:
           over too. A neighbour that had ended by then is settled by now: its last bytes are faster than the
           next look.
        """
        since, handed = held.draining_since_s, held.handed_over_at_s
        if since is None or handed is None or seen.asked_at_s <= since:  # 1
            return False
        certain = held.answered_at_s is not None
        if not certain and seen.asked_at_s < handed + handover_s(held.reservation.size):
            return False
        if seen.identified is not held.looks_identified:  # looks of two kinds cannot be compared: begin again
            held.looks_identified, held.looks, held.suspects, held.left = seen.identified, 0, frozenset(), None
        limit = held.reservation.size.output_tokens or None
        mine = frozenset(
            (slot.slot_id, slot.task_id) for slot in seen.busy if limit is None or slot.output_tokens in {None, limit}
        )  # 2
        held.looks += 1
        queued = held.reservation.size.queued > 0
        looks_needed = 1 if certain and not queued else 2
        if held.looks <= looks_needed or not seen.identified or queued:  # 3
            held.suspects, held.suspected_at_s = mine, seen.asked_at_s
        else:
            held.suspects &= mine
        if held.looks < looks_needed:
            return False
        before = held.left
        held.left = _Left(
            suspects=len(held.suspects),
            suspected_at_s=held.suspected_at_s,
            newer=len(mine - held.suspects),
            asked_at_s=seen.asked_at_s,
            output_tokens=limit if seen.identified else None,
        )
        return not held.suspects or (before is not None and before.suspects <= self._explained(before))  # 4

    def _explained(self, left: _Left) -> int:
        """How many of the suspects that a look left are at work for leases that run to this day.

        A lease that was answered before the suspects were taken is in one of them. A later one, and a list that has
        gone on to its next prompts, is in one of them or in a newer task, of which each holds one.
        """
        answers = [
            (held.answered_at_s, held.reservation.size.queued)
            for held in self._held.values()
            if held.draining_since_s is None
            and held.answered_at_s is not None
            and held.answered_at_s < left.asked_at_s
            and left.output_tokens in {None, held.reservation.size.output_tokens}
        ]
        older = sum(answered_at_s < left.suspected_at_s and not queued for answered_at_s, queued in answers)
        return older + max(len(answers) - older - left.newer, 0)
