"""The plan of a trim: order, whole parts, strides, and the search for the least that must go."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.tenant import TrimSide, TrimStrategy
from kvgate.core.trim import BYTES_PER_TOKEN, RUNGS_MAX, Plan, plan
from kvgate.core.trim_policy import TrimPolicy
from kvgate.core.trim_search import COUNTS_MAX, first_fitting, foreseen, next_rung, told
from kvgate.core.turns import Item, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = {"s": Kind.SYSTEM, "u": Kind.USER, "a": Kind.ANSWER, "t": Kind.THOUGHT, "o": Kind.OTHER}


def items(text: str, weight: int = 10) -> list[Item]:
    """`s u a t o` are items of a word; `c12` calls 1 and 2, `r1` gives the result of 1, `r` of nobody."""
    return [
        Item(Kind.CALL, "assistant", weight, calls=tuple(word[1:]), tools=frozenset(word[1:]))
        if word[0] == "c"
        else Item(Kind.RESULT, "tool", weight, results=tuple(word[1:].rstrip("!")), speaks=word.endswith("!"))
        if word[0] == "r"
        else Item(KINDS[word], word, weight)
        for word in text.split()
    ]


def policy(strategy: TrimStrategy = TrimStrategy.OLDEST_FIRST, **fields: object) -> TrimPolicy:
    return TrimPolicy(strategy, TrimSide.LEFT, 16, **fields)  # type: ignore[arg-type]  # named by the tests


def drops(text: str, strategy: TrimStrategy, **fields: object) -> list[tuple[int, ...]]:
    return list(plan(items(text), policy(strategy, **fields)).drops)


OLDEST, MIDDLE, TOOLS = TrimStrategy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s u a u a u", [(1, 2), (3, 4)]),
        ("u", []),
        ("s s", []),
        ("", []),
        ("a u a u", [(0,), (1, 2)]),
        ("u u u", [(0,), (1,)]),
        ("u a s u a u a", [(0, 1), (3, 4)]),
        ("u c1 r1 a u c1 r1 a u", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("u c12 r2 r1 a u", [(0, 1, 2, 3, 4)]),
        ("u c1 u r1 a u", [(0, 1, 2, 3, 4)]),
        ("u c1 u r1", []),
        ("u r1 a u", [(0, 1, 2)]),
        ("u c1 r1! a u", [(0, 1, 2, 3)]),
        ("u o a u", [(0, 1, 2)]),
        ("u t c1 r1 a u a", [(0, 1, 2, 3, 4)]),
    ],
)
def test_turns_go_whole_the_oldest_first(text: str, expected: list[tuple[int, ...]]) -> None:
    """From a user message to before the next; system stays where it stands; no call is torn from its result."""
    assert drops(text, OLDEST) == expected


def test_the_middle_goes_first_and_leaves_beginning_and_end() -> None:
    """What stays of both ends weighs about the same; of two that do, the newer stays longer."""
    assert drops("u a u a u a u a u a u", MIDDLE) == [(4, 5), (2, 3), (6, 7), (0, 1), (8, 9)]


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        # The latest call stays by itself; turns go after all older calls have gone.
        ("u c1 r1 a u c2 r2 a u", {}, [(1, 2), (0, 3), (4, 5, 6, 7)]),
        # The calls of the last turn go too, all but the latest.
        ("u c1 r1 c2 r2 c3 r3", {}, [(1, 2), (3, 4)]),
        ("u c1 r1 c2 r2 c3 r3", {"keep_calls": 2}, [(1, 2), (3, 4)]),
        ("u a u c1 r1 c2 r2 c3 r3", {"keep_calls": 2}, [(3, 4), (0, 1), (5, 6)]),
        ("u a u c1 r1 c2 r2 c3 r3", {"keep_calls": 0}, [(3, 4), (5, 6), (0, 1)]),
        # A question would come to stand before the next one, an answer before another.
        ("u c1 r1 u c2 r2", {}, [(0, 1, 2)]),
        ("u a c1 r1 a u c2 r2", {}, [(0, 1, 2, 3, 4)]),
        ("u a c1 r1 u c2 r2", {}, [(2, 3), (0, 1)]),
        # A result with words of the user is no mere result; what nobody knows keeps its neighbours.
        ("u c1 r1! a u c2 r2", {}, [(0, 1, 2, 3)]),
        ("u c1 r1 o u c2 r2", {}, [(0, 1, 2, 3)]),
        ("u c1 r1 a u c2 r2", {"keep_tools": frozenset("1")}, [(0, 1, 2, 3)]),
        ("u c1 c2 r1 r2 a u c3 r3", {}, [(1, 2, 3, 4), (0, 5)]),
        ("u t c1 r1 a u c2 r2", {}, [(1, 2, 3), (0, 4)]),
        ("u c1 r a u c2 r2", {}, [(1, 2), (0, 3)]),
        ("c1 r1 a u c2 r2", {}, [(0, 1, 2)]),
    ],
)
def test_calls_go_first_where_their_neighbours_may_meet(
    text: str, fields: dict[str, object], expected: list[tuple[int, ...]]
) -> None:
    """Whole calls with all their results, the oldest first."""
    assert drops(text, TOOLS, **fields) == expected


@pytest.mark.parametrize("strategy", list(TrimStrategy))
def test_what_is_pinned_keeps_its_turn(strategy: TrimStrategy) -> None:
    """A question stays with its answer, so that what is left alternates."""
    gone = {item for part in drops("u a u a u a u", strategy, pinned=frozenset({3})) for item in part}
    assert gone == {0, 1, 4, 5}


weights = st.lists(st.integers(1, 1000), min_size=1, max_size=400)


def turns(sizes: Sequence[int]) -> list[Item]:
    """A turn of one user message for each size, and a last one that stays."""
    return [Item(Kind.USER, "user", size) for size in sizes] + [Item(Kind.USER, "user", 1)]


@given(weights, st.sampled_from(TrimStrategy), st.sampled_from([0, 0, 1, 10, 100]))
def test_rungs_are_few_and_each_drops_more(sizes: list[int], strategy: TrimStrategy, stride: int) -> None:
    """Each rung drops all that the one before drops; the last drops everything that may go."""
    found = plan(turns(sizes), policy(strategy, stride_tokens=stride))
    assert 1 <= len(found.rungs) <= RUNGS_MAX
    dropped = [found.dropped(rung) for rung in range(len(found.rungs))]
    assert all(one < other for one, other in pairwise(dropped))
    assert dropped[-1] == set(range(len(sizes)))
    assert list(found.kept_weights) == [found.weight - sum(found.items[at].weight for at in gone) for gone in dropped]


def searched(found: Plan, tokens: Sequence[int], target: int) -> tuple[int | None, int]:
    """The rung that the search ends at, and how often it counted."""
    total = sum(tokens)
    known: dict[int, int | None] = {}
    while (rung := next_rung(found, known, total, target)) is not None:
        assert rung not in known
        known[rung] = total - sum(tokens[at] for at in found.dropped(rung))
    return first_fitting(known, target), len(known)


@given(weights, st.data(), st.sampled_from(TrimStrategy), st.sampled_from([0, 5]))
def test_the_search_finds_the_first_rung_that_fits(
    sizes: list[int], data: st.DataObject, strategy: TrimStrategy, stride: int
) -> None:
    """Always, in at most `COUNTS_MAX` counts, however little the sizes say of the tokens."""
    found = plan(turns(sizes), policy(strategy, stride_tokens=stride))
    tokens = [data.draw(st.integers(1, 9)) * draw for draw in data.draw(st.permutations(sizes))] + [3]
    target = data.draw(st.integers(0, sum(tokens)))
    kept = [sum(tokens) - sum(tokens[at] for at in found.dropped(rung)) for rung in range(len(found.rungs))]
    rung, counts = searched(found, tokens, target)
    assert counts <= COUNTS_MAX
    assert rung == next((at for at, left in enumerate(kept) if left <= target), None)


@pytest.mark.parametrize("number", [3, 10, 40, 400])
def test_a_good_estimate_needs_two_counts(number: int) -> None:
    """The one that fits and the one before it; one where there is none before."""
    found = plan(turns([100] * number), policy())
    for target in range(2, number * 25, 25):
        _, counts = searched(found, [25] * number + [1], target)
        assert counts <= 3
        rung = foreseen(found, number * 25 + 1, target)
        assert rung is None or found.kept_weights[rung] <= target * 4.1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 200), st.integers(0, 1000))
def test_a_stride_keeps_the_prefix_for_several_turns(sizes: list[int], stride_tokens: int, more: int) -> None:
    """As a conversation grows turn by turn, the cut goes on only where a stride is used up, and never back.

    So in all other turns the prefix that an engine holds of the last request is one of the next.
    """
    stride = stride_tokens * BYTES_PER_TOKEN
    target = stride + max(sizes) + sum(sizes) // 8 + more
    cuts = [frozenset[int]()]
    for length in range(1, len(sizes) + 1):
        found = plan(turns(sizes[:length]), policy(stride_tokens=stride_tokens))
        tokens = [*sizes[:length], 1]
        if sum(tokens) > target:
            rung, _ = searched(found, tokens, target)
            assert rung is not None
            cuts.append(found.dropped(rung))
    assert all(one <= other for one, other in pairwise(cuts))
    moves = sum(one != other for one, other in pairwise(cuts))
    assert moves <= sum(sizes[at] for at in cuts[-1]) // stride


def test_without_a_stride_the_cut_moves_with_nearly_every_turn() -> None:
    """What the stride is for: forty turns, of which each moves the cut without it, and few with it."""
    moves = {}
    for stride_tokens in (0, 100):
        cuts = []
        for length in range(1, 41):
            found = plan(turns([100] * length), policy(stride_tokens=stride_tokens))
            rung, _ = searched(found, [100] * length + [1], 1000)
            cuts.append(frozenset() if rung is None or length < 10 else found.dropped(rung))
        moves[stride_tokens] = len(set(cuts)) - 1
    assert moves[0] > 20
    assert moves[100] < 10


def test_what_went_is_told_by_place_role_and_tokens() -> None:
    """The estimates of the parts add up to the exact number; nothing of the text is there."""
    found = plan(items("s u a u a u"), policy())
    what = told(found, len(found.rungs) - 1, 100, 60, how="oldest-first", counts=2)
    assert (what.messages, what.tokens, what.counts, what.how) == (4, 40, 2, "oldest-first")
    assert [(run.first, run.last, run.roles, run.tokens) for run in what.dropped] == [(1, 4, "u,a,u,a", 40)]
