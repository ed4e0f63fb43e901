"""llama.cpp's own embedding API; it tells no usage."""

from __future__ import annotations

from kvgate.wire.families import Embeddings, LlamaCppErrors


class LlamaCppEmbedding(Embeddings, LlamaCppErrors):
    """The dialect of `/embedding`; implements `ports.Dialect`."""

    name = "llamacpp_embedding"
    paths = ("/embedding", "/embeddings")
    controls: tuple[str, ...] = ()
