"""Connections to the engine: each fault of the wire becomes one clear failure, and no socket or task is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest

from kvgate import upstream as module
from kvgate.core.reason import Reason, refusal
from kvgate.ports import Head, LineFailed, LineStalled, Refused
from kvgate.upstream import BUFFER_BYTES_MAX, HEAD_BYTES_MAX, Connection, Upstream
from tests import fake_engine as fault
from tests.fake_engine import CHAT, COUNTER, FakeEngine, raw
from tests.unit.doubles import profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvgate.core.profile import EngineProfile
    from tests.fake_engine import Reply

OK = b"HTTP/1.1 200 OK\r\n"
BODY = b'{"messages": []}'


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """Every test here ends without a task, and without an exception that nobody looked at."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    yield
    await asyncio.sleep(0)
    gc.collect(1)
    await asyncio.sleep(0)
    assert problems == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture(autouse=True)
def long_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here passes because an idle connection was closed just in time."""
    monkeypatch.setattr(module, "IDLE_S", 60)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as found:
        yield found


async def hello(connection: Connection) -> EngineProfile:
    """As an engine kind's: one exchange, and a profile made of it."""
    await connection.send("GET", "/props", {}, b"")
    await read_all(connection)
    return profile()


@contextlib.asynccontextmanager
async def upstream_to(
    url: str, greet: Callable[[Connection], Awaitable[EngineProfile]] = hello, api_key: str | None = None
) -> AsyncIterator[Upstream]:
    found = Upstream(url, greet, api_key)
    try:
        yield found
    finally:
        await found.close()
        assert found.open_connections == 0


async def exchange(connection: Connection, path: str = CHAT, body: bytes = BODY) -> tuple[Head, bytes]:
    head = await connection.send("POST", path, {"Content-Type": "application/json"}, body)
    return head, await read_all(connection)


async def read_all(connection: Connection) -> bytes:
    parts: list[bytes] = []
    await collect(connection, parts)
    return b"".join(parts)


async def collect(connection: Connection, into: list[bytes]) -> None:
    while data := await connection.read():
        into.append(data)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the other side of a socket tells of no event
            await asyncio.sleep(0.005)


# -- what goes out


async def test_a_request_on_the_wire(engine: FakeEngine) -> None:
    """Its own head and nothing of the client's; the body byte for byte."""
    body = '{"a": "é"}'.encode()
    async with upstream_to(engine.url, api_key="k") as upstream:
        connection = await upstream.open()
        engine.script(CHAT, fault.whole("200 OK", {"x": 1}))
        head, answer = await exchange(connection, body=body)
        connection.release()
    (request,) = engine.asked(CHAT)
    assert request.body == body
    assert request.head.split(b"\r\n")[0] == b"POST /v1/chat/completions HTTP/1.1"
    assert set(request.headers) == {
        "host", "user-agent", "accept-encoding", "authorization", "content-type", "content-length"
    }  # fmt: skip
    assert request.headers["host"] == engine.url.removeprefix("http://")
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["authorization"] == "Bearer k"
    assert (head.status, head.get("content-type"), answer) == (200, "application/json; charset=utf-8", b'{"x":1}')


async def test_a_path_in_the_url_stands_before_every_path(engine: FakeEngine) -> None:
    for path in ("/llm/props", "/llm/v1/x"):
        engine.script(path, fault.whole("200 OK", {}))
    async with upstream_to(f"{engine.url}/llm/") as upstream:
        connection = await upstream.open()
        await exchange(connection, "/v1/x")
        connection.release()
    assert [request.path for request in engine.requests] == ["/llm/props", "/llm/v1/x"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8080",
        "ftp://x",
        "http://",
        "http://:80",
        "http://u:p@x",
        "http://x?y=1",
        "http://x:99999",
        "unix:///x",
    ],
)
def test_what_is_no_engine_url_is_said_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"engine\.url|[Pp]ort"):
        Upstream(url, hello)


# -- the pool


async def test_one_connection_serves_one_exchange_after_the_other(engine: FakeEngine) -> None:
    """And the engine introduces itself once a connection."""
    async with upstream_to(engine.url) as upstream:
        for _ in range(5):
            connection = await upstream.open()
            await exchange(connection, COUNTER)
            connection.release()
        assert (engine.connections_made, upstream.open_connections) == (1, 1)
        assert len(engine.asked("/props")) == 1


