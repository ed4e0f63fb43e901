"""Several worker processes behind one address: starts them, again and again, stops them, and answers for all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kvgate import die_with_parent
from kvgate.admin.merged import ask, merged_app
from kvgate.app.gate_app import CannotStart, open_listener
from kvgate.startup import Child
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.settings import Settings

log = logging.getLogger("kvgate.app")

RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
STEADY_S: Final = 60.0
"""A worker that ran for so long is started again at once when it ends; others after a pause that doubles."""

START_TIMEOUT_S: Final = 330.0
STOP_MARGIN_S: Final = 10.0


class Workers:
    """A gate of several processes.

    Each worker is a whole `kvgate serve` on the same address (SO_REUSEPORT: the kernel spreads the connections),
    over the same store, where the ledger is; its operator's side listens on a socket of its own in a private
    directory. This process keeps the embedded store, restarts workers, passes signals on, and answers the
    operator for all of them.

    Args:
        settings: as the workers will read them.
        arguments: of `kvgate serve`, the same for each worker.
        command: run this as the engine, a child of this process.
    """

    def __init__(self, settings: Settings, arguments: Sequence[str], command: Sequence[str] = ()) -> None:
        self._settings = settings
        self._arguments = list(arguments)
        self._command = command
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._failed: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until stopped; the exit status.

        Raises:
            CannotStart: with a sentence for the operator.
        """
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        async with AsyncExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop)
            loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
            await self._start_store(stack)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-")))
            await self._start_engine(stack, directory)
            sockets = {at: directory / f"{at}.sock" for at in range(1, self._settings.workers + 1)}
            listen, url = self._reserve_address(stack)
            keepers = [
                asyncio.create_task(self._keep(at, [*self._arguments, "--listen", listen, "--worker", str(path)]))
                for at, path in sockets.items()
            ]
            stack.push_async_callback(self._end, keepers)
            if await self._all_answer(sockets):
                runner = web.AppRunner(merged_app(sockets, self._settings.http.body_bytes_max), access_log=None)
                admin_url = await open_listener(stack, runner, self._settings.admin_listen)
                extra = {"url": url, "admin_url": admin_url, "workers": len(sockets)}
                log.info("listening", extra=extra)
                await self._wait()
        return self._failed.result() if self._failed.done() else 0

    async def _wait(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        waiting: set[asyncio.Future[object]] = {stopping, self._failed}  # type: ignore[arg-type]  # either's result
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _start_store(self, stack: AsyncExitStack) -> None:
        """The embedded store belongs to this process, so that it outlives each worker."""
        if self._settings.store.url is not None:
            return
        embedded = EmbeddedValkey(self._settings.store.data_dir or Path(".kvgate"))
        try:
            await embedded.start()
        except StoreUnavailable as error:
            raise CannotStart(f"the store is not to be had: {error}") from None
        stack.push_async_callback(embedded.stop)
        keeper = asyncio.create_task(embedded.supervise())
        stack.callback(keeper.cancel)

    async def _start_engine(self, stack: AsyncExitStack, directory: Path) -> None:
        """Run the engine here, so that it outlives each worker; they read its startup log from a copy."""
        if not self._command:
            return
        copy = directory / "engine.log"
        copy.touch()
        engine = Child(self._command, copy_to=copy)
        await engine.start()
        stack.push_async_callback(engine.stop)
        self._arguments += ["--upstream", str(self._settings.engine.url), "--engine-log", str(copy)]
        watcher = asyncio.create_task(self._watch_engine(engine))
        stack.callback(watcher.cancel)

    async def _watch_engine(self, engine: Child) -> None:
        status = await engine.wait()
        if not self._stopping.is_set():
            log.critical("the engine ended, so the gate ends too", extra={"exit_status": status})
            self._fail(1)

    def _reserve_address(self, stack: AsyncExitStack) -> tuple[str, str]:
        """Hold the workers' address, so that port 0 is the same port for all; as HOST:PORT and as a URL."""
        host, _, port = self._settings.listen.rpartition(":")
        bare = host.strip("[]")
        try:
            family, *_, address = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)[0]
            held = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(address)
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {self._settings.listen}: {error.strerror or error}. Stop who does, or choose "
                "another address with --listen"
            ) from None
        found = held.getsockname()[1]
        return f"{host}:{found}", f"http://{host}:{found}"

    async def _keep(self, number: int, arguments: list[str]) -> None:
        """Run one worker, again and again."""
        pause_s, once = RESTART_S, False
        while not self._stopping.is_set():
            begun_s = time.monotonic()
            # A session of its own: a Ctrl-C is for this process, which tells the workers to drain.
            process = self._processes[number] = await asyncio.create_subprocess_exec(
                *[sys.executable, "-I", "-S", die_with_parent.__file__],
                *[sys.executable, "-m", "kvgate", "serve", *arguments],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            status = await process.wait()
            if self._stopping.is_set():
                return
            if not once and status == 2:  # it said why
                self._fail(status)
                return
            once = True
            pause_s = RESTART_S if time.monotonic() - begun_s > STEADY_S else min(pause_s * 2, RESTART_MAX_S)
            extra = {"worker": number, "exit_status": status, "pause_s": pause_s}
            log.error("a worker ended, it is started again", extra=extra)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    def _fail(self, status: int) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(status)
        self._stop()

    async def _all_answer(self, sockets: dict[int, Path]) -> bool:
        """Wait until every worker answers; False where that is not to come."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for path in sockets.values():
            while await ask(path, "/healthz") is None:
                if self._stopping.is_set():
                    return False
                if time.monotonic() > deadline:
                    raise CannotStart(f"the workers did not answer within {START_TIMEOUT_S:g} s")
                await asyncio.sleep(0.05)
        return True

    def _stop(self) -> None:
        """Drain and end; a second time: end now. The workers do as they are told."""
        self._stopping.set()
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def _end(self, keepers: list[asyncio.Task[None]]) -> None:
        if not self._stopping.is_set():
            self._stop()
        await asyncio.wait(keepers, timeout=self._settings.http.stop_grace_s + STOP_MARGIN_S)
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)
