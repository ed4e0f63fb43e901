"""The ledger's own connection to one server: pipelined, in order, and nothing is ever sent twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as StoreConnectionError

from kvgate.store.client import Server, connect, scripting
from kvgate.store.script_line import LINE_BYTES_MAX, Address, Replies, ScriptLine, command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvgate.store.embedded import EmbeddedValkey

ECHO = "return ARGV[1]"


@pytest.fixture
async def line(client: Any) -> ScriptLine:
    found = scripting(client)
    assert isinstance(found, ScriptLine)
    return found


# -- with a real server


async def test_each_gets_its_own_answer(line: ScriptLine) -> None:
    """Of any length, and of any text: three hundred at once, on one connection."""
    texts = [f"{at} \r\n$5\r\n ü {'x' * (at * 97 % 70_000)}" for at in range(300)]
    found = await asyncio.gather(*(line.eval(ECHO, 1, "{k}", text) for text in texts))
    assert found == [text.encode() for text in texts]


async def test_a_script_is_known_once_it_ran(line: ScriptLine, client: Any) -> None:
    digest = "ffffffffffffffffffffffffffffffffffffffff"
    with pytest.raises(NoScriptError):
        await line.evalsha(digest, 1, "{k}", "x")
    known = (await client.script_load(ECHO)) if isinstance(client, Server) else ""
    assert await line.evalsha(known, 1, "{k}", "x") == b"x"
    assert await line.eval("return false", 1, "{k}") is None


async def test_a_scripts_failure_is_its_callers_alone(line: ScriptLine) -> None:
    """The connection goes on, and what stood behind is answered."""
    answers = await asyncio.gather(
        line.eval("error('no')", 1, "{k}"), line.eval(ECHO, 1, "{k}", "behind"), return_exceptions=True
    )
    assert isinstance(answers[0], ResponseError)
    assert answers[1] == b"behind"


async def test_a_lost_connection_is_told_to_all_and_made_anew(
    line: ScriptLine, client: Any, store: EmbeddedValkey
) -> None:
    """Whether it was done is unknown: it is never sent again."""
    write = "return tostring(redis.call('INCR', KEYS[1]))"
    assert await line.eval(write, 1, "{k}") == b"1"
    await client.client_pause(60_000, all=False)
    waiting = asyncio.gather(*(line.eval(write, 1, "{k}") for _ in range(3)), return_exceptions=True)
    while int((await client.info("clients"))["blocked_clients"]) < 1:  # noqa: ASYNC110 - a server tells of no event
        await asyncio.sleep(0.01)
    assert await client.client_kill_filter(_type="normal", skipme=True) >= 1
    assert {type(found) for found in await waiting} == {StoreConnectionError}
    await client.client_unpause()
    assert await line.eval(write, 1, "{k}") == b"2"
    await store.stop()
    for _ in range(2):  # the first may find the old connection, the second finds nobody
        with pytest.raises((RedisError, OSError)):
            await line.eval(ECHO, 1, "{k}", "x")
    await store.start()
    assert await line.eval(ECHO, 1, "{k}", "back") == b"back"


async def test_a_password_and_a_database_are_the_urls(client: Any) -> None:
    """A wrong one is refused, and says so."""
    await client.config_set("requirepass", "s3cret")
    path = client.connection_pool.connection_kwargs["path"]
    right = connect(f"unix://:s3cret@{path}?db=3")
    wrong = connect(f"unix://:other@{path}")
    none = connect(f"unix://{path}")
    try:
        await scripting(right).eval("redis.call('SET', KEYS[1], '1') return '1'", 1, "{k}")
        assert await right.exists("{k}") == 1  # the same database
        for refused in (wrong, none):
            with pytest.raises((AuthenticationError, ResponseError)):
                await scripting(refused).eval(ECHO, 1, "{k}", "x")
    finally:
        for one in (right, wrong, none):
            await one.aclose()


# -- with a server that does what it should not


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Any], Awaitable[ScriptLine]]]:
    """A line to a server that does this with each connection."""
    servers: list[asyncio.Server] = []
    lines: list[ScriptLine] = []

    async def one(served: Any) -> ScriptLine:
        servers.append(await asyncio.start_server(served, "127.0.0.1", 0))
        port = servers[-1].sockets[0].getsockname()[1]
        client = connect(f"redis://127.0.0.1:{port}")
        lines.append(scripting(client))
        return lines[-1]

    yield one
    for line in lines:
        await line.aclose()
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b":1\r\n", InvalidResponse),
        (b"$x\r\n", InvalidResponse),
        (b"$99999999999\r\n", InvalidResponse),
        (b"+" + b"x" * (LINE_BYTES_MAX + 1), InvalidResponse),
        (b"$1\r\nx\r\n" * 3, InvalidResponse),  # three answers to two
        (b"$5\r\nhal", StoreConnectionError),
        (b"", StoreConnectionError),
    ],
)
async def test_what_is_no_answer_ends_the_connection(serve: Any, reply: bytes, problem: type[Exception]) -> None:
    """Whoever waited is told, and the next command is sent on a new connection, not again."""
    seen: list[bytes] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(65536))
        writer.write(reply if len(seen) == 1 else b"$2\r\nok\r\n")
        if reply in (b"", b"$5\r\nhal") and len(seen) == 1:
            writer.close()
        else:
            await reader.read()
            writer.close()

    line = await serve(served)
    first = asyncio.gather(line.eval(ECHO, 1, "k", "a"), line.eval(ECHO, 1, "k", "b"), return_exceptions=True)
    if reply.startswith(b"$1"):
        assert list(await first) == [b"x", b"x"]
    else:
        assert [type(found) for found in await first] == [problem] * 2
    assert await line.eval(ECHO, 1, "k", "c") == b"ok"
    assert seen == [_asked("a") + _asked("b"), _asked("c")]


def _asked(text: str) -> bytes:
    return command("EVAL", ECHO, "1", "k", text)


async def test_who_gives_up_ends_a_connection_that_hangs(serve: Any) -> None:
    """What the server says later is nobody's; the next one connects anew."""
    connections = 0

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(65536)
        if connections > 1:
            writer.write(b"$2\r\nok\r\n")
        await reader.read()
        writer.close()

    line = await serve(served)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await line.eval(ECHO, 1, "k", "a")
    assert await line.eval(ECHO, 1, "k", "a") == b"ok"
    assert connections == 2


