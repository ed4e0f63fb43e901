"""llama.cpp's rerank API (Jina's shape): one query against a list of documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgate.core.ask import Ask, Prompt
from kvgate.core.json_object import Edit
from kvgate.ports import ReadRequest, Told
from kvgate.wire import answers, envelopes, fields

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.reason import Refusal

FRAME_TOKENS: Final = 256
"""A bound for what surrounds query and document: separators, or the instruction of a model's rerank template."""


class LlamaCppRerank:
    """The dialect of `/rerank`; implements `ports.Dialect`."""

    name = "llamacpp_rerank"
    paths = ("/v1/rerank", "/rerank", "/reranking", "/v1/reranking")
    controls: tuple[str, ...] = ()

    def read(self, body: bytes) -> ReadRequest:
        """Judge a rerank request: each document is a sequence of its own, with the query before it.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        query, other = document.get("query"), "texts" in document and "documents" not in document
        field = "texts" if other else "documents"
        texts = document.get(field)
        if not isinstance(query, str) or not query:
            raise fields.malformed("'query' must be a string, and not empty", "query")
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise fields.malformed(f"'{field}' must be a list of strings, and not empty", field)
        if len(texts) > fields.PROMPTS_MAX:
            raise fields.malformed(f"'{field}' may hold at most {fields.PROMPTS_MAX} texts; please split it", field)
        ask = Ask(
            model=fields.model_of(document),
            output_tokens=0,
            sequences=1,
            stream=False,
            prompts=tuple(Prompt((query, text), FRAME_TOKENS) for text in texts),
            prompt_field="documents",
        )
        return ReadRequest(ask, document, usage_shown=True)

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """Only the documents that were judged are sent."""
        return Edit({}, frozenset({"texts"} if "documents" in request.document else ()))

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The `usage` of the answer: the sum over all documents."""
        usage = answers.openai_usage(answers.parsed(body))
        return None if usage is None else Told(usage, prompts=len(request.ask.prompts))

    def tap(self, request: ReadRequest) -> answers.NoStream:
        """Reranking does not stream."""
        return answers.NoStream()

    def refuse(self, refusal: Refusal) -> bytes:
        """llama.cpp's error envelope."""
        return envelopes.llamacpp_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """Never sent."""
        return envelopes.llamacpp_refusal_event(refusal)
