"""Tables, bars and lines for a terminal, in plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"
_PARTS: Final = " ▏▎▍▌▋▊▉█"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def bar(value: float, full: float, width: int = 30) -> str:
    """A bar of eighths of a character; what is more than `full` ends with a mark."""
    if full <= 0:
        return " " * width
    eighths = round(max(value, 0.0) / full * width * 8)
    if eighths > width * 8:
        return _PARTS[8] * (width - 1) + "▶"
    whole, part = divmod(eighths, 8)
    return (_PARTS[8] * whole + (_PARTS[part] if part else "")).ljust(width)


def line(values: Sequence[float], full: float, width: int = 60) -> str:
    """A line of bars, one character each, from 0 to `full`; several values to a character: their largest."""
    if not values or full <= 0:
        return ""
    columns = min(width, len(values))
    groups = [values[at * len(values) // columns : (at + 1) * len(values) // columns] for at in range(columns)]
    return "".join(_HEIGHTS[_height(max(group) / full)] for group in groups)


def _height(part: float) -> int:
    """Anything above nothing shows."""
    return 0 if part <= 0 else min(max(round(part * 8), 1), 8)


def number(value: float) -> str:
    """Three figures or so."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(part: float) -> str:
    """A part as a percentage."""
    return f"{part * 100:.1f}%"
