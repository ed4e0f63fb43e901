"""What the stories do not tell of the ledger's scripts: keys, cost, other versions, servers that forget."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.ask import Size
from kvgate.core.ledger import Reservation
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Quota
from kvgate.store.errors import StoreUnavailable
from kvgate.store.ledger_scripts import LedgerScripts, pool_json, reservation_json, view_of

if TYPE_CHECKING:
    pass

POOL = KvPool(tokens=200, slots=2, tokens_per_slot=100)


@pytest.fixture
async def scripts(client: Any) -> LedgerScripts:
    made = LedgerScripts(client, "engine")
    await made.run("join", gate="g", pool=pool_json(POOL), ttl=60_000, drain_max=60_000, server="run", knew=False)
    return made


async def reserve(scripts: LedgerScripts, lease_id: str, tenant: str, quota: Quota | None = None) -> dict[str, Any]:
    reservation = Reservation(lease_id, tenant, quota or Quota(), Size(50, 50))
    return await scripts.run("reserve", gate="g", **reservation_json(reservation))


async def test_all_keys_of_an_engine_hash_alike(client: Any, scripts: LedgerScripts) -> None:
    """On a cluster one node holds all of an engine's ledger; and a ledger that is empty leaves next to nothing."""
    for at in range(5):
        await reserve(scripts, f"r{at}", "t", Quota(requests_per_minute=100))
    await scripts.run("settle", id="r0", ended=False, handed_age=1)
    await scripts.run("settle", id="r1", ended=True)
    keys = await client.keys("*")
    assert len(keys) >= 8
    assert all(key.startswith(b"{kvgate:engine}:") for key in keys)
    for at in range(5):
        await scripts.run("settle", id=f"r{at}", ended=True)
    await scripts.run("free", ids=["r0"])
    await scripts.run("leave", gate="g")
    left = {key.removeprefix(b"{kvgate:engine}:") for key in await client.keys("*")}
    assert left <= {b"state", b"tenants", b"to:g"}


async def test_a_step_costs_the_same_however_many_wait(client: Any, scripts: LedgerScripts) -> None:
    """Two thousand tenants in the queue: no more commands than with twenty, for the first as for the last."""

    async def commands(running: str, number: int) -> tuple[int, str]:
        await client.config_resetstat()
        found = await scripts.run("settle", id=running, ended=True, handed_age=1)
        (granted,) = found["granted"]
        await scripts.run("claim", id=granted)
        await reserve(scripts, f"late{number}", f"late{number}")
        stats = await client.info("commandstats")
        return sum(stat["calls"] for stat in stats.values()), granted

    for at in range(2):
        await reserve(scripts, f"r{at}", "t")
    running, costs, waiting = "r0", [], 0
    for depth in (20, 2000):
        for at in range(waiting, depth):
            await reserve(scripts, f"d{at}", f"t{at}")
        waiting = depth
        for number in range(3):
            cost, running = await commands(running, depth + number)
            costs.append(cost)
    assert (await scripts.run("view"))["waiting"] == depth
    assert max(costs[3:]) <= max(costs[:3]) + 2  # the minute's turn, a stream's first entry


async def test_what_a_later_version_wrote_is_kept(client: Any, scripts: LedgerScripts) -> None:
    """Gates of two versions share a ledger: members unknown here go through every step unharmed."""
    await reserve(scripts, "a", "t")
    await reserve(scripts, "b", "t")
    await reserve(scripts, "c", "u")
    prefix = scripts.prefix
    for key, field in (("leases", "b"), ("tickets", "c"), ("tenants", "t")):
        record = json.loads(await client.hget(f"{prefix}:{key}", field))
        await client.hset(f"{prefix}:{key}", field, json.dumps({**record, "later": [1, {"x": "y"}]}))
    await client.hset(f"{prefix}:state", "later", "1")
    await scripts.run("renew", gate="g", held=[{"id": "b", "handed_age": 5}], sent=0)
    await scripts.run("settle", id="b", ended=False, handed_age=5)
    await scripts.run("settle", id="a", ended=True)
    await scripts.run("claim", id="c")
    for key, field in (("leases", "b"), ("leases", "c"), ("tenants", "t")):
        assert json.loads(await client.hget(f"{prefix}:{key}", field))["later"] == [1, {"x": "y"}]
    assert await client.hget(f"{prefix}:state", "later") == b"1"


