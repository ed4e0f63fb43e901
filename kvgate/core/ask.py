"""What a request wants, without its dialect, and what it turned out to cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One inference request, read and judged, before anything is counted.

    `output_tokens` is the client's own effective limit by the engine's precedence, or None where the
    client set none (missing, null, -1: "until the context is full"; llama.cpp issue 6638).
    `sequences` is the number of answers generated side by side (`n`).
    """

    model: str | None
    output_tokens: int | None
    sequences: int
    stream: bool


@dataclass(frozen=True, slots=True)
class Size:
    """What a request may hold in the KV cache: tokens of prompt, tokens of each output, sequences."""

    prompt_tokens: int
    output_tokens: int
    sequences: int = 1

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.output_tokens < 1 or self.sequences < 1:
            raise ValueError(f"not a size: {self!r}")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine said a request cost, in tokens; `output_tokens` is summed over all sequences."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
