"""Every dialect on a real engine: what is counted is what is used, and what is capped is what is generated."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import anthropic
import openai
import pytest
import xllamacpp

from kvgate.web import served_routes
from tests.e2e.ask import chat, post
from tests.e2e.recorder import Recorder
from tests.e2e.varied import TEXTS, varied_chats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

SLOT = 512


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineProcess:
    """Two slots of 512 tokens; reuse off at the engine, as the documentation tells everybody to run it."""
    flags = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots", "--alias", "smollm2")
    return start_engine("-c", "1024", "-np", "2", "--no-kv-unified", *flags, "-lv", "4")


@pytest.fixture(scope="module")
def recorder(engine: EngineProcess) -> Iterator[Recorder]:
    with Recorder(engine.url) as found:
        yield found


@pytest.fixture(scope="module")
def gate(engine: EngineProcess, recorder: Recorder, start_gate: StartGate) -> RunningGate:
    tenants = {"demo": "queue_timeout_s = 120\n", "small": "context_tokens_max = 200\nconcurrency_max = 1\n"}
    config = '[http]\ncors_origins = ["https://chat.example"]\n'
    return start_gate(recorder.url, tenants=tenants, config=config, flags=["--engine-log", str(engine.log_path)])


# -- counting


def generated(number: int, seed: int = 11) -> list[tuple[str, dict[str, Any]]]:
    """`number` requests over all dialects that generate, the same for the same seed."""
    draw = random.Random(seed)
    chats = iter(varied_chats(number, seed))
    return [(path := draw.choice(list(_MAKERS)), _MAKERS[path](draw, next(chats))) for _ in range(number)]


def _prompt(draw: random.Random) -> Any:
    kind = draw.randrange(6)
    if kind == 0:
        return [draw.randrange(5, 40_000) for _ in range(draw.randrange(1, 30))]
    if kind == 1:
        return [draw.choice(TEXTS) or "x", 17, draw.choice(TEXTS) or "y", 4242]
    return draw.choice(TEXTS) or "Once"


def _completion(draw: random.Random, _: dict[str, Any]) -> dict[str, Any]:
    prompt = _prompt(draw)
    if draw.random() < 0.25:
        prompt = [_prompt(draw) for _ in range(draw.randrange(2, 5))]
        if all(isinstance(one, str) for one in prompt):
            prompt.append([9, 8, 7])
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.choice((1, 2)), "stream": draw.random() < 0.3}
    if draw.random() < 0.2:
        body["n"] = 2
    return body


def _native(draw: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    body = _completion(draw, given)
    body["n_predict"] = body.pop("max_tokens")
    return body


def _chat(draw: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "stream": draw.random() < 0.3, **({"n": 2} if draw.random() < 0.15 else {})}


def _responses(draw: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    text = draw.choice(TEXTS) or "Hello."
    items = [
        {"role": "user", "content": draw.choice(TEXTS) or "a"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": draw.choice(TEXTS) or "b"}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
    ]
    body: dict[str, Any] = {"input": draw.choice((text, items)), "max_output_tokens": 2}
    if draw.random() < 0.3:
        body["instructions"] = draw.choice(TEXTS)
    return {**body, "stream": draw.random() < 0.3}


def _messages(draw: random.Random, _: dict[str, Any]) -> dict[str, Any]:
    content: Any = draw.choice(TEXTS) or "Hi."
    if draw.random() < 0.4:
        content = [{"type": "text", "text": draw.choice(TEXTS) or "Hi."} for _ in range(2)]
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    if draw.random() < 0.3:
        body["system"] = draw.choice((draw.choice(TEXTS), [{"type": "text", "text": "Be brief."}]))
    if draw.random() < 0.3:
        body["messages"] += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "42"}]},
        ]
        body["tools"] = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    return {**body, "stream": draw.random() < 0.3}


_MAKERS = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/completion": _native,
}


@pytest.mark.timeout(600)
async def test_count_equals_usage_on_300_requests_over_all_dialects(gate: RunningGate) -> None:
    """Whatever the dialect and the shape, streamed or not, one answer or several: counted is used."""
    requests = generated(300)
    limit = asyncio.Semaphore(3)
    seen: Counter[tuple[str, int]] = Counter()

    async def one(path: str, body: dict[str, Any]) -> None:
        async with limit:
            answer = await post(gate.url, body, path=path)
        seen[path, answer.status] += 1
        assert answer.status == 200, (path, body, answer.raw)

    await asyncio.gather(*(one(path, body) for path, body in requests))
    assert len(seen) == len(_MAKERS)
    lines = [line for line in gate.log_lines("request") if line["path"] in _MAKERS]
    assert len(lines) >= 300
    untold = [line for line in lines if "used_prompt_tokens" not in line]
    assert untold == []
    assert gate.log_lines("usage differs from the count") == []
    assert gate.metric("kvgate_count_drift_total") == 0
    assert gate.metric("kvgate_reuse_violations_total") == 0
    assert gate.wait_until_empty(10)["ledger"]["drains_overdue"] == 0


async def test_several_answers_are_charged_in_full(gate: RunningGate) -> None:
    """Where the engine tells of the first answer alone, the gate counts the others itself."""
    before = {kind: gate.metric("kvgate_tokens_total", tenant="demo", kind=kind) for kind in ("prompt", "output")}
    body = {"prompt": ["Once upon a time", "Twice"], "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    answer = await post(gate.url, body, path="/v1/completions")
    assert answer.json["usage"]["completion_tokens"] == 6
    await asyncio.sleep(1)
    output = gate.metric("kvgate_tokens_total", tenant="demo", kind="output") - before["output"]
    prompt = gate.metric("kvgate_tokens_total", tenant="demo", kind="prompt") - before["prompt"]
    assert 10 <= output <= 13  # the second text tokenized again: a merge can differ from what was sampled
    assert prompt > answer.json["usage"]["prompt_tokens"]


# -- limits


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "Once", "n_predict": -1, "max_tokens": 4}, "max_tokens"),
        ("/completion", {"prompt": "Once", "max_tokens": 9, "n_predict": 4}, "n_predict"),
        ("/completions", {"prompt": "Once", "max_completion_tokens": 4, "max_tokens": 9}, "n_predict"),
        ("/v1/responses", {"input": "Once", "max_tokens": 9, "max_output_tokens": 4}, "max_output_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4}, "max_tokens"),
    ],
)
async def test_one_limit_reaches_the_engine(
    gate: RunningGate, recorder: Recorder, path: str, body: dict[str, Any], field: str
) -> None:
    """Of all the names of the output limit one is sent, positive, and the engine keeps it."""
    recorder.bodies()
    answer = await post(gate.url, {**body, "ignore_eos": True}, path=path)
    assert (answer.status, answer.headers["x-kvgate-output-limit"]) == (200, "4")
    recorded = recorder.bodies()
    at = recorded.rindex(b"\r\n\r\n{", 0, recorded.rindex(b"}") + 1) + 4
    sent, _ = json.JSONDecoder().raw_decode(recorded[at:].decode())
    limits = {"n_predict", "max_completion_tokens", "max_tokens", "max_output_tokens"} & set(sent)
    assert {name: sent[name] for name in limits} == {field: 4}
    assert sent["cache_prompt"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once"}),
        ("/completion", {"prompt": "Once"}),
        ("/v1/responses", {"input": "Once"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Once"}]}),
    ],
)
async def test_no_limit_is_a_limit_all_the_same(gate: RunningGate, path: str, body: dict[str, Any]) -> None:
    """An answer without a limit of the client's own gets the tenant's default, or what fits of it."""
    answer = await post(gate.url, {**body, "stop": ["e"], "stop_sequences": ["e"]}, path=path)
    assert answer.status == 200
    room = int(answer.headers["x-kvgate-usable-generation"])
    assert int(answer.headers["x-kvgate-output-limit"]) == room < SLOT


async def test_a_prompt_list_holds_as_many_slots_as_it_will_use(gate: RunningGate) -> None:
    """Five prompts on two slots hold the two longest; a tenant that may not use two slots is told to split."""
    body = {"prompt": [f"{'word ' * at}end" for at in (1, 40, 3, 60, 5)], "max_tokens": 3, "ignore_eos": True}
    answer = await post(gate.url, body, path="/v1/completions")
    assert answer.status == 200
    assert len(answer.json["choices"]) == 5
    refused = await post(gate.url, body, path="/v1/completions", key="sk-small")
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "too_many_sequences", "prompt")
    assert "split" in refused.error["message"]


# -- overflow, in the words that clients act on


async def test_each_dialects_clients_recognise_an_overflow(gate: RunningGate) -> None:
    """OpenAI's code, llama.cpp's type, Anthropic's sentences; each with both figures."""
    long = "word " * 600
    chat_error = (await post(gate.url, chat(long))).error
    assert (chat_error["code"], chat_error["param"]) == ("context_length_exceeded", "messages")
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/responses", {"input": long}),
    ):
        answer = await post(gate.url, body, path=path)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    native = await post(gate.url, {"prompt": long}, path="/completion")
    assert (native.status, native.error["type"], native.error["code"]) == (400, "exceed_context_size_error", 400)
    assert native.error["n_prompt_tokens"] > native.error["n_ctx"] == SLOT
    message = [{"role": "user", "content": long}]
    prompt = await post(gate.url, {"messages": message, "max_tokens": 5}, path="/v1/messages")
    assert prompt.json["type"] == "error"
    assert prompt.error["type"] == "invalid_request_error"
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", prompt.error["message"])
    assert found
    assert int(found[1]) > int(found[2])
    output = await post(
        gate.url, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900}, path="/v1/messages"
    )
    found = re.match(
        r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", output.error["message"]
    )
    assert found
    assert int(found[1]) + int(found[2]) > int(found[3])
    for answer in (native, prompt, output):
        assert "rate limit" not in answer.raw.decode()
        assert "quota" not in answer.raw.decode()


