"""What a process and its children cost, by /proc, and how those that the benchmark needs are started and ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_END_S = 20.0


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Seconds of processor time that these have taken so far, in user and kernel mode."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) * _TICK_S
    return total


def resident_kb(pids: Sequence[int]) -> int:
    """KiB of memory that these hold for themselves (what they share is counted by its share)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


@dataclass(frozen=True)
class Started:
    """A program that runs, and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def pids(self) -> list[int]:
        """It and its children, now."""
        return tree(self.process.pid)


@contextlib.contextmanager
def running(command: Sequence[str], directory: Path, *, name: str, says_url: bool = False) -> Iterator[Started]:
    """Run a program until the context ends; one that `says_url` leaves its output to `said_url`."""
    log = directory / f"{name}.log"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    with log.open("wb") as file:
        out = subprocess.PIPE if says_url else file
        process = subprocess.Popen(list(command), stdout=out, stderr=file, cwd=directory, env=environment)
    try:
        yield Started(process, log)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def said_url(started: Started, timeout_s: float = 60.0) -> str:
    """The URL that a program prints as the JSON of its first line.

    Raises:
        RuntimeError: it ended, or said nothing in time; with its log.
    """
    out = started.process.stdout
    assert out is not None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and started.process.poll() is None:
        if select.select([out], [], [], 0.1)[0] and (line := out.readline()):
            found: str = json.loads(line)["url"]
            return found
    raise RuntimeError(f"it did not start: {started.log.read_text()[-2000:]}")
