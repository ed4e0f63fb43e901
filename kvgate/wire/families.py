"""What the dialects of one family have in common: how they word errors, and what llama.cpp's own answers tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgate.core.json_object import Edit
from kvgate.wire import answers, envelopes, fields, trim_asks

if TYPE_CHECKING:
    import re

    from kvgate.core.ask import Size
    from kvgate.core.reason import Refusal
    from kvgate.ports import ReadRequest, Texts, Told


class OpenAiErrors:
    """Errors in OpenAI's words."""

    def refuse(self, refusal: Refusal) -> bytes:
        """OpenAI's error envelope."""
        return envelopes.openai_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """An error event, then the end marker."""
        return envelopes.openai_refusal_event(refusal)


class LlamaCppErrors:
    """Errors in llama.cpp's words."""

    def refuse(self, refusal: Refusal) -> bytes:
        """llama.cpp's error envelope."""
        return envelopes.llamacpp_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """An error event, as llama.cpp itself sends one; there is no end marker."""
        return envelopes.llamacpp_refusal_event(refusal)


class LlamaCppText(LlamaCppErrors):
    """Text generated in llama.cpp's own form: one object an answer, each of which tells what it cost."""

    output_fields = fields.LLAMACPP_LIMITS
    canonical_field = "n_predict"
    whole_text = answers.LlamaCppTap.text

    def trimmable(self, request: ReadRequest) -> Texts | None:  # noqa: ARG002 - a port's method
        """Nothing, unless an API says so."""
        return None

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit and the number of answers under one name each; no answer without its figures."""
        put = fields.capped(request.document, self.canonical_field, size.output_tokens, request.ask.sequences)
        put |= fields.figures_kept(request.document)
        own = Edit(put, frozenset(self.output_fields + fields.SEQUENCE_FIELDS))
        return own | trim_asks.stripped(request.document)

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The sum over the answers, each of which tells its own."""
        return answers.llamacpp_told(request, body)

    def tap(self, request: ReadRequest) -> answers.LlamaCppTap:
        """A watcher that waits for the last event of every answer."""
        return answers.LlamaCppTap(request)


class WithoutOutput:
    """Nothing is generated: there is no limit to set, no stream to watch, and no room to make."""

    whole_text: tuple[re.Pattern[bytes], ...] = ()

    def trimmable(self, request: ReadRequest) -> None:
        """Nothing: half an embedding is another one."""

    def tap(self, request: ReadRequest) -> answers.NoStream:  # noqa: ARG002 - a port's method names all that any needs
        """A watcher for a stream that should not be."""
        return answers.NoStream()

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The `usage` of the answer: the sum over all prompts; None where the API tells none."""
        return answers.told_of_all(request, body)


class Embeddings(WithoutOutput):
    """Embedding requests, which two families word alike."""

    output_fields: tuple[str, ...] = ()
    canonical_field = ""

    def read(self, body: bytes) -> ReadRequest:
        """Judge an embedding request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        return fields.embedding_request(fields.document_of(body))

    def cap(self, request: ReadRequest, size: Size) -> Edit:  # noqa: ARG002 - there is no output to cap
        """Only the prompts that were judged are sent: a second name for them goes."""
        return fields.embedding_edit(request.document)
