"""OpenAI responses: how to read, cap, watch and refuse them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvgate.core import ending
from kvgate.core.json_object import Edit
from kvgate.core.sse import event_data
from kvgate.ports import History, ReadRequest, Told
from kvgate.wire import answers, conversations, envelopes, fields, generated, stops, trim_asks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.core.ask import Size, Usage
    from kvgate.core.reason import Refusal

OUTPUT_FIELDS: Final = ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens")
"""As for chat, with the dialect's own name before `max_tokens` (measured)."""

CANONICAL_FIELD: Final = "max_output_tokens"

_ENDS: Final = tuple(f"event: response.{how}".encode() for how in ("completed", "incomplete", "failed"))


class OpenAiResponses:
    """The dialect of `/v1/responses`; implements `ports.Dialect`."""

    name = "openai_responses"
    paths = ("/v1/responses", "/responses")
    controls: tuple[str, ...] = ("/v1/responses/input_tokens",)
    output_fields = OUTPUT_FIELDS
    canonical_field = CANONICAL_FIELD
    whole_text = generated.members("text", "arguments")

    def read(self, body: bytes) -> ReadRequest:
        """Judge a request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        given = document.get("input")
        if not isinstance(given, str | list) or not given:
            raise fields.malformed("'input' must be a string or a list of items, and not empty", "input")
        if isinstance(given, list) and not all(isinstance(item, dict) for item in given):
            raise fields.malformed("'input' must be a string or a list of objects", "input")
        if not isinstance(document.get("instructions"), str | None):
            raise fields.malformed("'instructions' must be a string", "instructions")
        for field in ("previous_response_id", "conversation"):
            if document.get(field) is not None:
                raise fields.malformed(f"'{field}' is not supported: send the whole conversation", field)
        if document.get("prompt") is not None:
            raise fields.malformed("'prompt' is not supported: there are no stored templates here", "prompt")
        if fields.boolean(document, "background"):
            raise fields.malformed("'background' is not supported: the answer comes on this connection", "background")
        ask = fields.generating_ask(document, limits=OUTPUT_FIELDS, prompt_field="input", limit_field=CANONICAL_FIELD)
        return ReadRequest(ask, document, usage_shown=True, trim=trim_asks.of_responses(document))

    def trimmable(self, request: ReadRequest) -> History:
        """The items of the input."""
        return History("input", conversations.responses(request.document.get("input")))

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit and the number of answers under one name each."""
        put = fields.capped(request.document, CANONICAL_FIELD, size.output_tokens, request.ask.sequences)
        own = Edit(put, frozenset(OUTPUT_FIELDS + fields.SEQUENCE_FIELDS))
        return own | trim_asks.stripped(request.document)

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The sum over the responses: llama.cpp answers `n` with a list of them."""
        answer = answers.parsed(body)
        usages = [_usage(one) for one in (answer if isinstance(answer, list) else [answer])]
        total = answers.added((usage for usage in usages if usage is not None), prompt_once=True)
        return None if total is None else Told(total, finish=_finish(answer))

    def tap(self, request: ReadRequest) -> ResponsesTap:
        """A watcher that waits for the end of every response in the stream."""
        return ResponsesTap(request.ask.sequences)

    def refuse(self, refusal: Refusal) -> bytes:
        """OpenAI's error envelope."""
        return envelopes.openai_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """The dialect's own error event; its SDKs raise at it, and there is no end marker."""
        row = refusal.reason.value
        event = {"type": "error", "code": row.code, "message": refusal.message, "param": refusal.param}
        return b"event: error\ndata: " + json.dumps({**event, **dict(refusal.figures)}).encode() + b"\n\n"


class ResponsesTap(answers.EventTap):
    """Watches a stream of responses; the event that ends one carries its usage."""

    text = generated.members("delta")

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self._left = sequences
        self._created: bytes | None = None

    @property
    def told(self) -> Told | None:
        """The sum over the responses, once all have ended; they share one prompt."""
        usage = answers.added(self.usages, prompt_once=True)
        return Told(usage, finish=self.finish) if usage is not None and self.ended else None

    def look(self, event: bytes) -> bytes:
        """Only the events that end a response are parsed."""
        if event.startswith(_ENDS):
            chunk = answers.parsed(event_data(event))
            usage = _usage(chunk.get("response")) if isinstance(chunk, dict) else None
            if usage is not None:
                self.usages.append(usage)
            self.finished(_finish(chunk.get("response")) if isinstance(chunk, dict) else "")
            self._left -= 1
            self.ended = self._left <= 0
        elif b".delta" in event[:64]:
            self.events += 1
        elif event.startswith(b"event: response.created"):
            self._created = event
        return event

    def stop(self, events: Sequence[bytes], usage: Usage) -> bytes:
        """The event that ends a response which reached its limit."""
        return stops.response(self._created, events, usage)


def _finish(answer: Any) -> str:
    """Why responses ended: llama.cpp calls one complete whatever ended it, so that says nothing."""
    finish = ""
    for one in answer if isinstance(answer, list) else [answer]:
        details = one.get("incomplete_details") if isinstance(one, dict) else None
        reason = details.get("reason") if isinstance(details, dict) else None
        finish = ending.of_several(finish, ending.finish_of(reason))
    return finish


def _usage(response: Any) -> Usage | None:
    usage = response.get("usage") if isinstance(response, dict) else None
    if not isinstance(usage, dict):
        return None
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return answers.usage_from(usage.get("input_tokens"), usage.get("output_tokens"), cached or 0)
