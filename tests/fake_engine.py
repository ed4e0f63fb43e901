"""A llama-server double on a real socket: the real one's shapes on the wire, and faults where a script asks for one.

Measured on llama.cpp b11549. `tests/e2e/test_fake_engine.py` runs the same assertions on this and on the real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import struct
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import Self

    Reply = Callable[["Exchange"], Awaitable[None]]

COUNTER = "/v1/chat/completions/input_tokens"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
MESSAGES_COUNTER = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
WORDS = ("Hi", ",", " how", " can", " I", " help", " you", "?")
REQUESTS_PER_CONNECTION = 100


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


class FakeEngine:
    """One llama-server; as an async context manager it listens on a free port of 127.0.0.1.

    Every attribute may be changed while it runs. `script(path, reply, ...)` gives the next requests for a path
    other replies than the usual one; the functions below make them.
    """

    def __init__(self, *, n_ctx: int = 512, total_slots: int = 2) -> None:
        self.n_ctx = n_ctx
        self.total_slots = total_slots
        self.models_n_ctx: int | None = None
        self.slots_n_ctx: int | None = None
        self.model = "small"
        self.media_marker: str | None = _marker()
        self.build = "b0-unknown"
        self.loading = False
        self.asleep = False
        self.wakes = 0
        self.load_s = 0.0
        self.slots_shown = True
        self.words = WORDS
        self.cached_tokens = 0
        self.usage_drift_tokens = 0
        self.word_delay_s = 0.0
        self.requests: list[Recorded] = []
        self.connections_made = 0
        self.busy: list[dict[str, Any]] = []
        self._scripts: dict[str, deque[Reply]] = defaultdict(deque)
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def asked(self, path: str) -> list[Recorded]:
        """The requests for one path, in order."""
        return [request for request in self.requests if request.path == path]

    def script(self, path: str, *replies: Reply) -> None:
        """Reply to the next requests for `path` with these, one each."""
        self._scripts[path].extend(replies)

    def next_reply(self, path: str) -> Reply:
        queue = self._scripts[path]
        return queue.popleft() if queue else usual

    async def start(self) -> None:
        """Listen, on the port of the first start."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self), "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and every connection, as the end of the process would."""
        if self._server is not None:
            self._server.close()
            self._server = None
        links = list(self._links)
        for link in links:
            link.transport.abort()
        await asyncio.gather(*(link.gone.wait() for link in links))

    async def replace(self, *, n_ctx: int | None = None) -> None:
        """Another process takes over the port: every connection ends, a new `media_marker` is drawn."""
        await self.stop()
        self.media_marker = _marker()
        self.n_ctx = n_ctx or self.n_ctx
        await self.start()

    # -- what it says of itself

    def props(self) -> dict[str, Any]:
        marker = {} if self.media_marker is None else {"media_marker": self.media_marker}
        return {
            "default_generation_settings": {"params": {"n_predict": -1, "seed": 4294967295}, "n_ctx": self.n_ctx},
            "total_slots": self.total_slots,
            "model_alias": self.model,
            "model_ftype": "Q4_1",
            "model_path": f"/models/{self.model}.gguf",
            "modalities": {"vision": False, "video": False, "audio": False},
            **marker,
            "endpoint_slots": self.slots_shown,
            "endpoint_props": False,
            "endpoint_metrics": False,
            "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            "build_info": self.build,
            "is_sleeping": self.asleep,
        }

    def models(self) -> dict[str, Any]:
        n_ctx = self.models_n_ctx or self.n_ctx
        meta: dict[str, Any] = {"vocab_type": 2, "n_vocab": 49152, "n_ctx": n_ctx, "n_ctx_train": 8192}
        meta |= {"n_embd": 576, "n_params": 134515008, "size": 96576768, "ftype": "Q4_1"}
        entry = {"id": self.model, "aliases": [self.model], "tags": [], "object": "model", "created": 1, "meta": meta}
        return {"object": "list", "data": [{**entry, "owned_by": "llamacpp"}]}

    def slots(self) -> list[dict[str, Any]]:
        n_ctx = self.slots_n_ctx or self.n_ctx
        idle = [
            {"id": at, "n_ctx": n_ctx, "speculative": False, "is_processing": False} for at in range(self.total_slots)
        ]
        return [idle[at] | busy for at, busy in enumerate(self.busy)] + idle[len(self.busy) :]

    def count(self, body: dict[str, Any]) -> int:
        """This engine's tokenizer: a template of 30 tokens, and one token a word."""
        texts = [str(message.get("content") or "") for message in body["messages"]]
        return 30 + sum(len(text.split()) for text in texts)

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """As `count`, of a text or of token ids and texts; with `add_special` a BOS, unless ids come first."""
        content = body.get("content", [])
        pieces = content if isinstance(content, list) else [content]
        bos = [1] if body.get("add_special") and pieces and isinstance(pieces[0], str) else []
        found = [[7 for _ in piece.split()] if isinstance(piece, str) else [piece] for piece in pieces]
        return bos + [token for tokens in found for token in tokens]


