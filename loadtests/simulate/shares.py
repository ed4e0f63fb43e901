"""What would have been fair: the split that gives nobody more than it asked for, and how far from it a split is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def max_min(total: float, wanted: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """The weighted max-min fair split of `total`: nobody gets more than it wanted, the rest goes by weight."""
    left, weight_left = total, sum(weights[tenant] for tenant in wanted)
    fair: dict[str, float] = {}
    for tenant in sorted(wanted, key=lambda t: (wanted[t] / weights[t], t)):
        fair[tenant] = max(min(wanted[tenant], left * weights[tenant] / weight_left), 0.0)
        left -= fair[tenant]
        weight_left -= weights[tenant]
    return fair


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 where all are alike, 1/n where one has everything; 1 where there is nothing to share."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def fairness(service: Mapping[str, float], wanted: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Jain's index of what each tenant got for each unit that it should have got, of those that wanted anything.

    Where all wanted more than they got, that is the index of weighted service.
    """
    asking = {tenant: amount for tenant, amount in wanted.items() if amount > 0}
    fair = max_min(sum(service[tenant] for tenant in asking), asking, weights)
    return jain(service[tenant] / fair[tenant] for tenant in asking if fair[tenant] > 0)
