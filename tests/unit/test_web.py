"""What a tenant's listener lets in and what it says: exact paths, one key, a bounded body, and always JSON."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import logging
import re
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import pytest
from aiohttp import web

from kvgate.core.ask import Usage
from kvgate.core.counting import Proof
from kvgate.core.ledger import Denied
from kvgate.core.reason import Reason, refusal
from kvgate.core.replay import Asked
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant
from kvgate.gate import Gate
from kvgate.log import JsonLines, RequestLog
from kvgate.ports import Head
from kvgate.web import HEADERS, Front, WebSettings, served_routes
from kvgate.web import server as module
from tests.unit.doubles import (
    EngineDouble,
    LedgerDouble,
    LineDouble,
    ManualClock,
    ObserverDouble,
    TenantsDouble,
    chat,
    forever,
    profile,
    refused,
    tenant,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvgate.ports import Counted, ReadRequest, RequestRecord

KEY = "sk-alpha-secret-0451"
OTHER_KEY = "sk-beta-secret-0451"
PROMPT = "the launch code is 0000"
CHAT = "/v1/chat/completions"
AUTH = f"Authorization: Bearer {KEY}\r\n"
SETTINGS = WebSettings(body_bytes_max=4096, body_timeout_s=5, write_timeout_s=5, anonymous_tenant=None)
ANSWER = json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}},
    }
).encode()
SSE = Head(200, (("content-type", "text/event-stream"), ("x-accel-buffering", "no")))
DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass
class Answer:
    """One answer as it stood on the wire, and what came behind it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    rest: bytes = b""

    def get(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, f"{name} stands there twice"
        return values[0] if values else None

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Client:
    """A client that sends just these bytes."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self) -> Answer:
        """One answer; a chunked one with its framing taken off."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            lines = [line.partition(":") for line in head[1:-2]]
            answer = Answer(int(head[0].split()[1]), [(name.lower(), value.strip()) for name, _, value in lines], b"")
            if answer.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    answer.body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readexactly(2)
            elif (length := answer.get("content-length")) is not None:
                answer.body = await self.reader.readexactly(int(length))
            elif answer.status >= 200 and answer.status != 204:
                answer.body = await self.reader.read()
            return answer

    async def until_closed(self) -> bytes:
        async with asyncio.timeout(20):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@dataclass
class Listener:
    """A front on a real socket, with doubles behind it."""

    front: Front
    engine: EngineDouble
    ledger: LedgerDouble
    observer: ObserverDouble
    clock: ManualClock
    port: int = 0

    @property
    def records(self) -> list[RequestRecord]:
        return self.observer.records

    async def raw(self, data: bytes) -> Answer:
        """Send bytes as they are, and read one answer and all that comes behind it until the connection ends."""
        async with Client(self.port) as client:
            client.send(data)
            answer = await client.receive()
            answer.rest = await client.until_closed()
            return answer

    async def ask(
        self, path: str = CHAT, body: bytes = b"", *, method: str = "POST", headers: str = AUTH, version: str = "1.1"
    ) -> Answer:
        """One request on a connection of its own."""
        async with Client(self.port) as client:
            client.send(request(path, body, method=method, headers=headers, version=version))
            return await client.receive()


def request(
    path: str = CHAT, body: bytes = b"", *, method: str = "POST", headers: str = AUTH, version: str = "1.1"
) -> bytes:
    length = "" if "transfer-encoding" in headers.lower() else f"Content-Length: {len(body)}\r\n"
    return f"{method} {path} HTTP/{version}\r\nHost: gate\r\n{headers}{length}\r\n".encode("latin-1") + body


@dataclass
class Parts:
    """What a listener is made of, where a test wants something else."""

    engine: EngineDouble = field(default_factory=EngineDouble)
    ledger: LedgerDouble = field(default_factory=LedgerDouble)
    tenants: dict[str, Tenant] = field(
        default_factory=lambda: {sha256(KEY): Tenant("alpha"), sha256(OTHER_KEY): Tenant("beta")}
    )
    settings: WebSettings = SETTINGS


@contextlib.asynccontextmanager
async def listening(parts: Parts | None = None) -> AsyncIterator[Listener]:
    parts = parts or Parts()
    if parts.engine.answer is LineDouble:
        parts.engine.answer = lambda found: LineDouble(found, pieces=[ANSWER])
    observer, clock = ObserverDouble(), ManualClock()
    ids = iter(range(1, 1000))
    front = Front(
        Gate(parts.engine, parts.ledger, new_id=lambda: f"lease-{next(ids)}"),
        parts.engine,
        tenants=TenantsDouble(parts.tenants),
        routes=served_routes(),
        observer=observer,
        clock=clock,
        settings=parts.settings,
    )
    runner = web.ServerRunner(front.server(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Listener(front, parts.engine, parts.ledger, observer, clock, runner.addresses[0][1])
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture) -> Any:
    """Whatever a test here does: no key, and nothing of a prompt, stands in any log at any level."""
    caplog.set_level(logging.DEBUG)
    yield
    records = caplog.get_records("call")
    text = "".join(f"{logging.Formatter().format(record)} {vars(record)}" for record in records)
    assert "0451" not in text
    assert "launch code" not in text


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with listening() as found:
        yield found


def assert_refused(answer: Answer, status: int, code: str) -> None:
    """OpenAI's error form, and the headers that every answer has."""
    assert (answer.status, answer.error["code"]) == (status, code), answer
    assert set(answer.error) >= {"message", "type", "param", "code"}
    assert answer.get("content-type") == "application/json"
    assert answer.get("server") == "kvgate"
    assert answer.get("x-request-id")
    assert answer.get("x-kvgate-reason") == answer.error["reason"]
    assert b"0451" not in answer.body
    assert b"launch code" not in answer.body


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the other side of a socket tells of no event
            await asyncio.sleep(0.005)


# -- an ordinary request


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", f"{CHAT}?api-version=1", f"{CHAT}?"])
async def test_a_served_path_is_answered(listener: Listener, path: str) -> None:
    """The twin without /v1 goes to the same place under the same check; a query is nobody's."""
    answer = await listener.ask(path, chat(PROMPT, max_tokens=7))
    assert (answer.status, answer.body) == (200, ANSWER)
    assert answer.get("content-type") == "application/json"
    assert answer.get("server") == "kvgate"
    assert {name: answer.get(name) for name in HEADERS if answer.get(name) and name != "x-request-id"} == {
        "x-kvgate-verdict": "admit",
        "x-kvgate-prompt-tokens": "10",
        "x-kvgate-count": "engine",
        "x-kvgate-output-limit": "7",
        "x-kvgate-usable-generation": "1014",
        "x-kvgate-n-ctx-slot": "1024",
        "x-kvgate-kv-type": "unknown",
        "x-kvgate-engine-build": "b1",
        "x-kvgate-reuse": "off",
        "x-kvgate-queue-ms": "250",
    }
    (line,) = listener.engine.lines
    ((method, engine_path, headers, body),) = line.sent
    assert (method, engine_path, headers) == ("POST", CHAT, {"Content-Type": "application/json"})
    assert json.loads(body)["max_tokens"] == 7
    assert listener.ledger.told[-1] == ("settle ended", "lease-1")


async def test_a_stream_is_answered_as_one(listener: Listener) -> None:
    listener.engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA, DONE])
    answer = await listener.ask(body=chat(stream=True))
    assert (answer.status, answer.body) == (200, DELTA + DONE)
    assert (answer.get("content-type"), answer.get("x-accel-buffering")) == ("text/event-stream", "no")
    assert answer.get("x-kvgate-verdict") == "admit"
    assert listener.records[0].stream


async def test_a_client_of_http_1_0_gets_its_stream_too(listener: Listener) -> None:
    listener.engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA, DONE])
    answer = await listener.ask(body=chat(stream=True), version="1.0")
    assert (answer.status, answer.body, answer.get("transfer-encoding")) == (200, DELTA + DONE, None)


async def test_a_connection_is_kept_for_the_next_request(listener: Listener) -> None:
    """After an answer and after a refusal alike."""
    async with Client(listener.port) as client:
        for path, status in ((CHAT, 200), ("/nothing", 403), (CHAT, 200)):
            client.send(request(path, chat()))
            assert (await client.receive()).status == status


async def test_requests_in_one_packet_are_answered_in_order(listener: Listener) -> None:
    async with Client(listener.port) as client:
        client.send(b"".join(request(path, chat()) for path in (CHAT, "/nothing", CHAT)))
        assert [(await client.receive()).status for _ in range(3)] == [200, 403, 200]


