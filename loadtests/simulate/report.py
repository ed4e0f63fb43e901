"""What a person reads: for each workload the policies side by side, then each tenant against its weight."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from loadtests.simulate.terminal import bar, line, number, percent, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtests.simulate.results import Result, TenantResult
    from loadtests.simulate.workloads import Workload

FAIR_HEAD: Final = ("policy", "jain", "tenths", "gap", "bound", "gap/bound", "starved s", "drains", "bypasses")
WORK_HEAD: Final = (
    "policy",
    "tokens/s",
    "busy",
    "wait p50",
    "p95",
    "max s",
    "ms/token",
    "refused",
    "idle s",
    "held back s",
)
TENANT_HEAD: Final = (
    "tenant",
    "weight",
    "sent",
    "served",
    "service",
    "fair",
    "of fair",
    "",
    "wait p50",
    "p95",
    "first token p95",
    "ms/token p95",
    "starved s",
)


def report(workload: Workload, results: Sequence[Result], tenants_shown: int) -> str:
    """Everything about one workload."""
    pool, speed = workload.engine.pool, workload.engine.speed
    shared = " (shared)" if pool.prompt_shared else ""
    setting = (
        f"   {len(workload.senders)} tenants, {workload.duration_s:g} s, seed {workload.seed}; engine: {pool.slots} "
        f"slots, {pool.tokens:,} cells{shared}, prefill {speed.prefill_tokens_per_s:,.0f} tokens/s, "
        f"a step {speed.decode_s(1) * 1e3:.3g} to {speed.decode_s(pool.slots) * 1e3:.3g} ms"
    )
    parts = [
        f"== {workload.name}: {workload.about}",
        setting,
        "",
        table(FAIR_HEAD, [_fair_row(found) for found in results]),
        "",
        table(WORK_HEAD, [_work_row(found) for found in results]),
    ]
    parts += [said for found in results for said in _voided(found)]
    for found in results:
        parts += ["", f"-- {workload.name}, {found.policy}: tenants", tenants(found.tenants, tenants_shown)]
    parts += [
        "",
        f"-- {workload.name}: weighted service over time (each line is one tenant's rate; full = the highest)",
    ]
    parts += [said for found in results for said in _rates(found, workload, tenants_shown)]
    parts += ["", f"-- {workload.name}: largest gap of each moment against the bound (full = the bound)"]
    bound = next((found.ruling.bound for found in results if found.ruling.bound), None)
    full = bound or max(found.gap for found in results)
    parts += [f"{found.policy:12} |{line([s.gap for s in found.samples], full)}|" for found in results]
    return "\n".join(parts)


def _fair_row(found: Result) -> list[str]:
    ruling, bound = found.ruling, found.ruling.bound
    return [
        found.policy,
        f"{found.jain:.3f}",
        f"{found.jain_windows:.3f}",
        number(found.gap),
        "-" if bound is None else number(bound),
        "-" if bound is None else f"{found.gap / bound:.2f}",
        number(found.starved.starved_s),
        str(ruling.drains),
        str(ruling.bypasses),
    ]


def _work_row(found: Result) -> list[str]:
    held_back = sum(seconds for reason, seconds in found.idle_slot_s.items() if reason)
    return [
        found.policy,
        number(found.tokens_per_s),
        percent(found.slots_busy),
        number(found.wait_s.p50),
        number(found.wait_s.p95),
        number(found.wait_s.most),
        number(found.token_s.p95 * 1e3),
        str(sum(found.refused.values())),
        number(found.idle_for_nothing_s),
        number(held_back),
    ]


def tenants(found: Sequence[TenantResult], shown: int) -> str:
    """Each tenant's line; of many, those farthest from what was fair."""
    ranked = sorted(found, key=lambda tenant: -abs(tenant.of_fair - 1))[:shown]
    chosen = [tenant for tenant in found if tenant in ranked]
    rows = [
        [
            tenant.name,
            f"{tenant.weight:g}",
            str(tenant.sent),
            str(tenant.finished),
            number(tenant.service),
            number(tenant.fair_service),
            percent(tenant.of_fair),
            bar(tenant.of_fair, 2, 20),
            number(tenant.wait_s.p50),
            number(tenant.wait_s.p95),
            number(tenant.first_token_s.p95),
            number(tenant.token_s.p95 * 1e3),
            number(tenant.starved_s),
        ]
        for tenant in chosen
    ]
    said = table(TENANT_HEAD, rows)
    return (
        said if len(chosen) == len(found) else f"{said}\n   and {len(found) - len(chosen)} tenants nearer to theirs"
    )


def _voided(found: Result) -> list[str]:
    said = []
    if found.ruling.voids:
        said.append(f"   {found.policy}: the bound does not cover what happened: {', '.join(found.ruling.voids)}")
    for reason, seconds in sorted(found.idle_slot_s.items()):
        if reason:
            said.append(f"   {found.policy}: {number(seconds)} slot-seconds held back: {reason}")
    return said


def _rates(found: Result, workload: Workload, shown: int) -> list[str]:
    names = [sender.name for sender in workload.senders][:shown]
    rates = {
        name: [
            (after.service[name] - before.service[name]) / workload.sender(name).weight
            for before, after in pairwise(found.samples[::2])
        ]
        for name in names
    }
    full = max((max(of) for of in rates.values()), default=0.0)
    return [f"{found.policy:12} {name:>10} |{line(of, full)}|" for name, of in rates.items()]
