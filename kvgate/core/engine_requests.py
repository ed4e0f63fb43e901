"""Reads from a llama-server log how long requests were, and what a token of the KV cache takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.core.histogram import Length
from kvgate.core.profile import MIB
from kvgate.core.startup_log import LINE_CHARS_MAX, StartupLog, sentences

if TYPE_CHECKING:
    from collections.abc import Iterable

_PREFIX: Final = r"(?:[^\s\"'{}]+\s+){0,10}?"

# llama.cpp b11434, b11549 (measured), at the verbosity that is its default. Builds of 2024 and 2025 say `n_past`, and
# begin the lines of figures anew.
_SLOT: Final = re.compile(_PREFIX + r"slot\s+[^\s:]+: id\s+(\d+) \| task (\d+) \|\s*(.*)")
_OUTPUT: Final = re.compile(r"\s*eval time =\s*[\d.]+ ms /\s*(\d+) (?:tokens|runs)")
_END: Final = re.compile(r"stop processing: n_(?:tokens|past) = (\d+), truncated = \d")
_FIGURES: Final = re.compile(
    _PREFIX.replace("{0,10}", "{0,4}") + r"\s*eval time =\s*[\d.]+ ms /\s*(\d+) (?:tokens|runs)"
)

_CONTEXT: Final = re.compile(_PREFIX + r"llama_context: constructing llama_context")
_KV: Final = re.compile(
    _PREFIX + r"llama_kv_cache\w*: size =\s*([\d.]+) MiB \(\s*(\d+) cells,\s*\d+ layers,\s*\d+/(\d+) seqs\)"
)
_TRAINED: Final = re.compile(_PREFIX + r"print_info: n_ctx_train\s+= (\d+)")

OPEN_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class KvCost:
    """What the log's latest start took for its KV cache: bytes a token, and tokens in all."""

    bytes_per_token: float
    tokens: int

    @property
    def bytes_total(self) -> float:
        """All of it."""
        return self.bytes_per_token * self.tokens


class EngineRequests:
    """Follows a log: `lengths` of the requests that ended, and what the latest start said of the KV cache."""

    def __init__(self) -> None:
        self.lengths: list[Length] = []
        self.cost: KvCost | None = None
        self.n_ctx_train: int | None = None
        self._startup = StartupLog()
        self._outputs: dict[tuple[str, str], int] = {}
        self._last: tuple[str, str] | None = None

    @property
    def n_ctx_slot(self) -> int | None:
        """Of the latest start, where the log has one."""
        return None if self._startup.facts is None else self._startup.facts.n_ctx_slot

    def feed(self, lines: Iterable[str]) -> None:
        """Read further lines, in order."""
        for line in lines:
            if len(line) <= LINE_CHARS_MAX:
                self._startup.feed([line])
                for sentence in sentences(line):
                    self._feed(sentence)

    def _feed(self, line: str) -> None:
        if found := _SLOT.match(line):
            self._last = (found[1], found[2])
            if output := _OUTPUT.match(found[3]):
                self._note(int(output[1]))
            elif end := _END.match(found[3]):
                self._end(int(end[1]))
        elif self._last is not None and (found := _FIGURES.match(line)):
            self._note(int(found[1]))
        elif found := _KV.match(line):
            # Layers with a window of their own have a cache of their own, with fewer cells; a token counts for all.
            mib, cells, streams = float(found[1]), int(found[2]), int(found[3])
            before = 0.0 if self.cost is None else self.cost.bytes_per_token
            tokens = cells * streams
            self.cost = KvCost(before + mib * MIB / tokens, max(tokens, 0 if self.cost is None else self.cost.tokens))
        elif _CONTEXT.match(line):
            self.cost = None
        elif found := _TRAINED.match(line):
            self.n_ctx_train = int(found[1])

    def _note(self, output_tokens: int) -> None:
        if self._last is not None and len(self._outputs) < OPEN_MAX:
            self._outputs[self._last] = output_tokens

    def _end(self, held_tokens: int) -> None:
        """A slot let go; the last token that it put out was never put into its cache."""
        if self._last is not None:
            output = self._outputs.pop(self._last, 0)
            total = held_tokens + (output > 0)
            self.lengths.append(Length(max(total - output, 0), min(output, total)))
