"""How each family of APIs words an error, with the phrases that its clients act on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from kvgate.core.reason import Refusal


def openai_error(refused: Refusal) -> bytes:
    """OpenAI's envelope: what its SDKs turn into an exception with `code` and `param`."""
    row = refused.reason.value
    error = {"message": refused.message, "type": row.error_type, "param": refused.param, "code": row.code}
    return _line({"error": {**error, "reason": row.label, **dict(refused.figures)}})


def llamacpp_error(refused: Refusal) -> bytes:
    """llama.cpp's own envelope; its clients look for `exceed_context_size_error` and the two figures."""
    row = refused.reason.value
    kind = "exceed_context_size_error" if row.code == "context_length_exceeded" else row.error_type
    error = {"code": row.status, "message": refused.message, "type": kind}
    return _line({"error": {**error, "reason": row.label, **dict(refused.figures)}})


ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(refused: Refusal) -> bytes:
    """Anthropic's envelope, with the sentences that its clients read the figures from and recover by."""
    status = refused.reason.status
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": anthropic_sentence(refused), "reason": refused.reason.label}
    return _line({"type": "error", "error": {**error, **dict(refused.figures)}})


def anthropic_sentence(refused: Refusal) -> str:
    """The refusal in Anthropic's words where its clients act on them: the overflows.

    They compare the figures, so the maximum is what would have been let through, margins and minimum included.
    """
    figures = dict(refused.figures)
    if refused.reason not in {Reason.PROMPT_OVERFLOW, Reason.UNTRIMMABLE, Reason.GENERATION_OVERFLOW}:
        return refused.message
    prompt, usable, asked, least = (
        int(figures.get(name, 0))
        for name in ("n_prompt_tokens", "usable_generation", "requested_output_tokens", "output_tokens_min")
    )
    if refused.reason is not Reason.GENERATION_OVERFLOW:
        too_long = f"prompt is too long: {prompt} tokens > {prompt + usable - least} maximum"
        return too_long if refused.reason is Reason.PROMPT_OVERFLOW else f"{too_long}. {refused.message}"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {prompt + usable}, "
        "decrease input length or `max_tokens` and try again"
    )


def openai_refusal_event(refused: Refusal) -> bytes:
    """An error event, then the end marker: OpenAI's SDKs raise at the first and stop at the second."""
    return b"data: " + openai_error(refused) + b"\ndata: [DONE]\n\n"


def llamacpp_refusal_event(refused: Refusal) -> bytes:
    """An error event as llama.cpp itself sends one; there is no end marker."""
    return b"data: " + llamacpp_error(refused) + b"\n"


def _line(envelope: dict[str, Any]) -> bytes:
    return json.dumps(envelope).encode() + b"\n"
