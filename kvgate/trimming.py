"""Shortens a prompt until its answer has room: aims, counts with the engine's counter, decides anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgate.core import json_list
from kvgate.core.admission import Reject, Trim, decide, overflow_clauses
from kvgate.core.json_object import Edit, read_object
from kvgate.core.reason import Reason, refusal
from kvgate.core.trim import plan
from kvgate.core.trim_policy import judged_as, prompt_target, trim_policy
from kvgate.core.trim_search import Trimmed, first_fitting, foreseen, next_rung, told
from kvgate.core.turns import Kind
from kvgate.ports import History, Refused, Texts
from kvgate.wire import trim_asks

if TYPE_CHECKING:
    from kvgate.core.admission import Verdict
    from kvgate.core.ask import Ask
    from kvgate.core.json_object import JsonObject
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Tenant
    from kvgate.core.trim import Plan
    from kvgate.core.trim_policy import TrimPolicy
    from kvgate.ports import Counted, Dialect, Engine, ReadRequest

TEXT_COUNTS_MAX = 4
"""Counts of one cut of a text: the first is nearly always right, since the text was cut between two tokens."""

NOT_ALLOWED = " Trimming, which this request asks for, is not switched on for this key."


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict on a request, and the request and its count as they are to be sent: trimmed, where it was."""

    verdict: Verdict
    request: ReadRequest
    counted: Counted


async def decided(
    engine: Engine, dialect: Dialect, request: ReadRequest, counted: Counted, *, pool: KvPool, tenant: Tenant
) -> Decision:
    """Judge a request, trimming it where that is its policy and its answer lacks room.

    1. Nothing is trimmed that has its room, that no policy covers, or whose trouble is not its length.
    2. The conversation is shortened to the least trimmed form that has the room, or else to the most trimmed one.
    3. That does not fit either, or nothing can go: what fits untrimmed runs clamped; what does not is refused, with
       the sentence that says what takes the room.

    Raises:
        Refused: as `Engine.count`; ENGINE_CHANGED where another engine counted.
    """
    judged = judged_as(tenant, request.trim)
    policy = trim_policy(tenant.limits, request.trim)
    verdict = decide(request.ask, counted.prompts, pool, judged)
    untrimmed = Decision(verdict, request, counted)
    if isinstance(verdict, Reject) and verdict.room is None:
        return untrimmed
    if policy is None and request.trim.wanted and isinstance(verdict, Reject):
        refused = replace(verdict.refusal, message=verdict.refusal.message + NOT_ALLOWED)
        return Decision(replace(verdict, refusal=refused), request, counted)
    if policy is None:
        return untrimmed
    target = prompt_target(request.ask, counted.prompts, pool, judged, policy)
    if max(counted.prompts) <= target or (may := dialect.trimmable(request)) is None:  # 1
        return untrimmed
    job = _Job(engine, dialect, request, counted, pool, judged, policy, target)
    return await (job.history(may, untrimmed) if isinstance(may, History) else job.texts(may, untrimmed))


def foreseen_trim(
    dialect: Dialect, request: ReadRequest, prompt_tokens: int, *, pool: KvPool, tenant: Tenant
) -> Trimmed | None:
    """What trimming this conversation would drop, by the estimates alone: a plan, before anything is counted for it.

    None where nothing would be trimmed, or nothing that may go would do. `decided` is the exact answer.
    """
    policy, may = trim_policy(tenant.limits, request.trim), dialect.trimmable(request)
    if policy is None or not isinstance(may, History):
        return None
    target = prompt_target(request.ask, (prompt_tokens,), pool, judged_as(tenant, request.trim), policy)
    ways = _ways(request, may, policy)
    rung = foreseen(ways, prompt_tokens, target) if prompt_tokens > target else None
    if rung is None:
        return None
    left = round(prompt_tokens * ways.kept_weights[rung] / ways.weight)
    return told(ways, rung, prompt_tokens, left, how=policy.strategy.value, counts=0)


def _ways(request: ReadRequest, may: History, policy: TrimPolicy) -> Plan:
    member = request.document.members[may.field]
    return plan(may.items, policy, len(request.document.text) - (member.value_end - member.value_start))


