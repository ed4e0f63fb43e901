"""One gate's ledger: whoever waits is woken when there is room, and whoever leaves was never there."""

from __future__ import annotations

import asyncio

import pytest

from kvgate.core.ask import Size
from kvgate.core.drain import BusySlot, SlotsSeen
from kvgate.core.ledger import Denied, Lease, LedgerView, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota
from kvgate.store.local_ledger import LocalLedger
from tests.unit.doubles import ManualClock

POOL = KvPool(tokens=1024, slots=2, tokens_per_slot=512)
DRAIN_MAX_S = 60


class Bench:
    """A ledger under a manual clock."""

    def __init__(self, pool: KvPool = POOL) -> None:
        self.clock = ManualClock()
        self.ledger = LocalLedger(self.clock, DRAIN_MAX_S)
        self.pool = pool

    def reservation(self, lease_id: str, *, tenant: str = "acme", tokens: int = 100, **quota: float) -> Reservation:
        return Reservation(lease_id, tenant, Quota(**quota), Size(tokens - 10, 10))  # type: ignore[arg-type]  # by name

    async def reserve(
        self, lease_id: str, *, tenant: str = "acme", tokens: int = 100, **quota: float
    ) -> Lease | Denied:
        return await self.ledger.reserve(self.reservation(lease_id, tenant=tenant, tokens=tokens, **quota), self.pool)

    def waiting(self, lease_id: str, *, tenant: str = "acme", tokens: int = 100) -> asyncio.Task[Lease | Denied]:
        return asyncio.create_task(self.reserve(lease_id, tenant=tenant, tokens=tokens))

    @property
    def view(self) -> LedgerView:
        view = self.ledger.view()
        assert view is not None
        return view

    def assert_empty(self) -> None:
        view = self.view
        assert (view.held_tokens, view.running, view.draining, view.waiting) == (0, 0, 0, 0)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_before_the_first_request_nothing_is_known() -> None:
    """And nothing that is told of unknown ids does harm."""
    ledger = LocalLedger(ManualClock(), DRAIN_MAX_S)
    assert ledger.view() is None
    ledger.hand_over("x")
    ledger.answered("x")
    await ledger.settle("x", ended=True)
    ledger.observe(SlotsSeen((), 0))
    ledger.expire()
    assert ledger.view() is None
    assert not ledger.draining.is_set()


async def test_room_is_given_at_once() -> None:
    bench = Bench()
    lease = await bench.reserve("a")
    assert lease == Lease("a", 100, 1, 0.0)
    assert (bench.view.held_tokens, bench.view.running) == (100, 1)
    await bench.ledger.settle("a", ended=True)
    bench.assert_empty()


async def test_whoever_waits_is_woken_in_order() -> None:
    """First come, first served; each with the seconds that it waited."""
    bench = Bench()
    await bench.reserve("a")
    await bench.reserve("b")
    c, d = bench.waiting("c"), bench.waiting("d")
    await turns()
    bench.clock.advance(2)
    await bench.ledger.settle("a", ended=True)
    await turns()
    assert c.done()
    assert not d.done()
    bench.clock.advance(3)
    await bench.ledger.settle("b", ended=True)
    assert [(await task).queued_s for task in (c, d)] == [2, 5]  # type: ignore[union-attr]  # leases
    assert bench.view.waiting == 0


async def test_a_deadline_passes_and_leaves_nothing() -> None:
    bench = Bench()
    await bench.reserve("a", tokens=512)
    await bench.reserve("b", tokens=512)
    found = await bench.reserve("c", queue_timeout_s=0.02)
    assert isinstance(found, Denied)
    assert (found.lease_id, found.reason) == ("c", Reason.QUEUE_TIMEOUT)
    assert found.retry_after_s > 0
    assert (bench.view.waiting, bench.view.running) == (0, 2)


async def test_one_that_leaves_lets_those_behind_it_go() -> None:
    """A large request at the head blocks a small one; its client hangs up, and the small one runs."""
    pool = KvPool(tokens=600, slots=3, tokens_per_slot=512, prompt_shared=True)
    bench = Bench(pool)
    await bench.reserve("a", tokens=400)
    large, small = bench.waiting("large", tokens=500), bench.waiting("small", tokens=100)
    await turns()
    assert not small.done()
    large.cancel()
    await turns()
    assert isinstance(await small, Lease)
    assert (bench.view.waiting, bench.view.held_tokens) == (0, 500)


async def test_a_cancel_in_the_queue_leaves_nothing() -> None:
    bench = Bench()
    await bench.reserve("a")
    await bench.reserve("b")
    waiting = bench.waiting("c")
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert bench.view.waiting == 0
    await bench.ledger.settle("a", ended=True)
    await bench.ledger.settle("b", ended=True)
    bench.assert_empty()


async def test_a_cancel_right_at_the_grant_is_for_the_settle_to_repair() -> None:
    """The lease is held although nobody got it; its id, minted first, gives it back."""
    bench = Bench()
    await bench.reserve("a")
    await bench.reserve("b")
    waiting = bench.waiting("c")
    await turns()
    await bench.ledger.settle("a", ended=True)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert bench.view.running == 2
    await bench.ledger.settle("c", ended=False)
    assert bench.view.running == 1


