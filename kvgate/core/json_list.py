"""Where the elements of a JSON list stand in its text, and the text of the list without some of them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from kvgate.core.json_object import JsonObject

_SPACE = re.compile(r"[ \t\n\r]*")
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # the C scanner, public but unlisted


def elements(document: JsonObject, field: str) -> tuple[tuple[int, int], ...]:
    """Begin and end of each element of the list that a member holds, in the document's text.

    The text was read once already (`json_object.read_object`), so it is known to be a list, and well formed.
    """
    return tuple(each_element(document, field))


def each_element(document: JsonObject, field: str) -> Iterator[tuple[int, int]]:
    """The same one by one, for those who need the first few alone."""
    text = document.text
    at = _skip(text, document.members[field].value_start + 1)
    while text[at] != "]":
        if text[at] == ",":
            at = _skip(text, at + 1)
        _, end = _scan(text, at)
        yield at, end
        at = _skip(text, end)


def without(document: JsonObject, field: str, spans: tuple[tuple[int, int], ...], dropped: Container[int]) -> str:
    """The document's text without some elements of one of its lists; every other byte stays as it came."""
    text, member = document.text, document.members[field]
    before = member.value_start + 1
    parts: list[str] = []
    for index, (start, end) in enumerate(spans):
        if index not in dropped:
            gap = text[before:start]
            # One that becomes the first brings no comma along: what stood before it is gone.
            parts.append((gap if parts or index == 0 else gap.lstrip(", \t\n\r")) + text[start:end])
        before = end
    return "".join([text[: member.value_start + 1], *parts, text[before:]])


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
