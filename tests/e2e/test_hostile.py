"""Ten thousand hostile bodies and heads: no 500, no hang, and nothing reaches the engine but what was judged."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pytest

from kvgate.web import served_routes
from kvgate.web.routes import Control, Inference
from tests.e2e.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

BODIES: Final = 7500
HEADS: Final = 2500
CONNECTIONS: Final = 8
ANSWER_TIMEOUT_S: Final = 40.0
SECRET: Final = "zebra-secret-word"
KEY: Final = "sk-demo"
ROUTES: Final = served_routes()
POSTED: Final = tuple(path for path, route in ROUTES.items() if route.method == "POST")
ENGINE_PATHS: Final = {route.engine_path for route in ROUTES.values() if isinstance(route, Inference)}
LIMITS: Final = ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens")
REFUSED_BY_THE_ENGINE: Final = {"engine_refused", "engine_cannot"}


class _Tee(asyncio.StreamReader):
    def __init__(self, inner: asyncio.StreamReader, copy: bytearray) -> None:
        super().__init__()
        self._inner, self._copy = inner, copy

    async def read(self, n: int = -1) -> bytes:
        data = await self._inner.read(n)
        self._copy += data
        return data


class Tape(Recorder):
    """A recorder that keeps each connection's bytes apart, so that they can be read as the engine read them."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.connections: list[bytearray] = []

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(bytearray())
        await super()._pass_on(_Tee(reader, self.connections[-1]), writer)

    def requests(self) -> list[tuple[str, str, dict[str, str], bytes]]:
        """Every request that the engine was sent: method, path, headers, body; read with no leniency at all."""
        found = []
        for stream in self.connections:
            left = bytes(stream)
            while left:
                head, end, left = left.partition(b"\r\n\r\n")
                assert end, head[:200]
                line, *lines = head.decode("ascii").split("\r\n")
                method, path, version = line.split(" ")
                assert version == "HTTP/1.1"
                headers = dict(line.lower().split(": ", 1) for line in lines)
                assert len(headers) == len(lines), "a header twice"
                assert "transfer-encoding" not in headers
                length = int(headers.get("content-length", "0"))
                assert len(left) >= length, "the engine was left with half a request"
                found.append((method, path, headers, left[:length]))
                left = left[length:]
        return found


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineProcess:
    """Four slots of 256 tokens."""
    flags = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots", "--alias", "smollm2")
    return start_engine("-c", "1024", "-np", "4", "--no-kv-unified", *flags)


@pytest.fixture(scope="module")
def tape(engine: EngineProcess) -> Iterator[Tape]:
    with Tape(engine.url) as found:
        yield found


@pytest.fixture(scope="module")
def gate(tape: Tape, start_gate: StartGate) -> RunningGate:
    tenants = {"demo": "output_tokens_default = 1\nqueue_timeout_s = 60\n"}
    topology = '[engine]\nkv_topology = "divided"\n'
    return start_gate(tape.url, tenants=tenants, config=f"{topology}[http]\nbody_timeout_s = 1\n")


# -- HTTP, read strictly


@dataclass
class Heard:
    """One answer: `body` is whole, or there would be none."""

    status: int
    headers: dict[str, str]
    body: bytes


class Ended(Exception):
    """The gate closed the connection before the first byte of an answer."""