# -- the parts


TEXTS = st.one_of(st.none(), st.binary(max_size=40), st.sampled_from([b"\r\n", b"$-1\r\n", b"+OK"]))


@given(st.lists(TEXTS, max_size=6), st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_replies_are_the_same_however_they_are_split(texts: list[bytes | None], cuts: list[int]) -> None:
    wire = b"".join(b"$-1\r\n" if text is None else b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)
    replies, found, at = Replies(), [], 0
    while at < len(wire):
        size = cuts[at % len(cuts)]
        found += replies.feed(wire[at : at + size])
        at += size
    assert found == texts


def test_an_address_is_what_the_url_says() -> None:
    client: Any = connect("redis://me:p%40ss@example.org:7000/2")
    assert Address.of(client.connection_pool.connection_kwargs) == Address("example.org", 7000, None, "me", "p@ss", 2)
    assert [bytes(part) for part in Address.of({"password": "x", "db": 1}).hello()] == [
        command("AUTH", "x"),
        command("SELECT", "1"),
    ]
    assert list(Address.of({}).hello()) == []


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:6379", "cluster://127.0.0.1:1", "sentinel://127.0.0.1:1/kv"])
def test_the_other_topologies_keep_the_general_client(url: str) -> None:
    client = connect(url)
    assert scripting(client) is client
