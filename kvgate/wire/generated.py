"""The generated text in answers and their events, found by the names of its fields, without parsing them as JSON."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from kvgate.core.loops import Loop, LoopWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

READS_MAX: Final = 64
BYTES_MAX: Final = 256 * 1024
"""So much of a stream is looked at together: event by event it would cost several times as much."""

WHOLE_BYTES_MIN: Final = 800
"""A shorter answer is not looked at: no loop is found in so little."""

_INDEX: Final = re.compile(rb'"index":\s*(\d{1,4})')


def members(*names: str) -> tuple[re.Pattern[bytes], ...]:
    """Patterns for string members of these names; the value, still escaped, is their group.

    Within a string every quote is escaped, so nothing that a text says looks like a member.
    """
    value = rb':"([^"\\]*(?:\\.[^"\\]*)*)"'
    return tuple(re.compile(b'"' + name.encode() + b'"' + value, re.DOTALL) for name in names)


def text_of(values: Sequence[bytes]) -> str:
    """Escaped strings as one text; nothing where they are not what JSON allows."""
    try:
        return str(json.loads(b'"' + b"".join(values) + b'"', strict=False))
    except ValueError:
        return ""


def _compact(data: bytes) -> bytes:
    """JSON without the blank that some servers write between a name and a string; strings stay as they are."""
    return data.replace(b'": "', b'":"') if b'": "' in data[:1024] else data


class StreamWatch:
    """Looks for loops in a stream: given its bytes, it reads them together from time to time.

    Args:
        members: where the stream has its text, made by `members`; none where it has none.
        sequences: how many answers it may have, told apart by their index.
    """

    def __init__(self, members: tuple[re.Pattern[bytes], ...], sequences: int) -> None:
        self._members = members
        self._used = members[:1]
        self._watches = [LoopWatch() for _ in range(sequences)]
        self._pieces: list[bytes] = []
        self._bytes = 0
        self.found: Loop | None = None

    def take(self, data: bytes) -> Loop | None:
        """Further bytes of the stream, as they came; what was found until now."""
        self._pieces.append(data)
        self._bytes += len(data)
        if len(self._pieces) >= READS_MAX or self._bytes >= BYTES_MAX:
            self.look()
        return self.found

    def look(self) -> Loop | None:
        """Read what was not read yet, as far as its events are whole."""
        data = b"".join(self._pieces)
        if b"\r\n" in data[:1024]:
            data = data.replace(b"\r\n", b"\n")
        data, _, rest = data.rpartition(b"\n\n")
        self._pieces, self._bytes = [rest], len(rest)
        if self._bytes >= BYTES_MAX:
            self._pieces, self._bytes = [], 0  # one event that is no token
        if self.found is None and data:
            data = _compact(data)
            if len(self._watches) == 1:
                self.found = self._watches[0].feed(self._text(data))
            else:
                self._look_at_each(data)
        return self.found

    def _text(self, data: bytes) -> str:
        """The text in these events: under the name that had it last, unless most of them have it elsewhere."""
        values = self._values(data, self._used)
        if len(values) * 2 < data.count(b"data:"):
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


def loop_in(body: bytes, members: tuple[re.Pattern[bytes], ...]) -> Loop | None:
    """The first loop in the texts of a whole answer."""
    if len(body) < WHOLE_BYTES_MIN:
        return None
    body = _compact(body)
    for member in members:
        for value in member.findall(body):
            if (found := LoopWatch().feed(text_of([value]))) is not None:
                return found
    return None
