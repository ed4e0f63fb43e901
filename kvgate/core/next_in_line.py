"""Who goes in next: the front of the line, who may pass it and how often, and for whom the gate drains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgate.core.fair_queue import FairQueue
from kvgate.core.fairness import Void

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgate.core.fair_queue import Waiting
    from kvgate.core.room import Room


@dataclass(slots=True)
class NextInLine:
    """The order of `core.fair_queue`, as far as there is room.

    Args:
        room: what is held, and what still fits.
        closed: nobody is let in.
        bypasses: how often the first in line was passed.
        clearings: how often nobody else was let in for its sake; `clearing_idle_s` for how long in vain.
        voids: what has happened that the bound on the service gap does not cover.
    """

    room: Room
    closed: bool = False
    queue: FairQueue = field(default_factory=FairQueue)
    bypasses: int = 0
    clearings: int = 0
    clearing_idle_s: float = 0.0
    voids: set[Void] = field(default_factory=set)
    _clearing: str | None = None
    _kept_out_since_s: float | None = None

    @property
    def keeps_out(self) -> bool:
        """Whether somebody who would fit is kept out for the sake of one that was passed often enough."""
        return self._kept_out_since_s is not None

    def next(self, extra: Waiting | None = None) -> tuple[Waiting | None, Waiting | None]:
        """Who goes in next, and who was to go before it but does not fit; with one that would wait too.

        1. Nobody, while nobody is let in or no slot is free.
        2. Who asks for what is guaranteed to it, as soon as it fits; until then nobody else.
        3. Who was passed too often, as soon as it fits; until then nobody else.
        4. The first in line that fits.
        5. Where nobody else is in line, the first of the spot tenants that fits.
        """
        if self.closed or self.room.sequences >= self.room.pool.slots:  # 1
            return None, None
        extra = extra if extra is not None and self._would_stand(extra) else None
        own = extra if extra is not None and self.room.in_its_share(extra.reservation) else None
        if owners := self.queue.front(self.queue.owners, own):  # 2
            return _first(one for one in owners if self.room.has_room(one.reservation)), None
        if (first := self.cleared_for()) is not None:  # 3
            return (first if self.room.fits(first.reservation) else None), None
        for spot in (False, True):  # 4, 5
            front = self.queue.front(self.queue.line[spot], extra if extra and extra.is_spot is spot else None)
            passed: Waiting | None = None
            for one in front:
                if self.room.fits(one.reservation):
                    return one, passed
                if passed is None and not spot and self.room.will_fit(one.reservation):
                    passed = one
            if front:
                break
        return None, None

    def _would_stand(self, extra: Waiting) -> bool:
        return not self.queue.waiting_of(extra.tenant) and self.room.inside_quota(extra.reservation)

    def may_pass(self, passed: Waiting | None) -> bool:
        """Whether somebody may go before it once more."""
        return passed is None or passed.passed < self.room.rule.bypass_max

    def let_by(self, passed: Waiting | None) -> None:
        """Somebody goes before it."""
        if passed is not None:
            passed.passed += 1
            self.bypasses += 1
            self.voids.add(Void.BYPASS)

    def begin_clearing(self, passed: Waiting | None) -> None:
        """Whoever was passed as often as may be is next, and nobody else goes in until it does.

        Where nobody may ever be passed there is no need: the order is strict, and follows the counters at all times.
        """
        if passed is not None and self.room.rule.bypass_max and not self.may_pass(passed):
            self._clearing = passed.reservation.lease_id
            self.clearings += 1

    def cleared_for(self) -> Waiting | None:
        """Whom the gate drains for; nobody where it has left, or could go in only on what is lent."""
        waiting = self.queue.get(self._clearing)
        if waiting is None or not self.queue.stands_first(waiting) or not self.room.will_fit(waiting.reservation):
            self._clearing = None
            return None
        return waiting

    def note_clearing(self, now_s: float) -> None:
        """Count the time in which somebody who would fit is kept out."""
        if self._kept_out_since_s is not None:
            self.clearing_idle_s += now_s - self._kept_out_since_s
        self._kept_out_since_s = None
        line = [] if self.closed else self.queue.front(self.queue.line[False], None)
        first = self.cleared_for() or (line[0] if line and not self.room.rule.bypass_max else None)
        if first is not None and any(self.room.fits(one.reservation) for one in line if one is not first):
            self._kept_out_since_s = now_s

    def stand(self, tenant: str) -> None:
        """Have the tenant stand where its first request belongs now, which is nowhere while its Quota is used up."""
        first = self.queue.first_of(tenant)
        if first is not None and not self.room.inside_quota(first.reservation):
            first = None
            self.voids.add(Void.QUOTA)
        self.queue.stand(tenant, first, owner=first is not None and self.room.in_its_share(first.reservation))

    def stand_all(self) -> None:
        """The same for everybody of whom a request waits."""
        for tenant in sorted(self.queue.tenants()):
            self.stand(tenant)


def _first(found: Iterable[Waiting]) -> Waiting | None:
    return next(iter(found), None)
