"""Bytes through: sends an admitted request to the engine and hands its answer on, watching what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvgate.core.reason import Reason, Refusal, refusal
from kvgate.core.reuse import Reuse
from kvgate.core.sse import EventSplitter, EventTooLarge
from kvgate.ports import LineFailed, LineStalled, Refused
from kvgate.upstream import RETRY_AFTER_S, whole_body
from kvgate.wire.answers import is_answer, is_error
from kvgate.wire.masking import masked, masked_event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgate.gate import Admitted
    from kvgate.ports import Dialect, Head

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
    admitted: Admitted, dialect: Dialect, path: str, client: Client, headers: Mapping[str, str]
) -> Relayed:
    """Run one admitted request.

    1. The head is awaited, and of a stream its first bytes that are no error: until then an error is still an
       ordinary answer, with a status of its own.
    2. An event stream goes on as it comes, event by event; its usage is read on the way.
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
        return await _stream(admitted, dialect, client, {**_passed_on(head), **headers}, say)  # 2
    return await _whole(admitted, dialect, head, say)  # 3


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


async def _stream(
    admitted: Admitted, dialect: Dialect, client: Client, headers: Mapping[str, str], say: _Say
) -> Relayed:
    tap = dialect.tap(admitted.request)
    splitter = EventSplitter()
    shown = masked_event if admitted.reuse is Reuse.OFF else bytes
    begun, problem = False, ""
    reason = Reason.ENGINE_FAILED
    try:
        while data := await admitted.line.read():
            if out := b"".join([shown(tap.take(event)) for event in splitter.feed(data)]):
                if not begun:
                    begun = True
                    await client.begin(200, headers)
                await client.write(out)
    except LineFailed as failed:
        problem, reason = str(failed), _reason_of(failed)
    except EventTooLarge as large:
        problem = str(large)
    finally:
        admitted.receipt.told, admitted.receipt.events = tap.told, tap.events
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
    await client.write(dialect.refuse_in_stream(failure))
    return Relayed(200, failure, problem)


async def _whole(admitted: Admitted, dialect: Dialect, head: Head, say: _Say) -> Relayed:
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
    admitted.receipt.told = dialect.told(admitted.request, body)
    shown = masked(body) if admitted.reuse is Reuse.OFF else body
    await say.client.whole(head.status, {**_passed_on(head), **say.headers}, shown)
    return Relayed(head.status)


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