# -- paths and methods


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat%2Fcompletions",
        "/%761/chat/completions",
        "/v1/chat/completion%73",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions;a=1",
        "/v1/./chat/completions",
        "/v1/x/../chat/completions",
        "/v1/chat/completions/.",
        "/v1/chat/completions%00",
        "/v1/chat/completions%20",
        "/v1/chat/completions%3f",
        "/v1/chat/completions#x",
        "/v1\\chat\\completions",
        "/V1/chat/completions",
        "/v1/Chat/Completions",
        "http://gate/v1/chat/completions",
        "http://gate/slots",
        "/",
        "/slots",
        "/slots/0?action=save",
        "/v1/slots",
        "/v1/props",
        "/props/",
        "/metrics",
        "/health",
        "/lora-adapters",
        "/models/load",
        "/tools",
        "/cors-proxy",
        "/v1/completion",
        "/v1/tokenize",
        "/tokenize/",
        "/v1/audio/transcriptions",
        "/v1/models/",
        "/<script>",
    ],
)
async def test_any_other_spelling_of_a_path_is_refused(listener: Listener, path: str) -> None:
    """The engine decodes before it routes; here a path is served as it is spelled, or not at all."""
    for method in ("POST", "GET"):
        answer = await listener.ask(path, chat(), method=method)
        assert_refused(answer, 403, "path_not_served")
        assert "reference" in answer.error["message"]
    assert listener.engine.counted == []
    assert {(record.path, record.tenant, record.dialect, record.status) for record in listener.records} == {
        ("-", "-", "-", 403)
    }


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE"])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/responses/input_tokens"])
async def test_another_method_is_refused(listener: Listener, path: str, method: str) -> None:
    """And the right one is named, in the sentence and where HTTP wants it."""
    answer = await listener.ask(path, chat(), method=method)
    assert_refused(answer, 405, "method_not_allowed")
    assert answer.get("allow") == "POST, OPTIONS"
    assert "POST" in answer.error["message"]
    assert (listener.engine.counted, listener.engine.controlled) == ([], [])


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/props"])
async def test_what_is_read_cannot_be_written(listener: Listener, path: str) -> None:
    """`POST /props` changes an engine: it belongs to the operator."""
    answer = await listener.ask(path, b'{"chat_template": "x"}')
    assert (answer.status, answer.get("allow")) == (405, "GET, OPTIONS")
    assert answer.get("x-kvgate-reason") == "method_not_allowed"


async def test_a_head_request_is_refused_without_a_body(listener: Listener) -> None:
    async with Client(listener.port) as client:
        client.send(request(method="HEAD"))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405")
        assert b"\r\nallow: POST, OPTIONS\r\n" in head.lower().replace(b"post, options", b"POST, OPTIONS")
        client.send(request(body=chat()))
        assert (await client.receive()).status == 200


# -- keys


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ("", "You did not provide"),
        ("Authorization: \r\n", "not known"),
        ("Authorization: Bearer\r\n", "not known"),
        ("Authorization: Bearer \r\n", "not known"),
        (f"Authorization: {KEY}\r\n", "not known"),
        (f"Authorization: Basic {KEY}\r\n", "not known"),
        (f"Authorization: Bearer {KEY}x\r\n", "not known"),
        (f"Authorization: Bearer {KEY.upper()}\r\n", "not known"),
        (f"x-api-key: {KEY},{KEY}\r\n", "not known"),
        ("x-api-key: \r\n", "not known"),
        ("x-api-key: \xff\xfe\r\n", "not known"),
        (f"{AUTH}x-api-key: {OTHER_KEY}\r\n", "not known"),
        (f"{AUTH}x-api-key: \r\n", "not known"),
        (f"{AUTH}Authorization: Bearer {OTHER_KEY}\r\n", "not known"),
        (f"{AUTH}Authorization: Basic x\r\n", "not known"),
        (f"x-api-key: {KEY}\r\nX-API-Key: {OTHER_KEY}\r\n", "not known"),
        (f"X-Tenant: alpha\r\nProxy-Authorization: Bearer {KEY}\r\n", "You did not provide"),
    ],
)
async def test_without_one_known_key_nobody_is_served(listener: Listener, headers: str, code: str) -> None:
    """Two different keys contradict each other, whichever would be known; none of them is told back."""
    answer = await listener.ask(body=chat(PROMPT), headers=headers)
    assert_refused(answer, 401, "invalid_api_key")
    assert code in answer.error["message"]
    assert listener.engine.counted == []
    assert listener.records[0].tenant == "-"
    assert_refused(await listener.ask("/v1/models", method="GET", headers=headers), 401, "invalid_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        AUTH,
        f"authorization: bearer   {KEY} \r\n",
        f"Authorization: BEARER {KEY}\r\n",
        f"x-api-key: {KEY}\r\n",
        f"X-Api-Key:{KEY}\r\n",
        f"{AUTH}x-api-key: {KEY}\r\n",
        AUTH * 2,
    ],
)
async def test_one_key_in_any_of_its_places_is_enough(listener: Listener, headers: str) -> None:
    assert (await listener.ask(body=chat(), headers=headers)).status == 200
    assert listener.records[0].tenant == "alpha"


async def test_the_anonymous_tenant_is_for_those_without_a_key_only() -> None:
    """A wrong key stays wrong."""
    settings = replace(SETTINGS, anonymous_tenant="beta")
    async with listening(Parts(settings=settings)) as listener:
        assert (await listener.ask(body=chat(), headers="")).status == 200
        assert listener.records[0].tenant == "beta"
        assert_refused(await listener.ask(body=chat(), headers="x-api-key: no\r\n"), 401, "invalid_api_key")
    async with listening(Parts(settings=replace(SETTINGS, anonymous_tenant="gone"))) as listener:
        assert_refused(await listener.ask(body=chat(), headers=""), 401, "invalid_api_key")


async def test_the_clients_headers_stay_here(listener: Listener) -> None:
    """Neither its key nor its cookies nor anything else of its head goes to the engine."""
    await listener.ask(body=chat(), headers=f"{AUTH}Cookie: a=b\r\nX-Session-Id: 7\r\nX-Forwarded-For: 1.2.3.4\r\n")
    assert listener.engine.lines[0].sent[0][2] == {"Content-Type": "application/json"}


# -- bodies


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


CHUNKED = f"{AUTH}Transfer-Encoding: chunked\r\n"


async def test_a_body_in_chunks_is_a_body(listener: Listener) -> None:
    body = chat(PROMPT)
    assert (await listener.ask(body=chunked(body[:7], body[7:]), headers=CHUNKED)).status == 200
    assert listener.engine.counted == [("openai_chat", body)]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
        ("GZip", gzip.compress),
        ("x-gzip", gzip.compress),
    ],
)
async def test_a_compressed_body_is_judged_as_what_it_holds(
    listener: Listener, encoding: str, encode: Callable[[bytes], bytes]
) -> None:
    """And what it holds is what the engine gets, which reads no compressed bodies."""
    answer = await listener.ask(body=encode(chat(PROMPT)), headers=f"{AUTH}Content-Encoding: {encoding}\r\n")
    assert answer.status == 200
    assert listener.engine.counted == [("openai_chat", chat(PROMPT))]
    assert PROMPT.encode() in listener.engine.lines[0].sent[0][3]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (AUTH, chat("x" * 5000)),
        (CHUNKED, chunked(*[b"x" * 500] * 9)),
        (CHUNKED, chunked(b"x" * 5000)),
        (f"{AUTH}Content-Encoding: gzip\r\n", gzip.compress(b"x" * 5000)),
        (f"{AUTH}Content-Encoding: deflate\r\n", zlib.compress(b"x" * 5000)),
        (f"{AUTH}Content-Encoding: gzip\r\n", gzip.compress(bytes(3_000_000))),
        (f"{CHUNKED}Content-Encoding: gzip\r\n", chunked(gzip.compress(bytes(3_000_000)))),
    ],
    ids=["declared", "in small chunks", "in one chunk", "gzip", "deflate", "bomb", "chunked bomb"],
)
async def test_a_body_that_is_too_large_is_refused_however_it_comes(
    listener: Listener, headers: str, body: bytes
) -> None:
    """By its declared size, by what came of it, by what it would be decompressed."""
    assert_refused(await listener.ask(body=body, headers=headers), 413, "request_too_large")
    assert listener.engine.counted == []


