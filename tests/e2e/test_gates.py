"""Several gates in front of one real engine: they share its slots, and what one of them held is not lost with it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.store.embedded import EmbeddedValkey
from tests.e2e.ask import Answer, chat, post

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

SLOTS = 4
LEASE_TTL_S = 2.0


@pytest.fixture
def engine(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", "2048", "-np", str(SLOTS), "--no-kv-unified", "-lv", "4")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EmbeddedValkey]:
    """A store of its own: it outlives any gate."""
    embedded = EmbeddedValkey(tmp_path / "store")
    await embedded.start()
    yield embedded
    await embedded.stop()


@pytest.fixture
def gates(engine: EngineProcess, store: EmbeddedValkey, start_gate: StartGate) -> list[RunningGate]:
    config = f'tenants_owner = "e2e"\n[store]\nurl = "{store.url}"\nlease_ttl_s = {LEASE_TTL_S}\n'
    flags = ["--engine-log", str(engine.log_path)]
    tenants = {"demo": "queue_timeout_s = 120\n"}
    return [start_gate(engine.url, config=config, flags=flags, tenants=tenants) for _ in range(2)]


async def _ledger(gate: RunningGate) -> dict[str, Any]:
    found: dict[str, Any] = (await asyncio.to_thread(gate.status))["ledger"]
    return found


async def _until(gate: RunningGate, within_s: float = 60, **expected: int) -> dict[str, Any]:
    """The ledger as this gate sees it, once these figures hold."""
    deadline = time.monotonic() + within_s
    while True:
        found = await _ledger(gate)
        if found is not None and all(found[name] == figure for name, figure in expected.items()):
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)


async def test_two_gates_share_the_slots_of_one_engine(gates: list[RunningGate]) -> None:
    """Eight requests over both: never more run than there are slots, both gates see the same, all finish."""
    body = chat("Count.", max_tokens=24, ignore_eos=True)
    asked = asyncio.gather(*(post(gates[at % 2].url, body) for at in range(8)))
    most = 0
    while not asked.done():
        for gate in gates:
            most = max(most, (await _ledger(gate))["running"])
        await asyncio.sleep(0.02)
    answers: list[Answer] = await asked
    assert [answer.status for answer in answers] == [200] * 8
    assert most == SLOTS
    for gate in gates:
        gate.wait_until_empty(10)
        assert gate.ready()["ready"]


async def test_a_gate_that_goes_by_anothers_prices_says_so(
    engine: EngineProcess, store: EmbeddedValkey, start_gate: StartGate
) -> None:
    """The gate that joined last says the prices for all; another names both, and shows the bound in force."""
    config = f'tenants_owner = "e2e"\n[store]\nurl = "{store.url}"\n[fairness]\noutput_price = '
    flags = ["--engine-log", str(engine.log_path)]
    first = start_gate(engine.url, config=config + "2.0", flags=flags)
    await _until(first, running=0)  # it has joined
    last = start_gate(engine.url, config=config + "3.0", flags=flags)
    deadline = time.monotonic() + 60
    while not any("fairness.output_price = 3 (here 2)" in said for said in first.ready()["warnings"]):
        assert time.monotonic() < deadline, first.ready()
        await asyncio.sleep(0.1)
    assert not any("fairness" in said for said in last.ready()["warnings"])
    assert {gate.metric("kvgate_service_gap_bound") for gate in (first, last)} == {2 * 3 * 2048}


async def test_a_killed_gates_kv_comes_back_after_the_lease_and_not_before_the_engine_is_idle(
    gates: list[RunningGate], engine: EngineProcess
) -> None:
    """Kill -9 with three streams: the lease must run out, and then the slots must be seen idle."""
    lost, other = gates
    long = chat("Tell a story.", max_tokens=450, ignore_eos=True, stream=True)
    streams = [asyncio.create_task(post(lost.url, long)) for _ in range(3)]
    before = await _until(other, running=3)
    killed_at = time.monotonic()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)  # it stays busy, and shows nothing
    try:
        lost.stop(signal.SIGKILL)
        found = await _ledger(other)
        if time.monotonic() - killed_at < LEASE_TTL_S / 2:
            assert (found["running"], found["held_tokens"]) == (3, before["held_tokens"])
        await _until(other, running=0, draining=3, held_tokens=before["held_tokens"])
        await asyncio.sleep(1)
        assert (await _ledger(other))["draining"] == 3
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    await _until(other, running=0, draining=0, held_tokens=0)
    assert (await _ledger(other))["drains_overdue"] == 0
    await asyncio.gather(*streams, return_exceptions=True)
    assert (await post(other.url, chat(max_tokens=2, n=4))).status == 200


async def test_a_store_that_hangs_stalls_no_stream_and_no_health(
    gates: list[RunningGate], store: EmbeddedValkey
) -> None:
    """What runs goes on to its end; /healthz and /readyz answer, and say what is wrong; afterwards all is counted."""
    gate = gates[0]
    body = chat("Tell a story.", max_tokens=300, ignore_eos=True, stream=True)
    running = asyncio.create_task(post(gate.url, body))
    await _until(gate, running=1)
    assert store.pid is not None
    os.kill(store.pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 30
        while not any("the store is out" in said for said in await asyncio.to_thread(_said, gate)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        answer = await running
        assert answer.events[-1] == "[DONE]"
    finally:
        os.kill(store.pid, signal.SIGCONT)
    await asyncio.to_thread(gate.wait_until_empty, 60)
    deadline = time.monotonic() + 30
    while any("the store is out" in said for said in await asyncio.to_thread(_said, gate)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert (await post(gate.url, chat(max_tokens=2))).status == 200


def _said(gate: RunningGate) -> list[str]:
    found = gate.ready()
    return [*found["problems"], *found["warnings"]]
