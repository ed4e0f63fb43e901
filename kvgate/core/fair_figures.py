"""The figures of fairness as an operator sees them: one table of names, meanings and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgate.core.fairness import MILLI, Void

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgate.core.fairness import FairView
    from kvgate.core.pool import KvPool


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, perhaps with a value for each of several words (`label` says of what)."""

    name: str
    meaning: str
    label: str
    values: tuple[tuple[str, float], ...]


def fair_figures(view: FairView, pool: KvPool) -> Iterator[Figure]:
    """All of them; each tells of the whole ledger, and is the same on every gate that shares it."""
    here = view.tenants

    def by_tenant(name: str, meaning: str, values: Iterator[float]) -> Figure:
        return Figure(name, meaning, "tenant", tuple(zip((one.name for one in here), values, strict=True)))

    def alone(name: str, meaning: str, value: float) -> Figure:
        return Figure(name, meaning, "", (("", value),))

    yield by_tenant(
        "kvgate_kv_filled_tokens",
        "Cells that have a token in them by now, of those reserved (kvgate_kv_held_tokens).",
        (one.filled_tokens for one in here),
    )
    yield by_tenant(
        "kvgate_service_recent",
        "Service in the last minute, of tenants that hold or wait: tokens at their prices, not divided by weight.",
        (one.service_milli / MILLI for one in here),
    )
    yield by_tenant(
        "kvgate_service_share_ratio",
        "A tenant's part of that service. Where all wait all the time it is kvgate_weight_share_ratio.",
        (view.service_share(one) for one in here),
    )
    yield by_tenant(
        "kvgate_weight_share_ratio",
        "A tenant's part of the weights of those that hold or wait.",
        (view.weight_share(one) for one in here),
    )
    yield by_tenant(
        "kvgate_queue_oldest_seconds",
        "Seconds that a tenant's oldest waiting request has waited; 0 where none waits.",
        (0.0 if one.oldest_since_s is None else max(view.now_s - one.oldest_since_s, 0.0) for one in here),
    )
    yield alone(
        "kvgate_starvation_age_seconds", "Seconds that the oldest waiting request has waited.", view.oldest_wait_s
    )
    if (jain := view.jain) is not None:
        yield alone(
            "kvgate_fairness_jain_ratio",
            "Jain's index over kvgate_service_recent divided by weight: 1 where all have the same. Means something "
            "while all of them want more.",
            jain,
        )
    yield alone(
        "kvgate_service_gap",
        "Between the most and the least counter of tenants in line, now; service divided by weight.",
        view.gap_milli / MILLI,
    )
    yield alone(
        "kvgate_service_gap_max", "The largest such gap since the ledger was last idle.", view.gap_max_milli / MILLI
    )
    yield alone(
        "kvgate_service_gap_bound",
        "What the service of two tenants that both wait all the time can differ by at most, divided by the least "
        "weight here; kvgate_fairness_void says what it does not cover.",
        view.rule.gap_bound_milli(pool, view.least_weight_milli) / MILLI,
    )
    yield Figure(
        "kvgate_fairness_void",
        "1 where this has happened since the ledger was last idle, which the bound does not cover.",
        "by",
        tuple((void.value, float(void in view.voids)) for void in Void),
    )
    yield alone(
        "kvgate_queue_bypasses", "Times that somebody passed the first in line, which did not fit.", view.bypasses
    )
    yield alone("kvgate_queue_drains", "Times that nobody else was let in for the sake of the first.", view.drains)
    yield alone(
        "kvgate_queue_drain_idle_seconds",
        "Seconds in which somebody who would have fitted was kept out for it.",
        view.drain_idle_s,
    )
    yield alone(
        "kvgate_prefill_tokens",
        "Tokens of prompts that were let in and have no output yet (engine.prefill_tokens_max bounds them).",
        view.prefill_tokens,
    )
