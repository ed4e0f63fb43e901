"""A run in figures: what the tables, the pictures and `--json` show of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from loadtests.simulate.shares import fairness, max_min

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from loadtests.simulate.measures import Measures, Sample

WINDOWS: Final = 10


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds by rank; 0 where there are none."""

    p50: float
    p95: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """The nearest ranks."""
        ranked = sorted(seconds)
        if not ranked:
            return cls(0.0, 0.0, 0.0)
        return cls(*(ranked[math.ceil(part * len(ranked)) - 1] for part in (0.5, 0.95, 1.0)))


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the policy says of itself after the run; `voids` is what its bound did not cover.

    `bound` is None where the policy promises none.
    """

    bound: float | None = None
    voids: tuple[str, ...] = ()
    drains: int = 0
    bypasses: int = 0
    drain_idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantResult:
    """One tenant's part of a run.

    Args:
        wanted_service: what all its requests would have taken; None where it would have sent for ever.
        fair_service: its part in the weighted max-min fair split of all service that was given, by what it wanted.
        wait_s: in the queue; who still waits at the end counts with its wait so far.
        token_s: from token to token, the mean of each answer.
        starved_s: the longest stretch with a request waiting and none running.
    """

    name: str
    weight: float
    tier: str
    sent: int
    finished: int
    refused: int
    service: float
    wanted_service: float | None
    fair_service: float
    wait_s: Spread
    first_token_s: Spread
    token_s: Spread
    starved_s: float

    @property
    def of_fair(self) -> float:
        """1 where it got what was fair, more where it got more."""
        return self.service / self.fair_service if self.fair_service else 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one workload.

    Args:
        jain: of service for each unit of fair service, whole run; all that wanted any.
        jain_windows: the same for each tenth of the run, the mean.
        gap: the largest difference of weighted service between two tenants that both waited meanwhile.
        idle_slot_s: slots that were free while a request that fits stood first in its tenant's queue, by reason.
        slots_busy: of all slot-seconds.
    """

    workload: str
    policy: str
    seed: int
    duration_s: float
    events: int
    took_s: float
    tokens_per_s: float
    slots_busy: float
    jain: float
    jain_windows: float
    gap: float
    gap_between: tuple[str, str] | None
    ruling: Ruling
    wait_s: Spread
    first_token_s: Spread
    token_s: Spread
    sent: int
    finished: int
    waiting: int
    refused: dict[str, int]
    idle_slot_s: dict[str, float]
    tenants: tuple[TenantResult, ...]
    samples: tuple[Sample, ...]

    @property
    def starved(self) -> TenantResult:
        """Who starved longest."""
        return max(self.tenants, key=lambda tenant: tenant.starved_s)

    @property
    def idle_for_nothing_s(self) -> float:
        """Slot-seconds that no reason explains: 0 is work conservation."""
        return self.idle_slot_s.get("", 0.0)

    def as_json(self) -> dict[str, Any]:
        """All but the samples."""
        found = {name: value for name, value in asdict(self).items() if name != "samples"}
        return found | {"starved_s": self.starved.starved_s, "idle_for_nothing_s": self.idle_for_nothing_s}


def result(measures: Measures, policy: str, ruling: Ruling, took_s: float) -> Result:
    """The figures of a run that is over."""
    workload, tallies = measures.workload, measures.tallies
    weights = {sender.name: sender.weight for sender in workload.senders}
    service = {name: tally.service for name, tally in tallies.items()}
    wanted = {name: tally.wanted for name, tally in tallies.items()}
    fair = max_min(sum(service.values()), wanted, weights)
    waits = {
        name: tally.waits_s + [measures.ended_s - q.since_s for q in tally.queue.values()]
        for name, tally in tallies.items()
    }
    refused: dict[str, int] = {}
    for tally in tallies.values():
        for reason, count in tally.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    tenants = tuple(
        TenantResult(
            sender.name,
            sender.weight,
            sender.tier,
            tally.sent,
            tally.finished,
            tally.refused.total(),
            tally.service,
            None if math.isinf(tally.wanted) else tally.wanted,
            fair[sender.name],
            Spread.of(waits[sender.name]),
            Spread.of(tally.first_tokens_s),
            Spread.of(tally.tokens_s),
            tally.starved_s,
        )
        for sender in workload.senders
        for tally in (tallies[sender.name],)
    )
    return Result(
        workload=workload.name,
        policy=policy,
        seed=workload.seed,
        duration_s=measures.ended_s,
        events=measures.moments,
        took_s=took_s,
        tokens_per_s=sum(t.input_tokens + t.output_tokens for t in tallies.values()) / measures.ended_s,
        slots_busy=measures.busy_slot_s / (measures.ended_s * workload.engine.pool.slots),
        jain=fairness(service, wanted, weights),
        jain_windows=_by_windows(measures.samples, weights),
        gap=measures.gaps.largest,
        gap_between=measures.gaps.between,
        ruling=ruling,
        wait_s=Spread.of([s for found in waits.values() for s in found]),
        first_token_s=Spread.of([s for tally in tallies.values() for s in tally.first_tokens_s]),
        token_s=Spread.of([s for tally in tallies.values() for s in tally.tokens_s]),
        sent=sum(t.sent for t in tallies.values()),
        finished=sum(t.finished for t in tallies.values()),
        waiting=sum(len(t.queue) for t in tallies.values()),
        refused=refused,
        idle_slot_s=dict(measures.idle_slot_s),
        tenants=tenants,
        samples=tuple(measures.samples),
    )


def _by_windows(samples: Sequence[Sample], weights: dict[str, float]) -> float:
    """The mean of the index over windows; what was sent before and not served by then is still wanted in a window."""
    edges = [samples[at * (len(samples) - 1) // WINDOWS] for at in range(WINDOWS + 1)]
    found = []
    for before, after in pairwise(edges):
        service = {name: after.service[name] - before.service[name] for name in weights}
        wanted = {name: after.wanted[name] - before.service[name] for name in weights}
        found.append(fairness(service, wanted, weights))
    return sum(found) / len(found)
