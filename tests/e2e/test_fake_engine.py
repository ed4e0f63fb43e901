"""The fake engine is like the real one: each assertion here holds for both, on raw bytes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from kvgate.lab.engine_process import EngineProcess
from kvgate.lab.fetch import fetch_model
from tests.e2e.ports import free_port
from tests.fake_engine import (
    CHAT,
    COMPLETION,
    COMPLETIONS,
    COUNTER,
    EMBEDDINGS,
    FAMILIES,
    MESSAGES,
    MESSAGES_COUNTER,
    REQUESTS_PER_CONNECTION,
    RESPONSES,
    RESPONSES_COUNTER,
    TOKENIZE,
    FakeEngine,
    error_event,
)

pytestmark = pytest.mark.engine

# Greedy: an answer whose first token is half a character has another first chunk (seen: no role in it).
HELLO = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3, "temperature": 0}
JSON_HEADERS = ["server", "access-control-allow-origin", "content-type", "content-length"]
STREAM_HEADERS = [
    ("x-accel-buffering", "no"),
    ("content-type", "text/event-stream"),
    ("transfer-encoding", "chunked"),
    ("keep-alive", "timeout=5, max=100"),
]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    COMPLETIONS: {"prompt": "Once upon", "max_tokens": 3, "temperature": 0},
    RESPONSES: {"input": "Say hi.", "max_output_tokens": 3, "temperature": 0},
    MESSAGES: HELLO,
    COMPLETION: {"prompt": "Once upon", "n_predict": 3, "temperature": 0},
}
NAMES = {
    RESPONSES: [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ],
    MESSAGES: [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ],
}
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
    arguments = ["-m", str(fetch_model()), "-t", "1", "-c", "1024", "-np", "2", "--no-kv-unified", "--alias", "small"]
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
    assert list(answer.headers.items())[2:] == STREAM_HEADERS
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


# -- every family


@pytest.mark.parametrize("path", FAMILIES)
async def test_every_stream_has_one_head_and_ends_the_connection(url: str, path: str) -> None:
    """Whole events only in an HTTP chunk; an end marker where OpenAI's older APIs have one, and nowhere else."""
    answer = await ask(url, "POST", path, {**ASKED[path], "stream": True})
    assert list(answer.headers.items())[2:] == STREAM_HEADERS
    assert answer.closed
    assert all(chunk.endswith(b"\n\n") for chunk in answer.chunks)
    assert (answer.chunks[-1] == b"data: [DONE]\n\n") is (path in {CHAT, COMPLETIONS})
    names = [line[7:] for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert names == NAMES.get(path, [])
    assert [event["type"] for event in answer.events if "type" in event] == names


@pytest.mark.parametrize(
    ("path", "chunks"),
    [(RESPONSES, [5, 1, 1, 4]), (MESSAGES, [3, 1, 1, 3]), (COMPLETION, [1] * 4), (COMPLETIONS, [1] * 5)],
)
async def test_what_begins_and_what_ends_a_stream_stands_in_one_chunk(url: str, path: str, chunks: list[int]) -> None:
    answer = await ask(url, "POST", path, {**ASKED[path], "stream": True})
    assert [chunk.count(b"data: ") for chunk in answer.chunks] == chunks


async def _tokens(url: str, path: str) -> int:
    """The prompt's size by the family's counter."""
    counter = {CHAT: COUNTER, RESPONSES: RESPONSES_COUNTER, MESSAGES: MESSAGES_COUNTER}.get(path)
    if counter is not None:
        answer = await ask(url, "POST", counter, ASKED[path])
        assert set(answer.json) == {"input_tokens"} | ({"object"} if path != MESSAGES else set())
        return int(answer.json["input_tokens"])
    tokenized = await ask(url, "POST", TOKENIZE, {"content": ASKED[path]["prompt"], "add_special": True})
    return len(tokenized.json["tokens"])


async def test_a_completion_tells_its_usage_unasked(url: str) -> None:
    """In the event that ends a choice, before the end marker."""
    prompt = await _tokens(url, COMPLETIONS)
    answer = await ask(url, "POST", COMPLETIONS, ASKED[COMPLETIONS])
    assert set(answer.json) == EVENT_KEYS | {"usage", "timings"}
    assert (answer.json["usage"]["prompt_tokens"], answer.json["usage"]["completion_tokens"]) == (prompt, 3)
    *words, end, _ = (await ask(url, "POST", COMPLETIONS, {**ASKED[COMPLETIONS], "stream": True})).events
    assert all(set(word) == EVENT_KEYS for word in words)
    assert set(end) == EVENT_KEYS | {"usage", "timings"}
    assert end["choices"] == [{"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert end["usage"] == answer.json["usage"]


async def test_a_response_tells_its_usage_at_its_end(url: str) -> None:
    prompt = await _tokens(url, RESPONSES)
    answer = (await ask(url, "POST", RESPONSES, ASKED[RESPONSES])).json
    details = {"input_tokens_details": {"cached_tokens": 0}}
    expected = {"input_tokens": prompt, "output_tokens": 3, "total_tokens": prompt + 3, **details}
    assert (answer["usage"] | details, answer["status"]) == (expected, "completed")
    end = (await ask(url, "POST", RESPONSES, {**ASKED[RESPONSES], "stream": True})).events[-1]
    assert set(end) == {"type", "response", "timings"}
    assert end["response"]["usage"] | details == expected
    assert end["response"]["output"][0]["content"][0].keys() == answer["output"][0]["content"][0].keys()
    assert set(answer) == set(end["response"]) | {"completed_at"}


async def test_a_message_tells_its_input_first_and_its_output_last(url: str) -> None:
    prompt = await _tokens(url, MESSAGES)
    answer = (await ask(url, "POST", MESSAGES, ASKED[MESSAGES])).json
    assert answer["usage"]["cache_read_input_tokens"] + answer["usage"]["input_tokens"] == prompt
    assert (answer["usage"]["output_tokens"], answer["stop_reason"]) == (3, "max_tokens")
    events = (await ask(url, "POST", MESSAGES, {**ASKED[MESSAGES], "stream": True})).events
    started = events[0]["message"]
    assert set(started) == set(answer)
    assert started["usage"]["cache_read_input_tokens"] + started["usage"]["input_tokens"] == prompt
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    }


async def test_llama_cpps_own_completion_tells_its_figures_in_its_last_event(url: str) -> None:
    prompt = await _tokens(url, COMPLETION)
    answer = (await ask(url, "POST", COMPLETION, ASKED[COMPLETION])).json
    *words, end = (await ask(url, "POST", COMPLETION, {**ASKED[COMPLETION], "stream": True})).events
    figures = {"tokens_predicted": 3, "tokens_evaluated": prompt, "stop": True, "stop_type": "limit", "index": 0}
    for last in (answer, end):
        assert {name: last[name] for name in figures} == figures
        assert set(last["timings"]) >= {"cache_n", "prompt_n", "predicted_n"}
        assert last["generation_settings"]["n_predict"] == 3
    assert (end["content"], answer["content"]) == ("", "".join(word["content"] for word in words))
    assert [word["tokens_predicted"] for word in words] == [1, 2, 3]
    keys = {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}
    assert all(set(word) == keys for word in words)


@pytest.mark.parametrize("path", FAMILIES)
async def test_every_family_has_one_shape_of_errors(url: str, path: str) -> None:
    """llama.cpp's own: also where the API has another one (ENGINE_FACTS: /v1/messages)."""
    part = FAMILIES[path].part
    missing = await ask(url, "POST", path, {"max_tokens": 3})
    assert missing.status == missing.json["error"]["code"] == (500 if path == MESSAGES else 400)
    assert set(missing.json["error"]) == {"code", "message", "type"}
    assert (await ask(url, "POST", path, b"{bad json")).json["error"]["type"] == "invalid_request_error"
    words = "hello " * 600
    long = [{"role": "user", "content": words}] if part == "messages" else words
    for stream in (False, True):
        answer = await ask(url, "POST", path, {part: long, "stream": stream})
        assert (answer.status, answer.closed) == (400, True)
        error = answer.json["error"]
        assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 512)
        assert error["n_prompt_tokens"] >= 600


async def test_embeddings_need_an_engine_that_was_started_for_them(url: str) -> None:
    answer = await ask(url, "POST", EMBEDDINGS, {"input": "a"})
    assert (answer.status, answer.json["error"]["type"], answer.closed) == (501, "not_supported_error", True)


@pytest.mark.parametrize("kind", ["fake", "real"])
async def test_embeddings(kind: str, tmp_path: Path) -> None:
    """One vector an input, and the tokens of all of them together."""
    if kind == "fake":
        async with FakeEngine() as fake:
            fake.embeds = True
            await _check_embeddings(fake.url)
        return
    flags = ["-m", str(fetch_model()), "-t", "1", "-c", "512", "-np", "2", "--embedding", "--pooling", "mean"]
    engine = EngineProcess(flags, log_path=tmp_path / "engine.log")
    try:
        await asyncio.to_thread(engine.start)
        await _check_embeddings(engine.url)
    finally:
        await asyncio.to_thread(engine.stop)


async def _check_embeddings(url: str) -> None:
    answer = await ask(url, "POST", EMBEDDINGS, {"input": ["a", "b c"]})
    assert set(answer.json) == {"model", "object", "usage", "data"}
    assert [one["index"] for one in answer.json["data"]] == [0, 1]
    assert all(isinstance(one["embedding"][0], float) for one in answer.json["data"])
    tokens = [
        len((await ask(url, "POST", TOKENIZE, {"content": text, "add_special": True})).json["tokens"])
        for text in ("a", "b c")
    ]
    assert answer.json["usage"] == {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
    assert not answer.closed


@pytest.mark.parametrize("kind", ["fake", "real"])
async def test_a_slot_at_work_tells_its_task_and_its_limit(kind: str, request: pytest.FixtureRequest) -> None:
    """That is what a hung-up request is told from its neighbours by; a slot is idle soon after a hang-up."""
    if kind == "real":
        await _check_slots(request.getfixturevalue("real"))
        return
    async with FakeEngine() as engine:
        engine.words, engine.word_delay_s = ("Hi",) * 400, 0.02
        await _check_slots(engine.url)


async def _check_slots(url: str) -> None:
    async def busy() -> list[Any]:
        return [slot for slot in (await ask(url, "GET", "/slots")).json if slot["is_processing"]]

    async with Socket(url) as client:
        body = {"prompt": "Once upon", "n_predict": 333, "ignore_eos": True, "stream": True}
        await client.send("POST", COMPLETION, json.dumps(body).encode())
        await client._reader.readuntil(b"data: ")
        (slot,) = await busy()
        assert isinstance(slot["id_task"], int)
        assert slot["params"]["n_predict"] == 333
    deadline = time.monotonic() + 10
    while await busy():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def second_real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    arguments = ["-m", str(fetch_model()), "-t", "1", "-c", "256", "-np", "2", "--kv-unified", "--no-slots"]
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
        engine.always = dict.fromkeys(FAMILIES, error_event())
        await _check_odd_ends(engine.url, loading)


async def _check_odd_ends(url: str, loading: Wire) -> None:
    assert loading.status == 503
    assert loading.json == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
    assert (loading.headers["connection"], loading.closed) == ("close", True)
    slots = await ask(url, "GET", "/slots")
    assert (slots.status, slots.json["error"]["type"]) == (501, "not_supported_error")
    assert (slots.headers["connection"], slots.closed) == ("close", True)
    assert (await ask(url, "GET", "/props")).json["endpoint_slots"] is False
    for path, family in FAMILIES.items():
        words = "word " * 90
        part = [{"role": "user", "content": words}] if family.part == "messages" else words
        body = {family.part: part, "ignore_eos": True, "stream": True, "max_tokens": 250}
        for answer in await asyncio.gather(*(ask(url, "POST", path, body) for _ in range(2))):
            assert (answer.status, answer.closed) == (200, True)
            assert answer.chunks[-1].startswith(b"event: error\ndata: " if path == MESSAGES else b"data: {")
            error = {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}
            assert answer.events[-1] == (error if path == MESSAGES else {"error": error})
