"""The ends of streams that kvgate stops: each API's own end of an answer that reached its limit, and the true cause.

The finish reason is the one for a reached limit (`length`, `max_tokens`): every client knows it and takes the answer
as cut short, where a word of kvgate's own would be no value of its type. The cause stands beside it, in a member that
clients pass over.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.sse import event_data

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgate.core.ask import Usage

CAUSE: Final = {"kvgate": {"finish_reason": "loop"}}

_SAME: Final[tuple[str, ...]] = ("id", "created", "model", "system_fingerprint", "object")


def chat(events: Sequence[bytes], usage: Usage | None) -> bytes:
    """The end of a chat stream; `usage` where the client asked for it."""
    for last in _chunks(events):
        same = {name: last[name] for name in _SAME if name in last}
        choice = {"finish_reason": "length", "index": 0, "delta": {}}
        ending = _event({"choices": [choice], **same, **CAUSE})
        if usage is not None:
            ending += _event({"choices": [], **same, "usage": _openai(usage)})
        return ending + b"data: [DONE]\n\n"
    return b""


def completion(events: Sequence[bytes], usage: Usage) -> bytes:
    """The end of a text completion's stream, whose last chunk tells its usage."""
    for last in _chunks(events):
        same = {name: last[name] for name in _SAME if name in last}
        choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}
        return _event({"choices": [choice], **same, "usage": _openai(usage), **CAUSE}) + b"data: [DONE]\n\n"
    return b""


def llamacpp(events: Sequence[bytes], usage: Usage) -> bytes:
    """The last event of llama.cpp's own stream."""
    for last in _documents(events):
        if last.get("stop") is False:
            figures = {"tokens_predicted": usage.output_tokens, "tokens_evaluated": usage.prompt_tokens}
            why = {"truncated": False, "stop_type": "limit", "stopping_word": ""}
            index = {"index": last.get("index", 0)}
            return _event({**index, "content": "", "tokens": [], "stop": True, **figures, **why, **CAUSE})
    return b""


def message(events: Sequence[bytes], usage: Usage) -> bytes:
    """The end of a message's stream; it can only follow a piece of a block, which is closed first."""
    for last in _documents(events):
        if last.get("type") == "content_block_delta":
            delta = {"stop_reason": "max_tokens", "stop_sequence": None}
            figures = {"output_tokens": usage.output_tokens}
            return (
                _typed({"type": "content_block_stop", "index": last.get("index", 0)})
                + _typed({"type": "message_delta", "delta": delta, "usage": figures, **CAUSE})
                + _typed({"type": "message_stop"})
            )
    return b""


def response(created: bytes | None, events: Sequence[bytes], usage: Usage) -> bytes:
    """The end of a response's stream. Its `output` is empty: the text stood in the deltas and is not kept here."""
    begun = _document(created)
    if begun is None or not any(str(last.get("type", "")).endswith(".delta") for last in _documents(events)):
        return b""
    known = begun.get("response")
    ended = {
        "created_at": int(time.time()),
        "model": "",
        **(known if isinstance(known, dict) else {}),
        "object": "response",
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        **CAUSE,
    }
    return _typed({"type": "response.incomplete", "response": ended})


def _openai(usage: Usage) -> dict[str, int]:
    prompt, output = usage.prompt_tokens, usage.output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _chunks(events: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    return (found for found in _documents(events) if found.get("choices"))


def _documents(events: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """What the events say, the last first."""
    for event in reversed(events):
        if (found := _document(event)) is not None:
            yield found


def _document(event: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads((event and event_data(event)) or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def _typed(document: dict[str, Any]) -> bytes:
    return f"event: {document['type']}\n".encode() + _event(document)
