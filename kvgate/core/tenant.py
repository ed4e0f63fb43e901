"""Who asks: a tenant, its Limits on one request and its Quota on what it holds at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class OnOverflow(StrEnum):
    """What to do with a request whose output does not fit beside its prompt."""

    REJECT = "reject"
    CLAMP = "clamp"
    TRIM = "trim"


class LoopGuard(StrEnum):
    """What to do about an answer that repeats itself."""

    OFF = "off"
    OBSERVE = "observe"
    STOP = "stop"


class TrimStrategy(StrEnum):
    """In which order a conversation loses its parts."""

    OLDEST_FIRST = "oldest-first"
    MIDDLE_OUT = "middle-out"
    TOOL_OUTPUT_FIRST = "tool-output-first"


class TrimSide(StrEnum):
    """Which end of a text prompt is cut off."""

    LEFT = "left"
    RIGHT = "right"


class ReusePolicy(StrEnum):
    """Whether a tenant may have prefix reuse, where everything else allows it (`core.canary`).

    `suite` is for the gate's own suite alone, and no tenants file can name it: each request has what it asks for.
    """

    OFF = "off"
    CANARY = "canary"
    SUITE = "suite"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on ONE request, in tokens; None is no bound of the tenant's own.

    `trim_*` say how a prompt is shortened (`core.trim_policy`), where it is.
    """

    context_tokens_max: int | None = None
    output_tokens_min: int = 1
    output_tokens_default: int = 1024
    on_overflow: OnOverflow = OnOverflow.REJECT
    trim_on_request: bool = False
    trim_strategy: TrimStrategy = TrimStrategy.OLDEST_FIRST
    trim_side: TrimSide = TrimSide.LEFT
    trim_room_tokens: int = 256
    trim_stride_tokens: int = 0
    loop_guard: LoopGuard = LoopGuard.OBSERVE


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on what a tenant holds and waits for at once, and on a minute; None is no bound of the tenant's own.

    Args:
        concurrency_max: sequences running or draining.
        kv_tokens_max: cells reserved by them.
        queue_max: requests waiting.
        queue_timeout_s: seconds that one request may wait.
        requests_per_minute: requests that were let in or wait, in any 60 seconds.
        tokens_per_minute: their prompts and output limits, corrected by what they took (`core.minute`).
    """

    concurrency_max: int | None = None
    kv_tokens_max: int | None = None
    queue_max: int = 64
    queue_timeout_s: float = 30.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Tier(StrEnum):
    """Who may use what of the pool is free."""

    GUARANTEED = "guaranteed"
    ELASTIC = "elastic"
    SPOT = "spot"


WEIGHT_MIN, WEIGHT_MAX = 0.01, 1000.0


@dataclass(frozen=True, slots=True)
class Share:
    """What a tenant is due when there is not enough for all.

    Args:
        weight: two tenants that both wait get service in the ratio of their weights; WEIGHT_MIN to WEIGHT_MAX.
        tier: a guaranteed tenant has a part of the pool of its own, a spot tenant only what nobody else wants.
        guaranteed_ratio: that part, of the whole; 0 in the other tiers.
    """

    weight: float = 1.0
    tier: Tier = Tier.ELASTIC
    guaranteed_ratio: float = 0.0

    @property
    def weight_milli(self) -> int:
        """The weight in whole thousandths."""
        return round(self.weight * 1000)

    @property
    def guaranteed_ppm(self) -> int:
        """The guaranteed part in whole millionths."""
        return round(self.guaranteed_ratio * 1_000_000) if self.tier is Tier.GUARANTEED else 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """One party that shares the engine; `models` None means every model."""

    name: str
    limits: Limits = field(default_factory=Limits)
    quota: Quota = field(default_factory=Quota)
    models: frozenset[str] | None = None
    share: Share = field(default_factory=Share)
    reuse: ReusePolicy = ReusePolicy.OFF