async def test_another_layout_is_refused_and_not_touched(client: Any, scripts: LedgerScripts) -> None:
    """A ledger that this version cannot read is better not guessed at."""
    await client.hset(f"{scripts.prefix}:state", "layout", "3")
    before = await client.hgetall(f"{scripts.prefix}:state")
    with pytest.raises(StoreUnavailable, match="layout 3"):
        await reserve(scripts, "a", "t")
    assert await client.hgetall(f"{scripts.prefix}:state") == before


async def test_the_first_gate_of_this_version_takes_over_what_the_one_before_left(
    client: Any, scripts: LedgerScripts
) -> None:
    """What is held stays counted and can be given back; tickets of gates that can ask no more are gone."""
    for name in ("a", "b", "c"):
        await reserve(scripts, name, "t", Quota(concurrency_max=2))
    prefix = scripts.prefix
    for lease_id in ("a", "b"):  # as the version before wrote them
        record = json.loads(await client.hget(f"{prefix}:leases", lease_id))
        old = {name: value for name, value in record.items() if name not in {"weight", "service", "prefill"}}
        await client.hset(f"{prefix}:leases", lease_id, json.dumps(old))
    kept = {"running": 2, "cells": 200, "waiting": 1}
    await client.hset(f"{prefix}:tenants", "t", json.dumps(kept))
    await client.hdel(f"{prefix}:state", "prefill", "last", "void_quota")
    await client.hset(f"{prefix}:state", "layout", "1")
    with pytest.raises(StoreUnavailable, match="layout 1"):
        await scripts.run("view")
    await scripts.run("join", gate="n", pool=pool_json(POOL), ttl=60_000, drain_max=60_000, server="run", knew=False)
    view = view_of(await scripts.run("view"))
    assert (view.running, view.held_tokens, view.waiting) == (2, 200, 0)
    assert (await scripts.run("claim", id="c")).get("waiting") is None
    await reserve(scripts, "d", "u")
    await scripts.run("renew", gate="n", held=[{"id": "a", "handed_age": 5, "output": 3}], sent=0)
    found = await scripts.run(
        "settle", id="a", ended=True, handed_age=5, used={"prompt": 50, "cached": 0, "output": 9}
    )
    assert found["granted"] == ["d"]
    await scripts.run("settle", id="b", ended=True, handed_age=5)
    await scripts.run("settle", id="d", ended=True)
    found = await scripts.run("view")
    assert (view_of(found).running, found["fair"]["prefill"]) == (0, 0)


async def test_a_server_that_forgot_the_scripts_is_told_them_again(client: Any, scripts: LedgerScripts) -> None:
    """After a SCRIPT FLUSH, a restart or a failover (redis-py issue 3935)."""
    await reserve(scripts, "a", "t")
    for _ in range(3):
        await client.script_flush()
        assert view_of(await scripts.run("view")).running == 1


async def test_a_step_that_fails_half_way_takes_nothing(client: Any, scripts: LedgerScripts) -> None:
    """A store that is out of memory refuses before the step begins to write."""
    await reserve(scripts, "a", "t")
    before = view_of(await scripts.run("view"))
    await client.config_set("maxmemory", "1")
    with pytest.raises(Exception, match=r"OOM|maxmemory"):
        await reserve(scripts, "b", "t")
    await client.config_set("maxmemory", "0")
    assert view_of(await scripts.run("view")) == before
