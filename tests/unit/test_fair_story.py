"""Fairness against random stories: who goes in, who may not wait, and how often anybody is passed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgate.core.ask import Size, Usage
from kvgate.core.fairness import FairRule
from kvgate.core.guarantee import guaranteed_part
from kvgate.core.ledger import Denied, Lease, Ledger, Reservation, Ticket
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota, Share, Tier

TENANTS = ("a", "b", "c", "d", "owner", "spot")
pools = st.sampled_from([KvPool(300, 3, 100), KvPool(200, 5, 200, prompt_shared=True), KvPool(400, 4, 100)])
sizes = st.builds(Size, st.sampled_from([1, 20, 50]), st.sampled_from([5, 20, 50]), st.sampled_from([1, 1, 1, 2]))
rules = st.builds(
    FairRule,
    bypass_max=st.sampled_from([1, 2, 4]),
    prefill_tokens_max=st.sampled_from([None, 40, 80]),
    lent_output_tokens_max=st.sampled_from([0, 20, 1000]),
)


@dataclass
class Held:
    """A request that runs, as the story knows it."""

    reservation: Reservation
    cells: int
    answered: bool = False


@dataclass
class Waits:
    """One that waits."""

    reservation: Reservation


class FairStory(RuleBasedStateMachine):
    """Tenants of every tier that ask, are answered, stream and end; the story keeps a naive account of its own."""

    @initialize(
        pool=pools,
        rule=rules,
        ratio=st.sampled_from([0.0, 0.34, 0.5]),
        weights=st.lists(st.sampled_from([0.1, 1.0, 1.0, 4.0]), min_size=6, max_size=6),
    )
    def begin(self, pool: KvPool, rule: FairRule, ratio: float, weights: list[float]) -> None:
        self.ledger, self.pool, self.now_s, self.number = Ledger(pool, rule=rule), pool, 0.0, 0
        tiers = {"owner": Tier.GUARANTEED if ratio else Tier.ELASTIC, "spot": Tier.SPOT}
        self.shares = {
            name: Share(weight, tiers.get(name, Tier.ELASTIC), ratio if name == "owner" else 0.0)
            for name, weight in zip(TENANTS, weights, strict=True)
        }
        self.part = guaranteed_part(round(ratio * 1_000_000), pool)
        self.held: dict[str, Held] = {}
        self.waits: dict[str, Waits] = {}
        self.ledger.guarantee({"owner": round(ratio * 1_000_000)} if ratio else {}, 0.0)

    # -- the naive account

    def used(self, *tenants: str) -> tuple[int, int]:
        mine = [one for one in self.held.values() if not tenants or one.reservation.tenant in tenants]
        return sum(one.reservation.size.sequences for one in mine), sum(one.cells for one in mine)

    def in_share(self, reservation: Reservation) -> bool:
        slots, cells = self.used("owner")
        size = reservation.size
        return (
            reservation.tenant == "owner"
            and slots + size.sequences <= self.part.slots
            and cells + self.pool.cells(size) <= self.part.tokens
        )

    def has_room(self, reservation: Reservation) -> bool:
        slots, cells = self.used()
        most, size = self.ledger.rule.prefill_tokens_max, reservation.size
        prefill = sum(one.reservation.size.prompt_tokens for one in self.held.values() if not one.answered)
        return (
            slots + size.sequences <= self.pool.slots
            and cells + self.pool.cells(size) <= self.pool.grantable_tokens
            and (most is None or not prefill or prefill + size.prompt_tokens <= most)
        )

    def may_go(self, reservation: Reservation) -> bool:
        """It fits beside what is held back for the owner, or may have it lent."""
        if not self.has_room(reservation):
            return False
        if reservation.tenant == "owner":
            return True
        (slots, cells), own, size = self.used(), self.used("owner"), reservation.size
        free_slots = self.pool.slots - slots - size.sequences
        free_cells = self.pool.grantable_tokens - cells - self.pool.cells(size)
        back_slots, back_cells = max(self.part.slots - own[0], 0), max(self.part.tokens - own[1], 0)
        beside = free_slots >= back_slots and free_cells >= back_cells
        lent = size.output_tokens <= self.ledger.rule.lent_output_tokens_max
        return beside or (lent and reservation.share.tier is not Tier.SPOT)

    def heads(self) -> dict[str, Waits]:
        """The first request of each tenant, tenants by their counters."""
        found: dict[str, Waits] = {}
        for one in self.waits.values():
            found.setdefault(one.reservation.tenant, one)
        return dict(sorted(found.items(), key=lambda item: self.ledger.counter_of(item[0])))

    def let_in(self, *granted: Lease | Ticket | Denied) -> None:
        """Whoever goes in had room; while an owner waits in its share it is the owner, whatever of it was lent."""
        for lease in granted:
            if isinstance(lease, Lease):
                owner = self.heads().get("owner")
                one = self.waits.pop(lease.lease_id)
                assert self.may_go(one.reservation)
                assert owner is None or one is owner or not self.in_share(owner.reservation)
                self.held[lease.lease_id] = Held(one.reservation, lease.cells)

    # -- what happens

    @rule(tenant=st.sampled_from(TENANTS), size=sizes)
    def ask(self, tenant: str, size: Size) -> None:
        self.number += 1
        reservation = Reservation(f"{tenant}{self.number}", tenant, Quota(), size, self.shares[tenant])
        is_new_owner = tenant not in self.heads() and self.in_share(reservation)
        others_wait = any(one.reservation.tenant != "spot" for one in self.waits.values())
        found = self.ledger.reserve(reservation, self.now_s)
        if isinstance(found, Denied):
            never = size.sequences > self.pool.slots or self.pool.cells(size) > self.pool.grantable_tokens
            if not never:
                assert (tenant, others_wait, found.reason) == ("spot", True, Reason.SPOT_REFUSED)
            return
        self.waits[reservation.lease_id] = Waits(reservation)
        self.let_in(found)
        if is_new_owner and isinstance(found, Ticket):
            assert not self.has_room(reservation), "the owner waits although its share is free"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), part=st.floats(0, 1), cached=st.booleans())
    def end(self, data: st.DataObject, part: float, cached: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        size = self.held[lease_id].reservation.size
        output = int(size.sequences * size.output_tokens * part)
        used = Usage(size.prompt_tokens, output, size.prompt_tokens // 2 if cached else 0)
        self.ledger.hand_over(lease_id, self.now_s)
        del self.held[lease_id]
        self.let_in(*self.ledger.settle(lease_id, self.now_s, ended=True, used=used))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), output=st.integers(0, 50))
    def answer(self, data: st.DataObject, output: int) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        self.held[lease_id].answered = True
        self.let_in(*self.ledger.answered(lease_id, self.now_s))
        self.ledger.streamed(lease_id, output, self.now_s)

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.waits)))
        del self.waits[lease_id]
        self.let_in(*self.ledger.cancel(lease_id, self.now_s))

    @rule(seconds=st.sampled_from([0.5, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    # -- promises

    @invariant()
    def nobody_waits_who_could_go(self) -> None:
        """Work conservation: but for drains, what is held back, and spot tenants behind others."""
        if not hasattr(self, "held"):
            return
        heads = self.heads()
        owner = heads.get("owner")
        if owner is not None and self.in_share(owner.reservation):
            assert not self.has_room(owner.reservation)
            return
        fitting = [name for name, one in heads.items() if self.may_go(one.reservation)]
        paid = [name for name in fitting if name != "spot"]
        if self.ledger._line._clearing is not None and self.ledger._line.cleared_for() is not None:
            first = self.ledger._line.cleared_for()
            assert first is not None
            assert not self.may_go(first.reservation)
            assert first.passed == self.ledger.rule.bypass_max
            assert bool(paid) == (self.ledger._line._kept_out_since_s is not None), "idle, and not counted"
            return
        assert not paid
        assert not fitting or set(heads) != {"spot"}

    @invariant()
    def nobody_is_passed_more_often_than_may_be(self) -> None:
        for one in getattr(self, "ledger", Ledger(KvPool(1, 1, 1)))._line.queue.in_order():
            assert one.passed <= self.ledger.rule.bypass_max

    @invariant()
    def the_sums_are_what_is_held(self) -> None:
        if hasattr(self, "held"):
            tokens = Counter({name: self.used(name)[1] for name in TENANTS})
            assert dict(self.ledger.view().held_tokens_by_tenant) == {n: c for n, c in tokens.items() if c}
            view = self.ledger.fair_view(self.now_s)
            assert all(one.counter_milli >= 0 and one.service_milli >= 0 for one in view.tenants)


TestFairStory = pytest.mark.timeout(900)(FairStory.TestCase)
TestFairStory.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
