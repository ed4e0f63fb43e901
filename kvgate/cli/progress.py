"""How a long command shows on standard error that it lives: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import Self

WIDTH: Final = 30


class ProgressBar:
    """The progress of one piece of work; as a context manager it leaves a clean line behind.

    Args:
        what: a word before it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_terminal = sys.stderr.isatty()
        self._step = ""
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def say(self, sentence: str) -> None:
        """A line that stays."""
        self._clear()
        print(f"{self._what}: {sentence}", file=sys.stderr, flush=True)

    def show(self, ratio: float, step: str, left_s: float) -> None:
        """How far it is, what is under way, and the seconds that are left; without a terminal, each step once."""
        if self._is_terminal:
            filled = int(ratio * WIDTH)
            text = f"{self._what} [{'#' * filled}{'.' * (WIDTH - filled)}] {ratio:4.0%} {step}, {left_s:.0f} s left"
            print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif step != self._step:
            print(f"{self._what}: {ratio:.0%}, {step}", file=sys.stderr, flush=True)
        self._step = step

    def _clear(self) -> None:
        if self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0
