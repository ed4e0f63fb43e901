"""Tenants and keys are changed whole or not at all, on every real server to be had, whoever else is at it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.core.tenant import Limits, OnOverflow, Quota, Share, Tenant, Tier
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable
from kvgate.store.registry import (
    Declared,
    DeclaredTenant,
    NotDone,
    OverGuaranteed,
    Registry,
    TenantsConflict,
    UnknownKey,
    UnknownTenant,
)
from kvgate.store.tenants import ValkeyTenants
from tests.contract.conftest import SERVERS, server_binary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from kvgate.store.registry import Applied, Holdings

FILE, OTHER = "/etc/tenants.toml", "/srv/other.toml"


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bare(*names: str) -> dict[str, DeclaredTenant]:
    """Tenants whose keys are made here."""
    return {name: DeclaredTenant(Tenant(name)) for name in names}


def filed(**keys: str) -> dict[str, DeclaredTenant]:
    """Tenants with the keys named in their words, and no others."""
    return {name: DeclaredTenant(Tenant(name), tuple(map(sha, words.split()))) for name, words in keys.items()}


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all of these tests; each has it empty."""
    store = EmbeddedValkey(tmp_path_factory.mktemp("store"), binary=server_binary(request.param))
    asyncio.run(store.start())
    yield store.url
    asyncio.run(store.stop())


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[Any]:
    connection: Any = connect(url)
    try:
        await connection.flushall()
        yield connection
    finally:
        await connection.aclose()


@pytest.fixture
async def client(url: str) -> AsyncIterator[Any]:
    async with emptied(url) as connection:
        yield connection


@pytest.fixture
def registry(client: Any) -> Registry:
    return Registry(client)


async def contents(client: Any) -> dict[bytes, Any]:
    """All that the store holds, as it stands there."""
    keys = [key for key in await client.keys("*") if await client.type(key) == b"hash"]
    return {key: await client.hgetall(key) for key in keys} | {b"v": await client.get("{kvgate}:tenants:version")}


def names_of(applied: Applied) -> list[tuple[str, ...]]:
    kinds = (applied.added, applied.changed, applied.removed)
    return [tuple(change.name for change in kind) for kind in kinds]


# -- keys that are made here


async def test_a_minted_key_opens_for_its_tenant(registry: Registry, client: Any) -> None:
    """The store gets its SHA-256, and says when it was made by its own clock."""
    await registry.apply(bare("acme"), FILE)
    now_s, _ = await client.time()
    made = await registry.create_key("acme", sha("k"), label="caf\u00e9 \u2014 'ci'", created_by="ann@host")
    assert (made.tenant, made.minted, made.label, made.created_by) == (
        "acme",
        True,
        "caf\u00e9 \u2014 'ci'",
        "ann@host",
    )
    assert made.created_s is not None
    assert now_s <= made.created_s <= now_s + 60
    assert made.key_id == sha("k")[:12]
    gate = ValkeyTenants(client)
    await gate.refresh()
    assert gate.by_key(sha("k")) == Tenant("acme")
    assert (await registry.read()).keys_of("acme") == (made,)


async def test_applying_again_never_touches_minted_keys(registry: Registry) -> None:
    """Nor does a change of the tenant's settings."""
    await registry.apply(bare("acme"), FILE)
    made = await registry.create_key("acme", sha("k"))
    assert (await registry.apply(bare("acme"), FILE)).changes == ()
    applied = await registry.apply({"acme": DeclaredTenant(Tenant("acme", Limits(64)))}, FILE)
    assert names_of(applied) == [(), ("acme",), ()]
    assert applied.changes[0].differences == {"context_tokens_max": (None, 64)}
    assert (await registry.read()).keys_of("acme") == (made,)


async def test_a_file_that_takes_the_keys_over_revokes_what_was_minted(registry: Registry) -> None:
    """Its word is whole: also an empty list. A minted key that it names itself lives on as the file's."""
    await registry.apply(bare("acme"), FILE)
    for key in "12":
        await registry.create_key("acme", sha(key))
    applied = await registry.apply(filed(acme="2 3"), FILE)
    (change,) = applied.changes
    assert ([key.sha256 for key in change.revoked], [key.sha256 for key in change.granted]) == (
        [sha("1")],
        [sha("3")],
    )
    assert change.revoked[0].minted
    found = (await registry.read()).keys_of("acme")
    assert {(key.sha256, key.minted) for key in found} == {(sha("2"), False), (sha("3"), False)}
    await registry.apply(filed(acme=""), FILE)
    assert (await registry.read()).keys == {}


async def test_a_file_that_gives_the_keys_up_revokes_its_own(registry: Registry) -> None:
    await registry.apply(filed(acme="1 2"), FILE)
    (change,) = (await registry.apply(bare("acme"), FILE)).changes
    assert {key.sha256 for key in change.revoked} == {sha("1"), sha("2")}
    assert (await registry.read()).keys == {}
    await registry.create_key("acme", sha("3"))


