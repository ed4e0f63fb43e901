"""Fairness on the pure rule: the bound, the lift, what is lent and given back, who may be passed how often."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.core.ask import Size, Usage
from kvgate.core.fairness import MILLI, FairRule, jain_index
from kvgate.core.ledger import Denied, Freed, Lease, Ledger, Reservation, Ticket
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Quota, Share, Tier

DIVIDED = KvPool(tokens=200, slots=2, tokens_per_slot=100)
UNIFIED = KvPool(tokens=100, slots=4, tokens_per_slot=100, prompt_shared=True)
OWNER = Share(tier=Tier.GUARANTEED, guaranteed_ratio=0.5)
SPOT = Share(tier=Tier.SPOT)


def want(
    lease_id: str, tenant: str = "", size: Size | None = None, share: Share | None = None, quota: Quota | None = None
) -> Reservation:
    """A request whose tenant is its id's first letter, unless told."""
    return Reservation(lease_id, tenant or lease_id[0], quota or Quota(), size or Size(50, 50), share or Share())


def ids(*granted: Lease | Denied) -> list[str]:
    return [lease.lease_id for lease in granted if isinstance(lease, Lease)]


def serve(ledger: Ledger, *reservations: Reservation) -> None:
    for reservation in reservations:
        assert isinstance(ledger.reserve(reservation, 0.0), Lease), reservation
        ledger.hand_over(reservation.lease_id, 0.0)
        ledger.answered(reservation.lease_id, 0.0)


def end(ledger: Ledger, lease_id: str, now_s: float = 1.0, used: Usage | None = None) -> list[str]:
    ledger.hand_over(lease_id, now_s)
    return ids(*ledger.settle(lease_id, now_s, ended=True, used=used or Usage(50, 50)))


# -- what service is


def test_service_is_input_and_output_at_their_prices_divided_by_the_weight() -> None:
    """Cached input costs less; the prompt is charged at once, output as it comes, and nothing that was not used."""
    rule = FairRule()
    assert rule.service_milli(Usage(100, 10, 40)) == (60 + 40 * 0.25 + 10 * 2) * MILLI
    ledger = Ledger(DIVIDED, rule=rule)
    serve(ledger, want("b"), want("a", share=Share(weight=2.0)))
    assert (ledger.counter_of("a"), ledger.counter_of("b")) == (75 * MILLI, 50 * MILLI)
    ledger.streamed("a", 10, 1.0)
    ledger.streamed("a", 7, 1.0)
    assert ledger.counter_of("a") == 85 * MILLI
    ledger.settle("a", 2.0, ended=False, used=Usage(50, 12, 20))
    assert ledger.counter_of("a") == (50 + 1) * MILLI + (30 + 5 + 24) * MILLI // 2 - 1 * MILLI


def test_what_nobody_can_tell_is_charged_as_reserved_and_what_never_ran_not_at_all() -> None:
    """As in the minute."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    ledger.reserve(want("b"), 0.0)
    ledger.settle("a", 1.0, ended=False)
    before = ledger.counter_of("a")
    assert before == (50 + 100) * MILLI
    ledger.settle("b", 1.0, ended=True)
    assert ledger.counter_of("b") == 50 * MILLI  # what it was lifted to


def test_where_nobody_is_here_all_begin_alike() -> None:
    """Counters do not grow for ever, and nothing is held against who used an engine that nobody else wanted."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    end(ledger, "a")
    assert (ledger.counter_of("a"), ledger._queue.counters) == (0, {})


