"""What a tenant's service is, what of it is still fair, and the figures that show it (DESIGN section 6).

The rule is the weighted Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024, arXiv 2401.00588); `core.fair_queue` keeps the counters, `core.ledger` decides by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgate.core.ask import Usage
    from kvgate.core.pool import KvPool

MILLI = 1000
"""Prices, weights and service are whole thousandths: sums of whole numbers are exact in every language."""


class Void(StrEnum):
    """What has happened, since the ledger was last idle, that the bound on the service gap does not cover."""

    BYPASS = "bypass"
    TIERS = "tiers"
    QUOTA = "quota"
    CACHE_DISCOUNT = "cache_discount"


@dataclass(frozen=True, slots=True)
class FairRule:
    """What the operator says of fairness.

    Args:
        input_price_milli: service of one prompt token, in thousandths.
        cached_input_price_milli: of one whose KV was reused.
        output_price_milli: of one generated token.
        bypass_max: how often the first in line may be passed because it does not fit; then nobody else goes in.
        prefill_tokens_max: prompt tokens granted whose first output has not come; a larger prompt goes alone.
        lent_output_tokens_max: a guaranteed share that is idle is lent to requests of at most this output, so that
            its owner has it back when they end.
    """

    input_price_milli: int = 1000
    cached_input_price_milli: int = 250
    output_price_milli: int = 2000
    bypass_max: int = 4
    prefill_tokens_max: int | None = None
    lent_output_tokens_max: int = 512

    def service_milli(self, usage: Usage) -> int:
        """The service that this usage is, in thousandths, before it is divided by a weight."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        return (
            self.input_price_milli * (usage.prompt_tokens - cached)
            + self.cached_input_price_milli * cached
            + self.output_price_milli * usage.output_tokens
        )

    def gap_bound_milli(self, pool: KvPool, least_weight_milli: int) -> int:
        """What the service of two tenants that both wait all the time can differ by at most, in thousandths.

        Twice the most that one can be ahead by: a whole prompt, or all the output that the pool can hold unpaid.
        """
        prompt = self.input_price_milli * min(pool.tokens_per_slot * pool.slots, pool.tokens)
        output = self.output_price_milli * pool.tokens
        return 2 * max(prompt, output) * MILLI // least_weight_milli


def weighted(service_milli: int, weight_milli: int) -> int:
    """Service divided by a weight, in thousandths."""
    return service_milli * MILLI // weight_milli


@dataclass(frozen=True, slots=True)
class TenantService:
    """One tenant that holds or waits, as the figures show it.

    Args:
        counter_milli: its virtual token counter: weighted service, with what it was lifted by.
        service_milli: unweighted service of the last minute.
        filled_tokens: of the cells that it holds, those that have a token in them by now.
        waiting: its requests in the queue.
        oldest_since_s: since when the first of them waits.
    """

    name: str
    weight_milli: int
    counter_milli: int
    service_milli: int
    filled_tokens: int
    waiting: int
    oldest_since_s: float | None


@dataclass(frozen=True, slots=True)
class FairView:
    """How fair the ledger is at one moment.

    Args:
        tenants: those that hold or wait.
        gap_milli: between the counters of the tenants in line, now.
        gap_max_milli: the largest such since the ledger was last idle.
        bypasses: how often somebody passed the first in line, ever.
        drains: how often nobody else was let in for its sake, ever.
        drain_idle_s: how long somebody who would have fitted was kept out for it, ever.
        prefill_tokens: prompts granted whose first output has not come.
        voids: what the bound does not cover and has happened.
        now_s: that moment, on the ledger's clock.
        rule: what the ledger goes by.
    """

    tenants: tuple[TenantService, ...]
    gap_milli: int
    gap_max_milli: int
    bypasses: int
    drains: int
    drain_idle_s: float
    prefill_tokens: int
    voids: frozenset[Void]
    now_s: float
    rule: FairRule

    @property
    def oldest_wait_s(self) -> float:
        """How long the one has waited that has waited longest."""
        since_s = [one.oldest_since_s for one in self.tenants if one.oldest_since_s is not None]
        return max(self.now_s - min(since_s, default=self.now_s), 0.0)

    @property
    def least_weight_milli(self) -> int:
        """The least weight of those that wait, else of those that are here; what the bound is divided by."""
        waiting = [one.weight_milli for one in self.tenants if one.waiting]
        return min(waiting or [one.weight_milli for one in self.tenants], default=MILLI)

    @property
    def jain(self) -> float | None:
        """Jain's index over the weighted service of the last minute, 1 where all have the same.

        It is 1/n where one of n has all, None where nobody has had any.
        """
        return jain_index(weighted(one.service_milli, one.weight_milli) for one in self.tenants)

    def service_share(self, one: TenantService) -> float:
        """Its part of the service that those here have had in the last minute."""
        total = sum(other.service_milli for other in self.tenants)
        return one.service_milli / total if total else 0.0

    def weight_share(self, one: TenantService) -> float:
        """Its part of the weights of those here."""
        return one.weight_milli / sum(other.weight_milli for other in self.tenants)


def jain_index(figures: Iterable[float]) -> float | None:
    """(sum x)^2 / (n sum x^2), of Jain, Chiu and Hawe 1984; None where all are 0 or there are none."""
    found = list(figures)
    squares = sum(figure * figure for figure in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else None
