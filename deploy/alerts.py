"""Recording and alerting rules, described once; docs/runbook.md has a section for each alert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

RUNBOOK: Final = "docs/runbook.md"

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True)
class Recording:
    """A query that Prometheus keeps the answer to."""

    name: str
    expr: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True)
class Alert:
    """One alert.

    Args:
        name: also the heading of its section in the runbook.
        expr: fires while this returns anything.
        lasting: how long it must, in Prometheus' words.
        severity: critical wakes somebody, warning waits for the morning, info is for the record.
        summary: one sentence; `{{ $value }}` and `{{ $labels.x }}` are filled in by Prometheus.
    """

    name: str
    expr: str
    lasting: str
    severity: Severity
    summary: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"{RUNBOOK}#{self.name.lower()}"},
        }


def grew(counter: str, window: str) -> str:
    """Whether a counter that must stay still grew, also where its first sample is no 0."""
    return f"increase({counter}[{window}]) > 0 or ({counter} unless {counter} offset {window}) > 0"


_GATE = "job, instance"
_OVERFLOWS = 'kvgate_requests_total{reason=~"prompt_overflow|generation_overflow|untrimmable"}'

RECORDINGS: Final = (
    Recording(
        "kvgate:kv_held:ratio",
        f"sum by ({_GATE}) (kvgate_kv_held_tokens) / on ({_GATE}) kvgate_kv_pool_tokens"
        f" or on ({_GATE}) 0 * kvgate_kv_pool_tokens",
    ),
    Recording("kvgate:slots_held:ratio", f"sum by ({_GATE}) (kvgate_slots_held) / on ({_GATE}) kvgate_slots"),
    Recording("kvgate:requests:rate5m", "sum by (job, tenant, verdict, reason) (rate(kvgate_requests_total[5m]))"),
    Recording(
        "kvgate:tenant_refused:ratio5m",
        'sum by (job, tenant) (rate(kvgate_requests_total{verdict="reject"}[5m]))'
        " / (sum by (job, tenant) (rate(kvgate_requests_total[5m])) > 0)",
    ),
    Recording(
        "kvgate:tenant_ended_by_context:ratio15m",
        "sum by (job, tenant) (rate(kvgate_ended_by_context_total[15m]))"
        ' / (sum by (job, tenant) (rate(kvgate_requests_total{status="200"}[15m])) > 0)',
    ),
    Recording("kvgate:service:rate5m", "sum by (job, tenant, kind) (rate(kvgate_service_total[5m]))"),
    Recording("kvgate:tokens:rate5m", "sum by (job, tenant, kind) (rate(kvgate_tokens_total[5m]))"),
    Recording(
        "kvgate:queue_seconds:p95_5m",
        "histogram_quantile(0.95, sum by (job, tenant, le) (rate(kvgate_queue_seconds_bucket[5m])))",
    ),
    Recording(
        "kvgate:request_seconds:p95_5m",
        "histogram_quantile(0.95, sum by (job, dialect, stream, le) (rate(kvgate_request_seconds_bucket[5m])))",
    ),
)

ALERTS: Final = (
    Alert(
        "KvgateDown",
        'up{job=~".*kvgate.*"} == 0',
        "1m",
        "critical",
        "Prometheus cannot scrape the gate {{ $labels.instance }}.",
    ),
    Alert(
        "KvgateEngineNotServed",
        "kvgate_ready == 0",
        "1m",
        "critical",
        "The gate {{ $labels.instance }} refuses every request: no engine to be had, or nobody may be let in.",
    ),
    Alert(
        "KvgateContextBelowMinimum",
        f"(kvgate_engine_n_ctx_slot_tokens < on ({_GATE}) kvgate_engine_context_min_tokens)"
        f' or on ({_GATE}) kvgate_engine_state{{state="undersized"}} == 1',
        "30s",
        "critical",
        "A slot of the engine behind {{ $labels.instance }} holds less than engine.context_tokens_min.",
    ),
    Alert(
        "KvgateTopologyUnknown",
        "kvgate_engine_topology_assumed == 1",
        "10m",
        "warning",
        "Nothing tells {{ $labels.instance }} whether the engine's slots share one KV cache; it assumes the worst.",
    ),
    Alert(
        "KvgatePoolAlmostFull",
        "kvgate:kv_held:ratio > 0.9",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the KV pool behind {{ $labels.instance }} has been held for 5 minutes.",
    ),
    Alert(
        "KvgateOverflowsRejected",
        f"sum by (job, tenant, reason) ({grew(_OVERFLOWS, '5m')})",
        "0m",
        "info",
        "Requests of the tenant {{ $labels.tenant }} do not fit its context and are refused: {{ $labels.reason }}.",
    ),
    Alert(
        "KvgateEndedByContext",
        "kvgate:tenant_ended_by_context:ratio15m > 0.05",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the answers to {{ $labels.tenant }} are cut short by the context.",
    ),
    Alert(
        "KvgateAnswersLoop",
        "sum by (job, tenant) (increase(kvgate_loops_total[15m])) > 2",
        "0m",
        "info",
        "Answers to the tenant {{ $labels.tenant }} repeat themselves over and over.",
    ),
    Alert(
        "KvgateQueueDeadlinesMissed",
        'sum by (job, tenant) (increase(kvgate_requests_total{reason="queue_timeout"}[10m])) > 0',
        "2m",
        "warning",
        "Requests of the tenant {{ $labels.tenant }} waited for room until their deadline and were refused.",
    ),
    Alert(
        "KvgateStarvation",
        "kvgate_starvation_age_seconds > 60",
        "1m",
        "warning",
        "The oldest request that waits behind {{ $labels.instance }} has waited {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "KvgateServiceGapAboveBound",
        f"kvgate_service_gap_max > on ({_GATE}) kvgate_service_gap_bound"
        f" and on ({_GATE}) max by ({_GATE}) (kvgate_fairness_void) == 0",
        "1m",
        "warning",
        "Two tenants behind {{ $labels.instance }} that both wait differ in service by more than the bound.",
    ),
    Alert(
        "KvgateReuseViolation",
        grew("kvgate_reuse_violations_total", "15m"),
        "0m",
        "critical",
        "The engine reused a KV prefix for the tenant {{ $labels.tenant }}, whose reuse is off.",
    ),
    Alert(
        "KvgateCountDrift",
        grew("kvgate_count_drift_total", "15m"),
        "0m",
        "warning",
        "The proof {{ $labels.proof }} counted a prompt of {{ $labels.dialect }} otherwise than the engine did.",
    ),
    Alert(
        "KvgateEngineOverflow",
        grew('kvgate_requests_total{reason="engine_overflow"}', "15m"),
        "0m",
        "critical",
        "The engine behind {{ $labels.instance }} ran out of KV although the ledger had room.",
    ),
    Alert(
        "KvgateEngineChanged",
        'increase(kvgate_engine_changes_total{what!="restarted"}[15m]) > 0',
        "0m",
        "warning",
        "The engine behind {{ $labels.instance }} became another one: {{ $labels.what }}.",
    ),
    Alert(
        "KvgateLeasesExpired",
        "increase(kvgate_leases_expired[15m]) > 0",
        "0m",
        "warning",
        "Leases ran out because their gate was not heard of, as {{ $labels.instance }} tells.",
    ),
    Alert(
        "KvgateDrainsOverdue",
        "increase(kvgate_drains_overdue[15m]) > 0",
        "0m",
        "warning",
        "Drains behind {{ $labels.instance }} were ended by time: the engine never showed their slots idle.",
    ),
    Alert(
        "KvgateForeignTraffic",
        f"kvgate_foreign_slots > 0 or {grew('kvgate_foreign_sightings_total', '15m')}",
        "0m",
        "critical",
        "Somebody uses the engine behind {{ $labels.instance }} around the gate.",
    ),
    Alert(
        "KvgateStoreDown",
        "kvgate_store_out == 1",
        "30s",
        "critical",
        "The gate {{ $labels.instance }} cannot reach the store and goes by what it held.",
    ),
    Alert(
        "KvgateInternalErrors",
        grew('kvgate_requests_total{reason="internal"}', "15m"),
        "0m",
        "warning",
        "The gate {{ $labels.instance }} failed on a request of its own fault.",
    ),
)


def rules() -> dict[str, Any]:
    """The rules file."""
    return {
        "groups": [
            {"name": "kvgate-recordings", "interval": "15s", "rules": [rule.rule() for rule in RECORDINGS]},
            {"name": "kvgate-alerts", "interval": "15s", "rules": [rule.rule() for rule in ALERTS]},
        ]
    }
