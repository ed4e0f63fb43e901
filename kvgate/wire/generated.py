"""The generated text in answers and their events, found by the names of its fields, without parsing them as JSON."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Final

from kvgate.core.loops import Glances, Loop, LoopWatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOOK_BYTES: Final = 8 * 1024
"""So much of a stream is read together, some thirty tokens: event by event it would cost several times as much."""

PERIOD_BYTES: Final = 32 * 1024
"""Of so much one look is taken while nothing repeats itself."""

SUSPECTED_BYTES: Final = 512 * 1024
"""Where something does, so much is read whole."""

EVENT_BYTES_MAX: Final = 256 * 1024
"""A longer event is no token, and is not kept to be read."""

WHOLE_BYTES_MIN: Final = 800
"""A shorter answer is not looked at: no loop is found in so little."""

_INDEX: Final = re.compile(rb'"index":\s*(\d{1,4})')


def members(*names: str) -> tuple[re.Pattern[bytes], ...]:
    """Patterns for string members of these names; the value, still escaped, is their group.

    Within a string every quote is escaped, so nothing that a text says looks like a member.
    """
    value = rb'": ?"([^"\\]*(?:\\.[^"\\]*)*)"'
    return tuple(re.compile(b'"' + name.encode() + value, re.DOTALL) for name in names)


def text_of(values: Sequence[bytes]) -> str:
    """Escaped strings as one text; nothing where they are not what JSON allows."""
    escaped = b"".join(values)
    try:
        if b"\\" not in escaped:
            return escaped.decode("utf-8", "surrogatepass")  # as json.loads would, and several times faster
        return str(json.loads(b'"' + escaped + b'"', strict=False))
    except ValueError:
        return ""


class StreamWatch:
    """Looks for loops in a stream.

    It takes a look from time to time, and only where that shows something that was there before, it reads on without
    a gap until it is sure. A loop does not end, so it is found all the same; most text is never read.

    Args:
        members: where the stream has its text, made by `members`; none where it has none.
        sequences: how many answers it may have, told apart by their index; several are read whole.
    """

    def __init__(self, members: tuple[re.Pattern[bytes], ...], sequences: int) -> None:
        self._members = members
        self._used = members[:1]
        self._glances = Glances()
        self._watches = [LoopWatch() for _ in range(sequences)]
        self._pieces: list[bytes] = []
        self._seen_bytes = 0
        self._from_bytes = LOOK_BYTES if sequences == 1 else 0
        self._look_at_bytes = self._from_bytes + LOOK_BYTES
        self._suspected_until = 0 if sequences == 1 else sys.maxsize
        self.found: Loop | None = None

    def take(self, data: bytes) -> Loop | None:
        """Further bytes of the stream, as they came; what was found until now."""
        if self.found is not None:
            return self.found
        self._seen_bytes += len(data)
        if self._seen_bytes > self._from_bytes:
            self._pieces.append(data)
            if self._seen_bytes > self._look_at_bytes:
                self.look()
        return self.found

    def look(self) -> Loop | None:
        """Read what was gathered, as far as its events are whole; at the stream's end, what was found."""
        data = b"".join(self._pieces)
        if b"\r" in data[:1024]:
            data = data.replace(b"\r\n", b"\n")
        data, _, rest = data.rpartition(b"\n\n")
        self._pieces = [rest] if len(rest) < EVENT_BYTES_MAX else []
        self._look_at_bytes = self._seen_bytes + LOOK_BYTES
        if self.found is None and data:
            self._read(data)
        return self.found

    def _read(self, data: bytes) -> None:
        if len(self._watches) > 1:
            self._look_at_each(data)
            return
        if self._seen_bytes > self._suspected_until:
            if all(self._glances.is_new(self._text(glimpse)) for glimpse in _glimpses(data)):
                self._pieces = []
                self._from_bytes = self._seen_bytes + PERIOD_BYTES - LOOK_BYTES
                self._look_at_bytes = self._from_bytes + LOOK_BYTES
                return
            self._suspected_until = self._seen_bytes + SUSPECTED_BYTES
            self._watches = [LoopWatch()]
        self.found = self._watches[0].feed(self._text(data))

    def _text(self, data: bytes) -> str:
        """The text in these events: under the name that had it last, unless most of them have it elsewhere."""
        values = self._values(data, self._used)
        if len(values) * 4 < data.count(b"\n"):  # an event has two or three line ends
            self._used = tuple(member for member in self._members if member.search(data)) or self._used
            values = self._values(data, self._used)
        return text_of(values)

    def _values(self, data: bytes, members: tuple[re.Pattern[bytes], ...]) -> list[bytes]:
        if len(members) == 1:
            return members[0].findall(data)
        return [value for member in members for value in member.findall(data)]

    def _look_at_each(self, data: bytes) -> None:
        for event in data.split(b"\n\n"):
            index = _INDEX.search(event)
            at = int(index[1]) if index else 0
            if at < len(self._watches):
                self._watches[at].feed(text_of(self._values(event, self._members)))
        self.found = next((watch.found for watch in self._watches if watch.found), None)


def _glimpses(data: bytes) -> Iterator[bytes]:
    """What is glanced at of events that may have come in one long read: as much of them as if they had not."""
    for start in range(0, len(data), PERIOD_BYTES):
        piece = data[start : start + PERIOD_BYTES]
        yield piece if len(piece) <= LOOK_BYTES else piece[piece.find(b"\n\n", -LOOK_BYTES) + 1 :]


def loop_in(body: bytes, members: tuple[re.Pattern[bytes], ...]) -> Loop | None:
    """The first loop in the texts of a whole answer."""
    if len(body) < WHOLE_BYTES_MIN:
        return None
    for member in members:
        for value in member.findall(body):
            if (found := LoopWatch().feed(text_of([value]))) is not None:
                return found
    return None
