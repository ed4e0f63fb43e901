"""A shared KV pool on a real engine: what dies together without the gate, and runs with it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.e2e.ask import Answer, chat, post, prompt_of

if TYPE_CHECKING:
    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

POOL = 768


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineProcess:
    """Four slots over one pool of 768 tokens, each advertising all of it."""
    flags = ("-c", str(POOL), "-np", "4", "--kv-unified", "--no-cache-prompt", "--cache-ram", "0")
    return start_engine(*flags, "--no-cache-idle-slots", "-lv", "4")


@pytest.fixture(scope="module")
def gate(engine: EngineProcess, start_gate: StartGate) -> RunningGate:
    tenants = dict.fromkeys(("demo", "one", "two", "three"), "queue_timeout_s = 120\n")
    tenants["hasty"] = "queue_timeout_s = 0.5\n"
    tenants["shy"] = "queue_max = 0\n"
    tenants["narrow"] = "concurrency_max = 1\nqueue_timeout_s = 120\n"
    return start_gate(engine.url, tenants=tenants, flags=["--engine-log", str(engine.log_path)])


async def _together(url: str, bodies: list[dict[str, Any]], keys: list[str | None]) -> list[Answer]:
    return await asyncio.gather(*(post(url, body, key=key) for body, key in zip(bodies, keys, strict=True)))


def _finished(answer: Answer) -> int:
    """Tokens of a whole answer; 0 for an error."""
    found: int = answer.json["usage"]["completion_tokens"] if answer.status == 200 else 0
    return found


async def test_three_clients_that_die_together_all_finish_through_the_gate(
    engine: EngineProcess, gate: RunningGate
) -> None:
    """3 x (280 + 150) tokens in a pool of 768: the bare engine kills them all, the gate lets them take turns."""
    bodies = [await prompt_of(engine.url, 280, variant=at, max_tokens=150, ignore_eos=True) for at in range(3)]
    direct = await _together(engine.url, bodies, [None] * 3)
    assert [answer.status for answer in direct] == [500, 500, 500]
    assert all(b"Context size has been exceeded" in answer.raw for answer in direct)
    through = await _together(gate.url, bodies, ["sk-one", "sk-two", "sk-three"])
    assert [_finished(answer) for answer in through] == [150, 150, 150]
    assert gate.metric("kvgate_requests_total", reason="engine_overflow") == 0


async def test_two_requests_that_fill_the_pool_to_the_token_run_side_by_side(
    engine: EngineProcess, gate: RunningGate
) -> None:
    """384 + 384 of 768 tokens: both are admitted at once, neither waits, and the engine takes them."""
    bodies = [await prompt_of(engine.url, 264, variant=at, max_tokens=120, ignore_eos=True) for at in range(2)]
    pending = asyncio.gather(*(post(gate.url, body, key="sk-demo") for body in bodies))
    held = []
    while not pending.done():
        ledger = await asyncio.to_thread(lambda: gate.status()["ledger"])
        held.append((ledger["running"], ledger["held_tokens"], ledger["waiting"]))
        await asyncio.sleep(0.05)
    assert [_finished(answer) for answer in await pending] == [120, 120]
    assert (2, 768, 0) in held
    assert max(tokens for _, tokens, _ in held) == POOL


async def test_one_token_more_waits_its_turn(engine: EngineProcess, gate: RunningGate) -> None:
    """385 + 384 of 768 tokens: the second waits for the first, and both finish."""
    bodies = [await prompt_of(engine.url, 264 + at, variant=at, max_tokens=120, ignore_eos=True) for at in (1, 0)]
    answers = await _together(gate.url, bodies, ["sk-demo", "sk-demo"])
    assert [_finished(answer) for answer in answers] == [120, 120]
    assert max(int(answer.headers["x-kvgate-queue-ms"]) for answer in answers) > 100


async def test_what_can_never_fit_the_pool_is_refused_at_once(engine: EngineProcess, gate: RunningGate) -> None:
    """Two answers of 300 to a prompt of 200 hold 800 cells of 768: no waiting helps, and the sentence says so."""
    answer = await post(gate.url, await prompt_of(engine.url, 200, n=2, max_tokens=300))
    assert (answer.status, answer.error["limited_by"]) == (400, "pool")
    assert answer.error["usable_generation"] == 284
    fits = await post(gate.url, await prompt_of(engine.url, 200, n=2, max_tokens=284))
    assert fits.status == 200


async def test_waiting_has_an_end(engine: EngineProcess, gate: RunningGate) -> None:
    """A full pool answers 429 with retry-after once the tenant's patience or its queue is spent; nothing is left."""
    long = await prompt_of(engine.url, 100, max_tokens=650, ignore_eos=True)
    holder = asyncio.create_task(post(gate.url, long, key="sk-one"))
    await asyncio.to_thread(gate.wait_until_running)
    late = await post(gate.url, chat(max_tokens=100), key="sk-hasty")
    full = await post(gate.url, chat(max_tokens=100), key="sk-shy")
    for answer, code in ((late, "queue_timeout"), (full, "queue_full")):
        assert (answer.status, answer.error["code"]) == (429, code)
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert _finished(await holder) == 650
    assert gate.wait_until_empty(5)["ledger"]["waiting"] == 0