def _marker() -> str:
    return f"<__media_{secrets.token_hex(16)}__>"


@dataclass
class Exchange:
    """One request being answered; what a reply works with."""

    engine: FakeEngine
    request: Recorded
    link: _Link
    last: bool = False

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


# -- replies


async def usual(exchange: Exchange) -> None:
    """What llama-server replies."""
    engine, request = exchange.engine, exchange.request
    if engine.asleep and (request.method == "POST" or request.path == "/slots"):
        engine.asleep = False  # from here on, though the model is not loaded yet (seen)
        engine.wakes += 1
        await asyncio.sleep(engine.load_s)
    shown = {"/health": {"status": "ok"}, "/props": engine.props(), "/v1/models": engine.models()}
    if engine.loading:
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
        await exchange.json("503 Service Unavailable", {"error": error})
    elif request.method == "GET" and request.path in shown:
        await exchange.json("200 OK", shown[request.path])
    elif (request.method, request.path) == ("GET", "/slots"):
        await _slots(exchange)
    elif (request.method, request.path) == ("POST", TOKENIZE):
        await exchange.json("200 OK", {"tokens": engine.tokens(request.json)})
    elif request.method == "POST" and request.path in {COUNTER, CHAT}:
        if (body := await _parsed(exchange)) is None:
            return
        if request.path == CHAT:
            await _complete(exchange, body)
        else:
            await exchange.json("200 OK", {"input_tokens": engine.count(body), "object": "response.input_tokens"})
    else:
        error = {"message": "File Not Found", "type": "not_found_error", "code": 404}
        await exchange.json("404 Not Found", {"error": error})


async def _slots(exchange: Exchange) -> None:
    if exchange.engine.slots_shown:
        return await exchange.json("200 OK", exchange.engine.slots())
    problem = "This server does not support slots endpoint. Start it with `--slots`"
    return await _error(exchange, "501 Not Implemented", problem, "not_supported_error")


async def _error(exchange: Exchange, status: str, message: str, kind: str, **more: Any) -> None:
    error = {"code": int(status.split(maxsplit=1)[0]), "message": message, "type": kind, **more}
    await exchange.json(status, {"error": error})


async def _parsed(exchange: Exchange) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = json.loads(exchange.request.body)
    except ValueError:
        await _error(exchange, "400 Bad Request", "[json.exception.parse_error.101]", "invalid_request_error")
        return None
    for message in body["messages"]:
        if "role" not in message:
            problem = f"Failed to parse messages: Missing 'role' in message: {json.dumps(message)}"
            await _error(exchange, "500 Internal Server Error", problem, "server_error")
            return None
        if isinstance(message.get("content"), list) and "image_url" in {part["type"] for part in message["content"]}:
            problem = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
            await _error(exchange, "500 Internal Server Error", problem, "server_error")
            return None
    return body


