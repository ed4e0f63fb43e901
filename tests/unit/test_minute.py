"""The minute: in no 60 seconds more than the Quota says, and a wait that is neither too short nor for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.ask import Size, Usage
from kvgate.core.ledger import Denied, Lease, Ledger, Reservation, Ticket
from kvgate.core.minute import Minute, step_of
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota

POOL = KvPool(tokens=400, slots=4, tokens_per_slot=100)


def want(lease_id: str, quota: Quota, tokens: int = 100) -> Reservation:
    return Reservation(lease_id, "t", quota, Size(tokens - 10, 10))


def denied(ledger: Ledger, reservation: Reservation, now_s: float) -> Denied:
    found = ledger.reserve(reservation, now_s)
    assert isinstance(found, Denied)
    return found


def serve(ledger: Ledger, reservation: Reservation, now_s: float, used: Usage | None = None) -> None:
    assert isinstance(ledger.reserve(reservation, now_s), Lease)
    ledger.hand_over(reservation.lease_id, now_s)
    ledger.settle(reservation.lease_id, now_s, ended=True, used=used)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40))), st.integers(1, 100))
def test_no_sixty_seconds_hold_more_than_the_quota(asks: list[tuple[float, int]], most: int) -> None:
    """Whenever they come; and whoever waits as long as it was told is let in, if nobody else came."""
    minute, now_s, taken = Minute(), 0.0, list[tuple[float, int]]()
    for pause_s, amount in asks:
        now_s += pause_s
        if wait_s := minute.wait_s(amount, most, now_s):
            assert 0 < wait_s <= 65
            assert minute.wait_s(amount, most, now_s + wait_s + 1e-6) == 0
            minute.counts = {}
            for at_s, n in taken:
                minute.add(step_of(at_s), n)
            continue
        minute.add(step_of(now_s), amount)
        taken.append((now_s, amount))
        assert amount > most or sum(n for at_s, n in taken if at_s > now_s - 60) <= most


def test_what_is_more_than_a_minutes_worth_goes_alone() -> None:
    """Else it would be refused for ever."""
    minute = Minute()
    assert minute.wait_s(500, 100, 3.0) == 0
    minute.add(0, 500)
    assert minute.wait_s(1, 100, 3.0) == 62
    assert minute.wait_s(500, 100, 64.9) > 0
    assert minute.wait_s(500, 100, 65.0) == 0


def test_too_many_requests_are_told_when_to_come_again() -> None:
    """The first of them leaves the minute when its step does; a refusal leaves nothing behind."""
    ledger, quota = Ledger(POOL), Quota(requests_per_minute=2)
    serve(ledger, want("a", quota), 1.0)
    serve(ledger, want("b", quota), 31.0)
    for lease_id in ("c", "d"):
        found = denied(ledger, want(lease_id, quota), 32.0)
        assert (found.reason, found.retry_after_s) == (Reason.REQUESTS_PER_MINUTE, 33.0)
    assert ledger.minute_of("t", 32.0) == (2, 0)
    serve(ledger, want("e", quota), 65.0)


def test_tokens_are_reserved_and_then_corrected_by_what_was_used() -> None:
    """An answer that ended early gives back what it did not need."""
    ledger, quota = Ledger(POOL), Quota(tokens_per_minute=150)
    serve(ledger, want("a", quota), 0.0, used=Usage(12, 8))
    assert ledger.minute_of("t", 0.0) == (0, 20)
    serve(ledger, want("b", quota), 0.0)
    assert denied(ledger, want("c", quota), 0.0).reason is Reason.TOKENS_PER_MINUTE


@pytest.mark.parametrize("how", ["cancelled in the queue", "never handed over"])
def test_what_never_ran_counts_for_nothing(how: str) -> None:
    """Whoever leaves the queue, or finds the engine gone, has not spent its minute."""
    ledger, quota = Ledger(POOL), Quota(requests_per_minute=9, tokens_per_minute=900)
    if how == "cancelled in the queue":
        for at in range(4):
            ledger.reserve(Reservation(str(at), "other", Quota(), Size(90, 10)), 0.0)
        assert isinstance(ledger.reserve(want("a", quota), 0.0), Ticket)
        assert ledger.minute_of("t", 0.0) == (1, 100)
        ledger.cancel("a", 1.0)
    else:
        ledger.reserve(want("a", quota), 0.0)
        ledger.settle("a", 1.0, ended=False)
    assert ledger.minute_of("t", 1.0) == (0, 0)