async def test_connections_in_use_are_not_shared(engine: FakeEngine) -> None:
    async with upstream_to(engine.url) as upstream:
        connections = await asyncio.gather(*(upstream.open() for _ in range(10)))
        assert len(set(map(id, connections))) == engine.connections_made == upstream.open_connections == 10
        for connection in connections:
            connection.release()


async def test_an_idle_connection_is_closed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine closes it: a request sent in that moment would be lost."""
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    async with upstream_to(engine.url) as upstream:
        (await upstream.open()).release()
        assert upstream.open_connections == 1
        await until(lambda: upstream.open_connections == engine.open_connections == 0)


async def test_a_connection_in_use_has_no_idle_timer(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    async with upstream_to(engine.url) as upstream:
        (await upstream.open()).release()
        connection = await upstream.open()
        await asyncio.sleep(0.3)
        assert connection.usable
        await exchange(connection)
        connection.release()
        assert engine.connections_made == 1


async def test_a_connection_that_the_engine_closed_is_not_used_again(engine: FakeEngine) -> None:
    async with upstream_to(engine.url) as upstream:
        (await upstream.open()).release()
        await engine.replace()
        await until(lambda: upstream.open_connections == 0)
        (await upstream.open()).release()
        assert (len(engine.asked("/props")), engine.connections_made) == (2, 2)


async def test_words_out_of_turn_end_a_connection(engine: FakeEngine) -> None:
    """What an engine says unasked could become the answer to somebody's next request."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(
            "/x", raw(OK + b"Content-Length: 2\r\n\r\nok", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad")
        )
        assert (await exchange(connection, "/x"))[1] == b"ok"
        connection.release()
        await until(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize(
    "extra", [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", b"bad", b"\x00", b"HTTP/1.1 100 C\r\n\r\n"]
)
async def test_bytes_behind_an_answer_are_nobodys(engine: FakeEngine, extra: bytes) -> None:
    """Also in the same packet: the answer is what its length says, and the connection is not used again."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script("/x", raw(OK + b"Content-Length: 2\r\n\r\nok" + extra))
        assert (await exchange(connection, "/x"))[1] == b"ok"
        assert not connection.usable
        connection.release()


@pytest.mark.parametrize(
    "reply",
    [
        fault.connection_close,
        fault.until_close(b"{}"),
        fault.whole("400 Bad Request", {}),
        fault.flood(1),
        raw(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
        raw(OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ],
)
async def test_a_connection_that_ends_with_its_answer_is_not_pooled(engine: FakeEngine, reply: Reply) -> None:
    """Whether the head says so, or not: behind an event stream llama-server closes without a word."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, reply)
        await exchange(connection)
        assert not connection.usable
        connection.release()
        await until(lambda: upstream.open_connections == 0)


# -- the hello


async def test_a_hello_that_is_refused_refuses_the_connection(engine: FakeEngine) -> None:
    async def loading(_: Connection) -> EngineProfile:
        raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=2))

    async with upstream_to(engine.url, loading) as upstream:
        with pytest.raises(Refused) as caught:
            await upstream.open()
        assert caught.value.refusal.reason is Reason.ENGINE_LOADING
        await until(lambda: engine.open_connections == 0)


@pytest.mark.parametrize(
    "reply", [fault.reset_before_head, fault.close_before_head, fault.not_http, fault.huge_head, fault.cut_whole]
)
async def test_a_hello_that_breaks_is_an_engine_that_cannot_be_reached(engine: FakeEngine, reply: Reply) -> None:
    engine.script("/props", reply)
    async with upstream_to(engine.url) as upstream:
        with pytest.raises(Refused) as caught:
            await upstream.open()
        assert (caught.value.refusal.reason, caught.value.refusal.retry_after_s) == (Reason.ENGINE_UNREACHABLE, 2)
        await until(lambda: upstream.open_connections == engine.open_connections == 0)


async def test_a_defect_in_the_hello_closes_the_connection(engine: FakeEngine) -> None:
    async def fail(_: Connection) -> EngineProfile:
        raise ZeroDivisionError

    async with upstream_to(engine.url, fail) as upstream:
        with pytest.raises(ZeroDivisionError):
            await upstream.open()
        await until(lambda: upstream.open_connections == engine.open_connections == 0)


