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
    from kvgate.core.trim_search import Trimmed

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
class Trim:
    """The request runs with a shorter prompt than it came with, and perhaps a smaller output limit."""

    size: Size
    room: Room
    trimmed: Trimmed
    label = "trim"


@dataclass(frozen=True, slots=True)
class Reject:
    """The request cannot run on this engine for this tenant, now or later."""

    refusal: Refusal
    room: Room | None
    label = "reject"


Verdict = Admit | Clamp | Trim | Reject


def room(prompts: tuple[int, ...], sequences: int, pool: KvPool, tenant: Tenant) -> Room:
    """The room for each answer: the least of what slot, tenant, pool and the tenant's KV share leave.

    Ties go to the bound named first, so that a message names the slot where the slot alone would do.

    Args:
        prompts: tokens of the prompts that run side by side.
        sequences: answers that run side by side, len(prompts) or a multiple of it.
        pool: what the engine can hold.
        tenant: whose bounds apply beside it.
    """
    return min(bounds_of(prompts, sequences, pool, tenant), key=lambda found: found.usable_generation)


def bounds_of(prompts: tuple[int, ...], sequences: int, pool: KvPool, tenant: Tenant) -> list[Room]:
    """What each bound alone would leave; `room` is the least of them, and takes the same arguments."""
    longest, slot = max(prompts), pool.tokens_per_slot
    own, held = tenant.limits.context_tokens_max, tenant.quota.kv_tokens_max
    found = [Room(slot, "slot", longest, slot - longest - pool.margin_tokens)]
    if own is not None:
        found.append(Room(own, "tenant", longest, own - longest - pool.margin_tokens))
    whole = pool.grantable_tokens
    found.append(Room(whole, "pool", longest, pool.output_room(prompts, sequences, whole)))
    if held is not None:
        found.append(Room(held, "tenant_kv", longest, pool.output_room(prompts, sequences, held)))
    return found


def decide(ask: Ask, prompts: tuple[int, ...], pool: KvPool, tenant: Tenant) -> Admit | Clamp | Reject:
    """Judge one request against the pool and its tenant's Limits.

    1. A list of prompts runs as slots come free: at most as many at once as there are slots for, and the
       longest may be among them. More sequences than can ever run side by side: refused, with the number.
    2. Less room than `output_tokens_min` (0 where nothing is generated): the prompt overflows. No policy helps;
       trimming is another step.
    3. No limit asked: the tenant's default, or what fits of it. A default never causes a rejection.
    4. The asked limit fits: admitted as it is.
    5. It does not: clamped to what fits where the tenant's policy says so, else the generation overflows.
       What may be trimmed is clamped where it was trimmed already, or cannot be (`kvgate.trimming`).

    Args:
        ask: what is wanted.
        prompts: tokens of each prompt, in any order; one, except for prompt lists.
        pool: what the engine can hold.
        tenant: whose Limits apply.
    """
    most = min(pool.slots, pool.slots if tenant.quota.concurrency_max is None else tenant.quota.concurrency_max)
    at_once = max(1, min(len(prompts), pool.slots // ask.sequences))
    sequences = at_once * ask.sequences
    if sequences > most:  # 1
        return Reject(_too_many(ask, sequences, most), None)
    held = tuple(sorted(prompts, reverse=True)[:at_once])
    found, limits = room(held, sequences, pool, tenant), tenant.limits
    usable, least = found.usable_generation, limits.output_tokens_min if ask.generates else 0
    if usable < least:  # 2
        return Reject(_overflow(Reason.PROMPT_OVERFLOW, ask, found, least, held), found)
    wanted = ask.output_tokens
    if wanted is None:  # 3
        wanted = min(limits.output_tokens_default, usable)
    side_by_side, queued = held if at_once > 1 else (), len(prompts) - at_once
    size = Size(held[0], min(wanted, usable), sequences, side_by_side, queued)
    if wanted <= usable:  # 4
        return Admit(size, found)
    if limits.on_overflow is not OnOverflow.REJECT:  # 5
        return Clamp(size, found, wanted)
    return Reject(_overflow(Reason.GENERATION_OVERFLOW, ask, found, least, held), found)


def overflow_clauses(found: Room) -> tuple[int, str]:
    """The limit that binds, and the words that say whose it is, for a sentence about it."""
    return found.limit_tokens, _CLAUSES[found.limited_by]


def _too_many(ask: Ask, sequences: int, most: int) -> Refusal:
    return refusal(
        Reason.TOO_MANY_SEQUENCES,
        param="n" if ask.sequences > most else ask.prompt_field,
        sequences=sequences,
        sequences_max=most,
        figures=(("sequences_max", most),),
    )


def _overflow(reason: Reason, ask: Ask, found: Room, output_tokens_min: int, held: tuple[int, ...]) -> Refusal:
    asked, listed = ask.output_tokens or 0, len(held) > 1
    room_left = max(found.usable_generation, 0)
    leaves = f", which leaves {room_left} for the answer where at least {output_tokens_min} must fit"
    together = f"the {len(held)} longest prompts of your list, which run side by side, have {sum(held)} tokens"
    return refusal(
        reason,
        param=ask.prompt_field if reason is Reason.PROMPT_OVERFLOW else ask.limit_field,
        figures=(
            ("n_prompt_tokens", found.prompt_tokens),
            ("n_ctx", found.limit_tokens),
            ("limited_by", found.limited_by),
            ("usable_generation", found.usable_generation),
            ("requested_output_tokens", asked),
            ("output_tokens_min", output_tokens_min),
        ),
        # The limit that binds one answer: what is reserved beside it (margins, other answers) is taken off, so that
        # the sum that the sentence names is always above the limit that it names.
        limit_tokens=found.limit_tokens
        if reason is Reason.PROMPT_OVERFLOW
        else found.prompt_tokens + found.usable_generation,
        limited_by_clause=_CLAUSES[found.limited_by],
        prompt_tokens=found.prompt_tokens,
        prompt_clause=together if listed else f"your prompt has {found.prompt_tokens} tokens",
        leaves_clause=leaves if ask.generates else "",
        beside="each prompt of this list" if listed else "this prompt",
        advice="split the list" if listed else f"shorten the {ask.prompt_field.replace('_', ' ')}",
        usable_generation=room_left,
        output_tokens_min=output_tokens_min,
        asked_tokens=asked,
        requested_tokens=found.prompt_tokens + asked,
        sequences_clause=f"each of {ask.sequences} answers" if ask.sequences > 1 else "the answer",
    )
