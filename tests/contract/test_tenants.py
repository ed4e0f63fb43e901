"""Tenants on every real server to be had: applied all or not at all, seen by every gate within a second."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable
from kvgate.store.records import Names, decode_tenant, encode_tenant
from kvgate.store.registry import Applied, DeclaredTenant, TenantsConflict
from kvgate.store.tenants import ValkeyTenants

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

FILE = "tenants.toml"


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def declare(**keys: str) -> dict[str, DeclaredTenant]:
    """Tenants by name, each with the keys named in its words."""
    return {name: DeclaredTenant(Tenant(name), tuple(map(sha, words.split()))) for name, words in keys.items()}


def did(applied: Applied) -> tuple[int, str, str, str]:
    """The version, and the names of those added, changed and removed."""
    kinds = (applied.added, applied.changed, applied.removed)
    added, changed, removed = (" ".join(change.name for change in kind) for kind in kinds)
    return applied.version, added, changed, removed


@pytest.fixture
def tenants(client: Any) -> ValkeyTenants:
    return ValkeyTenants(client)


@pytest.fixture
async def watched(store: EmbeddedValkey) -> AsyncIterator[ValkeyTenants]:
    """Another gate's view, kept current as a gate keeps it."""
    connection = connect(store.url)
    view = ValkeyTenants(connection)
    watch = asyncio.create_task(view.watch())
    yield view
    watch.cancel()
    await asyncio.wait([watch])
    await connection.aclose()


async def until(holds: Callable[[], bool], within_s: float = 1.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        await asyncio.sleep(0.01)


def kill(store: EmbeddedValkey) -> None:
    assert store.pid is not None
    os.kill(store.pid, signal.SIGKILL)


# What is written of a tenant


counts = st.integers(0, 2**40)
tenant_values = st.builds(
    Tenant,
    name=st.text(),
    limits=st.builds(
        Limits,
        context_tokens_max=st.none() | counts,
        output_tokens_min=counts,
        output_tokens_default=counts,
        on_overflow=st.sampled_from(OnOverflow),
    ),
    quota=st.builds(
        Quota,
        concurrency_max=st.none() | counts,
        kv_tokens_max=st.none() | counts,
        queue_max=counts,
        queue_timeout_s=st.floats(0, 1e9),
    ),
    models=st.none() | st.frozensets(st.text()),
)


@given(tenant_values)
def test_a_tenant_comes_back_as_it_went(tenant: Tenant) -> None:
    written = json.dumps(encode_tenant(tenant))
    assert decode_tenant(json.loads(written)) == tenant


@given(st.frozensets(st.text(), min_size=2))
def test_equal_tenants_are_written_alike(models: frozenset[str]) -> None:
    """Else every gate that starts would change the store."""
    backwards = frozenset(sorted(models, reverse=True))
    assert json.dumps(encode_tenant(Tenant("a", models=models))) == json.dumps(
        encode_tenant(Tenant("a", models=backwards))
    )


def test_what_a_later_version_wrote_is_read_with_defaults() -> None:
    """Unknown fields are ignored, an unknown word is the strict default: old and new gates share a store."""
    values = encode_tenant(Tenant("a", Limits(100, on_overflow=OnOverflow.CLAMP), Quota(3)))
    values["limits"] |= {"on_overflow": "compress", "later": 1}
    values |= {"tier": "spot"}
    del values["quota"]["queue_max"]
    assert decode_tenant(values) == Tenant("a", Limits(100), Quota(3))


@pytest.mark.parametrize(
    "values",
    [None, [], {}, {"name": 7}, {"name": "a", "quota": {"kv_tokens_max": "many"}}, {"name": "a", "limits": [1]}],
)
def test_nonsense_is_not_read_as_no_limit(values: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode_tenant(values)


# apply


async def test_what_is_declared_is_found(tenants: ValkeyTenants) -> None:
    tenant = Tenant("search", Limits(2048, on_overflow=OnOverflow.CLAMP), Quota(2), models=frozenset({"m"}))
    declared = {"search": DeclaredTenant(tenant, (sha("one"), sha("two")))}
    assert did(await tenants.apply(declared, FILE)) == (1, "search", "", "")
    assert tenants.by_key(sha("one")) == tenants.by_key(sha("two")) == tenants.by_name("search") == tenant
    assert tenants.by_key(sha("three")) is None
    assert tenants.by_name("other") is None
    assert tenants.names() == ("search",)


async def test_declaring_the_same_again_changes_nothing(tenants: ValkeyTenants) -> None:
    await tenants.apply(declare(a="1", b="2"), FILE)
    assert await tenants.apply(declare(b="2", a="1"), FILE) == Applied(1)


async def test_what_vanished_from_the_declaration_is_removed(tenants: ValkeyTenants) -> None:
    """And only of this owner."""
    await tenants.apply(declare(c="3"), "admin")
    await tenants.apply(declare(a="1", b="2"), FILE)
    assert did(await tenants.apply(declare(b="2"), FILE)) == (3, "", "", "a")
    assert tenants.names() == ("b", "c")
    assert tenants.by_key(sha("1")) is None
    assert did(await tenants.apply({}, FILE)) == (4, "", "", "b")
    assert tenants.names() == ("c",)
    assert tenants.by_key(sha("3")) == Tenant("c")


async def test_keys_change_hands_within_one_declaration(tenants: ValkeyTenants) -> None:
    await tenants.apply(declare(a="1 2", b="3", gone="4"), FILE)
    assert did(await tenants.apply(declare(a="3", b="1 4"), FILE)) == (2, "", "a b", "gone")
    assert [tenants.by_key(sha(key)) for key in "1234"] == [Tenant("b"), None, Tenant("a"), Tenant("b")]


async def test_new_limits_under_old_keys_are_a_change(tenants: ValkeyTenants) -> None:
    await tenants.apply(declare(a="1"), FILE)
    tighter = Tenant("a", Limits(64))
    assert did(await tenants.apply({"a": DeclaredTenant(tighter, (sha("1"),))}, FILE)) == (2, "", "a", "")
    assert tenants.by_key(sha("1")) == tighter


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (declare(x="new", a="1", b="1"), "'b' and 'a' have a key in common"),
        (declare(x="new", a="admin-key"), "'a' and 'admin' have a key in common"),
        (declare(x="new", admin="2"), "'admin' is declared by 'api'"),
        ({"x": DeclaredTenant(Tenant("y"))}, "'y' is declared under the name 'x'"),
        ({"x": DeclaredTenant(Tenant("x"), ("sk-secret",))}, "64 lower-case hex digits"),
        ({"x": DeclaredTenant(Tenant("x"), (sha("1").upper(),))}, "64 lower-case hex digits"),
    ],
)
async def test_a_conflict_leaves_nothing_behind(
    tenants: ValkeyTenants, client: Any, declared: dict[str, DeclaredTenant], says: str
) -> None:
    await tenants.apply(declare(admin="admin-key"), "api")
    await tenants.apply(declare(old="old-key"), FILE)
    before = await client.hgetall("{kvgate}:tenants"), await client.hgetall("{kvgate}:keys")
    with pytest.raises(TenantsConflict) as caught:
        await tenants.apply(declared, FILE)
    assert says in str(caught.value)
    assert "sk-secret" not in str(caught.value)
    assert (await client.hgetall("{kvgate}:tenants"), await client.hgetall("{kvgate}:keys")) == before
    assert await client.get("{kvgate}:tenants:version") == b"2"


