"""Runs the policies one after the other on the same workload."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from loadtests.simulate.policies import POLICIES
from loadtests.simulate.results import result
from loadtests.simulate.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtests.simulate.progress import Progress
    from loadtests.simulate.results import Result
    from loadtests.simulate.workloads import Workload


def compare(
    workload: Workload,
    policies: Sequence[str],
    progress: Progress | None = None,
    *,
    rpm: int | None = None,
    patience_s: float | None = None,
) -> list[Result]:
    """Each policy's result, in this order.

    Where no limit is given for the policy `rpm`, it is what the engine could serve a minute, in even shares.
    """
    found = []
    for name in policies:
        policy = POLICIES[name](workload, rpm or workload.even_requests_per_minute)
        simulation = Simulation(workload, policy, patience_s=math.inf if patience_s is None else patience_s)
        if progress is not None:
            progress.begin(f"{workload.name} / {name}")
            simulation.told = progress.told
        begun = time.perf_counter()
        measures = simulation.run()
        took_s = time.perf_counter() - begun
        found.append(result(measures, name, policy.ruling(workload.duration_s), took_s))
        if progress is not None:
            progress.end(workload.duration_s, measures.moments)
    return found
