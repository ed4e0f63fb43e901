"""Bytes through: sends an admitted request to the engine and hands its answer on, watching what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvgate.core.ask import Usage
from kvgate.core.ending import ended_by_context
from kvgate.core.reason import Reason, Refusal, refusal
from kvgate.core.reuse import Reuse
from kvgate.core.sse import EventSplitter, EventTooLarge
from kvgate.core.tenant import LoopGuard
from kvgate.ports import LineFailed, LineStalled, Refused
from kvgate.upstream import RETRY_AFTER_S, whole_body
from kvgate.wire.answers import is_answer, is_error
from kvgate.wire.generated import StreamWatch, loop_in
from kvgate.wire.masking import masked, masked_event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgate.gate import Admitted
    from kvgate.ports import Dialect, Head, StreamTap

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""An unstreamed answer is held whole until its end, so that a cut one can still become a clear error."""


class Client(Protocol):
    """The other side: where the answer goes."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a streamed answer, right before its first bytes."""

    async def write(self, data: bytes) -> None:
        """Send some of a streamed answer; waits while the client is slow."""

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """How an exchange went: the status the client saw, and what went wrong, if anything did.

    `detail` says what broke, for the operator's log; it is kvgate's own wording, never the engine's.
    """

    status: int
    failure: Refusal | None = None
    detail: str = ""


async def relay(
    admitted: Admitted,
    dialect: Dialect,
    path: str,
    client: Client,
    headers: Mapping[str, str],
    *,
    loop_guard: LoopGuard = LoopGuard.OFF,
) -> Relayed:
    """Run one admitted request.

    1. The head is awaited, and of a stream its first bytes that are no error: until then an error is still an
       ordinary answer, with a status of its own.
    2. An event stream goes on as it comes, event by event; its usage is read on the way, and it may be ended where it
       repeats itself (`loop_guard`).
    3. Anything else is held until it is whole, so that the client gets all of it or an error.

    The receipt says `ended` only where the engine's answer came to its proper end, or nothing of the request reached
    it; everything else drains.
    """
    say = _Say(dialect, client, headers)
    try:
        head = await _sent(admitted, path)  # 1
    except LineFailed as failed:
        return await say.failure(_reason_of(failed), f"before the head: {failed}")
    except Refused as refused:
        return await say(refused.refusal, f"on a second connection: {refused.detail}")
    admitted.answered()
    if head.status == 200 and (head.get("content-type") or "").startswith("text/event-stream"):
        guard = _Guard(loop_guard, dialect.tap(admitted.request), admitted)
        return await _stream(admitted, guard, {**_passed_on(head), **headers}, say)  # 2
    return await _whole(admitted, dialect, head, say, loop_guard)  # 3


async def _sent(admitted: Admitted, path: str) -> Head:
    """Send the request; once more on another connection where nothing of it was sent on the first.

    What was sent is never sent again: the engine may be at work on it.
    """
    for again in (True, False):
        admitted.start()
        try:
            return await admitted.line.send("POST", path, {"Content-Type": "application/json"}, admitted.body)
        except LineFailed as failed:
            admitted.receipt.ended = not failed.sent
            if failed.sent or not again:
                raise
        await admitted.renew_line()
        admitted.receipt.ended = False
    raise AssertionError("the second attempt returns or raises")


async def _stream(admitted: Admitted, guard: _Guard, headers: Mapping[str, str], say: _Say) -> Relayed:
    tap, watch, client = guard.tap, guard.watch, say.client
    splitter = EventSplitter()
    shown = masked_event if admitted.reuse is Reuse.OFF else bytes
    begun, problem = False, ""
    reason = Reason.ENGINE_FAILED
    try:
        while data := await admitted.line.read():
            admitted.receipt.events = tap.events
            events = splitter.feed(data)
            if out := b"".join([shown(tap.take(event)) for event in events]):
                if not begun:
                    begun = True
                    await client.begin(200, headers)
                await client.write(out)
            if watch is not None and watch.take(data) and (ending := guard.ending(events)):
                await client.write(ending)
                return Relayed(200)
    except LineFailed as failed:
        problem, reason = str(failed), _reason_of(failed)
    except EventTooLarge as large:
        problem = str(large)
    finally:
        admitted.receipt.told, admitted.receipt.events = tap.told, tap.events
        admitted.receipt.loop = None if watch is None else watch.look()
        admitted.receipt.ended_by_context = _context_ended(admitted)
    if tap.ended and tap.failure is None and begun:
        # The client has its whole answer, whatever the engine did behind it.
        admitted.receipt.ended = not problem
        return Relayed(200, detail=problem and f"behind the end marker: {problem}")
    if tap.failure is not None:
        failure, problem = admitted.explain(500, tap.failure), problem or "an error event"
    else:
        failure, problem = refusal(reason), problem or "the stream had no end marker"
    if not begun:
        return await say(failure, f"before the first event: {problem}")
    await client.write(say.dialect.refuse_in_stream(failure))
    return Relayed(200, failure, problem)


