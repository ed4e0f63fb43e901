"""Who waits, in which order tenants are served next, and each tenant's virtual token counter."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvgate.core.tenant import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvgate.core.ledger import Reservation
    from kvgate.core.minute import Charge

LOOK_PAST = 1000
"""So many tenants at the front of a line are looked at for one whose request fits: what a step costs at most."""


@dataclass(slots=True)
class Waiting:
    """One request that waits, or did; `passed` counts who was let in before it although it was first."""

    reservation: Reservation
    since_s: float
    charge: Charge
    number: int = 0
    passed: int = 0

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.reservation.tenant

    @property
    def is_spot(self) -> bool:
        """Whether everybody else goes first."""
        return self.reservation.share.tier is Tier.SPOT


Place = tuple[int, int, str]
"""Where a tenant stands: its counter, the number of its first request, its name."""


_Sorted = TypeVar("_Sorted", Place, int)


@dataclass(frozen=True, slots=True)
class _Stand:
    place: Place
    spot: bool
    owner: bool
    cells: int


@dataclass(slots=True)
class FairQueue:
    """One queue a tenant, first come first served; among tenants the least counter goes first.

    A tenant is in line while its first request is inside its Quota; spot tenants have a line of their own, and so
    have those whose request is inside what is guaranteed to them (they stand in the common line too).

    Lift: whoever begins to wait is lifted to the least counter in line, or, where nobody is, to that of whoever left
    it last. So no tenant saves up credit while it is away. Counters of tenants that are away are kept as long as they
    are above that, which no lift would change.
    """

    line: dict[bool, list[Place]] = field(default_factory=lambda: {False: [], True: []})
    owners: list[Place] = field(default_factory=list)
    cells: dict[bool, list[int]] = field(default_factory=lambda: {False: [], True: []})
    counters: dict[str, int] = field(default_factory=dict)
    _waiting: dict[str, Waiting] = field(default_factory=dict)
    _of: dict[str, dict[str, Waiting]] = field(default_factory=dict)
    _stands: dict[str, _Stand] = field(default_factory=dict)
    _last: dict[bool, str] = field(default_factory=dict)
    _away: list[tuple[int, str]] = field(default_factory=list)
    _is_away: set[str] = field(default_factory=set)
    _touched: set[str] = field(default_factory=set)
    _numbers: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._waiting

    def get(self, lease_id: str | None) -> Waiting | None:
        """The request of this id, if it waits."""
        return None if lease_id is None else self._waiting.get(lease_id)

    def waiting_of(self, tenant: str) -> int:
        """How many of this tenant's requests wait."""
        return len(self._of.get(tenant, ()))

    def first_of(self, tenant: str) -> Waiting | None:
        """The tenant's request that came first."""
        return next(iter(self._of.get(tenant, {}).values()), None)

    def tenants(self) -> list[str]:
        """Those of whom any request waits."""
        return list(self._of)

    def in_order(self) -> Iterator[Waiting]:
        """All that wait, in the order in which they came."""
        return iter(self._waiting.values())

    def add(self, waiting: Waiting) -> None:
        """One more waits; its tenant is to be looked at (`stand`)."""
        self._numbers += 1
        waiting.number = self._numbers
        lease_id = waiting.reservation.lease_id
        self._waiting[lease_id] = self._of.setdefault(waiting.tenant, {})[lease_id] = waiting
        self._touched.add(waiting.tenant)

    def remove(self, lease_id: str) -> Waiting | None:
        """One waits no more; its tenant is to be looked at (`stand`)."""
        waiting = self._waiting.pop(lease_id, None)
        if waiting is not None:
            self._touched.add(waiting.tenant)
            own = self._of[waiting.tenant]
            del own[lease_id]
            if not own:
                del self._of[waiting.tenant]
        return waiting

    def stand(self, tenant: str, first: Waiting | None, *, owner: bool, cells: int) -> None:
        """The tenant stands in line with this request, which needs so many cells, or, with None, not at all."""
        before = self._stands.pop(tenant, None)
        if before is not None:
            _drop(self.line[before.spot], before.place)
            _drop(self.cells[before.spot], before.cells)
            if before.owner:
                _drop(self.owners, before.place)
        if first is not None:
            stand = _Stand((self.counters.get(tenant, 0), first.number, tenant), first.is_spot, owner, cells)
            self._stands[tenant] = stand
            bisect.insort(self.line[stand.spot], stand.place)
            bisect.insort(self.cells[stand.spot], cells)
            if owner:
                bisect.insort(self.owners, stand.place)
        if before is not None and (first is None or first.is_spot is not before.spot):
            self._last[before.spot] = tenant

    def front(self, line: list[Place], extra: Waiting | None = None) -> Iterator[Waiting]:
        """The requests at the front of a line, in order, with one that would stand in it too."""
        ahead = None if extra is None else bisect.bisect(line, (self.lifted(extra), self._numbers + 1, extra.tenant))
        for index in range(min(len(line), LOOK_PAST)):
            if extra is not None and index == ahead:
                yield extra
            if (first := self.first_of(line[index][2])) is not None:
                yield first
        if extra is not None and ahead == min(len(line), LOOK_PAST):
            yield extra

    def least_cells(self, *, spot: bool) -> int | None:
        """The least that anybody in this line needs of cells; None where nobody is in it."""
        return self.cells[spot][0] if self.cells[spot] else None

    def stands_first(self, waiting: Waiting) -> bool:
        """Whether its tenant stands in line with it."""
        stand = self._stands.get(waiting.tenant)
        return stand is not None and stand.place[1] == waiting.number

    # -- counters

    def lifted(self, waiting: Waiting) -> int:
        """The counter that this request's tenant has in line with it."""
        counter = self.counters.get(waiting.tenant, 0)
        if waiting.tenant in self._of:
            return counter
        return max(counter, self._floor(waiting.is_spot) or 0)

    def lift(self, waiting: Waiting) -> None:
        """Its tenant comes into line."""
        self.counters[waiting.tenant] = self.lifted(waiting)
        self._touched.add(waiting.tenant)

    def pass_through(self, waiting: Waiting) -> None:
        """It is let in without waiting: its tenant is in line for no time at all, and leaves it."""
        self.lift(waiting)
        if waiting.tenant not in self._stands:
            self._last[waiting.is_spot] = waiting.tenant

    def charge(self, tenant: str, service: int) -> None:
        """So much weighted service more, or less."""
        self.counters[tenant] = self.counters.get(tenant, 0) + service
        self._touched.add(tenant)
        stand = self._stands.get(tenant)
        if stand is not None:
            self.stand(tenant, self.first_of(tenant), owner=stand.owner, cells=stand.cells)

    def gap(self) -> int:
        """Between the most and the least service of those in line."""
        line = self.line[False]
        return line[-1][0] - line[0][0] if line else 0

    def forget(self, is_here: Callable[[str], bool]) -> None:
        """Drop the counters of tenants that are away and would be lifted to more anyway."""
        for tenant in self._touched:
            here = is_here(tenant)
            if here and tenant in self._is_away:
                self._is_away.discard(tenant)
                self._away = [entry for entry in self._away if entry[1] != tenant]
            elif not here and tenant not in self._is_away:
                self._is_away.add(tenant)
                bisect.insort(self._away, (self.counters.get(tenant, 0), tenant))
        self._touched.clear()
        floors = [floor for floor in map(self._floor, (False, True)) if floor is not None]
        lasts, least = self._last.values(), min(floors, default=0)
        behind = self._away[: bisect.bisect_left(self._away, (least, ""))]
        gone = [(counter, name) for counter, name in behind if name not in lasts]
        for counter, tenant in gone:
            self._away.remove((counter, tenant))
            self._is_away.discard(tenant)
            del self.counters[tenant]

    def forget_all(self) -> None:
        """Nobody is here: all begin alike."""
        for kept in (self.counters, self._last, self._away, self._is_away, self._touched):
            kept.clear()

    def _floor(self, spot: bool) -> int | None:
        if self.line[spot]:
            return self.line[spot][0][0]
        last = self._last.get(spot)
        return None if last is None else self.counters.get(last, 0)


def _drop(line: list[_Sorted], entry: _Sorted) -> None:
    del line[bisect.bisect_left(line, entry)]