async def test_removing_a_tenant_revokes_all_its_keys(registry: Registry) -> None:
    """Out of the file, or by name; another's stay."""
    await registry.apply(bare("a", "b", "c"), FILE)
    for name in "abc":
        await registry.create_key(name, sha(name))
    (change,) = (await registry.apply(bare("b", "c"), FILE)).removed
    assert [key.sha256 for key in change.revoked] == [sha("a")]
    (change,) = (await registry.remove("b", FILE)).removed
    assert [(key.sha256, key.minted) for key in change.revoked] == [(sha("b"), True)]
    assert change.before is not None
    assert change.before.tenant == Tenant("b")
    holdings = await registry.read()
    assert (set(holdings.tenants), set(holdings.keys)) == ({"c"}, {sha("c")})


async def test_a_key_is_revoked_by_the_first_digits_of_its_hash(registry: Registry) -> None:
    await registry.apply(bare("acme"), FILE)
    made = await registry.create_key("acme", sha("1"), label="old")
    kept = await registry.create_key("acme", sha("2"))
    assert await registry.revoke_key(made.key_id) == made
    assert (await registry.read()).keys_of("acme") == (kept,)
    with pytest.raises(UnknownKey):
        await registry.revoke_key(made.key_id)
    assert await registry.revoke_key(kept.sha256) == kept


async def test_keys_that_begin_alike_are_told_apart_or_not_at_all(registry: Registry, client: Any) -> None:
    await registry.apply(bare("acme"), FILE)
    for end in "01":
        await registry.create_key("acme", "abcdef01" + "2" * 55 + end)
    before = await contents(client)
    with pytest.raises(NotDone, match="2 keys have an ID that begins so: abcdef012222, abcdef012222"):
        await registry.revoke_key("abcdef01")
    assert await contents(client) == before


# -- what is refused leaves nothing behind


async def test_what_is_refused_leaves_nothing_behind(registry: Registry, client: Any) -> None:
    """Each with the owner's name where somebody else's word stands against it."""
    await registry.apply(filed(acme="file-key"), FILE)
    await registry.apply(bare("beta"), OTHER)
    minted = await registry.create_key("beta", sha("minted"))
    before = await contents(client)
    with pytest.raises(Declared, match="the keys of tenant 'acme' are declared by"):
        await registry.create_key("acme", sha("new"))
    with pytest.raises(UnknownTenant):
        await registry.create_key("nobody", sha("new"))
    with pytest.raises(NotDone, match="in use"):
        await registry.create_key("beta", minted.sha256)
    with pytest.raises(Declared, match=f"key {sha('file-key')[:12]} of tenant 'acme' is declared by"):
        await registry.revoke_key(sha("file-key")[:12])
    with pytest.raises(UnknownKey):
        await registry.revoke_key("0" * 12)
    for owner in ("", OTHER, FILE + "x"):
        with pytest.raises(Declared) as caught:
            await registry.remove("acme", owner)
        assert caught.value.owner == FILE
    with pytest.raises(UnknownTenant):
        await registry.remove("nobody", FILE)
    with pytest.raises(TenantsConflict, match="'x' and 'beta' have a key in common"):
        await registry.apply({**filed(acme="file-key"), **filed(x="minted")}, FILE)
    assert await contents(client) == before


async def test_a_minted_key_is_not_to_be_had_by_another_tenant_of_the_same_file(registry: Registry) -> None:
    """Unless its own tenant goes, or gives it up, in the same breath."""
    await registry.apply(bare("a", "b"), FILE)
    await registry.create_key("a", sha("k"))
    with pytest.raises(TenantsConflict, match="'b' and 'a' have a key in common"):
        await registry.apply({**bare("a"), **filed(b="k")}, FILE)
    await registry.apply(filed(b="k"), FILE)
    (key,) = (await registry.read()).keys.values()
    assert (key.tenant, key.minted) == ("b", False)


async def test_a_dry_run_tells_what_the_apply_will_do_and_writes_nothing(registry: Registry, client: Any) -> None:
    await registry.apply({**bare("stays", "tightens"), **filed(goes="1", rekeys="2 3")}, FILE)
    await registry.create_key("stays", sha("m"))
    before = await contents(client)
    tighter = Tenant("tightens", Limits(64, on_overflow=OnOverflow.CLAMP), Quota(2))
    wanted = {**bare("stays"), "tightens": DeclaredTenant(tighter), **filed(rekeys="3 4", comes="5")}
    plan = await registry.apply(wanted, FILE, dry_run=True)
    assert await contents(client) == before
    assert names_of(plan) == [("comes",), ("rekeys", "tightens"), ("goes",)]
    done = await registry.apply(wanted, FILE)
    assert done.changes == plan.changes
    assert done.version == plan.version + 1
    assert (await registry.apply(wanted, FILE)).changes == ()
    with pytest.raises(TenantsConflict):
        await registry.apply(filed(x="m"), OTHER, dry_run=True)


