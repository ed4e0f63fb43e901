"""What the operator is told: why requests are not served, and what to look at although they are."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgate.core.fairness import MILLI
from kvgate.core.profile import Source

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvgate.app.engine_watch import LifeWatch, SlotsWatch
    from kvgate.app.reuse_keeper import ReuseKeeper
    from kvgate.app.tenants_file import TenantsFile
    from kvgate.core.fairness import FairRule, FairView
    from kvgate.core.ledger import LedgerView
    from kvgate.core.profile import EngineProfile
    from kvgate.engines.llamacpp import LlamaCpp
    from kvgate.metrics import Metrics
    from kvgate.settings import Settings
    from kvgate.store.reports import Report
    from kvgate.store.shared_ledger import SharedLedger
    from kvgate.store.tenants import ValkeyTenants
    from kvgate.web import Front


@dataclass(slots=True)
class Health:
    """The state of one gate, read whenever somebody asks.

    `settings_problem` is what of the settings, as they were read last, is not in force.
    """

    settings: Settings
    engine: LlamaCpp
    ledger: SharedLedger
    metrics: Metrics
    tenants: ValkeyTenants
    tenants_file: TenantsFile
    front: Front
    life: LifeWatch
    slots: SlotsWatch
    explain: Callable[[str, str, bytes], Awaitable[dict[str, Any]]]
    reports: Callable[[str], Awaitable[tuple[Report, ...]]]
    reuse: ReuseKeeper
    settings_problem: str | None = None

    def problems(self) -> list[str]:
        """Why requests are not served now; empty while they are."""
        problems = ["this gate is shutting down"] if self.front.draining else []
        if not self.life.life.state.is_served:
            problems.append(self.life.told()["sentence"])
        if self.ledger.is_out and self.ledger.outage_pool is None:
            problems.append("the store is out, and this gate may let nobody in without it")
        return problems

    def warnings(self) -> list[str]:
        """What the operator should look at although requests are served."""
        profile, least = self.engine.profile, self.settings.engine.context_tokens_min
        warnings = self.life.warnings() + ([] if profile is None else profile_warnings(profile))
        if (foreign := self.slots.warning()) is not None:
            warnings.append(foreign)
        if profile is not None and self.engine.is_undersized and self.settings.engine.on_undersized == "warn":
            found = profile.n_ctx_slot.value
            warnings.append(f"the engine's n_ctx_slot of {found} tokens is below context_tokens_min = {least}")
        if self.tenants.stale_since is not None:
            warnings.append("the store is out: tenants and keys are as they were when it was last seen")
        if not self.tenants.has_keys and self.settings.anonymous_tenant is None:
            warnings.append(
                "no tenant has a key, so every request is refused with 401: make one with kvgate keys create "
                "TENANT, or declare one in the tenants file"
            )
        if (problem := self.tenants_file.problem) is not None:
            warnings.append(f"the tenants file was not applied, the last one stays in force: {problem}")
        if self.settings_problem is not None:
            warnings.append(self.settings_problem)
        warnings += self.engine.erred_proofs()
        warnings += self.reuse.warnings()
        warnings += self._ledger_warnings()
        if (times := self.metrics.overflows) > 0:
            warnings.append(
                f"the engine ran out of KV {times} times although the ledger had room: somebody asks it around this "
                "gate, or its slots share a cache that was taken for divided"
            )
        return warnings

    def _ledger_warnings(self) -> list[str]:
        warnings = []
        if (outage := self.ledger.outage_pool) is not None:
            warnings.append(
                f"the store is out: this gate goes by what it held, {outage.slots} slots and {outage.tokens} tokens"
            )
        if (other := self.ledger.other_pool) is not None:
            warnings.append(
                f"another gate guards this engine by other settings, and its figures are in force: {other.tokens} "
                f"tokens, {other.slots} slots, margin {other.margin_tokens}, headroom {other.headroom_tokens}"
            )
        if others := other_rules(self.ledger.rule, self.metrics.rule):
            warnings.append(
                "another gate on this store has other settings of fairness, and since it joined last its own are in "
                f"force: {', '.join(others)}; give all gates the same"
            )
        return warnings

    def status(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        profile, fair = self.engine.profile, self.ledger.fair()
        engine = profile and {"profile": profile, "fingerprint": profile.fingerprint, "kv_type": profile.kv_type}
        return {
            "engine": engine,
            "engine_life": self.life.told(),
            "counting": self.engine.proofs(),
            "reuse": self.reuse.told(),
            "ledger": self.ledger.view(),
            "fairness": None if fair is None else told_fairness(fair, self.ledger.view()),
            "pid": os.getpid(),
            "in_flight": self.front.in_flight,
            "upstream_connections": self.engine.upstream.open_connections,
            "tasks": len(asyncio.all_tasks()),
            "problems": self.problems(),
            "warnings": self.warnings(),
        }


def other_rules(in_force: FairRule, own: FairRule) -> list[str]:
    """What the ledger goes by and this gate has another figure for, each with both, as the settings name them."""

    def told(rule: FairRule) -> dict[str, str]:
        return {
            "fairness.input_price": f"{rule.input_price_milli / MILLI:g}",
            "fairness.cached_input_price": f"{rule.cached_input_price_milli / MILLI:g}",
            "fairness.output_price": f"{rule.output_price_milli / MILLI:g}",
            "fairness.bypass_max": f"{rule.bypass_max}",
            "fairness.lent_output_tokens_max": f"{rule.lent_output_tokens_max}",
            "engine.prefill_tokens_max": f"{'unset' if rule.prefill_tokens_max is None else rule.prefill_tokens_max}",
        }

    here = told(own)
    return [f"{name} = {value} (here {here[name]})" for name, value in told(in_force).items() if value != here[name]]


def told_fairness(fair: FairView, ledger: LedgerView | None) -> dict[str, Any]:
    """How fair it is, as JSON values; service in tokens at their prices."""
    bound = None if ledger is None else fair.rule.gap_bound_milli(ledger.pool, fair.least_weight_milli) / MILLI
    return {
        "tenants": {
            one.name: {
                "weight": one.weight_milli / MILLI,
                "service_recent": one.service_milli / MILLI,
                "service_share": round(fair.service_share(one), 4),
                "weight_share": round(fair.weight_share(one), 4),
                "counter": one.counter_milli / MILLI,
                "filled_tokens": one.filled_tokens,
                "waiting": one.waiting,
                "oldest_s": None if one.oldest_since_s is None else round(max(fair.now_s - one.oldest_since_s, 0), 3),
            }
            for one in fair.tenants
        },
        "jain": fair.jain,
        "gap": fair.gap_milli / MILLI,
        "gap_max": fair.gap_max_milli / MILLI,
        "gap_bound": bound,
        "void": sorted(fair.voids),
        "bypasses": fair.bypasses,
        "drains": fair.drains,
        "drain_idle_s": fair.drain_idle_s,
        "prefill_tokens": fair.prefill_tokens,
        "oldest_wait_s": round(fair.oldest_wait_s, 3),
    }


def profile_warnings(profile: EngineProfile) -> list[str]:
    """What of an engine's profile its operator should know."""
    warnings = []
    n_ctx, slots = profile.n_ctx_slot.value, profile.total_slots.value
    if profile.topology.source is Source.ASSUMED and slots > 1:
        warnings.append(
            f"nothing tells whether the engine's {slots} slots share one KV cache, so kvgate guards them as one pool "
            f"of {n_ctx} tokens: safe, and slower than need be. Name the engine's log (--engine-log FILE), or write "
            f'kv_topology = "divided" (or "unified", with pool_tokens) under [engine]'
        )
    warnings += reuse_warnings(profile)
    if not profile.slots_visible:
        warnings.append(
            "the engine does not show its slots (started with --no-slots), so what a hung-up request held is counted "
            "until drain_max_s has passed"
        )
    return warnings


def reuse_warnings(profile: EngineProfile) -> list[str]:
    """What of the engine's own caches goes on although every request says `cache_prompt: false`."""
    warnings = []
    if profile.prompt_cache_mib is not None and profile.prompt_cache_mib.value != 0:
        idle = (
            ", and idle slots are saved there"
            if profile.idle_slots_cached and profile.idle_slots_cached.value
            else ""
        )
        warnings.append(
            "the engine keeps a RAM prompt cache that all its slots share" + idle + ": what one tenant said may be "
            "kept in it, and came back to another on some builds (llama.cpp issue 27148). Start it with "
            "--cache-ram 0 --no-cache-idle-slots"
        )
    if profile.context_shift is not None and profile.context_shift.value:
        warnings.append(
            "the engine shifts its context (--context-shift): it drops the middle of a sequence that outgrows its "
            "slot, without a word to the client. Start it without that flag"
        )
    return warnings
