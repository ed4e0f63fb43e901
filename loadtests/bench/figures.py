"""Medians over rounds, ratios within a round, and how they are shown: tables, Markdown, bars, plots."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BASE: Final = "nginx"
"""What ratios are to: what most people would put there instead."""

_BAR_CELLS: Final = 40


@dataclass(frozen=True)
class Column:
    """One measured quantity.

    `better`: which way is better, for the reader. `ratio`: whether a ratio to nginx of the same round is shown.
    """

    key: str
    title: str
    better: str
    digits: int = 0
    ratio: bool = True


@dataclass(frozen=True)
class Measured:
    """One value, in one round."""

    proxy: str
    column: str
    round: int
    value: float


class Book:
    """Everything that was measured, and what was not to be had."""

    def __init__(self, columns: Sequence[Column], proxies: Sequence[str]) -> None:
        self.columns = list(columns)
        self.proxies = list(proxies)
        self.missing: dict[str, str] = {}
        self.notes: list[str] = []
        self._measured: list[Measured] = []

    def add(self, proxy: str, column: str, number: int, value: float) -> None:
        """One more value."""
        self._measured.append(Measured(proxy, column, number, value))

    def median(self, proxy: str, column: str) -> float | None:
        """Over the rounds."""
        found = [one.value for one in self._measured if (one.proxy, one.column) == (proxy, column)]
        return median(found) if found else None

    def ratio(self, proxy: str, column: str) -> float | None:
        """The median of each round's ratio to nginx."""
        base = {
            one.round: one.value
            for one in self._measured
            if (one.proxy, one.column) == (BASE, column) and one.value > 0
        }
        found = [
            one.value / base[one.round]
            for one in self._measured
            if (one.proxy, one.column) == (proxy, column) and one.round in base
        ]
        return median(found) if found else None

    def shown(self) -> list[Column]:
        """The columns that have a value."""
        measured = {one.column for one in self._measured}
        return [column for column in self.columns if column.key in measured]

    def document(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {
            "columns": [column.__dict__ for column in self.columns],
            "measured": [one.__dict__ for one in self._measured],
            "medians": {
                proxy: {column.key: self.median(proxy, column.key) for column in self.shown()}
                for proxy in self.proxies
                if proxy not in self.missing
            },
            "missing": self.missing,
            "notes": self.notes,
        }


def _cell(book: Book, proxy: str, column: Column) -> str:
    value = book.median(proxy, column.key)
    if value is None:
        return ""
    text = f"{value:,.{column.digits}f}"
    ratio = book.ratio(proxy, column.key) if column.ratio and proxy != BASE else None
    return text if ratio is None else f"{text} ({ratio:.2f}x)" if ratio < 10 else f"{text} ({ratio:,.0f}x)"


def rows(book: Book) -> list[list[str]]:
    """A table with a row for each quantity and a column for each proxy, the header first."""
    present = [proxy for proxy in book.proxies if proxy not in book.missing]
    table = [["", *present]]
    table += [
        [f"{column.title} ({column.better} is better)", *(_cell(book, proxy, column) for proxy in present)]
        for column in book.shown()
    ]
    return table


def text_table(table: Sequence[Sequence[str]]) -> str:
    """For a terminal."""
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in table)
    )


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """For a document."""
    header, *rest = table
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rest)])


def footnotes(book: Book) -> list[str]:
    """What the table needs to be read rightly."""
    missing = [f"{proxy}: {why}" for proxy, why in book.missing.items()]
    return [
        "Medians over the rounds; in brackets the median of each round's ratio to nginx, measured in the same round.",
        *missing,
        *book.notes,
    ]


MARKS: Final = ("<!-- bench: the tables go here -->", "<!-- bench: until here -->")


def write_between_marks(path: Path, text: str) -> None:
    """Write a file anew; of one that has marks, only what stands between them."""
    before, first, rest = (path.read_text() if path.exists() else "").partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    path.write_text(f"{before}{first}\n\n{text}\n{last}{after}" if first and last else text)


def bars(book: Book, keys: Iterable[str]) -> str:
    """Terminal bars, one block a quantity."""
    blocks = []
    for column in book.shown():
        if column.key not in set(keys):
            continue
        values = {proxy: book.median(proxy, column.key) for proxy in book.proxies}
        most = max((value for value in values.values() if value is not None), default=0.0) or 1.0
        lines = [f"{column.title} ({column.better} is better)"]
        for proxy, value in values.items():
            if value is not None:
                cells = max(round(max(value, 0.0) / most * _BAR_CELLS), 0)
                lines.append(f"  {proxy:18} {'#' * cells:{_BAR_CELLS}} {value:,.{column.digits}f}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def plot(book: Book, keys: Sequence[str], path: Path) -> bool:
    """The same bars as a PNG; False where matplotlib is not installed."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    pyplot.switch_backend("agg")
    columns = [column for column in book.shown() if column.key in keys]
    figure, axes = pyplot.subplots(len(columns), 1, figsize=(8, 1.9 * len(columns)), squeeze=False)
    for axis, column in zip(axes[:, 0], columns, strict=True):
        values = {proxy: book.median(proxy, column.key) for proxy in book.proxies}
        there = {proxy: value for proxy, value in values.items() if value is not None}
        axis.barh(list(there), list(there.values()), color=["#2c7fb8" if "kvgate" in p else "#bbbbbb" for p in there])
        axis.invert_yaxis()
        axis.set_title(f"{column.title} ({column.better} is better)", fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
