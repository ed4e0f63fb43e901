"""llama.cpp's rerank API (Jina's shape): one query against a list of documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgate.core.ask import Prompt
from kvgate.core.json_object import Edit
from kvgate.ports import ReadRequest
from kvgate.wire import fields
from kvgate.wire.families import LlamaCppErrors, WithoutOutput

if TYPE_CHECKING:
    from kvgate.core.ask import Size

FRAME_TOKENS: Final = 256
"""A bound for what surrounds query and document: separators, or the instruction of a model's rerank template."""


class LlamaCppRerank(WithoutOutput, LlamaCppErrors):
    """The dialect of `/rerank`; implements `ports.Dialect`."""

    name = "llamacpp_rerank"
    paths = ("/v1/rerank", "/rerank", "/reranking", "/v1/reranking")
    controls: tuple[str, ...] = ()
    output_fields: tuple[str, ...] = ()
    canonical_field = ""

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
        ask = fields.silent_ask(document, tuple(Prompt((query, text), FRAME_TOKENS) for text in texts), field)
        return ReadRequest(ask, document, usage_shown=True)

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """Only the documents that were judged are sent."""
        return Edit({}, frozenset({"texts"} if "documents" in request.document else ()))
