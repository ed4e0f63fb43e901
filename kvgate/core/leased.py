"""The ledger among many gates: leases that expire, grants to be claimed, gates that are lost, a store that forgot."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvgate.core.fairness import FairRule
from kvgate.core.ledger import Denied, Lease, Ledger, Ticket
from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvgate.core.ask import Usage
    from kvgate.core.drain import LeaseFacts
    from kvgate.core.ledger import Reservation
    from kvgate.core.pool import KvPool

CLAIM_S = 1.0
"""A grant to one who waits must be claimed within this, else its gate is not there to use it."""


class Place(Enum):
    """Where a request stands that has no lease."""

    WAITING = "waiting"
    GONE = "gone"


class Told(NamedTuple):
    """What a gate tells of a lease that it has in hand: until when at the latest each of these happened.

    `output_tokens` is what has come of its answer until now.
    """

    lease_id: str
    handed_over_at_s: float | None = None
    answered_at_s: float | None = None
    output_tokens: int = 0


class InHand(NamedTuple):
    """A lease that a gate has in hand, with all that is needed to count it anew."""

    reservation: Reservation
    cells: int
    told: Told


class Renewed(NamedTuple):
    """What a renewal could not renew: leases that the ledger does not know, and those that drain already."""

    unknown: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Push(NamedTuple):
    """What a gate is told without having asked: which of its waiting requests has what."""

    gate: str
    lease_id: str
    granted: bool


@dataclass(slots=True)
class LeasedLedger:
    """What the scripts of `store/ledger` do, as a model: one of them a method, and every method one atomic step.

    Promises beside those of `core.ledger`: what a gate holds that is not heard of any more drains as if it had
    been handed over; its tickets go at once; a grant that nobody claims goes to the next, uncharged; a ledger that
    was lost lets nobody in until the gates have told what they hold.

    Args:
        ledger: the rule.
        lease_ttl_s: how long a lease, and a gate, lasts without being renewed.
        server: the run of the store's server that the ledger was last seen on.
    """

    ledger: Ledger
    lease_ttl_s: float
    server: str
    pushed: list[Push] = field(default_factory=list)
    _gates: dict[str, float] = field(default_factory=dict)
    _gate_of: dict[str, str] = field(default_factory=dict)
    _ends_at_s: dict[str, float] = field(default_factory=dict)
    _claimed: set[str] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _unsettled_at_s: dict[str, float] = field(default_factory=dict)
    _closed_until_s: float = -math.inf
    _closed_since_s: float | None = None

    @classmethod
    def joined(
        cls,
        pool: KvPool,
        drain_max_s: float,
        lease_ttl_s: float,
        server: str,
        now_s: float,
        *,
        knew: bool,
        rule: FairRule | None = None,
    ) -> LeasedLedger:
        """The step `join` where there is no ledger: a new one.

        A gate that `knew` one before tells that it was lost: nobody is let in for a whole `lease_ttl_s`, in which
        every gate that is there tells what it holds.
        """
        made = cls(Ledger(pool, drain_max_s, rule=rule or FairRule()), lease_ttl_s, server)
        if knew:
            made._closed_until_s = now_s + lease_ttl_s
        return made

    def join(self, gate: str, pool: KvPool, server: str, now_s: float, rule: FairRule | None = None) -> KvPool:
        """A gate comes, or comes back, with its operator's `rule`; the pool that is guarded.

        Where the server is another one than before, the last moments may be lost: nobody is let in until every
        gate was heard of. The pool of a gate that is alone is the one to guard.
        """
        if server != self.server:
            self.server = server
            self._closed_since_s, self._closed_until_s = now_s, now_s + self.lease_ttl_s
        if rule is not None:
            self.ledger.follow(rule)
        self._sweep(now_s)
        if pool != self.ledger.pool and not set(self._gates) - {gate}:
            self._resize(pool, now_s)
        self.ledger.tidy()
        return self.ledger.pool

    def reserve(self, gate: str, reservation: Reservation, now_s: float) -> Lease | Ticket | Denied:
        """`Ledger.reserve`; asked again for the same id, the same answer."""
        self._sweep(now_s)
        self._gates.setdefault(gate, now_s + self.lease_ttl_s)
        lease_id = reservation.lease_id
        if self.ledger.waits(lease_id):
            self.ledger.tidy()
            return Ticket(lease_id, 0)
        if self.ledger.holds(lease_id):
            again = self._claim(lease_id, now_s)
            self.ledger.tidy()
            return again or Denied(lease_id, Reason.ENGINE_CHANGED, 0, self.ledger.retry_after_s())
        found = self.ledger.reserve(reservation, now_s)
        self.ledger.tidy()
        if not isinstance(found, Denied):
            self._gate_of[lease_id] = gate
        if isinstance(found, Lease):
            self._claim(lease_id, now_s)
        return found

    def cancel(self, lease_ids: Iterable[str], now_s: float) -> None:
        """Leave the queue, if they are in it."""
        self._sweep(now_s)
        for lease_id in lease_ids:
            self.ledger.withdraw(lease_id)
        self._promote(now_s)
        self.ledger.tidy()

    def claim(self, lease_id: str, now_s: float) -> Lease | Place:
        """Take what was granted; also how one who waits asks where it stands."""
        self._sweep(now_s)
        self.ledger.tidy()
        if self.ledger.waits(lease_id):
            return Place.WAITING
        return self._claim(lease_id, now_s) or Place.GONE

    def answered(self, heard: Iterable[Told], now_s: float) -> None:
        """These leases' first output has come: their prompts are read, and others may be."""
        self._sweep(now_s)
        for told in heard:
            if told.lease_id in self._claimed:
                self._tell(told, now_s)
        self._promote(now_s)
        self.ledger.tidy()

    def settle(self, told: Told, now_s: float, *, ended: bool, used: Usage | None = None) -> None:
        """`Ledger.settle`, whatever stands under the id; one that expired is free where it `ended`."""
        self._sweep(now_s)
        lease_id = told.lease_id
        if self.ledger.withdraw(lease_id):
            self._promote(now_s)
        elif lease_id in self._lost:
            self._granted(self.ledger.free([lease_id] if ended else [], now_s), now_s)
        else:
            self._tell(told, now_s)
            self._granted(self.ledger.settle(lease_id, now_s, ended=ended, used=used), now_s)
        self._forget()
        self.ledger.tidy()

    def renew(self, gate: str, held: Sequence[Told], sent_at_s: float, now_s: float) -> Renewed:
        """A gate is there, and has these in hand.

        A gate with unknown ones is to `register` them; until then it has not been heard of.
        """
        unknown = tuple(
            t.lease_id for t in held if not (self.ledger.holds(t.lease_id) or self.ledger.waits(t.lease_id))
        )
        lost = tuple(t.lease_id for t in held if self.ledger.holds(t.lease_id) and not self.ledger.lease(t.lease_id))
        if not unknown:
            self._gates[gate] = now_s + self.lease_ttl_s
        for told in held:
            if told.lease_id in self._claimed and self.ledger.lease(told.lease_id) is not None:
                self._ends_at_s[told.lease_id] = now_s + self.lease_ttl_s
                self._tell(told, now_s)
                before = self._unsettled_at_s.get(told.lease_id, -math.inf)
                self._unsettled_at_s[told.lease_id] = max(before, min(sent_at_s, now_s))
        self._sweep(now_s)
        self.ledger.tidy()
        return Renewed(unknown, lost)

    def register(self, gate: str, held: Sequence[InHand], now_s: float) -> None:
        """A gate tells what it holds: what the ledger has forgotten is counted again, whatever fits."""
        self._gates[gate] = now_s + self.lease_ttl_s
        for reservation, cells, told in held:
            if not self.ledger.holds(reservation.lease_id):
                self.ledger.restore(reservation, cells, now_s)
                self._gate_of[reservation.lease_id] = gate
                self._claim(reservation.lease_id, now_s)
                self._tell(told, now_s)
        self._sweep(now_s)
        self.ledger.tidy()

    def guarantee(self, ratios_ppm: Mapping[str, int], now_s: float) -> None:
        """`Ledger.guarantee`."""
        self._sweep(now_s)
        self._granted(self.ledger.guarantee(ratios_ppm, now_s), now_s)

    def free(self, lease_ids: Iterable[str], now_s: float) -> None:
        """`Ledger.free`."""
        self._sweep(now_s)
        self._granted(self.ledger.free(lease_ids, now_s), now_s)

    def resize(self, pool: KvPool, now_s: float) -> None:
        """`Ledger.resize`."""
        self._sweep(now_s)
        self._resize(pool, now_s)

    def leave(self, gate: str, now_s: float) -> None:
        """A gate goes: its tickets with it; what it holds is left to expire."""
        if gate in self._gates:
            self._gates[gate] = -math.inf
        self._sweep(now_s)
        self.ledger.tidy()

    def facts(self) -> list[LeaseFacts]:
        """`Ledger.facts`, with what was heard of each lease and when."""
        return [
            replace(found, unsettled_at_s=self._unsettled_at_s.get(found.lease_id, -math.inf))
            for found in self.ledger.facts()
        ]

    # -- parts of steps

    def _sweep(self, now_s: float) -> None:
        """What time has brought: grants unclaimed, leases expired, gates lost, drains overdue; in this order."""
        for lease_id, _ in _due(self._ends_at_s, now_s):
            if lease_id in self._claimed:
                self.ledger.charge_reserved(lease_id, now_s)
                self.ledger.drain(lease_id, now_s)
                self.ledger.leases_expired += 1
                self._lost.add(lease_id)
            else:
                self.ledger.take_back(lease_id, now_s)
            del self._ends_at_s[lease_id]
        for gate, _ in _due(self._gates, now_s):
            for lease_id in sorted(lease_id for lease_id, its in self._gate_of.items() if its == gate):
                self.ledger.withdraw(lease_id)
            del self._gates[gate]
        self.ledger.end_overdue(now_s)
        since_s, first_s = self._closed_since_s, min(self._gates.values(), default=math.inf)
        heard_of_all = since_s is not None and first_s >= since_s + self.lease_ttl_s
        self.ledger.closed = now_s < self._closed_until_s and not heard_of_all
        self._promote(now_s)

    def _promote(self, now_s: float) -> None:
        self._granted(self.ledger.promote(now_s), now_s)
        self._forget()

    def _granted(self, told: Iterable[Lease | Denied], now_s: float) -> None:
        for found in told:
            granted = isinstance(found, Lease)
            if granted:
                self._ends_at_s[found.lease_id] = now_s + CLAIM_S
            self.pushed.append(Push(self._gate_of[found.lease_id], found.lease_id, granted))
        self._forget()

    def _resize(self, pool: KvPool, now_s: float) -> None:
        self._granted(self.ledger.resize(pool, now_s), now_s)

    def _claim(self, lease_id: str, now_s: float) -> Lease | None:
        lease = self.ledger.lease(lease_id)
        if lease is not None:
            self._claimed.add(lease_id)
            self._ends_at_s[lease_id] = now_s + self.lease_ttl_s
        return lease

    def _tell(self, told: Told, now_s: float) -> None:
        if self.ledger.lease(told.lease_id) is not None:
            if told.handed_over_at_s is not None:
                self.ledger.hand_over(told.lease_id, told.handed_over_at_s)
            if told.answered_at_s is not None:
                self.ledger.hear_answer(told.lease_id, told.answered_at_s)
            self.ledger.streamed(told.lease_id, told.output_tokens, now_s)

    def _forget(self) -> None:
        """Drop what is kept of leases and tickets that are no more."""
        holds, waits = self.ledger.holds, self.ledger.waits
        self._gate_of = {key: gate for key, gate in self._gate_of.items() if holds(key) or waits(key)}
        self._ends_at_s = {key: s for key, s in self._ends_at_s.items() if self.ledger.lease(key) is not None}
        self._claimed = {key for key in self._claimed if holds(key)}
        self._lost = {key for key in self._lost if holds(key)}
        self._unsettled_at_s = {key: s for key, s in self._unsettled_at_s.items() if holds(key)}


def _due(ends_at_s: dict[str, float], now_s: float) -> list[tuple[str, float]]:
    return sorted((item for item in ends_at_s.items() if item[1] <= now_s), key=lambda item: (item[1], item[0]))
