"""The ledger among many gates: what the world does to them, one example a promise."""

from __future__ import annotations

import pytest

from kvgate.core.ask import Size
from kvgate.core.drain import SETTLE_S, BusySlot, DrainWatch, LeaseFacts, SlotsSeen
from kvgate.core.leased import CLAIM_S, InHand, LeasedLedger, Place, Push, Told
from kvgate.core.ledger import Lease, Reservation, Ticket
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Quota

POOL = KvPool(tokens=200, slots=2, tokens_per_slot=100)
TTL_S = 15.0


def made(*, knew: bool = False) -> LeasedLedger:
    return LeasedLedger.joined(POOL, 120.0, TTL_S, "run 1", 0.0, knew=knew)


def want(lease_id: str, quota: Quota | None = None) -> Reservation:
    return Reservation(lease_id, "t", quota or Quota(), Size(50, 50))


def full() -> LeasedLedger:
    """Gate g holds a and b, handed over; gate h waits with c."""
    ledger = made()
    for lease_id in ("a", "b"):
        assert isinstance(ledger.reserve("g", want(lease_id), 0.0), Lease)
    assert isinstance(ledger.reserve("h", want("c"), 0.0), Ticket)
    return ledger


def test_a_grant_goes_to_the_gate_that_waits_and_is_claimed() -> None:
    ledger = full()
    assert ledger.claim("c", 0.5) is Place.WAITING
    ledger.settle(Told("a", 0.0), 1.0, ended=True)
    assert ledger.pushed == [Push("h", "c", granted=True)]
    assert ledger.claim("c", 1.5) == Lease("c", 100, 1, queued_s=1.0)


def test_an_unclaimed_grant_goes_to_the_next_and_is_not_charged() -> None:
    ledger = full()
    ledger.settle(Told("a", 0.0), 1.0, ended=True)
    ledger.reserve("h", want("d", Quota(requests_per_minute=5)), 1.0)
    assert ledger.claim("d", 1.0 + CLAIM_S) == Lease("d", 100, 1, queued_s=CLAIM_S)
    assert ledger.claim("c", 1.0 + CLAIM_S) is Place.GONE
    assert ledger.ledger.minute_of("t", 2.0) == (1, 0)


def test_a_lost_gates_leases_drain_and_its_tickets_go() -> None:
    """Whether they were handed over nobody knows, so they were; nothing of them is free without proof."""
    ledger = full()
    ledger.renew("h", [], 10.0, 10.0)
    ledger.renew("h", [], TTL_S, TTL_S)
    view = ledger.ledger.view()
    assert (view.running, view.draining, view.waiting, view.leases_expired) == (0, 2, 1, 2)
    assert [facts.handed_over_at_s for facts in ledger.facts()] == [TTL_S, TTL_S]
    ledger.leave("h", 16.0)
    assert ledger.ledger.view().waiting == 0


def test_a_gate_that_comes_back_late_un_drains_nothing_but_may_end_it() -> None:
    """What looks have begun to prove must not change under them; that the engine's answer ended is proof itself."""
    ledger = full()
    ledger.renew("g", [Told("a"), Told("b")], TTL_S + 1, TTL_S + 1)
    assert ledger.ledger.view().running == 2
    ledger.renew("g", [Told("a")], 31.0, 31.0)
    assert ledger.renew("g", [Told("a"), Told("b")], 40.0, 40.0).lost == ("b",)
    assert ledger.ledger.view().draining == 1
    ledger.settle(Told("b", 1.0), 41.0, ended=False)
    assert ledger.ledger.view().draining == 1
    ledger.settle(Told("b", 1.0), 42.0, ended=True)
    assert (ledger.ledger.view().draining, ledger.ledger.view().running) == (0, 1)


def test_a_ledger_that_was_lost_lets_nobody_in_until_the_gates_have_told_what_they_hold() -> None:
    ledger = made(knew=True)
    ledger.register("g", [InHand(want("a"), 100, Told("a", 0.0))], 1.0)
    assert isinstance(ledger.reserve("h", want("x"), 2.0), Ticket)
    ledger.register("h", [InHand(want("b"), 100, Told("b", 0.0))], 3.0)
    ledger.renew("g", [Told("a")], TTL_S, TTL_S)
    assert ledger.claim("x", TTL_S) is Place.WAITING
    assert ledger.ledger.view().held_tokens == 200


def test_after_a_restart_only_the_known_gates_are_waited_for() -> None:
    """A server that was killed has forgotten its last second, not its gates."""
    ledger = made()
    ledger.reserve("g", want("a"), 0.0)
    ledger.renew("h", [], 0.0, 0.0)
    ledger.join("g", POOL, "run 2", 5.0)
    assert ledger.renew("g", [Told("a"), Told("lost")], 5.0, 5.0).unknown == ("lost",)
    ledger.renew("h", [], 5.5, 5.5)
    assert isinstance(ledger.reserve("h", want("x"), 5.5), Ticket)
    ledger.register("g", [InHand(want("lost"), 100, Told("lost"))], 6.0)
    assert ledger.claim("x", 6.0) is Place.WAITING
    ledger.settle(Told("a", 0.0), 6.5, ended=True)
    assert isinstance(ledger.claim("x", 6.5), Lease)


def test_the_pool_of_a_gate_that_is_alone_is_the_one_to_guard() -> None:
    other = KvPool(tokens=300, slots=3, tokens_per_slot=100)
    ledger = made()
    ledger.renew("g", [], 0.0, 0.0)
    assert ledger.join("h", other, "run 1", 1.0) == POOL
    ledger.leave("g", 2.0)
    assert ledger.join("h", other, "run 1", 3.0) == other


@pytest.mark.parametrize(("unsettled_at_s", "over"), [(2.0 + SETTLE_S / 2, False), (2.0 + SETTLE_S, True)])
def test_another_gates_lease_explains_a_task_only_if_it_was_heard_of_since(
    unsettled_at_s: float, *, over: bool
) -> None:
    """A gate that is cut off cannot settle: its lease may have ended long ago."""
    dead = LeaseFacts("a", 50, 0, 50, 0.0, 0.5, 1.0)
    watch, busy = DrainWatch(), (BusySlot(0, 7, 50),)
    neighbour = LeaseFacts("b", 50, 0, 50, 0.0, 0.5, None, unsettled_at_s)
    assert watch.observe([dead, neighbour], SlotsSeen(busy, 2.0)) == ()
    assert watch.observe([dead, neighbour], SlotsSeen(busy, 2.5)) == (("a",) if over else ())
