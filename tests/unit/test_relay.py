"""What the engine says reaches the client whole, or as an error; the receipt never claims an end that was none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvgate import relay as module
from kvgate.core.admission import Admit, Room
from kvgate.core.ask import Size, Usage
from kvgate.core.ledger import Lease
from kvgate.core.loops import Loop
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason, refusal
from kvgate.core.replay import Asked
from kvgate.core.reuse import Reuse
from kvgate.core.tenant import LoopGuard
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.engines.llamacpp.errors import explain
from kvgate.gate import Admitted, Receipt
from kvgate.ports import Counted, Head, LineStalled, Refused, Told
from kvgate.relay import Relayed, relay
from tests.unit.doubles import ClientDouble, LineDouble, broken, chat, forever

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

DIALECT = OpenAiChat()
JSON = (("content-type", "application/json; charset=utf-8"),)
SSE = (("content-type", "text/event-stream"), ("x-accel-buffering", "no"), ("server", "llama.cpp"))
OWN = {"x-request-id": "r1", "server": "kvgate"}


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(content: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"
OVERFLOW = event({"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}})


class Story:
    """One admitted request, and what was told of it."""

    def __init__(
        self,
        head: Head | Exception,
        pieces: Sequence[bytes | Exception | Callable[[], Awaitable[None]]] = (),
        **fields: Any,
    ) -> None:
        self.told: list[str] = []
        self.line = LineDouble(head=head, pieces=pieces)
        self.others: list[LineDouble | Refused] = []
        self.client = ClientDouble()
        self.receipt = Receipt()
        self.admitted = Admitted(
            verdict=Admit(Size(9, 2), Room(1024, "slot", 9, 1015)),
            request=DIALECT.read(chat(**fields)),
            counted=Counted((9,), self.line.profile),
            body=b"the judged body",
            line=self.line,
            lease=Lease("x", 11, 1, 0.0),
            cold=False,
            reuse=Reuse.OFF,
            start=lambda: self.told.append("start"),
            answered=lambda: self.told.append("answered"),
            receipt=self.receipt,
            explain=explain,
            reopen=self._reopen,
            asked=Asked(2, 1, (9,), 1, KvPool(1024, 1, 1024)),
        )

    async def _reopen(self) -> LineDouble:
        self.told.append("reopen")
        found = self.others.pop(0)
        if isinstance(found, Refused):
            raise found
        return found

    async def run(self) -> Relayed:
        return await relay(self.admitted, DIALECT, "/v1/chat/completions", self.client, OWN)

    @property
    def error(self) -> dict[str, Any]:
        """The error that the client was told, whole or as a stream's last event before the end marker."""
        body = self.client.body
        if self.client.begun:
            *_, last, done, rest = body.split(b"\n\n")
            assert (done, rest) == (b"data: [DONE]", b"")
            body = last.removeprefix(b"data: ")
        found: dict[str, Any] = json.loads(body)["error"]
        return found


def streamed(*pieces: bytes | Exception | Callable[[], Awaitable[None]], shown: bool = False) -> Story:
    return Story(Head(200, SSE), pieces, stream=True, stream_options={"include_usage": shown})


# -- whole answers


async def test_a_whole_answer_goes_on_as_it_came() -> None:
    """Its body byte for byte, its status, its type; and the receipt says what it cost and that it ended."""
    answer = b'{"usage": {"prompt_tokens":9, "completion_tokens":2}, "x": 1.0}'
    story = Story(Head(200, JSON), [answer[:10], answer[10:]])
    relayed = await story.run()
    assert (relayed.status, relayed.failure) == (200, None)
    assert story.client.body == answer
    assert story.client.headers == {"content-type": "application/json; charset=utf-8", **OWN}
    assert (story.receipt.ended, story.receipt.told) == (True, Told(Usage(9, 2)))
    assert story.told == ["start", "answered"]
    assert story.line.sent == [
        ("POST", "/v1/chat/completions", {"Content-Type": "application/json"}, b"the judged body")
    ]


