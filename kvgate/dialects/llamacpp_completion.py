"""llama.cpp's own completion API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgate.core.ask import Ask
from kvgate.core.json_object import Edit
from kvgate.ports import ReadRequest
from kvgate.wire import answers, envelopes, fields

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.reason import Refusal
    from kvgate.ports import Told

OUTPUT_FIELDS: Final = fields.LLAMACPP_LIMITS
CANONICAL_FIELD: Final = "n_predict"


class LlamaCppCompletion:
    """The dialect of `/completion`; implements `ports.Dialect`."""

    name = "llamacpp_completion"
    paths = ("/completion", "/completions")
    controls: tuple[str, ...] = ("/tokenize", "/detokenize", "/apply-template")

    def read(self, body: bytes) -> ReadRequest:
        """Judge a completion request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        ask = Ask(
            model=fields.model_of(document),
            output_tokens=fields.output_limit(document, OUTPUT_FIELDS),
            sequences=fields.sequences_of(document),
            stream=fields.boolean(document, "stream"),
            prompts=fields.prompts_of("prompt", document.get("prompt")),
            prompt_field="prompt",
            limit_field="n_predict",
        )
        return ReadRequest(ask, document, usage_shown=True)

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit and the number of answers under one name each; no answer without its figures."""
        put = fields.capped(request.document, CANONICAL_FIELD, size.output_tokens, request.ask.sequences)
        put |= fields.figures_kept(request.document)
        return Edit(put, frozenset(OUTPUT_FIELDS + fields.SEQUENCE_FIELDS))

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The sum over the answers, each of which tells its own."""
        return answers.llamacpp_told(request, body)

    def tap(self, request: ReadRequest) -> answers.LlamaCppTap:
        """A watcher that waits for the last event of every answer."""
        return answers.LlamaCppTap(request)

    def refuse(self, refusal: Refusal) -> bytes:
        """llama.cpp's error envelope."""
        return envelopes.llamacpp_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """An error event, as llama.cpp itself sends one."""
        return envelopes.llamacpp_refusal_event(refusal)
