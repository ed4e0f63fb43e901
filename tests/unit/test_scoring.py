"""What llama.cpp is asked to score an answer, and what of its answer counts."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.engines.llamacpp.scoring import (
    UNHEARD_OF,
    forced_chat,
    forced_text,
    logprobs_of,
    timings_of,
)


def told(*tokens: tuple[int, Any]) -> list[dict[str, Any]]:
    return [{"id": token, "token": "x", "logprob": logprob} for token, logprob in tokens]


def test_the_answer_is_forced_token_by_token_and_greedy() -> None:
    text, chat = forced_text([1, 2], [7, 8]), forced_chat([{"role": "user", "content": "hi"}], [7, 8])
    for body, limit in ((text, "n_predict"), (chat, "max_tokens")):
        assert body["grammar"] == "root ::= <[7]> <[8]>"
        assert (body["temperature"], body[limit]) == (0, 2)
        assert "post_sampling_probs" not in body  # else the grammar would be in the probabilities
    assert text["prompt"] == [1, 2]


@pytest.mark.parametrize(
    "answered",
    [
        {"completion_probabilities": told((7, -1.5), (8, -2))},
        {"choices": [{"logprobs": {"content": told((7, -1.5), (8, -2))}}]},
    ],
)
def test_the_forced_tokens_log_probabilities_are_read(answered: Any) -> None:
    assert logprobs_of(answered, [7, 8]) == (-1.5, -2.0)


@pytest.mark.parametrize(
    "answered",
    [
        None,
        [],
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"completion_probabilities": told((7, -1.5))},
        {"completion_probabilities": told((7, -1.5), (9, -2.0))},
        {"completion_probabilities": ["x", "y"]},
    ],
)
def test_another_answer_than_the_forced_one_is_none(answered: Any) -> None:
    assert logprobs_of(answered, [7, 8]) is None


@pytest.mark.parametrize("value", [None, "x", True, float("nan"), float("-inf")])
def test_a_log_probability_that_is_no_number_is_near_to_none(value: Any) -> None:
    """A KV cache full of NaN gives null in JSON: that must differ from every honest answer."""
    assert logprobs_of({"completion_probabilities": told((7, value))}, [7]) == (UNHEARD_OF,)


@pytest.mark.parametrize(
    ("answered", "found"),
    [
        ({"timings": {"cache_n": 3, "prompt_n": 4, "prompt_ms": 500}}, (3, 4, 0.5)),
        ({"timings": {}}, (None, 0, 0.0)),
        ({"timings": {"cache_n": "3", "prompt_ms": None}}, (None, 0, 0.0)),
        ({}, (None, 0, 0.0)),
        (None, (None, 0, 0.0)),
    ],
)
def test_counts_that_are_not_told_are_not_made_up(answered: Any, found: tuple[int | None, int, float]) -> None:
    assert timings_of(answered) == found
