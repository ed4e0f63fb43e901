"""Bad weather on a real engine: it is killed under load and comes back smaller; hundreds of clients come and go.

`STORM_REQUESTS` and `STORM_SEED` make the second storm longer, and another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from tests.e2e.ask import chat, post, prompt_of
from tests.e2e.faults.asking import Ask, Client, view
from tests.e2e.storm import calls

if TYPE_CHECKING:
    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate
    from tests.e2e.storm import Call

pytestmark = pytest.mark.engine

NO_REUSE: Final = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots")
LONG: Final = {"ignore_eos": True, "temperature": 0}

REQUESTS: Final = int(os.environ.get("STORM_REQUESTS", "500"))
SEED: Final = int(os.environ.get("STORM_SEED", "7"))
CLIENTS_AT_ONCE: Final = 24


async def _until(condition: Any, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"not {what} after {timeout_s} s"
        await asyncio.sleep(0.05)


# -- the engine is killed


RUNNING: Final[dict[Ask, tuple[str, dict[str, Any]]]] = {
    Ask("openai_chat", stream=True): ("/v1/chat/completions", chat("Tell a story.", max_tokens=440)),
    Ask("anthropic_messages", stream=True): ("/v1/messages", chat("Tell a tale.", max_tokens=440)),
    Ask("llamacpp_completion", stream=False): ("/completion", {"prompt": "Once upon a time", "n_predict": 440}),
    Ask("openai_responses", stream=True): ("/v1/responses", {"input": "Tell a joke.", "max_output_tokens": 440}),
}
QUEUED: Final = {
    Ask("anthropic_messages", stream=False): ("/v1/messages", chat("And one more.", max_tokens=440)),
    Ask("openai_chat", stream=True): ("/v1/chat/completions", chat("Another one.", max_tokens=440)),
    Ask("llamacpp_completion", stream=True): ("/completion", {"prompt": "The end", "n_predict": 440}),
}
UNREACHABLE: Final = "503 engine_unreachable"


async def _asked(url: str, ask: Ask, path: str, body: dict[str, Any], heard: asyncio.Event) -> str:
    """The view of a client that tells when it has heard the first of its answer."""
    async with Client(url) as client:
        await client.post(path, json.dumps({**body, **LONG, "stream": ask.stream}).encode())
        if ask.stream:
            await client.hear()
        heard.set()
        return view(ask, await client.receive())


async def test_an_engine_killed_under_load_comes_back_with_half_the_context(
    start_engine: StartEngine, start_gate: StartGate
) -> None:
    """Who ran is told so in its dialect, who waited goes elsewhere, and the first request after is judged anew."""
    engine = await asyncio.to_thread(start_engine, "-c", "2048", "-np", "4", "--no-kv-unified", *NO_REUSE)
    gate = await asyncio.to_thread(start_gate, engine.url, config='[engine]\nkv_topology = "divided"\n')
    fitted = await prompt_of(engine.url, 300, max_tokens=50)
    assert (await post(gate.url, {**fitted, "max_tokens": 1})).headers["x-kvgate-n-ctx-slot"] == "512"
    probed = await post(gate.url, chat(max_tokens=1), path="/v1/messages")  # the probe holds a slot of its own
    assert probed.status == 200
    heard = {ask: asyncio.Event() for ask in RUNNING}
    running = {ask: asyncio.create_task(_asked(gate.url, ask, *RUNNING[ask], heard[ask])) for ask in RUNNING}
    await _until(lambda: gate.status()["ledger"]["running"] == 4, "full")
    queued = {ask: asyncio.create_task(_asked(gate.url, ask, *QUEUED[ask], asyncio.Event())) for ask in QUEUED}
    await _until(lambda: gate.status()["ledger"]["waiting"] == 3, "queueing")
    await asyncio.gather(*(event.wait() for event in heard.values()))
    engine.kill()
    for ask, task in running.items():
        assert await task == ("200, then engine_failed" if ask.stream else "502 engine_failed")
    for task in queued.values():
        assert await task == UNREACHABLE
    for ask, (path, body) in QUEUED.items():
        assert await _asked(gate.url, ask, path, body, asyncio.Event()) == UNREACHABLE
    await _come_back_smaller(engine, gate, fitted)


async def _come_back_smaller(engine: EngineProcess, gate: RunningGate, fitted: dict[str, Any]) -> None:
    engine.arguments = tuple("1024" if argument == "2048" else argument for argument in engine.arguments)
    await asyncio.to_thread(engine.start)
    first = await post(gate.url, fitted)
    assert (first.status, first.error["code"], first.error["n_ctx"]) == (400, "context_length_exceeded", 256)
    assert "256 tokens" in first.error["message"]
    assert first.headers["x-kvgate-n-ctx-slot"] == "256"
    for ask, (path, body) in RUNNING.items():
        limit = {"max_output_tokens": 3} if "input" in body else {"max_tokens": 3, "n_predict": 3}
        assert await _asked(gate.url, ask, path, {**body, **limit}, asyncio.Event()) == "200"
    status = await asyncio.to_thread(gate.wait_until_empty, 30)
    assert (status["ledger"]["draining"], status["ledger"]["drains_overdue"]) == (0, 0)
    assert status["ledger"]["pool"]["tokens_per_slot"] == 256
    assert gate.metric("kvgate_engine_changes_total") == 1


# -- clients come and go


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("topology", "number"), [("divided", REQUESTS), ("unified", REQUESTS // 4)])
async def test_five_hundred_mixed_requests_and_hang_ups_leave_nothing(
    start_engine: StartEngine, start_gate: StartGate, topology: str, number: int
) -> None:
    """At the end the ledger is empty, every gauge is zero, and every request is counted once."""
    pool = "--kv-unified" if topology == "unified" else "--no-kv-unified"
    flags = ("-c", "1024" if topology == "divided" else "512", "-np", "4", pool, "--chat-template", "chatml")
    engine = await asyncio.to_thread(start_engine, *flags, *NO_REUSE, "-lv", "4")
    tenants = {
        "wide": "queue_timeout_s = 120\n",
        "shy": "queue_max = 2\nqueue_timeout_s = 0.5\n",
        "narrow": "concurrency_max = 1\nqueue_timeout_s = 120\n",
    }
    gate = await asyncio.to_thread(
        start_gate, engine.url, tenants=tenants, flags=["--engine-log", str(engine.log_path)]
    )
    slot = gate.status()["engine"]["profile"]["n_ctx_slot"]["value"]
    assert gate.status()["engine"]["profile"]["topology"]["value"] == topology
    assert (await post(gate.url, chat(max_tokens=1), key="sk-wide", path="/v1/messages")).status == 200
    before = await asyncio.to_thread(gate.wait_until_empty, 30)
    storm = calls(number, SEED, slot)
    views = await _weather(gate.url, storm)
    wrong = [(call, seen) for call, seen in zip(storm, views, strict=True) if seen not in {None, *call.expected}]
    assert not wrong, wrong[:5]
    after = await asyncio.to_thread(gate.wait_until_empty, 60)
    assert after["ledger"]["drains_overdue"] == 0
    await _check_accounts(gate, storm, views)
    await _check_nothing_is_left(engine, gate, before)


async def _weather(url: str, storm: list[Call]) -> list[str | None]:
    doors = asyncio.Semaphore(CLIENTS_AT_ONCE)

    async def run(call: Call) -> str | None:
        async with doors:
            return await call.run(url)

    return await asyncio.gather(*(run(call) for call in storm))


async def _check_accounts(gate: RunningGate, storm: list[Call], views: list[str | None]) -> None:
    """Each request has one line in the log and one count; only who left at once may have come to nobody's notice."""
    lines = Counter(line["request_id"] for line in gate.log_lines("request") if "storm-" in line["request_id"])
    assert set(lines.values()) == {1}
    stayed = {call.request_id for call in storm if call.leaves in {"never", "at the first bytes", "in mid-answer"}}
    assert stayed <= set(lines)
    assert set(lines) <= {call.request_id for call in storm}
    assert gate.metric("kvgate_requests_total") == sum(lines.values()) + 1
    told = Counter(seen.split()[0] for seen in views if seen is not None)
    answered = {line["request_id"]: str(line["status"]) for line in gate.log_lines("request")}
    assert told == Counter(answered[call.request_id] for call, seen in zip(storm, views, strict=True) if seen)
    assert {"200", "400", "429", "501"} <= set(told)
    for reason in ("internal", "engine_overflow", "engine_failed", "engine_unreachable", "engine_stalled"):
        assert gate.metric("kvgate_requests_total", reason=reason) == 0
    assert gate.metric("kvgate_hangups_total") > 0
    assert gate.metric("kvgate_count_drift_total") == gate.metric("kvgate_reuse_violations_total") == 0


async def _check_nothing_is_left(engine: EngineProcess, gate: RunningGate, before: dict[str, Any]) -> None:
    for gauge in ("kvgate_kv_held_tokens", "kvgate_slots_held", "kvgate_queue_depth", "kvgate_drains_overdue"):
        assert gate.metric(gauge) == 0
    await _until(lambda: gate.status()["tasks"] <= before["tasks"] + 1, "rid of its tasks", 20)
    await _until(lambda: gate.status()["upstream_connections"] <= 2, "rid of its connections", 20)
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/slots") as answer:
        assert not any(slot["is_processing"] for slot in await answer.json())
    assert gate.metric("kvgate_foreign_slots") == gate.metric("kvgate_foreign_sightings_total") == 0
    assert "Context size has been exceeded" not in engine.log()
    assert not gate.log_lines("kvgate failed on a request")