async def test_a_cancel_during_the_hello_closes_the_connection(engine: FakeEngine) -> None:
    engine.script("/props", fault.stall)
    async with upstream_to(engine.url) as upstream:
        opening = asyncio.create_task(upstream.open())
        await until(lambda: len(engine.requests) == 1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await until(lambda: upstream.open_connections == engine.open_connections == 0)


async def test_a_hello_may_use_the_first_connection_up(engine: FakeEngine) -> None:
    """llama-server without /slots answers 501 and closes: the engine is there all the same."""
    engine.script("/props", fault.connection_close)
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        assert connection.usable
        await exchange(connection)
        connection.release()
        assert len(engine.asked("/props")) == 2


async def test_an_engine_that_never_introduced_itself_has_no_profile() -> None:
    with pytest.raises(RuntimeError, match="introduced"):
        _ = Connection(Upstream("http://x", hello)).profile


async def test_nobody_listens() -> None:
    async with upstream_to("http://127.0.0.1:1") as upstream:
        with pytest.raises(Refused) as caught:
            await upstream.open()
        assert caught.value.refusal.reason is Reason.ENGINE_UNREACHABLE


async def test_a_connection_that_is_never_made_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    async with upstream_to("http://127.0.0.1:1") as upstream:
        with pytest.raises(Refused) as caught:
            await upstream.open()
        assert caught.value.refusal.reason is Reason.ENGINE_UNREACHABLE


async def test_a_server_that_closes_what_it_accepts_leaves_nothing_open() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with upstream_to(f"http://127.0.0.1:{port}") as upstream:
        for _ in range(20):
            with pytest.raises(Refused):
                await upstream.open()
        assert upstream.open_connections == 0
    server.close()
    await asyncio.sleep(0.05)


# -- faults before and after the head


BEFORE_THE_HEAD = {
    "reset": fault.reset_before_head,
    "closed": fault.close_before_head,
    "smtp": fault.not_http,
    "tls": raw(b"\x15\x03\x01\x00\x02\x02\x28"),
    "no status": raw(b"HTTP/1.1 \r\n\r\n"),
    "huge head": fault.huge_head,
    "endless header": raw(OK + b"X: ", *[b"x" * 50_000] * 4),
    "endless 1xx": raw(*[b"HTTP/1.1 100 Continue\r\n\r\n" * 1000] * 4),
    "switched protocols": raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"),
    "two lengths": raw(OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab"),
    "half a head": raw(OK + b"Content-Le", close=True),
}


@pytest.mark.parametrize("kind", BEFORE_THE_HEAD)
async def test_a_fault_before_the_head_fails_the_send(engine: FakeEngine, kind: str) -> None:
    """The request may have run: `sent` is true. And the connection is gone."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, BEFORE_THE_HEAD[kind])
        with pytest.raises(LineFailed) as caught:
            await connection.send("POST", CHAT, {}, b"{}")
        assert caught.value.sent
        connection.release()
        await until(lambda: upstream.open_connections == engine.open_connections == 0)


AFTER_THE_HEAD: dict[str, tuple[Reply, bytes]] = {
    "reset": (fault.reset_after_head, b""),
    "cut": (fault.cut_whole, b'{"choices":['),
    "cut in a chunk": (fault.cut_in_chunk, fault.DELTA + fault.DELTA[:20]),
    "bad chunk size": (raw(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n"), b"ok"),
    "no last chunk": (raw(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", close=True), b"ok"),
}


@pytest.mark.parametrize("kind", AFTER_THE_HEAD)
async def test_a_fault_after_the_head_fails_the_read(engine: FakeEngine, kind: str) -> None:
    """A cut answer is never taken for a whole one; what came before the cut is not lost."""
    reply, before = AFTER_THE_HEAD[kind]
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, reply)
        assert (await connection.send("POST", CHAT, {}, b"{}")).status == 200
        got: list[bytes] = []
        with pytest.raises(LineFailed) as caught:
            await collect(connection, got)
        assert caught.value.sent
        assert b"".join(got) == before
        with pytest.raises(LineFailed):
            await connection.read()
        connection.release()
        await until(lambda: upstream.open_connections == engine.open_connections == 0)


async def test_a_request_that_was_certainly_not_sent_says_so(engine: FakeEngine) -> None:
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        await engine.stop()
        await until(lambda: upstream.open_connections == 0)
        with pytest.raises(LineFailed) as caught:
            await connection.send("POST", CHAT, {}, b"{}")
        assert not caught.value.sent
        connection.release()
        with pytest.raises(LineFailed):
            await Connection(upstream).send("GET", "/", {}, b"")


async def test_informational_answers_are_passed_over(engine: FakeEngine) -> None:
    """Their headers are not the answer's."""
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nContent-Type: text/plain\r\n\r\n"
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script("/health", fault.informational(b"HTTP/1.1 100 Continue\r\n\r\n", hint, hint))
        head = await connection.send("GET", "/health", {}, b"")
        assert (head.status, head.get("link")) == (200, None)
        assert head.get("content-type") == "application/json; charset=utf-8"
        assert await read_all(connection) == b'{"status":"ok"}'
        assert connection.usable
        connection.release()


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 1_000_000])
async def test_an_answer_without_a_length_ends_with_the_connection(engine: FakeEngine, body: bytes) -> None:
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, fault.until_close(body))
        assert (await exchange(connection))[1] == body
        assert not connection.usable
        connection.release()