async def test_the_anthropic_sdk_works_unchanged(gate: RunningGate) -> None:
    """Messages, streams, counting; its overflow is a BadRequestError with the sentence that agents parse."""
    async with anthropic.AsyncAnthropic(base_url=gate.url, api_key="sk-demo", max_retries=0) as client:
        hello: Any = [{"role": "user", "content": "Say hello."}]
        greedy = {"temperature": 0}  # of an answer that is empty by chance llama.cpp streams no beginning
        message = await client.messages.create(model="smollm2", max_tokens=5, messages=hello, extra_body=greedy)
        assert message.usage.output_tokens <= 5
        async with client.messages.stream(model="smollm2", max_tokens=5, messages=hello, extra_body=greedy) as stream:
            final = await stream.get_final_message()
        assert final.usage.output_tokens <= 5
        counted = await client.messages.count_tokens(model="smollm2", messages=hello)
        assert counted.input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="exceed context limit"):
            await client.messages.create(model="smollm2", max_tokens=5000, messages=hello)
    async with anthropic.AsyncAnthropic(base_url=gate.url, api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="smollm2", max_tokens=5, messages=hello)


async def test_the_openai_sdk_works_on_its_other_apis(gate: RunningGate) -> None:
    """Completions and responses, streamed and not."""
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="sk-demo", max_retries=0) as client:
        text = await client.completions.create(model="smollm2", prompt=["Once", "Twice"], max_tokens=3)
        assert len(text.choices) == 2
        stream = await client.completions.create(
            model="smollm2", prompt="Once", max_tokens=3, temperature=0, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream])
        response = await client.responses.create(
            model="smollm2", input="Say hello.", max_output_tokens=5, temperature=0
        )
        assert response.output_text
        events = await client.responses.create(model="smollm2", input="Hello.", max_output_tokens=5, stream=True)
        assert [event.type async for event in events][-1] == "response.completed"
        with pytest.raises(openai.BadRequestError) as overflow:
            await client.responses.create(model="smollm2", input="Say hello.", max_output_tokens=5000)
        assert overflow.value.code == "context_length_exceeded"


