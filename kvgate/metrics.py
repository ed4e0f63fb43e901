"""What Prometheus sees; the only importer of prometheus_client."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from kvgate.core.ask import Usage
from kvgate.core.engine_state import Change, EngineState
from kvgate.core.fair_figures import fair_figures
from kvgate.core.fairness import MILLI, FairRule
from kvgate.core.profile import Source
from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvgate.core.fairness import FairView
    from kvgate.core.foreign import ForeignWatch
    from kvgate.core.ledger import Freed, LedgerView
    from kvgate.core.pool import KvPool
    from kvgate.core.profile import EngineProfile
    from kvgate.ports import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST

MIB: Final = 1024 * 1024

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Described(NamedTuple):
    """A metric as the reference shows it."""

    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str


class Metrics:
    """Counters of what happened, and gauges read from the ledger at each scrape; implements `ports.Observer`.

    Labels are bounded: tenants that are declared, dialects, verdicts and reasons of the tables.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._states: list[_State | _Life | _Fairness] = []
        self._counted: list[Described] = []
        self.overflows = 0
        """Engine overflows since start; readiness warns of them."""
        self._requests = self._counter(
            "kvgate_requests",
            "Requests by how they ended; reason is empty for what was served as asked.",
            ("tenant", "dialect", "verdict", "reason", "status"),
        )
        self._tokens = self._counter(
            "kvgate_tokens",
            "Tokens by the engine's own usage: prompt, output (all sequences), cached (part of prompt).",
            ("tenant", "kind"),
        )
        self._duration = self._histogram(
            "kvgate_request_seconds", "Seconds from a request's head to the end of its answer.", ("dialect", "stream")
        )
        self._queued = self._histogram(
            "kvgate_queue_seconds", "Seconds that admitted requests waited for slots and KV tokens.", ("tenant",)
        )
        self._hangups = self._counter(
            "kvgate_hangups", "Requests whose client left before the answer was complete.", ("tenant",)
        )
        self._trims = self._counter(
            "kvgate_trims",
            "Requests whose prompt was trimmed, by strategy, or the side of a text.",
            ("tenant", "how"),
        )
        self._trimmed = self._counter(
            "kvgate_trimmed_tokens", "Prompt tokens dropped by trimming.", ("tenant", "how")
        )
        self._loops = self._counter(
            "kvgate_loops",
            "Answers that repeat themselves over and over, by sign and by what was done: observed or stopped.",
            ("tenant", "sign", "action"),
        )
        self._ended_by_context = self._counter(
            "kvgate_ended_by_context",
            "Answers that the context cut short, not the client's own limit, by the bound that did.",
            ("tenant", "bound"),
        )
        self._drift = self._counter(
            "kvgate_count_drift",
            "Answers whose prompt size by the engine's usage differs from what this proof said. Must stay 0.",
            ("dialect", "proof"),
        )
        self._counts = self._counter(
            "kvgate_counts", "Requests that came as far as the arithmetic, by what counted their prompt.", ("proof",)
        )
        self._reuse_violations = self._counter(
            "kvgate_reuse_violations",
            "Answers that reused a KV prefix although reuse was off. Must stay 0.",
            ("tenant",),
        )
        self._reuse = self._counter(
            "kvgate_reuse",
            "Admitted requests by the prefix reuse that they had: off, on.",
            ("tenant", "reuse"),
        )
        self._engine_changes = self._counter(
            "kvgate_engine_changes", "Times the engine became another one after it was first seen.", ("what",)
        )
        for change in Change:
            self._engine_changes.labels(change.label)
        self._changed_at_s = 0.0
        self._service = self._counter(
            "kvgate_service",
            "Service: tokens at their prices ([fairness]), by what they were: input, cached input, output.",
            ("tenant", "kind"),
        )
        self._token_seconds = self._counter(
            "kvgate_kv_token_seconds",
            "The KV bill: cells times the seconds they were held, counted when they are given back. Summed over the "
            "gates it is the whole.",
            ("tenant",),
        )
        self._mib_seconds = self._counter(
            "kvgate_kv_mib_seconds",
            "The same in MiB of KV cache; only where the engine's log tells how large a token is (-lv 4).",
            ("tenant",),
        )
        self.rule = FairRule()
        """What a token costs."""
        self.kv_bytes_per_token: Callable[[], float | None] = lambda: None

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...]) -> Counter:
        self._counted.append(Described(f"{name}_total", "counter", labels, meaning))
        return Counter(name, meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, labels: tuple[str, ...]) -> Histogram:
        self._counted.append(Described(name, "histogram", labels, meaning))
        return Histogram(name, meaning, labels, registry=self.registry, buckets=_SECONDS)

    def request(self, record: RequestRecord) -> None:
        """Count one request."""
        self.overflows += record.reason == Reason.ENGINE_OVERFLOW.label
        self._requests.labels(record.tenant, record.dialect, record.verdict, record.reason, str(record.status)).inc()
        self._duration.labels(record.dialect, str(record.stream).lower()).observe(record.duration_s)
        if record.queued_s is not None:
            self._queued.labels(record.tenant).observe(record.queued_s)
        if record.hung_up:
            self._hangups.labels(record.tenant).inc()
        # Counted at 0 too: what must stay 0 is there to be looked at from the first request on.
        self._reuse_violations.labels(record.tenant).inc(record.reuse_violation)
        if record.reuse:
            self._reuse.labels(record.tenant, record.reuse).inc()
        if record.proof:
            self._drift.labels(record.dialect, record.proof).inc(record.count_drift_tokens != 0)
            self._counts.labels(record.proof).inc()
        if (trimmed := record.trimmed) is not None:
            self._trims.labels(record.tenant, trimmed.how).inc()
            self._trimmed.labels(record.tenant, trimmed.how).inc(trimmed.tokens)
        if record.loop is not None:
            action = "stopped" if record.loop_stopped else "observed"
            self._loops.labels(record.tenant, record.loop.value, action).inc()
        if record.ended_by_context:
            self._ended_by_context.labels(record.tenant, record.ended_by_context).inc()
        if (usage := record.usage) is not None:
            self._tokens.labels(record.tenant, "prompt").inc(usage.prompt_tokens)
            self._tokens.labels(record.tenant, "output").inc(usage.output_tokens)
            self._tokens.labels(record.tenant, "cached").inc(usage.cached_tokens)
            cached = min(usage.cached_tokens, usage.prompt_tokens)
            parts = {
                "input": Usage(usage.prompt_tokens - cached, 0),
                "cached": Usage(cached, 0, cached),
                "output": Usage(0, usage.output_tokens),
            }
            for kind, part in parts.items():
                self._service.labels(record.tenant, kind).inc(self.rule.service_milli(part) / MILLI)

    def freed(self, freed: Freed) -> None:
        """Bill what somebody held."""
        token_s = freed.cells * freed.held_s
        self._token_seconds.labels(freed.tenant).inc(token_s)
        if (size := self.kv_bytes_per_token()) is not None:
            self._mib_seconds.labels(freed.tenant).inc(token_s * size / MIB)

    def engine_changed(self, what: Change, at_s: float) -> None:
        """The engine is another one than before, since `at_s` of Unix time."""
        self._engine_changes.labels(what.label).inc()
        self._changed_at_s = at_s

    def watch(
        self,
        profile: Callable[[], EngineProfile | None],
        ledger: Callable[[], LedgerView | None],
        ready: Callable[[], bool],
        connections: Callable[[], int],
        store_out: Callable[[], bool] = lambda: False,
        *,
        context_tokens_min: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Read these at each scrape."""
        state = _State(profile, ledger, ready, connections, store_out, context_tokens_min=context_tokens_min)
        self._states.append(state)
        self.registry.register(state)

    def watch_life(self, state: Callable[[], EngineState], foreign: Callable[[], ForeignWatch]) -> None:
        """Read the engine's state, and who else uses it, at each scrape."""
        life = _Life(state, foreign, lambda: self._changed_at_s)
        self._states.append(life)
        self.registry.register(life)

    def watch_fairness(self, fair: Callable[[], FairView | None], pool: Callable[[], KvPool | None]) -> None:
        """Read these at each scrape."""
        figures = _Fairness(fair, pool)
        self._states.append(figures)
        self.registry.register(figures)

    def described(self) -> Iterator[Described]:
        """Every metric as it is scraped; gauges only while there is an engine to watch."""
        yield from self._counted
        for state in self._states:
            for gauge in state.collect():
                labels = tuple(gauge.samples[0].labels) if gauge.samples else ("tenant",)
                name = f"{gauge.name}_total" if gauge.type == "counter" else gauge.name
                yield Described(name, gauge.type, labels, gauge.documentation)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


GAUGES_SUMMED: Final = frozenset({"kvgate_upstream_connections"})
"""Gauges that each process has for itself; the others tell of the engine and the store that all share."""

GAUGES_LEAST: Final = frozenset({"kvgate_ready"})
"""Gauges where the worst of the processes counts."""


def merged(expositions: Sequence[bytes]) -> bytes:
    """What several processes of one gate show, as one: counters and histograms added, gauges as they are shared."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for exposition in expositions:
        for family in text_string_to_metric_families(exposition.decode()):
            families.setdefault(family.name, family)
            for sample in family.samples:
                values[family.name][sample.name, tuple(sample.labels.items())].append(sample.value)
    registry = CollectorRegistry()
    registry.register(_Merged([_merged(families[name], values[name]) for name in families]))
    return generate_latest(registry)


def _merged(family: Metric, found: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]) -> Metric:
    together = Metric(family.name, family.documentation, family.type)
    for (name, labels), values in found.items():
        if name.endswith("_created"):
            value = min(values)
        elif family.type != "gauge" or family.name in GAUGES_SUMMED:
            value = sum(values)
        else:
            value = min(values) if family.name in GAUGES_LEAST else max(values)
        together.add_sample(name, dict(labels), value)
    return together


class _Merged:
    """Metrics that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        return iter(self._families)


class _State:
    """Gauges that are read, never incremented: they cannot be left behind by a cancelled request."""

    def __init__(
        self,
        profile: Callable[[], EngineProfile | None],
        ledger: Callable[[], LedgerView | None],
        ready: Callable[[], bool],
        connections: Callable[[], int],
        store_out: Callable[[], bool],
        *,
        context_tokens_min: Callable[[], int | None],
    ) -> None:
        self._profile, self._ledger = profile, ledger
        self._context_tokens_min = context_tokens_min
        self._ready, self._connections, self._store_out = ready, connections, store_out

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected while registering."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All gauges, now."""
        yield GaugeMetricFamily("kvgate_ready", "1 while requests are served.", value=float(self._ready()))
        yield GaugeMetricFamily(
            "kvgate_store_out",
            "1 while the store is out; the ledger's figures are then this gate's alone.",
            value=float(self._store_out()),
        )
        yield GaugeMetricFamily(
            "kvgate_upstream_connections", "Open connections to the engine.", value=self._connections()
        )
        yield GaugeMetricFamily(
            "kvgate_engine_context_min_tokens",
            "Tokens that a slot must hold: engine.context_tokens_min, 0 where none is set.",
            value=self._context_tokens_min() or 0,
        )
        if (profile := self._profile()) is not None:
            yield from _engine(profile)
        if (view := self._ledger()) is not None:
            yield from _ledger(view)


class _Life:
    """The engine's state, and foreign traffic."""

    def __init__(
        self,
        state: Callable[[], EngineState],
        foreign: Callable[[], ForeignWatch],
        changed_at_s: Callable[[], float],
    ) -> None:
        self._state, self._foreign, self._changed_at_s = state, foreign, changed_at_s

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected while registering."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All of it, now."""
        now, foreign = self._state(), self._foreign()
        states = GaugeMetricFamily(
            "kvgate_engine_state", "1 for the state that the engine is in, 0 for every other.", labels=("state",)
        )
        for state in EngineState:
            states.add_metric((state.label,), float(state is now))
        yield states
        yield GaugeMetricFamily(
            "kvgate_engine_changed_timestamp_seconds",
            "Unix time at which the engine last became another one, 0 where it never has.",
            value=self._changed_at_s(),
        )
        yield GaugeMetricFamily(
            "kvgate_foreign_slots",
            "Busy slots that no lease of this gate explains: somebody uses the engine around it. Must stay 0.",
            value=foreign.slots,
        )
        sightings = CounterMetricFamily(
            "kvgate_foreign_sightings", "Times that somebody began to use the engine around this gate. Must stay 0."
        )
        sightings.add_metric((), foreign.sightings)
        yield sightings


class _Fairness:
    """The figures of `core.fair_figures`."""

    def __init__(self, fair: Callable[[], FairView | None], pool: Callable[[], KvPool | None]) -> None:
        self._fair, self._pool = fair, pool

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected while registering."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All of them, now."""
        view, pool = self._fair(), self._pool()
        if view is None or pool is None:
            return
        for figure in fair_figures(view, pool):
            gauge = GaugeMetricFamily(figure.name, figure.meaning, labels=(figure.label,) if figure.label else ())
            for word, value in figure.values:
                gauge.add_metric((word,) if figure.label else (), value)
            yield gauge


def _engine(profile: EngineProfile) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "kvgate_engine_info",
        "Always 1; the labels tell which engine is there.",
        labels=("kind", "build", "fingerprint", "topology", "topology_source", "kv_type"),
    )
    topology = profile.topology
    info.add_metric(
        (profile.kind, profile.build or "", profile.fingerprint, topology.value, topology.source, profile.kv_type), 1
    )
    yield info
    yield GaugeMetricFamily(
        "kvgate_engine_n_ctx_slot_tokens", "Tokens that one sequence may hold.", value=profile.n_ctx_slot.value
    )
    yield GaugeMetricFamily(
        "kvgate_engine_topology_assumed",
        "1 where nothing told whether slots share the KV cache, and the safe guess is in force.",
        value=float(topology.source is Source.ASSUMED),
    )


