"""Measures one idle engine, from its allocation to mixed traffic; the report is plain data."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvgate.core.measured import REPORT_VERSION
from kvgate.core.profile import KvSettings, Source, Topology
from kvgate.core.startup_log import StartupLog
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.lab.admission_probe import refuse_busy
from kvgate.lab.asking import Asked, CannotAsk
from kvgate.lab.measure_runs import Measuring, workload_for
from kvgate.ports import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.profile import EngineProfile, StartupFacts


async def measure(
    url: str,
    *,
    key: str | None,
    facts: StartupFacts | None,
    topology: Topology | None,
    context_tokens: int | None,
    pid: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The report of one engine.

    Args:
        url: where it is.
        key: its own key.
        facts: of its startup log; without them neither the KV cache's size nor its precision is known.
        topology: the operator's word for it.
        context_tokens: the context that the product needs; the slot's where None.
        pid: its process on this machine, None where its memory cannot be watched.
        say: told of each step.

    Raises:
        CannotAsk: it does not answer, is busy, or fails.
        ValueError: the target context is more than a slot has.
    """
    profile = await _profile_of(url, key, facts, topology)
    if facts is not None and (facts.n_slots, facts.n_ctx_slot) != (
        profile.total_slots.value,
        profile.n_ctx_slot.value,
    ):
        raise CannotAsk("the log is of another start: its slots are not the engine's; give the log of this one")
    told = topology or (_topology_of(facts) if facts is not None else None)
    n_ctx_slot, slots = profile.n_ctx_slot.value, profile.total_slots.value
    pool_tokens = n_ctx_slot * slots if told is Topology.DIVIDED else (facts.pool_tokens if facts else None)
    workload = replace(workload_for(n_ctx_slot, context_tokens), clients=slots)
    async with Asked(url, key) as asked:
        await refuse_busy(asked)
        bench = Measuring(asked, workload, pid, say)
        report = {
            "report": REPORT_VERSION,
            "engine": _engine(profile, facts, told),
            "machine": {"cpus": os.cpu_count(), "kind": platform.machine()},
            "workload": asdict(workload),
            "allocation": _allocation(profile, facts, pool_tokens),
            "short": await bench.short(),
            "long_prefill": await bench.long_prefill(),
            "long_generation": await bench.long_generation(),
            "parallel_control": await bench.parallel_control(told, n_ctx_slot, slots, pool_tokens),
            "production": await bench.production(slots, pool_tokens or n_ctx_slot),
        }
        say("done")
    return report


class _LogAsRead:
    """A log that was read; implements `ports.StartupLogSource`. The operator says whose it is."""

    is_childs = True

    def __init__(self, facts: StartupFacts) -> None:
        self._log = StartupLog()
        self._log.facts, self._log.starts = facts, 1

    def read(self) -> StartupLog:
        """All of it."""
        return self._log


async def _profile_of(
    url: str, key: str | None, facts: StartupFacts | None, topology: Topology | None
) -> EngineProfile:
    """The profile, and so the fingerprint, that a gate with this log and setting would see."""
    log = None if facts is None else _LogAsRead(facts)
    settings = LlamaCppSettings(KvSettings(topology))
    engine = LlamaCpp(url, settings, time.monotonic, startup_log=log, api_key=key)
    try:
        return await engine.discover()
    except Refused as refused:
        raise CannotAsk(f"{refused.refusal.message} ({refused.detail or url})") from None
    finally:
        await engine.close()


def _topology_of(facts: StartupFacts) -> Topology | None:
    if facts.kv_unified is None:
        return None
    return Topology.UNIFIED if facts.kv_unified else Topology.DIVIDED


def _engine(profile: EngineProfile, facts: StartupFacts | None, topology: Topology | None) -> dict[str, Any]:
    return {
        "fingerprint": profile.fingerprint,
        "build": profile.build,
        "model": (profile.model_path or "").replace("\\", "/").rpartition("/")[2] or None,
        "model_ftype": profile.model_ftype,
        "n_params": profile.n_params,
        "n_ctx_train": profile.n_ctx_train,
        "kv_type": profile.kv_type,
        "n_ctx_slot": profile.n_ctx_slot.value,
        "total_slots": profile.total_slots.value,
        "topology": topology,
        "is_speculating": facts.is_speculating if facts is not None else None,
    }


def _allocation(profile: EngineProfile, facts: StartupFacts | None, pool_tokens: int | None) -> dict[str, Any]:
    """What the engine took at its start, each figure with the source that told it."""
    weights, kv = (facts.weights_mib, facts.kv_mib) if facts is not None else (None, None)
    weights_source = str(Source.LOG)
    if weights is None and profile.model_bytes is not None:
        weights, weights_source = round(profile.model_bytes / 2**20, 2), str(Source.MODELS)
    return {
        "weights_mib": weights,
        "weights_source": weights_source if weights is not None else None,
        "kv_mib": kv,
        "kv_bytes_per_token": round(kv * 2**20 / pool_tokens) if kv is not None and pool_tokens else None,
        "kv_type_k": facts.kv_type_k if facts is not None else None,
        "kv_type_v": facts.kv_type_v if facts is not None else None,
        "pool_tokens": pool_tokens,
        "n_ctx_slot": profile.n_ctx_slot.value,
        "total_slots": profile.total_slots.value,
        "is_speculating": facts.is_speculating if facts is not None else None,
        "prompt_cache_mib": facts.prompt_cache_mib if facts is not None else None,
    }
