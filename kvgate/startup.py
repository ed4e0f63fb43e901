"""Where an engine's startup log comes from: a file that it writes, or the output of a child process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from kvgate import die_with_parent
from kvgate.core.command_line import BadCommandLine, read_words
from kvgate.core.startup_log import LINE_CHARS_MAX, StartupLog

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger("kvgate.engine")

HEAD_BYTES = 512
"""A log that begins with other bytes is another one: restarts write the same number of lines, with other times."""

READ_BYTES_MAX = 64 * 1024 * 1024
"""At most this much of a log file is read at once; a verbose log's middle holds no facts."""

CHILD_LINE_BYTES_MAX = 1024 * 1024
"""A longer line of a child is passed on in pieces."""

COPY_BYTES_MAX = 4 * 1024 * 1024
"""What is copied of a child's output: its start is at the beginning, all else may quote clients."""

STOP_GRACE_S = 10.0


class LogFile:
    """Follows a log file; implements `ports.StartupLogSource`. A file not yet there is an empty one.

    A file that was replaced or cut short (log rotation, a restart with `>`) is read from its beginning.
    """

    is_childs = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = StartupLog()
        self._at = 0
        self._head = b""
        self._inode: int | None = None
        self._rest = b""
        self._unreadable = False

    def read(self) -> StartupLog:
        """Read what was appended since."""
        try:
            with self._path.open("rb") as file:
                status, head = os.fstat(file.fileno()), file.read(HEAD_BYTES)
                if status.st_ino != self._inode or status.st_size < self._at or not head.startswith(self._head):
                    self._inode, self._at, self._rest = status.st_ino, 0, b""
                self._head = head
                file.seek(self._at)
                data = file.read(READ_BYTES_MAX)
                self._at += len(data)
        except OSError as error:
            if not self._unreadable:
                log.warning("the engine's log cannot be read", extra={"path": str(self._path), "error": str(error)})
            self._unreadable = True
            return self._log
        self._unreadable = False
        *lines, self._rest = (self._rest + data).split(b"\n")
        # Of an overlong line its beginning is kept: a prompt's own words must not look like a line of the log.
        self._rest = self._rest[: LINE_CHARS_MAX + 1]
        self._log.feed(line.decode("utf-8", "replace") for line in lines)
        return self._log


class Child:
    """An engine run as a child process, its output read and passed on; implements `ports.StartupLogSource`.

    Args:
        command: the engine's own.
        copy_to: a file that gets the beginning of its output, for other processes to read.
    """

    is_childs = True

    def __init__(self, command: Sequence[str], copy_to: Path | None = None) -> None:
        self._command = command
        self._copy_to = copy_to
        self._copied_bytes = 0
        self._log = StartupLog(context_shift=_shifts(command))
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    def read(self) -> StartupLog:
        """What the child has said until now."""
        return self._log

    async def start(self) -> None:
        """Start the engine; a command that cannot be run ends at once, and says so in its output."""
        # A session of its own: a Ctrl-C is for the gate, which still needs its engine to drain.
        self._process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-I", "-S", die_with_parent.__file__],
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=CHILD_LINE_BYTES_MAX,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether the child was started and has ended."""
        return self._process is not None and self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the child's end; its exit status."""
        if self._process is None:
            raise RuntimeError("the engine was not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the child to end, and end it after a grace period."""
        process, reader = self._process, self._reader
        if process is None or reader is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        await asyncio.wait([reader], timeout=1)
        reader.cancel()

    async def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        stdout, continued = self._process.stdout, False
        while True:
            try:
                line = await stdout.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                line = end.partial
            except asyncio.LimitOverrunError as over:
                line = await stdout.readexactly(over.consumed)
            if not line:
                return
            # Nobody reads kvgate's own output any more: the child's must be read all the same, or it would hang.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
            self._copy(line)
            # As in LogFile. A child starts once; what follows may quote clients, who could write another start.
            if not continued and not self._log.is_settled:
                self._log.feed([line.decode("utf-8", "replace")])
            continued = not line.endswith(b"\n")

    def _copy(self, line: bytes) -> None:
        if self._copy_to is not None and self._copied_bytes < COPY_BYTES_MAX:
            self._copied_bytes += len(line)
            with self._copy_to.open("ab") as file:
                file.write(line)


def _shifts(command: Sequence[str]) -> bool | None:
    """Whether an engine of this command line shifts its context; None where it says nothing, or is none."""
    try:
        return read_words(command).context_shift
    except BadCommandLine:
        return None
