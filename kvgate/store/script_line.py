"""Scripts at one server, over one pipelined connection: a step costs a fraction of what a general client takes."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import AuthenticationError, InvalidResponse, NoScriptError, ResponseError
from redis.exceptions import ConnectionError as StoreConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONNECT_TIMEOUT_S: Final = 2.0

LINE_BYTES_MAX: Final = 64 * 1024
"""Of a status or an error; a longer one is no server's."""

REPLY_BYTES_MAX: Final = 512 * 1024 * 1024
"""Of a script's answer: the protocol's own bound."""

_ERRORS: Final[dict[bytes, type[ResponseError]]] = {b"NOSCRIPT": NoScriptError}
_REFUSED: Final = frozenset({b"NOAUTH", b"WRONGPASS", b"NOPERM"})


@dataclass(frozen=True, slots=True)
class Address:
    """Where one server listens, and what it asks for.

    Args:
        host: with `port`, a name or an address; None where `path` is a unix socket.
        database: its number.
    """

    host: str | None
    port: int
    path: str | None
    username: str | None
    password: str | None
    database: int

    @classmethod
    def of(cls, options: dict[str, Any]) -> Address:
        """As redis-py keeps it of a URL."""
        return cls(
            host=None if options.get("path") else str(options.get("host") or "localhost"),
            port=int(options.get("port") or 6379),
            path=options.get("path"),
            username=options.get("username"),
            password=options.get("password"),
            database=int(options.get("db") or 0),
        )

    def hello(self) -> Iterator[bytes]:
        """The commands that a new connection begins with."""
        if self.password is not None:
            user = () if self.username is None else (self.username,)
            yield command("AUTH", *user, self.password)
        if self.database:
            yield command("SELECT", str(self.database))


def command(*parts: str) -> bytes:
    """A command in the server's protocol."""
    encoded = [part.encode() for part in parts]
    return b"".join([b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)])


class Replies:
    """Takes a server's bytes apart, however they are split: texts, and errors as values.

    Scripts of the ledger give one text each; numbers and lists are for general clients.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes | Exception | None]:
        """The replies that are whole now.

        Raises:
            InvalidResponse: that is no reply to a script.
        """
        self._buffer += data
        found: list[bytes | Exception | None] = []
        at = 0
        while (end := self._buffer.find(b"\r\n", at, at + LINE_BYTES_MAX)) >= 0:
            kind, line = self._buffer[at : at + 1], bytes(self._buffer[at + 1 : end])
            if kind == b"$":
                size = self._size(line)
                if size < 0:
                    found.append(None)
                else:
                    stop = end + 2 + size
                    if len(self._buffer) < stop + 2:
                        break
                    found.append(bytes(self._buffer[end + 2 : stop]))
                    end = stop
            elif kind == b"+":
                found.append(line)
            elif kind == b"-":
                found.append(_error(line))
            else:
                raise InvalidResponse(f"the store sent a reply of kind {bytes(kind)!r}")
            at = end + 2
        del self._buffer[:at]
        if len(self._buffer) > LINE_BYTES_MAX and not self._buffer.startswith(b"$"):
            raise InvalidResponse("the store sent a line without an end")
        return found

    @staticmethod
    def _size(line: bytes) -> int:
        try:
            size = int(line)
        except ValueError:
            raise InvalidResponse("the store sent a text without a length") from None
        if size > REPLY_BYTES_MAX:
            raise InvalidResponse("the store sent a text that is too long")
        return size


def _error(line: bytes) -> Exception:
    code, _, rest = line.partition(b" ")
    text = line.decode("utf-8", "replace")
    if code in _REFUSED:
        return AuthenticationError(text)
    return _ERRORS.get(code, ResponseError)(rest.decode("utf-8", "replace") if code in _ERRORS else text)


class _Socket(asyncio.Protocol):
    """One connection; replies come in the order of the commands."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._replies = Replies()
        self._waiting: deque[asyncio.Future[bytes | None]] = deque()
        self._unsent: list[bytes] = []
        self.lost: Exception | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream transport, as asked for

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._replies.feed(data)
        except InvalidResponse as error:
            self.fail(error)
            return
        for reply in replies:
            if not self._waiting:
                self.fail(InvalidResponse("the store sent a reply that nobody asked for"))
                return
            future = self._waiting.popleft()
            if future.done():  # nobody waits for it any more
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(StoreConnectionError(f"the store closed the connection{f' ({exc})' if exc else ''}"))
        if not self.closed.done():
            self.closed.set_result(None)

    async def ask(self, data: bytes) -> bytes | None:
        """Send a command with all others of this turn of the loop, and wait for its reply."""
        if self.lost is not None:
            raise StoreConnectionError(str(self.lost))
        future: asyncio.Future[bytes | None] = self._loop.create_future()
        self._waiting.append(future)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        try:
            return await future
        except asyncio.CancelledError:
            # Who gives up does so because the server hangs: what it says later is of no use to anybody.
            self.fail(StoreConnectionError("a command was given up"))
            raise

    def fail(self, error: Exception) -> None:
        """Nothing more is sent or heard here; whether what waits was done is unknown."""
        if self.lost is None:
            self.lost = error
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(self.lost)
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport is not None and self.lost is None:
            self._transport.write(data)


class ScriptLine:
    """Runs scripts at one server; connects at the first, and anew after a connection was lost.

    Nothing is ever sent twice: of a command whose connection broke it is unknown whether it was done.

    Args:
        address: the server's.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._socket: _Socket | None = None
        self._connecting = asyncio.Lock()

    async def evalsha(self, sha1: str, keys: int, *arguments: str) -> bytes | None:
        """Run the script of this digest.

        Raises:
            NoScriptError: the server does not know it.
            RedisError, OSError: it failed, or the server did.
        """
        return await self._run(command("EVALSHA", sha1, str(keys), *arguments))

    async def eval(self, text: str, keys: int, *arguments: str) -> bytes | None:
        """Run this script; the server knows it from then on.

        Raises:
            RedisError, OSError: it failed, or the server did.
        """
        return await self._run(command("EVAL", text, str(keys), *arguments))

    async def aclose(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.fail(StoreConnectionError("closed"))
            await self._socket.closed
            self._socket = None

    async def _run(self, data: bytes) -> bytes | None:
        socket = self._socket
        if socket is None or socket.lost is not None:
            socket = await self._connected()
        return await socket.ask(data)

    async def _connected(self) -> _Socket:
        async with self._connecting:
            if self._socket is not None and self._socket.lost is None:
                return self._socket
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                socket = await self._open(_Socket)
                try:
                    for hello in self._address.hello():
                        await socket.ask(hello)
                except BaseException as error:
                    socket.fail(StoreConnectionError(str(error)))
                    raise
            self._socket = socket
            return socket

    async def _open(self, protocol: Callable[[], _Socket]) -> _Socket:
        loop, address = asyncio.get_running_loop(), self._address
        if address.path is not None:
            return (await loop.create_unix_connection(protocol, address.path))[1]
        return (await loop.create_connection(protocol, str(address.host), address.port))[1]