async def test_the_engine_has_the_request_before_anything_is_awaited() -> None:
    """From `start` on only the engine can tell that it ended, so it comes before the first byte."""
    story = Story(broken())
    await story.run()
    assert story.told == ["start"]


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (400, "Failed to parse grammar", Reason.ENGINE_REFUSED),
        (400, "no", Reason.ENGINE_REFUSED),
        (422, "no", Reason.ENGINE_REFUSED),
        (500, "Failed to parse messages", Reason.ENGINE_REFUSED),
        (500, "no", Reason.ENGINE_FAILED),
        (501, "no", Reason.ENGINE_CANNOT),
        (503, "Loading model", Reason.ENGINE_LOADING),
    ],
)
async def test_an_error_of_the_engine_is_said_in_the_dialect(status: int, message: str, reason: Reason) -> None:
    """Never passed through: it may quote a prompt. It ended, and it cost nothing that is known."""
    body = json.dumps({"error": {"code": status, "message": f"{message}: the launch code", "type": "x"}}).encode()
    story = Story(Head(status, JSON), [body[:9], body[9:]])
    relayed = await story.run()
    assert relayed.failure is not None
    assert relayed.failure.reason is reason
    assert relayed.status == story.client.status == reason.status
    assert (story.error["code"], story.error["reason"]) == (reason.value.code, reason.label)
    assert "launch code" not in story.client.body.decode() + repr(relayed)
    headers = {"Content-Type": "application/json", "x-kvgate-reason": reason.label, **OWN}
    if reason is Reason.ENGINE_LOADING:
        headers["retry-after"] = "5"
    assert story.client.headers == headers
    assert (story.receipt.ended, story.receipt.told) == (True, None)


async def test_an_overflow_that_the_engine_finds_carries_its_figures() -> None:
    """The dialect's own overflow, with the engine's true figures."""
    error = {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 1030, "n_ctx": 1024, "message": "x"}
    story = Story(Head(400, JSON), [json.dumps({"error": error}).encode()])
    await story.run()
    assert story.client.status == 400
    assert story.error["code"] == "context_length_exceeded"
    assert (story.error["n_prompt_tokens"], story.error["n_ctx"]) == (1030, 1024)


async def test_an_overflown_pool_is_kvgates_failure_and_says_so() -> None:
    """The engine's 500 names its cache; that the ledger exists to prevent it is for the operator."""
    story = Story(Head(500, JSON), [OVERFLOW.removeprefix(b"data: ").strip()])
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, relayed.failure.reason) == (502, Reason.ENGINE_OVERFLOW)
    assert (story.error["reason"], story.client.status) == ("engine_overflow", 502)
    assert story.client.headers["x-kvgate-reason"] == "engine_overflow"
    assert story.receipt.ended


async def test_an_answer_that_talks_of_an_overflow_is_none() -> None:
    story = Story(Head(200, JSON), [b'{"choices":[{"message":{"content":"Context size has been exceeded."}}]}'])
    assert (await story.run()).failure is None


@pytest.mark.parametrize(
    ("head", "pieces"),
    [
        (broken(sent=True), []),
        (Head(200, JSON), [broken()]),
        (Head(200, JSON), [b'{"choices":[', broken()]),
        (Head(500, JSON), [b'{"error"', broken()]),
    ],
)
async def test_a_cut_answer_becomes_an_error(head: Head | Exception, pieces: list[bytes | Exception]) -> None:
    """Never half of an answer: the client gets all of it, or a 502 in its dialect; the lease drains."""
    story = Story(head, pieces)
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, relayed.failure.reason) == (502, Reason.ENGINE_FAILED)
    assert (story.error["code"], story.client.headers["x-kvgate-reason"]) == ("engine_failed", "engine_failed")
    assert story.client.headers["Content-Type"] == "application/json"
    assert {name: story.client.headers[name] for name in OWN} == OWN
    assert not story.receipt.ended


async def test_an_answer_without_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 1000)
    story = Story(Head(200, JSON), [b"{" * 600, b"}" * 401, b"never read"])
    assert (await story.run()).status == 502
    assert (story.receipt.ended, story.line.reads) == (False, 2)
    enough = Story(Head(200, JSON), [b"{" * 600, b"}" * 400])
    assert (await enough.run()).status == 200