class Wire:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, gate: RunningGate) -> AsyncIterator[Wire]:
        parts = urlsplit(gate.url)
        wire = cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=2**24))
        try:
            yield wire
        finally:
            wire.writer.transport.abort()
            with contextlib.suppress(OSError):
                await wire.writer.wait_closed()

    async def answer(self, *, head_only: bool = False) -> Heard:
        """The next answer, complete within `ANSWER_TIMEOUT_S`."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                heard = await self._one(head_only=head_only)
                if heard.status != 100:
                    return heard

    async def _one(self, *, head_only: bool) -> Heard:
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise AssertionError(f"half a head: {error.partial[:200]!r}") from None
            raise Ended from None
        line, *lines = head.decode("latin-1")[:-4].split("\r\n")
        version, status, _ = line.split(" ", 2)
        assert version in {"HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0"}, line  # the request's own
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        was_http = headers.get("x-kvgate-reason") not in {"bad_http", "head_too_large"}
        if (head_only and was_http) or int(status) in {100, 204, 304}:
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = await self._chunks()
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            assert version != "HTTP/1.1" or headers.get("connection") == "close", head
            body = await self.reader.read(-1)
        return Heard(int(status), headers, body)

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append(await self.reader.readexactly(size))
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return b"".join(parts)


def check_shape(path: str, heard: Heard) -> None:
    """A whole answer in the dialect of its path: what was asked for, or a JSON error."""
    assert heard.status != 500, (path, heard)
    route = ROUTES.get(path)
    family = route.dialect.name.partition("_")[0] if route is not None else "openai"
    if heard.status < 400:
        assert heard.status in {200, 204}, heard
        if heard.headers.get("content-type", "").startswith("text/event-stream"):
            assert heard.body.endswith(b"\n\n"), heard
            assert b"event: error" not in heard.body
            assert b'data: {"error"' not in heard.body
        elif heard.status == 200:
            json.loads(heard.body)
        return
    assert heard.headers["content-type"].startswith("application/json"), heard
    found = json.loads(heard.body)
    error = found["error"]
    assert error["message"], heard
    assert error["reason"] == heard.headers["x-kvgate-reason"], heard
    assert heard.headers["x-request-id"], heard
    if family == "anthropic":
        assert found["type"] == "error", heard
        assert isinstance(error["type"], str), heard
    elif family == "llamacpp":
        assert error["code"] == heard.status, heard
    else:
        assert isinstance(error["code"], str), heard
        assert {"type", "param"} <= set(error), heard
    assert SECRET.encode() not in heard.body, "an error quotes the prompt"


# -- bodies


def sound(draw: random.Random, path: str) -> dict[str, Any]:
    """A body for a path; most ask for more than fits, so that they are counted and refused."""
    words = draw.choice(("a", "Hi", "b c", SECRET, "é🦜", "\u0000", ""))
    blocks = [{"type": "text", "text": words}]
    if draw.random() < 0.1:
        blocks.append({"type": copy.deepcopy(draw.choice(ZOO)), "text": words})
    messages = [{"role": "user", "content": draw.choice((words, blocks))}]
    prompt = draw.choice((words or "a", [1, 2, 3], ["a", 5], ["a", "b"], [[1], "b"]))
    by_path: dict[str, dict[str, Any]] = {
        "chat": {"messages": messages},
        "apply-template": {"messages": messages},
        "messages": {"messages": messages, "system": words},
        "responses": {"input": draw.choice((words or "a", messages)), "instructions": "Be brief."},
        "completion": {"prompt": prompt},
        "infill": {"input_prefix": words, "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}]},
        "embedding": {draw.choice(("input", "content")): prompt},
        "rerank": {"query": "a", draw.choice(("documents", "texts")): ["a", words]},
        "detokenize": {"tokens": [1, 2, 3]},
        "tokenize": {"content": words, "add_special": True},
    }
    body = dict(next(made for part, made in by_path.items() if part in path))
    if draw.random() < 0.92:
        body |= dict.fromkeys(draw.sample(LIMITS, draw.randrange(1, 4)), 100_000)
        body |= {"max_tokens": 100_000}
    optional = {"stream": True, "model": "smollm2", "n": 2, "n_cmpl": 2, "id_slot": 0, "cache_prompt": True}
    optional |= {
        "temperature": 0.5,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "x": {"y": [1.0, None]},
    }
    optional |= {"response_fields": ["content"], "tools": [], "logit_bias": [[1, -1]], "cache_salt": "s", "seed": 1}
    return body | {name: optional[name] for name in draw.sample(list(optional), draw.randrange(4))}


ZOO: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, -2, 3.7, 10**12, 10**30, -(10**18), 1e308, "", "3", "x" * 300, [], {}, [[]], [{}],
    {"a": {"b": []}}, [None], [1, None], ["a", 1, {}], {"type": []}, {"type": "image"}, {"role": "user"}, "\u0000",
    [{"type": "text"}], [{"type": {}}], {"text": 5}, [[[1]]], ["a"] * 40, 2**31, 2**63, 2**64,
)  # fmt: skip
"""Values of every kind, to stand where others belong."""

LITERALS: Final = (
    "NaN", "Infinity", "-Infinity", "1e309", "-1e400", "1e-400", "1" + "0" * 400, "-" + "9" * 5000, "01", "+1", ".5",
    "1.", "0x10", "1_000", "--1", "-", "-0", "1E+2", "True", "None", "undefined", "'x'", "tru", '"\\x41"',
    '"\\ud800"',
    '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u00"', "/**/1", "1//", "[1,]", '{"a":1,}', '{"a":1,"a":2}', "[1 2]",
    '"\x01"', '"\t"', '"\x7f"', '"\n"', '"a', "99999999999999999999", "2147483648", "1.0000000000000000001", '"\\/"',
)  # fmt: skip
"""What stands for a value and may be none."""

RAW: Final = (
    b"\xff",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82",
    b"\x00",
    b"\x80",
    b"\xef\xbb\xbf",
)


def mutated(draw: random.Random, path: str, mark: int) -> bytes:
    """A body of which it is not known whether it is a request; where it could be one, it has its mark."""
    body = sound(draw, path)
    kind = draw.randrange(14)
    if kind == 0:
        return _marked(json.dumps(body).encode(), mark)
    if kind <= 3:
        for _ in range(draw.randrange(1, 3)):
            _replace(draw, body)
        return _marked(json.dumps(body, ensure_ascii=draw.random() < 0.5).encode(), mark)
    raw = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode()
    return _MUTATIONS[kind - 4](draw, raw, body, mark)


def _marked(raw: bytes, mark: int) -> bytes:
    return raw if raw[:1] != b"{" else b'{"x_mark":%d%s' % (mark, (b"," + raw[1:]) if raw[1:2] != b"}" else raw[1:])


def _replace(draw: random.Random, body: dict[str, Any]) -> None:
    """Another value at some place, at any depth."""
    node: Any = body
    while True:
        places: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        place = draw.choice(places)
        if isinstance(node[place], dict | list) and node[place] and draw.random() < 0.6:
            node = node[place]
            continue
        node[place] = copy.deepcopy(draw.choice(ZOO))
        return


def _flipped(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    found = bytearray(raw)
    for _ in range(draw.randrange(1, 5)):
        found[draw.randrange(1, len(found))] = draw.choice((draw.randrange(256), ord(draw.choice('{}[]",:\\0-e '))))
    return _marked(bytes(found), mark)


def _truncated(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    raw = _marked(raw, mark)
    return raw[: draw.randrange(len(raw))]


def _spliced(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    at, until, to = (draw.randrange(1, len(raw)) for _ in range(3))
    return _marked(raw[:to] + raw[min(at, until) : max(at, until)] + raw[to + draw.choice((0, 1, 9)) :], mark)


def _doubled(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    """A judged key again, in plain or escaped spelling, before or behind the rest."""
    key = draw.choice((*body, *LIMITS, "cache_prompt", "id_slot", "stream", "n"))
    at = draw.randrange(len(key))
    spelled = key if draw.random() < 0.4 else f"{key[:at]}\\u{ord(key[at]):04{draw.choice('xX')}}{key[at + 1 :]}"
    member = f'"{spelled}":{json.dumps(draw.choice((-1, 1, 5, True, *ZOO)))}'.encode()
    return _marked(b"{" + member + b"," + raw[1:] if draw.random() < 0.5 else raw[:-1] + b"," + member + b"}", mark)


def _nested(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    depth = draw.choice((10, 190, 199, 200, 201, 1000, 20_000))
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"content":', b"}]")))
    inside = opening * depth + b"1" + closing * (depth if draw.random() < 0.8 else 0)
    key = draw.choice((b"x", b"messages", b"prompt", b"input", b"stop"))
    return _marked(raw[:-1] + b',"%s":%s}' % (key, inside), mark) if draw.random() < 0.9 else _marked(inside, mark)


def _literal(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    key = draw.choice((*LIMITS, "x", "n", "seed", "model", *body))
    body = {**body, key: "@@"}
    return _marked(json.dumps(body).replace('"@@"', draw.choice(LITERALS), 1).encode(), mark)


def _encoded(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    codec = draw.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "utf-7", "latin-1"))
    text = json.dumps(body, ensure_ascii=codec == "latin-1")
    return _marked(text.encode(), mark).decode().encode(codec, "replace")


def _corrupt(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    at = draw.randrange(1, len(raw))
    return _marked(raw[:at] + draw.choice(RAW) + raw[at:], mark)


def _spaced(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    space = b"".join(draw.choices((b" ", b"\t", b"\n", b"\r", b"\x0b", b"\xc2\xa0", b"\x0c"), k=draw.randrange(1, 4)))
    return draw.choice(
        (space + _marked(raw, mark), _marked(raw, mark) + space, _marked(raw[:1] + space + raw[1:], mark))
    )


def _other(draw: random.Random, raw: bytes, body: dict[str, Any], mark: int) -> bytes:
    others = (
        b"",
        b"null",
        b"[]",
        b"{}",
        b'""',
        b"0",
        raw + raw,
        b"[" + raw + b"]",
        b'"' + raw,
        b"a=b&c=d",
        b"--x\r\n",
    )
    return _marked(draw.choice(others), mark)


_MUTATIONS: Final[tuple[Callable[[random.Random, bytes, dict[str, Any], int], bytes], ...]] = (
    _flipped, _truncated, _spliced, _doubled, _nested, _literal, _encoded, _corrupt, _spaced, _other,
)  # fmt: skip

CONTENT_TYPES: Final = (
    "application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "",
    "application/json; charset=utf-16", "image/png", "x", "application/json, text/html", ";;=", "text/event-stream",
)  # fmt: skip


@dataclass
class Sent:
    """One request of the run."""

    mark: int
    path: str
    body: bytes
    heard: Heard | None = None

    def raw(self, draw: random.Random) -> bytes:
        kind = draw.choice(CONTENT_TYPES)
        lines = [
            f"POST {self.path} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {KEY}",
            f"x-request-id: h-{self.mark}",
        ]
        lines += [f"Content-Type: {kind}"] if kind else []
        if draw.random() < 0.15:
            cuts = sorted(draw.randrange(len(self.body) + 1) for _ in range(3))
            parts = [self.body[a:b] for a, b in zip([0, *cuts], [*cuts, len(self.body)], strict=True)]
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"
            lines.append("Transfer-Encoding: chunked")
        else:
            body = self.body
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def send_bodies(gate: RunningGate, requests: list[Sent], seed: int) -> None:
    """All of them over one connection after another, a few pipelined at a time."""
    draw = random.Random(seed)
    left = list(reversed(requests))
    while left:
        async with Wire.to(gate) as wire:
            while left:
                batch = [left.pop() for _ in range(min(len(left), draw.choice((1, 1, 2, 4, 8))))]
                wire.writer.write(b"".join(sent.raw(draw) for sent in batch))
                answered = await _answers(wire, batch)
                left += reversed(batch[answered:])
                if answered < len(batch):
                    break


async def _answers(wire: Wire, batch: list[Sent]) -> int:
    """Reads the answers to some requests; how many there were until the gate said that it closes."""
    for at, sent in enumerate(batch):
        sent.heard = await wire.answer()
        assert sent.heard.headers["x-request-id"] == f"h-{sent.mark}", "an answer to another request"
        if sent.heard.headers.get("connection") == "close":
            return at + 1
    return len(batch)


# -- heads


@dataclass
class Head:
    """Bytes that are almost a request. `asks`: how many answers may come at most."""

    raw: bytes
    asks: int = 1
    heard: list[Heard] = field(default_factory=list)


ODD_PATHS: Final = (
    "/v1/chat%2Fcompletions", "/%63ompletion", "//completion", "/completion/", "/./completion", "/x/../completion",
    "/completion;x", "/completion%00", "/completion%20", "/Completion", "/COMPLETION", "/completion#x",
    "/%2e/completion",
    "http://127.0.0.1/completion", "http://evil.example/completion", "//evil.example/completion", "completion",
    "*", "",
    "/slots/0?action=erase", "/slots", "/lora-adapters", "/metrics", "/health", "/v1/../slots", "/props/", "/é",
    "/completion\\", "/completion?x=1", "/completion?", "/v1/models?x=%ff", "http:///completion", "https://x:99999/",
    "/" + "a" * 9000, "/completion?" + "b" * 9000, "/completion%252e", "/;/completion", "/v1//messages",
    "/tokenize/..",
    "ftp://x/completion", "/cors-proxy?url=http://x", "/tools", "http://[::1/completion", "/completion\x7f", "/\xff",
)  # fmt: skip

METHODS: Final = (
    "POST", "POST", "POST", "GET", "post", "Post", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT",
    "PRI", "", "P OST", "POST\t", "XPOST", "G" * 5000, "PO\x00ST",
)  # fmt: skip

VERSIONS: Final = (
    *("HTTP/1.1",) * 6, "HTTP/1.0", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.2", "http/1.1", "", "X",
)  # fmt: skip

HEADER_LINES: Final = (
    "Content-Length: 5", "Content-Length: +5", "Content-Length: -1", "Content-Length: 0x5", "Content-Length: 5, 5",
    "Content-Length: 5, 6", "Content-Length: 99999999999999999999999", "Content-Length:", "Content-Length: five",
    "Content-Length : 5", " Content-Length: 5", "Content-Length: 5 ", "Content_Length: 5", "Content-Length:\t5",
    "Transfer-Encoding: chunked", "Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, chunked",
    "TE: trailers",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity", "Transfer-Encoding:\x0bchunked",
    "Transfer-Encoding : chunked", "Transfer-Encoding: Chunked", "Transfer-Encoding: chunked\x00",
    "Expect: 100-continue",
    "Expect: 200-ok", "Connection: close", "Connection: keep-alive, authorization", "Connection: upgrade",
    "Upgrade: h2c", "Upgrade: websocket", "HTTP2-Settings: AAMAAABkAAQAAP__", "Host: y", "Host:", "Host: a b",
    "Authorization: Bearer sk-other", "Authorization: Bearer sk-demo", "Authorization: Basic c2s6", "Authorization:",
    "x-api-key: sk-demo", "x-api-key: sk-other", "X-Request-Id: a b\x0bc", "X-Request-Id: " + "i" * 500, "X: \x00",
    "X: a\rb", "X: a\r\n folded", "X: a\r\n\tfolded: more", "X\x00Y: 1", "X Y: 1", ": nameless", "no colon",
    "X: é\xff",
    "X: " + "b" * 9000, "X" * 9000 + ": b", "Content-Encoding: gzip", "Content-Encoding: br",
    "Content-Encoding: gzip, x",
    "Content-Type: \x01", "Origin: null", "Origin: https://evil.example\x00", "Cookie: a=b; c", "Range: bytes=0-1",
    "X-Forwarded-For: 1.2.3.4", "X-HTTP-Method-Override: DELETE", "Trailer: Content-Length", "\x0bX: 1", "X:\x7f",
)  # fmt: skip

CHUNKS: Final = (
    b"2\r\n[]\r\n0\r\n\r\n", b"2;x=y\r\n[]\r\n0\r\n\r\n", b"0x2\r\n[]\r\n0\r\n\r\n", b"2 \r\n[]\r\n0\r\n\r\n",
    b"-2\r\n[]\r\n0\r\n\r\n", b"2\n[]\n0\n\n", b"2\r\n[]0\r\n\r\n", b"3\r\n[]\r\n0\r\n\r\n", b"\r\n[]\r\n0\r\n\r\n",
    b"fffffffffffffffff\r\n[]\r\n0\r\n\r\n", b"2\r\n[]\r\n0\r\nX: 1\r\n\r\n",
    b"2\r\n[]\r\n0\r\nContent-Length: 9\r\n\r\n",
    b"2;" + b"x" * 20_000 + b"\r\n[]\r\n0\r\n\r\n", b"1_0\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n", b"2\r[]\r0\r\r",
    b"00000000000000000002\r\n[]\r\n0\r\n\r\n", b"2\r\n[]\r\n" + b"0" * 9000 + b"\r\n\r\n", b"+2\r\n[]\r\n0\r\n\r\n",
)  # fmt: skip

INNER: Final = (
    b"POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-demo\r\nContent-Length: 31\r\n\r\n"
    b'{"prompt":"smuggled","n_predict"'
)
"""Half a request that would be one more, were a body's end seen too early."""


