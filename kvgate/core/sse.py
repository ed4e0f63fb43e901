"""Splits a server-sent event stream into its events, wherever the bytes happen to be cut."""

from __future__ import annotations

import re

EVENT_BYTES_MAX = 8 * 1024 * 1024
"""An event longer than this is no event of an inference server; it bounds what one stream may hold."""

_END = re.compile(rb"\n\r?\n")
_END_BYTES_MAX = 3


class EventTooLarge(ValueError):
    """An event exceeds `EVENT_BYTES_MAX`."""


class EventSplitter:
    """Bytes in, whole events out, each with its blank line; what is not yet whole is kept.

    Both line ends of the standard that servers use are understood: LF and CRLF.
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return bytes(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Further bytes of the stream; returns the events that they complete.

        Raises:
            EventTooLarge: an event, ended or not, exceeds `EVENT_BYTES_MAX`.
        """
        if not self._rest and data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            _check_length(len(data))
            return [data]  # the usual case: one whole event
        # What was looked through before is not looked through again: a large event comes in many pieces.
        look_from = max(len(self._rest) - (_END_BYTES_MAX - 1), 0)
        self._rest += data
        events: list[bytes] = []
        start = 0
        while (found := _END.search(self._rest, look_from)) is not None:
            _check_length(found.end() - start)
            events.append(bytes(self._rest[start : found.end()]))
            start = look_from = found.end()
        _check_length(len(self._rest) - start)
        del self._rest[:start]
        return events


def _check_length(event_bytes: int) -> None:
    if event_bytes > EVENT_BYTES_MAX:
        raise EventTooLarge(f"an event is over {EVENT_BYTES_MAX} bytes")


def event_data(event: bytes) -> bytes | None:
    """The data of an event, its lines joined; None for comments and events without data."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event.rstrip(b"\r\n")):
        return event[6:].rstrip(b"\r\n")
    lines = [line.removeprefix(b"data:").removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None
