"""Bytes through: sends an admitted request to the engine and hands its answer on, watching what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvgate.core.reason import Reason, Refusal, refusal
from kvgate.core.sse import EventSplitter, EventTooLarge
from kvgate.ports import LineFailed
from kvgate.upstream import whole_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgate.gate import Admitted
    from kvgate.ports import Dialect, Head

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""An unstreamed answer is held whole until its end, so that a cut one can still become a clear error."""


class Client(Protocol):
    """The other side: where the answer goes."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a streamed answer."""

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

    1. The head is awaited: until then an error is still an ordinary answer.
    2. An event stream goes on as it comes, event by event; its usage is read on the way.
    3. Anything else is held until it is whole, so that the client gets all of it or an error.

    The receipt says `ended` only where the engine's answer came to its proper end; everything else drains.
    """
    line = admitted.line
    try:
        admitted.start()
        head = await line.send("POST", path, {"Content-Type": "application/json"}, admitted.body)  # 1
    except LineFailed as failed:
        return await _refuse(Reason.ENGINE_FAILED, dialect, client, headers, f"before the head: {failed}")
    admitted.answered()
    if head.status == 200 and (head.get("content-type") or "").startswith("text/event-stream"):
        return await _stream(admitted, dialect, client, {**_passed_on(head), **headers})  # 2
    return await _whole(admitted, dialect, head, client, headers)  # 3


async def _stream(admitted: Admitted, dialect: Dialect, client: Client, headers: Mapping[str, str]) -> Relayed:
    await client.begin(200, headers)
    tap = dialect.tap(admitted.request)
    splitter = EventSplitter()
    broken = ""
    try:
        while data := await admitted.line.read():
            if out := b"".join([tap.take(event) for event in splitter.feed(data)]):
                await client.write(out)
    except (LineFailed, EventTooLarge) as failed:
        broken = str(failed)
    finally:
        admitted.receipt.told, admitted.receipt.events = tap.told, tap.events
    if tap.failure is None and tap.ended and not broken:
        admitted.receipt.ended = True
        return Relayed(200)
    failure = refusal(Reason.ENGINE_FAILED) if tap.failure is None else admitted.explain(500, tap.failure)
    await client.write(dialect.refuse_in_stream(failure))
    return Relayed(200, failure, broken or "the stream had no end marker")


async def _whole(
    admitted: Admitted, dialect: Dialect, head: Head, client: Client, headers: Mapping[str, str]
) -> Relayed:
    try:
        body = await whole_body(admitted.line, ANSWER_BYTES_MAX)
    except LineFailed as failed:
        return await _refuse(Reason.ENGINE_FAILED, dialect, client, headers, f"in mid-answer: {failed}")
    admitted.receipt.ended = True
    if head.status >= 400:
        failure = admitted.explain(head.status, body)
        return await _say(failure, dialect, client, headers)
    admitted.receipt.told = dialect.told(admitted.request, body)
    await client.whole(head.status, {**_passed_on(head), **headers}, body)
    return Relayed(head.status)


async def _refuse(
    reason: Reason, dialect: Dialect, client: Client, headers: Mapping[str, str], detail: str = ""
) -> Relayed:
    return await _say(refusal(reason), dialect, client, headers, detail)


async def _say(
    failure: Refusal, dialect: Dialect, client: Client, headers: Mapping[str, str], detail: str = ""
) -> Relayed:
    told = {**headers, "Content-Type": "application/json", "x-kvgate-reason": failure.reason.label}
    if failure.retry_after_s is not None:
        told["retry-after"] = str(failure.retry_after_s)
    await client.whole(failure.reason.status, told, dialect.refuse(failure))
    return Relayed(failure.reason.status, failure, detail)


PASSED_ON = ("content-type", "cache-control", "x-accel-buffering")
"""The engine's headers that reach the client; `X-Accel-Buffering: no` keeps an nginx in front from buffering."""


def _passed_on(head: Head) -> dict[str, str]:
    return {name: value for name in PASSED_ON if (value := head.get(name)) is not None}