# -- streams


async def test_a_stream_goes_on_event_by_event() -> None:
    """As it comes, wherever the bytes are cut, with the header that keeps an nginx in front from buffering."""
    first, second = delta("H\u00e9"), delta("llo")
    story = streamed(first[:15], first[15:] + second[:-1], second[-1:], USAGE, DONE, shown=True)
    relayed = await story.run()
    assert (relayed.status, relayed.failure) == (200, None)
    assert story.client.writes == [first, second, USAGE + DONE]
    assert story.client.headers == {"content-type": "text/event-stream", "x-accel-buffering": "no", **OWN}
    assert (story.receipt.ended, story.receipt.told) == (True, Told(Usage(9, 2)))


async def test_a_usage_nobody_asked_for_is_read_and_hidden() -> None:
    story = streamed(delta("x"), USAGE, DONE)
    await story.run()
    assert story.client.writes == [delta("x"), DONE]
    assert story.receipt.told == Told(Usage(9, 2))


async def test_a_comment_is_life_and_passes() -> None:
    story = streamed(b": ping\n\n", delta("x"), DONE)
    await story.run()
    assert story.client.writes[0] == b": ping\n\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [delta("x"), broken()],
        [delta("x"), delta("y")[:20], broken()],
        [delta("x")],
        [delta("x"), USAGE],
        [delta("x") + delta("y")[:-1], broken()],
        [delta("x"), b"data: [DONE]"],
        [delta("x"), b"data: [DONE]\n"],
        [delta("x"), b"x" * (8 * 1024 * 1024 + 1)],
    ],
)
async def test_a_stream_without_a_proper_end_ends_in_an_error(pieces: list[bytes | Exception]) -> None:
    """Half an event is never passed on, and the client can tell a cut from an end; the lease drains."""
    story = streamed(*pieces)
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, relayed.failure.reason) == (200, Reason.ENGINE_FAILED)
    assert story.error["code"] == "engine_failed"
    assert story.client.writes[:-1] == [delta("x") for piece in pieces if delta("x") in _bytes(piece)]
    assert not story.receipt.ended


def _bytes(piece: bytes | Exception) -> bytes:
    return piece if isinstance(piece, bytes) else b""


async def test_a_cut_behind_the_end_marker_is_for_the_operator_alone() -> None:
    """The client has its whole answer; what the engine still does only its slots can tell."""
    story = streamed(delta("x"), DONE, broken())
    relayed = await story.run()
    assert (relayed.status, relayed.failure) == (200, None)
    assert "behind the end marker" in relayed.detail
    assert story.client.body == delta("x") + DONE
    assert not story.receipt.ended


@pytest.mark.parametrize("pieces", [[], [broken()], [delta("x")[:30], broken()], [b"x" * (8 * 1024 * 1024 + 1)]])
async def test_a_stream_that_breaks_before_its_first_event_is_an_ordinary_error(
    pieces: list[bytes | Exception],
) -> None:
    """A status of its own: a client that retries by status sees it."""
    story = streamed(*pieces)
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, relayed.failure.reason) == (502, Reason.ENGINE_FAILED)
    assert (story.client.begun, story.client.status, story.error["code"]) == (False, 502, "engine_failed")
    assert story.client.headers == {"Content-Type": "application/json", "x-kvgate-reason": "engine_failed", **OWN}
    assert not story.receipt.ended


@pytest.mark.parametrize(
    ("message", "reason"),
    [("Context size has been exceeded.", Reason.ENGINE_OVERFLOW), ("no", Reason.ENGINE_FAILED)],
)
async def test_an_error_as_the_first_event_is_an_ordinary_error(message: str, reason: Reason) -> None:
    """Engines that answer 200 first and fail then: the client is not told that all went well."""
    story = streamed(event({"error": {"code": 500, "message": message}}), DONE)
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, relayed.failure.reason, story.client.begun) == (502, reason, False)
    assert story.error["reason"] == reason.label
    assert not story.receipt.ended