async def test_a_tenants_concurrency_is_its_own(engine: EngineProcess, gate: RunningGate) -> None:
    """One tenant at its concurrency_max waits, and is passed by others meanwhile."""
    body = chat(max_tokens=60, ignore_eos=True)
    narrow = [asyncio.create_task(post(gate.url, body, key="sk-narrow")) for _ in range(3)]
    await asyncio.sleep(0.1)
    other = await post(gate.url, chat(max_tokens=2), key="sk-two")
    assert not all(task.done() for task in narrow)
    assert int(other.headers["x-kvgate-queue-ms"]) < 100
    assert [_finished(await task) for task in narrow] == [60, 60, 60]


@pytest.mark.timeout(400)
async def test_sixty_streams_with_a_fifth_hanging_up_leave_nothing(engine: EngineProcess, gate: RunningGate) -> None:
    """A hang-up ends the engine's work and gives its KV back, but not before the engine shows it idle."""
    before = gate.wait_until_empty(5)
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "stream": True}
    bodies = [chat(f"Story {at}.", **asked, stream_options={"include_usage": True}) for at in range(60)]

    async def one(session: aiohttp.ClientSession, at: int) -> int:
        headers = {"Authorization": f"Bearer sk-{('one', 'two', 'three')[at % 3]}"}
        async with session.post(f"{gate.url}/v1/chat/completions", json=bodies[at], headers=headers) as answer:
            assert answer.status == 200
            events = tokens = 0
            async for line in answer.content:
                events += line.startswith(b"data: {")
                if at % 5 == 0 and events == 2:  # the role, then the first token
                    return -1
                if b'"completion_tokens"' in line:  # tokens, not events: one can hold several halves of a character
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            return tokens

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=170)) as session:
        events = await asyncio.gather(*(one(session, at) for at in range(60)))
    assert events.count(-1) == 12
    assert {count for count in events if count >= 0} == {24}
    begun = time.monotonic()
    while await _busy_slots(engine.url):
        assert time.monotonic() - begun < 2, "a slot still works for nobody after 2 s"
        await asyncio.sleep(0.05)
    after = gate.wait_until_empty(3)
    assert after["ledger"]["drains_overdue"] == 0
    assert after["tasks"] <= before["tasks"] + 1
    assert gate.metric("kvgate_hangups_total") == 12
    await asyncio.sleep(2.5)  # idle connections to the engine are closed after two seconds
    assert gate.status()["upstream_connections"] <= 1


async def test_a_hang_up_before_the_first_token_drains_too(engine: EngineProcess, gate: RunningGate) -> None:
    """Also unstreamed, and also while the engine still reads the prompt."""
    body = await prompt_of(engine.url, 600, max_tokens=100, ignore_eos=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await post(gate.url, body)
    draining = gate.status()["ledger"]
    assert (draining["running"], draining["draining"], draining["held_tokens"]) == (0, 1, 700)
    gate.wait_until_empty(30)
    assert not await _busy_slots(engine.url)


async def _busy_slots(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/slots") as answer:
        return sum(slot["is_processing"] for slot in await answer.json())
