"""The pool: one rule for divided and unified caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.ask import Size
from kvgate.core.pool import KvPool

POOL = KvPool(tokens=1024, slots=4, tokens_per_slot=1024)


@st.composite
def any_pool(draw: st.DrawFn) -> KvPool:
    tokens = draw(st.integers(1, 20_000))
    return KvPool(
        tokens=tokens,
        slots=draw(st.integers(1, 16)),
        tokens_per_slot=draw(st.integers(1, 8192)),
        prompt_shared=draw(st.booleans()),
        margin_tokens=draw(st.integers(0, 64)),
        headroom_tokens=draw(st.integers(0, tokens - 1)),
    )


def test_n_answers_to_one_prompt_share_its_cells_in_a_unified_cache() -> None:
    """Measured: a pool of 1024 runs a prompt of 591 with 100 tokens for each of 4 answers."""
    assert replace(POOL, prompt_shared=True).cells(Size(591, 100, sequences=4)) == 991


def test_n_answers_hold_n_copies_of_the_prompt_in_a_divided_cache() -> None:
    """Each slot holds its own prompt and its own answer."""
    assert POOL.cells(Size(591, 100, sequences=4)) == 4 * 691


def test_each_sequence_has_a_margin() -> None:
    """A speculative draft is longer than the output limit, once for every sequence."""
    assert replace(POOL, margin_tokens=8).cells(Size(10, 20, sequences=2)) == 2 * (10 + 20 + 8)
    assert replace(POOL, margin_tokens=8, prompt_shared=True).cells(Size(10, 20, sequences=2)) == 10 + 2 * (20 + 8)


def test_headroom_is_not_grantable() -> None:
    """What is kept free is kept from everybody."""
    assert replace(POOL, headroom_tokens=24).grantable_tokens == 1000


def test_the_prompts_of_a_list_are_held_side_by_side() -> None:
    """Each once where answers share their prompt, else once for each of its answers; and every answer."""
    size = Size(30, 5, sequences=6, prompts=(30, 20, 10))
    assert POOL.cells(size) == 2 * (30 + 20 + 10) + 6 * 5
    assert replace(POOL, prompt_shared=True).cells(size) == (30 + 20 + 10) + 6 * 5


def test_without_output_a_request_holds_its_prompts() -> None:
    """Embeddings generate nothing; a margin is held all the same, since any sequence may take it."""
    size = Size(30, 0, sequences=2, prompts=(30, 20))
    assert POOL.cells(size) == 50
    assert replace(POOL, margin_tokens=8).cells(size) == 66


@given(
    any_pool(),
    st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(0, 40_000),
)
def test_the_room_for_output_is_the_most_that_fits_and_not_one_token_less(
    pool: KvPool, prompts: list[int], answers: int, within_tokens: int
) -> None:
    """`output_room` is the exact inverse of `cells`, for every pool, list of prompts and number of answers."""
    sequences = answers * len(prompts)
    room = pool.output_room(tuple(prompts), sequences, within_tokens)

    def cells(output_tokens: int) -> int:
        return pool.cells(Size(max(prompts), output_tokens, sequences, tuple(prompts)))

    if room >= 0:
        assert cells(room) <= within_tokens
    assert cells(max(room + 1, 0)) > within_tokens


@pytest.mark.parametrize(
    "figures",
    [
        {"tokens": 0},
        {"slots": 0},
        {"tokens_per_slot": 0},
        {"margin_tokens": -1},
        {"headroom_tokens": -1},
        {"headroom_tokens": 1024},
    ],
    ids=str,
)
def test_a_pool_that_can_grant_nothing_is_no_pool(figures: dict[str, Any]) -> None:
    """Nonsense from a discovery or a setting stops at once, not as an endless queue."""
    with pytest.raises(ValueError, match="KvPool"):
        replace(POOL, **figures)


@pytest.mark.parametrize(("prompt", "output", "sequences"), [(-1, 1, 1), (0, -1, 1), (0, 1, 0)])
def test_nothing_is_a_size_that_asks_for_nothing(prompt: int, output: int, sequences: int) -> None:
    """Every request is at least one sequence, of no negative length."""
    with pytest.raises(ValueError, match="not a size"):
        Size(prompt, output, sequences)


@pytest.mark.parametrize(
    ("prompt", "sequences", "prompts"), [(9, 2, (8, 7)), (8, 2, (9, 7)), (9, 3, (9, 7)), (9, 1, (9, 7))]
)
def test_the_prompts_of_a_size_are_its_own(prompt: int, sequences: int, prompts: tuple[int, ...]) -> None:
    """The longest is the one that is told, and each has as many answers as the others."""
    with pytest.raises(ValueError, match="not those of this size"):
        Size(prompt, 1, sequences, prompts)


def test_one_prompt_is_a_list_of_one() -> None:
    assert Size(7, 1, 3).distinct == (7,)
    assert Size(7, 1, 2, (7, 5)).distinct == (7, 5)