async def test_a_body_of_just_the_limit_is_read(listener: Listener) -> None:
    body = chat("x" * (4096 - len(chat(""))))
    assert len(body) == 4096
    assert (await listener.ask(body=body)).status == 200


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("br", chat()),
        ("zstd", chat()),
        ("compress", chat()),
        ("x-gzip", chat()),
        ("gzip, gzip", gzip.compress(gzip.compress(chat()))),
        ("gzip,identity", gzip.compress(chat())),
        ("rot13", chat()),
        ("gzip", chat()),
        ("gzip", gzip.compress(chat())[:20] + b"\x00" * 30),
        ("gzip", gzip.compress(chat())[:-1]),
        ("gzip", gzip.compress(chat()) + b"x"),
        ("gzip", gzip.compress(chat())[:-8] + bytes(8)),
        ("gzip\r\nContent-Encoding: identity", gzip.compress(chat())),
        ("gzip", b""),
        ("deflate", b"\xff" * 40),
    ],
)
async def test_an_encoding_that_cannot_be_read_is_refused(listener: Listener, encoding: str, body: bytes) -> None:
    """415 in JSON, whether the name is unknown or the bytes are broken."""
    answer = await listener.ask(body=body, headers=f"{AUTH}Content-Encoding: {encoding}\r\n")
    assert_refused(answer, 415, "unsupported_encoding")
    assert listener.engine.counted == []


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with (
        listening(Parts(settings=replace(SETTINGS, body_timeout_s=0.2))) as listener,
        Client(listener.port) as client,
    ):
        client.send(request(body=chat())[:-5])
        assert_refused(await client.receive(), 408, "request_timeout")
        assert listener.engine.counted == []


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: "])
async def test_a_head_that_does_not_come_is_not_waited_for(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection costs memory: thousands that trickle must end by themselves."""
    monkeypatch.setattr(module, "KEEPALIVE_S", 0.1)
    async with listening() as listener, Client(listener.port) as client:
        client.send(begun)
        assert await client.until_closed() == b""


@pytest.mark.parametrize("expect", ["100-continue", "100-Continue"])
async def test_a_client_that_asks_first_is_told_to_go_on(listener: Listener, expect: str) -> None:
    async with Client(listener.port) as client:
        client.send(request(body=chat(), headers=f"{AUTH}Expect: {expect}\r\n").removesuffix(chat()))
        assert (await client.receive()).status == 100
        client.send(chat())
        answer = await client.receive()
        assert (answer.status, answer.body) == (200, ANSWER)
        client.send(request(body=chat()))
        assert (await client.receive()).status == 200


async def test_a_client_that_asks_first_may_be_told_no(listener: Listener) -> None:
    """Before it sends a body that nobody wants."""
    async with Client(listener.port) as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n".encode())
        assert_refused(await client.receive(), 401, "invalid_api_key")
    async with Client(listener.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{AUTH}Expect: 100-continue\r\nContent-Length: 9999\r\n\r\n".encode()
        )
        assert_refused(await client.receive(), 413, "request_too_large")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"messages": 1}', b"[" * 4000])
async def test_a_body_that_is_no_request_is_the_clients_fault(listener: Listener, body: bytes) -> None:
    assert_refused(await listener.ask(body=body), 400, "invalid_request")


# -- what is not HTTP, or two requests in the clothes of one


SECOND = request(body=chat(PROMPT))
LENGTH = f"{AUTH}Content-Length: 4\r\n"
SMUGGLED = {
    "length and chunks": (f"{CHUNKED}Content-Length: 4\r\n", "0\r\n\r\n"),
    "chunks and length": (f"{LENGTH}Transfer-Encoding: chunked\r\n", "0\r\n\r\n"),
    "two lengths": (f"{LENGTH}Content-Length: 9\r\n", "{}  "),
    "a list of lengths": (f"{AUTH}Content-Length: 4, 4\r\n", "{}  "),
    "a length with a sign": (f"{AUTH}Content-Length: +4\r\n", "{}  "),
    "a negative length": (f"{AUTH}Content-Length: -4\r\n", "{}  "),
    "a length in hex": (f"{AUTH}Content-Length: 0x4\r\n", "{}  "),
    "a huge length": (f"{AUTH}Content-Length: {'9' * 30}\r\n", "{}  "),
    "a space before the colon": (f"{AUTH}Content-Length : 4\r\n", "{}  "),
    "chunks and something else": (f"{AUTH}Transfer-Encoding: chunked, x\r\n", "0\r\n\r\n"),
    "unknown chunks": (f"{AUTH}Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"),
    "a bad chunk size": (CHUNKED, "zz\r\n\r\n"),
    "a chunk size with a sign": (CHUNKED, "+2\r\n{}\r\n0\r\n\r\n"),
    "a chunk longer than told": (CHUNKED, "1\r\n{}\r\n0\r\n\r\n"),
    "a folded header": (f"{LENGTH}X: a\r\n b\r\n", "{}  "),
    "a zero byte": (f"{LENGTH}X: a\x00b\r\n", "{}  "),
    "a lone line feed": (f"{LENGTH}X: a\nY: b\r\n", "{}  "),
    "a lone carriage return": (f"{LENGTH}X: a\rY: b\r\n", "{}  "),
}


@pytest.mark.parametrize("kind", SMUGGLED)
async def test_what_two_servers_would_read_differently_ends_the_connection(listener: Listener, kind: str) -> None:
    """One JSON refusal, and what stands behind it is not a request of anybody's."""
    headers, body = SMUGGLED[kind]
    answer = await listener.raw(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{headers}\r\n{body}".encode() + SECOND)
    assert_refused(answer, 400, "bad_request")
    assert answer.rest == b""
    assert listener.engine.counted == []


NO_HTTP = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,
    "words": f"hello {KEY}\r\n\r\n".encode(),
    "an unknown method": request(method="BREW"),
    "a star for a path": request("*"),
    "a path in latin-1": request("/\xff"),
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/9": f"GET /v1/models HTTP/9.9\r\n{AUTH}\r\n".encode(),
    "a small method": f"post {CHAT} HTTP/1.1\r\nHost: x\r\n{AUTH}\r\n".encode(),
    "no path": f"POST HTTP/1.1\r\nHost: x\r\n{AUTH}\r\n".encode(),
    "a path with a space": f"POST /a b HTTP/1.1\r\nHost: x\r\n{AUTH}\r\n".encode(),
    "a header without a colon": f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{KEY}\r\n\r\n".encode(),
}

TOO_LONG = {
    "a long path": f"POST /{KEY}{'a' * 20_000} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "a long header": f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX: {KEY}{'a' * 20_000}\r\n\r\n".encode(),
    "a long key": f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY * 1000}\r\n\r\n".encode(),
    "a header name": f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{'a' * 20_000}: {KEY}\r\n\r\n".encode(),
}


@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_not_http_is_told_so_in_json(listener: Listener, kind: str) -> None:
    """And ends the connection; nothing of it is logged, for a head may hold a key."""
    answer = await listener.raw(NO_HTTP[kind])
    assert_refused(answer, 400, "bad_request")
    assert answer.rest == b""
    assert (listener.records[0].status, listener.records[0].reason) == (400, "bad_http")


@pytest.mark.parametrize("kind", TOO_LONG)
async def test_a_head_that_is_too_large_is_told_so(listener: Listener, kind: str) -> None:
    """431, which clients tell from a bad request; nothing of it is logged or told back."""
    answer = await listener.raw(TOO_LONG[kind])
    assert_refused(answer, 431, "head_too_large")
    assert answer.rest == b""
    assert (listener.records[0].status, listener.records[0].reason) == (431, "head_too_large")


@pytest.mark.parametrize("line", [b"GET /v1/models", b"GET /v1/models HTTP/0.9", b"GET /v1/models HTTP/2.0"])
async def test_a_version_that_is_not_spoken_is_refused(listener: Listener, line: bytes) -> None:
    answer = await listener.raw(line + b"\r\n\r\n")
    assert_refused(answer, 505, "http_version_not_supported")


