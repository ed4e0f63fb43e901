"""OpenAI chat through the gate, on a real engine: what fits runs, what does not is told, exactly."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from yarl import URL

from tests.e2e.ask import chat, count, post, prompt_of
from tests.e2e.recorder import Recorder
from tests.e2e.varied import varied_chats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

SLOT = 1024
TENANTS = {
    "demo": "",
    "clamp": 'on_overflow = "clamp"\n',
    "small": "context_tokens_max = 300\noutput_tokens_default = 7\n",
    "picky": "output_tokens_min = 64\n",
    "other": 'models = ["another-model"]\n',
    "cells": "kv_tokens_max = 4096\n",  # who pays in cells is always counted, never bounded
}


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineProcess:
    """Two slots of 1024 tokens; reuse on, as llama.cpp comes."""
    return start_engine("-c", "2048", "-np", "2", "--no-kv-unified", "-lv", "4")


@pytest.fixture(scope="module")
def recorder(engine: EngineProcess) -> Iterator[Recorder]:
    with Recorder(engine.url) as found:
        yield found


@pytest.fixture(scope="module")
def gate(engine: EngineProcess, recorder: Recorder, start_gate: StartGate) -> RunningGate:
    return start_gate(recorder.url, tenants=TENANTS, flags=["--engine-log", str(engine.log_path)])


def _inference_body(recorded: bytes) -> dict[str, Any]:
    """The body of the latest inference request in what the gate sent."""
    head = recorded.rindex(b"POST /v1/chat/completions HTTP/1.1")
    start = recorded.index(b"\r\n\r\n", head) + 4
    found, _ = json.JSONDecoder().raw_decode(recorded[start:].decode())
    assert isinstance(found, dict)
    return found


async def test_a_generation_that_cannot_fit_is_refused_with_the_arithmetic(
    engine: EngineProcess, gate: RunningGate
) -> None:
    """The context admission test: n_ctx_slot - 256 of prompt, asking for 512.

    A bare engine answers 200 with 256 tokens and says nothing. Here the body has every figure.
    """
    answer = await post(gate.url, await prompt_of(engine.url, SLOT - 256, max_tokens=512))
    assert answer.status == 400
    error = answer.error
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "max_tokens"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (768, 1024)
    assert (error["usable_generation"], error["requested_output_tokens"]) == (256, 512)
    assert error["limited_by"] == "slot"
    assert "maximum context length is 1024 tokens" in error["message"]
    assert "1280 tokens (768 in the prompt, 512 for the answer)" in error["message"]
    assert answer.headers["x-kvgate-verdict"] == "reject"
    assert answer.headers["x-kvgate-reason"] == "generation_overflow"
    assert answer.headers["x-kvgate-prompt-tokens"] == "768"


async def test_a_clamped_generation_ends_exactly_where_the_slot_does(
    engine: EngineProcess, gate: RunningGate
) -> None:
    """Under `clamp` the output limit becomes usable_generation, and the headers say so."""
    body = await prompt_of(engine.url, SLOT - 40, max_tokens=512, ignore_eos=True)
    answer = await post(gate.url, body, key="sk-clamp")
    assert answer.status == 200
    assert answer.headers["x-kvgate-verdict"] == "clamp"
    assert answer.headers["x-kvgate-reason"] == "generation_overflow"
    assert answer.headers["x-kvgate-output-limit"] == "40"
    assert answer.headers["x-kvgate-usable-generation"] == "40"
    usage = answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (984, 40)


async def test_a_prompt_that_cannot_fit_is_refused(engine: EngineProcess, gate: RunningGate) -> None:
    """Also under `clamp`, and also where it would fit the slot but leaves less than output_tokens_min."""
    whole = await prompt_of(engine.url, SLOT, max_tokens=4)
    for key in ("sk-demo", "sk-clamp"):
        answer = await post(gate.url, whole, key=key)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "messages"
        assert (answer.error["n_prompt_tokens"], answer.error["usable_generation"]) == (1024, 0)
    near = await prompt_of(engine.url, SLOT - 63, max_tokens=4)
    assert (await post(gate.url, near, key="sk-picky")).headers["x-kvgate-reason"] == "prompt_overflow"
    assert (await post(gate.url, near, key="sk-demo")).status == 200


async def test_the_tenants_own_window_binds(engine: EngineProcess, gate: RunningGate) -> None:
    """A tenant's context_tokens_max is named as its own, and shown to it as the model's window."""
    answer = await post(gate.url, await prompt_of(engine.url, 250, max_tokens=51), key="sk-small")
    assert (answer.status, answer.error["limited_by"], answer.error["n_ctx"]) == (400, "tenant", 300)
    models = await _models(gate, "sk-small")
    assert [(m["context_length"], m["max_model_len"], m["meta"]["n_ctx"]) for m in models] == [(300, 300, 300)]
    assert [m["context_length"] for m in await _models(gate, "sk-demo")] == [1024]
    assert await _models(gate, "sk-other") == []


async def _models(gate: RunningGate, key: str) -> list[dict[str, Any]]:
    client = openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=key)
    async with client:
        return [model.model_dump() for model in (await client.models.list()).data]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 4, "n_predict": -1}, 4),
        ({"n_predict": -1, "max_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ({"n_predict": 2, "max_completion_tokens": 3, "max_tokens": 9}, 2),
        ({"max_tokens": None, "max_completion_tokens": None}, 7),
        ({"max_tokens": -1}, 7),
        ({}, 7),
        ({"max_tokens": 0}, 1),
        ({"max_tokens": True}, 1),
        ({"max_tokens": 3.7}, 3),
    ],
)
async def test_the_output_limit_is_always_explicit(
    gate: RunningGate, recorder: Recorder, fields: dict[str, Any], limit: int
) -> None:
    """Whatever the client says, and however often, the engine gets one positive limit and keeps it."""
    recorder.bodies()
    answer = await post(gate.url, chat(ignore_eos=True, **fields), key="sk-small")
    assert answer.status == 200
    assert answer.headers["x-kvgate-output-limit"] == str(limit)
    assert answer.json["usage"]["completion_tokens"] == limit
    sent = _inference_body(recorder.bodies())
    assert sent["max_tokens"] == limit
    assert not {"n_predict", "max_completion_tokens"} & set(sent)


async def test_no_limit_is_the_default_or_what_fits(engine: EngineProcess, gate: RunningGate) -> None:
    """A default never causes a rejection: it gives way to the room that is left."""
    answer = await post(gate.url, await prompt_of(engine.url, 296, ignore_eos=True), key="sk-small")
    assert (answer.status, answer.headers["x-kvgate-output-limit"]) == (200, "4")
    assert answer.json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("value", ["3", -2, [], {}])
async def test_a_limit_that_is_none_is_refused(gate: RunningGate, value: Any) -> None:
    """What the engine refuses as a limit, or would misread, is a 400 that names the field."""
    answer = await post(gate.url, chat(max_tokens=value))
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")


async def test_the_openai_sdk_works_unchanged(engine: EngineProcess, gate: RunningGate) -> None:
    """Not streamed, streamed with and without usage, tools; and the overflow exception carries its code."""
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="sk-demo", max_retries=0) as client:
        plain = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "Say hello."}], max_tokens=5, temperature=0
        )
        assert plain.choices[0].message.content
        assert plain.usage is not None
        assert plain.usage.completion_tokens <= 5
        stream = await client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=5,
            temperature=0,
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert all(chunk.usage is None for chunk in chunks)
        asked = await client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        usages = [chunk.usage async for chunk in asked if chunk.usage is not None]
        assert [usage.completion_tokens <= 5 for usage in usages] == [True]
        tool: Any = {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "The weather in a city.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
        asking: Any = {
            "messages": [{"role": "user", "content": "Weather in Rome?"}],
            "tools": [tool],
            "tool_choice": "auto",
            "max_tokens": 12,
            "temperature": 0,
        }
        called = await client.chat.completions.create(model="any", **asking)
        # This model calls no tools; what it says with them in its request is the same as without the gate.
        bare = await post(engine.url, {**asking, "cache_prompt": False}, key=None)
        assert called.choices[0].message.content == bare.json["choices"][0]["message"]["content"]
        with pytest.raises(openai.BadRequestError) as overflow:
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "Say hello."}], max_tokens=5000
            )
        assert overflow.value.code == "context_length_exceeded"
        assert overflow.value.param == "max_tokens"
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}])


async def test_a_stream_without_usage_asked_hides_it_and_with_it_shows_it_once(gate: RunningGate) -> None:
    """The gate always asks the engine for a stream's usage; the client sees it only where it asked itself."""
    hidden = await post(gate.url, chat(max_tokens=3, stream=True))
    assert not any(isinstance(event, dict) and "usage" in event for event in hidden.events)
    assert hidden.events[-1] == "[DONE]"
    shown = await post(gate.url, chat(max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert sum("usage" in event for event in shown.events if isinstance(event, dict)) == 1


@pytest.mark.timeout(400)
async def test_count_equals_usage_on_100_varied_chats(engine: EngineProcess, gate: RunningGate) -> None:
    """What was counted before is what the engine says it used, on every shape of chat request."""
    drifts_before = gate.metric("kvgate_count_drift_total")
    bodies = varied_chats(100)
    limit = asyncio.Semaphore(4)

    async def one(body: dict[str, Any]) -> tuple[int, int]:
        async with limit:
            answer = await post(gate.url, body, key="sk-cells")
        assert answer.status == 200, (answer.status, answer.raw, body)
        return int(answer.headers["x-kvgate-prompt-tokens"]), answer.json["usage"]["prompt_tokens"]

    pairs = await asyncio.gather(*(one(body) for body in bodies))
    assert [counted for counted, _ in pairs] == [used for _, used in pairs]
    assert len({counted for counted, _ in pairs}) > 30
    assert gate.metric("kvgate_count_drift_total") == drifts_before == 0


async def test_reuse_is_off_on_an_engine_whose_default_is_on(
    engine: EngineProcess, gate: RunningGate, recorder: Recorder
) -> None:
    """The same prompt twice reuses nothing, also where the client asks for it; the bare engine reuses it."""
    body = await prompt_of(engine.url, 120, max_tokens=1)
    asked = {**body, "cache_prompt": True, "id_slot": 0, "n_cache_reuse": 64, "prompt_cache_key": "mine"}
    recorder.bodies()
    for _ in range(2):
        answer = await post(gate.url, asked)
        assert answer.headers["x-kvgate-reuse"] == "off"
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    sent = _inference_body(recorder.bodies())
    assert sent["cache_prompt"] is False
    assert not {"id_slot", "n_cache_reuse", "prompt_cache_key"} & set(sent)
    assert gate.metric("kvgate_reuse_violations_total") == 0
    cached = 0
    for _ in range(3):
        bare = await post(engine.url, body, key=None)
        cached = max(cached, bare.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached > 100


async def test_several_answers_are_sized_and_counted(engine: EngineProcess, gate: RunningGate) -> None:
    """N answers hold n sequences; more than there are slots are refused with the number that can run."""
    answer = await post(gate.url, chat(n=2, max_tokens=4, ignore_eos=True))
    assert answer.status == 200
    assert len(answer.json["choices"]) == 2
    refused = await post(gate.url, chat(n=3, max_tokens=4))
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "too_many_sequences", "n")
    assert refused.error["sequences_max"] == 2
    assert gate.wait_until_empty(5)["ledger"]["running"] == 0


async def test_unknown_fields_and_numbers_reach_the_engine_as_they_came(
    gate: RunningGate, recorder: Recorder
) -> None:
    """Outside the few judged fields every byte's meaning stays: order, number spelling, unknown fields."""
    raw = (
        b'{ "x_unknown": {"b": 1.0, "a": 1e2, "big": 123456789012345678901234567890},\n'
        b'  "messages": [{"role":"user","content":"hi \\u00e9 \\ud83d\\ude00"}],'
        b' "temperature": 0.10, "max_tokens": 2 }'
    )
    recorder.bodies()
    assert (await post(gate.url, raw)).status == 200
    sent = recorder.bodies()
    body = sent[sent.rindex(b'{ "x_unknown"') :]
    assert body.startswith(raw.removesuffix(b" }") + b',"cache_prompt":false }')
    assert b'{"b": 1.0, "a": 1e2, "big": 123456789012345678901234567890}' in body
    assert b'"temperature": 0.10' in body
    assert b"\\u00e9 \\ud83d\\ude00" in body


async def test_keys_never_reach_the_engine_or_the_log(gate: RunningGate, recorder: Recorder) -> None:
    """A tenant's key is for the gate alone, whichever way it came; nor does a prompt reach the log."""
    recorder.bodies()
    secret = "a-very-secret-prompt-word"
    await post(gate.url, chat(secret, max_tokens=1))
    await post(gate.url, chat(secret, max_tokens=1), key=None, headers={"x-api-key": "sk-demo"})
    await post(gate.url, chat(secret, max_tokens=100_000))
    await post(gate.url, chat(secret, max_tokens=1), key="sk-not-a-known-key")
    sent = recorder.bodies()
    assert secret.encode() in sent
    assert b"sk-demo" not in sent
    log = gate.log_path.read_text()
    assert secret not in log
    assert "sk-demo" not in log
    assert "sk-not-a-known-key" not in log


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat%2Fcompletions",
        "/v1/%63hat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/./chat/completions",
        "/v1/x/../chat/completions",
        "/%63ompletion",
        "/slots/0?action=save",
        "/lora-adapters",
        "/metrics",
        "/v1/chat/completions/control",
        "/cors-proxy",
        "/tools",
    ],
)
async def test_only_listed_paths_are_served(gate: RunningGate, recorder: Recorder, path: str) -> None:
    """The engine decodes paths before it routes; what is not spelled exactly as listed never gets there."""
    recorder.bodies()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            URL(gate.url + path, encoded=True), json=chat(max_tokens=1), headers={"Authorization": "Bearer sk-demo"}
        ) as answer,
    ):
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "path_not_served"
    assert b"POST" not in recorder.bodies()


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":4,"max_tokens":-1}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":4,"max\\u005ftokens":-1}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":NaN}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        '{"messages":[{"role":"user","content":"x"}]}'.encode("utf-16"),
        b'{"messages":[{"role":"user","content":"x"}]',
        b'[{"role":"user","content":"x"}]',
        b"[" * 100_000,
        b'{"messages":"x"}',
        b'{"messages":[]}',
        b'{"messages":[1]}',
        b'{"messages":[{"content":"x"}]}',
        b"",
    ],
)
async def test_what_is_not_a_request_is_a_400(gate: RunningGate, raw: bytes) -> None:
    """Whatever two parsers could read differently, or no parser at all, is refused before the engine sees it."""
    answer = await post(gate.url, raw)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


async def test_a_body_over_the_limit_is_a_413(engine: EngineProcess, start_gate: StartGate) -> None:
    """An oversized body is refused by its length or, where it hides it, by its bytes; in JSON."""
    gate = start_gate(engine.url, config="[http]\nbody_bytes_max = 2048\n")
    answer = await post(gate.url, chat("x" * 3000))
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


async def test_what_the_engine_cannot_count_is_the_clients_mistake(gate: RunningGate) -> None:
    """The engine reports some mistakes of clients as 500; here they are 400 and are not its illness."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = await post(gate.url, {"messages": [{"role": "user", "content": [image]}], "max_tokens": 2})
    assert (answer.status, answer.error["code"]) == (400, "uncountable_request")
    assert gate.ready()["ready"] is True


async def test_the_engine_is_left_clean(engine: EngineProcess, gate: RunningGate) -> None:
    """After all of this nothing is held, and the engine was never overrun."""
    status = gate.wait_until_empty(10)
    assert status["ledger"]["drains_overdue"] == 0
    assert gate.metric("kvgate_requests_total", status="502") == 0
    assert gate.metric("kvgate_requests_total", status="500") == 0
    assert await count(engine.url, chat()) > 0
