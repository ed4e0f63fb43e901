"""The workloads by name: after the paper's (arXiv 2401.00588, section 5), and those of DESIGN section 6."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvgate.core.tenant import Tier
from loadtests.simulate.lengths import HEAVY_TAILED, Lengths
from loadtests.simulate.speed import LARGE, SMALL
from loadtests.simulate.workloads import Phase, Sender, Workload, mean_capacity

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtests.simulate.speed import Engine

CHAT_PROMPTS: Final = Lengths.between(64, 1024)
CHAT_OUTPUTS: Final = Lengths.between(16, 256)
LONG_OUTPUTS: Final = Lengths.between(32, 1024)
MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """What tenants of one workload have in common; rates are given as parts of an even share of the engine."""

    engine: Engine
    tenants: int
    prompts: Lengths = CHAT_PROMPTS
    outputs: Lengths = CHAT_OUTPUTS
    poisson: bool = False

    def sender(self, name: str, *phases: tuple[float, float], weight: float = 1.0) -> Sender:
        """A tenant that sends (from second, so many even shares) phase by phase."""
        bare = Sender(name, (), self.prompts, self.outputs, weight, poisson=self.poisson)
        even = mean_capacity(self.engine, [bare]) / self.tenants
        return replace(bare, phases=tuple(Phase(from_s, shares * even) for from_s, shares in phases))


def guaranteed(sender: Sender) -> Sender:
    """With a quarter of the pool of its own, where tiers are in force."""
    return replace(sender, tier=Tier.GUARANTEED, guaranteed_ratio=0.25)


def spot(sender: Sender) -> Sender:
    """With what nobody else wants, where tiers are in force."""
    return replace(sender, tier=Tier.SPOT)


def tiered(senders: list[Sender]) -> tuple[Sender, ...]:
    """The first has a guarantee, the last is a spot tenant."""
    return (guaranteed(senders[0]), *senders[1:-1], spot(senders[-1]))


def overload(seed: int) -> Workload:
    """Four tenants of one weight send 1.5, 3, 6 and 12 times what an even share would serve, without a pause."""
    kind = _Kind(SMALL, 4)
    senders = [kind.sender(f"x{shares:g}", (0, shares)) for shares in (1.5, 3, 6, 12)]
    return Workload("overload", said(overload), SMALL, tiered(senders), 10 * MINUTE_S, seed)


def on_off(seed: int) -> Workload:
    """One sends without a pause, one in bursts above its share, one in bursts below it; one minute on, one off."""
    kind = _Kind(SMALL, 3)

    def bursts(shares: float) -> list[tuple[float, float]]:
        return [(minute * MINUTE_S, 0 if minute % 2 else shares) for minute in range(16)]

    senders = [
        kind.sender("steady", (0, 4)),
        kind.sender("bursts", *bursts(3)),
        guaranteed(kind.sender("modest", *bursts(0.6))),
    ]
    return Workload("on-off", said(on_off), SMALL, tuple(senders), 16 * MINUTE_S, seed)


def poisson(seed: int) -> Workload:
    """Four tenants at random times: two within an even share (0.5, 0.8), two far above it (2, 6)."""
    kind = _Kind(SMALL, 4, poisson=True)
    senders = [kind.sender(f"x{shares:g}", (0, shares)) for shares in (0.5, 0.8, 2, 6)]
    return Workload("poisson", said(poisson), SMALL, tiered(senders), 15 * MINUTE_S, seed)


def shifting(seed: int) -> Workload:
    """Four tenants; every four minutes another one is the heavy sender (6 even shares), the others stay at 0.7."""
    kind = _Kind(SMALL, 4, poisson=True)
    senders = [
        kind.sender(f"heavy{at + 1}", *((4 * MINUTE_S * phase, 6 if phase == at else 0.7) for phase in range(4)))
        for at in range(4)
    ]
    return Workload("shifting", said(shifting), SMALL, (*senders[:-1], guaranteed(senders[-1])), 16 * MINUTE_S, seed)


def heavy_tailed(seed: int) -> Workload:
    """Six tenants, prompts up to 128k (80% under 2k, 92% under 8k), at 0.6 to 4 even shares, at random times."""
    kind = _Kind(LARGE, 6, HEAVY_TAILED, LONG_OUTPUTS, poisson=True)
    senders = [kind.sender(f"x{shares:g}", (0, shares)) for shares in (0.6, 0.8, 1.5, 2, 3, 4)]
    return Workload("heavy-tailed", said(heavy_tailed), LARGE, tiered(senders), 30 * MINUTE_S, seed)


def weights(seed: int) -> Workload:
    """Eight tenants with weights 1 to 128; eight requests of each always wait, longer ones of more weight."""
    senders = [
        Sender(
            f"w{1 << at}",
            (),
            Lengths.between(int(16 * 2 ** (at / 2)), int(64 * 2 ** (at / 2))),
            Lengths.between(int(4 * 2 ** (at / 2)), int(16 * 2 ** (at / 2))),
            1 << at,
            standing=8,
        )
        for at in range(8)
    ]
    return Workload("weights", said(weights), SMALL, tuple(senders), 50 * MINUTE_S, seed)


def flood(seed: int) -> Workload:
    """One tenant floods with prompts of 4k to 12k tokens; one with a guaranteed quarter of the pool chats."""
    victim = _Kind(SMALL, 8, poisson=True).sender("victim", (0, 1.0))
    flooder = _Kind(SMALL, 1, Lengths.between(4096, 12_288), CHAT_OUTPUTS).sender("flooder", (0, 1.5))
    return Workload("flood", said(flood), SMALL, (guaranteed(victim), flooder), 15 * MINUTE_S, seed)


def blocked(seed: int) -> Workload:
    """Forty tenants whose requests each need three quarters of the pool, and four that chat; all always wait."""
    large = [Sender(f"large{at + 1}", (), Lengths.always(12_000), Lengths.always(64), standing=1) for at in range(40)]
    chats = [Sender(f"chat{at + 1}", (), CHAT_PROMPTS, CHAT_OUTPUTS, standing=2) for at in range(4)]
    return Workload("blocked", said(blocked), SMALL, (*large, *chats), 10 * MINUTE_S, seed)


def crowd(seed: int, tenants: int = 1000) -> Workload:
    """Many tenants: the n-th sends n to the power of -0.7 as much as the first; together 1.5 times what is served."""
    kind = _Kind(LARGE, tenants, poisson=True)
    rates = [(at + 1) ** -0.7 for at in range(tenants)]
    scale = 1.5 * tenants / sum(rates)
    senders = [
        kind.sender(f"t{at + 1:04}", (0, rate * scale), weight=(1, 2, 4)[at % 3]) for at, rate in enumerate(rates)
    ]
    return Workload("crowd", said(crowd), LARGE, tuple(senders), 60 * MINUTE_S, seed)


SCENARIOS: Final[dict[str, Callable[[int], Workload]]] = {
    "overload": overload,
    "on-off": on_off,
    "poisson": poisson,
    "shifting": shifting,
    "heavy-tailed": heavy_tailed,
    "weights": weights,
    "flood": flood,
    "blocked": blocked,
    "crowd": crowd,
}


def said(scenario: Callable[..., Workload]) -> str:
    """What a workload says of itself."""
    return scenario.__doc__ or ""