async def test_an_answer_without_a_length_that_is_reset_is_cut(engine: FakeEngine) -> None:
    async def reset(exchange: fault.Exchange) -> None:
        await exchange.write(OK + b"\r\nhalf")
        await asyncio.sleep(0.05)
        exchange.link.reset()

    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, reset)
        with pytest.raises(LineFailed, match="ConnectionResetError"):
            await exchange(connection)
        connection.release()


async def test_an_answer_without_a_length_that_kvgate_closes_is_no_whole_one(engine: FakeEngine) -> None:
    async def begin(exchange: fault.Exchange) -> None:
        await exchange.write(OK + b"\r\nhalf")
        await fault.stall(exchange)

    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, begin)
        await connection.send("POST", CHAT, {}, b"{}")
        assert await connection.read() == b"half"
        reading = asyncio.create_task(connection.read())
        await asyncio.sleep(0)
        await upstream.close()
        with pytest.raises(LineFailed, match="closed by kvgate"):
            await reading


# -- pace and hang-up


async def test_a_slow_reader_holds_the_engine_back(engine: FakeEngine) -> None:
    """Twenty megabytes for a client that reads nothing: a bounded part waits here, the rest at the engine."""
    event = b"data: " + b"x" * 20_000 + b"\n\n"
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, fault.flood(1000, event))
        await connection.send("POST", CHAT, {}, b"{}")
        assert connection._transport is not None
        await until(lambda: not connection._transport.is_reading())  # type: ignore[union-attr]
        await asyncio.sleep(0.2)
        assert connection._buffered <= BUFFER_BYTES_MAX + 256 * 1024
        got = 0
        while data := await connection.read():
            got += len(data)
        assert got == 1000 * len(event) + len(b"data: [DONE]\n\n")
        connection.release()


async def test_release_in_mid_answer_hangs_up_at_once(engine: FakeEngine) -> None:
    """The engine hears of it without waiting for anything, and stops working for nobody."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, fault.stall_in_stream)
        await connection.send("POST", CHAT, {}, b"{}")
        await connection.read()
        connection.release()
        (request,) = engine.asked(CHAT)
        async with asyncio.timeout(5):
            await request.hung_up.wait()
        await until(lambda: upstream.open_connections == 0)


async def test_release_in_the_middle_of_a_whole_answer_hangs_up_too(engine: FakeEngine) -> None:
    """The rest of it would be the beginning of the next request's answer."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, raw(OK + b"Content-Length: 500\r\n\r\n{"))
        await connection.send("POST", CHAT, {}, b"{}")
        await connection.read()
        connection.release()
        await until(lambda: upstream.open_connections == engine.open_connections == 0)


async def test_release_of_a_flood_hangs_up_too(engine: FakeEngine) -> None:
    """Also while reading is paused."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, fault.flood(100_000))
        await connection.send("POST", CHAT, {}, b"{}")
        await until(lambda: connection._paused)
        connection.release()
        await until(lambda: engine.open_connections == 0)


@pytest.mark.parametrize("reply", [fault.stall, fault.stall_in_stream])
async def test_a_cancelled_wait_leaves_nothing_behind(engine: FakeEngine, reply: Reply) -> None:
    """In the wait for the head, or for more of the body."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, reply)

        async def read_to_the_end() -> None:
            await connection.send("POST", CHAT, {}, b"{}")
            await collect(connection, [])

        reading = asyncio.create_task(read_to_the_end())
        await until(lambda: len(engine.asked(CHAT)) == 1)
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        connection.release()
        async with asyncio.timeout(5):
            await engine.asked(CHAT)[0].hung_up.wait()


