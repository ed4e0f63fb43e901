"""The life of a real engine as its operator is told of it, and who uses it around the gate."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvgate.lab.engine_process import EngineProcess
from tests.e2e.ask import chat, post
from tests.e2e.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

TWO_SLOTS = ("-c", "1024", "-np", "2", "--no-kv-unified")
LONG = chat("Tell a story.", max_tokens=400, ignore_eos=True)
SLEEP_S = 2


async def until(gate: RunningGate, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 60) -> dict[str, Any]:
    """What readiness says once it says that."""
    deadline = time.monotonic() + timeout_s
    while not holds(ready := await asyncio.to_thread(gate.ready)):
        assert time.monotonic() < deadline, ready
        await asyncio.sleep(0.1)
    return ready


async def until_state(gate: RunningGate, state: str) -> dict[str, Any]:
    return await until(gate, lambda ready: ready["engine"]["state"] == state)


def states(gate: RunningGate) -> dict[str, float]:
    """The states that the metrics show as 1."""
    names = ("serving", "loading", "asleep", "unreachable", "hung", "undersized", "unknown")
    found = {name: gate.metric("kvgate_engine_state", state=name) for name in names}
    return {name: value for name, value in found.items() if value}


# -- states


async def test_crash_restart_and_replacement_are_told_apart(start_engine: StartEngine, start_gate: StartGate) -> None:
    """A crash says what it was until when; an equal successor is no matter; a smaller one is, until it is larger."""
    engine = start_engine(*TWO_SLOTS)
    gate = start_gate(engine.url, config='[engine]\nkv_topology = "divided"\n')
    assert states(gate) == {"serving": 1}
    engine.kill()
    gone = await until_state(gate, "unreachable")
    assert gone["ready"] is False
    assert gone["problems"] == [gone["engine"]["sentence"]]
    assert "it was serving until" in gone["problems"][0]
    assert states(gate) == {"unreachable": 1}
    engine.start()
    back = await until_state(gate, "serving")
    assert back["engine"]["changed"]["what"] == "restarted"
    assert back["warnings"] == []
    engine.restart(["-m", engine.arguments[1], "-t", "1", "-c", "512", "-np", "2", "--no-kv-unified"])
    smaller = await until(gate, lambda ready: ready["ready"] and bool(ready["warnings"]))
    assert "replaced by a smaller one" in smaller["warnings"][0]
    assert "n_ctx_slot 512 -> 256" in smaller["warnings"][0]
    assert smaller["engine"]["changed"]["figures"]["n_ctx_slot"] == [512, 256]
    engine.restart(["-m", engine.arguments[1], "-t", "1", *TWO_SLOTS])
    await until(gate, lambda ready: ready["engine"]["state"] == "serving" and not ready["warnings"])
    changes = {what: gate.metric("kvgate_engine_changes_total", what=what) for what in ("smaller", "larger")}
    assert changes == {"smaller": 1, "larger": 1}
    assert abs(gate.metric("kvgate_engine_changed_timestamp_seconds") - time.time()) < 100
    told = [line["state"] for line in gate.log_lines() if line["event"].startswith("the engine ") and "state" in line]
    # One line a change: never the same twice, whichever of its states the polls fell on.
    assert all(before != now for before, now in itertools.pairwise(told))
    assert (told[0], told[-1]) == ("unreachable", "serving")
    assert set(told) <= {"unreachable", "loading", "serving"}


async def test_an_engine_that_is_started_later_is_served(model: Path, tmp_path: Path, start_gate: StartGate) -> None:
    """The gate may come first: it says that it has never reached the engine, then serves by itself."""
    port = free_port()
    gate = start_gate(f"http://127.0.0.1:{port}")
    never = await until_state(gate, "unreachable")
    assert "never been reached" in never["problems"][0]
    assert "Start the engine" in never["problems"][0]
    answer = await post(gate.url, chat(max_tokens=1))
    assert (answer.status, answer.error["code"]) == (503, "engine_unreachable")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    with EngineProcess(["-m", str(model), "-t", "1", *TWO_SLOTS], log_path=tmp_path / "engine.log", port=port):
        await until_state(gate, "serving")
        assert (await post(gate.url, chat(max_tokens=1))).status == 200


async def test_an_engine_that_hangs_says_so_and_comes_back(start_engine: StartEngine, start_gate: StartGate) -> None:
    """A stopped process takes connections and answers none: another state than one that is gone."""
    engine = start_engine(*TWO_SLOTS)
    gate = start_gate(engine.url)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        hung = await until_state(gate, "hung")
        assert "takes connections and answers nothing" in hung["problems"][0]
        assert states(gate) == {"hung": 1}
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    back = await until_state(gate, "serving")
    assert back["engine"]["changed"] is None


async def test_a_clients_mistake_is_not_the_engines_illness(start_engine: StartEngine, start_gate: StartGate) -> None:
    """What llama.cpp answers with 500 where the request is to blame is the client's 400, and changes no state."""
    engine = start_engine(*TWO_SLOTS)
    gate = start_gate(engine.url, config='[engine]\nkv_topology = "divided"\n')
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    mistakes: list[dict[str, Any]] = [
        {"messages": [{"content": "no role"}], "max_tokens": 2},
        {"messages": [{"role": "user", "content": [image]}], "max_tokens": 2},
    ]
    for body in mistakes:
        assert (await post(engine.url, body, key=None)).status == 500
        assert (await post(gate.url, body)).status == 400
        ready = gate.ready()
        assert (ready["ready"], ready["engine"]["state"], ready["warnings"]) == (True, "serving", [])
    assert not gate.log_lines("the engine does not serve")
    assert (await post(gate.url, chat(max_tokens=1))).status == 200


