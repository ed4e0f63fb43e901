"""For each alert, series that must make it fire and series that must not: promtool's unit tests are made of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.alerts import ALERTS

_GATE: Final = {"job": "kvgate", "instance": "gate1:8601"}


@dataclass(frozen=True)
class Example:
    """One alert's two stories, samples a minute apart.

    Args:
        fires: series, by name and labels, that make it fire.
        quiet: series that do not.
        labels: of the alert that fires, beside its severity.
        at: when it is looked at, minutes after the first sample.
        quiet_at: likewise, of the story in which it stays quiet.
        value: what `{{ $value }}` becomes in its sentence.
    """

    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=lambda: dict(_GATE))
    at: str = "12m"
    quiet_at: str = "12m"
    value: str = ""


def _series(name: str, **labels: str) -> str:
    found = ",".join(f'{label}="{value}"' for label, value in {**_GATE, **labels}.items())
    return f"{name}{{{found}}}"


def _requests(**labels: str) -> str:
    common = {"tenant": "acme", "dialect": "openai_chat", "verdict": "reject", "status": "400"}
    return _series("kvgate_requests_total", **{**common, **labels})


_REQUEST_LABELS: Final = {**_GATE, "tenant": "acme", "dialect": "openai_chat", "verdict": "reject"}

EXAMPLES: Final[dict[str, Example]] = {
    "KvgateDown": Example({_series("up"): "1 1 0x12"}, {_series("up"): "0 1x12"}),
    "KvgateEngineNotServed": Example(
        {_series("kvgate_ready"): "1 1 0x12"}, {_series("kvgate_ready"): "1x11 0", _series("up"): "1x12"}
    ),
    "KvgateContextBelowMinimum": Example(
        {
            _series("kvgate_engine_n_ctx_slot_tokens"): "4096 4096 1024x12",
            _series("kvgate_engine_context_min_tokens"): "4096x14",
        },
        {
            _series("kvgate_engine_n_ctx_slot_tokens"): "4096x14",
            _series("kvgate_engine_context_min_tokens"): "4096x14",
        },
    ),
    "KvgateTopologyUnknown": Example(
        {_series("kvgate_engine_topology_assumed"): "1x14"}, {_series("kvgate_engine_topology_assumed"): "1x8 0x6"}
    ),
    "KvgatePoolAlmostFull": Example(
        {
            _series("kvgate_kv_held_tokens", tenant="acme"): "600x14",
            _series("kvgate_kv_held_tokens", tenant="beta"): "350x14",
            _series("kvgate_kv_pool_tokens"): "1000x14",
        },
        {
            _series("kvgate_kv_held_tokens", tenant="acme"): "950x10 850x4",
            _series("kvgate_kv_pool_tokens"): "1000x14",
        },
        value="95%",
    ),
    "KvgateOverflowsRejected": Example(
        {_requests(reason="prompt_overflow"): "_x8 1x6"},  # the first one ever, of which there was no 0 before
        {_requests(reason="prompt_overflow"): "7x14", _requests(reason="queue_full"): "0+1x14"},
        {"job": "kvgate", "tenant": "acme", "reason": "prompt_overflow"},
    ),
    "KvgateEndedByContext": Example(
        {
            _series("kvgate_ended_by_context_total", tenant="acme", bound="slot"): "0+1x30",
            _requests(verdict="clamp", reason="", status="200"): "0+10x30",
        },
        {
            _series("kvgate_ended_by_context_total", tenant="acme", bound="slot"): "0+1x30",
            _requests(verdict="admit", reason="", status="200"): "0+100x30",
        },
        {"job": "kvgate", "tenant": "acme"},
        at="20m",
        quiet_at="20m",
        value="10%",
    ),
    "KvgateAnswersLoop": Example(
        {_series("kvgate_loops_total", tenant="acme", sign="text", action="observed"): "0x8 4x6"},
        {_series("kvgate_loops_total", tenant="acme", sign="text", action="observed"): "0x8 1x6"},
        {"job": "kvgate", "tenant": "acme"},
    ),
    "KvgateQueueDeadlinesMissed": Example(
        {_requests(reason="queue_timeout"): "0x5 1 2 3x8"},
        {_requests(reason="queue_timeout"): "3x14", _requests(reason="prompt_overflow"): "0+1x14"},
        {"job": "kvgate", "tenant": "acme"},
    ),
    "KvgateStarvation": Example(
        {_series("kvgate_starvation_age_seconds"): "0x10 90x4"},
        {_series("kvgate_starvation_age_seconds"): "50x14"},
        value="1m 30s",
    ),
    "KvgateServiceGapAboveBound": Example(
        {
            _series("kvgate_service_gap_max"): "3000x14",
            _series("kvgate_service_gap_bound"): "2048x14",
            _series("kvgate_fairness_void", by="tier"): "0x14",
        },
        {
            _series("kvgate_service_gap_max"): "3000x14",
            _series("kvgate_service_gap_bound"): "2048x14",
            _series("kvgate_fairness_void", by="bypass"): "1x14",
            _series("kvgate_fairness_void", by="tier"): "0x14",
        },
    ),
    "KvgateReuseViolation": Example(
        {_series("kvgate_reuse_violations_total", tenant="acme"): "_x10 1x3"},
        {_series("kvgate_reuse_violations_total", tenant="acme"): "0x14"},
        {**_GATE, "tenant": "acme"},
    ),
    "KvgateCountDrift": Example(
        {_series("kvgate_count_drift_total", dialect="openai_chat", proof="sum"): "0x10 1x3"},
        {_series("kvgate_count_drift_total", dialect="openai_chat", proof="sum"): "2x40"},
        {**_GATE, "dialect": "openai_chat", "proof": "sum"},
        quiet_at="30m",
    ),
    "KvgateEngineOverflow": Example(
        {_requests(reason="engine_overflow", status="502"): "_x10 1x3"},
        {_requests(reason="prompt_overflow"): "0+1x14"},
        {**_REQUEST_LABELS, "reason": "engine_overflow", "status": "502"},
    ),
    "KvgateEngineChanged": Example(
        {_series("kvgate_engine_changes_total", what="smaller"): "0x10 1x4"},
        {_series("kvgate_engine_changes_total", what="restarted"): "0+1x14"},
        {**_GATE, "what": "smaller"},
    ),
    "KvgateLeasesExpired": Example(
        {_series("kvgate_leases_expired"): "0x10 4x4"}, {_series("kvgate_leases_expired"): "4x14"}
    ),
    "KvgateDrainsOverdue": Example(
        {_series("kvgate_drains_overdue"): "0x10 1x4"}, {_series("kvgate_drains_overdue"): "1x14"}
    ),
    "KvgateForeignTraffic": Example(
        {_series("kvgate_foreign_sightings_total"): "0x10 1x4"},
        {_series("kvgate_foreign_sightings_total"): "0x14", _series("kvgate_foreign_slots"): "0x14"},
    ),
    "KvgateStoreDown": Example({_series("kvgate_store_out"): "0x10 1x4"}, {_series("kvgate_store_out"): "0 1 0x12"}),
    "KvgateInternalErrors": Example(
        {_requests(reason="internal", status="500"): "_x10 1x3"},
        {_requests(reason="malformed"): "0+1x14"},
        {**_REQUEST_LABELS, "reason": "internal", "status": "500"},
    ),
}


def tests() -> dict[str, Any]:
    """The file that `promtool test rules` reads."""
    found = []
    for alert in ALERTS:
        example = EXAMPLES[alert.name]
        summary = re.sub(r"\{\{ \$value \| \w+ \}\}", example.value, alert.summary)
        for label, value in example.labels.items():
            summary = summary.replace(f"{{{{ $labels.{label} }}}}", value)
        rule = alert.rule()
        fired = {
            "exp_labels": {**example.labels, **rule["labels"]},
            "exp_annotations": {**rule["annotations"], "summary": summary},
        }
        found.append(_story(alert.name, "fires", example.fires, example.at, [fired]))
        found.append(_story(alert.name, "stays quiet", example.quiet, example.quiet_at, []))
    return {"rule_files": ["kvgate.rules.yml"], "evaluation_interval": "15s", "tests": found}


def _story(name: str, how: str, series: dict[str, str], at: str, fired: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": f"{name} {how}",
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": fired}],
    }
