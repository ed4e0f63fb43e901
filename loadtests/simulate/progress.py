"""How far a long run is: a bar on standard error where that is a terminal, else a line for each run that is over."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from loadtests.simulate.terminal import bar

if TYPE_CHECKING:
    from collections.abc import Callable

REDRAW_S = 0.2


@dataclass(slots=True)
class Progress:
    """Over all runs; remaining time by the part that is done, in simulated seconds."""

    total_s: float
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    _name: str = ""
    _done_s: float = 0.0
    _events: int = 0
    _begun: float = field(init=False)
    _drawn: float = 0.0

    def __post_init__(self) -> None:
        self._begun = self.clock()

    def begin(self, name: str) -> None:
        """The next run."""
        self._name = name

    def told(self, now_s: float, events: int) -> None:
        """The run is at this simulated second, after so many events of its own."""
        now = self.clock()
        if not self.stream.isatty() or now - self._drawn < REDRAW_S:
            return
        self._drawn = now
        passed, part = now - self._begun, (self._done_s + now_s) / self.total_s
        left_s = passed / part - passed if part else 0.0
        rate = (self._events + events) / passed if passed else 0.0
        said = f"{self._name:24} {bar(part, 1, 24)} {part:4.0%} {rate:,.0f} events/s, {_clock(left_s)} left"
        self.stream.write(f"\r{said[:100]:100}")
        self.stream.flush()

    def end(self, duration_s: float, events: int) -> None:
        """The run is over."""
        self._done_s += duration_s
        self._events += events
        if self.stream.isatty():
            self.stream.write("\r" + " " * 100 + "\r")
        else:
            passed = self.clock() - self._begun
            self.stream.write(
                f"{self._name}: {events:,} events, {self._done_s / self.total_s:.0%} of all after {_clock(passed)}\n"
            )
        self.stream.flush()


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"
