"""A pin holds for one engine process and as long as its evidence does; a canary's turns save their prefill."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvgate.lab.engine_process import EngineProcess
from kvgate.store.embedded import EmbeddedValkey
from tests.e2e.canaries import REUSE_OFF, Talk, command, pinned, record, restarted, store_of, until_reuse
from tests.e2e.conftest import TABLES
from tests.e2e.one_layer import one_layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

TENANTS = {"acme": 'reuse = "canary"\n', "beta": ""}
CONFIG = '[engine]\nkv_topology = "divided"\ndedicated_to = ["acme"]\n'


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Two slots of 1024 tokens."""
    where = tmp_path_factory.mktemp("engine")
    small = one_layer(model, where / "one-layer.gguf")
    flags = ("-t", "1", "-c", "2048", "-np", "2", "--no-kv-unified", *REUSE_OFF)
    with EngineProcess(["-m", str(small), *flags], log_path=where / "engine.log") as found:
        yield found


@pytest.fixture(scope="module")
def gate(engine: EngineProcess, start_gate: StartGate) -> RunningGate:
    return start_gate(engine.url, tenants=TENANTS, config=CONFIG)


async def test_the_steps_of_the_canary(gate: RunningGate) -> None:
    """Nothing without a suite; a failed one pins nothing; a passed one does; unpinned is off again."""
    talk = Talk(gate.url, "sk-acme", "steps")
    await record(gate, passed=False)
    assert "2 of 9 failed" in (await command(gate, "pin"))["problem"]
    assert (await talk.turn()).headers["x-kvgate-reuse"] == "off"
    report = await record(gate)
    assert (await command(gate, "pin"))["pin"]["fingerprint"] == report.fingerprint
    told = await until_reuse(gate, "acme", on=True)
    assert told["pin"]["by"].count("@") == 1
    await talk.turn()
    answer = await talk.turn()
    assert answer.headers["x-kvgate-reuse"] == "on"
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    assert (await command(gate, "unpin", "--why", "an exercise"))["unpinned"] == [report.fingerprint]
    await until_reuse(gate, "acme", on=False)
    assert (await talk.turn()).headers["x-kvgate-reuse"] == "off"


async def test_a_failed_suite_takes_the_pin_away(gate: RunningGate) -> None:
    """By itself, for every gate, within a second."""
    await pinned(gate, "acme")
    await record(gate, passed=False)
    await until_reuse(gate, "acme", on=False)


async def test_a_canarys_turns_save_their_prefill(gate: RunningGate, request: pytest.FixtureRequest) -> None:
    """Ten turns of a conversation beside another; what was reused is billed as used, counted right, no violation."""
    await pinned(gate, "acme")
    before = gate.metric("kvgate_tokens_total", tenant="acme", kind="cached")
    talks = [Talk(gate.url, "sk-acme", topic) for topic in ("harbour", "orchard")]
    for _ in range(10):
        for answer in await asyncio.gather(*(talk.turn() for talk in talks)):
            assert (answer.status, answer.headers["x-kvgate-reuse"]) == (200, "on")
    prompt, cached = (sum(getattr(talk, name) for talk in talks) for name in ("prompt_tokens", "cached_tokens"))
    saved = cached / prompt
    table = f"{prompt} prompt tokens in 20 turns, {cached} of them reused: prefill saved {saved:.0%}"
    request.config.stash.setdefault(TABLES, {})["multi-turn prefill saved by reuse"] = table
    assert saved > 0.5
    await asyncio.to_thread(gate.wait_until_empty, 30)
    assert gate.metric("kvgate_tokens_total", tenant="acme", kind="cached") - before == cached
    assert gate.metric("kvgate_count_drift_total") == 0
    assert gate.metric("kvgate_reuse_violations_total") == 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize("flags", [(), ("--cache-type-k", "q8_0")], ids=["the same again", "another engine"])
