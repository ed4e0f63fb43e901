"""OpenAI chat completions: how to read, cap, watch and refuse them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.ask import Ask, Usage
from kvgate.core.json_object import Edit, MalformedJson, read_object
from kvgate.core.reason import Reason, refusal
from kvgate.core.sse import event_data
from kvgate.ports import ReadRequest, Refused

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.json_object import JsonObject
    from kvgate.core.reason import Refusal

OUTPUT_FIELDS: Final = ("n_predict", "max_completion_tokens", "max_tokens")
"""The names of the output limit; of those that set one, the first wins (llama.cpp, whatever the key order).

What a value means, measured on llama.cpp: missing, null, -1: no limit; 0: one token; true and false: 1 and 0;
3.7: 3; below -1, or not a number: refused. Two differences are deliberate: for llama.cpp `n_predict: -1` beats
`max_tokens: 4` and the answer is unlimited (llama.cpp issue 19831), here a name without a limit beats nothing;
and what is above llama.cpp's range, which it refuses, is `OUTPUT_TOKENS_MAX`, so that a tenant may be clamped.
The winner is sent on as `max_tokens`, the other names are removed.
"""

OUTPUT_TOKENS_MAX: Final = 2**31 - 1

CANONICAL_FIELD: Final = "max_tokens"

SEQUENCE_FIELDS: Final = ("n", "n_cmpl")
"""Two names of one number for llama.cpp; both set and different is contradictory, and refused."""


ENGINE_OVERFLOW: Final = b"Context size has been exceeded"
"""llama.cpp's words when its pool is full (issue 23652)."""


class OpenAiChat:
    """The dialect of `/v1/chat/completions`; implements `ports.Dialect`."""

    name = "openai_chat"

    def read(self, body: bytes) -> ReadRequest:
        """Judge a chat request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        try:
            document = read_object(body)
        except MalformedJson as error:
            raise _malformed(str(error)) from None
        _check_messages(document.get("messages"))
        stream = document.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise _malformed("'stream' must be true or false", "stream")
        ask = Ask(
            model=_model(document.get("model")),
            output_tokens=_output_tokens(document),
            sequences=_sequences(document),
            stream=bool(stream),
        )
        return ReadRequest(ask, document, usage_shown=_usage_shown(document))

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit under one name only, `n` likewise, and the usage of a stream always asked for."""
        document = request.document
        put: dict[str, Any] = {CANONICAL_FIELD: size.output_tokens}
        if any(field in document for field in SEQUENCE_FIELDS):
            put["n"] = size.sequences
        if request.ask.stream:
            options = document.get("stream_options") or {}
            put["stream_options"] = {**options, "include_usage": True}
        return Edit(put, frozenset(OUTPUT_FIELDS + SEQUENCE_FIELDS))

    def usage(self, body: bytes) -> Usage | None:
        """The `usage` of a whole answer; None where there is none to read."""
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            return None
        return _usage(answer)

    def tap(self, request: ReadRequest) -> ChatTap:
        """A watcher that hides the usage chunk where the client did not ask for one."""
        return ChatTap(usage_shown=request.usage_shown)

    def refuse(self, refusal: Refusal) -> bytes:
        """OpenAI's error envelope."""
        return json.dumps(_envelope(refusal)).encode() + b"\n"

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """An error event, then the end marker: SDKs raise on the first and stop at the second."""
        return b"data: " + json.dumps(_envelope(refusal)).encode() + b"\n\ndata: [DONE]\n\n"


class ChatTap:
    """Watches a chat stream; implements `ports.StreamTap`.

    llama.cpp tells of an overflown pool by an error event inside a 200, and sends no end marker then.
    """

    def __init__(self, *, usage_shown: bool) -> None:
        self._usage_shown = usage_shown
        self.usage: Usage | None = None
        self.ended = False
        self.failure: Reason | None = None

    def take(self, event: bytes) -> bytes:
        """Look at one event; only those that can matter are parsed. Nothing passes behind an error."""
        if self.failure is not None:
            return b""
        if event.startswith(b"data: [DONE]"):
            self.ended = True
        elif b'"usage"' in event:
            return self._take_usage(event)
        elif b'"error"' in event and _is_error(event):
            self.failure = Reason.ENGINE_OVERFLOW if ENGINE_OVERFLOW in event else Reason.ENGINE_FAILED
            return b""
        return event

    def _take_usage(self, event: bytes) -> bytes:
        chunk = _parsed(event)
        found = _usage(chunk)
        if found is None:
            return event
        self.usage = found
        return b"" if chunk.get("choices") == [] and not self._usage_shown else event


def _parsed(event: bytes) -> Any:
    try:
        return json.loads(event_data(event) or b"null")
    except (ValueError, RecursionError):
        return None


def _is_error(event: bytes) -> bool:
    chunk = _parsed(event)
    return isinstance(chunk, dict) and chunk.get("error") is not None


def _usage(answer: Any) -> Usage | None:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    figures = (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached or 0)
    prompt, output, cached = figures
    if isinstance(prompt, int) and isinstance(output, int) and isinstance(cached, int):
        return Usage(prompt, output, cached)
    return None


def _envelope(refusal: Refusal) -> dict[str, Any]:
    row = refusal.reason.value
    error = {"message": refusal.message, "type": row.error_type, "param": refusal.param, "code": row.code}
    return {"error": {**error, "reason": row.label, **dict(refusal.figures)}}


def _malformed(problem: str, param: str | None = None) -> Refused:
    return Refused(refusal(Reason.MALFORMED, problem=problem, param=param))


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise _malformed("'messages' must be a list with at least one message", "messages")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _malformed(f"'messages[{at}]' must be an object", "messages")
        if not isinstance(message.get("role"), str):
            raise _malformed(f"'messages[{at}].role' must be a string", "messages")
        if not isinstance(message.get("content"), str | list | None):
            raise _malformed(f"'messages[{at}].content' must be a string or a list of parts", "messages")


def _model(model: Any) -> str | None:
    if model is not None and not isinstance(model, str):
        raise _malformed("'model' must be a string", "model")
    return model


def _output_tokens(document: JsonObject) -> int | None:
    """The effective output limit, in tokens; None is no limit. See `OUTPUT_FIELDS`.

    Every field that is there must be a number, also those that another one beats: what the client meant by
    two limits of which one is nonsense cannot be known.
    """
    limits = [_limit(field, document.get(field)) for field in OUTPUT_FIELDS if document.get(field) is not None]
    first = next((limit for limit in limits if limit != -1), None)
    return None if first is None else max(first, 1)


def _limit(field: str, value: Any) -> int:
    if not isinstance(value, int | float):
        raise _malformed(f"'{field}' must be a number", field)
    limit = math.trunc(value)
    if limit < -1:
        raise _malformed(f"'{field}' must be -1 or more", field)
    return min(limit, OUTPUT_TOKENS_MAX)


def _sequences(document: JsonObject) -> int:
    given = {field: document.get(field) for field in SEQUENCE_FIELDS if document.get(field) is not None}
    for field, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise _malformed(f"'{field}' must be a whole number of at least 1", field)
    if len(set(given.values())) > 1:
        raise _malformed("'n' and 'n_cmpl' say two different numbers", "n")
    return int(next(iter(given.values()), 1))


def _usage_shown(document: JsonObject) -> bool:
    options = document.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _malformed("'stream_options' must be an object", "stream_options")
    shown = options.get("include_usage")
    if shown is not None and not isinstance(shown, bool):
        raise _malformed("'stream_options.include_usage' must be true or false", "stream_options")
    return bool(shown)
