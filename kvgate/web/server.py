"""aiohttp's server, told to leave every answer to the front, and the tenant's side of a relay."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvgate.core.reason import Reason, refusal
from kvgate.ports import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    RefuseHead = Callable[[int, BaseException | None], web.StreamResponse]

KEEPALIVE_S: Final = 75.0
LINGERING_S: Final = 2.0

PIECE_BYTES: Final = 64 * 1024
"""What the socket's own buffer takes without waiting for a client."""


class Server(web.Server):
    """A server whose HTTP errors are answered by `refuse_head`, and which cancels a handler at a hang-up.

    aiohttp's default lets a handler run on after its client has left, until the next write.
    """

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], refuse_head: RefuseHead
    ) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGERING_S,
            auto_decompress=False,  # read_body does it: aiohttp takes a stream that breaks off for a whole one
        )
        self._refuse_head = refuse_head

    def __call__(self) -> RequestHandler:
        """A protocol for one more connection."""
        return _Handler(self, self._refuse_head, loop=self._loop, **self._kwargs)


class _Handler(RequestHandler):
    __slots__ = ("_refuse_head",)

    def __init__(self, manager: web.Server, refuse_head: RefuseHead, **options: object) -> None:
        super().__init__(manager, **options)  # type: ignore[arg-type]  # passed through as given
        self._refuse_head = refuse_head

    def data_received(self, data: bytes) -> None:
        """Bytes of a client; a body whose chunks break off fails its reader, whom aiohttp lets wait for the rest."""
        super().data_received(data)
        reading = self._current_request
        if reading is not None and self._messages and not reading.content.is_eof():
            problem = "The chunks of the request's body are not valid HTTP."
            reading.content.set_exception(Refused(refusal(Reason.BAD_HTTP, problem=problem)))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - quotes the head, which may hold a key
    ) -> web.StreamResponse:
        """Answer in JSON, log nothing of the head."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the answer has begun; it can only be cut")
        return self._refuse_head(status, exc)


class ClientStuck(ConnectionResetError):
    """The client is connected and reads nothing."""


async def send_large(
    request: web.BaseRequest, answer: web.StreamResponse, write_timeout_s: float
) -> web.StreamResponse:
    """Send an answer that one write does not take, bit by bit; aiohttp alone would wait for its client for ever.

    Raises:
        ConnectionResetError: the client is gone; `ClientStuck` where it reads nothing.
    """
    body = answer.body if isinstance(answer, web.Response) else None
    if not isinstance(body, bytes) or len(body) <= PIECE_BYTES:
        return answer
    sent = web.StreamResponse(status=answer.status, headers=answer.headers)
    sent.content_length = len(body)
    await sent.prepare(request)
    for at in range(0, len(body), PIECE_BYTES):
        await _write(request, sent, body[at : at + PIECE_BYTES], write_timeout_s)
    await sent.write_eof()
    return sent


async def _write(request: web.BaseRequest, response: web.StreamResponse, data: bytes, write_timeout_s: float) -> None:
    try:
        async with asyncio.timeout(write_timeout_s):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ClientStuck(f"read nothing for {write_timeout_s:g} s") from None


class TenantSide:
    """Where a relayed answer goes; implements `relay.Client`.

    Args:
        request: whose answer it is.
        write_timeout_s: after this long without reading anything the client is cut.
        begun: told the status as soon as it is sent.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        write_timeout_s: float,
        begun: Callable[[int, web.StreamResponse | None], None],
    ) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._begun = begun
        self.response: web.StreamResponse = web.Response(status=500)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a stream."""
        self.response = web.StreamResponse(status=status, headers=headers)
        self._begun(status, self.response)
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send some of a stream; waits while the client is slow.

        Raises:
            ConnectionResetError: the client is gone; `ClientStuck` where it reads nothing.
        """
        await _write(self._request, self.response, data, self._write_timeout_s)

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keep a whole answer; it is sent when the request is done with."""
        self._begun(status, None)
        self.response = web.Response(status=status, headers=headers, body=body)
