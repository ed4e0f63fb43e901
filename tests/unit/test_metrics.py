"""What Prometheus sees: counters of what happened, gauges of what is, and labels that cannot grow with traffic."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvgate.core.ask import Size, Usage
from kvgate.core.engine_state import Change, EngineState
from kvgate.core.fairness import FairRule
from kvgate.core.foreign import ForeignWatch
from kvgate.core.ledger import Freed, Ledger, LedgerView, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.profile import EngineProfile, Fact, Source, Topology
from kvgate.core.tenant import Quota, Share
from kvgate.core.trim_search import Trimmed
from kvgate.metrics import Metrics, merged
from kvgate.ports import RequestRecord
from kvgate.store.local_ledger import LocalLedger
from tests.unit.doubles import ManualClock, profile

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = ("input", "cached", "output")

RECORD = RequestRecord(
    request_id="r1",
    tenant="acme",
    dialect="openai_chat",
    path="/v1/chat/completions",
    status=200,
    verdict="admit",
    reason="",
    duration_s=0.7,
    proof="sum",
    prompt_tokens=10,
    queued_s=0.02,
    usage=Usage(10, 5, 0),
)


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample that a scrape finds."""
    return scraped(metrics.exposition())


def scraped(exposition: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for line in exposition.decode().splitlines():
        if line.startswith("#"):
            continue
        name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
        found[name, frozenset(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or ""))] = float(value)
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, frozenset(labels.items())))


