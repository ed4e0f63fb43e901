"""The one place that calls an engine: pooled HTTP/1.1 connections, each bound to the engine it reached."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httptools

from kvgate import __version__
from kvgate.core.engine_state import Trouble
from kvgate.core.reason import Reason, refusal
from kvgate.ports import Head, LineFailed, LineStalled, Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvgate.core.profile import EngineProfile
    from kvgate.ports import Line

BUFFER_BYTES_MAX = 256 * 1024
"""Body bytes held for a reader that is behind; beyond it the engine's socket is not read."""

HEAD_BYTES_MAX = 64 * 1024
"""A response head larger than this is no inference server's."""

IDLE_S = 2.0
"""How long an unused connection is kept: well below the 5 s after which llama-server closes it."""

CONNECT_TIMEOUT_S = 5.0

RETRY_AFTER_S = 2
"""For an engine that cannot be reached: how soon a client may try again."""

IDLE_TIMEOUT_S = 120.0
"""How long the engine may be silent in mid-answer.

Another tenant's long prefill stalls it for half a minute (llama.cpp issue 29175). There is no limit in all: an answer
may take as long as it takes.
"""

_SILENT_RETRY_AFTER_S = 10
"""Of an engine that hangs: each try costs its caller seconds, and it seldom comes to itself."""


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection to the engine; implements `ports.Line`.

    Reading is paused while more than `BUFFER_BYTES_MAX` wait for a slow reader, so that the engine feels the
    client's pace and no answer is held in memory whole.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._profile: EngineProfile | None = None
        self._head: asyncio.Future[Head] | None = None
        self._wakeup: asyncio.Future[None] | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._headers: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._headless_bytes = 0
        self._status = 0
        self._complete = True
        self._keep_alive = True
        self.is_retired = False
        """Whether its exchange is the last one, whatever the engine says."""
        self.is_kept = False
        """Whether it waited in the pool since its last exchange: the other end may have closed it meanwhile."""
        self._lost: str | None = None
        self._stalled = False
        self._heard_at_s = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None

    @property
    def profile(self) -> EngineProfile:
        """The engine at the other end, as it said when this connection was opened."""
        if self._profile is None:
            raise RuntimeError("the engine has not introduced itself on this connection")
        return self._profile

    def introduce(self, profile: EngineProfile) -> None:
        """Bind this connection to the engine that answered on it."""
        self._profile = profile

    @property
    def usable(self) -> bool:
        """Whether another exchange may start here."""
        whole = self._lost is None and self._complete and not self._chunks
        return whole and self._keep_alive and not self.is_retired

    # -- one exchange

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Head:
        """Send a request and wait for the head of its answer.

        Raises:
            LineFailed: the connection broke before the head was complete.
        """
        if self._lost is not None or self._transport is None or self._transport.is_closing():
            raise LineFailed(self._lost or "not connected", sent=False)
        self._parser = httptools.HttpResponseParser(self)
        self._complete, self._status, self._head_bytes, self._headless_bytes = False, 0, 0, 0
        self._headers = []
        self._head = self._loop.create_future()
        lines = [f"{method} {self._upstream.prefix}{path} HTTP/1.1", f"Host: {self._upstream.authority}"]
        lines += [f"{name}: {value}" for name, value in {**self._upstream.headers, **headers}.items()]
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        self._transport.write("\r\n".join([*lines, "\r\n"]).encode("latin-1") + body)
        return await self._head

    async def read(self) -> bytes:
        """All body bytes that have arrived, waiting for some; empty at the answer's proper end.

        Raises:
            LineFailed: the connection broke, or spoke no HTTP, before the end.
        """
        while not self._chunks:
            if self._complete:
                return b""
            if self._lost is not None:
                raise self._failure(self._lost)
            self._wakeup = self._loop.create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None and self._lost is None:
            self._paused = False
            self._heard_at_s = self._loop.time()  # until now it was not listened to
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """Back to the pool if the exchange ended properly; otherwise closed at once, in mid-answer."""
        self._upstream.take_back(self)

    def close(self) -> None:
        """Close without waiting for anything: the engine sees a hang-up and cancels its work."""
        self.keep(None)
        self._watch_silence(None)
        self._lost = self._lost or "closed by kvgate"  # else an answer without a length would seem to end here
        if self._transport is not None:
            self._transport.abort()

    def keep(self, idle: asyncio.TimerHandle | None) -> None:
        """Set or stop the timer that closes an idle connection."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = idle

    def stall(self, problem: str) -> None:
        """Give up on an engine that is silent."""
        self._stalled = True
        self._fail(problem)

    @property
    def is_silent(self) -> bool:
        """Whether a request was sent and no byte of its answer's body has come."""
        return not self._complete and self._silence is None and self._lost is None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = transport  # type: ignore[assignment]  # a stream transport, as asked for

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine."""
        if self._complete:
            self._fail("the engine sent bytes that nobody asked for")
            return
        self._heard_at_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the engine's answer is not HTTP ({type(error).__name__})")
        if not self._status:
            self._headless_bytes += len(data)
            if self._headless_bytes > HEAD_BYTES_MAX:  # one header line without an end, or 1xx without an end
                self._fail("the head of an answer is too large")

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._upstream.forget(self)
        until_close = self._status and not any(
            name in {"content-length", "transfer-encoding"} for name, _ in self._headers
        )
        if not self._complete and until_close and exc is None and self._lost is None:
            self._finish()
        self._fail("the engine closed the connection" if exc is None else type(exc).__name__)

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        """An answer begins; none may follow the one that was asked for."""
        if self._complete:
            raise LineFailed("the engine sent two answers to one request", sent=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise LineFailed("the head of an answer is too large", sent=True)
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """The head is whole; an informational one (1xx) is passed over."""
        status = int(self._parser.get_status_code())
        if status >= 200:
            self._status = status
            # llama-server closes the connection behind an event stream without a word of it in the head: a
            # request sent on it in that moment would be lost.
            streamed = any(value.startswith("text/event-stream") for _, value in self._headers)
            self._keep_alive = bool(self._parser.should_keep_alive()) and not streamed
            if self._head is not None and not self._head.done():
                self._head.set_result(Head(status, tuple(self._headers)))

    def on_body(self, data: bytes) -> None:
        """Some of the body; from the first of it on the engine may be silent for so long and no longer."""
        if self._silence is None:
            self._watch_silence(self._upstream.idle_timeout_s)
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > BUFFER_BYTES_MAX and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """The answer's proper end."""
        if self._status:
            self._finish()
        else:
            self._headers = []

    def _finish(self) -> None:
        self._complete = True
        self._watch_silence(None)
        self._wake()

    def _watch_silence(self, seconds: float | None) -> None:
        """Look again after so many seconds; one timer a stream, however many events it has."""
        if self._silence is not None:
            self._silence.cancel()
        self._silence = None if seconds is None else self._loop.call_later(seconds, self._silence_over)

    def _silence_over(self) -> None:
        allowed_s = self._upstream.idle_timeout_s
        silent_s = self._loop.time() - self._heard_at_s
        if self._paused:  # the client is slow, not the engine
            self._watch_silence(allowed_s)
        elif silent_s < allowed_s:
            self._watch_silence(allowed_s - silent_s)
        else:
            self.stall(f"the engine sent nothing for {allowed_s:g} s in mid-answer")

    def _failure(self, problem: str) -> LineFailed:
        return LineStalled(problem) if self._stalled else LineFailed(problem, sent=True)

    def _fail(self, problem: str) -> None:
        if self._lost is None:
            self._lost = problem
        self._watch_silence(None)
        if self._head is not None and not self._head.done():
            self._head.set_exception(self._failure(self._lost))
            self._head.exception()  # the waiter may have been cancelled: nobody else would look at it
        self._wake()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class Upstream:
    """Connections to one engine URL.

    Every new connection asks the engine who it is (`hello`) before anything else is sent on it, so that a
    replaced engine is noticed before the next request reaches it (DESIGN section 7).

    Args:
        url: `http://host:port`, `https://...`, with an optional path in front of the engine's own.
        hello: asks the engine for its profile on a fresh connection; raises `Refused` where there is none.
        api_key: the engine's own key, sent with every request.
        idle_timeout_s: seconds that the engine may be silent once an answer's body has begun. Comments count as life.

    Raises:
        ValueError: the URL is not one.
    """

    def __init__(
        self,
        url: str,
        hello: Callable[[Connection], Awaitable[EngineProfile]],
        api_key: str | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.username:
            raise ValueError(f"engine.url must look like http://host:port, not {url!r}")
        self._url = url
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._hello = hello
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self.idle_timeout_s = idle_timeout_s
        self.authority = parts.netloc
        self.prefix = parts.path.rstrip("/")
        self.headers = {"User-Agent": f"kvgate/{__version__}", "Accept-Encoding": "identity"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    @property
    def open_connections(self) -> int:
        """Connections that exist now, idle ones included."""
        return len(self._open)

    async def open(self, *, fresh: bool = False) -> Connection:
        """A connection that nobody else uses, to an engine that has introduced itself.

        `fresh` for several exchanges in a row: llama-server ends a connection after 100, and a kept one may be near
        its end.

        Raises:
            Refused: the engine cannot be reached, is loading, or does not say what must be known.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            connection.keep(None)
            if connection.usable:
                return connection
            connection.close()
        return await self._connect()

    async def _connect(self) -> Connection:
        """A new connection; a second one where the hello used the first up (llama-server closes behind a 501)."""
        connection = await self._introduced()
        if connection.usable:
            return connection
        connection.close()
        return await self._introduced()

    async def _introduced(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise self._unreachable(f"no connection within {CONNECT_TIMEOUT_S:g} s", Trouble.NO_CONNECTION) from None
        except OSError as error:
            raise self._unreachable(error.strerror or str(error), trouble_of(error)) from None
        self._open.add(connection)
        try:
            connection.introduce(await self._hello(connection))
        except LineFailed as failed:
            connection.close()
            raise self._unreachable(str(failed), failed.trouble) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _unreachable(self, cause: str, trouble: Trouble) -> Refused:
        return unanswered(f"{self._url}: {cause}", trouble)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def take_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it where its exchange did not end properly."""
        if not connection.usable:
            connection.close()
            return
        connection.is_kept = True
        connection.keep(self._loop.call_later(IDLE_S, connection.close))
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def end_silent(self, problem: str) -> None:
        """Give up on every answer of which nothing has come; for an engine that answers nobody."""
        for connection in [one for one in self._open if one.is_silent]:
            connection.stall(problem)

    def retire(self) -> None:
        """Use no connection again that there is now, so that the next request asks the engine anew who it is."""
        for connection in list(self._open):
            connection.is_retired = True
        for connection in list(self._idle):
            connection.close()

    async def close(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)


def unanswered(cause: str, trouble: Trouble) -> Refused:
    """The refusal where the engine gave no answer."""
    retry_after_s = _SILENT_RETRY_AFTER_S if trouble is Trouble.SILENT else RETRY_AFTER_S
    return Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=retry_after_s), cause, trouble)


def trouble_of(error: OSError) -> Trouble:
    """Why no connection came about; a host with several addresses tells all of its errors in one text."""
    if isinstance(error, socket.gaierror):
        return Trouble.NAME_UNKNOWN
    if isinstance(error, ssl.SSLError):
        return Trouble.TLS
    numbers = {error.errno} | {int(number) for number in re.findall(r"\[Errno (\d+)\]", str(error))}
    if errno.ECONNREFUSED in numbers:
        return Trouble.REFUSED
    if numbers & {errno.ENETUNREACH, errno.EHOSTUNREACH}:
        return Trouble.NO_ROUTE
    return Trouble.BROKEN if errno.ECONNRESET in numbers else Trouble.NO_CONNECTION


async def whole_body(line: Line, bytes_max: int) -> bytes:
    """All of an answer's body, held until its proper end.

    Raises:
        LineFailed: it broke off, or is over `bytes_max`.
    """
    parts, total = [], 0
    while data := await line.read():
        total += len(data)
        if total > bytes_max:
            raise LineFailed(f"an answer is over {bytes_max} bytes", sent=True)
        parts.append(data)
    return b"".join(parts)
