"""A man in the middle: passes bytes between the gate and a real engine, and keeps what the gate sent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing import Self


class Recorder:
    """Listens on a free port, in a thread of its own, and passes everything on to `upstream`."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop: asyncio.Event | None = None
        self.url = ""
        self.sent = bytearray()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def bodies(self) -> bytes:
        """All that the gate has sent since the last call."""
        found = bytes(self.sent)
        self.sent.clear()
        return found

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._pass_on(reader, writer)
            except asyncio.CancelledError:
                return  # the end of the test: asyncio would log it as an error
            finally:
                tasks.discard(task)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)

        async def out() -> None:
            while data := await reader.read(65536):
                self.sent += data
                there_writer.write(data)
                await there_writer.drain()

        async def back() -> None:
            while data := await there_reader.read(65536):
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.create_task(out()), asyncio.create_task(back())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for end in (writer, there_writer):
                end.transport.abort()
                with contextlib.suppress(OSError):
                    await end.wait_closed()