async def _complete(exchange: Exchange, body: dict[str, Any]) -> None:
    engine, prompt = exchange.engine, exchange.engine.count(body)
    limit = body.get("max_tokens", -1)
    if limit < -1:
        problem = f"Field 'max_tokens': Value must be between -1 <= value <= 2147483647, but got {limit}"
        return await _error(exchange, "400 Bad Request", problem, "invalid_request_error")
    if prompt >= engine.n_ctx:
        problem = (
            f"request ({prompt} tokens) exceeds the available context size ({engine.n_ctx} tokens), try increasing it"
        )
        figures = {"n_prompt_tokens": prompt, "n_ctx": engine.n_ctx}
        return await _error(exchange, "400 Bad Request", problem, "exceed_context_size_error", **figures)
    room = engine.n_ctx - prompt if limit == -1 else min(max(limit, 1), engine.n_ctx - prompt)
    said = engine.words[:room]
    finish = "length" if len(said) == room else "stop"
    usage = _usage(engine, prompt, len(said))
    stamp = {"created": 1, "model": engine.model, "system_fingerprint": engine.build}
    identity = {"id": f"chatcmpl-{secrets.token_hex(8)}", **stamp}
    sequences = range(body.get("n") or 1)
    if not body.get("stream"):
        if engine.word_delay_s:
            await asyncio.sleep(engine.word_delay_s * len(said))
        message = {"role": "assistant", "content": "".join(said)}
        choices = [{"finish_reason": finish, "index": at, "message": message} for at in sequences]
        answer = {
            "choices": choices,
            **identity,
            "object": "chat.completion",
            "usage": usage,
            "timings": _timings(usage),
        }
        return await exchange.json("200 OK", answer)
    await exchange.begin_stream()
    for at in sequences:
        await _tell(exchange, identity, index=at, said=said, finish=finish, usage=usage)
    await exchange.chunk(b"data: [DONE]\n\n")
    return await exchange.end_stream()


async def _tell(
    exchange: Exchange,
    identity: dict[str, Any],
    *,
    index: int,
    said: tuple[str, ...],
    finish: str,
    usage: dict[str, Any],
) -> None:
    """One sequence's events: the role with the first word in one HTTP chunk, the end with the usage in another."""

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _data({"choices": choices, **identity, "object": "chat.completion.chunk", **more})

    def delta(fields: dict[str, Any], finish_reason: str | None = None) -> list[dict[str, Any]]:
        return [{"finish_reason": finish_reason, "index": index, "delta": fields}]

    held = event(delta({"role": "assistant", "content": None}))
    for word in said:
        await asyncio.sleep(exchange.engine.word_delay_s)
        await exchange.chunk(held + event(delta({"content": word})))
        held = b""
    timings = _timings(usage)
    if (exchange.request.json.get("stream_options") or {}).get("include_usage"):
        await exchange.chunk(event(delta({}, finish)) + event([], usage=usage, timings=timings))
    else:
        await exchange.chunk(event(delta({}, finish), timings=timings))


def _usage(engine: FakeEngine, prompt: int, output: int) -> dict[str, Any]:
    prompt += engine.usage_drift_tokens
    details = {"cached_tokens": engine.cached_tokens}
    total = prompt + output
    return {
        "completion_tokens": output,
        "prompt_tokens": prompt,
        "total_tokens": total,
        "prompt_tokens_details": details,
    }


def _timings(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"cache_n": cached, "prompt_n": usage["prompt_tokens"] - cached, "predicted_n": usage["completion_tokens"]}


def _data(document: Any) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


DELTA = _data({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "Hi"}}]})


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


def error_event(message: str = "Context size has been exceeded.") -> Reply:
    """An error inside a 200 stream, and no [DONE] behind it."""

    async def reply(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(DELTA)
        await exchange.chunk(_data({"error": {"code": 500, "message": message, "type": "server_error"}}))
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
        await exchange.chunk(b"data: [DONE]\n\n")
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


# -- the wire


class _Link(asyncio.Protocol):
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
            with _noticed(request):
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
