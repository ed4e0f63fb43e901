"""Needles at several depths of a long context: how likely the engine finds the answer that one of them gives."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Final

from kvgate.core.recall import Recall, mean_of
from kvgate.engines.llamacpp.scoring import TEXT_PATH, forced_text, logprobs_of
from kvgate.lab.asking import CannotAsk
from kvgate.lab.prose import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgate.lab.asking import Asked

DEPTHS: Final = (0.0, 0.25, 0.5, 0.75, 0.9)
NEEDLES: Final = (("Kiruna", " copper"), ("Havana", " thunder"))
"""A place and its secret word; neither occurs in `lab.prose`."""


@dataclass(frozen=True, slots=True)
class _Needle:
    needle: list[int]
    question: list[int]
    answer: list[int]
    filler: list[int]

    def prompt(self, depth: float | None) -> list[int]:
        """The filler with the needle at a depth, or the filler alone, and the question; of the same length all."""
        if depth is None:
            return [*self.filler, *self.question]
        filler = self.filler[: len(self.filler) - len(self.needle)]
        at = max(1, int(depth * len(filler)))  # behind the BOS
        return [*filler[:at], *self.needle, *filler[at:], *self.question]


async def recall_at(
    asked: Asked, context_tokens: int, say: Callable[[str], None], depths: Sequence[float] = DEPTHS, needles: int = 2
) -> Recall:
    """How well a context of this length is recalled, at each depth.

    Raises:
        CannotAsk: the engine does not answer, or does not tell log-probabilities.
        ValueError: the context is too short for needle and question.
    """
    found = []
    for seed, (place, word) in enumerate(NEEDLES[:needles]):
        needle = await _needle(asked, context_tokens, place, word, seed)
        without = await _nats(asked, needle.prompt(None), needle.answer)
        near = await _nats(asked, needle.prompt(1.0), needle.answer)
        name = f"needle {seed + 1} of {needles}"
        say(f"{name}: {without:.2f} nats without it, {near:.2f} with it right before the question")
        by_depth = []
        for depth in depths:
            by_depth.append((depth, await _nats(asked, needle.prompt(depth), needle.answer)))
            say(f"{name}: {by_depth[-1][1]:.2f} nats at depth {depth:g}")
        found.append(Recall(without, near, tuple(by_depth)))
    return mean_of(found)


async def _needle(asked: Asked, context_tokens: int, place: str, word: str, seed: int) -> _Needle:
    needle = await asked.tokens_of(f" The secret word of {place} is{word}.", inside=True)
    question = await asked.tokens_of(f" Remember: The secret word of {place} is", inside=True)
    answer = await asked.tokens_of(word, inside=True)
    room = context_tokens - len(question) - len(answer) - 1
    if room < 4 * len(needle):
        raise ValueError(f"a context of {context_tokens} tokens is too short to hide something in it")
    return _Needle(needle, question, answer, await prompt_of(asked, room, 500 + seed))


async def _nats(asked: Asked, prompt: list[int], answer: list[int]) -> float:
    answered = await asked.post(TEXT_PATH, {**forced_text(prompt, answer), "cache_prompt": False})
    told = logprobs_of(answered, answer)
    if not told:
        raise CannotAsk(
            f"{asked.name} at {asked.url} does not tell how likely a forced answer is; llama.cpp does since December "
            "2025: update it, or leave --recall out"
        )
    return mean(told)
