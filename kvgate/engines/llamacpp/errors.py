"""What llama.cpp's error answers mean, said without quoting a prompt."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.reason import Reason, refusal
from kvgate.wire.answers import parsed

if TYPE_CHECKING:
    from kvgate.core.reason import Refusal

log = logging.getLogger("kvgate.engine")

LOADING_RETRY_AFTER_S: Final = 5
"""Of an engine that loads its model: seconds for a small one, a minute for a large one."""

SAFE_PROBLEMS: Final = (
    "image input is not supported",
    "audio input is not supported",
    "tools param requires --jinja flag",
    "Cannot use custom grammar constraints with tools",
    "Cannot have 2 or more assistant messages at the end of the list",
    "Assistant response prefill is incompatible with enable_thinking",
    "Conversation roles must alternate",
    "System role not supported",
    "unsupported content[].type",
    "Failed to parse messages",
    "Failed to parse tool call arguments as JSON",
    "input is too large to process",
    "Multimodal data provided, but model does not support multimodal requests",
    "Pooling type 'none' is not OAI compatible",
    "This server does not support embeddings",
    "This server does not support reranking",
    "This server does not support completions",
    "Infill is not supported by this model",
    "Prompt contains invalid tokens",
    "Failed to parse grammar",
    "Failed to initialize samplers",
    "Unable to generate parser for this template",
)
"""Beginnings of the engine's messages that say what is wrong without quoting the prompt."""

FIELD_PROBLEM: Final = re.compile(
    r"^Field '([a-z_.]{1,40})': (?:\[[a-z_.0-9]+\] )?"
    r"(type must be [a-z]+, but is [a-z]+|Value must be between -?\d+ <= value <= \d+, but got -?\d+)$"
)
"""llama.cpp's check of a field's type or range: names, words and figures, nothing of the prompt."""

OVERFLOWN: Final = b"Context size has been exceeded"
"""llama.cpp's words when its pool is full (issue 23652)."""


def explain(status: int, body: bytes) -> Refusal:
    """What an error answer means, in words that quote neither prompt nor key."""
    if OVERFLOWN in body:
        return refusal(Reason.ENGINE_OVERFLOW)
    answer = parsed(body)
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and error.get("type") == "exceed_context_size_error":
        return _exceeded(error)
    return _by_status(status, known_problem(answer))


def _by_status(status: int, known: str | None) -> Refusal:
    if status in {401, 403}:
        log.error("the engine refuses kvgate's own key: set engine.api_key")
        return refusal(Reason.ENGINE_FAILED)
    if status == 503:
        return refusal(Reason.ENGINE_LOADING, retry_after_s=LOADING_RETRY_AFTER_S)
    if status in {404, 405, 501}:
        absent = "it was not started for it." if status == 501 else "it has no such API."
        return refusal(Reason.ENGINE_CANNOT, problem=known or absent)
    if status < 500 or known is not None:
        return refusal(Reason.ENGINE_REFUSED, problem=known or "a field has a value that it does not take.")
    return refusal(Reason.ENGINE_FAILED)


def problem_of(answer: Any) -> str:
    """What is wrong with a body that could not be counted."""
    return known_problem(answer) or "its chat template or its request parser refused the body."


def known_problem(answer: Any) -> str | None:
    """What the engine says is wrong, only where that cannot quote the prompt."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        return None
    if (field := FIELD_PROBLEM.search(message)) is not None:
        return f"field '{field[1]}': {field[2]}."
    known = next((phrase for phrase in SAFE_PROBLEMS if phrase in message), None)
    return None if known is None else f"{known}."


def _exceeded(error: dict[str, Any]) -> Refusal:
    """The engine's own overflow, which kvgate's count should have foreseen; it carries the true figures."""
    prompt, limit = error.get("n_prompt_tokens"), error.get("n_ctx")
    prompt, limit = (value if isinstance(value, int) else 0 for value in (prompt, limit))
    log.error("the engine found a prompt too long that was counted as fitting", extra={"n_ctx": limit})
    return refusal(
        Reason.PROMPT_OVERFLOW,
        figures=(
            ("n_prompt_tokens", prompt),
            ("n_ctx", limit),
            ("limited_by", "engine"),
            ("usable_generation", limit - prompt),
            ("output_tokens_min", 1),
        ),
        limit_tokens=limit,
        limited_by_clause="",
        prompt_clause=f"your prompt has {prompt} tokens",
        leaves_clause="",
        advice="shorten it",
        usable_generation=0,
        output_tokens_min=1,
    )