def _ledger(view: LedgerView) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvgate_kv_pool_tokens", "Cells of the KV cache.", value=view.pool.tokens)
    yield GaugeMetricFamily("kvgate_slots", "Sequences that run side by side.", value=view.pool.slots)
    held = GaugeMetricFamily(
        "kvgate_kv_held_tokens",
        "Cells reserved by running and draining requests, of all gates that share the ledger.",
        labels=("tenant",),
    )
    for tenant, tokens in view.held_tokens_by_tenant:
        held.add_metric((tenant,), tokens)
    yield held
    slots = GaugeMetricFamily(
        "kvgate_slots_held", "Slots held, by what holds them, of all gates that share the ledger.", labels=("state",)
    )
    slots.add_metric(("running",), view.running)
    slots.add_metric(("draining",), view.draining)
    yield slots
    queue = GaugeMetricFamily(
        "kvgate_queue_depth", "Requests that wait, at all gates that share the ledger.", labels=("tenant",)
    )
    for tenant, waiting in view.waiting_by_tenant:
        queue.add_metric((tenant,), waiting)
    yield queue
    yield GaugeMetricFamily(
        "kvgate_drains_overdue",
        "Drains ended by time because the engine never showed the slot idle, since start.",
        value=view.drains_overdue,
    )
    yield GaugeMetricFamily(
        "kvgate_leases_expired",
        "Leases that ran out because their gate was not heard of (it crashed, hung, or lost the store), since start, "
        "of all gates that share the ledger.",
        value=view.leases_expired,
    )
