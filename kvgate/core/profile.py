"""What was discovered of an engine, and how each fact is known."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from kvgate.core.pool import KvPool

T_co = TypeVar("T_co", covariant=True)


class Source(StrEnum):
    """Where a fact comes from, strongest proof first; ASSUMED is the safe guess where nothing tells."""

    PROPS = "props"
    SLOTS = "slots"
    MODELS = "models"
    LOG = "log"
    SETTING = "setting"
    ASSUMED = "assumed"


class Topology(StrEnum):
    """Whether slots divide the KV cache or share it (llama.cpp `kv_unified`)."""

    DIVIDED = "divided"
    UNIFIED = "unified"


@dataclass(frozen=True, slots=True)
class Fact(Generic[T_co]):
    """A value and where it comes from."""

    value: T_co
    source: Source

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine process as it showed itself on one connection.

    Args:
        kind: the engine kind that recognised it.
        n_ctx_slot: the longest one sequence may become, in tokens. Read, never computed: `-c 8192 -np 6` is
            1536 on builds that pad and 1365 on those that do not.
        total_slots: sequences side by side.
        topology: divided or unified; no HTTP endpoint tells, so often a log's, a setting's, or assumed.
        pool_tokens: cells of the KV cache in all.
        instance: what tells this process from its successor (llama.cpp draws a new `media_marker` at each
            start), or None where the engine shows nothing of the kind.
        counts, slots_visible: which of the engine's optional endpoints answer.
        prompt_cache_mib: size limit of the RAM prompt cache that all slots share; 0 is off, -1 without limit.
        idle_slots_cached: whether idle slots are saved to it.
        context_shift: whether the engine drops the middle of a sequence that outgrows its slot, by itself.
    """

    kind: str
    n_ctx_slot: Fact[int]
    total_slots: Fact[int]
    topology: Fact[Topology]
    pool_tokens: Fact[int]
    instance: str | None = None
    build: str | None = None
    models: tuple[str, ...] = ()
    model_path: str | None = None
    model_ftype: str | None = None
    model_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    n_params: int | None = None
    n_vocab: int | None = None
    n_ctx_train: int | None = None
    chat_template_sha256: str | None = None
    kv_type_k: Fact[str] | None = None
    kv_type_v: Fact[str] | None = None
    slots_visible: bool = True
    prompt_cache_mib: Fact[int] | None = None
    idle_slots_cached: Fact[bool] | None = None
    context_shift: Fact[bool] | None = None
    fingerprint: str = field(init=False, repr=False, compare=False)
    """What decides whether two engines compute alike, hashed; the process's own identity is left out.

    The build alone is not enough: some builds call themselves b0-unknown.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self._hashed())  # once: every request asks for it

    @property
    def kv_type(self) -> str:
        """The KV cache's precision as one word, `unknown` where no log told it."""
        if self.kv_type_k is None or self.kv_type_v is None:
            return "unknown"
        k, v = self.kv_type_k.value, self.kv_type_v.value
        return k if k == v else f"{k}/{v}"

    def _hashed(self) -> str:
        parts = (
            self.kind,
            self.build,
            self.model_path,
            self.model_ftype,
            self.model_bytes,
            self.n_params,
            self.n_vocab,
            self.chat_template_sha256,
            self.kv_type,
            self.n_ctx_slot.value,
            self.total_slots.value,
            self.topology.value,
            *(fact and fact.value for fact in (self.prompt_cache_mib, self.idle_slots_cached, self.context_shift)),
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def pool(self, *, margin_tokens: int = 0, headroom_ratio: float = 0.0) -> KvPool:
        """The pool that the ledger guards; `headroom_ratio` of its tokens are never granted."""
        tokens = self.pool_tokens.value
        return KvPool(
            tokens=tokens,
            slots=self.total_slots.value,
            tokens_per_slot=self.n_ctx_slot.value,
            prompt_shared=self.topology.value is Topology.UNIFIED,
            margin_tokens=margin_tokens,
            headroom_tokens=int(tokens * headroom_ratio),
        )


@dataclass(frozen=True, slots=True)
class KvSettings:
    """What the operator says about the KV cache, where the engine does not.

    Args:
        topology: None lets the log decide, and the safe guess where there is none.
        pool_tokens: the shared pool's size where it is larger than one slot's context.
    """

    topology: Topology | None = None
    pool_tokens: int | None = None


MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """What an engine's startup log says; None where it is silent.

    Args:
        weights_mib, kv_mib: what model and KV cache take, in MiB; a draft model's are not in it.
        prompt_cache_mib: size limit of the RAM prompt cache that all slots share; 0 is off, -1 without limit.
        idle_slots_cached: whether idle slots are saved to it.
        slots_chosen_by_engine: no `-np` was given.
        context_shift: whether it drops the middle of a sequence that outgrows its slot; of the command line.
        is_speculating: a draft model, or another way to guess tokens ahead, is in use.
    """

    n_slots: int | None = None
    n_ctx_slot: int | None = None
    kv_unified: bool | None = None
    pool_tokens: int | None = None
    kv_type_k: str | None = None
    kv_type_v: str | None = None
    weights_mib: float | None = None
    kv_mib: float | None = None
    prompt_cache_mib: int | None = None
    idle_slots_cached: bool | None = None
    slots_chosen_by_engine: bool = False
    is_speculating: bool = False
    context_shift: bool | None = None

    @property
    def kv_bytes_per_token(self) -> float | None:
        """What a token of the KV cache takes, in bytes (seen: 202.50 MiB for 6 x 1536 tokens: 23,040)."""
        return self.kv_mib * MIB / self.pool_tokens if self.kv_mib and self.pool_tokens else None


def resolve_kv(
    n_ctx_slot: int, total_slots: int, facts: StartupFacts | None, settings: KvSettings
) -> tuple[Fact[Topology], Fact[int]]:
    """The KV cache's topology and size from what is known, the safe guess where nothing is.

    1. A setting that names the topology wins: the operator knows.
    2. The log's word, where it speaks of this engine (same slots, same n_ctx_slot).
    3. Neither: one pool of n_ctx_slot tokens for all. Safe whatever the truth is, and slower than need be.

    Divided: slots x n_ctx_slot cells. Unified: the setting, else the log's figure, else n_ctx_slot, since a
    shared pool is never smaller than the longest sequence that it advertises.

    Raises:
        ValueError: `pool_tokens` is set for a divided cache, or is smaller than one slot's context.
    """
    if settings.pool_tokens is not None and settings.pool_tokens < n_ctx_slot:
        raise ValueError(
            f"engine.pool_tokens = {settings.pool_tokens} is less than the engine's n_ctx_slot = {n_ctx_slot}; "
            "a shared pool holds at least one full slot"
        )
    told = facts if facts and (facts.n_slots, facts.n_ctx_slot) == (total_slots, n_ctx_slot) else None
    if settings.topology is not None:  # 1
        topology = Fact(settings.topology, Source.SETTING)
    elif told is not None and told.kv_unified is not None:  # 2
        topology = Fact(Topology.UNIFIED if told.kv_unified else Topology.DIVIDED, Source.LOG)
    else:  # 3
        topology = Fact(Topology.UNIFIED, Source.ASSUMED)
    if topology.value is Topology.DIVIDED:
        if settings.pool_tokens is not None:
            raise ValueError("engine.pool_tokens says how large a shared pool is; this engine divides its cache")
        return topology, Fact(n_ctx_slot * total_slots, topology.source)
    if settings.pool_tokens is not None:
        return topology, Fact(settings.pool_tokens, Source.SETTING)
    if told is not None and told.kv_unified and told.pool_tokens is not None:
        return topology, Fact(max(told.pool_tokens, n_ctx_slot), Source.LOG)
    return topology, Fact(n_ctx_slot, Source.ASSUMED)