async def test_records_that_cannot_be_read_shut_out_and_are_shown(registry: Registry, client: Any) -> None:
    """Another version wrote them, or a hand: no key is made for them, and they say that they are unreadable."""
    await client.hset(
        "{kvgate}:tenants", mapping={"broken": "no JSON", "odd": json.dumps({"owner": "x", "tenant": 7})}
    )
    await client.hset("{kvgate}:keys", mapping={sha("1"): "broken", sha("2"): "odd"})
    await client.hset("{kvgate}:keys:minted", sha("2"), "no JSON either")
    for name in ("broken", "odd"):
        with pytest.raises(Declared):
            await registry.create_key(name, sha("new"))
    holdings = await registry.read()
    assert [(record.owner, record.tenant) for record in holdings.tenants.values()] == [("?", None), ("x", None)]
    assert [(key.minted, key.created_s) for key in holdings.keys_of("odd")] == [(True, None)]
    assert (await registry.revoke_key(sha("2"))).tenant == "odd"
    (change,) = (await registry.remove("odd", "x")).removed
    assert change.before is not None
    assert change.before.tenant is None


async def test_a_key_whose_tenant_is_not_there_can_be_revoked(registry: Registry, client: Any) -> None:
    await client.hset("{kvgate}:keys", sha("1"), "nobody")
    assert (await registry.revoke_key(sha("1")[:12])).tenant == "nobody"
    assert (await registry.read()).keys == {}


async def test_flushed_scripts_are_loaded_again(registry: Registry, client: Any) -> None:
    """As after a failover (redis-py issue 3935)."""
    await registry.apply(bare("acme"), FILE)
    await client.script_flush()
    made = await registry.create_key("acme", sha("k"))
    await client.script_flush()
    await registry.revoke_key(made.key_id)
    await client.script_flush()
    await registry.remove("acme", FILE)


async def test_a_store_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    async with connect(f"unix://{tmp_path}/nothing.sock") as nowhere:
        registry = Registry(nowhere)
        for step in (
            registry.apply({}, FILE),
            registry.read(),
            registry.create_key("a", sha("k")),
            registry.revoke_key("0" * 12),
            registry.remove("a", FILE),
        ):
            with pytest.raises(StoreUnavailable, match="the store failed while"):
                await step


# -- races


async def test_of_two_applies_of_one_file_one_comes_out_whole(registry: Registry, url: str) -> None:
    """Every time, whichever was last."""
    async with connect(url) as connection:
        rival = Registry(connection)
        odd, even = filed(a="1", b="2", c="3"), filed(b="1", c="2", d="3")
        for _ in range(50):
            await asyncio.gather(registry.apply(odd, FILE), rival.apply(even, FILE))
            holdings = await registry.read()
            owners = {key: record.tenant for key, record in holdings.keys.items()}
            assert owners in (
                {sha("1"): "a", sha("2"): "b", sha("3"): "c"},
                {sha("1"): "b", sha("2"): "c", sha("3"): "d"},
            )
            assert set(owners.values()) == set(holdings.tenants)


async def test_no_key_outlives_the_tenant_that_it_was_made_for(registry: Registry, url: str) -> None:
    """A key made while a file is applied that removes its tenant: it is revoked with it, or never was."""
    async with connect(url) as connection:
        rival = Registry(connection)
        outcomes = set()
        for at in range(60):
            await registry.apply(bare("a"), FILE)
            steps = [rival.create_key("a", sha(f"k{at}")), registry.apply({}, FILE)]
            if at % 2:
                steps.reverse()
            made, _ = sorted(
                await asyncio.gather(*steps, return_exceptions=True), key=lambda found: hasattr(found, "changes")
            )
            outcomes.add(type(made).__name__)
            assert (await registry.read()).keys == {}
        assert outcomes <= {"KeyRecord", "UnknownTenant"}


# -- whatever happens


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """A story: files applied, keys made and revoked, tenants removed; it begins where there is something to lose."""
    names, keys = st.sampled_from("ab"), st.sampled_from("123")
    declared = st.dictionaries(names, st.none() | st.frozensets(keys, max_size=2), min_size=draw(st.integers(0, 2)))
    owners = st.sampled_from((FILE, FILE, FILE, OTHER))
    step = st.one_of(
        st.tuples(st.just("apply"), owners, declared),
        st.tuples(st.just("apply"), st.just(FILE), declared),
        st.tuples(st.just("create"), names, keys),
        st.tuples(st.just("revoke"), keys),
        st.tuples(st.just("remove"), names, owners),
    )
    begin: list[tuple[Any, ...]] = [("apply", FILE, {"a": None, "b": None}), ("create", "a", "1")]
    return begin + draw(st.lists(step, min_size=1, max_size=8))


