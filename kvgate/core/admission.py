"""The arithmetic of admission: does this request fit, and with which output limit (DESIGN section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgate.core.ask import Ask, Size
from kvgate.core.reason import Reason, Refusal, refusal
from kvgate.core.tenant import OnOverflow

if TYPE_CHECKING:
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Tenant

_CLAUSES = {
    "slot": "",
    "tenant": " for this key",
    "pool": " (shared by all requests on this server)",
    "tenant_kv": " for all that this key may hold at once",
}


@dataclass(frozen=True, slots=True)
class Room:
    """How much output fits beside a prompt, and what says so.

    `limited_by` is the bound that binds: slot, tenant (context_tokens_max), pool, or tenant_kv (kv_tokens_max).
    `limit_tokens` is that bound. `usable_generation` is tokens of each answer, and may be negative.
    """

    limit_tokens: int
    limited_by: str
    prompt_tokens: int
    usable_generation: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The request runs as asked; a missing output limit became the tenant's default, or what fits of it."""

    size: Size
    room: Room
    label = "admit"


@dataclass(frozen=True, slots=True)
class Clamp:
    """The request runs with a smaller output limit than the `asked_tokens` it named."""

    size: Size
    room: Room
    asked_tokens: int
    label = "clamp"


@dataclass(frozen=True, slots=True)
class Reject:
    """The request cannot run on this engine for this tenant, now or later."""

    refusal: Refusal
    room: Room | None
    label = "reject"


Verdict = Admit | Clamp | Reject


def room(prompt_tokens: int, sequences: int, pool: KvPool, tenant: Tenant) -> Room:
    """The room for each answer: the least of what slot, tenant, pool and the tenant's KV share leave.

    Ties go to the bound named first, so that a message names the slot where the slot alone would do.
    """
    slot = pool.tokens_per_slot
    own, held = tenant.limits.context_tokens_max, tenant.quota.kv_tokens_max
    bounds = [(slot - prompt_tokens - pool.margin_tokens, slot, "slot")]
    if own is not None:
        bounds.append((own - prompt_tokens - pool.margin_tokens, own, "tenant"))
    whole = pool.grantable_tokens
    bounds.append((pool.output_room(prompt_tokens, sequences, whole), whole, "pool"))
    if held is not None:
        bounds.append((pool.output_room(prompt_tokens, sequences, held), held, "tenant_kv"))
    usable, limit, name = min(bounds, key=lambda bound: bound[0])
    return Room(limit, name, prompt_tokens, usable)


def decide(ask: Ask, prompt_tokens: int, pool: KvPool, tenant: Tenant) -> Verdict:
    """Judge one request against the pool and its tenant's Limits.

    1. More sequences than can ever run side by side: refused, with the number that can.
    2. Less room than `output_tokens_min`: the prompt overflows. No policy helps; trimming is another step.
    3. No limit asked: the tenant's default, or what fits of it. A default never causes a rejection.
    4. The asked limit fits: admitted as it is.
    5. It does not: clamped to what fits where the tenant's policy says so, else the generation overflows.
    """
    own = tenant.quota.concurrency_max
    most = pool.slots if own is None else min(pool.slots, own)
    if ask.sequences > most:  # 1
        return Reject(
            refusal(
                Reason.TOO_MANY_SEQUENCES,
                param="n",
                sequences=ask.sequences,
                sequences_max=most,
                figures=(("sequences_max", most),),
            ),
            None,
        )
    found = room(prompt_tokens, ask.sequences, pool, tenant)
    usable, limits = found.usable_generation, tenant.limits
    if usable < limits.output_tokens_min:  # 2
        return Reject(_overflow(Reason.PROMPT_OVERFLOW, ask, found, limits.output_tokens_min), found)
    if ask.output_tokens is None:  # 3
        output = min(limits.output_tokens_default, usable)
        return Admit(Size(prompt_tokens, output, ask.sequences), found)
    if ask.output_tokens <= usable:  # 4
        return Admit(Size(prompt_tokens, ask.output_tokens, ask.sequences), found)
    if limits.on_overflow is OnOverflow.CLAMP:  # 5
        return Clamp(Size(prompt_tokens, usable, ask.sequences), found, ask.output_tokens)
    return Reject(_overflow(Reason.GENERATION_OVERFLOW, ask, found, limits.output_tokens_min), found)


def _overflow(reason: Reason, ask: Ask, found: Room, output_tokens_min: int) -> Refusal:
    asked = ask.output_tokens or 0
    return refusal(
        reason,
        param="messages" if reason is Reason.PROMPT_OVERFLOW else "max_tokens",
        figures=(
            ("n_prompt_tokens", found.prompt_tokens),
            ("n_ctx", found.limit_tokens),
            ("limited_by", found.limited_by),
            ("usable_generation", found.usable_generation),
            ("requested_output_tokens", asked),
        ),
        limit_tokens=found.limit_tokens,
        limited_by_clause=_CLAUSES[found.limited_by],
        prompt_tokens=found.prompt_tokens,
        usable_generation=max(found.usable_generation, 0),
        output_tokens_min=output_tokens_min,
        asked_tokens=asked,
        requested_tokens=found.prompt_tokens + asked * ask.sequences,
        sequences_clause=f" x {ask.sequences} answers" if ask.sequences > 1 else "",
    )
