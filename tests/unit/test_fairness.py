"""Fairness on the pure rule: the bound, the lift, what is lent and given back, who may be passed how often."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.core.ask import Size, Usage
from kvgate.core.fairness import MILLI, FairRule, Void, jain_index
from kvgate.core.guarantee import Part, guaranteed_part, over_guaranteed
from kvgate.core.ledger import Denied, Freed, Lease, Ledger, Reservation, Ticket
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
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
    assert (ledger.counter_of("a"), ledger._line.queue.counters) == (0, {})


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


# -- the lift


def test_who_was_away_gains_nothing_by_it() -> None:
    """It comes back to the least counter in line, not to what it had; one that is ahead keeps what it owes."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a1"), want("b1"))
    for name in ("a2", "b2", "a3", "b3"):
        ledger.reserve(want(name), 0.0)
    for lease_id in ("a1", "b1", "a2", "b2"):
        end(ledger, lease_id)
    least = min(ledger.counter_of("a"), ledger.counter_of("b"))
    assert least > 0
    serve_later = ledger.reserve(want("c1"), 2.0)
    assert isinstance(serve_later, Ticket)
    assert ledger.counter_of("c") == 0 or ledger.counter_of("c") >= least


def test_the_first_to_come_when_nobody_waits_is_lifted_to_who_left_last() -> None:
    """As in the paper: else whoever was idle longest would be owed most."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    ledger.streamed("a", 50, 1.0)
    serve(ledger, want("b"))
    assert ledger.counter_of("b") == ledger.counter_of("a") + 50 * MILLI


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), min_size=1, max_size=40))
def test_counters_of_those_who_are_away_are_kept_only_while_they_matter(asks: list[tuple[str, int]]) -> None:
    """A tenant that is away and behind is forgotten, and comes back to the same place as if it had not been."""
    ledger = Ledger(KvPool(100, 1, 100))
    for number, (tenant, prompt) in enumerate(asks):
        ledger.reserve(want(f"{tenant}{number}", size=Size(prompt, 1)), 0.0)
        if number % 3 == 2:
            for lease in list(ledger.facts()):
                end(ledger, lease.lease_id, used=Usage(prompt, 1))
        queue = ledger._line.queue
        here = {name for name in queue.counters if ledger._is_here(name)}
        floor = queue._floor(False) or 0
        last = set(queue._last.values())
        assert all(name in here | last or counter >= floor for name, counter in queue.counters.items())


# -- who may be passed, and how often


def test_the_first_in_line_is_passed_so_often_and_no_more_then_the_gate_drains_for_it() -> None:
    """A request that needs the whole pool among small ones that come without end."""
    rule = FairRule(bypass_max=3)
    ledger = Ledger(UNIFIED, rule=rule)
    serve(ledger, want("a0", size=Size(10, 10)))
    assert isinstance(ledger.reserve(want("large", "l", Size(50, 50)), 1.0), Ticket)
    passed = 0
    for number in range(1, 20):
        if isinstance(ledger.reserve(want(f"s{number}", size=Size(5, 5)), float(number)), Lease):
            passed += 1
            end(ledger, f"s{number}", float(number), Usage(5, 0))
    view = ledger.fair_view(20.0)
    assert (passed, view.bypasses, view.drains) == (3, 3, 1)
    assert Void.BYPASS in view.voids
    assert end(ledger, "a0", 24.0)[0] == "large"
    assert ledger.fair_view(30.0).drain_idle_s == 20.0  # since the first that was kept out


def test_a_drain_is_for_whoever_it_began_for_although_others_have_less_service() -> None:
    """Else a newcomer that does not fit either would open the door again."""
    ledger = Ledger(UNIFIED, rule=FairRule(bypass_max=1))
    serve(ledger, want("a", size=Size(10, 10)))
    ledger.reserve(want("large", "l", Size(50, 50), Share(0.01)), 0.0)
    serve(ledger, want("s1", size=Size(5, 5)))
    ledger.streamed("a", 10, 1.0)
    for name in ("s2", "huge", "t1"):
        size = Size(50, 50) if name == "huge" else Size(5, 5)
        assert isinstance(ledger.reserve(want(name, size=size), 2.0), Ticket)
    assert end(ledger, "s1", 3.0) == []
    assert end(ledger, "a", 4.0)[0] == "large"


def test_a_drain_ends_when_its_request_leaves() -> None:
    ledger = Ledger(UNIFIED, rule=FairRule(bypass_max=1))
    serve(ledger, want("a", size=Size(10, 10)))
    ledger.reserve(want("large", "l", Size(50, 50)), 0.0)
    serve(ledger, want("s1", size=Size(5, 5)))
    assert isinstance(ledger.reserve(want("s2", size=Size(5, 5)), 0.0), Ticket)
    assert ids(*ledger.cancel("large", 1.0)) == ["s2"]


def test_a_prompt_waits_while_others_are_read_and_one_above_the_bound_goes_alone() -> None:
    """As soon as the first output of those before it has come; small prompts may pass meanwhile."""
    ledger = Ledger(KvPool(400, 4, 100), rule=FairRule(prefill_tokens_max=60))
    assert isinstance(ledger.reserve(want("a", size=Size(50, 10)), 0.0), Lease)
    assert isinstance(ledger.reserve(want("b", size=Size(50, 10)), 0.0), Ticket)
    assert isinstance(ledger.reserve(want("c", size=Size(10, 10)), 0.0), Lease)
    assert ledger.fair_view(0.0).prefill_tokens == 60
    assert ledger.answered("c", 1.0) == ()
    assert ids(*ledger.answered("a", 1.0)) == ["b"]
    ledger.reserve(want("d", size=Size(90, 10)), 1.0)
    assert ids(*ledger.answered("b", 2.0)) == ["d"]


# -- tiers


def test_a_share_is_slots_rounded_down_and_cells() -> None:
    """Rounded up, shares would exceed the whole; and a third of three slots is one, however it is written."""
    assert guaranteed_part(500_000, DIVIDED) == Part(1, 100)
    assert guaranteed_part(333_333, KvPool(300, 3, 100)) == Part(1, 100)
    assert guaranteed_part(330_000, KvPool(300, 3, 100)) == Part(1, 100)
    assert guaranteed_part(300_000, DIVIDED) == Part(0, 60)
    assert guaranteed_part(500_000, UNIFIED) == Part(2, 50)


@given(st.lists(st.integers(0, 1_000_000), max_size=6), pools)
def test_shares_that_are_at_most_the_whole_take_no_more_than_the_pool(ratios: list[int], pool: KvPool) -> None:
    if sum(ratios) <= 1_000_000:
        parts = [guaranteed_part(ratio, pool) for ratio in ratios]
        assert sum(part.slots for part in parts) <= pool.slots
        assert sum(part.tokens for part in parts) <= pool.tokens


def test_more_than_the_whole_is_told_with_the_sum() -> None:
    assert over_guaranteed({"a": 0.5, "b": 0.5, "c": 0.0}) is None
    said = over_guaranteed({"a": 0.5, "b": 0.75})
    assert said is not None
    assert "together is 1.25" in said
    assert "a 0.5, b 0.75" in said


def test_a_guaranteed_share_is_lent_to_short_answers_alone_and_comes_back_to_its_owner() -> None:
    """What was lent is free again when the short answer ends; no other is lent meanwhile."""
    ledger = Ledger(DIVIDED, rule=FairRule(lent_output_tokens_max=20))
    ledger.guarantee({"o": 500_000}, 0.0)
    serve(ledger, want("a1"))
    assert isinstance(ledger.reserve(want("a2"), 0.0), Ticket)  # an answer of 50 is not short
    serve(ledger, want("b1", size=Size(50, 20)))
    assert isinstance(ledger.reserve(want("o1", share=OWNER), 0.0), Ticket)
    assert isinstance(ledger.reserve(want("b2", size=Size(5, 5)), 0.0), Ticket)
    assert end(ledger, "b1") == ["o1"]
    assert Void.TIERS in ledger.fair_view(1.0).voids
    assert end(ledger, "o1") == ["b2"]  # lent again


def test_an_owner_beyond_its_share_is_as_anybody_else() -> None:
    """Its second request waits its turn behind who has less service."""
    ledger = Ledger(DIVIDED)
    ledger.guarantee({"o": 500_000}, 0.0)
    serve(ledger, want("o1", share=OWNER), want("a1"))
    ledger.streamed("o1", 50, 0.5)
    for name in ("a2", "o2"):
        ledger.reserve(want(name, share=OWNER if name == "o2" else None), 0.0)
    assert end(ledger, "a1", used=Usage(50, 1)) == ["a2"]
    assert end(ledger, "o1") == ["o2"]


def test_spot_is_let_in_only_where_nobody_else_waits_and_is_refused_where_somebody_does() -> None:
    """It may use what is free, but not what is guaranteed; it waits behind everybody."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("s1", share=SPOT))
    ledger.guarantee({"o": 500_000}, 0.0)
    assert isinstance(ledger.reserve(want("s2", size=Size(5, 5), share=SPOT), 0.0), Ticket)
    serve(ledger, want("a1", size=Size(5, 5)))
    assert isinstance(ledger.reserve(want("a2", size=Size(5, 5)), 0.0), Ticket)
    denied = ledger.reserve(want("s3", share=SPOT), 0.0)
    assert isinstance(denied, Denied)
    assert denied.reason is Reason.SPOT_REFUSED
    assert end(ledger, "s1") == ["a2"]
    assert end(ledger, "a1") == []  # the free slot is the owner's, and not lent to spot
    assert end(ledger, "a2") == ["s2"]
