"""Each verdict of the context admission test, and that no good answer is taken for a bad one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.probe_verdict import Pace, Seen, Verdict, is_nonsense, judge, loops, room_of

PACE = Pace(ttft_max_s=60, tokens_per_second_min=1)
WORDS = tuple(f" word{at}" for at in range(64))
GOOD = Seen(
    status=200,
    pieces=WORDS,
    output_tokens=64,
    asked_tokens=128,
    room_tokens=64,
    says_context=True,
    problem="",
    problem_code="",
    was_clamped=False,
    ttft_s=1.0,
    tokens_per_second=20.0,
    ended_s=10.0,
    by_gate=False,
)
BROKEN = replace(GOOD, output_tokens=None, problem="Context size has been exceeded.")


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (GOOD, Verdict.ENDS_BY_CONTEXT),
        (replace(GOOD, output_tokens=65), Verdict.ENDS_BY_CONTEXT),
        (replace(GOOD, says_context=False), Verdict.SILENT_CONTEXT_END),
        (replace(GOOD, asked_tokens=64, says_context=False), Verdict.COMPLETES),
        (replace(GOOD, output_tokens=128), Verdict.FORGETS),
        (replace(GOOD, output_tokens=30, says_context=False), Verdict.ENDS_EARLY),
        (replace(GOOD, output_tokens=4, pieces=WORDS[:4], says_context=False), Verdict.TRUNCATES_AT_ONCE),
        (replace(GOOD, output_tokens=0, pieces=(), says_context=True), Verdict.TRUNCATES_AT_ONCE),
        (replace(GOOD, pieces=("\n",) * 64), Verdict.TRUNCATES_AT_ONCE),
        (replace(GOOD, pieces=("\ufffd", "!") * 32), Verdict.TRUNCATES_AT_ONCE),
        (replace(GOOD, pieces=(" the", " same") * 32), Verdict.LOOPS),
        (replace(GOOD, ttft_s=61.0), Verdict.SLOW),
        (replace(GOOD, tokens_per_second=0.5), Verdict.SLOW),
        (BROKEN, Verdict.ABORTS),
        (replace(GOOD, status=500, problem="x"), Verdict.ABORTS),
        (replace(GOOD, status=0, problem="the engine closed the connection"), Verdict.ABORTS),
        (replace(GOOD, status=400, problem="too long"), Verdict.REFUSED),
        (replace(GOOD, by_gate=True, was_clamped=True), Verdict.CLAMPED),
        (replace(GOOD, by_gate=True, status=400, problem="x"), Verdict.REFUSED_IN_TIME),
        (replace(GOOD, by_gate=True, status=400, problem="x", asked_tokens=64), Verdict.REFUSED),
        (replace(GOOD, by_gate=True, status=429, problem="x"), Verdict.TURNED_AWAY),
        (replace(GOOD, by_gate=True, status=401, problem="x"), Verdict.TURNED_AWAY),
    ],
)
def test_an_answers_verdict(seen: Seen, verdict: Verdict) -> None:
    assert judge([seen], PACE, control_loops=False) == [verdict]


def test_answers_that_fail_at_one_moment_were_killed_together() -> None:
    """Two that fail far apart were not, nor was one alone; those that live keep their own verdict."""
    together = [BROKEN, replace(BROKEN, ended_s=10.5), GOOD]
    killed = Verdict.KILLED_TOGETHER
    assert judge(together, PACE, control_loops=False) == [killed, killed, Verdict.ENDS_BY_CONTEXT]
    apart = [BROKEN, replace(BROKEN, ended_s=20.0)]
    assert judge(apart, PACE, control_loops=False) == [Verdict.ABORTS] * 2
    assert judge([BROKEN, GOOD], PACE, control_loops=False)[0] is Verdict.ABORTS


def test_a_model_that_always_repeats_itself_proves_nothing_of_the_slot() -> None:
    looping = replace(GOOD, pieces=(" the", " same") * 32)
    assert judge([looping], PACE, control_loops=True) == [Verdict.ENDS_BY_CONTEXT]


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=16), st.integers(4, 20), st.integers(0, 15))
def test_any_piece_over_and_over_is_a_loop_wherever_it_is_cut(piece: list[str], times: int, cut: int) -> None:
    whole = piece * times
    looping = whole[: len(whole) - min(cut, len(piece) - 1)]
    if len(looping) >= max(8, 4 * len(piece)):
        assert loops(looping)


@given(st.integers(8, 600), st.integers(0, 200))
def test_an_answer_that_never_says_the_same_twice_is_no_loop(tokens: int, first: int) -> None:
    assert not loops([f" w{first + at}" for at in range(tokens)])


def test_half_an_answer_must_repeat() -> None:
    """A refrain at the end of a long answer is one."""
    assert not loops([*WORDS, *[" la", " la", " lo"] * 6])
    assert loops([*WORDS[:16], *[" la", " la", " lo"] * 6])


def test_figures_and_other_scripts_are_no_nonsense() -> None:
    assert not is_nonsense([" 12", ",", " 13", ",", "\n"])
    assert not is_nonsense(["日", "本", "。"])
    assert is_nonsense(["...", "\n", " "])
    assert is_nonsense([])


@given(st.integers(8, 2**20))
def test_prompt_and_room_make_a_slot(n_ctx_slot: int) -> None:
    room = room_of(n_ctx_slot)
    assert 1 <= room <= min(256, n_ctx_slot // 2)
    assert room == 256 or n_ctx_slot < 1024


def test_every_verdict_is_in_the_manual_with_its_meaning_and_says_what_to_do() -> None:
    manual = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    for verdict in Verdict:
        assert f"| `{verdict.label}` | {'fine' if verdict.is_fine else 'not'} | {verdict.meaning} |" in manual
        said = verdict.to_do(3, 2048)
        assert "{" not in said
        assert (said == "nothing") == verdict.is_fine
    assert "-c 6144 -np 3" in Verdict.KILLED_TOGETHER.to_do(3, 2048)
