"""Who may have prefix reuse on which engine: a suite's report, the pin that rests on it, and the rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.core.reuse import Reuse
from kvgate.core.tenant import ReusePolicy

if TYPE_CHECKING:
    from kvgate.core.profile import EngineProfile
    from kvgate.core.tenant import Tenant

SUITE_TENANT: Final = "kvgate-suite"
"""The gate's own tenant, as which the suite asks; its `reuse` is `suite`, and it comes after everybody else."""

VIOLATIONS_MAX: Final = 3
"""So many answers in a row that reused what they were told not to take the engine's pin away."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run of the suite measured.

    Args:
        noise_nats: the largest difference in the log-probability of one forced continuation, cold against cold.
        difference_nats: the same, reused against cold.
        prefill_saved_ratio: prompt tokens that were reused, of all in the reused runs, 0 to 1.
        latency_ratio: seconds of the reused runs over seconds of the cold ones.
    """

    noise_nats: float
    difference_nats: float
    prefill_saved_ratio: float
    latency_ratio: float


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """How one run of the suite went, on one engine process.

    `finished_at_s` is Unix time. `instance` is None where the engine shows nothing that tells its process from the
    next; such an engine cannot be pinned.
    """

    fingerprint: str
    instance: str | None
    suite_version: int
    passed: bool
    cases_run: int
    cases_failed: int
    figures: Figures
    finished_at_s: float


@dataclass(frozen=True, slots=True)
class Pin:
    """One engine process on which reuse is allowed, and the evidence for it; `by` is who said so."""

    fingerprint: str
    instance: str
    suite_version: int
    figures: Figures
    pinned_at_s: float
    by: str


EVERYBODY: Final = "*"
"""In place of names: whoever has a key."""


@dataclass(frozen=True, slots=True)
class CanaryState:
    """What the store says: the pins, and the tenants beside those whose own setting is `canary`.

    `strangers` are those whom the engine process `instance` has been there for, through any gate since it started,
    without their being on the allowlist: names, or `EVERYBODY`. `dedicated_to` are all whom any gate's setting named
    for that process.
    """

    pins: tuple[Pin, ...] = ()
    widened: frozenset[str] = frozenset()
    instance: str | None = None
    strangers: frozenset[str] = frozenset()
    dedicated_to: frozenset[str] = frozenset()

    def pin_of(self, profile: EngineProfile) -> Pin | None:
        """The pin of this very process, if it has one."""
        for pin in self.pins:
            if pin.fingerprint == profile.fingerprint and pin.instance == profile.instance:
                return pin
        return None


@dataclass(frozen=True, slots=True)
class Sharers:
    """Who is served by an engine: `dedicated_to` as the setting names them, and which of those are unlisted.

    `unlisted` holds the names of tenants of that list that may not have reuse themselves.
    """

    dedicated_to: frozenset[str] = frozenset()
    unlisted: frozenset[str] = frozenset()

    @property
    def strangers(self) -> frozenset[str]:
        """Those who are served without being on the list."""
        return self.unlisted if self.dedicated_to else frozenset({EVERYBODY})


def is_listed(tenant: Tenant, state: CanaryState | None) -> bool:
    """Whether a tenant is on the allowlist: by its own setting, or because the list was widened."""
    return tenant.reuse is ReusePolicy.CANARY or (state is not None and tenant.name in state.widened)


def why_off(
    tenant: Tenant, state: CanaryState | None, profile: EngineProfile, sharers: Sharers, *, asked: bool = False
) -> str | None:
    """Why a tenant's request has no prefix reuse on this engine, in one sentence; None where it has it.

    1. The suite's own tenant has what each of its requests asks for (`asked`, a body with `cache_prompt: true`): it
       must measure before a pin.
    2. The tenant is on the allowlist. While nobody knows what the store says, nobody is.
    3. The engine serves nobody but tenants who are on it too and whom this gate names, and this process never did:
       what anyone leaves in a slot can be found by whoever may reuse (docs/adr/0001-reuse-isolation.md).
    4. This very process is pinned: same fingerprint, same instance.
    """
    if tenant.reuse is ReusePolicy.SUITE:  # 1
        return None if asked else "the suite asked for a cold run"
    if state is None:  # 2
        return "the store is out, so nobody knows what is pinned"
    if not is_listed(tenant, state):
        return "the tenant is not on the canary allowlist"
    return _why_shared(tenant, sharers) or _why_unclean(state, profile, sharers) or _why_unpinned(state, profile)


def _why_shared(tenant: Tenant, sharers: Sharers) -> str | None:  # 3
    if tenant.name not in sharers.dedicated_to:
        return "the engine is not dedicated to this tenant (engine.dedicated_to)"
    if sharers.unlisted:
        return f"the engine also serves tenants who are not on the allowlist: {', '.join(sorted(sharers.unlisted))}"
    return None


def _why_unclean(state: CanaryState, profile: EngineProfile, sharers: Sharers) -> str | None:  # 3
    if profile.instance is None:
        return "the engine shows nothing that tells its process from the next, so it cannot be pinned"
    if state.instance != profile.instance:
        return "the engine has just been replaced"
    if state.strangers:
        who = "everybody" if EVERYBODY in state.strangers else ", ".join(sorted(state.strangers))
        return (
            f"this engine process has served {who} off the allowlist, and what they said is in its slots: restart it"
        )
    if others := state.dedicated_to - sharers.dedicated_to:
        return (
            f"another gate's engine.dedicated_to names {', '.join(sorted(others))} for this engine process too: "
            "name the same tenants at every gate of this engine, and restart the engine where one was taken out"
        )
    return None


def _why_unpinned(state: CanaryState, profile: EngineProfile) -> str | None:  # 4
    if state.pin_of(profile) is None:
        return "this engine process is not pinned by a suite that passed on it"
    return None


def reuse_of(
    tenant: Tenant, state: CanaryState | None, profile: EngineProfile, sharers: Sharers, *, asked: bool = False
) -> Reuse:
    """What prefix reuse a tenant's request has on the engine of this very connection."""
    return Reuse.OFF if why_off(tenant, state, profile, sharers, asked=asked) else Reuse.KEEP


@dataclass(frozen=True, slots=True)
class Violations:
    """Answers that reused although they were told not to: how many came one after the other, without a good one."""

    in_a_row: int = 0

    def after(self, *, violated: bool) -> Violations:
        """The count after another answer that was told not to reuse."""
        return Violations(self.in_a_row + 1 if violated else 0)

    @property
    def unpins(self) -> bool:
        """Whether it is enough to take the pin away."""
        return self.in_a_row >= VIOLATIONS_MAX
