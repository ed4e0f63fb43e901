"""Reads a llama-server command line for what it says of context, slots and caches, as llama-server itself would."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOTS_AUTO: Final = 4
"""Slots that current builds start where `-np` is missing or -1; they share one pool (seen)."""


class BadCommandLine(ValueError):
    """A flag has a value that llama-server would refuse; the message names both."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line says; None where it is silent.

    Args:
        context_tokens: `-c`, the whole KV cache; 0 means what the model was trained for.
        slots: `-np`; -1 lets the engine choose.
        kv_unified: whether slots share the cache.
        per_slot_tokens: `--kv-unified-per-slot`, the most that a slot of a shared cache may take.
        cache_prompt: whether requests reuse a slot's prefix unless they say otherwise.
        cache_reuse_tokens: `--cache-reuse`, the least chunk that is shifted and used again; 0 is off.
        prompt_cache_mib: `--cache-ram`; 0 is off, -1 without limit.
        idle_slots_cached: whether idle slots are saved to it.
        context_shift: whether a full slot loses its oldest half and goes on.
        is_speculating: a draft model or another kind of speculation is named.
        draft_tokens_max: the longest draft.
    """

    context_tokens: int | None = None
    slots: int | None = None
    kv_type_k: str | None = None
    kv_type_v: str | None = None
    kv_unified: bool | None = None
    per_slot_tokens: int | None = None
    cache_prompt: bool | None = None
    cache_reuse_tokens: int | None = None
    prompt_cache_mib: int | None = None
    idle_slots_cached: bool | None = None
    context_shift: bool | None = None
    is_speculating: bool = False
    draft_tokens_max: int | None = None

    @property
    def slots_started(self) -> int:
        """How many slots it starts."""
        return self.slots if self.slots is not None and self.slots > 0 else SLOTS_AUTO

    @property
    def is_unified(self) -> bool:
        """Whether its slots share the cache: said, or the engine's choice where the number of slots is its own."""
        return self.kv_unified if self.kv_unified is not None else (self.slots or -1) < 0

    @property
    def pool_tokens(self) -> int | None:
        """The whole cache, None where the model decides. Builds that pad may have more."""
        if self.context_tokens:
            return self.context_tokens
        per_slot = self.per_slot_tokens if self.is_unified else None
        return None if per_slot is None or self.context_tokens == 0 else per_slot * self.slots_started

    @property
    def n_ctx_slot_least(self) -> int | None:
        """What a slot has at least: builds that pad give more, none gives less; None where the model decides."""
        if (pool := self.pool_tokens) is None:
            return None
        if not self.is_unified:
            return pool // self.slots_started
        return min(pool, self.per_slot_tokens or pool)


_NUMBERS: Final = {
    "context_tokens": ("-c", "--ctx-size", "CTX_SIZE"),
    "slots": ("-np", "--parallel", "N_PARALLEL"),
    "per_slot_tokens": ("--kv-unified-per-slot", "KV_UNIFIED_PER_SLOT"),
    "cache_reuse_tokens": ("--cache-reuse", "CACHE_REUSE"),
    "prompt_cache_mib": ("-cram", "--cache-ram", "CACHE_RAM"),
    "draft_tokens_max": (
        "--spec-draft-n-max", "--draft-max", "--draft", "--draft-n", "SPEC_DRAFT_N_MAX", "DRAFT_MAX",
    ),
}  # fmt: skip
_NEVER_NEGATIVE: Final = frozenset({"context_tokens", "per_slot_tokens"})
_WORDS: Final = {
    "kv_type_k": ("-ctk", "--cache-type-k", "CACHE_TYPE_K"),
    "kv_type_v": ("-ctv", "--cache-type-v", "CACHE_TYPE_V"),
}
_SWITCHES: Final = {
    "kv_unified": (("-kvu", "--kv-unified"), ("-no-kvu", "--no-kv-unified"), "KV_UNIFIED"),
    "cache_prompt": (("--cache-prompt",), ("--no-cache-prompt",), "CACHE_PROMPT"),
    "idle_slots_cached": (("--cache-idle-slots",), ("--no-cache-idle-slots",), "CACHE_IDLE_SLOTS"),
    "context_shift": (("--context-shift",), ("--no-context-shift",), "CONTEXT_SHIFT"),
}
_DRAFTS: Final = (
    "-md", "--model-draft", "--spec-draft-model", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf",
    "SPEC_DRAFT_MODEL", "MODEL_DRAFT", "SPEC_DRAFT_HF_REPO", "HFD_REPO",
)  # fmt: skip
_KINDS: Final = ("--spec-type", "SPEC_TYPE")