def test_a_bill_is_of_what_was_held_for_how_long() -> None:
    """Cells by time, drains included; a grant that was never used is free."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"), want("b"))
    end(ledger, "a", 3.0)
    ledger.settle("b", 3.0, ended=False)
    ledger.expire(1000.0)
    assert ledger.freed == [Freed("a", 100, 3.0), Freed("b", 100, 1000.0)]


@given(st.lists(st.integers(0, 100), max_size=9))
def test_jains_index_is_one_where_all_are_equal_and_one_nth_where_one_has_all(figures: list[int]) -> None:
    index = jain_index(figures)
    assert (index is None) == (not any(figures))
    assert index is None or 1 / len(figures) - 1e-9 <= index <= 1 + 1e-9
    assert jain_index([3.0] * 4) == pytest.approx(1)
    assert jain_index([5, 0, 0, 0]) == pytest.approx(0.25)


# -- the bound


@dataclass
class Bench:
    """An engine with this ledger in front: every tick each sequence makes a token, of which the ledger hears late."""

    ledger: Ledger
    chance: random.Random
    sizes: dict[str, Size]
    shares: dict[str, Share]
    backlog: int = 20
    now_s: float = 0.0
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    running: dict[str, tuple[Reservation, int]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, Reservation] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)

    def size_of(self, tenant: str) -> Size:
        most = self.sizes[tenant]
        return Size(self.chance.randint(1, most.prompt_tokens), self.chance.randint(1, most.output_tokens))

    def ask(self, tenant: str) -> None:
        name = f"{tenant}{next(self.numbers)}"
        reservation = Reservation(name, tenant, Quota(queue_max=99), self.size_of(tenant), self.shares[tenant])
        self.waiting[name] = reservation
        self.let_in(self.ledger.reserve(reservation, self.now_s))

    def let_in(self, *found: Lease | Ticket | Denied) -> None:
        for lease in found:
            assert not isinstance(lease, Denied)
            if isinstance(lease, Lease):
                reservation = self.waiting.pop(lease.lease_id)
                size, tenant = reservation.size, reservation.tenant
                self.running[lease.lease_id] = reservation, self.chance.randint(1, size.output_tokens)
                self.made[lease.lease_id] = 0
                self.ledger.hand_over(lease.lease_id, self.now_s)
                self.serve(tenant, self.ledger.rule.input_price_milli * size.prompt_tokens)

    def serve(self, tenant: str, service_milli: float) -> None:
        self.service[tenant] = self.service.get(tenant, 0) + service_milli / self.shares[tenant].weight

    def tick(self) -> None:
        """Everybody has requests waiting; then each sequence makes one token."""
        for tenant in self.sizes:
            while sum(one.tenant == tenant for one in self.waiting.values()) < self.backlog:
                self.ask(tenant)
        self.now_s += 1
        for name, (reservation, output) in list(self.running.items()):
            self.made[name] += 1
            self.serve(reservation.tenant, self.ledger.rule.output_price_milli)
            if self.chance.random() < 0.3:
                self.let_in(*self.ledger.answered(name, self.now_s))
                self.ledger.streamed(name, self.made[name], self.now_s)
            if self.made[name] == output:
                del self.running[name]
                used = Usage(reservation.size.prompt_tokens, output)
                self.let_in(*self.ledger.settle(name, self.now_s, ended=True, used=used))


pools = st.sampled_from(
    [DIVIDED, UNIFIED, KvPool(50, 1, 50), KvPool(300, 3, 100), KvPool(150, 6, 100, prompt_shared=True)]
)
weights = st.sampled_from([0.01, 0.5, 1.0, 1.0, 2.0, 7.0])
longest = st.builds(Size, st.sampled_from([1, 10, 30]), st.sampled_from([1, 5, 20]))


@settings(max_examples=200, deadline=None)
@given(pools, st.lists(st.tuples(weights, longest), min_size=2, max_size=3), st.integers(0, 2**32), st.data())
def test_the_gap_of_two_that_wait_all_the_time_stays_in_the_bound(
    pool: KvPool, tenants: list[tuple[float, Size]], seed: int, data: st.DataObject
) -> None:
    """At every instant, over every stretch of time, whatever their lengths and weights: where nobody is passed."""
    prices = data.draw(st.sampled_from([(1000, 2000), (1000, 1000), (3000, 100)]))
    rule = FairRule(prices[0], prices[0], prices[1], bypass_max=0)
    names = "abc"[: len(tenants)]
    bench = Bench(
        Ledger(pool, rule=rule),
        random.Random(seed),
        {name: size for name, (_, size) in zip(names, tenants, strict=True)},
        {name: Share(weight) for name, (weight, _) in zip(names, tenants, strict=True)},
    )
    least = min(share.weight_milli for share in bench.shares.values())
    bound = rule.gap_bound_milli(pool, least)
    ahead: dict[tuple[str, str], list[float]] = {}
    for _ in range(120):
        bench.tick()
        for one, other in itertools.combinations(names, 2):
            ahead.setdefault((one, other), []).append(bench.service.get(one, 0) - bench.service.get(other, 0))
        view = bench.ledger.fair_view(bench.now_s)
        assert view.gap_milli <= bound / 2 + 1
        assert not view.voids
    for figures in ahead.values():
        assert max(figures) - min(figures) <= bound