# -- sleep


async def test_watching_lets_an_engine_sleep_and_a_request_wakes_it(
    start_engine: StartEngine, start_gate: StartGate
) -> None:
    """Two gates watch it, one of them new: it falls asleep all the same, stays so, and serves the next request."""
    engine = start_engine(*TWO_SLOTS, "--sleep-idle-seconds", str(SLEEP_S), "-lv", "4")
    gate = start_gate(engine.url, config='[engine]\nkv_topology = "divided"\n')

    def wakes() -> int:
        return engine.log().count("server is exiting sleeping state")

    async def falls_asleep() -> None:
        asleep = await until_state(gate, "asleep")
        assert asleep["ready"] is True
        assert asleep["warnings"] == [
            "the engine is asleep: the next request wakes it and waits until the model is loaded"
        ]

    await falls_asleep()
    before = wakes()
    assert states(gate) == {"asleep": 1}
    newcomer = start_gate(engine.url)
    assert newcomer.ready()["engine"]["state"] == "asleep"
    assert newcomer.status()["engine"]["profile"]["n_ctx_slot"]["value"] == 512
    await until(gate, lambda ready: ready["engine"]["since_s"] > 2 * SLEEP_S)
    assert wakes() == before
    urls = [newcomer.url, gate.url, gate.url]
    answers = await asyncio.gather(*(post(url, chat(max_tokens=3)) for url in urls))
    assert [answer.status for answer in answers] == [200] * 3
    assert wakes() == before + 1
    await falls_asleep()
    assert gate.status()["engine"]["profile"]["n_ctx_slot"]["value"] == 512
    assert gate.metric("kvgate_engine_changes_total") == 0
    assert wakes() == before + 1


# -- foreign traffic


async def test_who_goes_around_the_gate_is_seen(start_engine: StartEngine, start_gate: StartGate) -> None:
    """A generation sent straight to the engine is told of within seconds of the gate's own traffic, until it ends."""
    engine = start_engine(*TWO_SLOTS)
    gate = start_gate(engine.url, config='[engine]\nkv_topology = "divided"\n')

    async with aiohttp.ClientSession() as session:

        async def go_around() -> None:
            while True:  # one after the other: a fast machine ends each within a second
                async with session.post(f"{engine.url}/v1/chat/completions", json=LONG) as answer:
                    await answer.read()

        foreigner = asyncio.create_task(go_around())
        try:
            deadline = time.monotonic() + 60
            while not gate.metric("kvgate_foreign_sightings_total"):
                assert time.monotonic() < deadline
                assert (await post(gate.url, chat(max_tokens=2))).status == 200
            ready = await until(gate, lambda ready: bool(ready["warnings"]))
            assert ready["ready"] is True
            assert "somebody uses the engine around this gate: 1 busy slot more than leases" in ready["warnings"][0]
        finally:
            foreigner.cancel()
            await asyncio.wait([foreigner])
    await until(gate, lambda ready: not ready["warnings"])
    assert gate.metric("kvgate_foreign_slots") == 0
    assert gate.metric("kvgate_foreign_sightings_total") == 1
    assert len(gate.log_lines("somebody uses the engine around this gate")) == 1
    assert len(gate.log_lines("nobody uses the engine around this gate any more")) == 1


async def test_the_gates_own_traffic_is_never_taken_for_foreign(
    start_engine: StartEngine, start_gate: StartGate
) -> None:
    """200 short requests, more at once than there are slots, some of which hang up: not one false alarm."""
    engine = start_engine(*TWO_SLOTS)
    config = '[engine]\nkv_topology = "divided"\n'
    gate = start_gate(engine.url, tenants={"demo": "queue_timeout_s = 120"}, config=config)
    dice = random.Random(7)
    at_once = asyncio.Semaphore(6)
    ended: list[int] = []

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        hangs_up, stream = dice.random() < 0.2, dice.random() < 0.5
        # No chat: its template would be most of the work.
        body = {"prompt": f"Say {number}", "max_tokens": 60 if hangs_up else dice.randint(1, 6), "stream": stream}
        timeout = aiohttp.ClientTimeout(total=dice.uniform(0.05, 1.5) if hangs_up else 150)
        async with at_once:
            try:
                async with session.post(f"{gate.url}/v1/completions", json=body, timeout=timeout) as answer:
                    await answer.read()
                    ended.append(answer.status)
            except TimeoutError:
                assert hangs_up

    async with aiohttp.ClientSession(headers={"Authorization": "Bearer sk-demo"}) as session:
        await asyncio.gather(*(one(session, number) for number in range(200)))
    await asyncio.to_thread(gate.wait_until_empty, 60)
    assert set(ended) == {200}
    assert len(ended) >= 120
    assert gate.metric("kvgate_foreign_sightings_total") == 0
    assert gate.metric("kvgate_foreign_slots") == 0
    assert gate.ready()["warnings"] == []