@pytest.mark.parametrize("error", [{"code": 500, "message": "no"}, "no"])
async def test_an_error_inside_a_whole_200_is_an_error(error: Any) -> None:
    story = Story(Head(200, JSON), [json.dumps({"error": error}).encode()])
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, story.error["code"]) == (502, "engine_failed")
    assert (story.receipt.ended, story.receipt.told) == (True, None)


@pytest.mark.parametrize("body", [b"", b" \n", b"<html>", b'{"cut": ', b'"text"'])
async def test_a_200_that_is_no_json_is_an_error(body: bytes) -> None:
    """Another server's page, or nothing: no SDK could read it."""
    story = Story(Head(200, JSON), [body] if body else [])
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, story.error["code"], story.receipt.ended) == (502, "engine_failed", True)
    assert "no JSON" in relayed.detail


@pytest.mark.parametrize(
    "answer", [b'{"error": null, "id": 1}', b'{"a": {"error": "x"}}', b'["error"]', b'{"error": ""}']
)
async def test_a_whole_answer_that_talks_of_an_error_is_none(answer: bytes) -> None:
    """/v1/responses says `"error": null` in each."""
    story = Story(Head(200, JSON), [answer])
    assert (await story.run()).failure is None
    assert story.client.body == answer


# -- an engine that stalls, a connection that is gone


async def test_a_stalled_engine_is_told_apart_from_one_that_broke() -> None:
    """504, also in mid-stream; the lease drains."""
    stalled = LineStalled("the engine sent nothing for 120 s in mid-answer")
    for story, status in (
        (streamed(delta("x"), stalled), 200),
        (streamed(stalled), 504),
        (Story(Head(200, JSON), [b"{", stalled]), 504),
        (Story(stalled), 504),
    ):
        relayed = await story.run()
        assert relayed.failure is not None
        assert (relayed.status, relayed.failure.reason) == (status, Reason.ENGINE_STALLED)
        assert story.error["code"] == "engine_stalled"
        assert "120 s" in relayed.detail
        assert not story.receipt.ended


async def test_a_request_of_which_nothing_was_sent_goes_out_once_more() -> None:
    """On another connection, and nobody is told."""
    story = Story(broken(sent=False))
    story.others = [LineDouble(head=Head(200, JSON), pieces=[b"{}"])]
    assert (await story.run()).status == 200
    assert story.told == ["start", "reopen", "start", "answered"]
    assert story.receipt.ended


async def test_it_goes_out_once_more_and_not_twice() -> None:
    """An engine that takes no connection holds nothing: the lease is free at once."""
    story = Story(broken(sent=False))
    story.others = [LineDouble(head=broken(sent=False)), LineDouble(head=Head(200, JSON))]
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, relayed.failure.reason) == (503, Reason.ENGINE_UNREACHABLE)
    assert story.client.headers["retry-after"] == "2"
    assert (story.told.count("reopen"), story.receipt.ended) == (1, True)


async def test_what_was_sent_is_never_sent_again() -> None:
    """The engine may be at work on it."""
    story = Story(broken(sent=False))
    story.others = [LineDouble(head=broken(sent=True)), LineDouble(head=Head(200, JSON))]
    assert (await story.run()).status == 502
    assert (len(story.others), story.receipt.ended) == (1, False)


async def test_an_engine_that_is_gone_by_then_says_so() -> None:
    story = Story(broken(sent=False))
    story.others = [Refused(refusal(Reason.ENGINE_CHANGED, retry_after_s=1))]
    relayed = await story.run()
    assert (relayed.status, story.error["code"], story.receipt.ended) == (503, "engine_changed", True)


