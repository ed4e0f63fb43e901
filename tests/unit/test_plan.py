"""A plan proposes only what fits, tells what it rejects as the gate would, and knows the engine's own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.core.admission import Reject
from kvgate.core.plan import PAD_TOKENS, SLOTS, Line, lines, plan
from kvgate.core.pool import KvPool
from kvgate.core.replay import Asked
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant

POOLS = st.builds(
    lambda tokens, margin, headroom: KvPool(tokens, 2, tokens, False, margin, min(headroom, tokens - 1)),
    st.integers(256, 4096),
    st.sampled_from([0, 8]),
    st.sampled_from([0, 100]),
)

ASKED = st.builds(
    lambda output, sequences, prompts, pool: Asked(
        output, sequences, tuple(sorted(prompts, reverse=True)), len(prompts), pool
    ),
    st.none() | st.integers(0, 6000),
    st.integers(1, 3),
    st.lists(st.integers(1, 9000), min_size=1, max_size=3),
    POOLS,
)

TENANTS = st.builds(
    lambda window, least, policy, most: Tenant(
        "t", Limits(window, output_tokens_min=least, on_overflow=policy), Quota(concurrency_max=most)
    ),
    st.none() | st.integers(200, 9000),
    st.sampled_from([1, 64]),
    st.sampled_from(list(OnOverflow)),
    st.none() | st.integers(1, 4),
)

REQUESTS = st.lists(st.tuples(TENANTS, st.lists(ASKED, max_size=8)), max_size=3).map(
    lambda some: [(replace(tenant, name=f"t{at}"), asked) for at, (tenant, asked) in enumerate(some)]
)

PRICES = st.sampled_from([1.0, 23040.0, 131072.5])

BUDGETS = st.integers(1, 40_000)

TRAINED = st.none() | st.integers(1, 9000)


@pytest.mark.parametrize(
    ("context", "slots", "unified", "trained", "found"),
    [
        (8192, 6, False, 8192, (1536, 9216)),
        (1000, 2, False, 8192, (512, 1024)),
        (100, 8, False, 8192, (256, 2048)),
        (2048, 4, True, 8192, (2048, 2048)),
        (65536, 2, True, 8192, (8192, 65536)),
        (20480, 2, False, 8192, (8192, 20480)),
        (2048, 2, False, None, (1024, 2048)),
        (700, 1, False, None, (768, 768)),
    ],
)
def test_the_engines_own_arithmetic(
    context: int, slots: int, unified: bool, trained: int | None, found: tuple[int, int]
) -> None:
    """As b11434 and b11549 were seen to round."""
    line = Line(context, slots, unified, trained)
    assert (line.n_ctx_slot, line.cells) == found


@given(st.integers(0, 300_000), TRAINED, st.none() | st.integers(1, 200_000), st.integers(1, 64))
def test_no_line_needs_rounding_or_more_cells_than_there_are(
    cells: int, trained: int | None, needed: int | None, most: int
) -> None:
    """So it means the same on builds that do not round; and every slot is as long as it says."""
    found = list(lines(cells, trained, needed, slots_max=most))
    for line in found:
        assert line.cells == line.context_tokens <= cells
        assert line.slots in SLOTS
        assert line.slots <= most
        assert line.context_tokens % (PAD_TOKENS if line.unified else PAD_TOKENS * line.slots) == 0
        assert 0 < line.n_ctx_slot <= (trained or line.cells)
        assert line.pool(KvPool(10, 1, 10)).tokens_per_slot == line.n_ctx_slot
    assert bool(found) == (cells >= PAD_TOKENS)
    assert len(set(found)) == len(found)


@given(REQUESTS, BUDGETS, PRICES, TRAINED)
@settings(max_examples=150, deadline=None)
def test_nothing_is_proposed_that_does_not_fit(requests: Any, cells: int, price: float, trained: int | None) -> None:
    budget = int(cells * price)
    for one in plan(requests, budget, price, trained):
        assert one.kv_bytes <= budget
        assert one.line.cells * price == pytest.approx(one.kv_bytes, abs=1)


@given(REQUESTS, BUDGETS, BUDGETS, TRAINED)
@settings(max_examples=150, deadline=None)
def test_a_larger_budget_never_rejects_more(requests: Any, less: int, more: int, trained: int | None) -> None:
    """Neither the best line nor that of any number of slots and topology."""
    less, more = sorted((less, more))
    small, large = (plan(requests, budget, 1.0, trained) for budget in (less, more))
    of = {(one.line.slots, one.line.unified): one.rejections for one in large}
    for one in small:
        assert of[one.line.slots, one.line.unified] <= one.rejections
    if small:
        assert large[0].rejections <= small[0].rejections


@given(REQUESTS, BUDGETS, TRAINED)
@settings(max_examples=150, deadline=None)
def test_what_is_rejected_is_what_the_gate_would_reject(requests: Any, cells: int, trained: int | None) -> None:
    """Also where a slot was made no longer than the longest request: on the longest slot no fewer would be."""
    for one in plan(requests, cells, 1.0, trained):
        longest = next(
            line for line in lines(cells, trained) if (line.slots, line.unified) == (one.line.slots, one.line.unified)
        )
        for line in (one.line, longest):
            rejected = [
                verdict.refusal.reason.label
                for tenant, some in requests
                for asked in some
                for verdict in [replace(asked, pool=line.pool(asked.pool)).judged_for(tenant)]
                if isinstance(verdict, Reject)
                and not (tenant.limits.on_overflow is OnOverflow.TRIM and "overflow" in verdict.refusal.reason.label)
            ]
            assert one.rejections == len(rejected)
        assert sum(dict(one.rejected_of).values()) == one.rejections
        assert one.requests == sum(len(some) for _, some in requests)


def test_the_best_rejects_least_and_then_runs_most() -> None:
    """Requests of 900 tokens, 4096 cells: four slots, and not eight of which none would do."""
    some = [Asked(100, 1, (800,), 1, KvPool(1, 1, 1))] * 5
    best, *others = plan([(Tenant("t"), some)], 4096, 1.0)
    assert (best.line.flags, best.rejections, best.side_by_side) == ("-c 4096 -np 4 --no-kv-unified", 0, 4)
    worst = others[-1]
    assert (worst.rejections, worst.rejected[0][0], worst.side_by_side) == (5, "prompt_overflow", 0)


def test_a_budget_for_less_than_a_slot_has_no_plan() -> None:
    assert plan([], 255, 1.0) == ()
