"""Reads an inference server's startup log, in the words of many versions, for facts that no HTTP endpoint tells."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.profile import StartupFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

# A fact stands only where the engine itself speaks: behind nothing but time stamps, levels and the marks of docker
# or journald. Error lines quote the client (`got exception: {"error": ... but got: n_slots = 4, ...`; seen).
_PREFIX = r"(?:[^\s\"'{}]*(?:[^\s\"'{}:]|\]:)\s+){0,8}?(?:\x1b\[[\d;]*m)*"


def _said(sentence: str) -> re.Pattern[str]:
    return re.compile(_PREFIX + sentence)


# llama.cpp b11434, b11549 (measured); `--log-jsonl` says the same sentences in JSON.
_SLOTS = _said(
    r"srv\s+load_model: initializing, n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(true|false)'",
)
# Builds from 2024 on to 2026 name the number of slots first, then each slot; those before them did it in fields.
_SLOTS_TO_COME = _said(
    r"(?:srv\s+\w+: initializing slots, n_slots = |INFO \[\s*\w+\] initializing slots \| .*n_slots=)(\d+)"
)
_ONE_SLOT = _said(
    r"(?:slot\s+\w+: id\s+\d+ \| task -1 \| new slot,? n_ctx(?:_slot)? = "
    r"|INFO \[\s*\w+\] new slot \| .*n_ctx_slot=)(\d+)"
)
_BEGIN = _said(
    r"(?:srv\s+init: build_info: |cmn\s+\w+: common_params_print_info: build|build: \d+ \("
    r"|INFO \[\s*main\] build info \|)"
)
_LOADING = _said(r"(?:srv\s+load_model: loading model|main: loading model)")
_END = _said(
    r"(?:srv\s+\w+: model loaded|main: model loaded|srv\s+update_slots: all slots are idle"
    r"|INFO \[\s*main\] model loaded \|)"
)

_MAKER: Final = r"(?:llama_context|llama_init_from_model|llama_new_context_with_model): "
"""Who said it in which year: the context itself, before it the function that made one."""

_CONTEXT_BEGINS = _said(_MAKER + r"(?:constructing llama_context|n_seq_max\s+=)")
_CONTEXT = _said(_MAKER + r"n_ctx\s+= (\d+)")
_UNIFIED = _said(_MAKER + r"kv_unified\s+= (true|false)")
_CAPPED = _said(r"srv\s+load_model: capping per-slot context \((\d+)\) to --kv-unified-per-slot")
_KV = _said(
    r"(?:llama_kv_cache\w*: size =|" + _MAKER + r"KV self size\s+=)\s*([\d.]+) MiB.*K \((\w+)\):.*V \((\w+)\):",
)
_WEIGHTS = _said(r"(?:llm_)?load_tensors:\s+\S+(?: model)? buffer size =\s*([\d.]+) MiB")
_WEIGHTS_BEGIN = _said(r"load_tensors: loading model tensors")
_AUTO_SLOTS = _said(r"srv\s+\w+: n_parallel is set to auto")
_DRAFT = _said(
    r"(?:common_speculative_init_result: loading draft model|srv\s+load_model: (?:loading draft model|creating MTP "
    r"draft context|speculative decoding context initialized)|(?:common_speculative_init|spec\s+\w+): adding "
    r"speculative implementation)"
)
_PROMPT_CACHE = _said(r"srv\s+\w+: prompt cache is (?:(disabled)|enabled, size limit: (?:(\d+) MiB|no limit))")
_IDLE_SLOTS = _said(r"srv\s+\w+: idle slots will be saved to prompt cache")

LINE_CHARS_MAX = 4096
"""Longer lines are prompts or templates echoed by a verbose log; no fact stands in one."""

SLOTS_MAX: Final = 4096
"""More slots than an engine can have; a log that announces more is not believed."""


class StartupLog:
    """Follows a startup log line by line; `facts` is what the latest start said, `starts` how many were seen.

    A start begins with the line that names the model or the build, and is complete with the line that tells
    slots and context. Facts of an incomplete start are never shown: the engine may still be loading. What is told
    between that line and the one that says that the model is loaded (the RAM prompt cache) is added to them; after
    it nothing is, since from then on the log may quote clients.

    Args:
        context_shift: what the engine's command line says of it, which the log does not.
    """

    def __init__(self, context_shift: bool | None = None) -> None:
        self._context_shift = context_shift
        self.facts: StartupFacts | None = None
        self.starts = 0
        self._next = StartupFacts()
        self._contexts: list[int] = []
        self._slots: list[int] = []
        self._slots_to_come = 0
        self._is_adding = False

    @property
    def is_settled(self) -> bool:
        """Whether the latest start has said all that it will say."""
        return self.starts > 0 and not self._is_adding

    def feed(self, lines: Iterable[str]) -> None:
        """Read further lines, in order."""
        for line in lines:
            if len(line) <= LINE_CHARS_MAX:
                for sentence in sentences(line):
                    self._feed(sentence)

    def _feed(self, line: str) -> None:
        if found := _SLOTS.match(line):
            self._complete(int(found[1]), int(found[2]), unified=found[3] == "true")
        elif _BEGIN.match(line):
            self._begin()
        elif _LOADING.match(line):
            self._begin(slots_chosen_by_engine=self._next.slots_chosen_by_engine)  # said before it loads
        elif self._is_adding and _END.match(line):
            self._is_adding = False
        elif not (self._feed_slots(line) or self._feed_context(line)):
            self._feed_rest(line)

    def _begin(self, *, slots_chosen_by_engine: bool = False) -> None:
        self._next = StartupFacts(slots_chosen_by_engine=slots_chosen_by_engine)
        self._contexts, self._slots, self._slots_to_come, self._is_adding = [], [], 0, False

    def _feed_slots(self, line: str) -> bool:
        """The slots as older builds announce them: how many, then each."""
        if found := _SLOTS_TO_COME.match(line):
            self._slots, self._slots_to_come = [], min(int(found[1]), SLOTS_MAX)
        elif self._slots_to_come and (found := _ONE_SLOT.match(line)):
            self._slots.append(int(found[1]))
            if len(self._slots) == self._slots_to_come:
                self._complete(len(self._slots), min(self._slots), unified=self._next.kv_unified)
        else:
            return False
        return True

    def _feed_context(self, line: str) -> bool:
        """The KV cache: its size, its types, its topology. A draft model's, behind it, is not meant."""
        if (found := _CONTEXT.match(line)) or (found := _CAPPED.match(line)):
            self._contexts.append(int(found[1]))
        elif self._next.is_speculating:
            return False
        elif found := _KV.match(line):
            size = (self._next.kv_mib or 0.0) + float(found[1])  # sliding-window layers have a cache of their own
            first = self._next.kv_type_k is None
            kinds = (found[2], found[3]) if first else (self._next.kv_type_k, self._next.kv_type_v)
            self._next = replace(self._next, kv_mib=round(size, 2), kv_type_k=kinds[0], kv_type_v=kinds[1])
        elif found := _UNIFIED.match(line):
            self._next = replace(self._next, kv_unified=found[1] == "true")
        elif _CONTEXT_BEGINS.match(line):
            self._next = replace(self._next, kv_mib=None)  # tried on for size before, where it fits itself in
        else:
            return False
        return True

    def _feed_rest(self, line: str) -> None:
        if (found := _PROMPT_CACHE.match(line)) and found[1]:
            self._note(prompt_cache_mib=0, idle_slots_cached=False)  # they need it
        elif found:
            self._note(prompt_cache_mib=int(found[2]) if found[2] else -1)
        elif _IDLE_SLOTS.match(line):
            self._note(idle_slots_cached=True)
        elif _AUTO_SLOTS.match(line):
            self._note(slots_chosen_by_engine=True)
        elif _DRAFT.match(line):
            self._note(is_speculating=True)
        elif not self._next.is_speculating and (found := _WEIGHTS.match(line)):
            self._next = replace(self._next, weights_mib=round((self._next.weights_mib or 0.0) + float(found[1]), 2))
        elif not self._next.is_speculating and _WEIGHTS_BEGIN.match(line):
            self._next = replace(self._next, weights_mib=None)

    def _note(self, **facts: Any) -> None:
        """Add facts to the start under way, or to the one that is complete and not yet settled."""
        if self._is_adding and self.facts is not None:
            self.facts = replace(self.facts, **facts)
        else:
            self._next = replace(self._next, **facts)

    def _complete(self, slots: int, n_ctx_slot: int, *, unified: bool | None) -> None:
        # A draft model's context may stand here too: the smallest that can hold a slot is the safe one.
        pools = [tokens for tokens in self._contexts if tokens >= n_ctx_slot]
        self.facts = replace(
            self._next,
            n_slots=slots,
            n_ctx_slot=n_ctx_slot,
            kv_unified=unified,
            pool_tokens=min(pools, default=None),
            context_shift=self._context_shift,
        )
        self.starts += 1
        self._begin()
        self._is_adding = True


def sentences(line: str) -> list[str]:
    """What a log line says: itself, or the texts of a line that is a JSON object."""
    if not line.startswith("{"):
        return [line]
    try:
        members = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return [value for value in members.values() if isinstance(value, str)] + _fields(members)


def _fields(members: dict[str, Any]) -> list[str]:
    """The sentence of a line whose figures are members: the JSON log of 2024, and of forks that kept it."""
    function, said = members.get("function"), members.get("msg", members.get("message"))
    if not isinstance(said, str) or not isinstance(function, str):
        return []
    figures = " ".join(
        f"{name}={members[name]}"
        for name in ("id_slot", "n_slots", "n_ctx_slot")
        if isinstance(members.get(name), int)
    )
    return [f"INFO [{function}] {said} | {figures}"]
