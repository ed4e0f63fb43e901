"""Reads an inference server's startup log for the facts that no HTTP endpoint tells."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgate.core.profile import UNLIMITED, StartupFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

# A fact stands only where the engine itself speaks: behind nothing but time stamps, levels and the marks of docker
# or journald. Error lines quote the client (`got exception: {"error": ... but got: n_slots = 4, ...`; seen).
_PREFIX = r"(?:[^\s\"'{}]*(?:[^\s\"'{}:]|\]:)\s+){0,8}?(?:\x1b\[[\d;]*m)*"

# llama.cpp b11434, b11549 (measured); `--log-jsonl` says the same sentences in JSON.
_SLOTS = re.compile(
    _PREFIX + r"srv\s+load_model: initializing, n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(true|false)'"
)
_BEGIN = re.compile(
    _PREFIX + r"(?:srv\s+load_model: loading model|cmn\s+\w+: common_params_print_info: build|main: loading model)"
)
_CONTEXT = re.compile(_PREFIX + r"llama_context: n_ctx\s+= (\d+)")
_CAPPED = re.compile(_PREFIX + r"srv\s+load_model: capping per-slot context \((\d+)\) to --kv-unified-per-slot")
_KV_TYPES = re.compile(_PREFIX + r"llama_kv_cache\w*: size = .*K \((\w+)\):.*V \((\w+)\):")

# What is said of the RAM prompt cache comes behind the line of slots, and before clients are served (at `-lv 4`).
_RAM_CACHE = re.compile(_PREFIX + r"srv\s+load_model: prompt cache is (enabled, size limit: (\d*)|disabled)")
_IDLE_SLOTS = re.compile(_PREFIX + r"srv\s+init: idle slots will be saved to prompt cache")
_LOADED = re.compile(
    _PREFIX
    + r"(?:(?:srv\s+init|main): (?:model loaded|listening on|server is listening)|srv\s+update_slots: all slots)"
)

LATE_LINES_MAX = 40
"""How far behind the line of slots what completes it is looked for; a chat template's example may stand between."""

LINE_CHARS_MAX = 4096
"""Longer lines are prompts or templates echoed by a verbose log; no fact stands in one."""


class StartupLog:
    """Follows a startup log line by line; `facts` is what the latest start said, `starts` how many were seen.

    A start begins with the line that names the model or the build, and is complete with the line that tells
    slots and context. Facts of an incomplete start are never shown: the engine may still be loading.

    Args:
        context_shift: what the engine's command line says of it, which the log does not.
    """

    def __init__(self, context_shift: bool | None = None) -> None:
        self._context_shift = context_shift
        self.facts: StartupFacts | None = None
        self.starts = 0
        self._next = StartupFacts()
        self._contexts: list[int] = []
        self._late_lines = 0

    @property
    def is_settled(self) -> bool:
        """Whether the latest start has said all that it says; what follows may quote clients."""
        return self.starts > 0 and self._late_lines == 0

    def feed(self, lines: Iterable[str]) -> None:
        """Read further lines, in order."""
        for line in lines:
            if len(line) <= LINE_CHARS_MAX:
                for sentence in _sentences(line):
                    self._feed(sentence)

    def _feed(self, line: str) -> None:
        if self._late_lines:
            self._feed_late(line)
        if found := _SLOTS.match(line):
            self._complete(int(found[1]), int(found[2]), unified=found[3] == "true")
        elif _BEGIN.match(line):
            self._next, self._contexts = StartupFacts(), []
        elif (found := _CONTEXT.match(line)) or (found := _CAPPED.match(line)):
            self._contexts.append(int(found[1]))
        elif self._next.kv_type_k is None and (found := _KV_TYPES.match(line)):
            # The first cache is the model's, a draft model's comes behind it.
            self._next = replace(self._next, kv_type_k=found[1], kv_type_v=found[2])

    def _complete(self, slots: int, n_ctx_slot: int, *, unified: bool) -> None:
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
        self._late_lines = LATE_LINES_MAX
        self._next, self._contexts = StartupFacts(), []

    def _feed_late(self, line: str) -> None:
        self._late_lines -= 1
        facts = self.facts
        if facts is None:
            return
        if facts.cache_ram_mib is None and (found := _RAM_CACHE.match(line)):
            mib = 0 if found[1] == "disabled" else int(found[2] or UNLIMITED)
            # Idle slots are saved into that cache: without it, nowhere.
            self.facts = replace(facts, cache_ram_mib=mib, cache_idle_slots=None if mib else False)
        elif facts.cache_ram_mib and _IDLE_SLOTS.match(line):
            self.facts = replace(facts, cache_idle_slots=True)
        elif _LOADED.match(line):
            self._late_lines = 0


def _sentences(line: str) -> list[str]:
    """What a log line says: itself, or the texts of a line that is a JSON object."""
    if not line.startswith("{"):
        return [line]
    try:
        members = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return [value for value in members.values() if isinstance(value, str)]
