"""Fair by the token on the real engine, one layer of it: whose tokens they are matters here, not which."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.ask import chat, post
from tests.e2e.one_layer import one_layer

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

WITHIN_S = 60.0
SLOTS, N_CTX_SLOT = 2, 512
AT_ONCE = 16
"""Requests that each tenant has at the gate: more than can be let in between two of its answers."""

WORDS = "river stone green seven cloud paper music horse lemon alpha"


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineProcess:
    cut = one_layer(model, tmp_path_factory.mktemp("model") / "one-layer.gguf")
    flags = ["-m", str(cut), "-c", str(SLOTS * N_CTX_SLOT), "-np", str(SLOTS), "--no-kv-unified", "-lv", "4"]
    return start_engine(*flags, "--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots")


@dataclass
class Asker:
    """A tenant that always has `AT_ONCE` requests at the gate, and what service it has had since both wait."""

    gate: RunningGate
    name: str
    sizes: list[tuple[int, int]]
    service: float = 0.0
    answers: int = 0
    both_wait: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once both have had answers: what one got before the other came is no matter of fairness."""

    async def run(self, done: asyncio.Event, until_service: float) -> None:
        await asyncio.gather(*(self._ask_again(at, done, until_service) for at in range(AT_ONCE)))

    async def _ask_again(self, at: int, done: asyncio.Event, until_service: float) -> None:
        while not done.is_set():
            at += AT_ONCE
            words, output = self.sizes[at % len(self.sizes)]
            stream = at % 2 == 0
            body = chat(" ".join([WORDS] * words), max_tokens=output, ignore_eos=True, stream=stream)
            if stream:
                body["stream_options"] = {"include_usage": True}
            answer = await post(self.gate.url, body, key=f"sk-{self.name}")
            assert answer.status == 200, answer.raw
            usage = (
                next(one["usage"] for one in answer.events[::-1] if one != "[DONE]" and one.get("usage"))
                if (stream)
                else answer.json["usage"]
            )
            self.answers += 1
            if not done.is_set() and self.both_wait.is_set():
                self.service += usage["prompt_tokens"] + 2 * usage["completion_tokens"]
            if self.service >= until_service:
                done.set()


async def _watched(gate: RunningGate, done: asyncio.Event) -> list[dict[str, Any]]:
    """What the gate says of fairness, as often as it can be asked, until it is done."""
    found = []
    while not done.is_set():
        found.append((await asyncio.to_thread(gate.status))["fairness"])
        await asyncio.sleep(0.05)
    return [one for one in found if one is not None]


async def test_two_that_always_wait_get_service_in_the_ratio_of_their_weights(
    engine: EngineProcess, start_gate: StartGate
) -> None:
    """1:2 within a tenth, one with long prompts and one with long answers; the gap inside its bound at every look."""
    tenants = {
        "one": "queue_timeout_s = 120\nweight = 1.0\n",
        "two": "queue_timeout_s = 120\nweight = 2.0\n",
    }
    gate = start_gate(engine.url, tenants=tenants, flags=["--engine-log", str(engine.log_path)])
    one = Asker(gate, "one", [(12, 4), (20, 2), (8, 8)])
    two = Asker(gate, "two", [(1, 60), (2, 70), (1, 50)])
    one.both_wait = two.both_wait
    done = asyncio.Event()

    async def until_both_wait() -> None:
        while min(one.answers, two.answers) < 2:  # noqa: ASYNC110 - two counters are no event
            await asyncio.sleep(0.02)
        two.both_wait.set()

    looks, *_ = await asyncio.gather(
        _watched(gate, done), until_both_wait(), one.run(done, 1e9), two.run(done, 9_000)
    )
    both = [look for look in looks if all(name in look["tenants"] for name in ("one", "two"))]
    fewest = min(one["waiting"] for look in both for one in look["tenants"].values())
    assert two.service / one.service == pytest.approx(2.0, rel=0.1), f"{fewest} waited at the fewest"
    assert len(both) > 3
    for look in both:
        assert look["gap"] <= look["gap_max"] <= look["gap_bound"] == 2 * 2 * SLOTS * N_CTX_SLOT
        assert look["void"] == []
    assert max(look["tenants"]["one"]["weight_share"] for look in both) == pytest.approx(1 / 3, abs=1e-3)
    gate.wait_until_empty(WITHIN_S)
    for name in ("one", "two"):
        assert gate.metric("kvgate_service_total", tenant=name) > 0
        assert gate.metric("kvgate_kv_token_seconds_total", tenant=name) > 0
        assert gate.metric("kvgate_kv_mib_seconds_total", tenant=name) > 0


