"""Takes members out from deep inside a JSON object and keeps every other byte."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # the C scanner, public but unlisted
from typing import TYPE_CHECKING, Final

from kvgate.core.json_object import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgate.core.json_object import JsonObject

EACH: Final = "*"
"""In a path: every element of a list."""

_SPACE = re.compile(r"[ \t\n\r]*")
_COMMA = re.compile(r"[, \t\n\r]*")
_SPELLED = re.compile(r"\\u00[2-7]")
"""A name may be spelled with escapes; those of other alphabets are none of its letters."""

_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # the C scanner, public but unlisted


@dataclass(slots=True)
class _Node:
    """Where the paths lead from here; `goes` where one ends."""

    inner: dict[str, _Node] = field(default_factory=dict)
    goes: bool = False


class Pruner:
    """Removes the members at the ends of some paths.

    A path names members from the top on, `EACH` stands for every element of a list. What stands anywhere else under
    the same name stays: an argument of a tool may be called anything.

    Args:
        paths: each at least one member below the top.
    """

    def __init__(self, paths: Iterable[tuple[str, ...]]) -> None:
        self._root = _Node()
        self._names: set[str] = set()
        for path in paths:
            node = self._root
            for step in path:
                node = node.inner.setdefault(step, _Node())
            node.goes = True
            self._names.add(path[-1])

    def pruned(self, document: JsonObject) -> JsonObject:
        """The document without those members; itself where it has none. A member twice goes twice."""
        text = document.text
        if not any(f'"{name}"' in text for name in self._names) and _SPELLED.search(text) is None:
            return document
        cuts: list[tuple[int, int]] = []
        for name, member in document.members.items():
            if (node := self._root.inner.get(name)) is not None:
                _walk(text, member.value_start, node, cuts)
        if not cuts:
            return document
        parts, before = [], 0
        for start, end in sorted(cuts):
            parts.append(text[before:start])
            before = end
        return read_object("".join([*parts, text[before:]]).encode())


def _walk(text: str, at: int, node: _Node, cuts: list[tuple[int, int]]) -> int:
    """Look for what goes in the value that begins here; its end. The text was read once, so it is well formed."""
    if node.inner and text[at] == "{":
        return _walk_object(text, at, node, cuts)
    if EACH in node.inner and text[at] == "[":
        return _walk_list(text, at, node.inner[EACH], cuts)
    end: int = _scan(text, at)[1]
    return end


def _walk_list(text: str, at: int, node: _Node, cuts: list[tuple[int, int]]) -> int:
    at = _skip(text, at + 1)
    while text[at] != "]":
        at = _skip(text, _walk(text, at, node, cuts))
        if text[at] == ",":
            at = _skip(text, at + 1)
    return at + 1


def _walk_object(text: str, at: int, node: _Node, cuts: list[tuple[int, int]]) -> int:
    before = begin = at + 1
    is_first = True
    at = _skip(text, at + 1)
    while text[at] != "}":
        key_start = at
        key, at = scanstring(text, at + 1, True)
        at = _skip(text, _skip(text, at) + 1)
        inner = node.inner.get(key)
        if inner is not None and inner.goes:
            at = _scan(text, at)[1]
            cuts.append((before, at))
        else:
            if is_first and before != begin:  # one that becomes the first brings no comma along
                found = _COMMA.match(text, before, key_start)
                cuts.append((before, before if found is None else found.end()))
            is_first = False
            at = _walk(text, at, inner or _Node(), cuts)
        before = at
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return at + 1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