def labels_of(metrics: Metrics) -> Mapping[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, labels in samples(metrics):
        for name, label in labels:
            found.setdefault(name, set()).add(label)
    return found


# -- counters


def test_a_request_is_counted_by_how_it_ended() -> None:
    metrics = Metrics()
    for record in (
        RECORD,
        RECORD,
        replace(RECORD, status=400, verdict="reject", reason="prompt_overflow", usage=None),
    ):
        metrics.request(record)
    common = {"tenant": "acme", "dialect": "openai_chat"}
    assert value(metrics, "kvgate_requests_total", **common, verdict="admit", reason="", status="200") == 2
    rejected = {"verdict": "reject", "reason": "prompt_overflow", "status": "400"}
    assert value(metrics, "kvgate_requests_total", **common, **rejected) == 1
    assert value(metrics, "kvgate_request_seconds_count", dialect="openai_chat", stream="false") == 3
    assert value(metrics, "kvgate_request_seconds_sum", dialect="openai_chat", stream="false") == 0.7 * 3


def test_trims_are_counted_by_tenant_and_how() -> None:
    """How often, and how many tokens."""
    metrics = Metrics()
    for how, tokens in (("oldest-first", 40), ("oldest-first", 2), ("left", 7)):
        metrics.request(replace(RECORD, verdict="trim", trimmed=Trimmed(how, 3, tokens, 2)))
    metrics.request(RECORD)
    assert value(metrics, "kvgate_trims_total", tenant="acme", how="oldest-first") == 2
    assert value(metrics, "kvgate_trimmed_tokens_total", tenant="acme", how="oldest-first") == 42
    assert value(metrics, "kvgate_trimmed_tokens_total", tenant="acme", how="left") == 7


def test_tokens_are_those_of_the_engines_usage() -> None:
    metrics = Metrics()
    metrics.request(replace(RECORD, usage=Usage(10, 5, 3)))
    metrics.request(replace(RECORD, usage=None))
    for kind, tokens in (("prompt", 10), ("output", 5), ("cached", 3)):
        assert value(metrics, "kvgate_tokens_total", tenant="acme", kind=kind) == tokens


def test_only_admitted_requests_have_waited() -> None:
    metrics = Metrics()
    metrics.request(RECORD)
    metrics.request(replace(RECORD, queued_s=None))
    assert value(metrics, "kvgate_queue_seconds_count", tenant="acme") == 1


def test_requests_are_counted_by_what_counted_them() -> None:
    """Those that came as far as the arithmetic."""
    metrics = Metrics()
    for proof in ("sum", "bound", "sum", ""):
        metrics.request(replace(RECORD, proof=proof))
    assert value(metrics, "kvgate_counts_total", proof="sum") == 2
    assert value(metrics, "kvgate_counts_total", proof="bound") == 1
    assert value(metrics, "kvgate_counts_total", proof="") is None


def test_what_must_stay_0_is_counted_when_it_does_not() -> None:
    """Drift, whichever way; reuse that was off; and hang-ups beside them."""
    metrics = Metrics()
    metrics.request(RECORD)
    assert value(metrics, "kvgate_count_drift_total", dialect="openai_chat", proof="sum") == 0
    assert value(metrics, "kvgate_reuse_violations_total", tenant="acme") == 0
    for drift_tokens in (1, -7):
        metrics.request(replace(RECORD, count_drift_tokens=drift_tokens))
    metrics.request(replace(RECORD, reuse_violation=True, hung_up=True))
    assert value(metrics, "kvgate_count_drift_total", dialect="openai_chat", proof="sum") == 2
    assert value(metrics, "kvgate_reuse_violations_total", tenant="acme") == 1
    assert value(metrics, "kvgate_hangups_total", tenant="acme") == 1


def test_requests_are_counted_by_the_reuse_that_they_had() -> None:
    """Who was never admitted had none to speak of."""
    metrics = Metrics()
    for reuse in ("off", "on", "on", ""):
        metrics.request(replace(RECORD, reuse=reuse))
    assert [value(metrics, "kvgate_reuse_total", tenant="acme", reuse=reuse) for reuse in ("off", "on", "")] == [
        1,
        2,
        None,
    ]


def test_engine_overflows_are_remembered_for_readiness() -> None:
    metrics = Metrics()
    metrics.request(RECORD)
    metrics.request(replace(RECORD, reason="engine_overflow"))
    assert metrics.overflows == 1


def test_an_engine_that_was_replaced_is_counted() -> None:
    """By what it became; every word of the table is there from the start, so that an alert can count on it."""
    metrics = Metrics()
    for change in Change:
        assert value(metrics, "kvgate_engine_changes_total", what=change.label) == 0
    metrics.engine_changed(Change.SMALLER, 1000.5)
    assert value(metrics, "kvgate_engine_changes_total", what="smaller") == 1
    assert value(metrics, "kvgate_engine_changes_total", what="restarted") == 0


def test_no_label_grows_with_traffic() -> None:
    """A thousand requests with ids, paths and sizes of their own leave as many samples as one."""
    metrics = Metrics()
    metrics.request(replace(RECORD, stream=True))
    before = len(samples(metrics))
    for at in range(1000):
        metrics.request(
            replace(
                RECORD,
                stream=True,
                request_id=f"r{at}",
                path=f"/{at}",
                prompt_tokens=at,
                usage=Usage(at, 1),
                output_limit=at,
                n_ctx_slot=at,
            )
        )
    assert len(samples(metrics)) == before
    assert {"request_id", "path", "model", "key"}.isdisjoint(labels_of(metrics))


def test_a_request_of_nobody_has_a_dash_for_a_tenant() -> None:
    """Unknown keys and paths are one label together, whatever was sent."""
    metrics = Metrics()
    for _ in range(50):
        metrics.request(
            replace(RECORD, tenant="-", dialect="-", path="-", status=403, verdict="", reason="path_forbidden")
        )
    assert labels_of(metrics)["tenant"] == {"-"}
    assert labels_of(metrics)["dialect"] == {"-"}


def test_two_gates_in_one_process_do_not_share_counters() -> None:
    first, second = Metrics(), Metrics()
    first.request(RECORD)
    assert value(second, "kvgate_tokens_total", tenant="acme", kind="prompt") is None


# -- gauges


class World:
    """What the gauges read."""

    def __init__(self) -> None:
        self.profile: EngineProfile | None = None
        self.view: LedgerView | None = None
        self.ready = False
        self.connections = 0
        self.metrics = Metrics()
        self.metrics.watch(lambda: self.profile, lambda: self.view, lambda: self.ready, lambda: self.connections)


def test_gauges_are_read_at_each_scrape() -> None:
    """Never incremented: no cancelled request can leave one behind."""
    world = World()
    assert value(world.metrics, "kvgate_ready") == 0
    world.ready, world.connections = True, 3
    assert value(world.metrics, "kvgate_ready") == 1
    assert value(world.metrics, "kvgate_upstream_connections") == 3


def test_the_least_context_is_the_setting_that_is_in_force() -> None:
    """Read at each scrape, since a reload may change it; 0 where there is none."""
    least: int | None = None
    metrics = Metrics()
    metrics.watch(lambda: None, lambda: None, lambda: True, lambda: 0, context_tokens_min=lambda: least)
    assert value(metrics, "kvgate_engine_context_min_tokens") == 0
    least = 4096
    assert value(metrics, "kvgate_engine_context_min_tokens") == 4096


def test_every_state_has_a_sample_and_one_of_them_is_1() -> None:
    """An alert on one state needs no other: those that the engine is not in are 0, not absent."""
    state = EngineState.SERVING
    metrics = Metrics()
    metrics.watch_life(lambda: state, ForeignWatch)
    for state in EngineState:
        found = {one: value(metrics, "kvgate_engine_state", state=one.label) for one in EngineState}
        assert found == {one: float(one is state) for one in EngineState}


def test_a_change_and_foreign_traffic_have_their_figures() -> None:
    metrics, foreign = Metrics(), ForeignWatch()
    metrics.watch_life(lambda: EngineState.SERVING, lambda: foreign)
    assert value(metrics, "kvgate_engine_changed_timestamp_seconds") == 0
    assert value(metrics, "kvgate_foreign_sightings_total") == value(metrics, "kvgate_foreign_slots") == 0
    metrics.engine_changed(Change.SMALLER, 1000.5)
    foreign = ForeignWatch(slots=2, sightings=3)
    assert value(metrics, "kvgate_engine_changed_timestamp_seconds") == 1000.5
    assert value(metrics, "kvgate_foreign_slots") == 2
    assert value(metrics, "kvgate_foreign_sightings_total") == 3


def test_an_engine_that_was_never_seen_has_no_gauges() -> None:
    """Rather none than zeros: an alert on a small context must not fire for an engine that is starting."""
    world = World()
    names = {name for name, _ in samples(world.metrics)}
    assert not any(
        name.startswith(("kvgate_engine_n_ctx", "kvgate_engine_info", "kvgate_kv", "kvgate_slots")) for name in names
    )


def test_the_engine_tells_who_it_is() -> None:
    world = World()
    world.profile = profile(512, 4, kv_type_k=Fact("q8_0", Source.LOG), kv_type_v=Fact("f16", Source.LOG))
    assert value(world.metrics, "kvgate_engine_n_ctx_slot_tokens") == 512
    assert value(world.metrics, "kvgate_engine_topology_assumed") == 0
    labels = {
        "kind": "double",
        "build": "b1",
        "fingerprint": world.profile.fingerprint,
        "topology": "divided",
        "topology_source": "setting",
        "kv_type": "q8_0/f16",
    }
    assert value(world.metrics, "kvgate_engine_info", **labels) == 1
    world.profile = profile(512, 4, topology=Fact(Topology.UNIFIED, Source.ASSUMED))
    assert value(world.metrics, "kvgate_engine_topology_assumed") == 1


def test_an_engine_that_was_replaced_leaves_no_gauge_behind() -> None:
    world = World()
    world.profile = profile(build="b1")
    samples(world.metrics)
    world.profile = profile(build="b2")
    assert labels_of(world.metrics)["build"] == {"b2"}


async def test_the_ledgers_gauges_are_the_ledgers_view() -> None:
    """Held, queued and draining by tenant, at the moment of the scrape."""
    world = World()
    world.profile = profile(512, 2)
    ledger = LocalLedger(ManualClock(), 60)
    pool = world.profile.pool()
    for lease_id, tenant, sequences in (("a", "acme", 1), ("b", "beta", 1)):
        await ledger.reserve(Reservation(lease_id, tenant, Quota(), Size(90, 10, sequences)), pool)
    ledger.hand_over("b")
    await ledger.settle("b", ended=False)
    world.view = ledger.view()
    assert value(world.metrics, "kvgate_kv_pool_tokens") == 1024
    assert value(world.metrics, "kvgate_slots") == 2
    assert value(world.metrics, "kvgate_kv_held_tokens", tenant="acme") == 100
    assert value(world.metrics, "kvgate_kv_held_tokens", tenant="beta") == 100
    assert value(world.metrics, "kvgate_slots_held", state="running") == 1
    assert value(world.metrics, "kvgate_slots_held", state="draining") == 1
    assert value(world.metrics, "kvgate_queue_depth", tenant="acme") is None
    assert value(world.metrics, "kvgate_drains_overdue") == 0
    await ledger.settle("a", ended=True)
    world.view = ledger.view()
    assert value(world.metrics, "kvgate_kv_held_tokens", tenant="acme") is None


def test_waiting_requests_are_shown_by_tenant() -> None:
    world = World()
    world.view = LedgerView(
        pool=profile().pool(),
        held_tokens=7,
        running=1,
        draining=0,
        waiting=3,
        running_by_tenant=(("acme", 1),),
        waiting_by_tenant=(("acme", 2), ("beta", 1)),
        held_tokens_by_tenant=(("acme", 7),),
        drains_overdue=4,
        leases_expired=2,
    )
    assert value(world.metrics, "kvgate_queue_depth", tenant="acme") == 2
    assert value(world.metrics, "kvgate_queue_depth", tenant="beta") == 1
    assert value(world.metrics, "kvgate_drains_overdue") == 4
    assert value(world.metrics, "kvgate_leases_expired") == 2


def test_a_label_of_strange_letters_cannot_break_the_text() -> None:
    world = World()
    world.profile = profile(build='b"1\n kvgate_ready 7\\')
    found = world.metrics.exposition().decode()
    assert "\n kvgate_ready 7" not in found
    assert value(world.metrics, "kvgate_ready") == 0


# -- several processes as one


def test_processes_are_shown_as_one() -> None:
    """What each counted is added; what they share is not; a gate is ready where all of them are."""
    found = Metrics(), Metrics()
    for at, metrics in enumerate(found):
        for _ in range(at + 1):
            metrics.request(RECORD)
        metrics.watch(lambda: profile(1024), lambda: None, lambda at=at: at == 0, lambda: 3)  # type: ignore[misc]
    together = scraped(merged([metrics.exposition() for metrics in found]))
    assert set(together) == set(samples(found[0]))
    common = {"tenant": "acme", "dialect": "openai_chat", "verdict": "admit", "reason": "", "status": "200"}
    assert together["kvgate_requests_total", frozenset(common.items())] == 3
    buckets = {"dialect": "openai_chat", "stream": "false"}
    assert together["kvgate_request_seconds_count", frozenset(buckets.items())] == 3
    assert together["kvgate_request_seconds_bucket", frozenset({**buckets, "le": "+Inf"}.items())] == 3
    assert together["kvgate_upstream_connections", frozenset()] == 6
    assert together["kvgate_ready", frozenset()] == 0
    assert together["kvgate_engine_n_ctx_slot_tokens", frozenset()] == 1024


def test_one_process_alone_is_shown_as_it_is() -> None:
    metrics = Metrics()
    metrics.request(RECORD)
    metrics.engine_changed(Change.SMALLER, 1000.5)
    assert scraped(merged([metrics.exposition()])) == samples(metrics)


def test_nobody_is_shown_as_nothing() -> None:
    assert merged([]) == b""


# -- fairness


def test_service_is_told_by_what_it_was_for() -> None:
    """At the prices in force; cached input is no input too."""
    metrics = Metrics()
    metrics.request(replace(RECORD, usage=Usage(10, 5, 4)))
    found = {kind: value(metrics, "kvgate_service_total", tenant="acme", kind=kind) for kind in KINDS}
    assert found == {"input": 6.0, "cached": 1.0, "output": 10.0}


def test_the_bill_is_cells_by_seconds_and_mib_only_where_a_tokens_size_is_known() -> None:
    metrics = Metrics()
    metrics.freed(Freed("acme", 100, 2.5))
    assert value(metrics, "kvgate_kv_token_seconds_total", tenant="acme") == 250
    assert value(metrics, "kvgate_kv_mib_seconds_total", tenant="acme") is None
    metrics.kv_bytes_per_token = lambda: 1024.0 * 1024
    metrics.freed(Freed("acme", 100, 0.5))
    assert value(metrics, "kvgate_kv_token_seconds_total", tenant="acme") == 300
    assert value(metrics, "kvgate_kv_mib_seconds_total", tenant="acme") == 50


def test_the_figures_of_fairness_are_the_ledgers() -> None:
    """Shares, gap and bound, what voids it, who waits longest; nothing of tenants that are away."""
    ledger = Ledger(KvPool(200, 2, 100), rule=FairRule(bypass_max=1))
    metrics = Metrics()
    metrics.watch_fairness(lambda: ledger.fair_view(7.0), lambda: ledger.pool)
    for number, (tenant, weight) in enumerate((("a", 1.0), ("b", 3.0), ("a", 1.0), ("b", 3.0))):
        ledger.reserve(Reservation(f"r{number}", tenant, Quota(), Size(60, 40), Share(weight)), float(number))
    assert value(metrics, "kvgate_service_recent", tenant="a") == 60
    assert value(metrics, "kvgate_service_share_ratio", tenant="b") == 0.5
    assert value(metrics, "kvgate_weight_share_ratio", tenant="b") == 0.75
    assert value(metrics, "kvgate_kv_filled_tokens", tenant="a") == 60
    assert value(metrics, "kvgate_queue_oldest_seconds", tenant="b") == 4
    assert value(metrics, "kvgate_starvation_age_seconds") == 5
    assert value(metrics, "kvgate_prefill_tokens") == 120
    assert value(metrics, "kvgate_service_gap_bound") == 2 * 2 * 200
    assert value(metrics, "kvgate_fairness_void", by="bypass") == 0
    assert value(metrics, "kvgate_fairness_jain_ratio") == pytest.approx((60 + 20) ** 2 / (2 * (3600 + 400)))
    for number in (0, 1, 2, 3):
        ledger.settle(f"r{number}", 8.0, ended=True)
        ledger.cancel(f"r{number}", 8.0)
    assert value(metrics, "kvgate_service_recent", tenant="a") is None
    assert value(metrics, "kvgate_service_gap") == 0
