"""The fake engine's side of a connection: reads requests one after the other, and notices at once who hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.fake_engine.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fake_engine.engine import FakeEngine
    from tests.fake_engine.families import Family, Said

REQUESTS_PER_CONNECTION = 100

Reply = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Recorded:
    """One request as it came, and whether the client hung up before its answer was complete."""

    method: str
    path: str
    head: bytes
    body: bytes
    connection: int
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}


@dataclass
class Exchange:
    """One request being answered; what a reply works with."""

    engine: FakeEngine
    request: Recorded
    link: Link
    last: bool = False

    @property
    def family(self) -> Family:
        return FAMILIES[self.request.path]

    @property
    def said(self) -> Said:
        return self.engine.says(self.family, self.request.json)

    @property
    def streams(self) -> bool:
        return bool(self.request.json.get("stream"))

    async def write(self, data: bytes) -> None:
        """Send bytes as they are, waiting while the client reads none."""
        await self.link.write(data)

    async def head(self, status: str, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", "Server: llama.cpp", "Access-Control-Allow-Origin: ", *headers]
        await self.write("\r\n".join([*lines, "", ""]).encode())

    async def json(self, status: str, document: Any) -> None:
        """A whole answer; whatever is not a 200 ends the connection, as llama-server's does."""
        body = json.dumps(document, separators=(",", ":")).encode()
        self.last = self.last or not status.startswith("200")
        keep = "Connection: close" if self.last else "Keep-Alive: timeout=5, max=100"
        await self.head(status, "Content-Type: application/json; charset=utf-8", f"Content-Length: {len(body)}", keep)
        await self.write(body)
        if self.last:
            self.link.transport.close()

    async def begin_stream(self) -> None:
        await self.head(
            "200 OK",
            "X-Accel-Buffering: no",
            "Content-Type: text/event-stream",
            "Transfer-Encoding: chunked",
            "Keep-Alive: timeout=5, max=100",
        )

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        """The last chunk; the connection is closed right behind it, and the head did not say so (seen)."""
        await self.chunk(b"")
        self.link.transport.close()


class Link(asyncio.Protocol):
    """One connection: reads requests one after the other, and notices that the client is gone at once."""

    transport: asyncio.Transport

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()
        self.number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._engine.connections_made += 1
        self.number = self._engine.connections_made
        self._engine._links.add(self)
        if self._engine.turns_away:
            transport.abort()
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._links.discard(self)
        self.gone.set()
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def write(self, data: bytes) -> None:
        self.transport.write(data)
        await self._writable.wait()

    def reset(self) -> None:
        """Close with a TCP reset instead of an orderly end."""
        if (connection := self.transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    async def _serve(self) -> None:
        try:
            await self._serve_requests()
        finally:
            self.transport.close()

    async def _serve_requests(self) -> None:
        for served in range(1, REQUESTS_PER_CONNECTION + 1):
            request = await self._read_request()
            self._engine.requests.append(request)
            exchange = Exchange(self._engine, request, self, last=served == REQUESTS_PER_CONNECTION)
            with _noticed(request), self._engine.at_work(request):
                if self._engine.frozen:
                    await self.gone.wait()
                await self._engine.next_reply(request.path)(exchange)
            if self.transport.is_closing():
                return

    async def _read_request(self) -> Recorded:
        while b"\r\n\r\n" not in self._buffer:
            await self._more()
        head, _, _ = bytes(self._buffer).partition(b"\r\n\r\n")
        del self._buffer[: len(head) + 4]
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        request = Recorded(method, path, head, b"", self.number)
        length = int(request.headers.get("content-length", 0))
        while len(self._buffer) < length:
            await self._more()
        request.body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return request

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()


@contextlib.contextmanager
def _noticed(request: Recorded) -> Iterator[None]:
    """Marks the request where its answer is cut short by the client's end."""
    try:
        yield
    except asyncio.CancelledError:
        request.hung_up.set()
        raise
