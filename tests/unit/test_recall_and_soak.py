"""What a recall test may say, and what counts as a drift; and that the manual says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.recall import CONTROL_NATS_MIN, Recall, RecallVerdict, mean_of
from kvgate.core.soak import ROUNDS_MIN, RULE, Round, drifts

NATS = st.floats(-20, 0)
STEADY = Round(is_fine=True, prefill_tokens_per_second=100, tokens_per_second=20, memory_mib=1000, recall_share=1.0)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Recall(-9, -0.5, ((0, -0.4), (0.5, -0.6))), RecallVerdict.RECALLS),
        (Recall(-9, -0.5, ((0, -8.0), (0.5, -0.6))), RecallVerdict.FORGETS),
        (Recall(-9, -8.5, ((0, -0.1),)), RecallVerdict.BLIND),
        (Recall(-1, -2, ((0, -0.1),)), RecallVerdict.BLIND),
    ],
)
def test_the_verdict_of_a_recall(found: Recall, verdict: RecallVerdict) -> None:
    assert found.verdict is verdict


@given(NATS, NATS, st.lists(st.tuples(st.floats(0, 1), NATS), min_size=1, max_size=5))
def test_without_its_positive_control_no_depth_says_anything(
    without: float, near: float, depths: list[tuple[float, float]]
) -> None:
    found = Recall(without, near, tuple(depths))
    assert (found.verdict is RecallVerdict.BLIND) == (near - without < CONTROL_NATS_MIN)
    if found.verdict is RecallVerdict.FORGETS:
        assert min(share for _, share in found.shares) < 0.5


@given(st.lists(st.tuples(NATS, NATS, NATS), min_size=1, max_size=4))
def test_the_mean_of_needles_lies_among_them(needles: list[tuple[float, float, float]]) -> None:
    found = mean_of([Recall(without, near, ((0.5, nats),)) for without, near, nats in needles])
    for value, column in zip(
        (found.without, found.near, found.by_depth[0][1]), zip(*needles, strict=True), strict=True
    ):
        assert min(column) - 1e-9 <= value <= max(column) + 1e-9


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (replace(STEADY, memory_mib=1100), ["memory"]),
        (replace(STEADY, memory_mib=1040), []),
        (replace(STEADY, tokens_per_second=15), ["speed"]),
        (replace(STEADY, tokens_per_second=17), []),
        (replace(STEADY, prefill_tokens_per_second=70), ["prefill speed"]),
        (replace(STEADY, recall_share=0.7), ["recall"]),
        (replace(STEADY, recall_share=0.8), []),
        (replace(STEADY, memory_mib=500, tokens_per_second=40), []),
        (replace(STEADY, memory_mib=2000, recall_share=0.0), ["memory", "recall"]),
    ],
)
def test_a_drift_is_the_end_against_the_beginning(last: Round, what: list[str]) -> None:
    warm_up = replace(STEADY, memory_mib=1, tokens_per_second=1000, recall_share=9)
    assert [one.what for one in drifts([warm_up, *[STEADY] * 5, *[last] * 5])] == what


@given(st.lists(st.sampled_from([STEADY, replace(STEADY, memory_mib=9999)]), max_size=ROUNDS_MIN - 1))
def test_too_few_rounds_tell_nothing(rounds: list[Round]) -> None:
    assert drifts(rounds) == []


@given(st.integers(1, 40))
def test_what_is_not_watched_does_not_drift(count: int) -> None:
    unwatched = Round(is_fine=True, prefill_tokens_per_second=None, tokens_per_second=None, memory_mib=None)
    assert drifts([unwatched] * count) == []


def test_rule_and_verdicts_are_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    assert RULE in manual
    for verdict in RecallVerdict:
        assert f"| `{verdict.label}` | {verdict.meaning} | {verdict.to_do} |" in manual