async def test_of_two_owners_who_want_one_key_one_gets_it(tenants: ValkeyTenants) -> None:
    both = await asyncio.gather(
        tenants.apply(declare(a="1"), "a.toml"), tenants.apply(declare(b="1"), "b.toml"), return_exceptions=True
    )
    assert [type(answer) for answer in both if isinstance(answer, BaseException)] == [TenantsConflict]
    assert len(tenants.names()) == 1


async def test_nobody_sees_half_an_apply(tenants: ValkeyTenants, store: EmbeddedValkey) -> None:
    """Whatever a gate loads while files are applied is one whole declaration."""
    odd = declare(**{f"odd{number}": f"key{number}" for number in range(50)})
    even = declare(**{f"even{number}": f"key{number}" for number in range(50)})
    seen = set()

    async def look() -> None:
        async with connect(store.url) as connection:
            view = ValkeyTenants(connection)
            while True:
                if await view.refresh():
                    owners = [view.by_key(sha(f"key{number}")) for number in range(50)]
                    seen.add((view.names(), tuple(owner.name for owner in owners if owner)))

    looking = asyncio.create_task(look())
    for _ in range(30):
        await tenants.apply(odd, FILE)
        await tenants.apply(even, FILE)
    looking.cancel()
    await asyncio.wait([looking])
    whole = {(tuple(sorted(names)), tuple(names)) for names in (odd, even)}
    assert seen - {((), ())} == whole


async def test_flushed_scripts_are_loaded_again(tenants: ValkeyTenants, client: Any) -> None:
    """As after a failover (redis-py issue 3935)."""
    await tenants.apply(declare(a="1"), FILE)
    await client.script_flush()
    assert did(await tenants.apply(declare(a="1 2"), FILE)) == (2, "", "a", "")