async def _whole(admitted: Admitted, dialect: Dialect, head: Head, say: _Say, loop_guard: LoopGuard) -> Relayed:
    try:
        body = await whole_body(admitted.line, ANSWER_BYTES_MAX)
    except LineFailed as failed:
        return await say.failure(_reason_of(failed), f"in mid-answer: {failed}")
    admitted.receipt.ended = True
    if head.status >= 400:
        return await say(admitted.explain(head.status, body))
    if not is_answer(body):
        return await say.failure(Reason.ENGINE_FAILED, f"{len(body)} bytes that are no JSON")
    if is_error(body):
        return await say(admitted.explain(500, body), "an error inside a 200")
    receipt = admitted.receipt
    receipt.told = dialect.told(admitted.request, body)
    receipt.ended_by_context = _context_ended(admitted)
    if loop_guard is not LoopGuard.OFF:
        receipt.loop = loop_in(body, dialect.whole_text)
    found = {"x-kvgate-ended-by-context": receipt.ended_by_context, "x-kvgate-loop": receipt.loop}
    told = {name: str(value) for name, value in found.items() if value}
    shown = masked(body) if admitted.reuse is Reuse.OFF else body
    await say.client.whole(head.status, {**_passed_on(head), **say.headers, **told}, shown)
    return Relayed(head.status)


def _context_ended(admitted: Admitted) -> str:
    told, verdict = admitted.receipt.told, admitted.verdict
    if told is None or not admitted.request.ask.generates:
        return ""
    alone = verdict.size.sequences == 1 and not told.untold
    output = told.usage.output_tokens if alone else None
    asked = admitted.request.ask.output_tokens
    return ended_by_context(told.finish, output, verdict.size.output_tokens, asked, verdict.room)


class _Guard:
    """What a tenant wants done about a stream that repeats itself.

    One of several answers is never a reason to stop the others: such a request is observed only.
    """

    def __init__(self, loop_guard: LoopGuard, tap: StreamTap, admitted: Admitted) -> None:
        self.tap = tap
        ask = admitted.request.ask
        answers = ask.sequences * max(len(ask.prompts), 1)
        watched = loop_guard is not LoopGuard.OFF and bool(tap.text)
        self.watch = StreamWatch(tap.text, answers) if watched else None
        self._admitted = admitted
        self._stops = loop_guard is LoopGuard.STOP and answers == 1

    def ending(self, events: list[bytes]) -> bytes:
        """What ends the stream now, behind these events; empty where it goes on."""
        if not self._stops or self.tap.ended:
            return b""
        usage = Usage(sum(self._admitted.counted.prompts), self.tap.events)
        ending = self.tap.stop(events, usage)
        self._admitted.receipt.stopped = bool(ending)
        return ending


def _reason_of(failed: LineFailed) -> Reason:
    if not failed.sent:
        return Reason.ENGINE_UNREACHABLE
    return Reason.ENGINE_STALLED if isinstance(failed, LineStalled) else Reason.ENGINE_FAILED


@dataclass(frozen=True, slots=True)
class _Say:
    """Tells a client, in its dialect, of a failure before its answer began."""

    dialect: Dialect
    client: Client
    headers: Mapping[str, str]

    async def __call__(self, failure: Refusal, detail: str = "") -> Relayed:
        told = {**self.headers, "Content-Type": "application/json", "x-kvgate-reason": failure.reason.label}
        if failure.retry_after_s is not None:
            told["retry-after"] = str(failure.retry_after_s)
        await self.client.whole(failure.reason.status, told, self.dialect.refuse(failure))
        return Relayed(failure.reason.status, failure, detail)

    async def failure(self, reason: Reason, detail: str) -> Relayed:
        retry_after_s = RETRY_AFTER_S if reason is Reason.ENGINE_UNREACHABLE else None
        return await self(refusal(reason, retry_after_s=retry_after_s), detail)


PASSED_ON = ("content-type", "cache-control", "x-accel-buffering")
"""The engine's headers that reach the client; `X-Accel-Buffering: no` keeps an nginx in front from buffering."""


def _passed_on(head: Head) -> dict[str, str]:
    return {name: value for name in PASSED_ON if (value := head.get(name)) is not None}
