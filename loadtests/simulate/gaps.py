"""The largest difference in service between tenants that both waited meanwhile: what the paper's bound is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class GapWatch:
    """For every two watched tenants, how far apart their weighted service came while both had requests waiting.

    It looks at every moment that it is told of, so the figure is the largest over all intervals between two of them:
    (W_f(t2) - W_f(t1)) - (W_g(t2) - W_g(t1)) for t1 < t2 in one stretch in which f and g both wait throughout.

    Args:
        watched: tenants to compare; a moment costs their number for each whose service changed.
    """

    watched: frozenset[str]
    largest: float = 0.0
    between: tuple[str, str] | None = None
    _service: dict[str, float] = field(default_factory=dict)
    _waiting: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def waits(self, tenant: str) -> None:
        """From now on it has a request waiting."""
        if tenant not in self.watched or tenant in self._waiting:
            return
        here = self._service.get(tenant, 0.0)
        ranges: dict[str, tuple[float, float]] = {}
        for other in self._waiting:
            apart = here - self._service.get(other, 0.0)
            ranges[other] = (apart, apart)
            self._waiting[other][tenant] = (-apart, -apart)
        self._waiting[tenant] = ranges

    def waits_no_more(self, tenant: str) -> None:
        """Its last waiting request is let in, or gone."""
        if self._waiting.pop(tenant, None) is not None:
            for ranges in self._waiting.values():
                ranges.pop(tenant, None)

    def moment(self, services: Iterable[tuple[str, float]]) -> float:
        """The weighted service of those that have received some, all at one moment; returns the largest gap now."""
        changed = [tenant for tenant, service in services if self._changes(tenant, service)]
        now = 0.0
        for tenant in changed:
            ranges, here = self._waiting[tenant], self._service[tenant]
            for other, (low, high) in ranges.items():
                apart = here - self._service.get(other, 0.0)
                if low <= apart <= high:
                    now = max(now, high - apart, apart - low)
                    continue
                least, most = min(low, apart), max(high, apart)
                ranges[other] = (least, most)
                self._waiting[other][tenant] = (-most, -least)
                now = max(now, most - least)
                if most - least > self.largest:
                    self.largest, self.between = most - least, (tenant, other)
        return now

    def _changes(self, tenant: str, service: float) -> bool:
        if tenant not in self.watched:
            return False
        self._service[tenant] = service
        return tenant in self._waiting