def hostile_head(draw: random.Random) -> Head:
    kind = draw.choice((0, 0, 1, 2, 2, 3, 4, 5))
    body = b'{"prompt":"a","max_tokens":100000}'
    lines = ["Host: x"] if draw.random() < 0.95 else []
    lines += [f"Authorization: Bearer {KEY}"] if draw.random() < 0.9 else []
    path = draw.choice(ODD_PATHS) if kind in {0, 5} else draw.choice(POSTED)
    method = draw.choice(METHODS) if kind in {1, 5} else "POST"
    version = draw.choice(VERSIONS) if kind in {1, 5} else "HTTP/1.1"
    odd = draw.sample(HEADER_LINES, draw.randrange(1, 4)) if kind in {2, 5} else []
    if kind == 3:  # two lengths, and a second request inside the body
        framings = [line for line in HEADER_LINES if line.lower().strip().startswith(("content-length", "transfer"))]
        odd = [draw.choice(framings)]
        body = draw.choice((b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"[]")) + INNER
    if kind == 4:
        lines.append("Transfer-Encoding: chunked")
        body = draw.choice(CHUNKS)
    elif draw.random() < 0.4 or not any("length" in line.lower() or "transfer" in line.lower() for line in odd):
        lines.append(f"Content-Length: {len(body)}")
    if draw.random() < 0.02:
        lines += [f"X-{at}: {'v' * 60}" for at in range(draw.choice((90, 400, 3000)))]
    draw.shuffle(lines)
    end = "\n" if draw.random() < 0.05 else "\r\n"
    head = end.join(
        [f"{method} {path} {version}", *lines, *odd, "Connection: close" if draw.random() < 0.4 else "Y: 1"]
    )
    raw = head.encode("latin-1", "replace") + end.encode() * 2 + body
    return Head(raw, 1 + raw.count(b"HTTP/"))


