"""The fake engine is like the real one: each assertion here holds for both, on raw bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest

from kvgate.lab.engine_process import EngineProcess
from kvgate.lab.fetch import fetch_model
from tests.e2e.ports import free_port
from tests.fake_engine import CHAT, COUNTER, REQUESTS_PER_CONNECTION, TOKENIZE, FakeEngine, error_event

pytestmark = pytest.mark.engine

# Greedy: an answer whose first token is half a character has another first chunk (seen: no role in it).
HELLO = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3, "temperature": 0}
JSON_HEADERS = ["server", "access-control-allow-origin", "content-type", "content-length"]
EVENT_KEYS = {"choices", "created", "id", "model", "system_fingerprint", "object"}


@dataclass
class Wire:
    """One answer as it stood on the wire; `closed` is whether the engine ended the connection behind it."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes]
    closed: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]


class Socket:
    """A client that adds nothing of its own."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        length = f"Content-Length: {len(body)}\r\n" if method == "POST" else ""
        self._writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n".encode() + body)

    async def receive(self) -> Wire:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        chunks = []
        if "content-length" in headers:
            body = await self._reader.readexactly(int(headers["content-length"]))
        else:
            while size := int(await self._reader.readline(), 16):
                chunks.append((await self._reader.readexactly(size + 2))[:-2])
            await self._reader.readexactly(2)
            body = b"".join(chunks)
        return Wire(int(head[0].split()[1]), headers, body, chunks, await self._ended())

    async def _ended(self) -> bool:
        try:
            async with asyncio.timeout(0.3):
                return await self._reader.read(1) == b""
        except TimeoutError:
            return False


async def ask(url: str, method: str, path: str, body: Any = b"") -> Wire:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with Socket(url) as client:
        await client.send(method, path, data)
        return await client.receive()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ["-m", str(fetch_model()), "-c", "1024", "-np", "2", "--no-kv-unified", "--alias", "small"]
    with EngineProcess(arguments, log_path=tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine.url


@pytest.fixture(params=["fake", "real"])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    if request.param == "real":
        yield request.getfixturevalue("real")
        return
    async with FakeEngine() as engine:
        yield engine.url


async def test_what_it_says_of_itself(url: str) -> None:
    """Slots, context and the process's own mark stand where discovery reads them."""
    props = await ask(url, "GET", "/props")
    assert props.json["default_generation_settings"]["n_ctx"] == 512
    assert props.json["total_slots"] == 2
    assert re.fullmatch(r"<__media_\w{32}__>", props.json["media_marker"])
    for field in ("model_path", "model_ftype", "model_alias", "build_info", "chat_template"):
        assert isinstance(props.json[field], str)
    assert props.json["endpoint_slots"] is True
    models = (await ask(url, "GET", "/v1/models")).json
    assert set(models) >= {"object", "data"}
    (entry,) = models["data"]
    assert (entry["id"], entry["aliases"]) == ("small", ["small"])
    assert entry["meta"] == {
        "vocab_type": 2,
        "n_vocab": 49152,
        "n_ctx": 512,
        "n_ctx_train": 8192,
        "n_embd": 576,
        "n_params": 134515008,
        "size": 96576768,
        "ftype": "Q4_1",
    }
    assert (await ask(url, "GET", "/health")).json == {"status": "ok"}


async def test_each_slot_tells_its_context_and_whether_it_works(url: str) -> None:
    slots = (await ask(url, "GET", "/slots")).json
    assert [slot["id"] for slot in slots] == [0, 1]
    for slot in slots:
        assert (slot["n_ctx"], slot["speculative"], slot["is_processing"]) == (512, False, False)


async def test_a_good_answer_keeps_the_connection(url: str) -> None:
    """Five seconds and a hundred requests, by its own word."""
    health = await ask(url, "GET", "/health")
    assert list(health.headers) == [*JSON_HEADERS, "keep-alive"]
    assert health.headers["keep-alive"] == "timeout=5, max=100"
    assert not health.closed