async def test_several_choices_of_a_stream_tell_one_usage(gate: RunningGate) -> None:
    """llama.cpp sends a usage chunk for each choice; a client gets one, with their sum, where it asked."""
    body = chat(n=2, max_tokens=3, stream=True, ignore_eos=True, stream_options={"include_usage": True})
    answer = await post(gate.url, body)
    usages = [event["usage"] for event in answer.events if isinstance(event, dict) and event.get("usage")]
    assert [usage["completion_tokens"] for usage in usages] == [6]
    assert usages[0]["total_tokens"] == usages[0]["prompt_tokens"] + 6


# -- reuse


async def test_messages_are_refused_where_reuse_cannot_be_switched_off(
    start_engine: StartEngine, start_gate: StartGate
) -> None:
    """llama.cpp drops `cache_prompt` on /v1/messages: an engine whose default is on is not served, with the flags."""
    engine = start_engine("-c", "512", "-np", "1")
    gate = start_gate(engine.url)
    answer = await post(
        gate.url, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, path="/v1/messages"
    )
    assert (answer.status, answer.headers["x-kvgate-reason"]) == (503, "reuse_switch")
    assert "--no-cache-prompt --cache-ram 0" in answer.error["message"]
    assert (await post(gate.url, chat(max_tokens=2))).status == 200
    assert gate.wait_until_empty(5)["ledger"]["held_tokens"] == 0


# -- paths


def _engine_paths() -> set[str]:
    """Every path that stands in the engine's own binary."""
    library = next(Path(xllamacpp.__file__).parent.glob("*.so")).read_bytes()
    found = set(re.findall(rb"\0(/(?:v1/)?[a-z][a-z_-]*(?:/[a-z:_-]+)*)(?=\0)", library))
    return {path.decode() for path in found}


