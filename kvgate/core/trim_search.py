"""Which rung of a plan to count next: aimed by estimates, decided by counts, in a bounded number of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgate.core.trim import Plan

COUNTS_MAX: Final = 7
"""Counts of one trim. Each can halve what is left of `RUNGS_MAX` = 2^5 - 1 rungs, so five always find the first that
fits, and two more let the first ones go where the estimate aims. Where that is good two do: the rung that fits, and
the one before it, that does not. In 300 simulated conversations, half of them with tokens of very different lengths,
it took 2.3 on average, and 3.5 where calls go by themselves."""


ROLES_MAX: Final = 12
"""Roles of one run of items that are told one by one."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Items that went, from `first` to `last`: their roles, and an estimate of their tokens."""

    first: int
    last: int
    roles: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What a trim did: no text, only places and sizes.

    `how` is the strategy, or the side of a text; `tokens` is the exact difference, summed over a list of prompts;
    `counts` how often the engine counted for it.
    """

    how: str
    messages: int
    tokens: int
    counts: int
    dropped: tuple[Dropped, ...] = ()


def next_rung(plan: Plan, known: Mapping[int, int | None], prompt_tokens: int, target_tokens: int) -> int | None:
    """The rung to count next; None where it is decided (`first_fitting`).

    A count is also a bound: what is above a rung that is too large is too large, what is below one that fits fits.
    The estimate interpolates between what was counted. It may aim anywhere while the counts that are left can still
    halve both sides down to nothing.

    Args:
        plan: the ways to trim.
        known: what was counted until now; None for a rung that the engine's counter refused.
        prompt_tokens: the count of the whole prompt.
        target_tokens: the longest prompt that fits.
    """
    fitting = first_fitting(known, target_tokens)
    high = last_rung(plan) + 1 if fitting is None else fitting
    low = max((rung for rung in known if rung < high), default=-1)
    if low + 1 >= high:
        return None
    aim = _aim(plan, known, (low, high), (prompt_tokens, target_tokens))
    side = (1 << COUNTS_MAX - len(known) - 1) - 1
    return max(min(aim, low + 1 + side), high - 1 - side)


def first_fitting(known: Mapping[int, int | None], target_tokens: int) -> int | None:
    """The rung that drops least of those that were counted and fit."""
    return min(
        (rung for rung, tokens in known.items() if tokens is not None and tokens <= target_tokens), default=None
    )


def foreseen(plan: Plan, prompt_tokens: int, target_tokens: int) -> int | None:
    """The rung that a trim would end at by the estimates alone, before any count; None where none would do."""
    if not plan.rungs:
        return None
    aim = _aim(plan, {}, (-1, len(plan.rungs)), (prompt_tokens, target_tokens))
    estimate = prompt_tokens * plan.kept_weights[aim] / plan.weight
    return aim if estimate <= target_tokens else None


def _aim(plan: Plan, known: Mapping[int, int | None], between: tuple[int, int], tokens: tuple[int, int]) -> int:
    """The first rung strictly between two whose estimate fits, else the one before the upper bound."""
    (low, high), (prompt_tokens, target_tokens) = between, tokens
    kept = plan.kept_weights
    points = {kept[rung]: found for rung, found in known.items() if found is not None} | {plan.weight: prompt_tokens}
    heavy = plan.weight if low < 0 else kept[low]
    light = 0 if high > last_rung(plan) else kept[high]
    # Beside two that fit, their own slope is nearer to what lies before them than that of the whole range.
    lighter = max((weight for weight in points if weight < light), default=None)
    start, end = (light, heavy) if lighter is None else (lighter, light)
    slope = (points.get(end, prompt_tokens) - points.get(start, 0)) / max(end - start, 1)
    base = points.get(light, 0)
    fits = (at for at in range(low + 1, high) if base + slope * (kept[at] - light) <= target_tokens)
    return next(fits, high - 1)


def last_rung(plan: Plan) -> int:
    """The rung that drops all that may go; -1 where nothing may."""
    return len(plan.rungs) - 1


def told(plan: Plan, rung: int, before_tokens: int, after_tokens: int, *, how: str, counts: int) -> Trimmed:
    """What went at this rung; the exact number of tokens, shared out over the items by their size."""
    gone = sorted(plan.dropped(rung))
    tokens = before_tokens - after_tokens
    per_byte = tokens / max(sum(plan.items[item].weight for item in gone), 1)
    runs = [[item for _, item in run] for _, run in groupby(enumerate(gone), lambda pair: pair[1] - pair[0])]
    dropped = tuple(
        Dropped(
            run[0],
            run[-1],
            ",".join([*(plan.items[item].role for item in run[:ROLES_MAX]), *(["..."] if run[ROLES_MAX:] else [])]),
            round(per_byte * sum(plan.items[item].weight for item in run)),
        )
        for run in runs
    )
    return Trimmed(how, len(gone), tokens, counts, dropped)
