"""How a command tells its answer: lines for people or one JSON object, a status, and never a key by accident."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEY_LIKE = re.compile(r"\bsk-[A-Za-z0-9_-]{8,}")


@dataclass(frozen=True, slots=True)
class Told:
    """What a command has to say.

    Args:
        answer: all of it, for programs.
        lines: the same for people, on standard output.
        notes: what they should know beside it, on standard error, so that the output can be piped on.
    """

    answer: dict[str, Any]
    lines: Sequence[str]
    notes: Sequence[str] = field(default=())


def tell(told: Told, *, as_json: bool) -> int:
    """Say it; the exit status of what is done."""
    if as_json:
        print(json.dumps({"ok": True, **told.answer}))
        return 0
    for line in told.lines:
        print(line)
    for note in told.notes:
        print(note, file=sys.stderr)
    return 0


def refuse(command: str, problem: str, status: int, *, as_json: bool) -> int:
    """Say why not, on standard error; 1 where the answer is no, 2 where the question could not be asked."""
    problem = redacted(problem)
    answer = {"ok": False if status == 1 else None, "problem": problem}
    print(json.dumps(answer) if as_json else f"kvgate {command}: {problem}", file=sys.stderr)
    return status


def redacted(text: str) -> str:
    """The text without what looks like a key: people paste keys where a name or an ID belongs."""
    return _KEY_LIKE.sub("sk-...", text)


class Parser(argparse.ArgumentParser):
    """Whose complaints repeat no key, and are JSON where JSON was asked for."""

    _as_json = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, with an eye on how its complaints are wanted; a command's parser is asked likewise."""
        self._as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Usage and the problem, or one JSON object, and exit status 2."""
        if self._as_json:
            sys.exit(refuse(self.prog, message, 2, as_json=True))
        super().error(redacted(message))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines, the first one being the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def utc(moment_s: int | None) -> str | None:
    """A moment of the store's clock in ISO 8601; None where it is not known."""
    return None if moment_s is None else datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def plural(count: int, noun: str) -> str:
    """A count and its noun: 1 key, 2 keys."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
