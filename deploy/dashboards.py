"""The Grafana dashboards, described once: each panel is a title, its queries and their unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["timeseries", "stat", "table", "bargauge"]

_WIDTH: Final = 24
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_JOB: Final = 'job=~"$job"'
_GATE: Final = 'job=~"$job", instance=~"$instance"'
_TENANT: Final = 'job=~"$job", tenant=~"$tenant"'


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        title: what one sees.
        queries: PromQL, each with its legend.
        unit: Grafana's name of it.
        kind: how it is drawn.
        width: of 24.
        explains: the sentence behind the (i).
        max_value: where the scale ends, such as 1 of a ratio.
        red_from: a value that must not be reached, drawn red.
        zero: what is shown for 0, where that is no figure.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 12
    explains: str = ""
    max_value: float | None = None
    red_from: float | None = None
    zero: str = ""

    def json(self, number: int, x: int, y: int, height: int) -> dict[str, Any]:
        """As Grafana reads it."""
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if self.red_from is not None:
            steps.append({"color": "red", "value": self.red_from})
        defaults: dict[str, Any] = {"unit": self.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.max_value is not None:
            defaults["max"] = self.max_value
        if self.zero:
            defaults["mappings"] = [{"type": "value", "options": {"0": {"text": self.zero, "index": 0}}}]
        instant = self.kind != "timeseries"
        targets = [
            {
                "refId": chr(ord("A") + at),
                "datasource": _DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if self.kind == "table" else {}),
            }
            for at, (expr, legend) in enumerate(self.queries)
        ]
        return {
            "id": number,
            "title": self.title,
            "description": self.explains,
            "type": self.kind,
            "datasource": _DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": targets,
        }


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; `variables` are label names that can be chosen, by the metric that has them."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    variables: dict[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """As Grafana imports it."""
        placed, x, y, height = [], 0, 0, 0
        for number, panel in enumerate(self.panels, start=1):
            tall = 4 if panel.kind == "stat" else 8
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            placed.append(panel.json(number, x, y, tall))
            x, height = x + panel.width, max(height, tall)
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["kvgate"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "refresh": "15s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [_datasource(), *(_variable(*one) for one in self.variables.items())]},
            "annotations": {"list": []},
            "panels": placed,
        }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(label: str, metric: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({metric}, {label})", "refId": label},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _stat(
    title: str, query: str, explains: str, *, unit: str = "locale", red_from: float | None = None, zero: str = ""
) -> Panel:
    """One figure, to the last digit: 8,192 tokens and not 8.19 K."""
    return Panel(title, ((query, ""),), unit, "stat", 4, explains, red_from=red_from, zero=zero)


FLEET: Final = Dashboard(
    "kvgate-fleet",
    "kvgate: fleet",
    (
        _stat("Gates ready", f"sum(kvgate_ready{{{_JOB}}})", "Gates that serve requests now."),
        _stat(
            "Gates without the store",
            f"sum(kvgate_store_out{{{_JOB}}})",
            "They go by what they held when the store last answered.",
            red_from=1,
        ),
        _stat(
            "Waiting", f"sum(max by (job, tenant) (kvgate_queue_depth{{{_JOB}}})) or vector(0)", "Requests in queues."
        ),
        _stat(
            "Reuse violations",
            f"sum(increase(kvgate_reuse_violations_total{{{_JOB}}}[24h])) or vector(0)",
            "Answers of 24 hours that reused a KV prefix although reuse was off. Must be 0.",
            red_from=1,
        ),
        _stat(
            "Counts that drifted",
            f"sum(increase(kvgate_count_drift_total{{{_JOB}}}[24h])) or vector(0)",
            "Answers of 24 hours whose prompt the engine counted otherwise. Must be 0.",
            red_from=1,
        ),
        _stat(
            "Foreign slots",
            f"max(kvgate_foreign_slots{{{_JOB}}})",
            "Busy slots that no lease explains: somebody goes around the gate. Must be 0.",
            red_from=1,
        ),
        Panel(
            "Requests by verdict",
            ((f"sum by (verdict) (rate(kvgate_requests_total{{{_JOB}}}[5m]))", "{{verdict}}"),),
            "reqps",
        ),
        Panel(
            "Requests not served as asked, by reason",
            ((f'sum by (reason) (rate(kvgate_requests_total{{{_JOB}, reason!=""}}[5m]))', "{{reason}}"),),
            "reqps",
            explains="docs/reference.md has what each reason means and what to do.",
        ),
        Panel(
            "Tokens a second",
            ((f"sum by (kind) (kvgate:tokens:rate5m{{{_JOB}}})", "{{kind}}"),),
            "short",
            explains="By the engine's own usage.",
        ),
        Panel(
            "KV pool held",
            ((f"kvgate:kv_held:ratio{{{_JOB}}}", "{{instance}}"),),
            "percentunit",
            max_value=1,
            red_from=0.9,
        ),
        Panel("Slots held", ((f"kvgate:slots_held:ratio{{{_JOB}}}", "{{instance}}"),), "percentunit", max_value=1),
        Panel(
            "Request duration, p95",
            ((f"kvgate:request_seconds:p95_5m{{{_JOB}}}", "{{dialect}} stream={{stream}}"),),
            "s",
        ),
        Panel(
            "Requests by what counted their prompt",
            ((f"sum by (proof) (rate(kvgate_counts_total{{{_JOB}}}[5m]))", "{{proof}}"),),
            "reqps",
            explains="docs/counting.md; `engine` is the dearest.",
        ),
        Panel(
            "Engine states",
            ((f"sum by (state) (kvgate_engine_state{{{_JOB}}})", "{{state}}"),),
            explains="Gates by the state in which each sees its engine.",
        ),
    ),
    {"job": "kvgate_ready"},
)

TENANT: Final = Dashboard(
    "kvgate-tenant",
    "kvgate: tenant",
    (
        Panel(
            "Requests by verdict",
            ((f"sum by (verdict) (kvgate:requests:rate5m{{{_TENANT}}})", "{{verdict}}"),),
            "reqps",
        ),
        Panel(
            "Not served as asked, by reason",
            ((f'sum by (reason) (kvgate:requests:rate5m{{{_TENANT}, reason!=""}})', "{{reason}}"),),
            "reqps",
        ),
        Panel(
            "Share refused",
            ((f"kvgate:tenant_refused:ratio5m{{{_TENANT}}}", "{{tenant}}"),),
            "percentunit",
            max_value=1,
        ),
        Panel(
            "Tokens a second",
            ((f"sum by (tenant, kind) (kvgate:tokens:rate5m{{{_TENANT}}})", "{{tenant}} {{kind}}"),),
            explains="By the engine's own usage.",
        ),
        Panel(
            "KV tokens held",
            ((f"max by (job, tenant) (kvgate_kv_held_tokens{{{_TENANT}}})", "{{tenant}}"),),
            explains="By running and draining requests, of all gates that share the ledger.",
        ),
        Panel(
            "Waiting",
            ((f"max by (job, tenant) (kvgate_queue_depth{{{_TENANT}}})", "{{tenant}}"),),
        ),
        Panel("Time in the queue, p95", ((f"kvgate:queue_seconds:p95_5m{{{_TENANT}}}", "{{tenant}}"),), "s"),
        Panel(
            "Oldest that waits",
            ((f"max by (job, tenant) (kvgate_queue_oldest_seconds{{{_TENANT}}})", "{{tenant}}"),),
            "s",
        ),
        Panel(
            "Service received a second",
            ((f"sum by (tenant, kind) (kvgate:service:rate5m{{{_TENANT}}})", "{{tenant}} {{kind}}"),),
            explains="Tokens at their prices, not divided by weight.",
        ),
        Panel(
            "Share of the last minute's service, and of the weights",
            (
                (f"max by (job, tenant) (kvgate_service_share_ratio{{{_TENANT}}})", "{{tenant}} service"),
                (f"max by (job, tenant) (kvgate_weight_share_ratio{{{_TENANT}}})", "{{tenant}} weight"),
            ),
            "percentunit",
            explains="Of tenants that hold or wait. Where all wait all the time the two are the same.",
            max_value=1,
        ),
        Panel(
            "Service of the last minute",
            ((f"max by (job, tenant) (kvgate_service_recent{{{_TENANT}}})", "{{tenant}}"),),
        ),
        Panel(
            "The KV bill: tokens held",
            ((f"sum by (tenant) (rate(kvgate_kv_token_seconds_total{{{_TENANT}}}[5m]))", "{{tenant}}"),),
            explains="Token-seconds a second, billed when they are given back.",
        ),
        Panel(
            "The KV bill: memory held",
            ((f"sum by (tenant) (rate(kvgate_kv_mib_seconds_total{{{_TENANT}}}[5m]))", "{{tenant}}"),),
            "mbytes",
            explains="MiB-seconds a second; only where the engine's log tells how large a token is.",
        ),
        Panel(
            "Requests by the prefix reuse that they had",
            ((f"sum by (tenant, reuse) (rate(kvgate_reuse_total{{{_TENANT}}}[5m]))", "{{tenant}} {{reuse}}"),),
            "reqps",
        ),
        Panel(
            "Left before the answer was complete",
            ((f"sum by (tenant) (rate(kvgate_hangups_total{{{_TENANT}}}[5m]))", "{{tenant}}"),),
            "reqps",
        ),
        Panel(
            "Share of answers cut short by the context",
            ((f"kvgate:tenant_ended_by_context:ratio15m{{{_TENANT}}}", "{{tenant}}"),),
            "percentunit",
            explains="By the slot, the tenant's window or the pool, not by the client's own limit.",
            max_value=1,
            red_from=0.05,
        ),
        Panel(
            "Answers that repeat themselves",
            (
                (
                    f"sum by (tenant, sign, action) (rate(kvgate_loops_total{{{_TENANT}}}[5m]))",
                    "{{tenant}} {{sign}} {{action}}",
                ),
            ),
            "reqps",
            explains="docs/loops.md.",
        ),
        Panel(
            "Trims",
            ((f"sum by (tenant, how) (rate(kvgate_trims_total{{{_TENANT}}}[5m]))", "{{tenant}} {{how}}"),),
            "reqps",
        ),
        Panel(
            "Prompt tokens trimmed away a second",
            ((f"sum by (tenant, how) (rate(kvgate_trimmed_tokens_total{{{_TENANT}}}[5m]))", "{{tenant}} {{how}}"),),
        ),
    ),
    {"job": "kvgate_ready", "tenant": "kvgate_requests_total"},
)

ENGINE: Final = Dashboard(
    "kvgate-engine",
    "kvgate: engine",
    (
        _stat("n_ctx_slot", f"min(kvgate_engine_n_ctx_slot_tokens{{{_GATE}}})", "Tokens that one sequence may hold."),
        _stat(
            "Least that it must be",
            f"max(kvgate_engine_context_min_tokens{{{_GATE}}})",
            "engine.context_tokens_min.",
            zero="none set",
        ),
        _stat("Slots", f"max(kvgate_slots{{{_GATE}}})", "Sequences that run side by side."),
        _stat("KV pool", f"max(kvgate_kv_pool_tokens{{{_GATE}}})", "Cells of the KV cache."),
        _stat(
            "Topology assumed",
            f"max(kvgate_engine_topology_assumed{{{_GATE}}})",
            "1 where nothing tells whether slots share the cache.",
            red_from=1,
        ),
        _stat(
            "Last change",
            f"max(kvgate_engine_changed_timestamp_seconds{{{_GATE}}}) * 1000",
            "When the engine last became another one.",
            unit="dateTimeFromNow",
            zero="never",
        ),
        Panel(
            "The engine",
            ((f"kvgate_engine_info{{{_GATE}}}", ""),),
            kind="table",
            width=24,
            explains="Build, fingerprint, topology and where it is known from, KV precision.",
        ),
        Panel(
            "KV tokens held, by tenant",
            (
                (f"kvgate_kv_held_tokens{{{_GATE}}}", "{{tenant}}"),
                (f"kvgate_kv_pool_tokens{{{_GATE}}}", "the pool"),
            ),
        ),
        Panel(
            "Slots held",
            ((f"kvgate_slots_held{{{_GATE}}}", "{{state}}"), (f"kvgate_slots{{{_GATE}}}", "there are")),
            explains="Draining slots belong to requests that are over and whose slot has not been seen idle.",
        ),
        Panel(
            "KV tokens filled",
            ((f"kvgate_kv_filled_tokens{{{_GATE}}}", "{{tenant}}"),),
            explains="Cells that have a token in them by now, of those held.",
        ),
        Panel(
            "Prompt tokens in prefill",
            ((f"kvgate_prefill_tokens{{{_GATE}}}", "{{instance}}"),),
            explains="Tokens of prompts that were let in and have no output yet.",
        ),
        Panel(
            "Service gap",
            (
                (f"kvgate_service_gap{{{_GATE}}}", "now"),
                (f"kvgate_service_gap_max{{{_GATE}}}", "largest since idle"),
                (f"kvgate_service_gap_bound{{{_GATE}}}", "bound"),
            ),
            explains="Between the most and the least served of tenants in line, divided by weight.",
        ),
        Panel(
            "Jain index",
            ((f"kvgate_fairness_jain_ratio{{{_GATE}}}", "{{instance}}"),),
            explains="Of service divided by weight: 1 is even. Tenants that want little make it low, fair or not.",
            max_value=1,
        ),
        Panel(
            "What the bound does not cover",
            ((f"kvgate_fairness_void{{{_GATE}}}", "{{by}}"),),
            explains="1 where it has happened since the ledger was last idle.",
            max_value=1,
        ),
        Panel(
            "Oldest that waits",
            ((f"kvgate_starvation_age_seconds{{{_GATE}}}", "{{instance}}"),),
            "s",
            red_from=60,
        ),
        Panel(
            "Bypasses and drains for the first in line",
            (
                (f"increase(kvgate_queue_bypasses{{{_GATE}}}[1h])", "passed by others"),
                (f"increase(kvgate_queue_drains{{{_GATE}}}[1h])", "drained for"),
                (f"increase(kvgate_queue_drain_idle_seconds{{{_GATE}}}[1h])", "seconds idle for it"),
            ),
            explains="In an hour.",
        ),
        Panel("Time in the queue, p95", ((f"kvgate:queue_seconds:p95_5m{{{_JOB}}}", "{{tenant}}"),), "s"),
        Panel(
            "State",
            ((f"kvgate_engine_state{{{_GATE}}} == 1", "{{instance}} {{state}}"),),
        ),
        Panel(
            "Changes",
            ((f"increase(kvgate_engine_changes_total{{{_GATE}}}[1h])", "{{what}}"),),
            explains="In an hour.",
        ),
        Panel(
            "Foreign traffic",
            (
                (f"kvgate_foreign_slots{{{_GATE}}}", "slots now"),
                (f"increase(kvgate_foreign_sightings_total{{{_GATE}}}[1h])", "began in the last hour"),
            ),
            red_from=1,
        ),
        Panel(
            "What ended without proof",
            (
                (f"increase(kvgate_leases_expired{{{_GATE}}}[1h])", "leases expired"),
                (f"increase(kvgate_drains_overdue{{{_GATE}}}[1h])", "drains overdue"),
            ),
            explains="In an hour.",
        ),
        Panel("Connections to the engine", ((f"kvgate_upstream_connections{{{_GATE}}}", "{{instance}}"),)),
    ),
    {"job": "kvgate_ready", "instance": "kvgate_ready"},
)

DASHBOARDS: Final = {"fleet": FLEET, "tenant": TENANT, "engine": ENGINE}
