"""The one orchestration: read, count, decide, reserve, hand over, settle."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvgate.core.admission import Reject, decide
from kvgate.core.ask import Usage
from kvgate.core.counting import bound_suffices
from kvgate.core.ledger import Denied, Reservation
from kvgate.core.reason import Reason, refusal
from kvgate.core.replay import Asked
from kvgate.core.reuse import Reuse
from kvgate.core.tenant import Quota
from kvgate.ports import PROBE_SIZE, LineFailed, Refused
from kvgate.trimming import decided
from kvgate.wire.beginnings import beginning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvgate.core.admission import Admit, Clamp, Trim, Verdict
    from kvgate.core.ledger import Lease
    from kvgate.core.loops import Loop
    from kvgate.core.pool import KvPool
    from kvgate.core.profile import EngineProfile
    from kvgate.core.reason import Refusal
    from kvgate.core.tenant import Tenant
    from kvgate.core.warmth import Warmth
    from kvgate.ports import Counted, Dialect, Engine, LedgerPort, Line, ReadRequest, ReuseRule, Told

ATTEMPTS = 3
"""How often one request is judged anew because the engine changed under it."""

PROBE_TENANT = "kvgate-probe"
"""Who holds the lease of the gate's own probes."""

PROBE_QUOTA = Quota(queue_timeout_s=5)


@dataclass(frozen=True, slots=True)
class Call:
    """One authenticated inference request."""

    tenant: Tenant
    dialect: Dialect
    body: bytes


@dataclass(slots=True)
class Receipt:
    """What the relay reports back.

    `ended`: the engine's answer came to its proper end. `told`: what it said it cost. `events`: how many pieces
    of output passed, for an answer that was cut before it told. `loop`: what repeats itself in it, and `stopped`
    whether the stream was ended for that. `ended_by_context`: which bound of the context cut it short.
    """

    ended: bool = False
    told: Told | None = None
    events: int = 0
    loop: Loop | None = None
    stopped: bool = False
    ended_by_context: str = ""


