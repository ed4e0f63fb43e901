"""What is remembered of one request: built up while it runs, one frozen record at its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvgate.core.admission import Admit, Clamp, Trim
from kvgate.core.ask import Usage
from kvgate.core.counting import Proof
from kvgate.core.reason import Reason
from kvgate.core.reuse import is_violation
from kvgate.gate import Admitted, Rejected
from kvgate.ports import RequestRecord

if TYPE_CHECKING:
    from aiohttp import web

    from kvgate.core.admission import Verdict
    from kvgate.core.reason import Refusal
    from kvgate.core.replay import Asked
    from kvgate.ports import Clock, Counted, Dialect


@dataclass(slots=True)
class Exchange:
    """What is known of one request so far.

    `untold_tokens` is the output of which the engine told nothing, and `recounted` the prompt of which only a bound
    was known; both are counted afterwards.
    """

    request_id: str
    started_s: float
    dialect: Dialect
    path: str = "-"
    tenant: str = "-"
    status: int = 0
    outcome: Admitted | Rejected | None = None
    refusal: Refusal | None = None
    hung_up: bool = False
    detail: str = ""
    untold_tokens: int = 0
    recounted: Counted | None = None
    stream: web.StreamResponse | None = None
    clock: Clock | None = None
    answered_s: float | None = None

    def begun(self, status: int, stream: web.StreamResponse | None = None) -> None:
        """The answer has this status, and goes out as this stream if it is one."""
        self.status, self.stream = status, stream
        self.answered_s = None if self.clock is None else self.clock() - self.started_s

    def record(self, now_s: float) -> RequestRecord:
        """The record, at the end of the request."""
        found: dict[str, Any] = {}  # made once, of some twenty fields: a record with each of them would cost more
        reason = self.refusal.reason.label if self.refusal else ""
        outcome = self.outcome
        if outcome is not None:
            if outcome.request is not None:
                found |= {"stream": outcome.request.ask.stream, "sequences": outcome.request.ask.sequences}
            if outcome.profile is not None:
                found |= {"n_ctx_slot": outcome.profile.n_ctx_slot.value, "profile": outcome.profile}
            if outcome.counted is not None:
                found["proof"] = outcome.counted.proof.value
            if outcome.verdict is not None:
                found |= _of_verdict(outcome.verdict, reason)
                found |= self._sizes(outcome)
            if isinstance(outcome, Rejected):  # also by the ledger, after the arithmetic let it through
                found["verdict"] = "reject"
            if isinstance(outcome, Admitted):
                counted = self.recounted or outcome.counted
                found |= _cost(outcome, counted, self.untold_tokens, hung_up=self.hung_up)
        given: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "dialect": self.dialect.name if self.path != "-" else "-",
            "path": self.path,
            "status": self.status or (499 if self.hung_up else 0),
            "verdict": "",
            "reason": reason,
            "duration_s": now_s - self.started_s,
            "hung_up": self.hung_up,
            "answered_s": self.answered_s,
            "detail": self.detail or (self.refusal.param if self.refusal and self.refusal.param else ""),
        }
        return RequestRecord(**{**given, **found})

    def _sizes(self, outcome: Admitted | Rejected) -> dict[str, Any]:
        """The request's true sizes, known by now also where a bound let it in; else none to judge it again by."""
        if outcome.counted is None or outcome.counted.proof is not Proof.BOUND:
            return {"asked": outcome.asked}
        asked = self._recounted(outcome)
        return {} if asked is None else {"asked": asked, "prompt_tokens": asked.prompts[0]}

    def _recounted(self, outcome: Admitted | Rejected) -> Asked | None:
        if (asked := outcome.asked) is None:
            return None
        told = outcome.receipt.told if isinstance(outcome, Admitted) else None
        if self.recounted is not None:
            return replace(asked, prompts=self.recounted.prompts)
        if told is not None and told.prompts == asked.prompts_count == 1:
            return replace(asked, prompts=(told.usage.prompt_tokens,))
        return None


def _of_verdict(verdict: Verdict, reason: str) -> dict[str, Any]:
    """`reason` is the refusal's, where there is one already."""
    found: dict[str, Any] = {"verdict": verdict.label}
    if (room := verdict.room) is not None:
        found |= {"prompt_tokens": room.prompt_tokens, "usable_generation": room.usable_generation}
    if isinstance(verdict, Admit | Clamp | Trim):
        found["output_limit"] = verdict.size.output_tokens
    if isinstance(verdict, Clamp):
        found["reason"] = reason or Reason.GENERATION_OVERFLOW.label
    if isinstance(verdict, Trim):
        found |= {"trimmed": verdict.trimmed, "reason": reason or Reason.PROMPT_OVERFLOW.label}
    return found


def _cost(admitted: Admitted, counted: Counted, untold_tokens: int, *, hung_up: bool) -> dict[str, Any]:
    """What the request cost: the engine's figures, completed by the gate's own where they tell less.

    An answer that was cut before it told is charged for its whole prompt and for what passed of its output; so is
    one whose client left before any of it came: the engine was at work on the prompt.
    """
    receipt, told = admitted.receipt, admitted.receipt.told
    found: dict[str, Any] = {
        "queued_s": admitted.lease.queued_s,
        "reuse": admitted.reuse.value,
        "finish": "loop" if receipt.stopped else "" if told is None else told.finish,
        "loop": receipt.loop,
        "loop_stopped": receipt.stopped,
        "ended_by_context": receipt.ended_by_context,
    }
    if told is None:
        # An API that tells no usage and generates nothing cost what was counted.
        spent = receipt.ended and not admitted.request.ask.generates
        if receipt.events or hung_up or spent:
            found["usage"] = Usage(sum(counted.prompts), receipt.events)
        return found
    drift = told.usage.prompt_tokens - sum(counted.prompts[: told.prompts])
    usage = Usage(
        prompt_tokens=told.usage.prompt_tokens + sum(counted.prompts[told.prompts :]),
        output_tokens=told.usage.output_tokens + untold_tokens,
        cached_tokens=told.usage.cached_tokens,
    )
    # A bound may be above the truth, never below it.
    drift = drift if counted.exact else max(drift, 0)
    violation = is_violation(admitted.reuse, told.usage)
    return {**found, "usage": usage, "count_drift_tokens": drift, "reuse_violation": violation}
