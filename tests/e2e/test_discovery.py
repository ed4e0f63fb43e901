"""What the gate knows of a real engine, and what it does with one that is too small."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.ask import chat, post
from tests.e2e.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import StartEngine, StartGate

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def six_slots(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", "8192", "-np", "6", "--no-kv-unified", "-lv", "4")


async def test_n_ctx_slot_is_read_not_computed(six_slots: EngineProcess, start_gate: StartGate) -> None:
    """8192 tokens over 6 slots are what the engine says they are, and not 8192 / 6."""
    gate = start_gate(six_slots.url, flags=["--engine-log", str(six_slots.log_path)])
    profile = gate.status()["engine"]["profile"]
    assert f"n_slots = 6, n_ctx_slot = {profile['n_ctx_slot']['value']}" in six_slots.log()
    assert profile["n_ctx_slot"] == {"value": 1536, "source": "props"}
    assert profile["total_slots"] == {"value": 6, "source": "props"}
    assert profile["topology"] == {"value": "divided", "source": "log"}
    assert profile["pool_tokens"] == {"value": 9216, "source": "log"}
    assert profile["kv_type_k"] == {"value": "f16", "source": "log"}
    ready = gate.ready()
    assert (ready["ready"], ready["problems"]) == (True, [])
    assert ["RAM prompt cache" in warning for warning in ready["warnings"]] == [True]  # llama.cpp's default
    assert profile["prompt_cache_mib"] == {"value": 8192, "source": "log"}
    assert profile["idle_slots_cached"] == {"value": True, "source": "log"}
    assert (ready["engine"]["state"], ready["engine"]["changed"]) == ("serving", None)
    answer = await post(gate.url, chat(max_tokens=2))
    assert answer.headers["x-kvgate-n-ctx-slot"] == "1536"
    assert answer.headers["x-kvgate-kv-type"] == "f16"


async def test_an_undersized_engine_is_not_served(six_slots: EngineProcess, start_gate: StartGate) -> None:
    """Below the product's minimum nothing is served, and everybody is told the two figures."""
    gate = start_gate(six_slots.url, config="[engine]\ncontext_tokens_min = 2048\n")
    answer = await post(gate.url, chat(max_tokens=2))
    assert (answer.status, answer.error["code"]) == (503, "engine_undersized")
    assert (answer.error["n_ctx_slot"], answer.error["context_tokens_min"]) == (1536, 2048)
    assert "retry-after" in answer.headers
    ready = gate.ready()
    assert ready["ready"] is False
    assert "1536" in ready["problems"][0]


async def test_an_undersized_engine_can_be_served_with_a_warning(
    six_slots: EngineProcess, start_gate: StartGate
) -> None:
    """`on_undersized = "warn"` is the operator's word, and readiness says so."""
    gate = start_gate(six_slots.url, config='[engine]\ncontext_tokens_min = 2048\non_undersized = "warn"\n')
    assert (await post(gate.url, chat(max_tokens=2))).status == 200
    ready = gate.ready()
    assert ready["ready"] is True
    assert any("context_tokens_min" in warning for warning in ready["warnings"])


def _check(engine: EngineProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvgate", "check", "--upstream", engine.url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_check_fails_a_deploy_that_is_too_small(six_slots: EngineProcess) -> None:
    """`kvgate check` exits 1 below the minimum and names what it found, 0 at it."""
    small = _check(six_slots, "--context-tokens-min", "2048")
    assert small.returncode == 1
    assert "1536" in small.stdout
    assert "-c 12288 -np 6" in small.stdout
    exact = _check(six_slots, "--context-tokens-min", "1536", "--json")
    assert exact.returncode == 0
    assert json.loads(exact.stdout)["n_ctx_slot"] == 1536


def test_check_that_cannot_ask_says_so(six_slots: EngineProcess) -> None:
    """An engine that is not there is neither large enough nor too small: exit 2."""
    command = [
        sys.executable,
        "-m",
        "kvgate",
        "check",
        "--upstream",
        "http://127.0.0.1:1",
        "--context-tokens-min",
        "1",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert "cannot be reached" in found.stderr


async def test_topology_unknown_is_one_pool_and_loud(start_engine: StartEngine, start_gate: StartGate) -> None:
    """Without a log nothing tells the topology: the safe guess is in force, and the setting to write is shown."""
    engine = start_engine("-c", "1024", "-np", "2", "--no-kv-unified")
    gate = start_gate(engine.url)
    status = gate.status()
    assert status["engine"]["profile"]["topology"] == {"value": "unified", "source": "assumed"}
    assert status["engine"]["profile"]["pool_tokens"] == {"value": 512, "source": "assumed"}
    assert "kv_topology" in status["warnings"][0]
    assert gate.metric("kvgate_engine_topology_assumed") == 1
    told = start_gate(engine.url, config='[engine]\nkv_topology = "divided"\n').status()["engine"]["profile"]
    assert told["pool_tokens"] == {"value": 1024, "source": "setting"}


async def test_the_engine_can_be_kvgates_own_child(start_gate: StartGate, model: Path) -> None:
    """What follows -- runs as the engine, its startup log is read, and both end together."""
    command = [sys.executable, "-m", "kvgate.lab.llama_server", "-m", str(model), "-c", "1024", "-np", "2"]
    gate = start_gate(command=[*command, "--kv-unified", "--host", "127.0.0.1", "--port", str(free_port())])
    profile = gate.status()["engine"]["profile"]
    assert profile["topology"] == {"value": "unified", "source": "log"}
    assert (await post(gate.url, chat(max_tokens=2))).status == 200
    assert gate.stop() == 0


async def test_a_successor_is_in_force_before_the_next_request(
    start_engine: StartEngine, start_gate: StartGate
) -> None:
    """An engine that comes back with half the context is judged by its new figures from the first request on.

    The log of its predecessor is not believed any more: what it says of the topology died with it.
    """
    engine = start_engine("-c", "1024", "-np", "1", "-lv", "4")
    gate = start_gate(engine.url, flags=["--engine-log", str(engine.log_path)])
    assert (await post(gate.url, chat(max_tokens=2))).status == 200
    engine.kill()
    down = await post(gate.url, chat(max_tokens=2))
    assert (down.status, down.error["code"]) == (503, "engine_unreachable")
    engine.restart(["-m", engine.arguments[1], "-c", "512", "-np", "1"])
    answer = await post(gate.url, chat(max_tokens=600))
    assert (answer.status, answer.error["n_ctx"]) == (400, 512)
    assert gate.metric("kvgate_engine_changes_total") == 1
    assert gate.log_lines("the engine is another one now")
