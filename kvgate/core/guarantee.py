"""Which part of the pool is guaranteed to whom, and how much of it is held back while its owner is away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Tenant

PPM = 1_000_000
_NEARLY_PPM = 10_000
"""A third of three slots is one slot, however many threes it is written with."""


class Part(NamedTuple):
    """Slots and cells."""

    slots: int
    tokens: int


def guaranteed_part(ratio_ppm: int, pool: KvPool) -> Part:
    """What a share of the pool is.

    Slots are rounded down, else the shares could exceed the whole: a share of less than a slot guarantees cells
    alone. Where each slot has its own cells, whole slots come with theirs.
    """
    slots = min((ratio_ppm * pool.slots + _NEARLY_PPM) // PPM, pool.slots)
    tokens = ratio_ppm * pool.grantable_tokens // PPM
    if pool.slots * pool.tokens_per_slot <= pool.grantable_tokens:
        tokens = max(tokens, slots * pool.tokens_per_slot)
    return Part(slots, tokens)


@dataclass(slots=True)
class Guarantees:
    """The shares of one ledger, in millionths of its pool, and the parts that follow."""

    ratios_ppm: Mapping[str, int] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def size(self, pool: KvPool) -> None:
        """Work the parts out for this pool."""
        self.parts = {name: guaranteed_part(ratio, pool) for name, ratio in self.ratios_ppm.items()}

    def of(self, tenant: str) -> Part:
        """What is guaranteed to this tenant."""
        return self.parts.get(tenant, Part(0, 0))

    def of_others(self, tenant: str) -> Part:
        """What is guaranteed to all others together."""
        others = [part for name, part in self.parts.items() if name != tenant]
        return Part(sum(part.slots for part in others), sum(part.tokens for part in others))


def guaranteed(tenants: Iterable[Tenant]) -> dict[str, int]:
    """The shares that these tenants have, as the ledger is told them."""
    return {one.name: one.share.guaranteed_ppm for one in tenants if one.share.guaranteed_ppm}


def over_guaranteed(ratios: Mapping[str, float]) -> str | None:
    """The sentence that says that these shares are more than the whole; None where they are not."""
    total = sum(ratios.values())
    if total <= 1 + 1e-9:
        return None
    named = ", ".join(f"{name} {ratio:g}" for name, ratio in sorted(ratios.items()) if ratio)
    return (
        f"the guaranteed_ratio of all tenants together is {total:g}, and there is only 1 to share ({named}): "
        "lower some of them"
    )