class Model:
    """What the store should hold, by the rule said plainly."""

    def __init__(self) -> None:
        self.tenants: dict[str, tuple[str, bool]] = {}
        self.keys: dict[str, tuple[str, bool]] = {}

    def step(self, what: str, *given: Any) -> bool:
        """Whether it is done; what is refused changes nothing."""
        return bool(getattr(self, what)(*given))

    def apply(self, owner: str, declared: dict[str, frozenset[str] | None]) -> bool:
        mine = {name for name, (whose, _) in self.tenants.items() if whose == owner}
        kept = {
            key: (name, minted)
            for key, (name, minted) in self.keys.items()
            if name not in mine or (minted and name in declared and declared[name] is None)
        }
        wanted = [(key, name) for name, keys in declared.items() for key in keys or ()]
        if any(name in self.tenants and name not in mine for name in declared):
            return False
        if any(key in kept for key, _ in wanted) or len({key for key, _ in wanted}) < len(wanted):
            return False
        self.tenants = {name: it for name, it in self.tenants.items() if name not in mine}
        self.tenants |= {name: (owner, keys is not None) for name, keys in declared.items()}
        self.keys = kept | {key: (name, False) for key, name in wanted}
        return True

    def create(self, name: str, key: str) -> bool:
        if name not in self.tenants or self.tenants[name][1] or key in self.keys:
            return False
        self.keys[key] = (name, True)
        return True

    def revoke(self, key: str) -> bool:
        return self.keys.get(key, ("", False))[1] and bool(self.keys.pop(key))

    def remove(self, name: str, owner: str) -> bool:
        if self.tenants.get(name, ("", False))[0] != owner:
            return False
        del self.tenants[name]
        self.keys = {key: it for key, it in self.keys.items() if it[0] != name}
        return True


async def perform(registry: Registry, what: str, *given: Any) -> bool:
    try:
        match what:
            case "apply":
                owner, words = given
                declared = {
                    name: DeclaredTenant(Tenant(name), None if keys is None else tuple(map(sha, sorted(keys))))
                    for name, keys in words.items()
                }
                plan = await registry.apply(declared, owner, dry_run=True)
                assert (await registry.apply(declared, owner)).changes == plan.changes
                assert (await registry.apply(declared, owner)).changes == ()
            case "create":
                await registry.create_key(given[0], sha(given[1]))
            case "revoke":
                await registry.revoke_key(sha(given[0])[:12])
            case "remove":
                await registry.remove(*given)
    except NotDone:
        return False
    return True


def check(holdings: Holdings, model: Model) -> None:
    assert {name: (it.owner, it.keys_declared) for name, it in holdings.tenants.items()} == model.tenants
    assert {key.sha256: (key.tenant, key.minted) for key in holdings.keys.values()} == {
        sha(key): it for key, it in model.keys.items()
    }
    for key in holdings.keys.values():
        # Every key belongs to a live tenant, and is of the origin that this tenant's keys are of.
        assert holdings.tenants[key.tenant].keys_declared is not key.minted


@given(story=steps())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_the_store_holds_what_the_rule_says(url: str, story: list[tuple[Any, ...]]) -> None:
    """After each step of any story: the same answer, tenants and keys; and refused steps change nothing."""

    async def tell() -> None:
        async with emptied(url) as client:
            registry, model = Registry(client), Model()
            for step in story:
                before = await contents(client)
                done = await perform(registry, *step)
                assert done == model.step(*step), step
                check(await registry.read(), model)
                assert await client.hlen("{kvgate}:keys:minted") == sum(minted for _, minted in model.keys.values())
                if not done:
                    assert await contents(client) == before

    asyncio.run(tell())


async def test_more_than_the_whole_is_not_guaranteed_whoever_declares_it(registry: Registry) -> None:
    """The shares of two files together; nothing is written, a dry run says the same, and less is taken."""

    def owning(name: str, ratio: float) -> dict[str, DeclaredTenant]:
        return {name: DeclaredTenant(Tenant(name, share=Share(2.0, Tier.GUARANTEED, ratio)))}

    await registry.apply(owning("a", 0.6), FILE)
    for dry_run in (True, False):
        with pytest.raises(OverGuaranteed, match=r"together is 1.1, .* \(a 0.6, b 0.5\)"):
            await registry.apply(owning("b", 0.5), OTHER, dry_run=dry_run)
    await registry.apply(owning("a", 0.5), FILE)
    await registry.apply(owning("b", 0.5), OTHER)
    found = await registry.read()
    assert [record.tenant and record.tenant.share.guaranteed_ratio for record in found.tenants.values()] == [0.5, 0.5]