async def test_a_failure_that_nobody_waits_for_is_no_warning(engine: FakeEngine) -> None:
    """The head's waiter was cancelled, and the connection breaks a moment later."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, fault.stall)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.send("POST", CHAT, {}, b"{}")
        await engine.stop()
        await until(lambda: upstream.open_connections == 0)
        connection.release()


async def test_a_failure_and_a_cancel_in_one_moment_are_no_warning() -> None:
    """The head's waiter has its exception, and is cancelled before it can look at it."""
    connection = Connection(Upstream("http://x", hello))
    connection.connection_made(_Transport())
    sending = asyncio.create_task(connection.send("GET", "/", {}, b""))
    await asyncio.sleep(0)
    connection.connection_lost(OSError())
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_an_answer_released_with_unread_bytes_is_not_pooled(engine: FakeEngine) -> None:
    """They would be the beginning of the next request's answer."""
    async with upstream_to(engine.url) as upstream:
        connection = await upstream.open()
        engine.script(CHAT, fault.whole("200 OK", {"x": 1}))
        await connection.send("POST", CHAT, {}, b"{}")
        await until(lambda: connection._complete)
        connection.release()
        await until(lambda: upstream.open_connections == 0)


async def test_closing_closes_what_is_in_use_too(engine: FakeEngine) -> None:
    async with upstream_to(engine.url) as upstream:
        idle, used = await upstream.open(), await upstream.open()
        idle.release()
        await upstream.close()
        assert upstream.open_connections == 0
        with pytest.raises(LineFailed):
            await used.send("POST", CHAT, {}, b"{}")
        used.release()
        await until(lambda: engine.open_connections == 0)


# -- bytes, wherever they are cut


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


WIRE = (
    b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\nX-Accel-Buffering: no\r\n\r\n"
    b"5;ext=1\r\nhello\r\n1\r\n!\r\n0\r\nX-Trailer: 1\r\n\r\n"
)


async def test_an_answer_may_come_in_any_pieces() -> None:
    """Cut at every byte, and into single bytes: the same head, the same body, the same end."""
    cuts = [[at] for at in range(len(WIRE))] + [list(range(len(WIRE)))]
    for places in cuts:
        connection = Connection(Upstream("http://x", hello))
        transport = _Transport()
        connection.connection_made(transport)
        sending = asyncio.create_task(connection.send("GET", "/", {}, b""))
        await asyncio.sleep(0)
        for begin, end in zip([0, *places], [*places, len(WIRE)], strict=True):
            if begin < end:
                connection.data_received(WIRE[begin:end])
        head = await sending
        assert (head.status, head.get("x-accel-buffering"), head.get("link")) == (200, "no", None)
        assert await read_all(connection) == b"hello!"
        assert connection.usable
        assert not transport.aborted


def test_a_head_is_small_against_what_may_wait() -> None:
    """The bounds stand to each other as the text says."""
    assert HEAD_BYTES_MAX < BUFFER_BYTES_MAX


# -- an engine that falls silent


def paced(*pauses_s: float, comment: bool = False) -> Reply:
    """A stream with a pause before each of its events, or before each of its comments."""

    async def reply(exchange: fault.Exchange) -> None:
        await exchange.begin_stream()
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            await exchange.chunk(b": ping\n\n" if comment else fault.DELTA)
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end_stream()

    return reply


async def test_silence_in_mid_answer_is_a_stall(engine: FakeEngine) -> None:
    """After `idle_timeout_s`, and the engine sees a hang-up."""
    engine.script(CHAT, fault.stall_in_stream)
    async with upstream_to(engine.url) as upstream:
        upstream.idle_timeout_s = 0.2
        connection = await upstream.open()
        parts: list[bytes] = []
        await connection.send("POST", CHAT, {}, BODY)
        async with asyncio.timeout(10):
            with pytest.raises(LineStalled, match=r"sent nothing for 0\.2 s in mid-answer"):
                await collect(connection, parts)
        assert parts == [fault.DELTA]
        connection.release()
        async with asyncio.timeout(10):
            await engine.asked(CHAT)[0].hung_up.wait()