async def test_every_path_of_the_engine_is_served_and_sized_or_refused(gate: RunningGate, recorder: Recorder) -> None:
    """The engine's own list of paths: each is on the allow-list, or is refused before the engine hears of it."""
    paths = _engine_paths()
    assert {"/v1/chat/completions", "/completion", "/slots", "/lora-adapters", "/infill"} <= paths
    served = set(served_routes())
    recorder.bodies()
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer sk-demo"}) as session:
        for path in sorted(paths - served):
            for method in ("GET", "POST"):
                async with session.request(method, f"{gate.url}{path}", json={}) as answer:
                    assert answer.status == 403, path
    sent = recorder.bodies()
    assert [path for path in paths - served - {"/health"} if f" {path} HTTP".encode() in sent] == []


async def test_utilities_answer_in_their_own_words(gate: RunningGate) -> None:
    """Tokenizer, template and counters are passed on; their errors are the dialect's."""
    tokens = (await post(gate.url, {"content": "Once upon"}, path="/tokenize")).json["tokens"]
    assert (await post(gate.url, {"tokens": tokens}, path="/detokenize")).json["content"] == "Once upon"
    rendered = await post(gate.url, chat("hi"), path="/apply-template")
    assert "<|im_start|>user\nhi" in rendered.json["prompt"]
    assert (await post(gate.url, chat("hi"), path="/v1/chat/completions/input_tokens")).json["input_tokens"] == 31
    assert (await post(gate.url, {"input": "hi"}, path="/v1/responses/input_tokens")).json["input_tokens"] == 31
    bad = await post(gate.url, b"[1]", path="/v1/messages/count_tokens")
    assert (bad.status, bad.json["type"]) == (400, "error")


async def test_the_window_that_a_tenant_sees_is_its_own(gate: RunningGate) -> None:
    """`/props` and `/v1/models` tell a tenant how much context it has, and nothing of paths or neighbours."""
    async with aiohttp.ClientSession() as session:
        for key, tokens, slots in (("sk-demo", SLOT, 2), ("sk-small", 200, 1)):
            async with session.get(f"{gate.url}/props", headers={"x-api-key": key}) as answer:
                props = await answer.json()
            assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (tokens, slots)
            assert "model_path" not in props
            async with session.get(f"{gate.url}/v1/models", headers={"x-api-key": key}) as answer:
                assert (await answer.json())["data"][0]["context_length"] == tokens


async def test_embeddings_rerank_and_infill_say_what_the_engine_cannot(gate: RunningGate) -> None:
    """An engine that was not started for it, or whose model cannot: a clear 501, in the dialect's words."""
    for path, body in (
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/embedding", {"content": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        answer = await post(gate.url, body, path=path)
        assert (answer.status, answer.headers["x-kvgate-reason"]) == (501, "engine_cannot"), path


async def test_embeddings_are_sized_by_their_prompts(start_engine: StartEngine, start_gate: StartGate) -> None:
    """Counted is used, lists hold as many slots as they will use, and a prompt beyond the slot is refused."""
    engine = start_engine("-c", "512", "-np", "2", "--no-kv-unified", "--embedding", "--pooling", "mean")
    gate = start_gate(engine.url)
    for given in ("hello there", ["a", "b c d", "émigré 🎉"], [1, 2, 3], [[1, 2], [3]], ["a", [5, 6]]):
        answer = await post(gate.url, {"input": given}, path="/v1/embeddings")
        assert answer.status == 200, (given, answer.raw)
    assert gate.metric("kvgate_count_drift_total") == 0
    assert gate.metric("kvgate_tokens_total", kind="prompt") > 0
    native = await post(gate.url, {"content": ["a", "b"]}, path="/embedding")
    assert len(native.json) == 2
    long = await post(gate.url, {"input": "word " * 400}, path="/v1/embeddings")
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")


# -- HTTP


async def test_a_browser_may_ask_where_its_origin_is_listed(gate: RunningGate) -> None:
    """Preflights need no key; only listed origins are named in answers."""
    async with aiohttp.ClientSession() as session:
        url = f"{gate.url}/v1/chat/completions"
        async with session.options(url, headers={"Origin": "https://chat.example"}) as answer:
            assert answer.status == 204
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert "authorization" in answer.headers["access-control-allow-headers"]
        async with session.options(url, headers={"Origin": "https://evil.example"}) as answer:
            assert "access-control-allow-origin" not in answer.headers
        headers = {"Origin": "https://chat.example", "Authorization": "Bearer sk-demo"}
        async with session.post(url, json=chat(max_tokens=1), headers=headers) as answer:
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        async with session.head(url) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST, OPTIONS")
