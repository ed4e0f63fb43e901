"""What of a conversation may go, in which order, without leaving one that its template would not accept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Final

from kvgate.core.tenant import TrimStrategy
from kvgate.core.turns import Kind, turns_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgate.core.trim_policy import TrimPolicy
    from kvgate.core.turns import Item, Step, Turn

RUNGS_MAX: Final = 31
"""Ways to trim one conversation: as many as five counts can tell apart (`trim_search`)."""

SHARES: Final = (1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 2)
"""How much of what is left one rung takes at least; the first share that needs no more than `RUNGS_MAX` rungs."""

BYTES_PER_TOKEN: Final = 4
"""What a stride in tokens is taken for, so that the places of its cuts depend on nothing but the bytes before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a conversation would be trimmed, rung by rung; each rung drops all that the one before it drops, and more.

    Args:
        items: the conversation.
        drops: what goes, in this order; each part is whole.
        rungs: how many of `drops` each rung takes. None where nothing may go.
        base_weight: bytes of the request outside the list.
        last_turn: the items of the last turn, which stays.
    """

    items: tuple[Item, ...]
    drops: tuple[tuple[int, ...], ...]
    rungs: tuple[int, ...]
    base_weight: int
    last_turn: frozenset[int]

    def dropped(self, rung: int) -> frozenset[int]:
        """The indexes of the items that a rung drops."""
        return frozenset(item for part in self.drops[: self.rungs[rung]] for item in part)

    @property
    def weight(self) -> int:
        """Bytes of the whole request."""
        return self.base_weight + sum(item.weight for item in self.items)

    @property
    def kept_weights(self) -> tuple[int, ...]:
        """Bytes that each rung leaves."""
        gone = (0, *accumulate(sum(self.items[item].weight for item in part) for part in self.drops))
        return tuple(self.weight - gone[taken] for taken in self.rungs)


def plan(items: Sequence[Item], policy: TrimPolicy, base_weight: int = 0) -> Plan:
    """The ways to trim a conversation.

    What stays, whatever happens: system and developer messages, where they stand; the last user message and all
    that follows it; the turn of a pinned item. What goes, goes whole: first a turn, from a user message to before
    the next, so that what is left begins with a user message and alternates as it did. Only `tool-output-first`
    goes into turns: it takes calls together with all their results, where no two messages become neighbours that
    no template expects side by side, and of the last turn all but the latest.
    """
    found = turns_of(items)
    last_turn = frozenset(found[-1].items) if found else frozenset()
    loose = [turn for turn in found[:-1] if not policy.pinned & set(turn.items)]
    phases = _phases(items, found, loose, policy)
    drops = tuple(part for phase in phases for part in phase)
    weights = [[sum(items[item].weight for item in part) for part in phase] for phase in phases]
    strides = policy.stride_tokens * BYTES_PER_TOKEN if policy.strategy is not TrimStrategy.MIDDLE_OUT else 0
    rungs = _strides(weights, strides) if strides else _rungs([weight for phase in weights for weight in phase])
    return Plan(tuple(items), drops, rungs, base_weight, last_turn)


def _phases(
    items: Sequence[Item], found: list[Turn], loose: list[Turn], policy: TrimPolicy
) -> list[list[tuple[int, ...]]]:
    whole = [turn.items for turn in loose]
    match policy.strategy:
        case TrimStrategy.OLDEST_FIRST:
            return [whole]
        case TrimStrategy.MIDDLE_OUT:
            return [_middle_out(whole, [sum(items[item].weight for item in part) for part in whole])]
        case TrimStrategy.TOOL_OUTPUT_FIRST:
            early = list(_calls(items, found, policy, max(policy.keep_calls, 1)))
            gone = {item for part in early for item in part}
            rest = [tuple(item for item in part if item not in gone) for part in whole]
            gone |= {item for part in rest for item in part}
            late = [part for part in _calls(items, found[-1:], policy, 1) if not gone & set(part)]
            return [early, [part for part in rest if part], late]


def _middle_out(parts: list[tuple[int, ...]], weights: list[int]) -> list[tuple[int, ...]]:
    """From the middle outwards, so that what stays of the beginning and of the end weighs about the same."""
    total, before = sum(weights), 0
    middle = 0
    while middle < len(parts) and 2 * (before + weights[middle]) <= total:
        before += weights[middle]
        middle += 1
    low, high = middle, middle
    left, right = before, total - before
    order = []
    while low > 0 or high < len(parts):
        if high == len(parts) or (low > 0 and left >= right):
            low -= 1
            left -= weights[low]
            order.append(parts[low])
        else:
            right -= weights[high]
            order.append(parts[high])
            high += 1
    return order


def _calls(items: Sequence[Item], turns: list[Turn], policy: TrimPolicy, keep: int) -> Iterator[tuple[int, ...]]:
    """Calls with their results that may go by themselves, the oldest first; the latest `keep` are not among them."""
    calls = [step.items for turn in turns for step in turn.steps if step.kind is Kind.CALL]
    latest = set(calls[-keep:])
    for turn in turns:
        before: Kind | None = None
        for step, after in zip_longest(turn.steps, turn.steps[1:]):
            next_kind = None if after is None else after.kind
            if step.items not in latest and _may_go(items, step, before, next_kind, policy):
                yield step.items
            else:
                before = step.kind


def _may_go(items: Sequence[Item], step: Step, before: Kind | None, after: Kind | None, policy: TrimPolicy) -> bool:
    """Whether calls may go from between these two.

    A question must not come to stand before the next question, nor an answer before another: strict templates
    refuse both. What is of no known kind keeps its neighbours.
    """
    if step.kind is not Kind.CALL or not step.is_whole or policy.pinned & set(step.items):
        return False
    if any(items[item].speaks or items[item].tools & policy.keep_tools for item in step.items):
        return False
    neighbours: dict[Kind, set[Kind | None]] = {
        Kind.USER: {Kind.ANSWER, Kind.CALL},
        Kind.ANSWER: {Kind.USER, Kind.CALL, None},
        Kind.CALL: {Kind.USER, Kind.ANSWER, Kind.CALL, None},
    }
    return before is not None and after in neighbours.get(before, set())


def _rungs(weights: list[int]) -> tuple[int, ...]:
    """After how many parts there is a rung: where a share of what may still go is gone, and at the end.

    Which they are depends on the conversation alone, never on the limit: so a larger limit keeps all that a smaller
    one keeps.
    """
    rungs: list[int] = []
    for share in SHARES:
        rungs, left, gone = [], sum(weights), 0
        for taken, weight in enumerate(weights, 1):
            gone += weight
            if gone >= share * left or taken == len(weights):
                rungs.append(taken)
                left, gone = left - gone, 0
        if len(rungs) <= RUNGS_MAX:
            break
    return tuple(rungs[: RUNGS_MAX - 1] + rungs[-1:] if len(rungs) > RUNGS_MAX else rungs)


def _strides(phases: list[list[int]], stride: int) -> tuple[int, ...]:
    """A rung wherever the dropped bytes of a phase reach another multiple of the stride, and at each phase's end.

    The places depend on the bytes before them alone: the next turn's conversation, which begins with the same
    bytes, is cut at the same place until another stride is needed.
    """
    while True:
        rungs, taken = [], 0
        for phase in phases:
            gone = 0
            for at, weight in enumerate(phase, 1):
                taken += 1
                if (gone + weight) // stride > gone // stride or at == len(phase):
                    rungs.append(taken)
                gone += weight
        if len(rungs) <= RUNGS_MAX:
            return tuple(rungs)
        stride *= 2
