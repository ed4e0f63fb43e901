"""How long prompts and answers are: distributions by their quantiles, drawn with a generator that has a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random
    from typing import Self


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts whose logarithm is uniform between any two of the quantiles.

    Args:
        quantiles: (share of all, tokens), ascending, from share 0 to share 1.
    """

    quantiles: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.quantiles]
        tokens = [count for _, count in self.quantiles]
        if shares[0] != 0 or shares[-1] != 1 or any(a >= b for a, b in pairwise(shares)):
            raise ValueError("quantiles go from share 0 to share 1, ascending")
        if tokens[0] < 1 or any(a > b for a, b in pairwise(tokens)):
            raise ValueError("a longer share cannot be of shorter prompts")

    @classmethod
    def always(cls, tokens: int) -> Self:
        """One length."""
        return cls(((0.0, tokens), (1.0, tokens)))

    @classmethod
    def between(cls, low: int, high: int) -> Self:
        """Anything between two lengths, short ones more often."""
        return cls(((0.0, low), (1.0, high)))

    @property
    def longest(self) -> int:
        """No draw is longer."""
        return self.quantiles[-1][1]

    def draw(self, random: Random) -> int:
        """One length."""
        share = random.random()
        for (low, low_tokens), (high, high_tokens) in pairwise(self.quantiles):
            if share < high:
                return int(low_tokens * (high_tokens / low_tokens) ** ((share - low) / (high - low)))
        return self.longest

    def mean(self) -> float:
        """What draws come to on average, before they are rounded down."""
        return sum((high - low) * _mean(a, b) for (low, a), (high, b) in pairwise(self.quantiles))


def _mean(low: int, high: int) -> float:
    return float(low) if low == high else (high - low) / math.log(high / low)


HEAVY_TAILED: Final = Lengths(((0.0, 32), (0.80, 2_048), (0.92, 8_192), (1.0, 131_072)))
"""Prompts as long-context services see them: 80% under 2k tokens, 92% under 8k, the tail up to 128k."""