@pytest.mark.parametrize(
    ("message", "reason"),
    [("Context size has been exceeded.", Reason.ENGINE_OVERFLOW), ("no", Reason.ENGINE_FAILED)],
)
@pytest.mark.parametrize("end", [[], [DONE], [broken()]])
async def test_an_error_inside_a_stream_is_told_in_the_dialect(
    message: str, reason: Reason, end: list[bytes | Exception]
) -> None:
    """Once, with the end marker behind it, whether the engine sent one or not."""
    story = streamed(delta("x"), event({"error": {"code": 500, "message": message}}), *end)
    relayed = await story.run()
    assert relayed.failure is not None
    assert (relayed.status, relayed.failure.reason) == (200, reason)
    assert story.error["reason"] == reason.label
    assert story.client.body.count(b"[DONE]") == 1
    assert story.client.body.startswith(delta("x"))
    assert not story.receipt.ended


async def test_usage_told_before_a_cut_is_kept() -> None:
    story = streamed(delta("x"), USAGE, broken())
    await story.run()
    assert (story.receipt.ended, story.receipt.told) == (False, Told(Usage(9, 2)))


async def test_output_that_passed_before_a_cut_is_counted() -> None:
    """Where nothing was told, the pieces of output are what is known; comments and end markers are none."""
    story = streamed(b": ping\n\n", delta("x"), delta("y"), broken())
    await story.run()
    assert (story.receipt.told, story.receipt.events) == (None, 2)


async def test_output_that_an_error_event_ends_is_counted_too() -> None:
    story = streamed(delta("x"), OVERFLOW, delta("y"))
    await story.run()
    assert (story.receipt.told, story.receipt.events) == (None, 1)


async def test_an_error_status_with_a_streams_type_is_a_whole_answer() -> None:
    """An error before the stream is an ordinary answer, in the dialect's words."""
    story = Story(Head(500, SSE), [b"data: no\n\n"], stream=True)
    assert (await story.run()).status == 502
    assert story.error["reason"] == "engine_failed"
    assert not story.client.begun


# -- the client's side