async def test_a_full_queue_refuses_at_once() -> None:
    bench = Bench()
    await bench.reserve("a")
    await bench.reserve("b")
    found = await bench.reserve("c", queue_max=0)
    assert isinstance(found, Denied)
    assert found.reason is Reason.QUEUE_FULL


async def test_settling_twice_frees_once() -> None:
    bench = Bench()
    await bench.reserve("a")
    await bench.ledger.settle("a", ended=True)
    await bench.ledger.settle("a", ended=True)
    await bench.reserve("b")
    await bench.ledger.settle("a", ended=False)
    assert bench.view.running == 1


async def test_a_drain_is_shown_until_the_engine_shows_it_over() -> None:
    """`draining` is what the watcher of the slots sleeps on; whoever waited is woken by the proof."""
    bench = Bench()
    await bench.reserve("a", tokens=512)
    await bench.reserve("b", tokens=512)
    waiting = bench.waiting("c")
    await turns()
    for lease_id in ("a", "b"):
        bench.ledger.hand_over(lease_id)
        bench.ledger.answered(lease_id)
    bench.clock.advance(5)
    await bench.ledger.settle("a", ended=False)
    assert bench.ledger.draining.is_set()
    assert (bench.view.running, bench.view.draining, bench.view.held_tokens) == (1, 1, 1024)
    bench.clock.advance(1)
    busy = (BusySlot(0, 1, 10), BusySlot(1, 2, 10))
    bench.ledger.observe(SlotsSeen(busy, bench.clock()))
    await turns()
    assert bench.ledger.draining.is_set()
    assert not waiting.done()
    bench.clock.advance(1)
    bench.ledger.observe(SlotsSeen((), bench.clock()))
    await turns()
    assert not bench.ledger.draining.is_set()
    assert isinstance(await waiting, Lease)


async def test_a_drain_that_is_never_proven_ends_by_time() -> None:
    bench = Bench()
    await bench.reserve("a")
    bench.ledger.hand_over("a")
    await bench.ledger.settle("a", ended=False)
    bench.clock.advance(DRAIN_MAX_S - 1)
    bench.ledger.expire()
    assert bench.ledger.draining.is_set()
    bench.clock.advance(1)
    bench.ledger.expire()
    assert not bench.ledger.draining.is_set()
    assert bench.view.drains_overdue == 1
    bench.assert_empty()


async def test_a_smaller_engine_sends_those_away_who_can_never_fit() -> None:
    """They are judged anew, by the figures of the new engine."""
    bench = Bench()
    await bench.reserve("a", tokens=512)
    await bench.reserve("b", tokens=512)
    waiting = bench.waiting("c", tokens=400)
    await turns()
    bench.ledger.resize(KvPool(tokens=512, slots=2, tokens_per_slot=256))
    found = await waiting
    assert isinstance(found, Denied)
    assert found.reason is Reason.ENGINE_CHANGED
    assert bench.view.waiting == 0


async def test_a_larger_engine_lets_those_in_who_waited() -> None:
    bench = Bench()
    await bench.reserve("a")
    await bench.reserve("b")
    waiting = bench.waiting("c")
    await turns()
    bench.ledger.resize(KvPool(tokens=1536, slots=3, tokens_per_slot=512))
    assert isinstance(await waiting, Lease)
    assert bench.view.pool.slots == 3


async def test_the_same_engine_again_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """The watcher looks every second."""
    bench = Bench()
    await bench.reserve("a")
    bench.ledger.resize(KvPool(tokens=1024, slots=2, tokens_per_slot=512))
    assert caplog.records == []


async def test_a_queue_that_closes_sends_everybody_away() -> None:
    """Who waits, and who would have to; who fits at once still runs."""
    bench = Bench()
    first = await bench.reserve("a", tokens=512)
    second = bench.waiting("b", tokens=512)
    third = bench.waiting("c", tokens=512)
    await turns()
    assert isinstance(first, Lease)
    assert isinstance(await second, Lease)
    bench.ledger.close_queue(Reason.GATE_DRAINING)
    for denied in (await third, await bench.reserve("d")):
        assert isinstance(denied, Denied)
        assert denied.reason is Reason.GATE_DRAINING
    await bench.ledger.settle("a", ended=True)
    assert isinstance(await bench.reserve("e"), Lease)
    for lease_id in ("b", "e"):
        await bench.ledger.settle(lease_id, ended=True)
    bench.assert_empty()


async def test_a_storm_of_cancels_leaves_nothing() -> None:
    """Two hundred requests for two slots, half of which leave at some moment: all cells come back."""
    bench = Bench()

    async def one(at: int) -> None:
        lease_id = str(at)
        try:
            found = await bench.reserve(lease_id, tenant=f"t{at % 3}", tokens=100 + at)
            if isinstance(found, Lease):
                for _ in range(at % 5):
                    await asyncio.sleep(0)
        finally:
            await bench.ledger.settle(lease_id, ended=True)

    tasks = [asyncio.create_task(one(at)) for at in range(200)]
    for at in range(200):
        await asyncio.sleep(0)
        if at % 2:
            tasks[(at * 37) % 200].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    bench.assert_empty()
    assert bench.ledger._waiters == {}
