"""OpenAI chat completions: how to read, cap, watch and refuse them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvgate.core.json_object import Edit, read_object
from kvgate.core.sse import event_data
from kvgate.ports import History, ReadRequest, Told
from kvgate.wire import answers, conversations, fields, generated, stops, trim_asks
from kvgate.wire.families import OpenAiErrors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.core.ask import Size, Usage

OUTPUT_FIELDS: Final = fields.LLAMACPP_LIMITS
CANONICAL_FIELD: Final = "max_tokens"


class OpenAiChat(OpenAiErrors):
    """The dialect of `/v1/chat/completions`; implements `ports.Dialect`."""

    name = "openai_chat"
    paths = ("/v1/chat/completions", "/chat/completions")
    controls: tuple[str, ...] = ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens")
    output_fields = OUTPUT_FIELDS
    canonical_field = CANONICAL_FIELD
    whole_text = generated.members("content", "reasoning_content", "arguments")

    def read(self, body: bytes) -> ReadRequest:
        """Judge a chat request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        fields.messages_of(document)
        ask = fields.generating_ask(document, limits=OUTPUT_FIELDS)
        trim = trim_asks.of_chat(document)
        return ReadRequest(ask, document, usage_shown=fields.usage_shown(document), trim=trim)

    def trimmable(self, request: ReadRequest) -> History:
        """The messages."""
        return History("messages", conversations.chat(request.document.get("messages")))

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit under one name only, `n` likewise, and the usage of a stream always asked for."""
        document = request.document
        put = fields.capped(request.document, CANONICAL_FIELD, size.output_tokens, request.ask.sequences)
        if request.ask.stream:
            options = document.get("stream_options") or {}
            put["stream_options"] = {**options, "include_usage": True}
        own = Edit(put, frozenset(OUTPUT_FIELDS + fields.SEQUENCE_FIELDS))
        return own | trim_asks.stripped(document)

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The `usage` of a whole answer; llama.cpp tells the first choice's only."""
        answer = answers.parsed(body)
        usage = answers.openai_usage(answer)
        if usage is None:
            return None
        untold = tuple(map(_text, answers.other_choices(answer)))
        return Told(usage, untold=untold, finish=answers.openai_finish(answer))

    def tap(self, request: ReadRequest) -> ChatTap:
        """A watcher that hides the usage chunk where the client did not ask for one."""
        return ChatTap(usage_shown=request.usage_shown, sequences=request.ask.sequences)


_NO_OUTPUT: Final = (b'"delta":{}', b'"content":null')
"""What the chunks that begin and end a choice have; within a text these quotes would be escaped."""


class ChatTap(answers.EventTap):
    """Watches a chat stream.

    llama.cpp sends a usage chunk for every choice; the client gets one, with their sum, or none. It also tells of
    an overflown pool by an error event inside a 200, and sends no end marker then.
    """

    text = OpenAiChat.whole_text

    def __init__(self, *, usage_shown: bool, sequences: int = 1) -> None:
        super().__init__()
        self._usage_shown = usage_shown
        self._sequences = sequences
        self._usage_chunk: bytes | None = None

    @property
    def told(self) -> Told | None:
        """The sum over the choices; they share one prompt. Cut in between, some told nothing yet: so do all."""
        usage = answers.added(self.usages, prompt_once=True)
        whole = self.ended or len(self.usages) >= self._sequences
        return Told(usage, finish=self.finish) if usage is not None and whole else None

    def look(self, event: bytes) -> bytes:
        """Only events that can matter are parsed."""
        if event.startswith(b"data: [DONE]"):
            self.ended = True
            return self._summed() + event
        if b'"usage"' in event and self._is_usage_chunk(event):
            self._usage_chunk = event_data(event)
            return b""
        if not answers.is_unfinished(event):
            self.finished(answers.openai_finish(answers.parsed(event_data(event))))
        self.events += event.startswith(b"data:") and not any(mark in event for mark in _NO_OUTPUT)
        return event

    def stop(self, events: Sequence[bytes], usage: Usage) -> bytes:
        """The chunk that ends the choice, the usage where it was asked for, the end marker."""
        return stops.chat(events, usage if self._usage_shown else None)

    def _is_usage_chunk(self, event: bytes) -> bool:
        chunk = answers.parsed(event_data(event))
        usage = answers.openai_usage(chunk)
        if usage is None:
            return False
        alone = bool(chunk.get("choices") == [])
        if alone:
            self.usages.append(usage)
        elif not self.usages:
            self.usages = [usage]
        return alone

    def _summed(self) -> bytes:
        if self._usage_chunk is None or not self._usage_shown:
            return b""
        chunk = read_object(self._usage_chunk)
        usage = answers.added(self.usages, prompt_once=True)
        if usage is None or len(self.usages) == 1:
            return b"data: " + self._usage_chunk + b"\n\n"
        total = {
            **chunk.get("usage"),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }
        return b"data: " + chunk.edited(Edit({"usage": total}, frozenset())) + b"\n\n"


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    if not isinstance(message, dict):
        return ""
    return "".join(str(message[part]) for part in ("reasoning_content", "content") if message.get(part))
