"""What a request wants, without its dialect, and what it turned out to cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as text pieces and token ids, in order, as the engine would tokenize it.

    `extra_tokens` is a certain bound for what the engine adds on its own (the frame of an infill or a rerank);
    0 where nothing is added, and the count is exact then.
    """

    pieces: tuple[str | int, ...]
    extra_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One inference request, read and judged, before anything is counted.

    Args:
        model: the model it names, if it names one.
        output_tokens: the client's own effective limit by the engine's precedence, or None where the client set
            none (missing, null, -1: "until the context is full"; llama.cpp issue 6638); 0 where nothing is
            generated at all (embeddings, rerank).
        sequences: the number of answers to each prompt, generated side by side (`n`).
        stream: whether the answer comes as events.
        prompt_field, limit_field: what the dialect calls them, for errors.
        prompts: what to count; empty where only the engine's counter for this dialect can (chat templates).
    """

    model: str | None
    output_tokens: int | None
    sequences: int
    stream: bool
    prompts: tuple[Prompt, ...] = ()
    prompt_field: str = "messages"
    limit_field: str = "max_tokens"

    @property
    def generates(self) -> bool:
        """Whether there is any output."""
        return self.output_tokens != 0


@dataclass(frozen=True, slots=True)
class Size:
    """What a request may hold in the KV cache at once, in tokens.

    Args:
        prompt_tokens: the longest prompt.
        output_tokens: each answer; 0 where nothing is generated.
        sequences: sequences that run side by side.
        prompts: the prompts that do, where there are several; each has sequences / len(prompts) answers.
        queued: further prompts of the same list, which wait in the engine for these sequences to end.
    """

    prompt_tokens: int
    output_tokens: int
    sequences: int = 1
    prompts: tuple[int, ...] = ()
    queued: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.output_tokens < 0 or self.sequences < 1:
            raise ValueError(f"not a size: {self!r}")
        if self.prompts and (self.sequences % len(self.prompts) or max(self.prompts) != self.prompt_tokens):
            raise ValueError(f"the prompts are not those of this size: {self!r}")

    @property
    def distinct(self) -> tuple[int, ...]:
        """The prompts held at once, each with its length."""
        return self.prompts or (self.prompt_tokens,)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens; `output_tokens` is summed over all sequences.

    `cached_tokens` is part of `prompt_tokens`.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