async def test_an_engine_swapped_under_traffic_reuses_nothing(
    gate: RunningGate, engine: EngineProcess, flags: tuple[str, ...]
) -> None:
    """From the first request after the swap on, and each conversation is told once that it is cold."""
    await pinned(gate, "acme")
    talks = [Talk(gate.url, "sk-acme", f"{topic} {flags}") for topic in ("river", "mountain")]
    reuse: list[list[str]] = [[], []]
    stopping = asyncio.Event()

    async def traffic(talk: Talk, seen: list[str]) -> None:
        while not stopping.is_set():
            answer = await talk.turn(words=12)
            if answer.status == 200:
                seen.append(answer.headers["x-kvgate-reuse"])
                if len(talk.messages) > 12:
                    talk.messages = talk.messages[:2]
            else:
                assert answer.status in {502, 503}
                await asyncio.sleep(0.05)

    async def until(condition: str) -> None:
        async with asyncio.timeout(60):
            while not all(condition in seen for seen in reuse):  # noqa: ASYNC110 - traffic tells of no event
                await asyncio.sleep(0.05)

    running = [asyncio.create_task(traffic(talk, seen)) for talk, seen in zip(talks, reuse, strict=True)]
    await until("on")
    await asyncio.to_thread(engine.stop)
    cached = gate.metric("kvgate_tokens_total", kind="cached")
    await asyncio.to_thread(engine.restart, [*engine.arguments, *flags])
    await until("off")
    stopping.set()
    await asyncio.gather(*running)
    await asyncio.to_thread(gate.wait_until_empty, 60)
    for seen in reuse:
        at = seen.index("cold")
        assert (set(seen[:at]), set(seen[at + 1 :])) == ({"on"}, {"off"})
    assert gate.metric("kvgate_tokens_total", kind="cached") == cached
    assert gate.metric("kvgate_reuse_violations_total") == 0
    assert cached > 0
    await until_reuse(gate, "acme", on=False)


@pytest.mark.timeout(120)
async def test_an_engine_that_served_others_has_no_reuse_until_it_is_restarted(
    engine: EngineProcess, gate: RunningGate, start_gate: StartGate
) -> None:
    """Another gate on the same store had the engine for everybody; what they said is in its slots still."""
    await restarted(gate, engine)
    await pinned(gate, "acme")
    embedded = EmbeddedValkey(gate.log_path.parent / ".kvgate")
    await embedded.start()
    config = f'tenants_owner = "other"\n[engine]\nkv_topology = "divided"\n[store]\nurl = "{embedded.url}"\n'
    other = await asyncio.to_thread(start_gate, engine.url, tenants={"gamma": ""}, config=config)
    told = await until_reuse(gate, "acme", on=False)
    assert "has served everybody off the allowlist" in told["tenants"]["acme"]
    assert "restart it" in told["tenants"]["acme"]
    assert await asyncio.to_thread(other.stop) == 0
    await asyncio.sleep(1)
    assert (await Talk(gate.url, "sk-acme", "after").turn()).headers["x-kvgate-reuse"] == "off"
    await restarted(gate, engine)
    await pinned(gate, "acme")
    assert (await Talk(gate.url, "sk-acme", "after").turn()).headers["x-kvgate-reuse"] == "on"
    await embedded.stop()


@pytest.mark.timeout(600)
async def test_the_schedule_tries_a_successor_in_one_of_two_workers(
    start_engine: StartEngine, start_gate: StartGate
) -> None:
    """Nobody runs anything by hand: a pinned engine's successor is asked, passes, is pinned, and reuses."""
    engine = await asyncio.to_thread(start_engine, "-c", "1024", "-np", "2", "--no-kv-unified", *REUSE_OFF)
    config = f"{CONFIG}[canary]\nevery_h = 24\n"
    gate = await asyncio.to_thread(start_gate, engine.url, tenants=TENANTS, config=config, flags=["--workers", "2"])
    await record(gate, pin=True)
    await restarted(gate, engine)
    told = await until_reuse(gate, "acme", on=True, within_s=500)
    assert told["pin"]["by"] == "kvgate canary schedule"
    async with store_of(gate) as store:
        reports = (await store.view()).reports
    assert [report.instance == told["pin"]["instance"] for report in reports] == [True, False]
    assert len(gate.log_lines("the reuse suite has run")) == 1
    talk = Talk(gate.url, "sk-acme", "schedule")
    assert [(await talk.turn()).headers["x-kvgate-reuse"] for _ in range(2)] == ["on", "on"]
    assert talk.cached_tokens > 50