async def test_a_whole_answer_that_stops_in_the_middle_stalls_too(engine: FakeEngine) -> None:
    engine.script(CHAT, raw(OK + b"Content-Length: 50\r\n\r\n", b"half"))
    async with upstream_to(engine.url) as upstream:
        upstream.idle_timeout_s = 0.1
        connection = await upstream.open()
        async with asyncio.timeout(10):
            with pytest.raises(LineStalled):
                await exchange(connection)
        connection.release()


@pytest.mark.parametrize("comment", [False, True])
async def test_an_answer_may_take_as_long_as_it_takes(engine: FakeEngine, comment: bool) -> None:
    """Each sign of life counts, comments too; there is no limit in all."""
    engine.script(CHAT, paced(*[0.15] * 8, comment=comment))
    async with upstream_to(engine.url) as upstream:
        upstream.idle_timeout_s = 1.0
        connection = await upstream.open()
        _, body = await exchange(connection)
        assert body.endswith(b"[DONE]\n\n")
        connection.release()


async def test_a_long_silence_before_the_answer_is_a_prefill(engine: FakeEngine) -> None:
    """Before the head, and between the head and the first byte, nothing is cut by the clock."""

    async def slow(exchange: fault.Exchange) -> None:
        await asyncio.sleep(0.3)
        await exchange.begin_stream()
        await asyncio.sleep(0.3)
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end_stream()

    engine.script(CHAT, slow)
    async with upstream_to(engine.url) as upstream:
        upstream.idle_timeout_s = 0.1
        connection = await upstream.open()
        assert (await exchange(connection))[1] == b"data: [DONE]\n\n"
        connection.release()


async def test_a_slow_client_is_no_silent_engine(engine: FakeEngine) -> None:
    """While its answer waits to be read the engine is not listened to, so its silence says nothing."""
    engine.script(CHAT, fault.flood(20_000))
    async with upstream_to(engine.url) as upstream:
        upstream.idle_timeout_s = 0.1
        connection = await upstream.open()
        await connection.send("POST", CHAT, {}, BODY)
        await until(lambda: connection._paused)
        await asyncio.sleep(0.4)
        body = await read_all(connection)
        assert body.count(fault.DELTA) == 20_000
        connection.release()


@pytest.mark.parametrize("reply", [fault.stall, paced(60)], ids=["no head", "no body"])
async def test_an_engine_that_answers_nobody_is_given_up(engine: FakeEngine, reply: Reply) -> None:
    """Who waits for the beginning of an answer is told; who has some of it has a timer of its own."""
    engine.script(CHAT, fault.stall_in_stream, reply)
    async with upstream_to(engine.url) as upstream:
        begun, silent, idle = await upstream.open(), await upstream.open(), await upstream.open()
        idle.release()
        await begun.send("POST", CHAT, {}, BODY)
        assert await begun.read() == fault.DELTA
        waiting = asyncio.create_task(exchange(silent))
        await until(lambda: len(engine.asked(CHAT)) == 2)
        upstream.end_silent("not even /health")
        async with asyncio.timeout(10):
            with pytest.raises(LineStalled, match="not even /health"):
                await waiting
        assert idle.usable
        assert begun._lost is None
        for connection in (begun, silent):
            connection.release()


async def test_no_timer_outlives_its_answer(engine: FakeEngine) -> None:
    """A connection that is idle, or closed, is not given up for the silence of its last answer."""
    engine.script(CHAT, fault.whole("200 OK", {}), fault.stall_in_stream)
    async with upstream_to(engine.url) as upstream:
        upstream.idle_timeout_s = 0.05
        connection = await upstream.open()
        await exchange(connection)
        connection.release()
        await asyncio.sleep(0.15)
        assert connection.usable
        again = await upstream.open()
        assert again is connection
        await again.send("POST", CHAT, {}, BODY)
        again.release()
        assert again._silence is None


async def test_after_a_retirement_everybody_is_asked_who_they_are(engine: FakeEngine) -> None:
    """What is idle is closed; what is in use ends its exchange, and is not used again."""
    async with upstream_to(engine.url) as upstream:
        used, idle = await upstream.open(), await upstream.open()
        idle.release()
        upstream.retire()
        await until(lambda: upstream.open_connections == 1)
        assert (await exchange(used))[0].status == 200
        used.release()
        assert await upstream.open() is not used
    assert len(engine.asked("/props")) == 3