@pytest.mark.parametrize("tail", [b"zz\r\n\r\n", b"1\r\n{}\r\n", b"f" * 40 + b"\r\n", b"1\n}\n0\n\n"])
async def test_chunks_that_break_off_later_are_told_at_once(listener: Listener, tail: bytes) -> None:
    """The handler is in the middle of the body then; and what stands behind is not a request of anybody's."""
    async with Client(listener.port) as client:
        client.send(request(body=b'2\r\n{"\r\n', headers=CHUNKED))
        await until(lambda: listener.front.in_flight == 1)
        client.send(tail + SECOND)
        answer = await client.receive()
        assert_refused(answer, 400, "bad_request")
        assert await client.until_closed() == b""
    assert listener.engine.counted == []
    assert [record.reason for record in listener.records] == ["bad_http"]


async def test_a_head_of_many_headers_is_no_failure_of_ours(listener: Listener) -> None:
    headers = "".join(f"X-{at}: {at}\r\n" for at in range(2000))
    answer = await listener.ask(body=chat(), headers=AUTH + headers)
    assert answer.status in {200, 400}
    assert answer.get("content-type") == "application/json"


async def test_a_request_to_switch_protocols_is_an_ordinary_one(listener: Listener) -> None:
    upgrade = f"{AUTH}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    answer = await listener.ask("/v1/models", method="GET", headers=upgrade)
    assert answer.status == 200
    answer = await listener.ask(body=chat(), headers=upgrade)
    assert answer.get("content-type") == "application/json"
    assert answer.status in {200, 400}


# -- the models


async def test_each_tenant_sees_its_own_window() -> None:
    """So that a client compacts in time: the least of the slot's context and the tenant's own limit."""
    tenants = {
        sha256(KEY): Tenant("alpha", Limits(context_tokens_max=100)),
        sha256(OTHER_KEY): Tenant("beta", Limits(context_tokens_max=9999), models=frozenset({"other"})),
    }
    engine = EngineDouble(now=profile(1024, models=("small", "other")))
    async with listening(Parts(tenants=tenants, engine=engine)) as listener:
        answer = await listener.ask("/v1/models", method="GET")
        assert [(model["id"], model["context_length"]) for model in json.loads(answer.body)["data"]] == [
            ("small", 100),
            ("other", 100),
        ]
        other = await listener.ask("/v1/models", method="GET", headers=f"x-api-key: {OTHER_KEY}\r\n")
        (model,) = json.loads(other.body)["data"]
        assert (model["id"], model["max_model_len"], model["meta"]) == ("other", 1024, {"n_ctx": 1024})
        assert (listener.records[1].tenant, listener.records[1].path) == ("beta", "/v1/models")


async def test_without_an_engine_there_are_no_models() -> None:
    async with listening(Parts(engine=EngineDouble(is_known=False))) as listener:
        answer = await listener.ask("/v1/models", method="GET")
        assert_refused(answer, 503, "engine_unreachable")
        assert answer.get("retry-after") == "2"
        assert (await listener.ask("/props", method="GET")).status == 503


PROPS = {
    "default_generation_settings": {"n_ctx": 1024, "params": {"n_predict": -1}},
    "total_slots": 4,
    "model_alias": "small",
    "model_path": "/srv/models/of-a-customer.gguf",
    "chat_template": "{{ messages }}",
    "build_info": "b1",
    "media_marker": "<one>",
    "endpoint_slots": True,
    "what_comes_next_year": 1,
}


async def test_each_tenant_sees_its_own_props() -> None:
    """Its window, its slots, and of the rest what is on a list: no path, nothing of the process."""
    tenants = {
        sha256(KEY): Tenant("alpha", Limits(context_tokens_max=100), Quota(concurrency_max=1)),
        sha256(OTHER_KEY): Tenant("beta", Limits(context_tokens_max=9999), Quota(concurrency_max=99)),
    }
    async with listening(Parts(tenants=tenants, engine=EngineDouble(told_props=PROPS))) as listener:
        rest = {"model_alias": "small", "chat_template": "{{ messages }}", "build_info": "b1"}
        for key, n_ctx, slots in ((KEY, 100, 1), (OTHER_KEY, 1024, 4)):
            answer = await listener.ask("/props", method="GET", headers=f"x-api-key: {key}\r\n")
            assert answer.status == 200
            assert json.loads(answer.body) == {
                "default_generation_settings": {"n_ctx": n_ctx, "params": {"n_predict": -1}},
                "total_slots": slots,
                **rest,
            }
    assert [(record.dialect, record.path) for record in listener.records] == [("llamacpp_completion", "/props")] * 2


async def test_props_tell_nothing_of_another_request() -> None:
    """Older builds show slot 0 among the default settings, with the last prompt in it."""
    settings = {"n_ctx": 1024, "prompt": PROMPT, "id_task": 7, "next_token": {"n_decoded": 3}}
    told = {**PROPS, "default_generation_settings": settings}
    async with listening(Parts(engine=EngineDouble(told_props=told))) as listener:
        answer = await listener.ask("/props", method="GET")
        assert json.loads(answer.body)["default_generation_settings"] == {"n_ctx": 1024}


@pytest.mark.parametrize("settings", [None, [], "x", {"n_ctx": "1024"}, {}])
async def test_props_of_another_shape_are_no_failure_of_ours(settings: Any) -> None:
    told = {**PROPS, "default_generation_settings": settings, "total_slots": None}
    async with listening(Parts(engine=EngineDouble(told_props=told))) as listener:
        answer = await listener.ask("/props", method="GET")
        assert (answer.status, json.loads(answer.body)["total_slots"]) == (200, None)


# -- tokenizer, template, counters


@pytest.mark.parametrize(
    ("path", "engine_path", "dialect"),
    [
        ("/v1/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", "openai_chat"),
        ("/chat/completions/input_tokens", "/chat/completions/input_tokens", "openai_chat"),
        ("/v1/responses/input_tokens", "/v1/responses/input_tokens", "openai_responses"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens", "anthropic_messages"),
        ("/tokenize", "/tokenize", "llamacpp_completion"),
        ("/detokenize", "/detokenize", "llamacpp_completion"),
        ("/apply-template", "/apply-template", "llamacpp_completion"),
    ],
)
async def test_what_runs_no_inference_is_passed_on(
    listener: Listener, path: str, engine_path: str, dialect: str
) -> None:
    """Body and answer as they came, nothing counted, reserved or opened."""
    listener.engine.controls[engine_path] = (200, b'{"tokens": [1 ] }')
    answer = await listener.ask(path, b'\xef\xbb\xbf{ "content": "a",  "n": 1.50 }')
    assert (answer.status, answer.body) == (200, b'{"tokens": [1 ] }')
    assert answer.get("content-type") == "application/json"
    assert listener.engine.controlled == [(engine_path, b'{ "content": "a",  "n": 1.50 }')]
    assert (listener.engine.counted, listener.engine.lines, listener.ledger.told) == ([], [], [])
    (record,) = listener.records
    assert (record.path, record.dialect, record.status, record.tenant) == (path, dialect, 200, "alpha")
    assert (record.usage, record.verdict, record.reason) == (None, "", "")


async def test_what_runs_no_inference_needs_a_key_too(listener: Listener) -> None:
    answer = await listener.ask("/tokenize", b"{}", headers="")
    assert (answer.status, answer.get("x-kvgate-reason")) == (401, "missing_key")
    assert listener.engine.controlled == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b'{"a": NaN}', b"[" * 4000])
async def test_a_control_body_that_is_no_object_is_not_passed_on(listener: Listener, body: bytes) -> None:
    answer = await listener.ask("/tokenize", body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert answer.error["reason"] == "malformed"
    assert listener.engine.controlled == []


@pytest.mark.parametrize(
    ("told", "status", "reason"),
    [
        ((400, json.dumps({"error": {"message": PROMPT}}).encode()), 400, "engine_refused"),
        ((500, PROMPT.encode()), 400, "engine_refused"),
        ((502, PROMPT.encode()), 502, "engine_failed"),
        ((501, b""), 501, "engine_cannot"),
        ((404, b""), 501, "engine_cannot"),
        ((503, b"{}"), 503, "engine_loading"),
        (refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2)), 503, "engine_unreachable"),
    ],
)
async def test_the_engines_error_is_never_passed_on(listener: Listener, told: Any, status: int, reason: str) -> None:
    """It may quote the prompt: it is said in the dialect's words, here Anthropic's."""
    listener.engine.controls["/v1/messages/count_tokens"] = told
    answer = await listener.ask("/v1/messages/count_tokens", chat(PROMPT))
    assert (answer.status, answer.get("x-kvgate-reason")) == (status, reason)
    assert json.loads(answer.body)["type"] == "error"
    assert b"launch" not in answer.body
    assert listener.records[0].reason == reason


