"""Replies with something wrong in them, and odd ones that are right."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.fake_engine.families import DONE, OVERFLOWN, data
from tests.fake_engine.usual import usual

if TYPE_CHECKING:
    from tests.fake_engine.wire import Exchange, Reply

DELTA = data({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "Hi"}}]})


def whole(status: str, document: Any) -> Reply:
    """This status with this JSON."""
    return lambda exchange: exchange.json(status, document)


def raw(*pieces: bytes, close: bool = False) -> Reply:
    """These bytes, each piece a write of its own; then the connection is closed, or left as it is."""

    async def reply(exchange: Exchange) -> None:
        for piece in pieces:
            await exchange.write(piece)
            await asyncio.sleep(0.01)
        if close:
            exchange.link.transport.close()

    return reply


async def reset_before_head(exchange: Exchange) -> None:
    """The connection is reset while the answer is awaited."""
    exchange.link.reset()


async def reset_after_head(exchange: Exchange) -> None:
    """The head, then a reset."""
    await exchange.head("200 OK", "Content-Type: application/json", "Content-Length: 500")
    await asyncio.sleep(0.05)  # a reset overtakes what the other side has not read
    exchange.link.reset()


async def close_before_head(exchange: Exchange) -> None:
    """The connection is closed in order, without an answer."""
    exchange.link.transport.close()


async def cut_whole(exchange: Exchange) -> None:
    """Half of the body that the head announced."""
    await exchange.head("200 OK", "Content-Type: application/json", "Content-Length: 500")
    await exchange.write(b'{"choices":[')
    exchange.link.transport.close()


async def cut_in_chunk(exchange: Exchange) -> None:
    """A stream that ends in the middle of an event."""
    await exchange.begin_stream()
    await exchange.chunk(DELTA)
    await exchange.write(b"%x\r\n%s" % (len(DELTA), DELTA[:20]))
    exchange.link.transport.close()


async def end_without_done(exchange: Exchange) -> None:
    """A stream whose framing ends in order, without [DONE]."""
    await exchange.begin_stream()
    await exchange.chunk(DELTA)
    await exchange.end_stream()


def error_event(message: str = OVERFLOWN) -> Reply:
    """An error inside a 200 stream, and no [DONE] behind it."""

    async def reply(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(DELTA)
        await exchange.chunk(exchange.family.failure(message))
        await exchange.end_stream()

    return reply


async def stall(exchange: Exchange) -> None:
    """Nothing, until the client hangs up."""
    await exchange.link.gone.wait()


async def stall_in_stream(exchange: Exchange) -> None:
    """One event, then nothing until the client hangs up."""
    await exchange.begin_stream()
    await exchange.chunk(DELTA)
    await exchange.link.gone.wait()


def flood(events: int, event: bytes = DELTA) -> Reply:
    """A stream of that many events, as fast as the client takes them."""

    async def reply(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for _ in range(events):
            await exchange.chunk(event)
        await exchange.chunk(DONE)
        await exchange.end_stream()

    return reply


not_http = raw(b"220 mail.example.com ESMTP\r\n")
huge_head = raw(b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %s\r\n" % (at, b"x" * 1000) for at in range(200)) + b"\r\n")


def informational(*heads: bytes) -> Reply:
    """Informational answers (1xx) in front of the usual one."""

    async def reply(exchange: Exchange) -> None:
        for head in heads:
            await exchange.write(head)
        await usual(exchange)

    return reply


def until_close(body: bytes) -> Reply:
    """An answer without a length, that ends with the connection."""
    return raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", body, close=True)


async def connection_close(exchange: Exchange) -> None:
    """The usual answer, and the connection's end with it."""
    exchange.last = True
    await usual(exchange)