async def test_the_hundredth_answer_says_that_it_is_the_last(url: str) -> None:
    async with Socket(url) as client:
        for _ in range(REQUESTS_PER_CONNECTION - 1):
            await client.send("GET", "/health")
            reader = client._reader
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b'{"status":"ok"}'))
            assert b"Connection: close" not in head
        await client.send("GET", "/health")
        last = await client.receive()
    assert (last.headers["connection"], last.closed) == ("close", True)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "says"),
    [
        ("GET", "/nothing", b"", 404, "not_found_error", "File Not Found"),
        ("GET", CHAT, b"", 404, "not_found_error", "File Not Found"),
        ("POST", COUNTER, b"{bad json", 400, "invalid_request_error", "parse_error.101"),
        ("POST", COUNTER, {"messages": [{"content": "x"}]}, 500, "server_error", "Missing 'role' in message"),
        ("POST", CHAT, {**HELLO, "max_tokens": -5}, 400, "invalid_request_error", "but got -5"),
        (
            "POST",
            COUNTER,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
            500,
            "server_error",
            "image input is not supported",
        ),
    ],
)
async def test_whatever_is_refused_ends_the_connection(
    url: str, *, method: str, path: str, body: Any, status: int, kind: str, says: str
) -> None:
    answer = await ask(url, method, path, body)
    assert answer.status == answer.json["error"]["code"] == status
    assert answer.json["error"]["type"] == kind
    assert says in answer.json["error"]["message"]
    assert list(answer.headers) == [*JSON_HEADERS, "connection"]
    assert (answer.headers["connection"], answer.closed) == ("close", True)


@pytest.mark.parametrize("special", [{}, {"add_special": True, "parse_special": True}])
async def test_the_tokenizer_takes_texts_ids_and_lists_of_both(url: str, special: dict[str, bool]) -> None:
    """Ids come back as they are, with no BOS before them; before a text there is one where the model wants it."""

    async def tokens(content: Any) -> list[int]:
        answer = await ask(url, "POST", TOKENIZE, {"content": content, **special})
        assert (answer.status, set(answer.json)) == (200, {"tokens"})
        assert not answer.closed
        return list(answer.json["tokens"])

    text = await tokens("one two three")
    assert len(text) - 3 in ({0, 1} if special else {0})
    assert await tokens([5, 6]) == [5, 6]
    assert (await tokens([5, "one two three"]))[0] == 5
    assert len(await tokens([5, "one two three"])) == 4
    assert await tokens(["one two three", 5]) == [*text, 5]
    assert await tokens("") in ([], [1]) if special else await tokens("") == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_refused_with_its_figures(url: str, *, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hello " * 600}], "stream": stream}
    error = (await ask(url, "POST", CHAT, body)).json["error"]
    assert (error["code"], error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 512)
    assert error["n_prompt_tokens"] == (await ask(url, "POST", COUNTER, body)).json["input_tokens"]


async def test_the_counter_tells_the_usage(url: str) -> None:
    counted = await ask(url, "POST", COUNTER, HELLO)
    assert set(counted.json) == {"input_tokens", "object"}
    assert counted.json["object"] == "response.input_tokens"
    answer = await ask(url, "POST", CHAT, HELLO)
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] == counted.json["input_tokens"]
    assert usage["completion_tokens"] == 3
    assert set(usage) == {"completion_tokens", "prompt_tokens", "total_tokens", "prompt_tokens_details"}
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens"}
    assert set(answer.json) == EVENT_KEYS | {"usage", "timings"}
    (choice,) = answer.json["choices"]
    assert (choice["finish_reason"], choice["index"], choice["message"]["role"]) == ("length", 0, "assistant")
    assert list(answer.headers) == [*JSON_HEADERS, "keep-alive"]
    assert not answer.closed