_VALUED: Final = (
    {name: (field, int) for field, names in _NUMBERS.items() for name in names}
    | {name: (field, str) for field, names in _WORDS.items() for name in names}
    | dict.fromkeys((*_DRAFTS, *_KINDS), ("is_speculating", bool))
)
_SWITCHED: Final = {
    name: (field, is_on)
    for field, (on, off, _) in _SWITCHES.items()
    for names, is_on in ((on, True), (off, False))
    for name in names
}
_SWITCHED_BY_ENV: Final = {variable: field for field, (_, _, variable) in _SWITCHES.items()}

_VARIABLE = re.compile(r"(?:^|[^A-Za-z0-9_])LLAMA_ARG_(\w+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:^|[/\\=])llama-server[^/\\\s]*$")
_WRAPPED = re.compile(r"llama-server\S*\s+-")  # bash -c "llama-server ..."
_ON, _OFF = frozenset({"on", "enabled", "true", "1"}), frozenset({"off", "disabled", "false", "0"})


def read_words(words: Sequence[str]) -> CommandLine:
    """What these words say; of a flag given twice the last one counts, and flags win over `LLAMA_ARG_*` variables.

    Variables are read where they stand among the words: before the program, behind docker's `-e`, in a unit file.
    Flags of other matters are passed over.

    Raises:
        BadCommandLine: a value is none.
    """
    said: dict[str, Any] = {}
    flagged: dict[str, Any] = {}
    wrapped = next((word for word in words if _WRAPPED.search(word)), None)
    if wrapped is not None:
        return read_line(wrapped)
    begun = not any(_PROGRAM.search(word) for word in words)
    rest = iter(words)
    for word in rest:
        if found := _VARIABLE.search(word):
            said |= _of_variable(found[1], found[2].strip("\"'"))
            continue
        if not begun:  # flags of docker, numactl, systemd-run
            begun = _PROGRAM.search(word) is not None
            continue
        name, sign, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in _SWITCHED and not sign:
            field, is_on = _SWITCHED[name]
            flagged[field] = is_on
        elif name in _VALUED and name.startswith("-"):
            if not sign and (value := next(rest, "")) == "":
                raise BadCommandLine(f"{name} has no value")
            flagged |= _of_value(name, name, value)
        elif name == "--spec-default" or re.fullmatch(r"--fim-.*-spec", name):
            flagged["is_speculating"] = True
    return CommandLine(**(said | flagged))


def read_line(line: str) -> CommandLine:
    r"""What a command line as a shell would read it says; lines may be continued with `\`.

    Raises:
        BadCommandLine: a quotation does not end, or a value is none.
    """
    try:
        words = shlex.split(line.replace("\\\r\n", " ").replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise BadCommandLine(f"this is no command line: {error}") from None
    return read_words(words)


def _of_variable(variable: str, value: str) -> dict[str, Any]:
    if (field := _SWITCHED_BY_ENV.get(variable.removeprefix("NO_"))) is not None:
        if variable.startswith("NO_"):
            return {field: False}  # whatever its value
        if value.lower() not in _ON | _OFF:
            raise BadCommandLine(f"LLAMA_ARG_{variable} is neither on nor off: {value!r}")
        return {field: value.lower() in _ON}
    known = variable in _VALUED and not variable.startswith("-")
    return _of_value(variable, f"LLAMA_ARG_{variable}", value) if known else {}


def _of_value(name: str, shown: str, value: str) -> dict[str, Any]:
    field, kind = _VALUED[name]
    if kind is int:
        if not re.fullmatch(r"-?\d{1,12}", value):
            raise BadCommandLine(f"{shown} takes a number, not {value!r}")
        if field in _NEVER_NEGATIVE and int(value) < 0:
            raise BadCommandLine(f"{shown} takes a number of tokens, not {value!r}")
        return {field: int(value)}
    if name in _KINDS:
        return {field: True} if value != "none" else {}
    return {field: value if kind is str else bool(value)}