# -- every dialect has its own words


@pytest.mark.parametrize(
    ("path", "engine_path", "body"),
    [
        ("/v1/messages", "/v1/messages", chat(PROMPT, max_tokens=5)),
        ("/completions", "/completion", b'{"prompt": "a"}'),
        ("/completion", "/completion", b'{"prompt": "a"}'),
        ("/v1/completions", "/v1/completions", b'{"prompt": "a"}'),
        ("/responses", "/v1/responses", b'{"input": "a"}'),
        ("/v1/embeddings", "/v1/embeddings", b'{"input": "a"}'),
        ("/embeddings", "/embedding", b'{"content": "a"}'),
        ("/infill", "/infill", b'{"input_prefix": "a"}'),
        ("/reranking", "/v1/rerank", b'{"query": "a", "documents": ["b"]}'),
    ],
)
async def test_every_path_of_inference_goes_through_the_gate(
    listener: Listener, path: str, engine_path: str, body: bytes
) -> None:
    """Counted, reserved, and sent to the path that the allow-list names, with reuse off."""
    assert (await listener.ask(path, body)).status == 200
    (line,) = listener.engine.lines
    assert line.sent[0][1] == engine_path
    assert json.loads(line.sent[0][3])["cache_prompt"] is False
    assert len(listener.engine.counted) == 1
    assert listener.ledger.told[-1] == ("settle ended", "lease-1")


async def test_a_refusal_is_in_the_words_of_its_path(listener: Listener) -> None:
    """Before and after the path is known: Anthropic's envelope there, OpenAI's where nothing is known."""
    answer = await listener.ask("/v1/messages", chat(), headers="")
    assert (answer.status, answer.error["type"]) == (401, "authentication_error")
    assert json.loads(answer.body)["type"] == "error"
    answer = await listener.ask("/completion", b'{"prompt": 5}')
    assert (answer.status, answer.error["code"], answer.error["type"]) == (400, 400, "invalid_request_error")


# -- browsers


ORIGIN = "https://chat.example"


def from_origin(origin: str = ORIGIN, headers: str = AUTH) -> str:
    return f"{headers}Origin: {origin}\r\n"


def allowed(answer: Answer) -> str | None:
    return answer.get("access-control-allow-origin")


async def test_no_origin_is_named_unless_the_operator_lists_it(listener: Listener) -> None:
    """A key in a browser belongs to whoever wrote the page."""
    for method in ("OPTIONS", "POST"):
        answer = await listener.ask(body=chat(), method=method, headers=from_origin())
        assert (answer.status, allowed(answer)) == (204 if method == "OPTIONS" else 200, None)
        assert not any(name.startswith("access-control") for name, _ in answer.headers)


@pytest.mark.parametrize("origins", [{ORIGIN}, {ORIGIN, "http://other"}, {"*"}])
async def test_a_listed_origin_may_ask_and_read(origins: set[str]) -> None:
    """On answers of every kind, so that a page can show what went wrong."""
    engine = EngineDouble()
    async with listening(Parts(engine, settings=replace(SETTINGS, cors_origins=frozenset(origins)))) as listener:
        for path, body, headers, status in (
            (CHAT, chat(), AUTH, 200),
            (CHAT, b"{", AUTH, 400),
            (CHAT, chat(), "", 401),
            ("/nothing", b"", AUTH, 403),
            ("/tokenize", b"{}", AUTH, 200),
        ):
            answer = await listener.ask(path, body, headers=from_origin(headers=headers))
            assert (answer.status, allowed(answer), answer.get("vary")) == (status, ORIGIN, "Origin")
            exposed = (answer.get("access-control-expose-headers") or "").split(", ")
            assert set(exposed) == set(HEADERS)
            assert answer.get("access-control-allow-credentials") is None
        assert allowed(await listener.ask("/v1/models", method="GET", headers=from_origin())) == ORIGIN
        engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA, DONE])
        assert allowed(await listener.ask(body=chat(stream=True), headers=from_origin())) == ORIGIN
        assert allowed(await listener.ask(body=chat())) is None


@pytest.mark.parametrize("origin", ["https://evil.example", "null", f"{ORIGIN}.evil", "HTTPS://CHAT.EXAMPLE", "*"])
async def test_another_origin_is_not_named(origin: str) -> None:
    settings = replace(SETTINGS, cors_origins=frozenset({ORIGIN}))
    async with listening(Parts(settings=settings)) as listener:
        for method in ("OPTIONS", "POST"):
            answer = await listener.ask(body=chat(), method=method, headers=from_origin(origin))
            assert allowed(answer) is None


@pytest.mark.parametrize(("path", "method"), [(CHAT, "POST"), ("/v1/models", "GET"), ("/tokenize", "POST")])
async def test_a_preflight_needs_no_key(path: str, method: str) -> None:
    """A browser sends none; what it may send is named, and nothing is run for it."""
    settings = replace(SETTINGS, cors_origins=frozenset({ORIGIN}))
    async with listening(Parts(settings=settings)) as listener:
        answer = await listener.ask(path, method="OPTIONS", headers=from_origin(headers=""))
        assert (answer.status, answer.body, allowed(answer)) == (204, b"", ORIGIN)
        assert answer.get("access-control-allow-methods") == answer.get("allow") == f"{method}, OPTIONS"
        assert {"authorization", "x-api-key", "content-type"} <= set(
            (answer.get("access-control-allow-headers") or "").split(", ")
        )
        assert (listener.engine.counted, listener.engine.controlled) == ([], [])
        (record,) = listener.records
        assert (record.status, record.tenant, record.reason) == (204, "-", "")
        refused_path = await listener.ask("/slots", method="OPTIONS", headers=from_origin(headers=""))
        assert refused_path.status == 403


# -- what goes back


async def test_a_rejection_tells_its_arithmetic() -> None:
    async with listening(Parts(engine=EngineDouble(prompt_tokens=1000))) as listener:
        answer = await listener.ask(body=chat(PROMPT, max_tokens=500))
        assert_refused(answer, 400, "context_length_exceeded")
        assert answer.get("x-kvgate-verdict") == "reject"
        assert answer.get("x-kvgate-prompt-tokens") == "1000"
        assert answer.get("x-kvgate-usable-generation") == "24"
        assert answer.get("x-kvgate-n-ctx-slot") == "1024"
        assert answer.get("retry-after") is None
        assert (answer.error["n_ctx"], answer.error["n_prompt_tokens"]) == (1024, 1000)


async def test_a_refusal_for_now_says_when_to_come_back() -> None:
    busy = refused(refusal(Reason.ENGINE_LOADING, retry_after_s=2))
    async with listening(Parts(engine=EngineDouble(counts=[busy]))) as listener:
        answer = await listener.ask(body=chat())
        assert_refused(answer, 503, "engine_loading")
        assert answer.get("retry-after") == "2"


async def test_every_header_of_ours_is_described(listener: Listener) -> None:
    """`HEADERS` is what the reference is made of."""
    answers = [await listener.ask(body=chat()), await listener.ask("/nothing"), await listener.ask(body=b"{")]
    own = {name for answer in answers for name, _ in answer.headers if name.startswith("x-")}
    assert own <= set(HEADERS)


async def test_a_build_of_strange_letters_cannot_break_a_header() -> None:
    engine = EngineDouble(now=profile(build="b1\r\nX-Evil: 1 \u00e9"))
    async with listening(Parts(engine=engine)) as listener:
        answer = await listener.ask(body=chat())
        assert answer.get("x-kvgate-engine-build") == "b1??X-Evil: 1 ?"
        assert answer.get("x-evil") is None


@pytest.mark.parametrize("given", ["abc-1.2_3", "a" * 64])
async def test_a_request_id_of_the_clients_own_is_kept(listener: Listener, given: str) -> None:
    """Its logs and ours can be joined; on refusals too."""
    for path, body in ((CHAT, chat()), (CHAT, b"{"), ("/nothing", b"")):
        answer = await listener.ask(path, body, headers=f"{AUTH}x-request-id: {given}\r\n")
        assert answer.get("x-request-id") == given
    assert {record.request_id for record in listener.records} == {given}


@pytest.mark.parametrize("given", ["", "a b", "a" * 65, "\u00e9", "a;b", "${jndi}"])
async def test_a_request_id_of_another_shape_is_replaced(listener: Listener, given: str) -> None:
    answer = await listener.ask(body=chat(), headers=f"{AUTH}x-request-id: {given}\r\n")
    assert re.fullmatch(r"kvg-[0-9a-f]{24}", answer.get("x-request-id") or "")


