"""Texts of any length in which hardly a sentence stands twice, the same for the same seed: they fill a context."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgate.lab.asking import Asked


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PEOPLE: Final = _words("sailor carpenter teacher farmer nurse painter printer baker gardener doctor singer pilot")
_KINDS: Final = _words("old quiet tall young careful tired clever proud gentle hungry famous lonely patient cheerful")
_DEEDS: Final = _words("sold found painted carried repaired forgot borrowed counted buried polished drew traded hid")
_THINGS: Final = _words(
    "lemons clocks boats letters lanterns carpets violins maps kettles ladders mirrors coins hats"
)
_PLACES: Final = _words("Lisbon Oslo Vienna Bergen Genoa Dublin Riga Geneva Bruges Palermo Tartu Malmo Bilbao")
_TIMES: Final = ("before dawn", "at noon", "in the rain", "after supper", "during the war", "on market day", "in May")

_SENTENCE_TOKENS_MIN: Final = 6


def sentences(seed: int) -> Iterator[str]:
    """Sentence after sentence, without end."""
    chance = random.Random(seed)  # noqa: S311 - a text, not a secret
    while True:
        yield (
            f"In {chance.randint(1400, 1999)} the {chance.choice(_KINDS)} {chance.choice(_PEOPLE)} of "
            f"{chance.choice(_PLACES)} {chance.choice(_DEEDS)} {chance.randint(2, 900)} {chance.choice(_THINGS)} "
            f"{chance.choice(_TIMES)}."
        )


async def prompt_of(asked: Asked, tokens: int, seed: int = 0) -> list[int]:
    """A prompt of exactly so many tokens, by the server's own tokenizer.

    Raises:
        CannotAsk: it does not answer.
    """
    source, text, found = sentences(seed), "", list[int]()
    while len(found) < tokens:
        more = max((tokens - len(found)) // _SENTENCE_TOKENS_MIN, 1)
        text += " ".join(next(source) for _ in range(more)) + " "
        found = await asked.tokens_of(text)
    return found[:tokens]
