"""The profile: what is known of an engine, and the safe guess where nothing tells."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.pool import KvPool
from kvgate.core.profile import (
    EngineProfile,
    Fact,
    KvSettings,
    Source,
    StartupFacts,
    Topology,
    resolve_kv,
)

PROFILE = EngineProfile(
    kind="llama.cpp",
    n_ctx_slot=Fact(1536, Source.PROPS),
    total_slots=Fact(6, Source.PROPS),
    topology=Fact(Topology.DIVIDED, Source.LOG),
    pool_tokens=Fact(9216, Source.LOG),
    instance="<__media_a__>",
    build="b11549",
)
NOTHING_SET = KvSettings()
UNIFIED_LOG = StartupFacts(n_slots=3, n_ctx_slot=700, kv_unified=True, pool_tokens=2304)
DIVIDED_LOG = StartupFacts(n_slots=6, n_ctx_slot=1536, kv_unified=False)


def test_without_any_word_the_guess_is_one_pool_of_one_slots_size() -> None:
    """Safe whatever the truth is: HTTP alone does not tell that slots share a pool."""
    topology, pool = resolve_kv(1536, 6, None, NOTHING_SET)
    assert topology == Fact(Topology.UNIFIED, Source.ASSUMED)
    assert pool == Fact(1536, Source.ASSUMED)


def test_a_log_that_says_divided_gives_every_slot_its_own_cells() -> None:
    """`-c 8192 -np 6`: 6 x 1536, as the engine says, not 8192."""
    topology, pool = resolve_kv(1536, 6, DIVIDED_LOG, NOTHING_SET)
    assert topology == Fact(Topology.DIVIDED, Source.LOG)
    assert pool == Fact(9216, Source.LOG)


def test_a_log_that_says_unified_tells_the_pools_size() -> None:
    """`--kv-unified-per-slot 700`: the pool is larger than a slot, and only the log says how large."""
    topology, pool = resolve_kv(700, 3, UNIFIED_LOG, NOTHING_SET)
    assert topology == Fact(Topology.UNIFIED, Source.LOG)
    assert pool == Fact(2304, Source.LOG)


def test_a_quiet_log_that_says_unified_leaves_the_pool_at_one_slots_size() -> None:
    """At verbosity 3 the size is not told; a shared pool is never smaller than what a slot advertises."""
    topology, pool = resolve_kv(700, 3, replace(UNIFIED_LOG, pool_tokens=None), NOTHING_SET)
    assert topology == Fact(Topology.UNIFIED, Source.LOG)
    assert pool == Fact(700, Source.ASSUMED)


@pytest.mark.parametrize(("n_ctx_slot", "slots"), [(1536, 4), (1024, 6)], ids=["slots", "n_ctx_slot"])
def test_a_log_of_another_engine_is_not_believed(n_ctx_slot: int, slots: int) -> None:
    """Slots and context must be those that the engine itself shows over HTTP."""
    topology, _ = resolve_kv(n_ctx_slot, slots, DIVIDED_LOG, NOTHING_SET)
    assert topology == Fact(Topology.UNIFIED, Source.ASSUMED)


def test_a_setting_outranks_the_log() -> None:
    """The operator knows; and what the log says of the other topology's pool is then not used."""
    topology, pool = resolve_kv(700, 3, UNIFIED_LOG, KvSettings(Topology.DIVIDED))
    assert (topology, pool) == (Fact(Topology.DIVIDED, Source.SETTING), Fact(2100, Source.SETTING))
    told = replace(DIVIDED_LOG, pool_tokens=9216)
    topology, pool = resolve_kv(1536, 6, told, KvSettings(Topology.UNIFIED))
    assert (topology, pool) == (Fact(Topology.UNIFIED, Source.SETTING), Fact(1536, Source.ASSUMED))


def test_a_set_pool_size_outranks_the_logs() -> None:
    """`engine.pool_tokens` is taken as it is."""
    _, pool = resolve_kv(700, 3, UNIFIED_LOG, KvSettings(pool_tokens=1400))
    assert pool == Fact(1400, Source.SETTING)


def test_a_set_pool_below_one_slot_is_an_error() -> None:
    """The message names the setting and both figures."""
    with pytest.raises(ValueError, match=r"engine\.pool_tokens = 600 .* n_ctx_slot = 700"):
        resolve_kv(700, 3, None, KvSettings(pool_tokens=600))


@pytest.mark.parametrize("topology", [Topology.DIVIDED, None], ids=["set", "logged"])
def test_a_set_pool_size_for_a_divided_cache_is_an_error(topology: Topology | None) -> None:
    """There is no shared pool to size; the operator meant something else."""
    with pytest.raises(ValueError, match="divides its cache"):
        resolve_kv(1536, 6, DIVIDED_LOG, KvSettings(topology, pool_tokens=9216))


