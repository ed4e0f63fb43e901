"""Whether the context ended an answer, or the limit that its client set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.admission import Admit, Clamp, Room, decide
from kvgate.core.ask import Ask
from kvgate.core.ending import FINISHES, LENGTH, ended_by_context, finish_of, of_several
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Limits, OnOverflow, Tenant

ROOM = Room(1024, "slot", 1000, 24)


@pytest.mark.parametrize(
    ("finish", "output", "limit", "asked", "by"),
    [
        ("length", 24, 24, 500, "slot"),  # clamped to what fits
        ("length", 24, 24, None, "slot"),  # no limit of its own, and what fits ended it
        ("", 24, 24, 500, "slot"),  # an API that does not tell
        ("length", None, 24, 500, "slot"),  # several answers
        ("length", 24, 24, 24, ""),  # just what was asked for
        ("length", 10, 10, 10, ""),
        ("length", 10, 10, None, ""),  # the tenant's default
        ("length", 9, 10, 10, "slot"),  # the engine was full before
        ("stop", 24, 24, 500, ""),
        ("tool_calls", 24, 24, 500, ""),
        ("", 23, 24, 500, ""),
        ("", None, 24, 500, ""),
    ],
)
def test_who_ended_it(finish: str, output: int | None, limit: int, asked: int | None, by: str) -> None:
    assert ended_by_context(finish, output, limit, asked, ROOM) == by


@given(
    st.integers(1, 2000),
    st.none() | st.integers(1, 3000),
    st.integers(1, 3000),
    st.none() | st.integers(1, 2000),
)
def test_an_answer_that_got_all_that_was_asked_was_never_ended_by_the_context(
    prompt: int, asked: int | None, default: int, window: int | None
) -> None:
    """And one that got less at its limit always was."""
    tenant = Tenant("t", Limits(window, output_tokens_default=default, on_overflow=OnOverflow.CLAMP))
    verdict = decide(Ask(None, asked, 1, stream=False), (prompt,), KvPool(2048, 2, 1024), tenant)
    if not isinstance(verdict, Admit | Clamp):
        return
    limit = verdict.size.output_tokens
    by = ended_by_context(LENGTH, limit, limit, asked, verdict.room)
    if asked is not None:
        assert bool(by) == (limit < asked)
    elif limit < default:
        assert by == verdict.room.limited_by
    assert by in {"", "slot", "tenant"}


@given(st.text(max_size=20) | st.none() | st.integers())
def test_any_word_is_one_of_the_table(word: object) -> None:
    assert finish_of(word) in FINISHES | {""}


def test_a_cut_answer_matters_most() -> None:
    assert of_several("stop", "length") == of_several("length", "stop") == "length"
    assert of_several("", "stop") == of_several("stop", "") == "stop"
