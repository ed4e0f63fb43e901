"""Off means off on a real engine, and what one tenant left in a slot is nothing that another can read."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.engines.llamacpp import REUSE_FIELDS
from kvgate.lab.engine_process import EngineProcess
from tests.e2e.ask import post
from tests.e2e.canaries import REUSE_OFF, pinned, until_reuse
from tests.e2e.one_layer import one_layer
from tests.e2e.recorder import Recorder
from tests.e2e.test_dialects import generated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.conftest import RunningGate, StartGate

pytestmark = pytest.mark.engine

SECRET = "The vault opens with the words amber falcon seventeen quiet rivers and nobody else may ever know them."
GUESS_RIGHT = "The vault opens with the words amber falcon"
GUESS_WRONG = "The vault opens with the words green salmon"
MARK = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Two slots of 1024 tokens, reuse off by its flags; it reuses all the same for whoever asks for it."""
    where = tmp_path_factory.mktemp("engine")
    small = one_layer(model, where / "one-layer.gguf")
    flags = ("-t", "1", "-c", "2048", "-np", "2", "--no-kv-unified", "-lv", "4", *REUSE_OFF)
    with EngineProcess(["-m", str(small), *flags], log_path=where / "engine.log") as found:
        yield found


@pytest.fixture(scope="module")
def recorder(engine: EngineProcess) -> Iterator[Recorder]:
    with Recorder(engine.url) as found:
        yield found


@pytest.fixture(scope="module")
def shared(engine: EngineProcess, recorder: Recorder, start_gate: StartGate) -> RunningGate:
    """A gate whose engine serves everybody: also a canary has no reuse there."""
    tenants = {"off": "queue_timeout_s = 120\n", "canary": 'reuse = "canary"\n'}
    return start_gate(recorder.url, tenants=tenants, flags=["--engine-log", str(engine.log_path)])


@pytest.fixture(scope="module")
def dedicated(engine: EngineProcess, start_gate: StartGate) -> RunningGate:
    """A gate whose engine is there for its canary alone."""
    tenants = {"off": "", "canary": 'reuse = "canary"\n'}
    config = '[engine]\nkv_topology = "divided"\ndedicated_to = ["canary"]\n'
    return start_gate(engine.url, tenants=tenants, config=config)


async def bare(engine: EngineProcess, prompt: str, **fields: Any) -> int:
    """The tokens that the engine itself reused of a prompt."""
    answer = await post(engine.url, {"prompt": prompt, "n_predict": 1, **fields}, key=None, path="/completion")
    found: int = answer.json["timings"]["cache_n"]
    return found


