"""Whether a request is trimmed, and how: its tenant's rule and what the request itself says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgate.core.admission import Admit, Reject, decide
from kvgate.core.tenant import OnOverflow, TrimSide, TrimStrategy

if TYPE_CHECKING:
    from kvgate.core.ask import Ask
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Limits, Tenant


@dataclass(frozen=True, slots=True)
class TrimAsk:
    """What a request says of trimming, in whatever spelling.

    Args:
        wanted: True asks for it, False declines it, None leaves it to the tenant's rule.
        strategy, side: the request's own, where its spelling names one.
        prompt_tokens_max: the prompt that the client wants at most, in tokens.
        keep_calls: how many of the latest tool calls go last.
        keep_tools: tools whose calls are never dropped by themselves.
        pinned: indexes of the items that stay.
    """

    wanted: bool | None = None
    strategy: TrimStrategy | None = None
    side: TrimSide | None = None
    prompt_tokens_max: int | None = None
    keep_calls: int = 1
    keep_tools: frozenset[str] = frozenset()
    pinned: frozenset[int] = frozenset()


UNSAID = TrimAsk()
"""A request that says nothing of it."""


@dataclass(frozen=True, slots=True)
class TrimPolicy:
    """How one request is trimmed; see `Limits` and `TrimAsk`."""

    strategy: TrimStrategy
    side: TrimSide
    room_tokens: int
    stride_tokens: int = 0
    prompt_tokens_max: int | None = None
    keep_calls: int = 1
    keep_tools: frozenset[str] = frozenset()
    pinned: frozenset[int] = frozenset()


def trim_policy(limits: Limits, ask: TrimAsk) -> TrimPolicy | None:
    """How this request may be trimmed; None where it may not.

    1. A tenant with `on_overflow = "trim"` is trimmed, unless the request declines.
    2. Any other only where `trim_on_request` allows it and the request asks.
    3. The request's own strategy and side come before the tenant's; room and stride are the tenant's alone.
    """
    allowed = limits.on_overflow is OnOverflow.TRIM or limits.trim_on_request
    wanted = limits.on_overflow is OnOverflow.TRIM if ask.wanted is None else ask.wanted
    if not allowed or not wanted:
        return None
    return TrimPolicy(
        strategy=ask.strategy or limits.trim_strategy,
        side=ask.side or limits.trim_side,
        room_tokens=limits.trim_room_tokens,
        stride_tokens=limits.trim_stride_tokens,
        prompt_tokens_max=ask.prompt_tokens_max,
        keep_calls=ask.keep_calls,
        keep_tools=ask.keep_tools,
        pinned=ask.pinned,
    )


def judged_as(tenant: Tenant, ask: TrimAsk) -> Tenant:
    """The tenant by whose policy this request is judged.

    What may be trimmed may be clamped behind it; who declines to be trimmed may be clamped all the same, since
    both spellings that decline speak of the prompt alone.
    """
    limits = tenant.limits
    if trim_policy(limits, ask) is not None:
        return replace(tenant, limits=replace(limits, on_overflow=OnOverflow.TRIM))
    if limits.on_overflow is OnOverflow.TRIM:
        return replace(tenant, limits=replace(limits, on_overflow=OnOverflow.CLAMP))
    return tenant


def prompt_target(ask: Ask, prompts: tuple[int, ...], pool: KvPool, tenant: Tenant, policy: TrimPolicy) -> int:
    """The longest prompt that has the room it should have, in tokens; of a list, the longest of each prompt.

    The room is min(ask, `trim_room_tokens`), a missing ask being the tenant's default, and never more than half of
    what there is: a setting larger than the slot would leave no prompt at all. 0 where nothing would do.
    """
    empty = decide(replace(ask, output_tokens=1), (0,) * len(prompts), pool, tenant)
    if isinstance(empty, Reject):
        return 0
    limits, most = tenant.limits, max(prompts)
    wanted = limits.output_tokens_default if ask.output_tokens is None else ask.output_tokens
    room = min(wanted, policy.room_tokens, empty.room.usable_generation // 2)
    roomy = replace(ask, output_tokens=max(room, limits.output_tokens_min))
    low, high = 0, most if policy.prompt_tokens_max is None else min(most, policy.prompt_tokens_max)
    while low < high:
        middle = (low + high + 1) // 2
        fits = decide(roomy, tuple(min(tokens, middle) for tokens in prompts), pool, tenant)
        low, high = (middle, high) if isinstance(fits, Admit) else (low, middle - 1)
    return low
