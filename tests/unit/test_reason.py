"""The table of reasons: what status, label and sentence each refusal has."""

from __future__ import annotations

import re
from http import HTTPStatus
from string import Formatter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.reason import RETRY_AFTER_MAX_S, Reason, refusal

OVERFLOWS = [Reason.PROMPT_OVERFLOW, Reason.GENERATION_OVERFLOW, Reason.UNTRIMMABLE]
RETRIED = [reason for reason in Reason if "{retry_after_s}" in reason.value.sentence]
every_reason = pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.label)


def fields_of(reason: Reason) -> dict[str, Any]:
    """A value for each field of the sentence, `retry_after_s` left out: a number where it is formatted as one."""
    parts = Formatter().parse(reason.value.sentence)
    return {name: 30 if spec else f"<{name}>" for _, name, spec, _ in parts if name and name != "retry_after_s"}


@every_reason
def test_a_sentence_says_every_figure_that_it_was_given(reason: Reason) -> None:
    """Named fields only, all of them filled in, none of the braces left."""
    fields = fields_of(reason)
    assert all(name.isidentifier() for name in fields)
    found = refusal(reason, retry_after_s=7, **fields)
    for value in fields.values():
        assert str(value) in found.message
    assert "{" not in found.message
    assert "}" not in found.message
    assert ("7" in found.message) == (reason in RETRIED)


@every_reason
def test_a_missing_field_is_an_error_at_once(reason: Reason) -> None:
    """A refusal is never sent with a hole in its sentence."""
    fields = fields_of(reason)
    if fields:
        fields.popitem()
        with pytest.raises(KeyError):
            refusal(reason, retry_after_s=7, **fields)


@every_reason
def test_every_row_is_complete(reason: Reason) -> None:
    """Status, codes and texts are there, and in the form in which metrics, headers and docs want them."""
    row = reason.value
    assert HTTPStatus(row.status) >= 400  # and known: anything else raises
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", row.label)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", row.code)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*_error", row.error_type)
    assert row.label == reason.name.lower() == reason.label
    assert row.status == reason.status
    assert row.meaning.endswith(".")


def test_labels_are_unique() -> None:
    """Two reasons never share a metric label, nor are they the same enum member under two names."""
    assert len({reason.label for reason in Reason}) == len(Reason.__members__)


@pytest.mark.parametrize("reason", OVERFLOWS, ids=lambda reason: reason.label)
def test_an_overflow_is_told_in_the_words_that_agents_act_on(reason: Reason) -> None:
    """The code and the phrase make agents shorten their history; other words would make them wait and retry."""
    row = reason.value
    assert (row.status, row.code, row.error_type) == (400, "context_length_exceeded", "invalid_request_error")
    assert "maximum context length is {limit_tokens} tokens" in row.sentence
    assert not re.search(r"rate.?limit|quota|try again|retry", row.sentence + row.meaning, re.IGNORECASE)


def test_only_an_overflow_carries_the_overflow_code() -> None:
    """No other refusal makes a client throw its history away."""
    assert [reason for reason in Reason if reason.value.code == "context_length_exceeded"] == OVERFLOWS


def test_reasons_that_trying_again_can_help_say_so_and_when() -> None:
    """429 always; 503 wherever the engine can come back by itself."""
    assert {reason for reason in Reason if reason.status == 429} <= set(RETRIED)
    assert {reason.status for reason in RETRIED} == {429, 503}


@given(st.floats(min_value=-1e9, max_value=1e9))
def test_retry_after_is_whole_seconds_between_one_and_sixty(seconds: float) -> None:
    """Rounded up, at least 1 and at most 60, and the sentence says the same number as the header."""
    found = refusal(Reason.ENGINE_LOADING, retry_after_s=seconds)
    assert found.retry_after_s is not None
    assert 1 <= found.retry_after_s <= RETRY_AFTER_MAX_S == 60
    assert found.retry_after_s >= min(seconds, 60)
    assert found.retry_after_s < max(seconds + 1, 2)
    assert f" {found.retry_after_s} s" in found.message


def test_a_refusal_that_is_final_names_no_time() -> None:
    """No `retry-after` where trying again cannot help."""
    assert refusal(Reason.UNKNOWN_KEY).retry_after_s is None


def test_what_a_field_holds_is_never_read_as_a_format() -> None:
    """Braces in a problem's text come out as they are."""
    assert refusal(Reason.MALFORMED, problem="{oops} {0}").message == "{oops} {0}"