async def test_a_defect_of_ours_is_500_in_json_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the request's id and where it failed, and nothing of the request: an exception may quote it."""

    async def fail() -> None:
        raise KeyError(PROMPT)

    async with listening(Parts(engine=EngineDouble(counts=[fail]))) as listener:
        answer = await listener.ask(body=chat(PROMPT), headers=f"{AUTH}x-request-id: r1\r\n")
        assert_refused(answer, 500, "internal_error")
        assert (listener.records[0].status, listener.records[0].reason) == (500, "internal")
    (found,) = [record for record in caplog.records if record.name == "kvgate.web"]
    assert vars(found)["request_id"] == "r1"
    assert vars(found)["error"] == "KeyError"
    assert vars(found)["where"][-1].endswith(" fail")
    assert found.exc_info is None
    assert PROMPT not in JsonLines().format(found)


async def test_a_defect_of_ours_in_a_stream_cuts_it(listener: Listener) -> None:
    """A second head inside the first answer's body would be another answer to somebody's next request."""
    listener.engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA, ZeroDivisionError()])
    async with Client(listener.port) as client:
        client.send(request(body=chat(stream=True)))
        everything = await client.until_closed()
    assert everything.startswith(b"HTTP/1.1 200")
    assert everything.count(b"HTTP/1.1") == 1
    assert not everything.endswith(b"0\r\n\r\n")
    assert listener.ledger.told[-1] == ("settle", "lease-1")
    assert [(record.status, record.reason) for record in listener.records] == [(200, "internal")]


# -- hang-ups and pace


@pytest.mark.parametrize("stage", ["count", "queue", "open", "head", "stream", "whole"])
async def test_a_hang_up_cancels_at_once(stage: str) -> None:
    """Wherever the request is: counted, queued, in prefill, in mid-answer; what it held is settled."""
    engine = EngineDouble(counts=[forever] if stage == "count" else [], opens=[forever] if stage == "open" else [])
    ledger = LedgerDouble(replies=[forever] if stage == "queue" else [])
    if stage == "head":
        engine.answer = _Silent
    elif stage == "stream":
        engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA, forever])
    elif stage == "whole":
        engine.answer = lambda found: LineDouble(found, pieces=[b"{", forever])
    async with listening(Parts(engine=engine, ledger=ledger)) as listener:
        async with Client(listener.port) as client:
            client.send(request(body=chat(PROMPT, stream=stage == "stream")))
            await until(lambda: listener.front.in_flight == 1)
            if stage == "stream":
                assert await client.reader.readuntil(DELTA)
            await asyncio.sleep(0.05)
            assert listener.front.in_flight == 1
        await until(lambda: listener.records != [])
        (record,) = listener.records
        assert (record.hung_up, record.status) == (True, 200 if stage == "stream" else 499)
        assert ledger.settled == ["lease-1"]
        assert ledger.told[-1][0] == "settle"
        assert all(line.released == 1 for line in engine.lines)
        assert listener.front.in_flight == 0


class _Silent(LineDouble):
    async def send(self, *_: Any) -> Head:
        await forever()
        raise AssertionError


async def test_a_client_found_gone_by_a_write_is_remembered_once() -> None:
    """Not as a hang-up and then, beside it, as a failure of ours that nobody is there to hear of."""

    async def fail() -> None:
        raise ConnectionResetError

    async with listening(Parts(engine=EngineDouble(counts=[fail]))) as listener, Client(listener.port) as client:
        client.send(request(body=chat()))
        assert await client.until_closed() == b""
        (record,) = listener.records
        assert (record.hung_up, record.status, record.reason) == (True, 499, "")


async def test_a_hang_up_while_the_body_comes_is_one_too(listener: Listener) -> None:
    async with Client(listener.port) as client:
        client.send(request(body=chat(PROMPT))[:-5])
        await until(lambda: listener.front.in_flight == 1)
    await until(lambda: listener.records != [])
    assert (listener.records[0].hung_up, listener.records[0].status) == (True, 499)


async def test_a_client_that_reads_nothing_is_cut() -> None:
    """It cannot hold a slot for ever; and what it did not read was not read from the engine either."""
    pieces: list[bytes] = [b"data: " + b"x" * 100_000 + b"\n\n"] * 400
    engine = EngineDouble(answer=lambda found: LineDouble(found, head=SSE, pieces=pieces))
    async with (
        listening(Parts(engine=engine, settings=replace(SETTINGS, write_timeout_s=0.3))) as listener,
        Client(listener.port) as client,
    ):
        client.send(request(body=chat(stream=True)))
        await until(lambda: listener.records != [])
        (record,) = listener.records
        assert (record.hung_up, record.status) == (True, 200)
        assert engine.lines[0].reads < 400
        assert listener.ledger.told[-1] == ("settle", "lease-1")


# -- what is remembered


async def test_a_record_of_a_served_request(listener: Listener) -> None:
    async def later() -> None:
        listener.clock.advance(3)

    listener.engine.counts = [later]
    await listener.ask(body=chat(PROMPT, max_tokens=7, n=2), headers=f"{AUTH}x-request-id: r1\r\n")
    (record,) = listener.records
    assert (record.request_id, record.tenant, record.dialect, record.path) == ("r1", "alpha", "openai_chat", CHAT)
    assert (record.status, record.verdict, record.reason, record.duration_s) == (200, "admit", "", 3)
    assert (record.stream, record.sequences, record.prompt_tokens, record.output_limit) == (False, 2, 10, 7)
    assert (record.usable_generation, record.n_ctx_slot, record.queued_s) == (1014, 1024, 0.25)
    assert (record.usage, record.count_drift_tokens) == (Usage(10, 2), 0)
    assert (record.hung_up, record.reuse_violation) == (False, False)
    assert PROMPT not in repr(record)
    assert "0451" not in repr(record)


async def test_a_record_of_a_rejected_request() -> None:
    async with listening(Parts(engine=EngineDouble(prompt_tokens=1000))) as listener:
        await listener.ask(body=chat(PROMPT, max_tokens=500, stream=True))
        (record,) = listener.records
        assert (record.status, record.verdict, record.reason) == (400, "reject", "generation_overflow")
        assert (record.stream, record.prompt_tokens, record.usable_generation) == (True, 1000, 24)
        assert (record.output_limit, record.queued_s, record.usage) == (None, None, None)


async def test_reuse_that_should_not_have_been_is_remembered(listener: Listener) -> None:
    """Also that the engine counted otherwise than its counter."""
    usage = {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}
    listener.engine.answer = lambda found: LineDouble(found, pieces=[json.dumps({"usage": usage}).encode()])
    await listener.ask(body=chat())
    (record,) = listener.records
    assert (record.reuse_violation, record.count_drift_tokens) == (True, 2)
    assert [(counted.prompts, counted.proof) for counted in listener.engine.erred] == [((10,), Proof.ENGINE)]


async def test_reuse_that_is_seen_closes_what_a_probe_let_in(listener: Listener) -> None:
    """The engine is told at once, of the profile that the request was judged for."""
    await listener.ask(body=chat())
    assert listener.engine.seen_reusing == []
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}
    listener.engine.answer = lambda found: LineDouble(found, pieces=[json.dumps({"usage": usage}).encode()])
    await listener.ask(body=chat())
    assert listener.engine.seen_reusing == [listener.engine.now]


def several(*texts: str) -> bytes:
    """A whole answer with a choice for each text; the usage is that of the first."""
    choices = [{"message": {"content": text}} for text in texts]
    return json.dumps({"choices": choices, "usage": {"prompt_tokens": 10, "completion_tokens": 2}}).encode()


async def test_output_that_the_engine_told_nothing_of_is_counted_afterwards(listener: Listener) -> None:
    """The client does not wait for it; the record does, with all that was generated in it."""
    go = asyncio.Event()

    async def wait() -> None:
        await go.wait()

    listener.engine.now, listener.engine.text_counts = profile(1024, 3), [wait]
    listener.engine.answer = lambda found: LineDouble(found, pieces=[several("a b", "three more words", "x")])
    answer = await listener.ask(body=chat(n=3))
    assert (answer.status, listener.records, listener.front.in_flight) == (200, [], 0)
    assert listener.ledger.told[-1] == ("settle ended", "lease-1")
    go.set()
    await until(lambda: listener.records != [])
    (record,) = listener.records
    assert (record.usage, record.count_drift_tokens, record.sequences) == (Usage(10, 2 + 3 + 1), 0, 3)
    assert listener.engine.texts == ["three more words", "x"]
    assert "more words" not in repr(record)


