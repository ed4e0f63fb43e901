"""What is asked of a deployment of llama-server before users meet it, and what a check of it found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgate.core.command_line import CommandLine
    from kvgate.core.profile import EngineProfile, StartupFacts, Topology


class Level(StrEnum):
    """How bad a finding is: only an error fails the check."""

    ERROR = "error"
    WARNING = "warning"


class Rule(Enum):
    """Every rule: its stable name, and what it asks for."""

    SOURCES = ("sources-disagree", "engine, log and command line speak of the same start")
    SLOT_CONTEXT = ("slot-context", "a slot has at least the context that the product needs")
    POOL = ("pool", "the slots together hold no more than the KV cache")
    CONTEXT = ("context", "-c is given, and not left to the model")
    PARALLEL = ("parallel", "-np is given, and not left to the engine")
    KV_PRECISION = ("kv-precision", "the precision of K and V is given, or the log tells it")
    REUSE = ("reuse", "prefix reuse is switched on or off, and not left to the default")
    CONTEXT_SHIFT = ("context-shift", "a full slot ends the answer and does not forget its beginning")
    RAM_CACHE = ("ram-cache", "no prompt of one tenant stays in a cache that all slots share")
    IDLE_SLOTS_CACHE = ("idle-slots-cache", "no idle slot of one tenant is saved to a cache that all slots share")
    SPECULATION_MARGIN = ("speculation-margin", "drafted tokens have a margin in every slot")

    @property
    def label(self) -> str:
        """Its name in every output."""
        return self.value[0]

    @property
    def meaning(self) -> str:
        """What it asks for."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule.

    Args:
        sentence: what was found, with its figures.
        fix: what exactly to set.
        is_acknowledged: the operator knows, and wants it so.
    """

    rule: Rule
    level: Level
    sentence: str
    fix: str
    is_acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to judge by; at least one of them."""

    engine: EngineProfile | None = None
    log: StartupFacts | None = None
    command: CommandLine | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the operator asks for.

    Args:
        context_tokens_min: the least n_ctx_slot.
        tenants: how many share the engine, None where it is not said.
        margin_tokens: the gate's `engine.margin_tokens`.
        acknowledged: names of rules that may be broken.
    """

    context_tokens_min: int
    tenants: int | None = None
    margin_tokens: int = 0
    acknowledged: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome: what is broken, what nothing told, and the figures that it rests on."""

    findings: tuple[Finding, ...]
    not_judged: tuple[tuple[Rule, str], ...]
    n_ctx_slot: int | None
    slots: int | None
    source: str
    pool_tokens: int | None
    topology: Topology | None

    @property
    def ok(self) -> bool:
        """Whether no error is left that nobody acknowledged."""
        return not any(finding.level is Level.ERROR and not finding.is_acknowledged for finding in self.findings)