LAST: Final = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-demo\r\nConnection: close\r\n\r\n"


async def send_heads(gate: RunningGate, heads: list[Head], seed: int) -> None:
    """Each on its own connection, a sound request behind it, at once or after the first answer; read to the end."""
    draw = random.Random(seed)
    for head in heads:
        async with Wire.to(gate) as wire:
            at_once = draw.random() < 0.3
            wire.writer.write(head.raw + (LAST if at_once else b""))
            with contextlib.suppress(Ended, ConnectionResetError):
                head.heard.append(await wire.answer(head_only=head.raw.startswith(b"HEAD ")))
                if not at_once:
                    wire.writer.write(LAST)
                while head.heard[-1].headers.get("connection") != "close":
                    head.heard.append(await wire.answer())


# -- the run


@pytest.fixture(scope="module")
def sockets_before(gate: RunningGate) -> int:
    gate.status()
    return _sockets(gate)


def _sockets(gate: RunningGate) -> int:
    """Its TCP connections and listeners; those to the store are a pool on a unix socket, and stay."""
    tcp = {f"socket:[{line.split()[9]}]" for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    found = 0
    for descriptor in Path(f"/proc/{gate.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it goes away meanwhile
            found += str(descriptor.readlink()) in tcp
    return found


@pytest.fixture(scope="module")
def bodies() -> list[Sent]:
    draw = random.Random(3)
    paths = [draw.choice(POSTED) for _ in range(BODIES)]
    return [Sent(mark, path, mutated(draw, path, mark)) for mark, path in enumerate(paths)]


@pytest.fixture(scope="module")
def heads() -> list[Head]:
    draw = random.Random(4)
    return [hostile_head(draw) for _ in range(HEADS)]


async def test_hostile_bodies_are_answered_or_refused(
    gate: RunningGate, sockets_before: int, bodies: list[Sent]
) -> None:
    """Pipelined over a few connections: each has its own whole answer, in its dialect, and none is a 500."""
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for at in range(CONNECTIONS):
            group.create_task(send_bodies(gate, bodies[at::CONNECTIONS], at))
    statuses: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for sent in bodies:
        assert sent.heard is not None
        check_shape(sent.path, sent.heard)
        statuses[sent.heard.status] += 1
        reasons[sent.heard.headers.get("x-kvgate-reason", "-")] += 1
    # For -s: what the run was made of.
    print(f"{len(bodies)} bodies in {time.monotonic() - begun:.1f} s: {dict(statuses)} {dict(reasons)}")  # noqa: T201
    failed = [(sent.path, sent.body[:300], sent.heard) for sent in bodies if sent.heard and sent.heard.status == 502]
    assert failed == []
    assert set(statuses) <= {200, 400, 501, 413}
    assert statuses[200] > 200, "hardly anything was let through: this run shows nothing"
    assert reasons["malformed"] > 2000
    assert reasons["generation_overflow"] > 500


async def test_hostile_heads_are_answered_or_cut(gate: RunningGate, heads: list[Head]) -> None:
    """What is not HTTP, or is HTTP in two ways, gets a JSON error or none; never a 500, never a second request."""
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for at in range(CONNECTIONS):
            group.create_task(send_heads(gate, heads[at::CONNECTIONS], at))
    statuses: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for head in heads:
        assert head.heard, head.raw[:300]
        assert len(head.heard) <= head.asks, (head.raw[:300], head.heard)
        for heard in head.heard:
            statuses[heard.status] += 1
            reasons[heard.headers.get("x-kvgate-reason", "-")] += 1
            assert heard.status not in {500, 502}, (head.raw[:300], heard)
            if heard.status >= 400 and heard.body:
                assert json.loads(heard.body)["error"]["message"]
                assert heard.headers["content-type"].startswith("application/json")
    # For -s: what the run was made of.
    print(f"{len(heads)} heads in {time.monotonic() - begun:.1f} s: {dict(statuses)} {dict(reasons)}")  # noqa: T201
    assert reasons["bad_http"] > 300
    assert reasons["path_forbidden"] > 100
    assert reasons["-"] > 100, "no sound request behind a hostile one was answered"


def test_the_engine_read_what_was_judged(gate: RunningGate, tape: Tape, bodies: list[Sent]) -> None:
    """Every inference that reached the engine is strict JSON, was admitted, and has just the limit that was told."""
    by_mark = {sent.mark: sent for sent in bodies}
    dialects = {route.engine_path: route.dialect for route in ROUTES.values() if isinstance(route, Inference)}
    controls = {route.engine_path for route in ROUTES.values() if isinstance(route, Control)}
    seen: set[int] = set()
    for method, path, headers, raw in tape.requests():
        assert method == "GET" or path in ENGINE_PATHS | controls, path
        assert not {"authorization", "x-api-key", "cookie"} & set(headers)
        assert b"smuggled" not in raw
        if method == "GET" or path not in ENGINE_PATHS:
            continue
        body = _strict(raw)
        if "x_mark" not in body:
            assert path == "/v1/messages", raw  # the gate's own probe
            assert set(body) == {"messages", "max_tokens"}, raw
            continue
        sent = by_mark[body["x_mark"]]
        assert sent.mark not in seen, "one request ran twice"
        seen.add(sent.mark)
        heard = sent.heard
        assert heard is not None
        reason = heard.headers.get("x-kvgate-reason")
        assert heard.status == 200 or reason in REFUSED_BY_THE_ENGINE, (sent, raw)
        route = ROUTES[sent.path]
        assert isinstance(route, Inference)
        assert route.engine_path == path
        _check_sent(body, dialects[path].read(raw).ask.output_tokens, dialects[path].name, heard)
        _check_kept(sent.body, body)
    ran = {sent.mark for sent in bodies if sent.heard is not None and "x-kvgate-output-limit" in sent.heard.headers}
    assert seen == ran
    assert len(seen) > 200
    assert gate.metric("kvgate_count_drift_total") == 0
    assert gate.metric("kvgate_reuse_violations_total") == 0


def _check_sent(body: dict[str, Any], reread: int | None, dialect: str, heard: Heard) -> None:
    told = int(heard.headers["x-kvgate-output-limit"])
    generates = "embed" not in dialect and "rerank" not in dialect
    if generates:
        read = [name for name in LIMITS if name in body and not (name == "max_output_tokens" and "chat" in dialect)]
        read = [name for name in read if name != "max_output_tokens" or "responses" in dialect]
        assert [body[name] for name in read] == [told] == [reread], body
        assert type(body[read[0]]) is int
        assert told >= 1
    assert body["cache_prompt"] is False
    assert not {"id_slot", "slot_id", "n_cache_reuse", "prompt_cache_key"} & set(body)
    if heard.status != 200 or heard.headers.get("content-type", "").startswith("text/event-stream"):
        return
    answer = json.loads(heard.body)
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if usage and dialect != "anthropic_messages" and "x-kvgate-prompt-tokens" in heard.headers:
        output = usage.get("completion_tokens", usage.get("output_tokens"))
        assert output is None or output <= told


def _check_kept(sent: bytes, got: dict[str, Any]) -> None:
    """Beside the judged fields nothing has another value than the client gave it."""
    given = json.loads(sent.decode("utf-8-sig"))
    judged = {*LIMITS, "cache_prompt", "id_slot", "n", "n_cmpl", "best_of", "stream_options", "response_fields"}
    judged |= {"prompt_cache_key", "texts", "content", "cache_salt"}
    assert {key: got[key] for key in got if key not in judged} == {
        key: given[key] for key in given if key not in judged
    }


def _strict(raw: bytes) -> dict[str, Any]:
    """One object, UTF-8, no constants, no member twice at its top."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        last.clear()
        last.extend(found)
        return dict(found)

    def constant(name: str) -> Any:
        raise AssertionError(name)

    last: list[tuple[str, Any]] = []
    found = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    assert isinstance(found, dict)
    assert len(found) == len(last), raw
    return found


def test_nothing_is_left_behind(gate: RunningGate, sockets_before: int) -> None:
    """No lease, no request in flight, no connection; alive and ready; and no word of a prompt or a key in the log."""
    status = gate.wait_until_empty(20)
    assert status["ledger"]["running"] == status["in_flight"] == 0
    assert gate.metric("kvgate_requests_total", status="500") == 0
    assert gate.metric("kvgate_requests_total", status="502") == 0
    deadline = time.monotonic() + 20
    while (open_now := _sockets(gate)) > sockets_before + 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert open_now <= sockets_before + 2
    with urllib.request.urlopen(f"{gate.admin_url}/healthz", timeout=10) as answer:
        assert answer.status == 200
    assert gate.ready()["ready"] is True
    log = gate.log_path.read_text()
    for secret in (
        SECRET,
        KEY,
        "sk-other",
        "smuggled",
        "evil.example",
        "Traceback",
        "never retrieved",
        "was destroyed",
    ):
        assert secret not in log, secret
