"""How the items of a conversation belong together: turns, and calls with their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kind(Enum):
    """What an item is to the conversation. A thought belongs to what follows it."""

    SYSTEM = "system"
    USER = "user"
    ANSWER = "answer"
    CALL = "call"
    RESULT = "result"
    THOUGHT = "thought"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Item:
    """One element of a conversation's list: a message, or an item of it.

    Args:
        kind: what it is.
        role: what its API calls it, for telling what went.
        weight: its size in bytes, an estimate of its tokens.
        calls, results: the ids of the tool calls it makes, and of those it gives the results of.
        tools: the names of the tools it calls.
        speaks: whether a result holds words of the user too.
    """

    kind: Kind
    role: str = ""
    weight: int = 1
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    tools: frozenset[str] = frozenset()
    speaks: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Items of a turn that stay or go together: a message, or calls with all their results."""

    items: tuple[int, ...]
    kind: Kind
    is_whole: bool = True


@dataclass(slots=True)
class Turn:
    """A user message and all that follows it until the next; what precedes the first one is a turn without."""

    steps: list[Step] = field(default_factory=list)

    @property
    def items(self) -> tuple[int, ...]:
        """The indexes of all of them, in order."""
        return tuple(sorted(item for step in self.steps for item in step.items))


def turns_of(items: Sequence[Item]) -> list[Turn]:
    """The turns, in order. System items belong to none.

    A user message inside a call that still waits for a result begins no turn: the call would be torn apart.
    """
    group = _groups(items)
    open_until = -1
    turns: list[Turn] = []
    members: dict[int, list[int]] = {}
    reach: dict[int, int] = {}
    for at, root in enumerate(group):
        members.setdefault(root, []).append(at)
        reach[root] = at
    seen: set[int] = set()
    for at, item in enumerate(items):
        if item.kind is Kind.SYSTEM:
            continue
        if not turns or (item.kind is Kind.USER and at > open_until):
            turns.append(Turn())
        open_until = max(open_until, reach[group[at]])
        if group[at] not in seen:
            seen.add(group[at])
            turns[-1].steps.append(_step(items, members[group[at]]))
    return turns


def _step(items: Sequence[Item], members: list[int]) -> Step:
    kinds = {items[item].kind for item in members}
    kind = next((one for one in (Kind.CALL, Kind.ANSWER) if one in kinds), items[members[0]].kind)
    own = set(members)
    between = range(members[0], members[-1] + 1)
    is_whole = all(item in own or items[item].kind is Kind.SYSTEM for item in between)
    known = kind if kind in (Kind.USER, Kind.ANSWER, Kind.CALL) else Kind.OTHER
    return Step(tuple(members), known, is_whole)


def _groups(items: Sequence[Item]) -> list[int]:
    """For each item the first of those that it stays or goes with.

    A result goes with the latest call of its id (ids come again in later turns), or, where it names none, with the
    latest call. Calls side by side are parallel; a thought is part of what follows it.
    """
    group = list(range(len(items)))

    def root(at: int) -> int:
        while group[at] != at:
            group[at] = group[group[at]]  # the way is halved, or a hostile history would make it long
            at = group[at]
        return at

    def join(one: int, other: int) -> None:
        low, high = sorted((root(one), root(other)))
        group[high] = low

    caller: dict[str, int] = {}
    latest: int | None = None
    for at, item in enumerate(items):
        if at and items[at - 1].kind is Kind.THOUGHT and item.kind not in (Kind.SYSTEM, Kind.USER):
            join(at - 1, at)
        if item.kind is Kind.CALL:
            if at and items[at - 1].kind is Kind.CALL:
                join(at - 1, at)
            caller.update(dict.fromkeys(item.calls, at))
            latest = at
        if item.kind is Kind.RESULT:
            known = [caller[one] for one in item.results if one in caller]
            for one in known if item.results else [latest] if latest is not None else []:
                join(one, at)
    return [root(at) for at in range(len(items))]
