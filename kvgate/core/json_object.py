"""Reads a JSON object as the engine would, or not at all, and edits fields without touching the rest."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # the C scanner, public but unlisted
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEPTH_MAX = 200
"""Nesting beyond this is refused: no request needs it, and parsers differ in where they give up."""

_SPACE = re.compile(r"[ \t\n\r]*")
_LONG_INTEGER = re.compile(r"[0-9]{309}")
"""Beyond the range of a double, where llama.cpp's parser gives up (its largest has 309 digits, 1.8e308)."""

_LONG_STRIDE = 100
_LONG_TRACE = re.compile(r"[0-9]{3}")
"""What so long an integer leaves in every hundredth character: a look at these costs a hundredth."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NESTING = re.compile(r'"[^"]*"?|[\[\]{}]')


class MalformedJson(ValueError):
    """The bytes are not one JSON object that every parser reads alike; the message says why."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the object: its value, and where key and value stand in the text (half-open)."""

    value: Any
    key_start: int
    value_start: int
    value_end: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Members to set and members to remove, at the top of an object."""

    put: Mapping[str, Any]
    drop: frozenset[str]

    def __or__(self, other: Edit) -> Edit:
        """Both edits; where both set a member, the other's value wins."""
        return Edit({**self.put, **other.put}, self.drop | other.drop)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A parsed object that still has its own text, so that an edit keeps every other byte."""

    text: str
    members: Mapping[str, Member]
    open_at: int
    close_at: int

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a member, or `default` where it is missing."""
        member = self.members.get(key)
        return default if member is None else member.value

    def __contains__(self, key: object) -> bool:
        return key in self.members

    def edited(self, edit: Edit) -> bytes:
        """The object's bytes with `edit.put` in place or appended, and `edit.drop` gone; all else as it came.

        Order, spacing, number spellings and unknown fields of the other members survive.
        """
        put, drop = edit.put, edit.drop
        parts: list[str] = []
        before = self.open_at + 1
        for key, member in self.members.items():
            if key in put or key not in drop:
                gap = self.text[before : member.key_start]
                # One that becomes the first brings no comma along: what stood before it is gone.
                parts.append(gap if parts or before == self.open_at + 1 else gap.lstrip(", \t\n\r"))
                if key in put:
                    parts += [self.text[member.key_start : member.value_start], json.dumps(put[key])]
                else:
                    parts.append(self.text[member.key_start : member.value_end])
            before = member.value_end
        for key in put:
            if key not in self.members:
                parts.append(f"{',' if parts else ''}{json.dumps(key)}:{json.dumps(put[key])}")
        return "".join([self.text[: self.open_at + 1], *parts, self.text[before:]]).encode()


def _refuse_constant(name: str) -> Any:
    raise MalformedJson(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise MalformedJson("a number is too large")
    return number


def _within_doubles(digits: str) -> int:
    _finite(digits)
    return int(digits)


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_wary = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, parse_int=_within_doubles)
_scan, _scan_warily = _decoder.scan_once, _wary.scan_once  # type: ignore[attr-defined]  # the C scanners


def read_object(body: bytes) -> JsonObject:
    """Parse a request body that must be one JSON object.

    Strict where parsers differ, because what is forwarded is what was judged: UTF-8 only (one leading BOM is
    dropped), no NaN or Infinity, no lone surrogates, no member twice at the top, depth up to `DEPTH_MAX`.

    Raises:
        MalformedJson: with a sentence that never quotes the body.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the body is not UTF-8 (byte {error.start})") from None
    text = text.removeprefix("\ufeff")
    _check_depth(text)
    try:
        found = _read(text, _scan_warily if _has_long_integer(text) else _scan)
    except json.JSONDecodeError as error:
        raise MalformedJson(f"the body is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise MalformedJson(f"the body is nested more than {DEPTH_MAX} deep") from None
    if ("\\ud" in text or "\\uD" in text) and _SURROGATE.search(text):
        _check_surrogates(found)
    return found


def _read(text: str, scan: Callable[[str, int], tuple[Any, int]]) -> JsonObject:
    open_at = at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise MalformedJson("the body must be a JSON object")
    members: dict[str, Member] = {}
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return _finish(text, members, open_at, at)
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key_start = at
        key, at = scanstring(text, at + 1, True)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        value_start = _skip(text, at + 1)
        try:
            value, at = scan(text, value_start)
        except StopIteration as stop:
            raise json.JSONDecodeError("Expecting value", text, stop.value) from None
        if key in members:
            raise MalformedJson("the body has the same field twice, which servers read differently")
        members[key] = Member(value, key_start, value_start, at)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return _finish(text, members, open_at, at)
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _skip(text, at + 1)


def _finish(text: str, members: dict[str, Member], open_at: int, close_at: int) -> JsonObject:
    if _skip(text, close_at + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, close_at + 1)
    return JsonObject(text, members, open_at, close_at)


def _has_long_integer(text: str) -> bool:
    return bool(_LONG_TRACE.search(text[::_LONG_STRIDE]) and _LONG_INTEGER.search(text))


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEPTH_MAX:
        return
    depth = 0
    # Escapes go first, so that a string is one match that never backtracks: an unended one would else be tried
    # again from each of its quotes (40 KB took 5 s), and a long one would take 120 bytes a character.
    for found in _NESTING.finditer(text.replace("\\\\", "").replace('\\"', "")):
        token = found[0]
        if token in {"[", "{"}:
            depth += 1
            if depth > DEPTH_MAX:
                raise MalformedJson(f"the body is nested more than {DEPTH_MAX} deep")
        elif token in {"]", "}"}:
            depth -= 1


def _check_surrogates(found: JsonObject) -> None:
    try:
        json.dumps({key: m.value for key, m in found.members.items()}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedJson("the body has half of a surrogate pair") from None
