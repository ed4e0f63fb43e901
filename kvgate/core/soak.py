"""Whether an engine that does the same again and again stays the same: memory, speed and recall, by a stated rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.core.trend import SAMPLES_MIN, trend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.core.trend import Trend

ROUNDS_MIN: Final = SAMPLES_MIN + 1
"""The first round warms caches and is not judged."""

MEMORY_RATIO_MAX: Final = 0.05
MEMORY_MIB_MIN: Final = 32.0
SPEED_RATIO_MIN: Final = -0.2
RECALL_CHANGE_MIN: Final = -0.25

RULE: Final = (
    f"the median of the last third of the rounds against that of the first, the first round left out: memory grew by "
    f"more than {MEMORY_RATIO_MAX:.0%} and {MEMORY_MIB_MIN:g} MiB, speed fell by more than {-SPEED_RATIO_MIN:.0%}, "
    f"recall by more than {-RECALL_CHANGE_MIN:g}"
)


@dataclass(frozen=True, slots=True)
class Round:
    """One round; None where something was not watched."""

    is_fine: bool
    prefill_tokens_per_second: float | None
    tokens_per_second: float | None
    memory_mib: float | None
    recall_share: float | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """What drifted, and the sentence with its figures."""

    what: str
    sentence: str


def drifts(rounds: Sequence[Round]) -> list[Drift]:
    """What drifted over these rounds, by `RULE`; nothing where there are too few."""
    judged = rounds[1:]
    found = []
    memory = _trend([one.memory_mib for one in judged])
    if memory is not None and memory.change > MEMORY_MIB_MIN and memory.ratio > MEMORY_RATIO_MAX:
        found.append(Drift("memory", f"memory grew from {memory.first:.0f} to {memory.last:.0f} MiB"))
    for what, values in (
        ("prefill speed", [one.prefill_tokens_per_second for one in judged]),
        ("speed", [one.tokens_per_second for one in judged]),
    ):
        speed = _trend(values)
        if speed is not None and speed.ratio < SPEED_RATIO_MIN:
            found.append(Drift(what, f"{what} fell from {speed.first:.1f} to {speed.last:.1f} tokens a second"))
    recall = _trend([one.recall_share for one in judged])
    if recall is not None and recall.change < RECALL_CHANGE_MIN:
        found.append(Drift("recall", f"recall fell from {recall.first:.2f} to {recall.last:.2f}"))
    return found


def _trend(values: Sequence[float | None]) -> Trend | None:
    return trend_of([value for value in values if value is not None])
