"""A tenant without reuse sees answers as if nothing had ever been cached, and sums that are right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.wire.masking import masked, masked_event

TIMINGS = {
    "cache_n": 30,
    "prompt_n": 10,
    "prompt_ms": 80.0,
    "prompt_per_token_ms": 8.0,
    "prompt_per_second": 125.0,
    "predicted_n": 4,
}
WHOLE_TIMINGS = {
    "cache_n": 0,
    "prompt_n": 40,
    "prompt_ms": 80.0,
    "prompt_per_token_ms": 2.0,
    "prompt_per_second": 500.0,
    "predicted_n": 4,
}


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (
            {"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 30}}, "timings": TIMINGS},
            {"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 0}}, "timings": WHOLE_TIMINGS},
        ),
        (
            {"usage": {"cache_read_input_tokens": 30, "input_tokens": 10, "output_tokens": 2}},
            {"usage": {"cache_read_input_tokens": 0, "input_tokens": 40, "output_tokens": 2}},
        ),
        (
            {"response": {"usage": {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 30}}}},
            {"response": {"usage": {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 0}}}},
        ),
        ([{"timings": TIMINGS}, {"index": 1}], [{"timings": WHOLE_TIMINGS}, {"index": 1}]),
        (
            {"prompt_progress": {"total": 40, "cache": 30, "processed": 31}, "__verbose": {"timings": TIMINGS}},
            {"prompt_progress": {"total": 40, "cache": 0, "processed": 0}, "__verbose": {"timings": WHOLE_TIMINGS}},
        ),
        (
            {"prompt_progress": {"total": 40, "cache": 30, "processed": 30, "time_ms": 0}},
            {"prompt_progress": {"total": 40, "cache": 0, "processed": 0, "time_ms": 0}},
        ),
        (
            {"prompt_progress": {"total": 40, "cache": 30, "processed": 40, "time_ms": 9}},
            {"prompt_progress": {"total": 40, "cache": 0, "processed": 40, "time_ms": 9}},
        ),
        ({"timings": {"cache_n": 3}}, {"timings": {"cache_n": 0, "prompt_n": 3}}),
    ],
)
def test_every_apis_figures_are_as_of_a_cold_prompt(told: Any, shown: Any) -> None:
    """Whole, and in an event of a stream; what was left out of the input is in it again."""
    assert json.loads(masked(json.dumps(told).encode())) == shown
    event = b"event: x\ndata: " + json.dumps(told).encode() + b"\n\n"
    clean = masked_event(event)
    assert clean.startswith(b"event: x\ndata: ")
    assert clean.endswith(b"\n\n")
    assert json.loads(clean.split(b"data: ")[1]) == shown


@pytest.mark.parametrize(
    "body",
    [
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": 0}, "prompt_tokens": 1.50}}',
        b'{"content": "say \\"cached_tokens\\": 30"}',
        b'{"content": "cache_n 30"}',
        b"[]",
        b"",
    ],
)
def test_an_answer_that_shows_nothing_keeps_every_byte(body: bytes) -> None:
    """Also one whose text speaks of the figures."""
    assert masked(body) is body
    event = b"data: " + body + b"\n\n"
    assert masked_event(event) is event


def test_two_events_in_one_piece_are_two() -> None:
    """A usage chunk goes out together with the end marker behind it."""
    event = b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":7}}}\n\ndata: [DONE]\n\n'
    assert masked_event(event) == event.replace(b"7", b"0")


def test_what_cannot_be_read_is_masked_all_the_same() -> None:
    """A figure is an oracle wherever it stands."""
    assert masked(b'{"cache_n": 12, broken') == b'{"cache_n": 0, broken'
    assert masked_event(b'data: {"cache_n":12') == b'data: {"cache_n":0'


JSON = st.recursive(
    st.none() | st.integers(-3, 99) | st.floats(0, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["cache_n", "prompt_n", "prompt_ms", "cached_tokens", "input_tokens", "cache_read_input_tokens", "a"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


def figures(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [one for item in value for one in figures(item)]
    if isinstance(value, dict):
        own = [value[name] for name in ("cache_n", "cached_tokens", "cache_read_input_tokens") if name in value]
        return own + [one for item in value.values() for one in figures(item)]
    return []


@given(JSON)
def test_no_positive_count_of_cached_tokens_is_left(value: Any) -> None:
    """Whatever shape an engine's answer has."""
    clean = json.loads(masked(json.dumps(value).encode()))
    assert [one for one in figures(clean) if isinstance(one, int) and not isinstance(one, bool) and one > 0] == []


def test_what_was_masked_is_written_as_the_engine_writes() -> None:
    """That it was masked is no more to be seen than what."""
    told = b'{"content":"\xc3\xa9, \\"a\\": 1","timings":{"cache_n":%d,"prompt_n":%d,"predicted_ms":1.25}}'
    assert masked(told % (7, 3)) == told % (0, 10)
    assert masked_event(b"data: " + told % (7, 3) + b"\n\n") == b"data: " + told % (0, 10) + b"\n\n"
