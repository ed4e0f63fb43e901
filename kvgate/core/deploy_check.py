"""Judges a deployment of llama-server by the rules of `core.deploy`: what breaks them, and what to set."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvgate.core.deploy import Checked, Finding, Level, Rule
from kvgate.core.plan import PAD_TOKENS
from kvgate.core.profile import Source, Topology

if TYPE_CHECKING:
    from kvgate.core.command_line import CommandLine
    from kvgate.core.deploy import Seen, Wanted

DRAFT_TOKENS_MAX: Final = 16
"""The longest draft where none is named: the default of builds until 2026, later ones draft less."""

REUSE_OFF_FLAGS: Final = "--no-cache-prompt --cache-ram 0 --no-cache-idle-slots"


def check(seen: Seen, wanted: Wanted) -> Checked:
    """Judge every rule by what there is. A rule that nothing tells of is not judged, and that is said."""
    judge = _Judge(seen, wanted)
    for step in (
        judge.sources, judge.slot_context, judge.pool, judge.context, judge.parallel, judge.kv_precision,
        judge.reuse, judge.context_shift, judge.caches, judge.speculation,
    ):  # fmt: skip
        step()
    return Checked(
        tuple(judge.findings),
        tuple(judge.not_judged),
        judge.n_ctx_slot,
        judge.slots,
        judge.source,
        judge.pool_tokens,
        judge.topology,
    )


@dataclass
class _Judge:
    seen: Seen
    wanted: Wanted
    findings: list[Finding] = field(default_factory=list)
    not_judged: list[tuple[Rule, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        engine, log, command = self.seen.engine, self.seen.log, self.seen.command
        self.pool_tokens: int | None = None
        self.topology: Topology | None = None
        self.n_ctx_slot: int | None = None
        self.slots: int | None = None
        self.source = "nothing"
        if command is not None:
            self.source, self.slots = "command line, at least", command.slots_started
            self.n_ctx_slot, self.pool_tokens = command.n_ctx_slot_least, command.pool_tokens
            self.topology = Topology.UNIFIED if command.is_unified else Topology.DIVIDED
        if log is not None:
            self.source, self.slots, self.n_ctx_slot = "log", log.n_slots, log.n_ctx_slot
            if log.kv_unified is not None:
                self.topology = Topology.UNIFIED if log.kv_unified else Topology.DIVIDED
            self.pool_tokens = log.pool_tokens or self.pool_tokens
        if engine is not None:
            self.source, self.slots = str(engine.n_ctx_slot.source), engine.total_slots.value
            self.n_ctx_slot = engine.n_ctx_slot.value
            if engine.topology.source is not Source.ASSUMED:
                self.topology = engine.topology.value
        if self.topology is Topology.DIVIDED and self.n_ctx_slot is not None and self.slots is not None:
            self.pool_tokens = self.n_ctx_slot * self.slots

    def sources(self) -> None:
        """Another start's log says nothing about this engine."""
        engine, log, command = self.seen.engine, self.seen.log, self.seen.command
        told = []
        if engine is not None:
            told.append(("the engine", engine.total_slots.value, engine.n_ctx_slot.value))
        if log is not None and log.n_slots is not None and log.n_ctx_slot is not None:
            told.append(("the log", log.n_slots, log.n_ctx_slot))
        for (one, slots, tokens), (other, other_slots, other_tokens) in pairwise(told):
            if (slots, tokens) != (other_slots, other_tokens):
                self._error(
                    Rule.SOURCES,
                    f"{one} has {slots} slots of {tokens} tokens, {other} tells of {other_slots} of {other_tokens}",
                    "give the log of the start that runs now",
                )
        if told and command is not None and (difference := self._difference(command, *told[0])) is not None:
            self._error(
                Rule.SOURCES,
                difference,
                "restart the engine with this command line, or give the one that it was started with",
            )

    def _difference(self, command: CommandLine, who: str, slots: int, tokens: int) -> str | None:
        """What cannot come of this command line; None where all can.

        1. Slots. Without `-np` older builds start one, and nothing more can be told.
        2. The whole cache, where the log has it; a draft model's may stand in its place.
        3. A slot: no build gives more than it rounds up, and less of a divided cache only where the model was
           trained for less; some give less of a shared one.
        """
        if slots != command.slots_started:  # 1
            is_older = (command.slots or -1) < 0 and slots == 1
            return None if is_older else f"{who} has {slots} slots, the command line starts {command.slots_started}"
        log, pool, least = self.seen.log, command.pool_tokens, command.n_ctx_slot_least
        logged = None if log is None or log.is_speculating else log.pool_tokens
        if logged is not None and pool is not None and not pool - slots < logged < pool + slots * PAD_TOKENS:  # 2
            return f"the log has a KV cache of {logged} tokens, the command line asks for {pool}"
        trained = None if self.seen.engine is None or command.is_unified else self.seen.engine.n_ctx_train
        if least is None or min(least, tokens if trained is None else trained) <= tokens < least + PAD_TOKENS:  # 3
            return None
        return f"{who} has slots of {tokens} tokens, the command line gives each {least}"

    def slot_context(self) -> None:
        """The silent 1365-token deploy."""
        least, slots = self.wanted.context_tokens_min, self.slots
        if self.n_ctx_slot is None or slots is None:
            self.not_judged.append((Rule.SLOT_CONTEXT, "without -c the model decides; give the engine or its log"))
        elif self.n_ctx_slot < least:
            trained = self.seen.engine.n_ctx_train if self.seen.engine is not None else None
            fix = f"start the engine with {self._context_flags()}, or with fewer slots"
            if trained is not None and trained < least:
                fix = f"no flag helps: the model was trained for {trained} tokens; take another model"
            self._error(
                Rule.SLOT_CONTEXT,
                f"n_ctx_slot = {self.n_ctx_slot} tokens ({self.source}), {slots} slots; at least {least} are "
                "asked for",
                fix,
            )

    def pool(self) -> None:
        """Slots that promise more than there is: when all of it is used the engine kills every active one."""
        slots, tokens, pool = self.slots, self.n_ctx_slot, self.pool_tokens
        if self.topology is None:
            why = "HTTP does not tell whether slots share the cache; give the log, or see `kvgate probe --topology`"
            self.not_judged.append((Rule.POOL, why))
        elif self.topology is Topology.UNIFIED and slots is not None and slots > 1 and tokens is not None:
            if pool is None:
                pool = tokens  # a log at verbosity 3: a shared cache is never smaller than the longest sequence
            if slots * tokens > pool:
                self._error(
                    Rule.POOL,
                    f"{slots} slots promise {tokens} tokens each, {slots * tokens} together, and share a KV cache of "
                    f"{pool}: when it is full the engine ends every answer at once",
                    f"start the engine with {self._context_flags()} --no-kv-unified, so that each slot has its own",
                )

    def context(self) -> None:
        """The context by default is whatever the model was trained for, or what fits into memory."""
        if (command := self.seen.command) is None:
            self._needs_command(Rule.CONTEXT)
        elif not command.context_tokens:
            given = "-c 0" if command.context_tokens == 0 else "no -c"
            self._error(
                Rule.CONTEXT,
                f"the command line has {given}: the model, or the free memory, decides how much context there is",
                f"give {self._context_flags(command.slots_started)}",
            )

    def parallel(self) -> None:
        """The engine's own choice is four slots over one pool."""
        command, log = self.seen.command, self.seen.log
        if command is None and (log is None or not log.slots_chosen_by_engine):
            self._needs_command(Rule.PARALLEL)
        elif (command is not None and (command.slots or -1) < 0) or (command is None and log is not None):
            given = f"-np {command.slots} is given" if command is not None and command.slots else "-np is not given"
            self._error(
                Rule.PARALLEL,
                f"{given}: the engine chooses, and current builds start 4 slots that share one KV cache",
                f"give {self._context_flags()} --no-kv-unified",
            )

    def kv_precision(self) -> None:
        """Two engines that differ in it answer differently."""
        command, log = self.seen.command, self.seen.log
        if command is not None:
            if missing := [
                flag for flag, kind in (("-ctk", command.kv_type_k), ("-ctv", command.kv_type_v)) if kind is None
            ]:
                given = " ".join(f"{flag} f16" for flag in missing)
                self._error(
                    Rule.KV_PRECISION,
                    f"the command line has no {' and no '.join(missing)}: the build decides the KV cache's precision",
                    f"give {given}, or the precision that was tested",
                )
        elif log is not None and (log.kv_type_k is None or log.kv_type_v is None):
            self._error(
                Rule.KV_PRECISION,
                "the log does not tell the KV cache's precision",
                "start the engine with -lv 4, or give its command line with -ctk and -ctv",
            )
        elif log is None:
            self.not_judged.append((Rule.KV_PRECISION, "HTTP does not tell it; give the log or the command line"))

    def reuse(self) -> None:
        """On by default, and asked for by nobody."""
        if (command := self.seen.command) is None:
            self._needs_command(Rule.REUSE)
        elif command.cache_prompt is None:
            self._error(
                Rule.REUSE,
                "neither --cache-prompt nor --no-cache-prompt is given: llama.cpp's default reuses prefixes",
                f"give {REUSE_OFF_FLAGS}; with a tested and wanted reuse --cache-prompt",
            )

    def context_shift(self) -> None:
        """A shifted context answers from half of what it was told, and nobody is told."""
        if (command := self.seen.command) is None:
            self._needs_command(Rule.CONTEXT_SHIFT)
        elif command.context_shift:
            self._error(
                Rule.CONTEXT_SHIFT,
                "--context-shift is on: a full slot silently loses the older half of its conversation and goes on",
                "give --no-context-shift; the gate refuses, clamps or trims instead, and says so",
            )

    def caches(self) -> None:
        """Caches that every slot reads: another conversation's content came back from one (llama.cpp#27148)."""
        command, log = self.seen.command, self.seen.log
        if command is None and (log is None or log.prompt_cache_mib is None):
            why = "only a command line, or a log at -lv 4, tells"
            self.not_judged += [(Rule.RAM_CACHE, why), (Rule.IDLE_SLOTS_CACHE, why)]
            return
        size, idle = _caches(self.seen)
        if size == 0 or self.wanted.tenants == 1:
            return
        who = "several tenants" if self.wanted.tenants is None else f"{self.wanted.tenants} tenants"
        level = Level.WARNING if self.wanted.tenants is None else Level.ERROR
        limit = "without limit" if size == -1 else f"up to {size} MiB" if size else "of the build's default size"
        self._find(
            Rule.RAM_CACHE, level,
            f"the RAM prompt cache is on, {limit}: prompts of {who} stay in one cache that every slot reads",
            "give --cache-ram 0",
        )  # fmt: skip
        if idle is not False:
            self._find(
                Rule.IDLE_SLOTS_CACHE, level,
                f"idle slots are saved to the RAM prompt cache: answers of {who} stay there too",
                "give --cache-ram 0 --no-cache-idle-slots",
            )  # fmt: skip

    def speculation(self) -> None:
        """A draft is written into the slot before it is known to be right."""
        command, log = self.seen.command, self.seen.log
        if command is None and log is None:
            self.not_judged.append((Rule.SPECULATION_MARGIN, "give the log or the command line"))
            return
        if not (command is not None and command.is_speculating) and not (log is not None and log.is_speculating):
            return
        named = command.draft_tokens_max if command is not None else None
        need = DRAFT_TOKENS_MAX if named is None else named
        if self.wanted.margin_tokens < need:
            length = f"up to {need} tokens" if named is not None else f"up to {need} tokens in some builds"
            self._error(
                Rule.SPECULATION_MARGIN,
                f"speculative decoding drafts {length} beyond an answer; the margin is {self.wanted.margin_tokens}",
                f"set engine.margin_tokens = {need} in kvgate.toml and check with --margin-tokens {need}; with "
                "--spec-draft-n-max (--draft-max in older builds) the length is known",
            )

    def _context_flags(self, slots: int | None = None) -> str:
        slots, least = slots or self.slots or 1, self.wanted.context_tokens_min
        return f"-c {slots * least} -np {slots} (context = slots x tokens per slot: {slots} x {least})"

    def _needs_command(self, rule: Rule) -> None:
        self.not_judged.append((rule, "only the command line tells"))

    def _error(self, rule: Rule, sentence: str, fix: str) -> None:
        self._find(rule, Level.ERROR, sentence, fix)

    def _find(self, rule: Rule, level: Level, sentence: str, fix: str) -> None:
        self.findings.append(Finding(rule, level, sentence, fix, rule.label in self.wanted.acknowledged))


def _caches(seen: Seen) -> tuple[int | None, bool | None]:
    """The RAM prompt cache's size and whether idle slots go there; None is the build's default, which is on."""
    if seen.log is not None and seen.log.prompt_cache_mib is not None:
        return seen.log.prompt_cache_mib, seen.log.idle_slots_cached
    if seen.command is None:
        return None, None
    return seen.command.prompt_cache_mib, seen.command.idle_slots_cached
