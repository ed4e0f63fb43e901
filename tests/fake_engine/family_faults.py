"""Faults in every family's own words: what can go wrong with an answer, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

from tests.fake_engine.families import OVERFLOWN, data, mishap, named
from tests.fake_engine.usual import usual

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tests.fake_engine.engine import FakeEngine
    from tests.fake_engine.wire import Exchange, Reply


async def _whole_head(exchange: Exchange, length: int) -> None:
    await exchange.head("200 OK", "Content-Type: application/json; charset=utf-8", f"Content-Length: {length}")


def _body(exchange: Exchange) -> bytes:
    return json.dumps(exchange.family.whole(exchange.said), ensure_ascii=False).encode()


def _chunks(exchange: Exchange) -> list[bytes]:
    return list(exchange.family.chunks(exchange.said))


async def _send(exchange: Exchange, chunks: Iterable[bytes]) -> None:
    await exchange.begin_stream()
    for chunk in chunks:
        await exchange.chunk(chunk)
    await exchange.end_stream()


async def half_a_head(exchange: Exchange) -> None:
    """The connection is closed between two headers."""
    await exchange.write(b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Ty")
    exchange.link.transport.close()


async def overflown_at_once(exchange: Exchange) -> None:
    """The pool is full before the first token: a 500, or the first event of a 200."""
    if exchange.streams:
        await _send(exchange, [exchange.family.failure(OVERFLOWN)])
    else:
        await exchange.json("500 Internal Server Error", {"error": mishap(OVERFLOWN)})


def failing(message: str, *, first: bool) -> Reply:
    """An error inside a 200: in a stream as its first event or behind one, whole as the body."""

    async def reply(exchange: Exchange) -> None:
        if exchange.streams:
            said = [] if first else _chunks(exchange)[:1]
            await _send(exchange, [*said, exchange.family.failure(message)])
        else:
            await exchange.json("200 OK", {"error": mishap(message)})

    return reply


async def comment_then_failure(exchange: Exchange) -> None:
    """A sign of life, and then an error as the first event."""
    await _send(exchange, [b": ping\n\n", exchange.family.failure("no")])


def cut(where: Literal["event", "character"]) -> Reply:
    """The connection ends within an event or a body; within a character its last HTTP chunk is whole."""

    async def reply(exchange: Exchange) -> None:
        if exchange.streams:
            first, second, *_ = _chunks(exchange)
            await exchange.begin_stream()
            await exchange.chunk(first)
            if where == "character":
                await exchange.chunk(_half_a_character(second))
            else:
                await exchange.write(b"%x\r\n%s" % (len(second), second[: len(second) // 2]))
        else:
            body = _body(exchange)
            await _whole_head(exchange, len(body))
            await exchange.write(_half_a_character(body) if where == "character" else body[: len(body) // 2])
        exchange.link.transport.close()

    return reply


def _half_a_character(data: bytes) -> bytes:
    return data[: data.index("🦜".encode()) + 2]


async def no_end_marker(exchange: Exchange) -> None:
    """A stream whose framing ends in order, without the chunk that ends the answer."""
    await _send(exchange, _chunks(exchange)[:-1])


async def nothing(exchange: Exchange) -> None:
    """A 200 that ends in order with no byte in it."""
    if exchange.streams:
        await _send(exchange, [])
    else:
        await _whole_head(exchange, 0)


async def no_json(exchange: Exchange) -> None:
    """A whole answer, by its length, that is half of one."""
    body = _body(exchange)[:-20]
    await _whole_head(exchange, len(body))
    await exchange.write(body)


async def broken_chunks(exchange: Exchange) -> None:
    """An HTTP chunk whose length is no number."""
    if exchange.streams:
        await exchange.begin_stream()
        await exchange.chunk(_chunks(exchange)[0])
    else:
        await exchange.head("200 OK", "Content-Type: application/json", "Transfer-Encoding: chunked")
        await exchange.chunk(_body(exchange)[:20])
    await exchange.write(b"zz\r\n{}\r\n")
    await exchange.link.gone.wait()


async def two_answers(exchange: Exchange) -> None:
    """The answer, and another one that nobody asked for in the same packet."""
    second = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    if exchange.streams:
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*_chunks(exchange), b""])
        await exchange.begin_stream()
        await exchange.write(chunks + second)
    else:
        body = _body(exchange)
        await _whole_head(exchange, len(body))
        await exchange.write(body + second)


async def byte_by_byte(exchange: Exchange) -> None:
    """Every byte in a packet, and of a stream in an HTTP chunk, of its own."""
    if exchange.streams:
        data = b"".join(_chunks(exchange))
        await exchange.begin_stream()
        pieces = [b"1\r\n%c\r\n" % byte for byte in data]
    else:
        data = _body(exchange)
        await _whole_head(exchange, len(data))
        pieces = [b"%c" % byte for byte in data]
    for piece in pieces:
        await exchange.write(piece)
        await asyncio.sleep(0)
    if exchange.streams:
        await exchange.end_stream()


async def all_at_once(exchange: Exchange) -> None:
    """All events in one HTTP chunk."""
    if exchange.streams:
        await _send(exchange, [b"".join(_chunks(exchange))])
    else:
        await usual(exchange)


def endless_event(size_bytes: int) -> Reply:
    """One event, then one that never ends."""

    async def reply(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(_chunks(exchange)[0])
        for _ in range(0, size_bytes, 65536):
            await exchange.chunk(b"x" * 65536)
        await exchange.link.gone.wait()

    return reply


def slowly(seconds: float) -> Reply:
    """Never silent for long, and long in all: comments between two events, or a body in small pieces."""

    async def reply(exchange: Exchange) -> None:
        beats = 8
        if exchange.streams:
            first, *others = _chunks(exchange)
            await exchange.begin_stream()
            await exchange.chunk(first)
            for _ in range(beats):
                await asyncio.sleep(seconds / beats)
                await exchange.chunk(b": ping\n\n")
            for chunk in others:
                await exchange.chunk(chunk)
            await exchange.end_stream()
        else:
            body = _body(exchange)
            await _whole_head(exchange, len(body))
            step = -(-len(body) // beats)
            for at in range(0, len(body), step):
                await asyncio.sleep(seconds / beats)
                await exchange.write(body[at : at + step])

    return reply


async def silent_in_mid_answer(exchange: Exchange) -> None:
    """One event, or half of a body; then nothing until the client hangs up."""
    if exchange.streams:
        await exchange.begin_stream()
        await exchange.chunk(_chunks(exchange)[0])
    else:
        body = _body(exchange)
        await _whole_head(exchange, len(body))
        await exchange.write(body[: len(body) // 2])
    await exchange.link.gone.wait()


def late(seconds: float) -> Reply:
    """The usual answer after so long; the head of a stream comes at once."""

    async def reply(exchange: Exchange) -> None:
        if not exchange.streams:
            await asyncio.sleep(seconds)
            return await usual(exchange)
        await exchange.begin_stream()
        await asyncio.sleep(seconds)
        for chunk in _chunks(exchange):
            await exchange.chunk(chunk)
        return await exchange.end_stream()

    return reply


def rewritten(change: Callable[[bytes], bytes]) -> Reply:
    """The usual answer with each event changed, or with its body changed."""

    async def reply(exchange: Exchange) -> None:
        if exchange.streams:
            events = b"".join(_chunks(exchange)).split(b"\n\n")[:-1]
            await _send(exchange, [changed for event in events if (changed := change(event + b"\n\n"))])
        else:
            body = change(_body(exchange))
            await _whole_head(exchange, len(body))
            await exchange.write(body)

    return reply


def without_usage(said: bytes) -> bytes:
    """No figures that tell a cost; an event that has nothing else goes."""
    head, mark, document = said.rpartition(b"data: ")
    if document.startswith(b"[DONE]"):
        return said
    found = json.loads(document)
    if found.get("choices") == []:
        return b""
    return (
        head
        + mark
        + json.dumps(_without(found), ensure_ascii=False, separators=(",", ":")).encode()
        + b"\n\n"[: 2 * bool(mark)]
    )


def _without(value: Any) -> Any:
    figures = {"usage", "timings", "tokens_evaluated", "tokens_predicted"}
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if name not in figures}
    return value


def with_a_null_error(said: bytes) -> bytes:
    """What some builds put into each answer that is none."""
    return said.replace(b"{", b'{"error":null,', 1)


async def without_length(exchange: Exchange) -> None:
    """An answer that ends with the connection."""
    kind = "text/event-stream" if exchange.streams else "application/json"
    await exchange.head("200 OK", f"Content-Type: {kind}", "Connection: close")
    await exchange.write(b"".join(_chunks(exchange)) if exchange.streams else _body(exchange))
    exchange.link.transport.close()


def with_usage_twice(event: bytes) -> bytes:
    """An event that tells the cost comes once more."""
    return event * (1 + (b'"usage"' in event or (b'"tokens_evaluated"' in event and b'"stop":true' in event)))


def with_a_stranger(event: bytes) -> bytes:
    """In front of each word stands an event that says nothing."""
    if event.startswith(b'data: {"choices"'):
        return data({"choices": [], "object": "note"}) + event
    return named("vendor.note") + event if event.startswith(b"event: ") else event


def between_count_and_send(change: Callable[[FakeEngine, Exchange], Awaitable[None]]) -> Reply:
    """A counter's answer on a connection that ends with it; the engine is changed before it goes out."""

    async def reply(exchange: Exchange) -> None:
        await change(exchange.engine, exchange)
        await asyncio.sleep(0.05)  # the other side learns of what was closed
        exchange.last = True
        await usual(exchange)

    return reply