@given(
    n_ctx_slot=st.integers(1, 100_000),
    slots=st.integers(1, 64),
    facts=st.none()
    | st.builds(
        StartupFacts,
        n_slots=st.none() | st.integers(1, 64),
        n_ctx_slot=st.none() | st.integers(1, 100_000),
        kv_unified=st.none() | st.booleans(),
        pool_tokens=st.none() | st.integers(1, 1_000_000),
    ),
    same=st.booleans(),
)
def test_a_pool_holds_at_least_one_slot_and_at_most_all(
    n_ctx_slot: int, slots: int, facts: StartupFacts | None, same: bool
) -> None:
    """Whatever a log says, one full slot fits; and only proof makes the pool larger than that."""
    if facts is not None and same:
        facts = replace(facts, n_slots=slots, n_ctx_slot=n_ctx_slot)
    topology, pool = resolve_kv(n_ctx_slot, slots, facts, NOTHING_SET)
    assert pool.value >= n_ctx_slot
    if topology.value is Topology.DIVIDED:
        assert pool.value == n_ctx_slot * slots
    if pool.value > n_ctx_slot:
        assert facts is not None
        assert (pool.source, facts.kv_unified is None) == (Source.LOG, False)


@pytest.mark.parametrize(
    ("topology", "shared"), [(Topology.DIVIDED, False), (Topology.UNIFIED, True)], ids=["divided", "unified"]
)
def test_the_pool_of_a_profile_is_what_it_found(topology: Topology, shared: bool) -> None:
    """Only a unified cache shares a prompt among n answers; headroom is rounded down to whole tokens."""
    profile = replace(PROFILE, topology=Fact(topology, Source.LOG))
    assert profile.pool(margin_tokens=16, headroom_ratio=0.1) == KvPool(
        tokens=9216, slots=6, tokens_per_slot=1536, prompt_shared=shared, margin_tokens=16, headroom_tokens=921
    )


def test_kv_precision_is_one_word_and_unknown_where_nothing_told_it() -> None:
    """It stands in a header and on every quality report."""
    f16, q8 = Fact("f16", Source.LOG), Fact("q8_0", Source.LOG)
    assert PROFILE.kv_type == "unknown"
    assert replace(PROFILE, kv_type_k=f16).kv_type == "unknown"
    assert replace(PROFILE, kv_type_k=f16, kv_type_v=f16).kv_type == "f16"
    assert replace(PROFILE, kv_type_k=f16, kv_type_v=q8).kv_type == "f16/q8_0"


def test_a_fact_says_where_it_comes_from() -> None:
    """So that an operator can tell a reading from a guess."""
    assert str(Fact(1536, Source.PROPS)) == "1536 (props)"
    assert str(Fact(Topology.UNIFIED, Source.ASSUMED)) == "unified (assumed)"


DECIDES: dict[str, Any] = {
    "kind": "vllm",
    "n_ctx_slot": Fact(1024, Source.PROPS),
    "total_slots": Fact(4, Source.PROPS),
    "topology": Fact(Topology.UNIFIED, Source.LOG),
    "build": "b0-unknown",
    "model_path": "/models/other.gguf",
    "model_ftype": "Q4_1",
    "model_bytes": 1,
    "n_params": 2,
    "n_vocab": 3,
    "chat_template_sha256": "00",
    "kv_type_k": Fact("q8_0", Source.LOG),
    "prompt_cache_mib": Fact(0, Source.LOG),
    "idle_slots_cached": Fact(False, Source.LOG),
    "context_shift": Fact(False, Source.LOG),
}
"""What two engines must agree in to compute alike, each with another value than `PROFILE` has."""

DECIDES_NOT: dict[str, Any] = {
    "instance": "<__media_b__>",
    "pool_tokens": Fact(18432, Source.SETTING),
    "models": ("alias",),
    "n_ctx_train": 8192,
    "slots_visible": False,
    "kv_bytes_per_token": 23040.0,
}
"""What may differ between two engines that compute alike."""

KV_TOLD = replace(PROFILE, kv_type_k=Fact("f16", Source.LOG), kv_type_v=Fact("f16", Source.LOG))


@pytest.mark.parametrize("name", DECIDES)
def test_a_fingerprint_changes_with_what_decides_the_answers(name: str) -> None:
    """The build alone is no fingerprint: some builds call themselves b0-unknown."""
    assert replace(KV_TOLD, **{name: DECIDES[name]}).fingerprint != KV_TOLD.fingerprint


@pytest.mark.parametrize("name", DECIDES_NOT)
def test_a_fingerprint_survives_a_restart(name: str) -> None:
    """The process's own identity, and how much of it is visible, change no answer."""
    assert replace(KV_TOLD, **{name: DECIDES_NOT[name]}).fingerprint == KV_TOLD.fingerprint


def test_where_a_fact_comes_from_is_no_part_of_the_fingerprint() -> None:
    """The same engine, seen with and without its log's word on the topology, is the same engine."""
    seen = replace(KV_TOLD, topology=Fact(Topology.DIVIDED, Source.SETTING))
    assert seen.fingerprint == KV_TOLD.fingerprint


def test_every_fact_of_a_profile_is_judged() -> None:
    """A new field of the profile must be put on one of the two lists above."""
    facts = {field.name for field in fields(EngineProfile) if field.init}
    assert facts == DECIDES.keys() | DECIDES_NOT.keys() | {"kv_type_v"}