async def test_output_that_cannot_be_counted_is_recorded_without_it(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    listener.engine.text_counts = [refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))]
    listener.engine.answer = lambda found: LineDouble(found, pieces=[several("a", PROMPT)])
    await listener.ask(body=chat(n=2), headers=f"{AUTH}x-request-id: r1\r\n")
    await until(lambda: listener.records != [])
    assert listener.records[0].usage == Usage(10, 2)
    (found,) = [record for record in caplog.records if record.name == "kvgate.web"]
    assert (vars(found)["request_id"], vars(found)["reason"]) == ("r1", "engine_unreachable")


async def test_an_answer_that_was_cut_is_charged_for_what_passed() -> None:
    """Its whole prompt, and each piece of output that the engine had made."""
    engine = EngineDouble(answer=lambda found: LineDouble(found, head=SSE, pieces=[DELTA, DELTA, forever]))
    async with listening(Parts(engine)) as listener:
        async with Client(listener.port) as client:
            client.send(request(body=chat(stream=True)))
            for _ in range(2):
                assert await client.reader.readuntil(DELTA)
        await until(lambda: listener.records != [])
        (record,) = listener.records
        assert (record.hung_up, record.usage, record.count_drift_tokens) == (True, Usage(10, 2), 0)


@pytest.mark.parametrize(
    ("told", "usage", "drift"),
    [(60, Usage(60, 2), 0), (61, Usage(61, 2), 1), (59, Usage(59, 2), -1)],
)
async def test_a_list_of_prompts_is_recorded_as_their_sum(told: int, usage: Usage, drift: int) -> None:
    """Embeddings tell the sum of all; a drift is told from the sum of what was counted."""
    answer = json.dumps({"usage": {"prompt_tokens": told, "completion_tokens": 2}}).encode()
    engine = EngineDouble(prompts=(10, 30, 20), answer=lambda found: LineDouble(found, pieces=[answer]))
    async with listening(Parts(engine)) as listener:
        found = await listener.ask("/v1/embeddings", b'{"input": ["a", "b", "c"]}')
        assert found.get("x-kvgate-prompt-tokens") == "30"
        (record,) = listener.records
        assert (record.usage, record.count_drift_tokens, record.prompt_tokens) == (usage, drift, 30)


async def test_prompts_that_the_engine_told_nothing_of_are_added() -> None:
    """Of a list, llama.cpp's whole answer tells of the first prompt only."""
    answer = json.dumps({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 2}}).encode()
    engine = EngineDouble(prompts=(10, 30, 20), answer=lambda found: LineDouble(found, pieces=[answer]))
    async with listening(Parts(engine)) as listener:
        await listener.ask("/v1/completions", b'{"prompt": ["a", "b", "c"]}')
        (record,) = listener.records
        assert (record.usage, record.count_drift_tokens) == (Usage(60, 2), 0)


@pytest.mark.parametrize(("told", "drift"), [(30, 0), (9, 0), (31, 1)])
async def test_a_bound_is_named_one_and_may_be_above_the_truth(told: int, drift: int) -> None:
    """`x-kvgate-count: bound`; only what it fails to bound is a drift."""
    answer = json.dumps({"tokens_evaluated": told, "tokens_predicted": 2, "content": ""}).encode()
    engine = EngineDouble(30, proof=Proof.BOUND, answer=lambda found: LineDouble(found, pieces=[answer]))
    async with listening(Parts(engine)) as listener:
        found = await listener.ask("/infill", b'{"input_prefix": "a"}')
        assert (found.get("x-kvgate-count"), found.get("x-kvgate-prompt-tokens-max")) == ("bound", "30")
        assert found.get("x-kvgate-prompt-tokens") is None
        (record,) = listener.records
        assert (record.usage, record.count_drift_tokens) == (Usage(told, 2), drift)


@pytest.mark.parametrize(("told", "drift"), [(30, 0), (9, 0), (31, 1)])
async def test_a_chat_by_a_bound_costs_what_the_engine_says(told: int, drift: int) -> None:
    """And a bound that was none is told to whoever proved it."""
    answer = json.dumps({"usage": {"prompt_tokens": told, "completion_tokens": 2}}).encode()
    engine = EngineDouble(bounds=[30], answer=lambda found: LineDouble(found, pieces=[answer]))
    async with listening(Parts(engine)) as listener:
        found = await listener.ask(body=chat(max_tokens=5))
        assert (found.get("x-kvgate-count"), found.get("x-kvgate-prompt-tokens-max")) == ("bound", "30")
        (record,) = listener.records
        assert (record.usage, record.count_drift_tokens, record.proof) == (Usage(told, 2), drift, "bound")
        assert record.asked is not None
        assert (record.prompt_tokens, record.asked.prompts) == (told, (told,))
        assert len(engine.erred) == drift


async def test_who_hangs_up_is_charged_for_the_prompt_and_not_for_its_bound() -> None:
    """Nothing told what it cost: the prompt is counted after all, when nobody waits for it."""
    engine = EngineDouble(8, bounds=[30], answer=lambda found: LineDouble(found, head=SSE, pieces=[DELTA, forever]))
    async with listening(Parts(engine)) as listener:
        async with Client(listener.port) as client:
            client.send(request(body=chat(max_tokens=5, stream=True)))
            assert await client.reader.readuntil(DELTA)
            assert engine.counted == []
        await until(lambda: listener.records != [])
        (record,) = listener.records
        assert (record.proof, record.usage, record.prompt_tokens) == ("bound", Usage(8, 1), 8)


async def test_a_clamp_is_recorded_with_its_reason() -> None:
    tenants = {sha256(KEY): tenant("alpha", clamp=True)}
    async with listening(Parts(EngineDouble(1000), tenants=tenants)) as listener:
        answer = await listener.ask(body=chat(max_tokens=500))
        assert (answer.status, answer.get("x-kvgate-reason")) == (200, "generation_overflow")
        (record,) = listener.records
        assert (record.verdict, record.reason, record.output_limit) == ("clamp", "generation_overflow", 24)


async def test_a_trim_is_told_and_recorded() -> None:
    """How much went in every answer, which messages where it was asked for, and no word of theirs anywhere."""
    trimming = replace(tenant("alpha"), limits=Limits(on_overflow=OnOverflow.TRIM, trim_room_tokens=20))
    words = [
        {"role": role, "content": PROMPT} for role in ("system", "user", "assistant", "user", "assistant", "user")
    ]
    body = json.dumps({"messages": words, "max_tokens": 20}).encode()

    class Shrinking(EngineDouble):
        async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
            found = await super().count(dialect, request, body)
            return replace(found, prompts=(300 * len(request.document.get("messages")),))

    async with listening(Parts(Shrinking(), tenants={sha256(KEY): trimming})) as listener:
        for asked, shown in ((None, False), ("1", True), ("0", False)):
            more = "" if asked is None else f"x-kvgate-trim-details: {asked}\r\n"
            answer = await listener.ask(body=body, headers=AUTH + more)
            assert (answer.status, answer.get("x-kvgate-verdict")) == (200, "trim")
            assert answer.get("x-kvgate-reason") == "prompt_overflow"
            assert (answer.get("x-kvgate-trimmed-messages"), answer.get("x-kvgate-trimmed-tokens")) == ("4", "1200")
            details = answer.get("x-kvgate-trim-details")
            assert (details is not None) == shown
            if details is not None:
                assert json.loads(details) == {
                    "how": "oldest-first",
                    "counts": 2,
                    "dropped": [{"first": 1, "last": 4, "roles": "user,assistant,user,assistant", "tokens": 1200}],
                }
        record = listener.records[0]
        assert (record.verdict, record.reason, record.prompt_tokens) == ("trim", "prompt_overflow", 600)
        assert record.trimmed is not None
        assert (record.trimmed.messages, record.trimmed.tokens) == (4, 1200)
        sent = json.loads(listener.engine.lines[0].sent[0][3])
        assert [one["role"] for one in sent["messages"]] == ["system", "user"]


