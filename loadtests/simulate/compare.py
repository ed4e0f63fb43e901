"""Runs the policies one after the other on the same workload."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from loadtests.simulate.policies import policy
from loadtests.simulate.results import result
from loadtests.simulate.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.core.fairness import FairRule
    from loadtests.simulate.progress import Progress
    from loadtests.simulate.results import Result
    from loadtests.simulate.workloads import Workload


def compare(
    workload: Workload,
    policies: Sequence[str],
    progress: Progress | None = None,
    *,
    patience_s: float = math.inf,
    rule: FairRule | None = None,
) -> list[Result]:
    """Each policy's result, in this order."""
    found = []
    for name in policies:
        ledger = policy(name, workload, rule)
        simulation = Simulation(workload, ledger, patience_s=patience_s)
        if progress is not None:
            progress.begin(f"{workload.name} / {name}")
            simulation.told = progress.told
        begun = time.perf_counter()
        measures = simulation.run()
        took_s = time.perf_counter() - begun
        found.append(result(measures, name, ledger.ruling(workload.duration_s), took_s))
        if progress is not None:
            progress.end(workload.duration_s, measures.moments)
    return found
