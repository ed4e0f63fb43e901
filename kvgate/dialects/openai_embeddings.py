"""OpenAI embeddings: prompts without output."""

from __future__ import annotations

from kvgate.wire.families import Embeddings, OpenAiErrors


class OpenAiEmbeddings(Embeddings, OpenAiErrors):
    """The dialect of `/v1/embeddings`; implements `ports.Dialect`."""

    name = "openai_embeddings"
    paths = ("/v1/embeddings",)
    controls: tuple[str, ...] = ()