def greedy(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, asking for reuse in every way that there is."""
    everything = dict.fromkeys(REUSE_FIELDS, 1) | {"cache_prompt": True, "id_slot": 0}
    asked: dict[str, Any] = {**copy.deepcopy(body), **everything}
    for message in asked.get("messages", []):
        message["cache_control"] = MARK
    return asked


# -- off means off


@pytest.mark.timeout(300)
async def test_a_tenant_off_the_list_reuses_nothing_in_300_requests_of_all_dialects(
    shared: RunningGate, engine: EngineProcess, recorder: Recorder
) -> None:
    """Each asks for reuse under every name there is; half of them repeat what was asked before. The engine would."""
    # One layer makes no sense, so it cannot follow a schema.
    drawn = [one for one in generated(200, seed=5) if "response_format" not in one[1]][:150]
    requests = [one for one in drawn for _ in range(2)]
    assert len(requests) == 300
    limit = asyncio.Semaphore(2)
    headers = {
        "x-session-affinity": "marked-header",
        "session_id": "marked-header",
        "anthropic-beta": "prompt-caching-marked-header",
        "cookie": "route=marked-header",
    }
    recorder.bodies()

    async def one(path: str, body: dict[str, Any]) -> None:
        async with limit:
            answer = await post(shared.url, greedy(body), path=path, key="sk-off", headers=headers)
        assert answer.status == 200, (path, body, answer.raw)
        assert answer.headers["x-kvgate-reuse"] == "off"

    await asyncio.gather(*(one(path, body) for path, body in requests))
    assert len({path for path, _ in requests}) == 5
    everything = recorder.bodies()
    assert b"marked-header" not in everything
    # Counters get the client's own body; they run nothing. The probe of a new engine says nothing of reuse.
    paths = {path.encode() for path, _ in requests}
    each = [one for one in re.split(rb"(?=POST /)", everything) if one[:5] == b"POST " and one.split()[1] in paths]
    sent = [one for one in each if not re.search(rb'"max_tokens": 1}$', one)]
    assert len(sent) >= 300
    assert [one for one in sent if not re.search(rb'"cache_prompt": ?false', one)] == []
    assert not [one for one in sent if b"cache_control" in one or b"id_slot" in one or b"cache_salt" in one]
    await asyncio.to_thread(shared.wait_until_empty, 30)
    assert shared.metric("kvgate_tokens_total", tenant="off", kind="prompt") > 3000
    assert shared.metric("kvgate_tokens_total", tenant="off", kind="cached") == 0
    assert shared.metric("kvgate_reuse_violations_total") == 0
    assert (await asyncio.to_thread(shared.ready))["warnings"] == []
    # The control: without the gate the same engine reuses for the same asking.
    assert [await bare(engine, SECRET * 2, cache_prompt=True) > 20 for _ in range(2)][1]


# -- isolation


async def left_by_a_tenant_without_reuse(gate: RunningGate) -> int:
    """The needle, through the gate, in a slot; which one the engine says."""
    answer = await post(gate.url, {"prompt": SECRET, "n_predict": 1}, path="/completion", key="sk-off")
    assert (answer.status, answer.headers["x-kvgate-reuse"]) == (200, "off")
    await asyncio.to_thread(gate.wait_until_empty, 30)
    slot: int = answer.json["id_slot"]
    return slot


async def test_what_was_left_can_be_found_without_kvgate(shared: RunningGate, engine: EngineProcess) -> None:
    """The attack: with a pinned slot, the count of cached tokens says which guess is right, word by word."""
    found = {}
    for guess in (GUESS_WRONG, GUESS_RIGHT):
        slot = await left_by_a_tenant_without_reuse(shared)
        found[guess] = await bare(engine, guess + " x y", cache_prompt=True, id_slot=slot)
    assert found[GUESS_RIGHT] > found[GUESS_WRONG] > 0


@pytest.mark.parametrize("key", ["sk-off", "sk-canary"])
async def test_what_was_left_cannot_be_found_through_kvgate(shared: RunningGate, key: str) -> None:
    """Neither by a tenant off the list nor by a canary, whatever it asks for: the engine is shared."""
    for guess in (GUESS_RIGHT, GUESS_WRONG, SECRET):
        left_in = await left_by_a_tenant_without_reuse(shared)
        for slot in (left_in, 1 - left_in, left_in + 2, -1):
            asked = greedy({"prompt": guess, "n_predict": 1}) | {"id_slot": slot, "timings_per_token": True}
            answer = await post(shared.url, asked, path="/completion", key=key)
            assert (answer.status, answer.headers["x-kvgate-reuse"]) == (200, "off")
            timings = answer.json["timings"]
            assert (timings["cache_n"], timings["prompt_n"]) == (0, answer.json["tokens_evaluated"])
    assert shared.metric("kvgate_tokens_total", kind="cached") == 0
    assert shared.metric("kvgate_reuse_violations_total") == 0


async def test_an_engine_with_reuse_takes_nothing_from_others(dedicated: RunningGate, engine: EngineProcess) -> None:
    """A tenant off the list cannot leave anything there: 403, in the words of each API, before anything is sent."""
    await pinned(dedicated, "canary")
    await bare(engine, "nothing of it", cache_prompt=False, id_slot=0)
    await bare(engine, "nothing of it", cache_prompt=False, id_slot=1)
    for path, body in generated(10):
        answer = await post(dedicated.url, body, path=path, key="sk-off")
        assert (answer.status, answer.headers["x-kvgate-reason"]) == (403, "engine_dedicated")
    answer = await post(dedicated.url, {"prompt": SECRET, "n_predict": 1}, path="/completion", key="sk-off")
    assert answer.status == 403
    guess = {"prompt": GUESS_RIGHT + " x y", "n_predict": 1}
    found = await post(dedicated.url, guess, path="/completion", key="sk-canary")
    assert (found.status, found.headers["x-kvgate-reuse"], found.json["timings"]["cache_n"]) == (200, "on", 0)
    again = await post(dedicated.url, guess, path="/completion", key="sk-canary")
    assert again.json["timings"]["cache_n"] > 5  # its own it finds


async def test_a_tenant_off_the_list_on_a_dedicated_engine_takes_reuse_from_all(
    engine: EngineProcess, start_gate: StartGate
) -> None:
    """What it leaves could be found: so nobody reads anything, and the operator is told who it is."""
    tenants = {"off": "", "canary": 'reuse = "canary"\n'}
    config = '[engine]\nkv_topology = "divided"\ndedicated_to = ["canary", "off"]\n'
    gate = start_gate(engine.url, tenants=tenants, config=config)
    told = await until_reuse(gate, "canary", on=False)
    assert "also serves tenants who are not on the allowlist: off" in told["tenants"]["canary"]
    await left_by_a_tenant_without_reuse(gate)
    asked = greedy({"prompt": GUESS_RIGHT + " x y", "n_predict": 1})
    answer = await post(gate.url, asked, path="/completion", key="sk-canary")
    assert (answer.headers["x-kvgate-reuse"], answer.json["timings"]["cache_n"]) == ("off", 0)
    assert gate.metric("kvgate_tokens_total", kind="cached") == 0


async def test_messages_never_reuse_even_for_a_canary(dedicated: RunningGate) -> None:
    """Their switch is dropped by the engine, so it stays as the engine was started."""
    await pinned(dedicated, "canary")
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}
    for _ in range(2):
        answer = await post(dedicated.url, body, path="/v1/messages", key="sk-canary")
        assert (answer.status, answer.headers["x-kvgate-reuse"]) == (200, "off")
        assert not json.loads(answer.raw)["usage"].get("cache_read_input_tokens")
