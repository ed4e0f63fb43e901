"""The ledger's scripts against their model where hundreds of tenants wait: who fits is found, however far back."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.ask import Size
from kvgate.core.fair_queue import LOOK_PAST
from kvgate.core.fairness import FairRule
from kvgate.core.leased import LeasedLedger, Told
from kvgate.core.ledger import Lease, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Quota, Share, Tier
from kvgate.store.ledger_scripts import (
    LedgerScripts,
    fair_view_of,
    pool_json,
    reservation_json,
    rule_json,
    view_of,
)
from tests.contract.test_ledger_story import CLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

POOL = KvPool(tokens=4000, slots=4, tokens_per_slot=4000, prompt_shared=True)
HOUR_MS = 3_600_000
TENANTS = 400


class Both:
    """One ledger twice, as scripts and as their model; each step checks that they let in the same."""

    def __init__(self, client: Any, rule: FairRule, shares: Mapping[str, int]) -> None:
        self.client, self.rule, self.shares = client, rule, shares
        self.scripts = LedgerScripts(client, "crowd", clock=CLOCK)
        self.model = LeasedLedger.joined(POOL, 3600.0, 3600.0, "", 1000.0, knew=False, rule=rule)
        self.now_ms = 1_000_000
        self.running: list[str] = []

    async def begin(self) -> None:
        await self.wait(0)
        kept = {"ttl": HOUR_MS, "drain_max": HOUR_MS, "server": "", "knew": False, "rule": rule_json(self.rule)}
        await self.scripts.run("join", gate="g", pool=pool_json(POOL), **kept)
        await self.scripts.run("guarantee", shares=dict(self.shares))
        self.model.guarantee(dict(self.shares), self.now_ms / 1000)

    async def wait(self, ms: int) -> None:
        self.now_ms += ms
        await self.client.set(f"{self.scripts.prefix}:clock", self.now_ms)

    async def claim(self, found: dict[str, Any]) -> None:
        pushed = [push.lease_id for push in self.model.pushed if push.granted]
        self.model.pushed.clear()
        assert found.get("granted", []) == pushed
        for lease_id in pushed:
            assert isinstance(self.model.claim(lease_id, self.now_ms / 1000), Lease)
            await self.claim(await self.scripts.run("claim", id=lease_id))
            self.running.append(lease_id)

    async def reserve(self, reservation: Reservation) -> bool:
        expected = self.model.reserve("g", reservation, self.now_ms / 1000)
        found = await self.scripts.run("reserve", gate="g", **reservation_json(reservation))
        assert ("lease" in found) == isinstance(expected, Lease)
        self.running += [reservation.lease_id] if "lease" in found else []
        await self.claim(found)
        return "lease" in found

    async def answered(self, lease_id: str) -> None:
        self.model.answered([Told(lease_id, self.now_ms / 1000, self.now_ms / 1000)], self.now_ms / 1000)
        told = {"id": lease_id, "handed_age": 0, "answered_age": 0, "output": 0}
        await self.claim(await self.scripts.run("answered", held=[told]))

    async def end(self, lease_id: str) -> None:
        self.running.remove(lease_id)
        self.model.settle(Told(lease_id, self.now_ms / 1000), self.now_ms / 1000, ended=True, used=None)
        await self.claim(await self.scripts.run("settle", id=lease_id, ended=True, handed_age=0))

    async def agree(self) -> None:
        found = await self.scripts.run("view")
        assert view_of(found) == self.model.ledger.view()
        assert fair_view_of(found) == self.model.ledger.fair_view(self.now_ms / 1000)


@pytest.mark.parametrize("seed", range(4))
async def test_scripts_and_model_let_in_the_same_of_hundreds(client: Any, seed: int) -> None:
    """Large and small requests, prefill bounds, guarantees and spot tenants; the clock moves: drains are counted."""
    random = Random(seed)
    rule = FairRule(
        bypass_max=random.choice([0, 2, 1000]),
        prefill_tokens_max=random.choice([None, 1200]),
        lent_output_tokens_max=random.choice([0, 50]),
    )
    both = Both(client, rule, random.choice([{}, {"t0": 300_000, "t1": 100_000}]))
    await both.begin()
    for number in range(400):
        name = random.randrange(TENANTS)
        prompt = random.choices([100, 900, 2500, 3900], [1, 1, 4, 4])[0]
        size = Size(prompt, random.choice([10, 90]), random.choice([1, 1, 1, 2]))
        share = Share(random.choice([1.0, 2.0]), Tier.SPOT if name % 10 == 9 else Tier.ELASTIC)
        await both.wait(random.choice([0, 125]))
        await both.reserve(Reservation(f"r{number}", f"t{name}", Quota(concurrency_max=2), size, share))
        if both.running and random.random() < 0.3:
            await both.answered(random.choice(both.running))
        if both.running and random.random() < 0.25:
            await both.end(random.choice(both.running))
        if number % 50 == 49:
            await both.agree()
    assert len(both.model.ledger._line.queue) > 128, "nobody was far back"
    while both.running:
        await both.end(both.running[0])
    await both.agree()


@pytest.mark.parametrize("blocked", [1, 40, LOOK_PAST - 1])
async def test_whoever_fits_goes_in_past_all_who_do_not(client: Any, blocked: int) -> None:
    """Work conservation: no slot is free while one waits who fits, with as many before it as a step looks at."""
    both = Both(client, FairRule(bypass_max=1_000_000), {})
    await both.begin()

    def one(name: str, prompt: int) -> Reservation:
        return Reservation(name, name, Quota(), Size(prompt, 50))

    assert await both.reserve(one("first", 2000))
    for number in range(blocked):
        assert not await both.reserve(one(f"large{number}", 2500))
    assert [await both.reserve(one(f"chat{number}", 100)) for number in range(4)] == [True, True, True, False]
    await both.end("chat0")
    assert "chat3" in both.running, "it fits, and waits"
    await both.agree()


async def test_a_step_that_lets_nobody_in_costs_the_same_however_many_are_blocked(client: Any) -> None:
    """By cells, by slots or by what is held back: a step takes no more commands, so the store is busy no longer."""
    for blocked_by, size, shares in (
        ("cells", Size(2500, 50), {}),
        ("slots", Size(10, 20, 4), {}),
        ("guarantees", Size(1500, 50), {"owner": 900_000}),
    ):
        await client.flushall()
        both, costs, waiting = Both(client, FairRule(lent_output_tokens_max=0), shares), [], 0
        await both.begin()
        assert await both.reserve(Reservation("owner", "owner", Quota(), Size(2000, 50)))
        for depth in (20, 600):
            for number in range(waiting, depth):
                assert not await both.reserve(Reservation(f"b{number}", f"b{number}", Quota(), size))
            waiting = depth
            await client.config_resetstat()
            assert not await both.reserve(Reservation(f"late{depth}", f"late{depth}", Quota(), size))
            stats = await client.info("commandstats")
            costs.append(sum(stat["calls"] for stat in stats.values()))
        assert costs[0] == costs[1], (blocked_by, costs)
