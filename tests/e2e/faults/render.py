"""The fault matrix as a table: printed by the suite with what it saw, and `docs/faults.md` with what it expects.

`python -m tests.e2e.faults.render > docs/faults.md` writes the document anew (`make docs` does).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from tests.e2e.faults.asking import PATHS, Ask
from tests.e2e.faults.table import GROUPS, Row, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Look = Callable[[Row, Ask], Seen | None]

COLUMNS: Final = ("fault", "answer", "the client sees", "the KV it held", "dialects")

HEAD: Final = f"""\
# What goes wrong, what the client sees, and what becomes of the KV

Made from `tests/e2e/faults/table.py` by `make docs`; `tests/e2e/test_faults.py` runs every cell on real sockets and
prints what it saw. The dialects are {", ".join(list(PATHS)[:3])},
{" and ".join(list(PATHS)[3:])}.

- **the client sees**: `200` is the whole answer, unchanged. `502 engine_failed` is that status, and an error with
  that reason in the dialect's own shape. `200, then engine_failed` is what was whole of the answer, then an error
  event of the dialect and, where it has one, its end marker; of a cut event nothing is passed on. `cut`: the
  connection ends. `left`: the client hung up by itself.
- **the KV it held**: `free at once`: the engine's answer came to an end, so the slot is idle. `drained`: it counts as
  held until the engine's `/slots` show it idle, since a closed socket proves nothing. `never held`: the request did
  not come so far. After each of them nothing is held, waits or is in flight, and no task or connection is left over.
- The reasons, their sentences and what to do about them: [reference.md](reference.md).
"""


def document() -> str:
    """`docs/faults.md`."""
    lines = [HEAD]
    for group, rows in GROUPS.items():
        lines += [f"## {group}", "", _line(COLUMNS), _line("---" for _ in COLUMNS)]
        lines += [_line(cells) for row in rows for cells in _cells(row, lambda row, ask: row.expected(ask))]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def printed(look: Look) -> str:
    """The table for a terminal; cells that were not run are left out."""
    table = [COLUMNS, *(cells for rows in GROUPS.values() for row in rows for cells in _cells(row, look))]
    widths = [max(len(cells[at]) for cells in table) for at in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table)
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: Row, look: Look) -> Iterator[tuple[str, ...]]:
    """One line for all dialects that see the same, streamed and whole."""
    found: dict[Seen, list[Ask]] = defaultdict(list)
    for stream in (True, False):
        for dialect in PATHS:
            if (seen := look(row, ask := Ask(dialect, stream))) is not None:
                found[seen].append(ask)
    for seen, asks in found.items():
        by_dialects: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for stream in (True, False):
            if dialects := tuple(ask.dialect for ask in asks if ask.stream is stream):
                by_dialects[dialects].append("streamed" if stream else "whole")
        for dialects, modes in by_dialects.items():
            who = f"all {len(PATHS)}" if len(dialects) == len(PATHS) else ", ".join(dialects)
            yield row.name, ", ".join(modes), *seen, who


def _line(cells: Iterator[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(document())