async def test_leftovers_and_strangers_in_the_store_do_not_matter(
    tenants: ValkeyTenants, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A key without tenant is free to take; a record that cannot be read shuts out its own tenant alone."""
    await client.hset("{kvgate}:keys", mapping={sha("1"): "nobody", sha("2"): "broken"})
    await client.hset("{kvgate}:tenants", "broken", "no JSON")
    await tenants.apply(declare(a="1"), FILE)
    assert tenants.by_key(sha("1")) == Tenant("a")
    assert tenants.by_key(sha("2")) is None
    assert [record.getMessage() for record in caplog.records] == ["tenant unreadable"]
    with pytest.raises(TenantsConflict, match="'broken' is declared by"):
        await tenants.apply(declare(broken="2"), FILE)


async def test_two_prefixes_are_two_worlds(tenants: ValkeyTenants, client: Any) -> None:
    other = ValkeyTenants(client, names=Names("{other}"))
    await tenants.apply(declare(a="1"), FILE)
    await other.apply(declare(b="1"), "other.toml")
    assert tenants.by_key(sha("1")) == Tenant("a")
    assert other.by_key(sha("1")) == Tenant("b")


async def test_a_cancellation_is_never_lost(tenants: ValkeyTenants) -> None:
    """Wherever in a command it comes (with a socket timeout, Python 3.11 loses most of them)."""

    async def look_for_ever() -> None:
        while True:
            await tenants.refresh()

    for steps in range(200):
        looking = asyncio.create_task(look_for_ever())
        for _ in range(steps % 40):
            await asyncio.sleep(0)
        looking.cancel()
        _, running = await asyncio.wait([looking], timeout=5)
        assert not running
    assert did(await tenants.apply(declare(a="1"), FILE)) == (1, "a", "", "")


async def test_a_store_that_is_not_there_is_said_to_be(tenants: ValkeyTenants, store: EmbeddedValkey) -> None:
    await store.stop()
    with pytest.raises(StoreUnavailable, match="the store failed while applying tenants"):
        await tenants.apply(declare(a="1"), FILE)


# watch


async def test_a_revoked_key_is_refused_within_a_second(tenants: ValkeyTenants, watched: ValkeyTenants) -> None:
    await tenants.apply(declare(a="1 2"), FILE)
    await until(lambda: watched.by_key(sha("1")) is not None)
    await tenants.apply(declare(a="2"), FILE)
    await until(lambda: watched.by_key(sha("1")) is None)
    assert watched.by_key(sha("2")) == Tenant("a")


async def test_an_outage_leaves_the_last_snapshot_in_force(
    tenants: ValkeyTenants, watched: ValkeyTenants, store: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, with the moment from which on changes may be missed; then the watch goes on."""
    caplog.set_level(logging.INFO, "kvgate.store.tenants")
    await tenants.apply(declare(a="1"), FILE)
    await until(lambda: watched.by_key(sha("1")) is not None)
    await asyncio.sleep(1.1)  # appendfsync everysec
    before = time.monotonic()
    kill(store)
    await until(lambda: watched.stale_since is not None, within_s=5)
    assert watched.stale_since is not None
    assert before - 1 < watched.stale_since < time.monotonic()
    await asyncio.sleep(1)
    assert watched.by_key(sha("1")) == Tenant("a")
    assert [record.getMessage() for record in caplog.records] == ["store out, tenants stay as last seen"]
    await store.start()
    await until(lambda: watched.stale_since is None, within_s=5)
    await tenants.apply(declare(b="2"), FILE)
    await until(lambda: watched.by_key(sha("2")) is not None)
    assert watched.by_key(sha("1")) is None
    assert caplog.records[-1].getMessage() == "store back, tenants are current"


async def test_after_an_outage_an_equal_version_is_not_believed(
    tenants: ValkeyTenants, watched: ValkeyTenants, store: EmbeddedValkey
) -> None:
    """A replica that took over may count the same number of other changes."""
    await tenants.apply(declare(a="1"), FILE)
    await until(lambda: watched.by_key(sha("1")) is not None)
    kill(store)
    await until(lambda: watched.stale_since is not None, within_s=5)
    shutil.rmtree(store.data_dir / "appendonlydir")
    await store.start()
    assert (await tenants.apply(declare(b="2"), FILE)).version == 1
    await until(lambda: watched.by_key(sha("2")) is not None, within_s=5)
    assert watched.by_key(sha("1")) is None


async def test_a_store_that_hangs_does_not_hang_the_watch(
    tenants: ValkeyTenants, watched: ValkeyTenants, store: EmbeddedValkey
) -> None:
    await tenants.apply(declare(a="1"), FILE)
    await until(lambda: watched.by_key(sha("1")) is not None)
    assert store.pid is not None
    os.kill(store.pid, signal.SIGSTOP)
    await until(lambda: watched.stale_since is not None, within_s=5)
    assert watched.by_key(sha("1")) == Tenant("a")
    os.kill(store.pid, signal.SIGCONT)
    await until(lambda: watched.stale_since is None, within_s=5)
