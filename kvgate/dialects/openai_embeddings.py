"""OpenAI embeddings: prompts without output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgate.ports import ReadRequest, Told
from kvgate.wire import answers, envelopes, fields

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.json_object import Edit
    from kvgate.core.reason import Refusal


class OpenAiEmbeddings:
    """The dialect of `/v1/embeddings`; implements `ports.Dialect`."""

    name = "openai_embeddings"
    paths = ("/v1/embeddings",)
    controls: tuple[str, ...] = ()

    def read(self, body: bytes) -> ReadRequest:
        """Judge an embedding request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        return ReadRequest(fields.embedding_ask(document), document, usage_shown=True)

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """Only the prompts that were judged are sent: a second name for them goes."""
        return fields.embedding_edit(request.document)

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The `usage` of the answer: the sum over all prompts."""
        usage = answers.openai_usage(answers.parsed(body))
        return None if usage is None else Told(usage, prompts=len(request.ask.prompts))

    def tap(self, request: ReadRequest) -> answers.NoStream:
        """Embeddings do not stream."""
        return answers.NoStream()

    def refuse(self, refusal: Refusal) -> bytes:
        """OpenAI's error envelope."""
        return envelopes.openai_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """Never sent."""
        return envelopes.openai_refusal_event(refusal)
