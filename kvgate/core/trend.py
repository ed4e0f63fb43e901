"""Whether a series of figures drifts: its last third against its first, by a stated rule."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLES_MIN: Final = 6
"""With fewer samples a drift cannot be told from chance."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A series' beginning and end: the medians of its first and its last third."""

    first: float
    last: float

    @property
    def change(self) -> float:
        """By how much it changed."""
        return self.last - self.first

    @property
    def ratio(self) -> float:
        """By which share of the beginning it changed."""
        return self.change / self.first if self.first else 0.0


def trend_of(samples: Sequence[float]) -> Trend | None:
    """The trend of a series; None where it is too short to have one."""
    if len(samples) < SAMPLES_MIN:
        return None
    third = len(samples) // 3
    return Trend(median(samples[:third]), median(samples[-third:]))
