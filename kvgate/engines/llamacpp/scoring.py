"""How llama.cpp is made to say how likely a given answer is: a grammar that allows that answer alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TEXT_PATH: Final = "/completion"
CHAT_PATH: Final = "/v1/chat/completions"

UNHEARD_OF: Final = -1e4
"""Stands for a log-probability that is no number, as NaN is none in JSON: no finite one is near it."""


def forced_text(prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
    """The request whose answer to a prompt of tokens can only be these tokens.

    `n_probs` tells what the model itself thinks: it is taken before the grammar and any sampling, unless
    `post_sampling_probs` is asked for. Token ids in a grammar need llama.cpp PR 17816 (December 2025).
    """
    return {"prompt": list(prompt), "n_predict": len(answer), "n_probs": 1, **_forced(answer)}


def forced_chat(messages: Sequence[Mapping[str, str]], answer: Sequence[int]) -> dict[str, Any]:
    """The same on the chat endpoint."""
    return {
        "messages": list(messages),
        "max_tokens": len(answer),
        "logprobs": True,
        "top_logprobs": 1,
        **_forced(answer),
    }


def _forced(answer: Sequence[int]) -> dict[str, Any]:
    grammar = "root ::= " + " ".join(f"<[{token}]>" for token in answer)
    return {"temperature": 0, "grammar": grammar, "stream": False}


def logprobs_of(answered: Any, answer: Sequence[int]) -> tuple[float, ...] | None:
    """The log-probabilities of the forced tokens in the answer's body; None where it does not tell just those."""
    told = _told(answered)
    if told is None or [one.get("id") for one in told] != list(answer):
        return None
    return tuple(_number(one.get("logprob")) for one in told)


def _told(answered: Any) -> list[dict[str, Any]] | None:
    told = answered.get("completion_probabilities") if isinstance(answered, dict) else None
    if told is None:
        try:
            told = answered["choices"][0]["logprobs"]["content"]
        except (KeyError, IndexError, TypeError):
            return None
    return told if isinstance(told, list) and all(isinstance(one, dict) for one in told) else None


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else UNHEARD_OF


def timings_of(answered: Any) -> tuple[int | None, int, float]:
    """Tokens reused (None where it does not say), tokens computed, and the seconds that took."""
    timings = answered.get("timings") if isinstance(answered, dict) else None
    if not isinstance(timings, dict):
        return None, 0, 0.0
    cached, computed = timings.get("cache_n"), timings.get("prompt_n")
    prefill_ms = timings.get("prompt_ms")
    return (
        cached if isinstance(cached, int) else None,
        computed if isinstance(computed, int) else 0,
        prefill_ms / 1000 if isinstance(prefill_ms, int | float) else 0.0,
    )