async def test_a_stream_on_the_wire(url: str) -> None:
    """Chunks hold one event or two; the connection ends behind the last one, although the head said keep-alive."""
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    answer = await ask(url, "POST", CHAT, body)
    assert list(answer.headers.items())[2:] == [
        ("x-accel-buffering", "no"),
        ("content-type", "text/event-stream"),
        ("transfer-encoding", "chunked"),
        ("keep-alive", "timeout=5, max=100"),
    ]
    assert answer.closed
    assert all(chunk.endswith(b"\n\n") for chunk in answer.chunks)
    assert answer.chunks[0].count(b"data: ") == 2
    assert answer.chunks[-2].count(b"data: ") == 2
    assert answer.chunks[-1] == b"data: [DONE]\n\n"
    *_, end, usage, done = answer.events
    assert done == "[DONE]"
    assert answer.events[0]["choices"] == [
        {"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}
    ]
    assert end["choices"] == [{"finish_reason": "length", "index": 0, "delta": {}}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert set(usage) == EVENT_KEYS | {"usage", "timings"}
    assert all(set(event) == EVENT_KEYS for event in answer.events[:-2])


async def test_a_stream_without_usage_ends_with_timings(url: str) -> None:
    answer = await ask(url, "POST", CHAT, {**HELLO, "stream": True})
    assert not any("usage" in event for event in answer.events)
    end = answer.events[-2]
    assert end["choices"][0]["finish_reason"] == "length"
    assert end["timings"]["predicted_n"] == 3
    assert "cache_n" in end["timings"]


async def test_usage_is_told_once_a_choice(url: str) -> None:
    """Of n answers the engine tells the output of one at a time: in a whole answer of one alone."""
    body = {**HELLO, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    events = (await ask(url, "POST", CHAT, body)).events
    assert [event["usage"]["completion_tokens"] for event in events[:-1] if "usage" in event] == [3, 3]
    answer = (await ask(url, "POST", CHAT, {**HELLO, "n": 2})).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 3


@pytest.fixture(scope="module")
def second_real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    arguments = ["-m", str(fetch_model()), "-c", "256", "-np", "2", "--kv-unified", "--no-slots"]
    log_path = tmp_path_factory.mktemp("engine") / "engine.log"
    engine = EngineProcess(arguments, log_path=log_path, port=free_port())
    yield engine
    engine.stop()


async def _met_loading(engine: EngineProcess) -> Wire:
    starting = asyncio.create_task(asyncio.to_thread(engine.start))
    while True:
        try:
            found = await ask(engine.url, "GET", "/props")
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.01)
        else:
            await starting
            return found


@pytest.mark.parametrize("kind", ["fake", "real"])
async def test_loading_without_slots_and_out_of_cells(kind: str, second_real: EngineProcess) -> None:
    """503 to all while the model loads, 501 at /slots, and the error event of a full pool, without a [DONE]."""
    if kind == "real":
        loading = await _met_loading(second_real)
        await _check_odd_ends(second_real.url, loading)
        return
    async with FakeEngine(n_ctx=256) as engine:
        engine.loading = True
        loading = await ask(engine.url, "GET", "/props")
        engine.loading, engine.slots_shown = False, False
        engine.script(CHAT, error_event(), error_event())
        await _check_odd_ends(engine.url, loading)


async def _check_odd_ends(url: str, loading: Wire) -> None:
    assert loading.status == 503
    assert loading.json == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
    assert (loading.headers["connection"], loading.closed) == ("close", True)
    slots = await ask(url, "GET", "/slots")
    assert (slots.status, slots.json["error"]["type"]) == (501, "not_supported_error")
    assert (slots.headers["connection"], slots.closed) == ("close", True)
    assert (await ask(url, "GET", "/props")).json["endpoint_slots"] is False
    words = {"messages": [{"role": "user", "content": "word " * 90}], "ignore_eos": True, "stream": True}
    both = await asyncio.gather(*(ask(url, "POST", CHAT, words) for _ in range(2)))
    for answer in both:
        assert answer.status == 200
        assert answer.events[-1] == {
            "error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}
        }
        assert answer.closed
