"""How long contexts are: percentiles, and how many fit a context of a given size. Arithmetic alone."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgate.core.replay import Asked

MARKS: Final = tuple(1024 * 2**power for power in range(1, 8))
"""2k, 4k, ... 128k: the sizes that shares are told for."""

PERCENTS: Final = (50, 90, 95, 99, 100)

BAR_FROM: Final = 128
"""Shorter contexts share the first bar; from here on each bar reaches twice as far as the one before."""


@dataclass(frozen=True, slots=True)
class Length:
    """One request's context, in tokens: its longest prompt, and the output beside it.

    `output_tokens` is what was asked for, or what came; 1 where nothing was asked for, since then any room does.
    """

    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        """What one sequence of it may take."""
        return self.prompt_tokens + self.output_tokens

    @classmethod
    def of(cls, asked: Asked) -> Length:
        """Of a request as the gate remembers it."""
        return cls(asked.prompts[0], 1 if asked.output_tokens is None else asked.output_tokens)


@dataclass(frozen=True, slots=True)
class Share:
    """How many requests fit a context of so many tokens: by their prompt alone, and with the output beside it."""

    tokens: int
    prompts: int
    totals: int


@dataclass(frozen=True, slots=True)
class Bar:
    """How many requests have more than `above` and at most `up_to` tokens, prompt and output together."""

    above: int
    up_to: int
    requests: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """The contexts of some requests; percentiles are (percent, tokens), by nearest rank."""

    requests: int
    prompts: tuple[tuple[int, int], ...]
    totals: tuple[tuple[int, int], ...]
    shares: tuple[Share, ...]
    bars: tuple[Bar, ...]


def histogram(lengths: Iterable[Length], marks: Iterable[int] = ()) -> Histogram:
    """Of these requests; `marks` are sizes to tell shares for, beside `MARKS`.

    Of no request there are no percentiles and no bars.
    """
    every = list(lengths)
    prompts = sorted(length.prompt_tokens for length in every)
    totals = sorted(length.total_tokens for length in every)
    shares = tuple(
        Share(mark, bisect_right(prompts, mark), bisect_right(totals, mark)) for mark in sorted({*MARKS, *marks})
    )
    return Histogram(len(every), _percentiles(prompts), _percentiles(totals), shares, _bars(totals))


def _percentiles(ordered: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if not ordered:
        return ()
    return tuple((percent, ordered[-(-percent * len(ordered) // 100) - 1]) for percent in PERCENTS)


def _bars(ordered: Sequence[int]) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    above, up_to, seen = 0, BAR_FROM, 0
    while seen < len(ordered):
        now = bisect_right(ordered, up_to)
        bars.append(Bar(above, up_to, now - seen))
        above, up_to, seen = up_to, up_to * 2, now
    first = next((at for at, bar in enumerate(bars) if bar.requests), 0)
    return tuple(bars[first:])