@dataclass(slots=True)
class Admitted:
    """A request that may run: its lease is held, its line to the engine is open, its body is capped.

    The holder calls `start` when the body goes out and `answered` when the engine's head is back, and fills
    in the receipt; leaving the gate's context settles the lease and gives the line back. `line` alone ever changes.
    `cold` where the conversation had reuse on an engine process that is gone.
    """

    verdict: Admit | Clamp | Trim
    request: ReadRequest
    counted: Counted
    body: bytes
    line: Line
    lease: Lease
    reuse: Reuse
    cold: bool
    start: Callable[[], None]
    answered: Callable[[], None]
    receipt: Receipt
    explain: Callable[[int, bytes], Refusal]
    reopen: Callable[[], Awaitable[Line]]
    asked: Asked

    @property
    def profile(self) -> EngineProfile:
        """The engine that it was judged for."""
        return self.counted.profile

    @property
    def is_bounded(self) -> bool:
        """Whether only a bound of its prompt is known although it could be counted."""
        return not self.counted.exact and not self.request.ask.prompts

    async def renew_line(self) -> None:
        """Another connection to the same engine, for a request of which nothing was sent on the first.

        Raises:
            Refused: the engine is not to be had, or is another one now.
        """
        self.line = await self.reopen()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that may not run, and why; `verdict` and `asked` are there where it came as far as the arithmetic."""

    refusal: Refusal
    verdict: Verdict | None = None
    request: ReadRequest | None = None
    counted: Counted | None = None
    asked: Asked | None = None

    @property
    def profile(self) -> EngineProfile | None:
        """The engine that it was judged for, where it came that far."""
        return None if self.counted is None else self.counted.profile


@dataclass(frozen=True, slots=True)
class Weighed:
    """A request that was counted and decided on, and the pool that it was judged for.

    `request` is what is left of it after a trim; `asked` is of all that came.
    """

    request: ReadRequest
    counted: Counted
    pool: KvPool
    verdict: Verdict
    asked: Asked


class Gate:
    """Admits requests to one engine.

    Args:
        engine: counts, and opens lines.
        ledger: holds the KV cache's cells and slots.
        new_id: mints lease ids, unique for ever.
        rule: who is served, and who may reuse; without one everybody and nobody.
        warmth: which conversations had reuse, and where.
    """

    def __init__(
        self,
        engine: Engine,
        ledger: LedgerPort,
        new_id: Callable[[], str],
        *,
        rule: ReuseRule | None = None,
        warmth: Warmth | None = None,
    ) -> None:
        self._rule = rule
        self._warmth = warmth
        self._engine = engine
        self._ledger = ledger
        self._new_id = new_id
        self._probing = asyncio.Lock()

    @asynccontextmanager
    async def admit(self, call: Call) -> AsyncIterator[Admitted | Rejected]:
        """Judge a request and hold what it needs while the caller relays it.

        Whatever happens inside, cancellation included, the lease is given back: at once where the engine's
        answer ended, by draining where only the engine can tell. Refusals are values; nothing is held then.
        """
        try:
            self._check_served(call.tenant)
            request = call.dialect.read(call.body)
            _check_model(request.ask.model, call.tenant)
        except Refused as refused:
            yield Rejected(refused.refusal)
            return
        for _ in range(ATTEMPTS):
            async with self._judged(call, request) as outcome:
                if outcome is not None:
                    yield outcome
                    return
        yield Rejected(refusal(Reason.ENGINE_CHANGED, retry_after_s=1), request=request)

    @asynccontextmanager
    async def _settled(self) -> AsyncIterator[_Held]:
        """Hold what is taken under one lease id, minted first; whatever happens, it is given back here."""
        held = _Held(self._new_id())
        try:
            yield held
        finally:
            if held.line is not None:
                held.line.release()
            ended, used = held.receipt.ended, held.used()
            await asyncio.shield(self._ledger.settle(held.lease_id, ended=ended, used=used))

    @asynccontextmanager
    async def _judged(self, call: Call, request: ReadRequest) -> AsyncIterator[Admitted | Rejected | None]:
        """One judgement; None where the engine changed meanwhile."""
        async with self._settled() as held:
            yield await self._judge(call, request, held)

    async def _judge(self, call: Call, request: ReadRequest, held: _Held) -> Admitted | Rejected | None:
        tenant, engine, came = call.tenant, self._engine, request
        try:
            weighed = await self._weigh(call, request)
            counted, pool, verdict, asked = weighed.counted, weighed.pool, weighed.verdict, weighed.asked
            request, held.prompts = weighed.request, weighed.counted.prompts
            if isinstance(verdict, Reject):
                return Rejected(verdict.refusal, verdict, request, counted, asked)
            await self._check_reuse(call.dialect.name, counted, pool)
            reservation = Reservation(held.lease_id, tenant.name, tenant.quota, verdict.size, tenant.share)
            lease = await self._ledger.reserve(reservation, pool)
            if isinstance(lease, Denied):
                return _denied(lease, tenant, verdict, request, counted, asked=asked)
            held.line = await engine.open()
        except Refused as refused:
            if refused.refusal.reason is Reason.ENGINE_CHANGED:
                return None  # between two counts of one request
            return Rejected(refused.refusal, request=request)
        if held.line.profile != counted.profile:
            return None
        reuse = self._reuse(call, request, held.line.profile)
        edit = call.dialect.cap(request, verdict.size) | engine.reuse_edit(reuse)
        return Admitted(
            verdict=verdict,
            request=request,
            counted=counted,
            body=engine.unmarked(request.document).edited(edit),
            line=held.line,
            lease=lease,
            reuse=reuse,
            start=lambda: self._ledger.hand_over(held.lease_id, lambda: held.receipt.events),
            cold=self._is_cold(call, came, held.line.profile, reuse),
            answered=lambda: self._ledger.answered(held.lease_id),
            receipt=held.receipt,
            explain=engine.explain,
            reopen=lambda: self._reopen(held, counted.profile),
            asked=asked,
        )

    async def weigh(self, call: Call) -> Weighed | Rejected:
        """What `admit` would decide, by the same steps, as far as the ledger; nothing is reserved or sent."""
        try:
            self._check_served(call.tenant)
            request = call.dialect.read(call.body)
            _check_model(request.ask.model, call.tenant)
            return await self._weigh(call, request)
        except Refused as refused:
            return Rejected(refused.refusal)

    async def _weigh(self, call: Call, request: ReadRequest) -> Weighed:
        """Count and decide: by a bound where it is enough to admit, else by the count."""
        engine, tenant, dialect = self._engine, call.tenant, call.dialect.name
        bound = await engine.bound(dialect, request, call.body)
        if bound is not None:
            weighed = self._bounded(request, bound, tenant)
            if bound_suffices(weighed.verdict, request.ask, weighed.pool, tenant):
                return weighed
        counted = await engine.count(dialect, request, call.body)
        weighed = self._bounded(request, counted, tenant)
        found = await decided(engine, call.dialect, request, counted, pool=weighed.pool, tenant=tenant)
        return replace(weighed, request=found.request, counted=found.counted, verdict=found.verdict)

    def _bounded(self, request: ReadRequest, counted: Counted, tenant: Tenant) -> Weighed:
        """What follows from these sizes, nothing of the request dropped."""
        if request.ask.model is None:  # then the engine's own is meant
            _check_model(next(iter(counted.profile.models), ""), tenant)
        pool = self._engine.pool(counted.profile)
        asked = Asked.of(request.ask, counted.prompts, pool)
        return Weighed(request, counted, pool, decide(request.ask, counted.prompts, pool, tenant), asked)

    async def _reopen(self, held: _Held, judged_for: EngineProfile) -> Line:
        if held.line is not None:
            held.line.release()
            held.line = None
        held.line = await self._engine.open()
        if held.line.profile != judged_for:
            raise Refused(refusal(Reason.ENGINE_CHANGED, retry_after_s=1))
        return held.line

    def _check_served(self, tenant: Tenant) -> None:
        if self._rule is not None and not self._rule.serves(tenant):
            raise Refused(refusal(Reason.ENGINE_DEDICATED))

    def _reuse(self, call: Call, request: ReadRequest, profile: EngineProfile) -> Reuse:
        """What prefix reuse the request has on this connection; none where its API cannot carry the switch."""
        if self._rule is None or not request.ask.generates or not self._engine.carries_reuse(call.dialect.name):
            return Reuse.OFF
        return self._rule.of(call.tenant, profile, asked=request.document.get("cache_prompt") is True)

    def _is_cold(self, call: Call, came: ReadRequest, profile: EngineProfile, reuse: Reuse) -> bool:
        """Whether the conversation, by how it began before any trim, had reuse on a process that is gone."""
        if self._warmth is None or (reuse is Reuse.OFF and not self._warmth):
            return False
        return self._warmth.is_cold(call.tenant.name, beginning(call.dialect.trimmable(came), came), profile, reuse)

    async def _check_reuse(self, dialect: str, counted: Counted, pool: KvPool) -> None:
        """Refuse a dialect whose requests cannot carry the switch, unless the engine has reuse off by itself."""
        if self._engine.reuse_is_off(dialect, counted.profile) is None:
            async with self._probing:
                if self._engine.reuse_is_off(dialect, counted.profile) is None:
                    await self._probe(pool)
        found = self._engine.reuse_is_off(dialect, counted.profile)
        if found is None:
            raise Refused(refusal(Reason.REUSE_UNPROVEN, retry_after_s=2))
        if not found:
            raise Refused(refusal(Reason.REUSE_SWITCH, retry_after_s=60))

    async def _probe(self, pool: KvPool) -> None:
        async with self._settled() as held:
            reservation = Reservation(held.lease_id, PROBE_TENANT, PROBE_QUOTA, PROBE_SIZE)
            if isinstance(await self._ledger.reserve(reservation, pool), Denied):
                return  # found out nothing: the next request tries again
            held.line = await self._engine.open(fresh=True)
            try:
                self._ledger.hand_over(held.lease_id)
                await self._engine.probe_reuse(held.line)
            except LineFailed:
                raise Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=1)) from None
            held.receipt.ended = True


@dataclass(slots=True)
class _Held:
    """What one judgement holds, and must give back."""

    lease_id: str
    line: Line | None = None
    receipt: Receipt = field(default_factory=Receipt)
    prompts: tuple[int, ...] = ()

    def used(self) -> Usage | None:
        """What the request took: what the answer told, or the output that passed before it was cut.

        None where neither is known, as of a whole answer that nobody waited for: what was reserved stays charged.
        """
        told = self.receipt.told
        if told is None and self.receipt.events:
            return Usage(sum(self.prompts), self.receipt.events)
        if told is None or told.untold:
            return None
        untold_prompts = sum(self.prompts[told.prompts :])
        return replace(told.usage, prompt_tokens=told.usage.prompt_tokens + untold_prompts)


def _check_model(model: str | None, tenant: Tenant) -> None:
    if tenant.models is not None and model is not None and model not in tenant.models:
        models = ", ".join(sorted(tenant.models))
        raise Refused(refusal(Reason.MODEL_FORBIDDEN, param="model", models=models))


def _denied(
    denied: Denied, tenant: Tenant, verdict: Verdict, request: ReadRequest, counted: Counted, *, asked: Asked
) -> Rejected | None:
    if denied.reason is Reason.ENGINE_CHANGED:
        return None
    return Rejected(
        refusal(
            denied.reason,
            retry_after_s=denied.retry_after_s,
            waiting=denied.waiting,
            queue_timeout_s=tenant.quota.queue_timeout_s,
            problem="what it told before does not hold any more",
        ),
        verdict,
        request,
        counted,
        asked,
    )
