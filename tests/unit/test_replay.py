"""What was asked can be judged again without its text, and other limits say then what they would have said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.admission import Admit, Clamp, Reject, decide
from kvgate.core.ask import Ask
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.replay import PROMPTS_KEPT_MAX, Asked, Replayed, replay
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant
from tests.unit.test_admission import any_pool, asks, prompts, tenants

POOL = KvPool(tokens=4096, slots=4, tokens_per_slot=1024)


def asked(prompt: int, output: int | None = 100, sequences: int = 1) -> Asked:
    return Asked.of(Ask("m", output, sequences, stream=True), (prompt,), POOL)


@given(asks, prompts, any_pool(), tenants)
def test_what_was_asked_is_judged_as_it_was_then(
    ask: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant
) -> None:
    """The same verdict, reason, room and size, whatever else was in the request."""
    then, again = decide(ask, sent, pool, tenant), Asked.of(ask, sent, pool).judged_for(tenant)
    assert (again.label, again.room) == (then.label, then.room)
    match then, again:
        case Reject(), Reject():
            assert again.refusal.reason is then.refusal.reason
        case ((Admit() | Clamp()), (Admit() | Clamp())):
            assert (again.size.prompts, again.size.output_tokens) == (then.size.prompts, then.size.output_tokens)
        case _:
            raise AssertionError("one was refused, the other not")


@given(st.lists(st.integers(0, 50), min_size=PROMPTS_KEPT_MAX, max_size=3 * PROMPTS_KEPT_MAX), st.integers(1, 64))
def test_a_long_list_is_kept_short_and_judged_the_same(sent: list[int], slots: int) -> None:
    """No engine with at most that many slots looks at more of them."""
    pool, ask = KvPool(2000, slots, 500), Ask("m", 10, 1, stream=False)
    kept = Asked.of(ask, tuple(sent), pool)
    assert len(kept.prompts) <= PROMPTS_KEPT_MAX
    assert kept.judged_for(Tenant("t")).label == decide(ask, tuple(sent), pool, Tenant("t")).label


def test_on_an_engine_with_more_slots_a_long_list_is_bounded_not_forgotten() -> None:
    pool = KvPool(100_000, 500, 1000)
    kept = Asked.of(Ask("m", 10, 1, stream=False), (100,) * 1_000_000, pool)
    verdict = kept.judged_for(Tenant("t"))
    assert isinstance(verdict, Admit)
    assert verdict.size.sequences == 500


@pytest.mark.parametrize("values", [(1, 0, (5,), 1), (1, 1, (), 1), (1, 1, (5, 6), 1)])
def test_nonsense_is_no_request(values: tuple[int, int, tuple[int, ...], int]) -> None:
    with pytest.raises(ValueError, match="not a request's sizes"):
        Asked(*values, POOL)


def test_replay_tells_how_many_and_why() -> None:
    """The most frequent reason first; what is clamped is not rejected."""
    requests = [asked(500), *[asked(400)] * 3, asked(100, None), asked(10, 500), asked(10, 10, sequences=3)]
    strict = Tenant("t", Limits(context_tokens_max=400), Quota(concurrency_max=2))
    assert replay(requests, strict) == Replayed(
        requests=7,
        rejected=(
            (Reason.PROMPT_OVERFLOW.label, 4),
            (Reason.GENERATION_OVERFLOW.label, 1),
            (Reason.TOO_MANY_SEQUENCES.label, 1),
        ),
        clamped=0,
        prompt_tokens_max=500,
    )
    clamping = Tenant("t", Limits(context_tokens_max=400, on_overflow=OnOverflow.CLAMP))
    found = replay(requests, clamping)
    assert (found.rejections, found.clamped) == (4, 1)
    trimming = Tenant("t", Limits(context_tokens_max=400, on_overflow=OnOverflow.TRIM))
    assert (replay(requests, trimming).trimmed, replay(requests, trimming).rejected) == (4, ())
    assert replay([], strict) == Replayed(0, (), 0, 0)