async def test_a_guaranteed_slot_is_held_back_from_long_answers_and_lent_to_short_ones(
    engine: EngineProcess, start_gate: StartGate
) -> None:
    """A flood of answers longer than may be lent has one slot of two; its owner finds the other free."""
    tenants = {
        "flood": "queue_timeout_s = 120\n",
        "owner": 'queue_timeout_s = 120\ntier = "guaranteed"\nguaranteed_ratio = 0.5\n',
    }
    config = "[fairness]\nlent_output_tokens_max = 32\n"
    gate = start_gate(engine.url, tenants=tenants, config=config, flags=["--engine-log", str(engine.log_path)])
    long = chat(WORDS, max_tokens=300, ignore_eos=True)
    flood = [asyncio.create_task(post(gate.url, long, key="sk-flood")) for _ in range(6)]
    await asyncio.to_thread(gate.wait_until_running)
    most = 0
    for _ in range(5):
        answer = await post(gate.url, chat(max_tokens=8, ignore_eos=True), key="sk-owner")
        assert (answer.status, answer.headers["x-kvgate-queue-ms"]) == (200, "0")
        ledger = (await asyncio.to_thread(gate.status))["ledger"]
        most = max(most, dict(ledger["running_by_tenant"]).get("flood", 0))
    assert most == 1
    short = [post(gate.url, chat(max_tokens=8, ignore_eos=True), key="sk-flood") for _ in range(2)]
    assert [answer.status for answer in await asyncio.gather(*flood, *short)] == [200] * 8
    gate.wait_until_empty(WITHIN_S)
    assert gate.metric("kvgate_fairness_void", by="tiers") == 0  # idle again: all begin alike


async def test_no_more_of_prompts_is_read_at_once_than_may_be(engine: EngineProcess, start_gate: StartGate) -> None:
    """Two long prompts never side by side, however many ask; what is longer than the bound goes alone."""
    config = "[engine]\nprefill_tokens_max = 150\n"
    tenants = dict.fromkeys(("a", "b"), "queue_timeout_s = 120\n")
    gate = start_gate(engine.url, tenants=tenants, config=config, flags=["--engine-log", str(engine.log_path)])
    bodies = [chat(" ".join([WORDS] * words), max_tokens=4, stream=True) for words in (11, 12, 11, 30)]
    asked = asyncio.gather(*(post(gate.url, body, key=f"sk-{name}") for body in bodies for name in ("a", "b")))
    reading = []
    while not asked.done():
        reading.append((await asyncio.to_thread(gate.status))["fairness"])
        await asyncio.sleep(0.005)
    assert [answer.status for answer in await asked] == [200] * 8
    prefills = {one["prefill_tokens"] for one in reading if one is not None}
    assert max(prefills) > 0
    assert all(tokens <= 150 or tokens > 300 for tokens in prefills), prefills
    gate.wait_until_empty(WITHIN_S)


async def test_more_than_the_whole_is_not_guaranteed(engine: EngineProcess, start_gate: StartGate) -> None:
    """A file that would is refused by the sentence that names the sum, and the last one stays in force."""
    share = 'tier = "guaranteed"\nguaranteed_ratio = {}\n'
    gate = start_gate(engine.url, tenants={"a": share.format(0.5), "b": ""})
    assert (await post(gate.url, chat(max_tokens=2), key="sk-a")).status == 200
    path = gate.log_path.parent / "tenants.toml"
    text = path.read_text()
    path.write_text(text + share.format(0.75))
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WITHIN_S
    while not any("together is 1.25" in said for said in gate.ready()["warnings"]):
        assert loop.time() < deadline, gate.ready()
        await asyncio.sleep(0.1)
    assert (await post(gate.url, chat(max_tokens=2), key="sk-b")).status == 200
