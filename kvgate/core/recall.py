"""Whether a model still knows at the end of a long context what stood in it: log-probabilities against controls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from statistics import mean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL_NATS_MIN: Final = 1.0
"""By so much a needle right before the question must make the answer likelier, or the model is blind: no verdict."""

RECALLED_MIN: Final = 0.5
"""A depth is recalled where the needle there helps at least half as much as right before the question."""


class RecallVerdict(Enum):
    """Each verdict, what it means and what to do."""

    RECALLS = ("recalls", "what stands at any depth is known at the end", "nothing")
    FORGETS = (
        "forgets",
        "what stands at some depth is not known at the end, though the same is known where it stands near",
        "look at rope scaling, n_ctx_train, --context-shift and KV precision (-ctk f16), or use less context",
    )
    BLIND = (
        "blind",
        "the model does not even use what stands right before the question: this test tells nothing of it",
        "take another model for this test: this one does not copy from its context",
    )

    @property
    def label(self) -> str:
        """Its name in every output."""
        return self.value[0]

    @property
    def meaning(self) -> str:
        """What it says."""
        return self.value[1]

    @property
    def to_do(self) -> str:
        """What to set."""
        return self.value[2]


@dataclass(frozen=True, slots=True)
class Recall:
    """What was measured, in nats per token of the answer.

    Args:
        without: no needle in the context.
        near: the needle right before the question.
        by_depth: the needle at each depth, 0 being the beginning.
    """

    without: float
    near: float
    by_depth: tuple[tuple[float, float], ...]

    @property
    def control_nats(self) -> float:
        """How much the needle helps where it is near."""
        return self.near - self.without

    @property
    def is_blind(self) -> bool:
        """Whether it does not help even there."""
        return self.control_nats < CONTROL_NATS_MIN

    def share(self, nats: float) -> float:
        """How much of that help is left, 1 being all of it; 0 for the blind."""
        return 0.0 if self.is_blind else (nats - self.without) / self.control_nats

    @property
    def shares(self) -> tuple[tuple[float, float], ...]:
        """The same for each depth."""
        return tuple((depth, self.share(nats)) for depth, nats in self.by_depth)

    @property
    def verdict(self) -> RecallVerdict:
        """Blind before all else: without its positive control no depth says anything."""
        if self.is_blind:
            return RecallVerdict.BLIND
        kept = all(share >= RECALLED_MIN for _, share in self.shares)
        return RecallVerdict.RECALLS if kept else RecallVerdict.FORGETS


def mean_of(words: Sequence[Recall]) -> Recall:
    """The mean of several needles, measured at the same depths."""
    depths = [depth for depth, _ in words[0].by_depth]
    return Recall(
        mean(one.without for one in words),
        mean(one.near for one in words),
        tuple((depth, mean(one.by_depth[at][1] for one in words)) for at, depth in enumerate(depths)),
    )