@dataclass(slots=True)
class _Job:
    """One trim: what it works on."""

    engine: Engine
    dialect: Dialect
    request: ReadRequest
    counted: Counted
    pool: KvPool
    tenant: Tenant
    policy: TrimPolicy
    target: int
    counts: int = 0

    async def history(self, may: History, untrimmed: Decision) -> Decision:
        """A conversation, rung by rung of its plan."""
        document = self.request.document
        ways = _ways(self.request, may, self.policy)
        spans = json_list.elements(document, may.field) if ways.rungs else ()
        known: dict[int, int | None] = {}
        found: dict[int, tuple[ReadRequest, Counted]] = {}
        before = self.counted.prompts[0]
        while ways.rungs and (rung := next_rung(ways, known, before, self.target)) is not None:
            shorter = json_list.without(document, may.field, spans, ways.dropped(rung))
            counted = await self._count(read_object(shorter.encode()))
            known[rung] = None if counted is None else counted[1].prompts[0]
            if counted is not None:
                found[rung] = counted
        last = len(ways.rungs) - 1
        rung = last if (fits := first_fitting(known, self.target)) is None else fits
        if rung in found:  # 2
            after = found[rung][1].prompts[0]
            trimmed = told(ways, rung, before, after, how=self.policy.strategy.value, counts=len(known))
            decision = self._decision(*found[rung], trimmed)
            if decision is not None:
                return decision
        return self._failed(untrimmed, ways, known.get(last) if ways.rungs else before)  # 3

    async def texts(self, may: Texts, untrimmed: Decision) -> Decision:
        """Text prompts, each cut to the target at one end."""
        given = self.request.document.get(may.field)
        several = isinstance(given, list) and not any(isinstance(piece, int) for piece in given)
        values = given if several else [given]
        tokens = list(self.counted.prompts)
        over = [0] * len(values)
        for _ in range(TEXT_COUNTS_MAX if self.target > 0 else 0):
            cut = [
                await self._cut(value, count, self.target - more) if count > self.target else value
                for value, count, more in zip(values, tokens, over, strict=True)
            ]
            if any(not one and count > self.target for one, count in zip(cut, tokens, strict=True)):
                break
            put = {may.field: cut if several else cut[0]}
            counted = await self._count(read_object(self.request.document.edited(Edit(put, frozenset()))))
            if counted is None:
                break
            over = [more + max(now - self.target, 0) for more, now in zip(over, counted[1].prompts, strict=True)]
            if max(counted[1].prompts) <= self.target:
                gone = sum(tokens) - sum(counted[1].prompts)
                trimmed = Trimmed(self.policy.side.value, 0, gone, self.counts)
                return self._decision(*counted, trimmed) or self._failed(untrimmed, None, None)
        return self._failed(untrimmed, None, None)

    async def _cut(self, value: str | list[int | str], tokens: int, target: int) -> str | list[int | str] | None:
        """A prompt cut to so many tokens at one end, a text between two of its characters; None for a mixed list."""
        left = self.policy.side.value == "left"
        if isinstance(value, list):
            if any(isinstance(piece, str) for piece in value) or target < 1:
                return None
            return value[-target:] if left else value[:target]
        pieces = await self.engine.text_pieces(value)
        self.counts += 1
        kept = target - (tokens - len(pieces))  # what the engine adds, such as BOS, stays
        if kept < 1:
            return None
        raw = value.encode()
        # Only the end's pieces are added up: what a tokenizer makes of the beginning may have another length.
        start = max(len(raw) - sum(pieces[-kept:]), 0) if left else 0
        end = len(raw) if left else max(len(raw) - sum(pieces[kept:]), 0)
        return raw[start:end].decode(errors="ignore")  # half a character at the cut goes too

    async def _count(self, document: JsonObject) -> tuple[ReadRequest, Counted] | None:
        """The shorter request, read and counted like any other; None where the engine's counter refuses it."""
        body = document.edited(trim_asks.stripped(document))
        request = self.dialect.read(body)
        self.counts += 1
        try:
            counted = await self.engine.count(self.dialect.name, request, body)
        except Refused as refused:
            if refused.refusal.reason is Reason.UNCOUNTED:
                return None
            raise
        if counted.profile != self.counted.profile:
            raise Refused(refusal(Reason.ENGINE_CHANGED, retry_after_s=1))
        return request, counted

    def _decision(self, request: ReadRequest, counted: Counted, trimmed: Trimmed) -> Decision | None:
        verdict = decide(request.ask, counted.prompts, self.pool, self.tenant)
        if isinstance(verdict, Reject) or trimmed.tokens <= 0:
            return None
        return Decision(Trim(verdict.size, verdict.room, trimmed), request, counted)

    def _failed(self, untrimmed: Decision, ways: Plan | None, protected_tokens: int | None) -> Decision:
        verdict = untrimmed.verdict
        if not isinstance(verdict, Reject) or verdict.room is None:
            return untrimmed
        limit, clause = overflow_clauses(verdict.room)
        figures = dict(verdict.refusal.figures)
        if protected_tokens is not None:
            figures["n_protected_tokens"] = protected_tokens
        stays, advice = _protected(self.request.ask, ways, self.policy, protected_tokens)
        least = self.tenant.limits.output_tokens_min
        refused = refusal(
            Reason.UNTRIMMABLE,
            figures=tuple(figures.items()),
            param=self.request.ask.prompt_field,
            limit_tokens=limit,
            limited_by_clause=clause,
            prompt_tokens=verdict.room.prompt_tokens,
            protected_clause=stays,
            leaves_clause=f", and at least {least} must be left for the answer" if self.request.ask.generates else "",
            advice=advice,
        )
        return Decision(Reject(refused, verdict.room), untrimmed.request, untrimmed.counted)


def _protected(ask: Ask, ways: Plan | None, policy: TrimPolicy, tokens: int | None) -> tuple[str, str]:
    """What of a prompt trimming never takes, and which of it to shorten: the largest."""
    if ways is None:
        return f"this {ask.prompt_field} cannot be cut between two tokens", f"shorten the {ask.prompt_field}"
    items = list(enumerate(ways.items))
    parts = {
        "the system messages": sum(item.weight for _, item in items if item.kind is Kind.SYSTEM),
        "the last user message and what follows it": sum(ways.items[at].weight for at in ways.last_turn),
        "pinned messages with their turns": sum(item.weight for at, item in items if at in policy.pinned),
        "the tools and other fields": ways.base_weight,
    }
    there = [name for name, weight in parts.items() if weight]
    stays = ", ".join(there)
    shorten = f"shorten {max(there, key=lambda name: parts[name])}"
    if tokens is None:
        return f"the server's template refuses the conversation without what could go beside {stays}", shorten
    return f"{tokens} of them are what it never takes ({stays})", shorten
