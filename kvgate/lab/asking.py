"""Asks an engine, or a gate in front of one, as a client would, and keeps what came and when."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.profile import EngineProfile, Fact, Source, Topology
from kvgate.core.sse import EventSplitter, EventTooLarge, event_data
from kvgate.ports import LineFailed, Refused
from kvgate.upstream import Upstream, whole_body

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kvgate.ports import Head, Line

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
JSON_HEADERS: Final = {"Content-Type": "application/json"}


class CannotAsk(Exception):
    """Somebody does not answer, or not as a llama-server does; the message says who and what to do."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One streamed answer.

    Args:
        status: 0 where no head came.
        pieces: the text, token by token as it was streamed.
        prompt_tokens, output_tokens: by the server's own word; None where it said nothing.
        stop_type: llama.cpp's word for why it ended: limit, eos, word; empty where no last event came.
        was_truncated: llama.cpp says that the context, not the limit, ended it.
        problem: the error in the answer, or what broke; empty where none.
        problem_code: the error's code, such as context_length_exceeded.
        begun_s, first_s, ended_s: moments on the event loop's clock; `first_s` of the first token.
        moments_s: of each piece, in seconds since the request.
        timings: llama.cpp's own, in its words.
        headers: of the answer.
    """

    status: int
    pieces: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    stop_type: str = ""
    was_truncated: bool = False
    problem: str = ""
    problem_code: str = ""
    begun_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    moments_s: tuple[float, ...] = ()
    timings: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_s is None else self.first_s - self.begun_s

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens behind the first; None where there are none."""
        if self.first_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / max(self.ended_s - self.first_s, 1e-6)


class Asked:
    """A server that speaks llama-server's own API; a context manager.

    Args:
        url: where it is.
        key: its API key, or a gate's.
        name: what messages call it.
        silence_s: seconds without a byte in mid-answer after which it counts as hung.
    """

    def __init__(
        self, url: str, key: str | None = None, *, name: str = "the engine", silence_s: float = 600.0
    ) -> None:
        self.url, self.name = url, name
        self._upstream = Upstream(url, _unasked, key, silence_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.close()

    async def get(self, path: str) -> Any:
        """The JSON at a path.

        Raises:
            CannotAsk: no answer, or none with status 200.
        """
        return await self._json("GET", path, b"")

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a body.

        Raises:
            CannotAsk: as `get`.
        """
        return await self._json("POST", path, json.dumps(body).encode())

    async def _json(self, method: str, path: str, body: bytes) -> Any:
        status = 0
        try:
            line = await self._upstream.open()
            try:
                head = await line.send(method, path, JSON_HEADERS, body)
                raw, status = await whole_body(line, ANSWER_BYTES_MAX), head.status
            finally:
                line.release()
            answer = json.loads(raw)
        except (Refused, LineFailed) as failed:
            raise CannotAsk(f"{self.name} at {self.url} does not answer {path}: {_cause(failed)}") from None
        except ValueError:
            raise CannotAsk(f"{self.name} at {self.url} answers {path} with {status} and no JSON") from None
        if status != 200:
            raise CannotAsk(f"{self.name} at {self.url} answers {path} with {status}: {_problem(answer)[0]}")
        return answer

    async def tokens_of(self, text: str, *, inside: bool = False) -> list[int]:
        """A text's token ids, with the BOS that a real prompt would get; none where it stands inside of one.

        Raises:
            CannotAsk: as `get`.
        """
        answer = await self.post("/tokenize", {"content": text, "add_special": not inside})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise CannotAsk(f"{self.name} at {self.url} has no tokenizer")
        return tokens

    async def complete(self, prompt: Sequence[int], output_tokens: int, **more: Any) -> Heard:
        """Have a prompt of token ids continued, streamed; an error is part of what is heard.

        Nothing earlier is reused, and the model may not end by itself: only limit and context end the answer.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": output_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "temperature": 0.8,
            "seed": 42,
            **more,
        }
        hearing = _Hearing(asyncio.get_running_loop().time)
        try:
            line = await self._upstream.open()
            try:
                head = await line.send("POST", "/completion", JSON_HEADERS, json.dumps(body).encode())
                await hearing.hear(head, line)
            finally:
                line.release()
        except (Refused, LineFailed) as failed:
            hearing.broke(_cause(failed))
        return hearing.heard()


class _Hearing:
    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._first_s: float | None = None
        self._head: Head | None = None
        self._pieces: list[str] = []
        self._moments_s: list[float] = []
        self._last: dict[str, Any] = {}
        self._problem = ("", "")

    async def hear(self, head: Head, line: Line) -> None:
        self._head = head
        if head.status != 200:
            self._problem = _problem(_parsed(await whole_body(line, ANSWER_BYTES_MAX)))
            self._problem = (self._problem[0] or f"status {head.status}", self._problem[1])
            return
        splitter = EventSplitter()
        while data := await line.read():
            try:
                events = splitter.feed(data)
            except EventTooLarge as error:
                self.broke(str(error))
                return
            for event in events:
                self._event(_parsed(event_data(event) or b""))

    def broke(self, cause: str) -> None:
        """The answer ended where it should not have."""
        if not self._problem[0]:
            self._problem = (cause, "")

    def _event(self, said: Any) -> None:
        if not isinstance(said, dict):
            return
        if "error" in said:
            self._problem = _problem(said)
        if isinstance(piece := said.get("content"), str) and piece:
            now_s = self._clock()
            if self._first_s is None:
                self._first_s = now_s
            self._moments_s.append(now_s - self._begun_s)
            self._pieces.append(piece)
        if said.get("stop") is True:
            self._last = said

    def heard(self) -> Heard:
        last, head = self._last, self._head
        if head is not None and head.status == 200 and not last:
            self.broke("the stream ended without its last event")
        return Heard(
            status=head.status if head is not None else 0,
            pieces=tuple(self._pieces),
            prompt_tokens=_whole(last.get("tokens_evaluated")),
            output_tokens=_whole(last.get("tokens_predicted")),
            stop_type=str(last.get("stop_type") or ""),
            was_truncated=last.get("truncated") is True,
            problem=self._problem[0],
            problem_code=self._problem[1],
            begun_s=self._begun_s,
            first_s=self._first_s,
            ended_s=self._clock(),
            moments_s=tuple(self._moments_s),
            timings=timings if isinstance(timings := last.get("timings"), dict) else {},
            headers=dict(head.headers) if head is not None else {},
        )


async def _unasked(_: object) -> EngineProfile:
    """Who is at the other end is found out by requests of their own."""
    one = Fact(1, Source.ASSUMED)
    return EngineProfile("unasked", one, one, Fact(Topology.UNIFIED, Source.ASSUMED), one)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _problem(answer: Any) -> tuple[str, str]:
    """An error's sentence and code, from any envelope."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or "an error without a message"), str(error.get("code") or error.get("type"))
    return (str(error), "") if error else ("", "")


def _cause(failed: Refused | LineFailed) -> str:
    if isinstance(failed, Refused):
        return failed.detail or failed.refusal.message
    return str(failed)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