async def test_a_slow_client_holds_the_engine_back() -> None:
    """While the client takes nothing, nothing more is read: the connection's own bound is the only buffer."""
    go = asyncio.Event()
    story = streamed(*[delta(str(at)) for at in range(100)], DONE)

    async def wait(_: bytes) -> None:
        await go.wait()

    story.client.before_write = wait
    running = asyncio.create_task(story.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert (story.line.reads, story.client.writes) == (1, [])
    go.set()
    await running
    assert len(story.client.writes) == 101


async def test_a_client_that_left_ends_the_relay() -> None:
    """Nothing more is read for it; the receipt keeps what was known, and does not say `ended`."""

    async def gone(data: bytes) -> None:
        if data == delta("y"):
            raise ConnectionResetError

    story = streamed(delta("x"), USAGE, delta("y"), DONE)
    story.client.before_write = gone
    with pytest.raises(ConnectionResetError):
        await story.run()
    assert (story.receipt.ended, story.receipt.told, story.line.reads) == (False, Told(Usage(9, 2)), 3)


@pytest.mark.parametrize(
    "story",
    [streamed(delta("x"), forever, DONE), Story(Head(200, JSON), [b"{", forever])],
    ids=["stream", "whole"],
)
async def test_a_cancelled_relay_claims_no_end(story: Story) -> None:
    running = asyncio.create_task(story.run())
    for _ in range(10):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not story.receipt.ended
    assert story.told == ["start", "answered"]
    assert (story.receipt.told, story.receipt.events) == (None, 1 if story.client.begun else 0)


async def test_what_went_wrong_is_said_for_the_operator_and_not_to_the_client() -> None:
    """`detail` is kvgate's own wording."""
    story = streamed(delta("x"), broken())
    relayed = await story.run()
    assert "closed the connection" in relayed.detail
    assert "closed the connection" not in story.client.body.decode()
    assert (await streamed(delta("x"), DONE).run()).detail == ""


# -- what was cached


CACHED = b'{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8}}}'
COLD = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("reuse", list(Reuse))
async def test_cached_tokens_are_shown_to_who_may_reuse_alone(reuse: Reuse) -> None:
    """Whole and streamed; the receipt has the truth either way."""
    whole = Story(Head(200, JSON), [CACHED])
    usage = b'data: {"choices":[],' + CACHED[1:] + b"\n\n"
    stream = streamed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', usage, b"data: [DONE]\n\n", shown=True)
    for story in (whole, stream):
        story.admitted.reuse = reuse
        await story.run()
        assert story.receipt.told == Told(Usage(9, 2, 8))
    event = stream.client.body.split(b"\n\n")[1].removeprefix(b"data: ")
    if reuse is Reuse.OFF:
        assert [json.loads(shown)["usage"] for shown in (whole.client.body, event)] == [COLD, COLD]
    else:
        assert (whole.client.body, b"data: " + event + b"\n\n") == (CACHED, usage)
    assert stream.client.body.endswith(b"data: [DONE]\n\n")


# -- answers that repeat themselves


def looping(count: int = 700) -> list[bytes]:
    return [delta(("never ", "ever, ")[at % 2]) for at in range(count)]


class Endless(Story):
    """A stream that goes round and would not end by itself."""

    async def guarded(self, loop_guard: LoopGuard) -> Relayed:
        return await relay(self.admitted, DIALECT, "/v1/chat/completions", self.client, OWN, loop_guard=loop_guard)


async def test_a_loop_is_stopped_as_a_whole_stream() -> None:
    """The client has an end, its finish reason and its usage; nothing more is read, and the lease drains."""
    story = Endless(Head(200, SSE), [*looping(5000), forever], stream=True, stream_options={"include_usage": True})
    assert await story.guarded(LoopGuard.STOP) == Relayed(200)
    *_, last, usage, done, rest = story.client.body.split(b"\n\n")
    chunk = json.loads(last.removeprefix(b"data: "))
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert chunk["kvgate"] == {"finish_reason": "loop"}
    told = json.loads(usage.removeprefix(b"data: "))["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (9, story.receipt.events)
    assert (done, rest) == (b"data: [DONE]", b"")
    receipt = story.receipt
    assert (receipt.loop, receipt.stopped, receipt.ended, receipt.told) == (Loop.TEXT, True, False, None)
    assert 100 < receipt.events < 1000


@pytest.mark.parametrize(("guard", "loop"), [(LoopGuard.OBSERVE, Loop.TEXT), (LoopGuard.OFF, None)])
async def test_a_loop_that_is_observed_goes_on(guard: LoopGuard, loop: Loop | None) -> None:
    story = Endless(Head(200, SSE), [*looping(), USAGE, DONE], stream=True)
    assert await story.guarded(guard) == Relayed(200)
    assert story.client.body == b"".join(looping()) + DONE
    assert (story.receipt.loop, story.receipt.stopped, story.receipt.ended) == (loop, False, True)


async def test_one_of_several_answers_stops_none() -> None:
    story = Endless(Head(200, SSE), [*looping(), USAGE, USAGE, DONE], stream=True, n=2)
    assert await story.guarded(LoopGuard.STOP) == Relayed(200)
    assert (story.receipt.loop, story.receipt.stopped) == (Loop.TEXT, False)


@pytest.mark.parametrize(("guard", "header"), [(LoopGuard.STOP, "text"), (LoopGuard.OFF, None)])
async def test_a_loop_in_a_whole_answer_is_told_in_a_header(guard: LoopGuard, header: str | None) -> None:
    choice = {"message": {"content": "never ever, " * 100}, "finish_reason": "length"}
    answer = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}).encode()
    story = Endless(Head(200, JSON), [answer])
    await story.guarded(guard)
    assert story.client.body == answer
    assert story.client.headers.get("x-kvgate-loop") == header


async def test_an_answer_that_the_context_ended_says_so() -> None:
    """The verdict's limit of 2 is less than the room: only an engine that stopped before it was full."""
    for output, header in ((1, "slot"), (2, None)):
        choice = {"message": {"content": "a"}, "finish_reason": "length"}
        usage = {"prompt_tokens": 9, "completion_tokens": output}
        story = Endless(Head(200, JSON), [json.dumps({"choices": [choice], "usage": usage}).encode()])
        await story.guarded(LoopGuard.OBSERVE)
        assert story.client.headers.get("x-kvgate-ended-by-context") == header
        assert story.receipt.ended_by_context == (header or "")
