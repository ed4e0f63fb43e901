"""OpenAI text completions: prompts as strings, tokens and lists of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgate.core.ask import Usage
from kvgate.core.json_object import Edit
from kvgate.core.sse import event_data
from kvgate.ports import ReadRequest, Texts, Told
from kvgate.wire import answers, fields, generated, stops, trim_asks
from kvgate.wire.families import OpenAiErrors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.core.ask import Size

OUTPUT_FIELDS: Final = fields.LLAMACPP_LIMITS
CANONICAL_FIELD: Final = "max_tokens"


class OpenAiCompletions(OpenAiErrors):
    """The dialect of `/v1/completions`; implements `ports.Dialect`."""

    name = "openai_completions"
    paths = ("/v1/completions",)
    controls: tuple[str, ...] = ()
    output_fields = OUTPUT_FIELDS
    canonical_field = CANONICAL_FIELD
    whole_text = generated.members("text")

    def read(self, body: bytes) -> ReadRequest:
        """Judge a completion request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        ask = fields.generating_ask(
            document,
            limits=OUTPUT_FIELDS,
            prompts=fields.prompts_of("prompt", document.get("prompt")),
            prompt_field="prompt",
        )
        trim = trim_asks.of_text(document)
        return ReadRequest(ask, document, usage_shown=fields.usage_shown(document), trim=trim)

    def trimmable(self, request: ReadRequest) -> Texts:
        """The prompt."""
        return Texts("prompt")

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit and the number of answers under one name each; `best_of`, which is ignored, goes."""
        put = fields.capped(request.document, CANONICAL_FIELD, size.output_tokens, request.ask.sequences)
        own = Edit(put, frozenset((*OUTPUT_FIELDS, *fields.SEQUENCE_FIELDS, "best_of")))
        return own | trim_asks.stripped(request.document)

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The `usage` of a whole answer; llama.cpp tells the first choice's only."""
        answer = answers.parsed(body)
        usage = answers.openai_usage(answer)
        if usage is None:
            return None
        untold = tuple(str(choice.get("text") or "") for choice in answers.other_choices(answer))
        return Told(usage, untold=untold, finish=answers.openai_finish(answer))

    def tap(self, request: ReadRequest) -> CompletionsTap:
        """A watcher that adds up what the choices cost."""
        return CompletionsTap(prompts=len(request.ask.prompts), sequences=request.ask.sequences)


class CompletionsTap(answers.EventTap):
    """Watches a completion stream: the last chunk of every choice carries its usage, asked for or not."""

    text = OpenAiCompletions.whole_text

    def __init__(self, *, prompts: int, sequences: int) -> None:
        super().__init__()
        self._prompts, self._sequences = prompts, sequences

    @property
    def told(self) -> Told | None:
        """The sum over the choices; each prompt is told once for each of its answers."""
        usage = answers.added(self.usages, prompt_once=False)
        if usage is None or len(self.usages) < self._prompts * self._sequences:
            return None
        prompt, cached = usage.prompt_tokens // self._sequences, usage.cached_tokens // self._sequences
        return Told(Usage(prompt, usage.output_tokens, cached), prompts=self._prompts, finish=self.finish)

    def look(self, event: bytes) -> bytes:
        """Only events that can matter are parsed."""
        if not answers.is_unfinished(event):
            self.finished(answers.openai_finish(answers.parsed(event_data(event))))
        if event.startswith(b"data: [DONE]"):
            self.ended = True
        elif event.startswith(b"data: null"):
            return b""  # llama.cpp begins the stream of several choices so; clients stumble over it
        elif b'"usage"' in event and (usage := answers.openai_usage(answers.parsed(event_data(event)))) is not None:
            self.usages.append(usage)
        else:
            self.events += event.startswith(b"data:")
        return event

    def stop(self, events: Sequence[bytes], usage: Usage) -> bytes:
        """The chunk that ends the choice with its usage, the end marker."""
        return stops.completion(events, usage)
