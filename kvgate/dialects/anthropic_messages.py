"""Anthropic messages: how to read, cap, watch and refuse them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvgate.core import ending
from kvgate.core.ask import Ask, Usage
from kvgate.core.json_object import Edit
from kvgate.core.reason import Reason, refusal
from kvgate.core.sse import event_data
from kvgate.ports import History, ReadRequest, Refused, Told
from kvgate.wire import answers, conversations, envelopes, fields, generated, stops, trim_asks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.core.ask import Size
    from kvgate.core.reason import Refusal

OUTPUT_FIELDS: Final = ("max_tokens",)
"""The only name that llama.cpp reads here, and without it the answer has no limit (measured)."""

CANONICAL_FIELD: Final = "max_tokens"

FOREIGN_FIELDS: Final = ("n_predict", "max_completion_tokens", "n", "n_cmpl")
"""Names of other dialects, which this one ignores; removed, so that no other build can read them."""

UNSIZED_BLOCKS: Final = frozenset({"image", "document"})
"""Content blocks that the engine's counter for this dialect drops or cannot size (measured)."""


class AnthropicMessages:
    """The dialect of `/v1/messages`; implements `ports.Dialect`."""

    name = "anthropic_messages"
    paths = ("/v1/messages",)
    controls: tuple[str, ...] = ("/v1/messages/count_tokens",)
    output_fields = OUTPUT_FIELDS
    canonical_field = CANONICAL_FIELD
    whole_text = generated.members("text", "thinking")

    def read(self, body: bytes) -> ReadRequest:
        """Judge a request.

        Raises:
            Refused: MALFORMED, with the field to blame; UNCOUNTED for blocks that nothing can size.
        """
        document = fields.document_of(body)
        messages = fields.messages_of(document)
        if not isinstance(document.get("system"), str | list | None):
            raise fields.malformed("'system' must be a string or a list of blocks", "system")
        if any(_has_unsized(message.get("content")) for message in messages):
            problem = "images and documents have no counter in this API; use /v1/chat/completions for images."
            raise Refused(refusal(Reason.UNCOUNTED, problem=problem, param="messages"))
        ask = Ask(
            model=fields.model_of(document),
            output_tokens=fields.output_limit(document, OUTPUT_FIELDS),
            sequences=1,
            stream=fields.boolean(document, "stream"),
        )
        return ReadRequest(ask, document, usage_shown=True, trim=trim_asks.of_messages(document))

    def trimmable(self, request: ReadRequest) -> History:
        """The messages."""
        return History("messages", conversations.messages(request.document.get("messages")))

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit; names of other dialects go."""
        own = Edit({CANONICAL_FIELD: size.output_tokens}, frozenset(FOREIGN_FIELDS))
        return own | trim_asks.stripped(request.document)

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The `usage` of a whole answer, with the cached tokens that it leaves out of the input added back."""
        answer = answers.parsed(body)
        usage = _usage(answer.get("usage")) if isinstance(answer, dict) else None
        return None if usage is None else Told(usage, finish=ending.finish_of(answer.get("stop_reason")))

    def tap(self, request: ReadRequest) -> MessagesTap:
        """A watcher for the events that begin and end a message."""
        return MessagesTap()

    def refuse(self, refusal: Refusal) -> bytes:
        """Anthropic's error envelope."""
        return envelopes.anthropic_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """The dialect's error event; there is no end marker."""
        return b"event: error\ndata: " + envelopes.anthropic_error(refusal) + b"\n"


class MessagesTap(answers.EventTap):
    """Watches a message stream: the input stands in the first event, the output in the last but one."""

    text = generated.members("text", "thinking", "partial_json")

    def __init__(self) -> None:
        super().__init__()
        self._input: Usage | None = None
        self._output: int | None = None

    @property
    def told(self) -> Told | None:
        """Input and output together; llama.cpp tells no input where the answer is empty."""
        if self._output is None:
            return None
        if self._input is None:
            return Told(Usage(0, self._output), prompts=0, finish=self.finish)
        usage = Usage(self._input.prompt_tokens, self._output, self._input.cached_tokens)
        return Told(usage, finish=self.finish)

    def look(self, event: bytes) -> bytes:
        """Only the events that carry usage are parsed."""
        if event.startswith(b"event: message_stop"):
            self.ended = True
        elif event.startswith(b"event: message_start"):
            chunk = answers.parsed(event_data(event))
            message = chunk.get("message") if isinstance(chunk, dict) else None
            self._input = _usage(message.get("usage")) if isinstance(message, dict) else None
        elif event.startswith(b"event: message_delta"):
            chunk = answers.parsed(event_data(event))
            usage = chunk.get("usage") if isinstance(chunk, dict) else None
            output = usage.get("output_tokens") if isinstance(usage, dict) else None
            self._output = output if isinstance(output, int) and output >= 0 else None
            delta = chunk.get("delta") if isinstance(chunk, dict) else None
            self.finished(delta.get("stop_reason") if isinstance(delta, dict) else None)
        else:
            self.events += event.startswith(b"event: content_block_delta")
        return event

    def stop(self, events: Sequence[bytes], usage: Usage) -> bytes:
        """The events that end the block and a message that reached its limit."""
        return stops.message(events, usage)


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    cached, created = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    found = answers.usage_from(usage.get("input_tokens"), usage.get("output_tokens"), cached)
    if found is None or not isinstance(created, int):
        return None
    return Usage(found.prompt_tokens + cached + created, found.output_tokens, cached)


def _has_unsized(content: Any) -> bool:
    if not isinstance(content, list):
        return False
    return any(
        isinstance(block, dict) and (str(block.get("type")) in UNSIZED_BLOCKS or _has_unsized(block.get("content")))
        for block in content
    )