async def test_an_error_of_the_engine_is_remembered_by_its_reason(listener: Listener) -> None:
    body = json.dumps({"error": {"message": f"Failed to parse grammar {PROMPT}"}}).encode()
    head = Head(400, (("content-type", "application/json"),))
    listener.engine.answer = lambda found: LineDouble(found, head=head, pieces=[body])
    answer = await listener.ask(body=chat())
    assert_refused(answer, 400, "engine_refused")
    assert answer.get("x-kvgate-verdict") == "admit"
    (record,) = listener.records
    assert (record.status, record.reason, record.verdict, record.usage) == (400, "engine_refused", "admit", None)
    assert listener.ledger.told[-1] == ("settle ended", "lease-1")


async def test_a_failure_of_the_engine_is_remembered(listener: Listener) -> None:
    listener.engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA])
    answer = await listener.ask(body=chat(stream=True))
    assert answer.body.endswith(DONE)
    (record,) = listener.records
    assert (record.status, record.reason, record.verdict) == (200, "engine_failed", "admit")
    assert record.detail


# -- going down


async def test_a_draining_gate_refuses_what_is_new_and_finishes_what_runs() -> None:
    go = asyncio.Event()

    async def wait() -> None:
        await go.wait()

    async with listening() as listener:
        listener.engine.answer = lambda found: LineDouble(found, pieces=[ANSWER[:5], wait, ANSWER[5:]])
        running = asyncio.create_task(listener.ask(body=chat()))
        await until(lambda: listener.front.in_flight == 1)
        listener.front.draining = True
        idle = asyncio.create_task(listener.front.idle())
        answer = await listener.ask(body=chat())
        assert_refused(answer, 503, "gate_draining")
        assert answer.get("retry-after") == "5"
        assert not idle.done()
        go.set()
        assert (await running).body == ANSWER
        async with asyncio.timeout(5):
            await idle


@pytest.mark.parametrize("stage", ["count", "queue", "open", "head", "whole"])
async def test_a_request_that_is_cut_by_a_gate_that_goes_down_is_told_so(stage: str) -> None:
    """After the grace period, wherever it is: 503, come back; what it held is settled."""
    engine = EngineDouble(counts=[forever] if stage == "count" else [], opens=[forever] if stage == "open" else [])
    ledger = LedgerDouble(replies=[forever] if stage == "queue" else [])
    if stage == "head":
        engine.answer = _Silent
    elif stage == "whole":
        engine.answer = lambda found: LineDouble(found, pieces=[b"{", forever])
    async with listening(Parts(engine=engine, ledger=ledger)) as listener:
        running = asyncio.create_task(listener.ask(body=chat()))
        await until(lambda: listener.front.in_flight == 1)
        await asyncio.sleep(0.05)
        listener.front.draining = True
        listener.front.cut()
        answer = await running
        assert_refused(answer, 503, "gate_draining")
        assert answer.get("retry-after") == "5"
        assert ledger.settled == ["lease-1"]
        assert ledger.told[-1][0] == "settle"
        (record,) = listener.records
        assert (record.status, record.reason, record.hung_up) == (503, "gate_draining", False)
        async with asyncio.timeout(5):
            await listener.front.idle()


async def test_a_stream_that_is_cut_by_a_gate_that_goes_down_ends_in_an_error() -> None:
    """In its dialect, with its end marker: the client can tell it from a whole answer, and from a lost line."""
    async with listening() as listener:
        listener.engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA, forever])
        running = asyncio.create_task(listener.ask(body=chat(stream=True)))
        await until(lambda: listener.engine.lines != [] and listener.engine.lines[0].reads == 2)
        listener.front.cut()
        answer = await running
        first, error, done, rest = answer.body.split(b"\n\n")
        assert (first + b"\n\n", done, rest) == (DELTA, b"data: [DONE]", b"")
        assert json.loads(error.removeprefix(b"data: "))["error"]["reason"] == "gate_draining"
        assert listener.ledger.told[-1] == ("settle", "lease-1")
        (record,) = listener.records
        assert (record.status, record.reason, record.usage) == (200, "gate_draining", Usage(10, 1))


async def test_a_gate_that_goes_down_cuts_what_does_not_end() -> None:
    """Where even that does not help: the client sees a cut, the engine is told, the lease drains."""
    async with listening() as listener:
        listener.engine.answer = lambda found: LineDouble(found, head=SSE, pieces=[DELTA, forever])
        client = await Client(listener.port).__aenter__()
        client.send(request(body=chat(stream=True)))
        await client.reader.readuntil(DELTA)
    assert not (await client.until_closed()).endswith(b"0\r\n\r\n")
    assert listener.ledger.told[-1] == ("settle", "lease-1")
    assert listener.records[0].hung_up
    client.writer.close()


@pytest.mark.parametrize(("path", "status"), [("/v1/models/small", 200), ("/v1/models/large", 404)])
async def test_one_model_can_be_asked_for(listener: Listener, path: str, status: int) -> None:
    """`GET /v1/models/ID` is what SDKs ask to find out whether a model is there, and how much context it has."""
    answer = await listener.ask(path, b"", method="GET")
    assert answer.status == status
    if status == 200:
        assert json.loads(answer.body)["id"] == "small"
    else:
        assert_refused(answer, 404, "model_not_found")


async def test_a_path_below_an_apis_own_is_refused_in_its_words(listener: Listener) -> None:
    """Anthropic's clients read Anthropic's errors, also of a path that is not served."""
    for path in ("/v1/messages/batches", "/v1/messages/count%5Ftokens"):
        answer = await listener.ask(path, b"{}")
        assert (answer.status, json.loads(answer.body)["type"]) == (403, "error")


async def test_a_browsers_sdk_may_send_headers_of_its_own() -> None:
    """A preflight is answered with the headers that it asks for, unless they are none."""
    settings = replace(SETTINGS, cors_origins=frozenset({"https://chat.example"}))
    async with listening(Parts(settings=settings)) as listener:
        for asked, allowed in (("x-stainless-os, authorization", True), ("a;b", False)):
            headers = f"Origin: https://chat.example\r\nAccess-Control-Request-Headers: {asked}\r\n"
            answer = await listener.ask(CHAT, b"", method="OPTIONS", headers=headers)
            assert answer.status == 204
            assert (dict(answer.headers)["access-control-allow-headers"] == asked) is allowed


# -- what is remembered of sizes


async def test_what_came_as_far_as_the_arithmetic_can_be_judged_again() -> None:
    """Admitted, clamped, rejected, or denied by the queue: sizes alone, and the pool that they were judged for."""
    full = Denied("", Reason.QUEUE_FULL, 7, 3.2)
    clamping = {sha256(KEY): Tenant("alpha", Limits(on_overflow=OnOverflow.CLAMP)), sha256(OTHER_KEY): Tenant("beta")}
    parts = Parts(engine=EngineDouble(prompt_tokens=1000), ledger=LedgerDouble(replies=[full]), tenants=clamping)
    async with listening(parts) as listener:
        await listener.ask(body=chat(PROMPT, max_tokens=5))
        await listener.ask(body=chat(PROMPT, n=2))
        await listener.ask(body=chat(PROMPT, max_tokens=500))
        await listener.ask(body=chat(PROMPT, max_tokens=500), headers=f"x-api-key: {OTHER_KEY}\r\n")
        pool = profile().pool()
        assert [(record.verdict, record.reason, record.asked) for record in listener.records] == [
            ("reject", "queue_full", Asked(5, 1, (1000,), 1, pool)),
            ("admit", "", Asked(None, 2, (1000,), 1, pool)),
            ("clamp", "generation_overflow", Asked(500, 1, (1000,), 1, pool)),
            ("reject", "generation_overflow", Asked(500, 1, (1000,), 1, pool)),
        ]


async def test_what_was_never_sized_is_not_remembered() -> None:
    loading = refused(refusal(Reason.ENGINE_LOADING, retry_after_s=2))
    async with listening(Parts(engine=EngineDouble(counts=[loading]))) as listener:
        await listener.ask(body=chat())
        await listener.ask(body=b"{")
        await listener.ask(body=chat(), headers="x-api-key: nobody\r\n")
        await listener.ask("/tokenize", body=b"{}")
        assert [record.asked for record in listener.records] == [None] * 4


async def test_the_log_line_shows_no_sizes_beyond_its_own(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    await listener.ask(body=chat())
    (record,) = listener.records
    assert record.asked is not None
    for each in (record, replace(record, asked=None)):
        RequestLog().request(each)
    with_sizes, without = (
        json.loads(JsonLines().format(line)) for line in caplog.records if line.name == "kvgate.request"
    )
    assert with_sizes | {"ts": ""} == without | {"ts": ""}
