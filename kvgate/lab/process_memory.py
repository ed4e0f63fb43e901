"""How much memory a process on this machine uses, and which one listens at a port. Known on Linux alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

_LOCAL: Final = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})
_LISTENING: Final = "0A"
_PROC: Final = Path("/proc")


def pid_of(url: str) -> int | None:
    """The process that listens at a URL of this machine; None where it is another's, or may not be looked at."""
    parts = urlsplit(url)
    if parts.hostname not in _LOCAL or parts.port is None:
        return None
    sockets = {f"socket:[{inode}]" for inode in _inodes(parts.port)}
    for process in _PROC.glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):  # another user's, or gone
            if any(str(file.readlink()) in sockets for file in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _inodes(port: int) -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


def rss_mib(pid: int | None) -> float | None:
    """A process's resident memory in MiB; None where it is not known."""
    if pid is None:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return None
