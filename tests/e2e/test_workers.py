"""Several processes behind one address are one gate: one ledger, one set of figures; who ends is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.ask import chat, post

if TYPE_CHECKING:
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

ASKS = 12


@pytest.fixture(scope="module")
def gate(start_engine: StartEngine, start_gate: StartGate) -> RunningGate:
    engine = start_engine("-c", "1024", "-np", "2", "--no-kv-unified", "-lv", "4")
    flags = ["--workers", "2", "--engine-log", str(engine.log_path)]
    return start_gate(engine.url, tenants={"demo": "concurrency_max = 1\nqueue_timeout_s = 120\n"}, flags=flags)


def pids(gate: RunningGate) -> list[int]:
    return [worker["pid"] for worker in gate.status()["workers"].values() if worker is not None]


async def test_they_share_one_ledger_and_are_counted_as_one(gate: RunningGate) -> None:
    """A tenant's concurrency of 1 holds over both; `/metrics` has every request once."""
    asking = [asyncio.create_task(post(gate.url, chat(max_tokens=4, temperature=0))) for _ in range(ASKS)]
    most = 0
    while not all(task.done() for task in asking):
        most = max(most, (await asyncio.to_thread(gate.status))["ledger"]["running"])
        await asyncio.sleep(0.01)
    assert {answer.status for answer in await asyncio.gather(*asking)} == {200}
    assert most == 1
    assert gate.metric("kvgate_requests_total", status="200") == ASKS
    assert gate.metric("kvgate_slots") == 2
    status = await asyncio.to_thread(gate.wait_until_empty, 10)
    assert set(status["workers"]) == {"1", "2"}
    ready = gate.ready()
    assert (ready["ready"], ready["problems"], ready["workers"]) == (True, [], 2)


async def test_what_a_body_would_get_any_of_them_explains(gate: RunningGate) -> None:
    """Through the one operator's address, like everything else of it."""
    url = gate.admin_url
    answer = await post(url, chat(max_tokens=1), key=None, path="/explain?tenant=demo")
    assert (answer.status, answer.json["verdict"]) == (200, "admit")
    unknown = await post(url, chat(max_tokens=1), key=None, path="/explain?tenant=nobody")
    assert (unknown.status, unknown.json["problem"]) == (404, "there is no tenant 'nobody'")


async def test_one_that_ends_is_started_again(gate: RunningGate) -> None:
    """Its address stays served meanwhile; what it held comes back by itself."""
    victim, other = await asyncio.to_thread(pids, gate)
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while "does not answer" not in " ".join((await asyncio.to_thread(gate.ready))["warnings"]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert (await post(gate.url, chat(max_tokens=1))).status == 200
    while (await asyncio.to_thread(gate.ready))["workers"] < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert other in await asyncio.to_thread(pids, gate)
    assert gate.log_lines("a worker ended, it is started again")[-1]["exit_status"] == -9


async def test_a_stop_lets_streams_of_every_worker_finish(gate: RunningGate) -> None:
    body = chat(max_tokens=30, ignore_eos=True, stream=True)
    running = asyncio.create_task(post(gate.url, body))
    await asyncio.to_thread(gate.wait_until_running)
    gate.process.send_signal(signal.SIGTERM)
    assert (await running).events[-1] == "[DONE]"
    assert await asyncio.to_thread(gate.process.wait, 40) == 0
