"""A gate on an ordinary bad day: engines that crash, hang and come back, a stop with work in flight, a bad file."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.e2e.ask import chat, post

if TYPE_CHECKING:
    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

LONG = chat("Tell a story.", max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", "1024", "-np", "2", "--no-kv-unified", "-lv", "4")


async def _running(gate: RunningGate, number: int) -> None:
    deadline = time.monotonic() + 30
    while (await asyncio.to_thread(gate.status))["ledger"]["running"] < number:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def _decoding(engine: EngineProcess, number: int) -> None:
    """Return once that many answers have begun."""
    deadline = time.monotonic() + 30
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{engine.url}/slots") as answer:
                slots = await answer.json()
            if sum(any(one["n_decoded"] > 1 for one in slot.get("next_token", ())) for slot in slots) >= number:
                return
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_an_identical_restart_keeps_what_the_log_tells(engine: EngineProcess, start_gate: StartGate) -> None:
    """A log that was begun anew by the same command has the same length, and is another one all the same."""
    gate = start_gate(engine.url, flags=["--engine-log", str(engine.log_path)])
    for _ in range(2):
        engine.kill()
        engine._log_begun = False  # as a shell's `>` would
        engine.start()
        assert (await post(gate.url, chat(max_tokens=1))).status == 200
        profile = gate.status()["engine"]["profile"]
        assert (profile["topology"], profile["pool_tokens"]["value"]) == ({"value": "divided", "source": "log"}, 1024)


async def test_nobody_waits_for_an_engine_that_is_gone(engine: EngineProcess, start_gate: StartGate) -> None:
    """A crash ends what runs with an error and turns away at once who queues; what comes back serves."""
    gate = start_gate(engine.url, flags=["--engine-log", str(engine.log_path)])
    running = [asyncio.create_task(post(gate.url, body)) for body in (LONG, {**LONG, "stream": True})]
    await _running(gate, 2)
    await _decoding(engine, 2)
    queued = asyncio.create_task(post(gate.url, LONG))
    deadline = time.monotonic() + 30
    while (await asyncio.to_thread(gate.status))["ledger"]["waiting"] < 1:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    engine.kill()
    begun = time.monotonic()
    whole, stream = await asyncio.gather(*running)
    assert (whole.status, whole.error["code"]) == (502, "engine_failed")
    assert stream.status == 200
    assert stream.events[-2]["error"]["code"] == "engine_failed"
    assert stream.events[-1] == "[DONE]"
    turned_away = await queued
    assert (turned_away.status, turned_away.error["code"]) == (503, "engine_unreachable")
    assert time.monotonic() - begun < 8
    cause = gate.log_lines("the engine does not serve")[-1]["cause"]
    assert any(said in cause for said in ("Connect call failed", "ConnectionReset", "closed the connection")), cause
    engine.start()
    assert (await post(gate.url, chat(max_tokens=1))).status == 200
    assert gate.wait_until_empty(10)["ledger"]["drains_overdue"] == 0


async def test_an_engine_that_hangs_is_noticed(engine: EngineProcess, start_gate: StartGate) -> None:
    """A stopped process still accepts connections: readiness and requests say what it is within seconds."""
    gate = start_gate(engine.url)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        answer = await post(gate.url, chat(max_tokens=1))
        assert (answer.status, answer.error["code"]) == (503, "engine_unreachable")
        assert time.monotonic() - begun < 15
        while gate.ready()["ready"]:
            assert time.monotonic() - begun < 30
            await asyncio.sleep(0.1)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    deadline = time.monotonic() + 15
    while not gate.ready()["ready"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_a_stop_lets_streams_finish(engine: EngineProcess, start_gate: StartGate) -> None:
    """SIGTERM: what runs goes on to its end, what is new is sent elsewhere, and the exit status is 0."""
    gate = start_gate(engine.url)
    running = asyncio.create_task(post(gate.url, {**LONG, "stream": True, "max_tokens": 60}))
    await _running(gate, 1)
    async with aiohttp.ClientSession() as session:
        # A connection that is open already: the listener itself closes at once.
        async with session.get(f"{gate.url}/v1/models", headers={"x-api-key": "sk-demo"}) as answer:
            assert answer.status == 200
        gate.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert gate.ready()["problems"] == ["this gate is shutting down"]
        headers = {"x-api-key": "sk-demo"}
        async with session.post(f"{gate.url}/v1/chat/completions", json=chat(), headers=headers) as answer:
            assert (answer.status, answer.headers["x-kvgate-reason"]) == (503, "gate_draining")
            assert "retry-after" in answer.headers
    assert (await running).events[-1] == "[DONE]"
    assert await asyncio.to_thread(gate.process.wait, 20) == 0


async def test_a_stop_sends_the_queue_away_at_once(engine: EngineProcess, start_gate: StartGate) -> None:
    """Who waits for room would wait for a gate that is going: 503 with a retry-after, while what runs finishes."""
    gate = start_gate(engine.url, config='[engine]\nkv_topology = "divided"\n')
    body = {**LONG, "stream": True, "max_tokens": 60}
    running = [asyncio.create_task(post(gate.url, body)) for _ in range(2)]
    await _running(gate, 2)
    queued = [asyncio.create_task(post(gate.url, {**body, "stream": stream})) for stream in (True, False)]
    deadline = time.monotonic() + 30
    while gate.status()["ledger"]["waiting"] < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    gate.process.send_signal(signal.SIGTERM)
    for answer in await asyncio.gather(*queued):
        assert (answer.status, answer.error["code"]) == (503, "gate_draining")
        assert "retry-after" in answer.headers
    assert not any(task.done() for task in running)
    assert [answer.events[-1] for answer in await asyncio.gather(*running)] == ["[DONE]"] * 2
    assert await asyncio.to_thread(gate.process.wait, 20) == 0


async def test_a_hangup_signal_reloads_what_may_change(engine: EngineProcess, start_gate: StartGate) -> None:
    """Without a pause for those who run; what needs a restart is named, what cannot be used changes nothing."""
    gate = start_gate(engine.url)
    config = gate.log_path.parent / "kvgate.toml"
    running = asyncio.create_task(post(gate.url, {**LONG, "stream": True, "max_tokens": 100}))
    await _running(gate, 1)

    async def reload(text: str, event: str) -> dict[str, Any]:
        before = len(gate.log_lines(event))
        config.write_text(text)
        gate.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while len(lines := gate.log_lines(event)) == before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return lines[-1]

    changes = 'tenants_owner = "me"\n[engine]\nkv_topology = "divided"\n[http]\nbody_bytes_max = 2000\n'
    said = await reload(changes, "settings reloaded")
    assert said["changed"] == ["engine.kv_topology", "http.body_bytes_max"]
    assert any("need a restart to come into force" in warning for warning in gate.ready()["warnings"])
    long = await post(gate.url, chat("x" * 3000))
    assert (long.status, long.error["code"]) == (413, "request_too_large")
    assert (await post(gate.url, chat(max_tokens=1))).status == 200  # beside the one that runs: a slot of its own
    assert gate.status()["engine"]["profile"]["topology"] == {"value": "divided", "source": "setting"}
    said = await reload("[http]\nbody_bites_max = 3000\n", "the settings were not reloaded")
    assert "did you mean body_bytes_max" in said["problem"]
    assert any("body_bites_max" in warning for warning in gate.ready()["warnings"])
    assert (await post(gate.url, chat("x" * 3000))).status == 413
    await reload("", "settings reloaded")
    assert gate.ready()["warnings"] == [warning for warning in gate.ready()["warnings"] if "kv_topology" in warning]
    assert (await post(gate.url, chat("x" * 3000, max_tokens=1))).status != 413
    assert (await running).events[-1] == "[DONE]"


async def test_a_stop_that_must_cut_says_so(engine: EngineProcess, start_gate: StartGate) -> None:
    """At the end of the grace period every request gets an error of its own, streamed or not; nobody blames it."""
    gate = start_gate(engine.url, config='[http]\nstop_grace_s = 1\n[engine]\nkv_topology = "divided"\n')
    running = [asyncio.create_task(post(gate.url, body)) for body in (LONG, {**LONG, "stream": True})]
    await _running(gate, 2)
    await asyncio.sleep(1)
    gate.process.send_signal(signal.SIGTERM)
    whole, stream = await asyncio.gather(*running)
    assert (whole.status, whole.error["code"]) == (503, "gate_draining")
    assert stream.events[-2]["error"]["code"] == "gate_draining"
    assert stream.events[-1] == "[DONE]"
    assert await asyncio.to_thread(gate.process.wait, 20) == 0
    lines = gate.log_lines("request")[-2:]
    assert [(line["reason"], line.get("hung_up")) for line in lines] == [("gate_draining", None)] * 2


async def test_a_second_signal_ends_it_now(engine: EngineProcess, start_gate: StartGate) -> None:
    """Who presses Ctrl-C twice means it."""
    gate = start_gate(engine.url, config="[http]\nstop_grace_s = 60\n")
    running = asyncio.create_task(post(gate.url, LONG))
    await _running(gate, 1)
    gate.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.3)
    gate.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(gate.process.wait, 10) == 0
    assert (await running).status == 503


async def test_a_bad_tenants_file_is_visible_and_changes_nothing(
    engine: EngineProcess, start_gate: StartGate
) -> None:
    """A typo in the file leaves the last one in force, and readiness warns until it is mended; keys come and go."""
    gate = start_gate(engine.url)
    file = gate.log_path.parent / "tenants.toml"
    good = file.read_text()

    async def until(expected: bool, text: str) -> None:
        deadline = time.monotonic() + 5
        while any(text in warning for warning in gate.ready()["warnings"]) is not expected:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    file.write_text(good.replace("keys_sha256", "keys_sha265"))
    await until(True, "did you mean keys_sha256")
    assert (await post(gate.url, chat(max_tokens=1))).status == 200
    file.write_text(good.replace(hashlib.sha256(b"sk-demo").hexdigest(), hashlib.sha256(b"sk-new").hexdigest()))
    await until(False, "keys_sha256")
    deadline = time.monotonic() + 2
    while (await post(gate.url, chat(max_tokens=1))).status != 401:
        assert time.monotonic() < deadline
    assert (await post(gate.url, chat(max_tokens=1), key="sk-new")).status == 200
    file.write_text("")
    await until(True, "declares no tenant at all, which would remove demo")
    assert (await post(gate.url, chat(max_tokens=1), key="sk-new")).status == 200
