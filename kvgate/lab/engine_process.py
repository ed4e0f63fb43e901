"""One `llama_server` as a child process: started, watched until it answers, stopped, killed, started again."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

_HOST = "127.0.0.1"
_POLL_S = 0.05
_TERM_S = 5.0
_LOG_LINES_SHOWN = 12
_PORT_ATTEMPTS = 3


class EngineFailed(Exception):
    """The engine did not come up; the message shows the end of its log."""


class EngineProcess:
    """A development engine on 127.0.0.1; as a context manager it is started and stopped.

    Every method blocks: in async code call `await asyncio.to_thread(engine.start)`. Its end comes with this
    process's end at the latest (on Linux).

    Args:
        arguments: llama-server's flags, `-m FILE` among them, without `--host` and `--port`. Where other programs
            use the same cores, `-t 1` among them too: the threads wait for each other by spinning, and two of
            them beside one busy program on two cores took 103 s for what one did in 1.5 s.
        log_path: where the engine's log goes; begun anew by the first start, continued by later ones.
        port: a free one is found where None, and kept over restarts.
        startup_timeout_s: seconds within which GET /health must answer 200, the model's loading included.
    """

    def __init__(
        self, arguments: Sequence[str], *, log_path: Path, port: int | None = None, startup_timeout_s: float = 60.0
    ) -> None:
        self.arguments = tuple(arguments)
        self.log_path = log_path
        self._port = port
        self._startup_timeout_s = startup_timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._log_begun = False
        self._log_start = 0  # of the latest start, in bytes

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The port of the latest start, known from the first one on."""
        if self._port is None:
            raise ValueError("this engine was never started")
        return self._port

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def start(self) -> None:
        """Start the engine and return when it is ready; harmless when it runs.

        Raises:
            EngineFailed: it ended, or was not ready in time.
        """
        if self.pid is not None:
            return
        chosen = self._port is None
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                self._start_once(self._port or _free_port())
            except EngineFailed:
                # Somebody may have taken the free port in between.
                if not chosen or attempt == _PORT_ATTEMPTS or "couldn't bind" not in self.log():
                    raise
            else:
                return

    def stop(self) -> None:
        """End it in order; by force after 5 s. Harmless when it does not run."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def kill(self) -> None:
        """End it as a crash would (kill -9). Harmless when it does not run."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def restart(self, arguments: Sequence[str] | None = None) -> None:
        """Stop it and start it on the same port, with other arguments where given.

        Raises:
            EngineFailed: as `start`.
        """
        self.stop()
        if arguments is not None:
            self.arguments = tuple(arguments)
        self.start()

    def log(self) -> str:
        """What the engine has logged since its latest start."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def _start_once(self, port: int) -> None:
        if _is_taken(port):
            raise EngineFailed(f"port {port} is taken by another process")
        with self.log_path.open("ab" if self._log_begun else "wb") as log:
            self._log_begun, self._log_start = True, log.tell()
            self._child = subprocess.Popen(  # noqa: S603 - our own module
                [
                    sys.executable,
                    "-m",
                    "kvgate.lab.llama_server",
                    *self.arguments,
                    "--host",
                    _HOST,
                    "--port",
                    str(port),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Threads that spin while they wait crawl when another process takes a core away: 6 x slower here.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
                start_new_session=True,  # a Ctrl-C is for the gate in front, which still needs its engine to drain
            )
        try:
            self._wait_until_ready(self._child, port)
        except BaseException:
            self.kill()
            raise
        self._port = port

    def _wait_until_ready(self, child: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + self._startup_timeout_s
        while not _is_ready(port):
            if child.poll() is not None:
                raise EngineFailed(f"the engine ended with {child.returncode} ({self._log_end()})")
            if time.monotonic() > deadline:
                raise EngineFailed(f"the engine was not ready in {self._startup_timeout_s:g} s ({self._log_end()})")
            time.sleep(_POLL_S)

    def _log_end(self) -> str:
        return "\n".join([f"the end of {self.log_path}:", *self.log().splitlines()[-_LOG_LINES_SHOWN:]])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((_HOST, port)) == 0


def _is_ready(port: int) -> bool:
    line = http.client.HTTPConnection(_HOST, port, timeout=5)
    with contextlib.closing(line):
        try:
            line.request("GET", "/health")
            return line.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
