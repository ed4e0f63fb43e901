"""Gates that share a ledger on every real server: one truth, nothing lost with a gate, outages that have a rule."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.ask import Size, Usage
from kvgate.core.drain import SlotsSeen
from kvgate.core.fairness import FairRule
from kvgate.core.ledger import Denied, Freed, Lease, LedgerView, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota
from kvgate.ports import LineFailed
from kvgate.store import shared_ledger
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.shared_ledger import SharedLedger, SharedSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

POOL = KvPool(tokens=500, slots=5, tokens_per_slot=100)
PATIENT = Quota(queue_timeout_s=60, queue_max=200)


class RunningGate:
    """A gate's ledger and what runs beside it; `kill` ends it as a lost process ends."""

    def __init__(self, url: str, settings: SharedSettings) -> None:
        self.client: Any = connect(url)
        self.shift_s = 0.0
        self.ledger = SharedLedger(self.client, "engine", lambda: time.monotonic() + self.shift_s, settings)
        self.running = asyncio.create_task(self.ledger.run())

    async def kill(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.client.aclose()

    async def reserve(self, lease_id: str, quota: Quota = PATIENT, *, pool: KvPool = POOL) -> Lease | Denied:
        return await self.ledger.reserve(Reservation(lease_id, "acme", quota, Size(50, 50)), pool)

    async def serve(self, lease_id: str) -> None:
        """A request that the engine has begun to answer."""
        assert isinstance(await self.reserve(lease_id), Lease)
        self.ledger.hand_over(lease_id)
        self.ledger.answered(lease_id)

    async def view(self) -> LedgerView:
        while True:
            await self.ledger.refresh()
            if (view := self.ledger.view()) is not None:
                return view
            await asyncio.sleep(0.02)  # it has not joined yet


@pytest.fixture
async def start(store: EmbeddedValkey) -> AsyncIterator[Callable[..., RunningGate]]:
    """Starts gates, by default patient ones that go on alone."""
    gates: list[RunningGate] = []

    def one(**settings: Any) -> RunningGate:
        gates.append(RunningGate(store.url, SharedSettings(**settings)))
        return gates[-1]

    yield one
    for gate in gates:
        await gate.kill()


async def until(holds: Callable[[], Any], within_s: float = 20.0) -> None:
    """Wait for what must come to be; `holds` may be asynchronous."""
    deadline = time.monotonic() + within_s
    while True:
        found = holds()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        await asyncio.sleep(0.02)


async def empty(gate: RunningGate) -> bool:
    view = await gate.view()
    return (view.held_tokens, view.running, view.draining, view.waiting) == (0, 0, 0, 0)


def send(store: EmbeddedValkey, number: signal.Signals) -> None:
    assert store.pid is not None
    os.kill(store.pid, number)


# Many gates, one truth


async def test_of_a_hundred_at_once_over_four_gates_exactly_five_run(start: Callable[..., RunningGate]) -> None:
    """The limit is the engine's, however many gates there are; all slots are used, and everybody's turn comes."""
    gates = [start() for _ in range(4)]
    running = most = 0
    all_five = asyncio.Event()

    async def one(at: int) -> None:
        nonlocal running, most
        gate, lease_id = gates[at % 4].ledger, f"r{at}"
        found = await gate.reserve(Reservation(lease_id, f"t{at % 7}", PATIENT, Size(50, 50)), POOL)
        assert isinstance(found, Lease)
        running += 1
        most = max(most, running)
        gate.hand_over(lease_id)
        if running == 5:
            all_five.set()
        await all_five.wait()
        running -= 1
        await gate.settle(lease_id, ended=True)

    await asyncio.gather(*(one(at) for at in range(100)))
    assert most == 5
    await until(lambda: empty(gates[0]))


async def test_output_is_charged_while_it_streams_and_billed_once(
    start: Callable[..., RunningGate],
) -> None:
    """No call of its own for a token: the gate tells of all that has come; who frees it is told what was held."""
    one, other = start(), start()
    billed: list[Freed] = []
    for gate in (one, other):
        gate.ledger.link._on_freed = billed.append
    assert isinstance(await one.reserve("a"), Lease)
    assert isinstance(await one.reserve("b"), Lease)
    one.ledger.hand_over("a", lambda: 30)

    async def service() -> int:
        await one.view()
        fair = one.ledger.fair()
        return fair.tenants[0].service_milli if fair is not None and fair.tenants else 0

    assert await service() >= 100_000
    await until(lambda: _is(service(), 160_000))
    await one.ledger.settle("a", ended=True, used=Usage(50, 40))
    assert await service() == 180_000
    assert [(freed.tenant, freed.cells) for freed in billed] == [("acme", 100)]
    await one.ledger.settle("b", ended=True)
    assert sum(freed.cells for freed in billed) == 200


async def test_a_prompt_that_was_read_lets_the_next_one_in_at_once(start: Callable[..., RunningGate]) -> None:
    """Whichever gate waits; nothing has to be renewed for it."""
    one, other = (start(rule=FairRule(prefill_tokens_max=60), lease_ttl_s=300) for _ in range(2))
    assert isinstance(await one.reserve("a"), Lease)
    waiting = asyncio.create_task(other.reserve("b"))
    await until(lambda: _waits(one, 1))
    one.ledger.hand_over("a")
    one.ledger.answered("a")
    async with asyncio.timeout(20):
        assert isinstance(await waiting, Lease)


async def test_what_is_guaranteed_is_held_back_by_all_gates(start: Callable[..., RunningGate]) -> None:
    """Told by one gate, kept by the other; and given up again."""
    one, other = start(rule=FairRule(lent_output_tokens_max=0)), start(rule=FairRule(lent_output_tokens_max=0))
    await one.ledger.guarantee({"owner": 600_000})
    for at in range(2):
        await one.serve(f"a{at}")
    waiting = asyncio.create_task(other.reserve("b"))
    await until(lambda: _waits(one, 1))
    await one.ledger.guarantee({})
    async with asyncio.timeout(20):
        assert isinstance(await waiting, Lease)


async def _is(found: Any, expected: int) -> bool:
    return bool(await found == expected)


async def test_a_grant_is_pushed_to_the_gate_that_waits(
    start: Callable[..., RunningGate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to ask for it: here nobody would within the minute."""
    monkeypatch.setattr(shared_ledger, "POLL_S", 100.0)
    one, other = start(), start()
    for at in range(5):
        await one.serve(f"a{at}")
    waiting = asyncio.create_task(other.reserve("b"))
    await until(lambda: _waits(one, 1))
    await one.ledger.settle("a0", ended=True)
    async with asyncio.timeout(20):
        assert isinstance(await waiting, Lease)


async def _waits(gate: RunningGate, number: int) -> bool:
    return (await gate.view()).waiting == number


async def test_a_lost_push_is_asked_for(start: Callable[..., RunningGate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ledger, "POLL_S", 0.2)
    one, other = start(), start()
    monkeypatch.setattr(other.ledger._member, "pushed", lambda *_: None)
    monkeypatch.setattr(other.ledger._grants, "_told", lambda *_: None)
    for at in range(5):
        await one.serve(f"a{at}")
    waiting = asyncio.create_task(other.reserve("b"))
    await until(lambda: _waits(one, 1))
    await one.ledger.settle("a0", ended=True)
    async with asyncio.timeout(20):
        assert isinstance(await waiting, Lease)


async def test_whoever_waits_too_long_is_told_and_leaves_nothing(start: Callable[..., RunningGate]) -> None:
    one, other = start(), start()
    for at in range(5):
        await one.serve(f"a{at}")
    found = await other.reserve("b", Quota(queue_timeout_s=0.1))
    assert isinstance(found, Denied)
    assert found.reason is Reason.QUEUE_TIMEOUT
    await other.ledger.settle("b", ended=False)
    assert (await one.view()).waiting == 0
    full = await other.reserve("c", Quota(queue_max=0))
    assert isinstance(full, Denied)
    assert full.reason is Reason.QUEUE_FULL


async def test_a_storm_of_cancels_leaves_nothing(start: Callable[..., RunningGate]) -> None:
    """Also where the cancellation comes while the store is being asked."""
    gates = [start(), start()]

    async def one(at: int) -> None:
        lease_id, gate = f"r{at}", gates[at % 2]
        try:
            if isinstance(await gate.reserve(lease_id), Lease):
                await asyncio.sleep(0.001 * (at % 5))
        finally:
            await asyncio.shield(gate.ledger.settle(lease_id, ended=True))

    tasks = [asyncio.create_task(one(at)) for at in range(120)]
    for at in range(120):
        await asyncio.sleep(0.002 if at % 7 == 0 else 0)
        if at % 2:
            tasks[(at * 37) % 120].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: empty(gates[0]))
    assert not gates[0].ledger._member.in_hand
    assert not gates[0].ledger._member.settled


async def test_another_gates_hang_up_is_proven_over_by_whoever_looks(start: Callable[..., RunningGate]) -> None:
    one, other = start(), start()
    await one.serve("a")
    await other.serve("b")
    await one.ledger.settle("a", ended=False)
    await asyncio.wait_for(other.ledger.draining.wait(), 20)
    assert (await other.view()).draining == 1

    async def looked() -> bool:
        await other.ledger.observe(SlotsSeen((), time.monotonic()))
        return not other.ledger.draining.is_set()

    await until(looked)
    view = await one.view()
    assert (view.running, view.draining) == (1, 0)


async def test_a_killed_gates_kv_comes_back_after_lease_and_drain(start: Callable[..., RunningGate]) -> None:
    """Its waiting requests go, what it held drains, and only a look at the engine's slots frees it."""
    lost, other = start(lease_ttl_s=1.0), start(lease_ttl_s=1.0)
    for at in range(5):
        await lost.serve(f"a{at}")
    ghost = asyncio.create_task(lost.reserve("ghost"))
    waiting = asyncio.create_task(other.reserve("b"))
    await until(lambda: _waits(other, 2))
    lost.running.cancel()  # it renews nothing any more
    await asyncio.wait_for(other.ledger.draining.wait(), 20)

    async def drains() -> bool:
        view = await other.view()
        return (view.running, view.draining, view.waiting) == (0, 5, 1)

    await until(drains)
    assert (await other.view()).leases_expired == 5
    assert not waiting.done()

    async def looked() -> bool:
        await other.ledger.observe(SlotsSeen((), time.monotonic()))
        return waiting.done()

    await until(looked)
    assert isinstance(await waiting, Lease)
    ghost.cancel()
    await asyncio.wait([ghost])


async def test_a_gate_that_stood_still_does_not_use_what_it_lost(start: Callable[..., RunningGate]) -> None:
    """Its lease may be another's by now."""
    gate = start()
    assert isinstance(await gate.reserve("a"), Lease)
    gate.shift_s = 15.0
    with pytest.raises(LineFailed, match="stood still"):
        gate.ledger.hand_over("a")


async def test_a_lease_that_drains_already_is_not_used_after_all(start: Callable[..., RunningGate]) -> None:
    """Also where the gate has renewed since: draining never un-drains."""
    late, other = start(lease_ttl_s=1.0), start(lease_ttl_s=1.0)
    assert isinstance(await late.reserve("a"), Lease)
    late.running.cancel()
    await other.ledger.resize(POOL)

    async def drains() -> bool:
        return (await other.view()).draining == 1

    await until(drains)
    await late.ledger._member.renew()
    with pytest.raises(LineFailed):
        late.ledger.hand_over("a")


async def test_gates_of_different_settings_are_told_apart(start: Callable[..., RunningGate]) -> None:
    """The first one's figures are in force, and the other one says so until they agree."""
    one, other = start(lease_ttl_s=1.0), start(lease_ttl_s=1.0)
    await one.serve("a")
    stricter = KvPool(tokens=500, slots=5, tokens_per_slot=100, margin_tokens=4)
    await other.ledger.resize(stricter)
    assert other.ledger.other_pool == POOL
    assert one.ledger.other_pool is None
    assert (await other.view()).pool == POOL
    await other.ledger.resize(POOL)
    await until(lambda: other.ledger.other_pool is None)


# Outages


@contextlib.asynccontextmanager
async def _stopped(store: EmbeddedValkey) -> AsyncIterator[None]:
    send(store, signal.SIGSTOP)
    try:
        yield
    finally:
        send(store, signal.SIGCONT)


async def test_a_store_that_hangs_delays_nobody_for_long_and_hears_of_all_when_it_is_back(
    start: Callable[..., RunningGate], store: EmbeddedValkey
) -> None:
    """A settle returns, a request is refused or goes by what the gate held, and afterwards the ledger is right."""
    local, strict = start(), start(local=False)
    for at in range(3):
        await local.serve(f"a{at}")
    await strict.serve("b")
    async with _stopped(store):
        begun = time.monotonic()
        await asyncio.gather(local.ledger.refresh(), strict.ledger.refresh())  # somebody finds it out
        await until(lambda: local.ledger.outage_pool is not None)
        await local.ledger.settle("a0", ended=True)
        again = await local.reserve("again", Quota(queue_timeout_s=5))
        refused = await strict.reserve("c", Quota(queue_timeout_s=5))
        assert time.monotonic() - begun < 15
        assert isinstance(again, Lease)
        local.ledger.hand_over("again")
        assert isinstance(refused, Denied)
        assert (refused.reason, strict.ledger.outage_pool) == (Reason.STORE_OUT, None)
        await strict.ledger.settle("c", ended=False)
        pool = local.ledger.outage_pool
        assert pool is not None
        assert (pool.slots, pool.tokens) == (3, 300)
    await until(lambda: not local.ledger.is_out and not strict.ledger.is_out)

    async def right() -> bool:
        view = await local.view()
        return (view.running, view.draining, view.held_tokens) == (4, 0, 400)

    await until(right)
    for gate, lease_id in ((local, "a1"), (local, "a2"), (local, "again"), (strict, "b")):
        await gate.ledger.settle(lease_id, ended=True)
    await until(lambda: empty(strict))


async def test_without_the_store_no_more_than_before_is_let_in(
    start: Callable[..., RunningGate], store: EmbeddedValkey
) -> None:
    """One slot was held, so one runs at a time; what must wait for it waits."""
    gate = start()
    await gate.serve("a")
    async with _stopped(store):
        late = await gate.reserve("b", Quota(queue_timeout_s=4))
        assert isinstance(late, Denied)
        assert late.reason in {Reason.QUEUE_TIMEOUT, Reason.STORE_OUT}
        await gate.ledger.settle("b", ended=False)
        waiting = asyncio.create_task(gate.reserve("c", Quota(queue_timeout_s=8)))
        await asyncio.sleep(0.1)
        await gate.ledger.settle("a", ended=True)
        assert isinstance(await waiting, Lease)
        big = await gate.ledger.reserve(Reservation("d", "acme", Quota(queue_timeout_s=4), Size(50, 50, 2)), POOL)
        assert isinstance(big, Denied)
        assert big.reason is Reason.STORE_OUT


async def test_what_was_held_is_a_gates_own_only_while_its_leases_last(
    start: Callable[..., RunningGate], store: EmbeddedValkey
) -> None:
    """Afterwards other gates may have it; the reserve stays."""
    bare, reserved = start(lease_ttl_s=2.0), start(lease_ttl_s=2.0, reserve_slots=1)
    await bare.serve("a")
    await reserved.serve("b")
    async with _stopped(store):
        await asyncio.gather(bare.ledger.settle("a", ended=True), reserved.ledger.settle("b", ended=True))
        await until(lambda: bare.ledger.is_out and bare.ledger.outage_pool is None)
        denied = await bare.reserve("c", Quota(queue_timeout_s=3))
        assert isinstance(denied, Denied)
        assert denied.reason is Reason.STORE_OUT
        await until(lambda: reserved.ledger.outage_pool == KvPool(100, 1, 100))
        assert isinstance(await reserved.reserve("d", Quota(queue_timeout_s=5)), Lease)


@pytest.mark.parametrize("how", ["killed", "flushed", "scripts flushed", "read-only"])
async def test_whatever_happens_to_the_store_what_runs_is_counted(
    start: Callable[..., RunningGate], store: EmbeddedValkey, how: str
) -> None:
    """A store that was killed, emptied or made a replica: nothing that runs is ever granted twice."""
    one, other = start(lease_ttl_s=2.0), start(lease_ttl_s=2.0)
    for at in range(3):
        await one.serve(f"a{at}")
    await other.serve("b0")
    admin: Any = connect(store.url)
    match how:
        case "killed":
            send(store, signal.SIGKILL)
            await until(lambda: store.pid is None)
            await store.start()
        case "flushed":
            await admin.flushall()
        case "scripts flushed":
            await admin.script_flush()
        case "read-only":
            await admin.replicaof("127.0.0.1", 1)
    asked = [
        asyncio.create_task(gate.reserve(f"{name}-{at}"))
        for gate, name in ((one, "x"), (other, "y"))
        for at in (1, 2)
    ]
    if how == "read-only":
        await until(lambda: one.ledger.is_out)
        await admin.replicaof("NO", "ONE")
    await admin.aclose()

    async def right() -> bool:
        view = await other.view()
        assert view.running <= 5
        return (view.running, view.waiting) == (5, 3) and not one.ledger.is_out and not other.ledger.is_out

    await until(right)
    await until(lambda: sum(task.done() for task in asked) == 1)
    for gate, lease_id in ((one, "a0"), (one, "a1"), (one, "a2")):
        await gate.ledger.settle(lease_id, ended=True)
    for found in await asyncio.gather(*asked):
        assert isinstance(found, Lease)


@pytest.mark.parametrize("seen_idle", [True, False])
async def test_a_hang_up_in_an_outage_drains_here_and_then_there(
    start: Callable[..., RunningGate], store: EmbeddedValkey, *, seen_idle: bool
) -> None:
    """What the slots proved meanwhile is over at the store too; what they did not prove is not."""
    gate = start()
    await gate.serve("a")
    async with _stopped(store):
        await gate.ledger.refresh()
        await until(lambda: gate.ledger.outage_pool is not None)
        await gate.ledger.settle("a", ended=False)
        assert gate.ledger.draining.is_set()
        if seen_idle:
            await gate.ledger.observe(SlotsSeen((), time.monotonic()))
            assert not gate.ledger.draining.is_set()
    await until(lambda: not gate.ledger.is_out)

    async def told() -> bool:
        view = await gate.view()
        return not gate.ledger._member.settled and view.draining == (0 if seen_idle else 1)

    await until(told)


async def test_a_hang_up_that_finds_the_store_out_is_not_over(
    start: Callable[..., RunningGate], store: EmbeddedValkey
) -> None:
    """Nobody looked on its behalf meanwhile."""
    gate = start()
    await gate.serve("a")
    async with _stopped(store):
        await gate.ledger.settle("a", ended=False)
        await until(lambda: gate.ledger.is_out)
    await until(lambda: not gate.ledger.is_out and not gate.ledger._member.settled)
    assert (await gate.view()).draining == 1


async def test_what_an_earlier_gate_left_draining_is_looked_at_by_the_next(start: Callable[..., RunningGate]) -> None:
    """A gate that was stopped in the middle of its work leaves drains, and nobody else may be there."""
    one = start()
    await one.serve("a")
    await one.ledger.settle("a", ended=False)
    await one.ledger.leave()
    await one.kill()
    other = start()
    await other.ledger.resize(POOL)
    assert other.ledger.draining.is_set()


async def test_a_store_that_is_out_before_the_ledger_was_joined(
    start: Callable[..., RunningGate], store: EmbeddedValkey
) -> None:
    """The first request finds it out; nothing spins, and the next one is served when the store is back."""
    gate = start()
    async with _stopped(store):
        found = await gate.reserve("a", Quota(queue_timeout_s=1))
        assert isinstance(found, Denied)
        assert found.reason is Reason.STORE_OUT
        await gate.ledger.settle("a", ended=False)
    await until(lambda: not gate.ledger.is_out)
    assert isinstance(await gate.reserve("b"), Lease)


async def test_a_gate_whose_engine_is_still_loading_waits_for_it(
    start: Callable[..., RunningGate], caplog: pytest.LogCaptureFixture
) -> None:
    """Without an engine there is no ledger to renew anything in, which is no outage."""
    gate = start(lease_ttl_s=0.05)
    await asyncio.sleep(0.3)
    assert not gate.ledger.is_out
    assert caplog.records == []
