"""What answers and their streams say they cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvgate.core import ending
from kvgate.core.ask import Usage
from kvgate.core.sse import event_data
from kvgate.ports import ReadRequest, Told
from kvgate.wire import generated, stops

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Sequence


EDGE_BYTES = 64
"""At most so much white space stands around an answer."""


def parsed(data: bytes | None) -> Any:
    """The JSON of an answer or an event's data; None where it is none."""
    try:
        return json.loads(data or b"null")
    except (ValueError, RecursionError):
        return None


def is_answer(body: bytes) -> bool:
    """Whether a whole answer has the outline of JSON: an object or a list from its first to its last byte."""
    first, last = body[:EDGE_BYTES].lstrip()[:1], body[-EDGE_BYTES:].rstrip()[-1:]
    return (first, last) in {(b"{", b"}"), (b"[", b"]")}


def is_error(body: bytes) -> bool:
    """Whether a whole answer is an error, whatever its status said; `"error": null` of a response is none."""
    if b'"error"' not in body:
        return False
    answer = parsed(body)
    return isinstance(answer, dict) and isinstance(answer.get("error"), dict | str) and bool(answer["error"])


def openai_usage(answer: Any) -> Usage | None:
    """The `usage` of an answer or a chunk in OpenAI's form."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return usage_from(usage.get("prompt_tokens"), usage.get("completion_tokens", 0), cached or 0)


def told_of_all(request: ReadRequest, body: bytes) -> Told | None:
    """The `usage` of an answer that covers all prompts of its request."""
    usage = openai_usage(parsed(body))
    return None if usage is None else Told(usage, prompts=len(request.ask.prompts))


def other_choices(answer: Any) -> list[dict[str, Any]]:
    """The choices after the first: llama.cpp tells what the first one cost, and nothing of these."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return [choice for choice in choices[1:] if isinstance(choice, dict)] if isinstance(choices, list) else []


def usage_from(prompt: Any, output: Any, cached: Any = 0) -> Usage | None:
    """A usage, where all three are whole numbers."""
    if all(isinstance(figure, int) and figure >= 0 for figure in (prompt, output, cached)):
        return Usage(prompt, output, cached)
    return None


def added(usages: Iterable[Usage], *, prompt_once: bool) -> Usage | None:
    """What several sequences cost together; None where there is none to add.

    `prompt_once`: they are answers to one prompt, which counts once.
    """
    every = list(usages)
    if not every:
        return None
    prompt = max(u.prompt_tokens for u in every) if prompt_once else sum(u.prompt_tokens for u in every)
    cached = max(u.cached_tokens for u in every) if prompt_once else sum(u.cached_tokens for u in every)
    return Usage(prompt, sum(u.output_tokens for u in every), cached)


def openai_finish(answer: Any) -> str:
    """Why an answer in OpenAI's form ended; of several choices the one that was cut short."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    finish = ""
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict):
            finish = ending.of_several(finish, ending.finish_of(choice.get("finish_reason")))
    return finish


def is_unfinished(event: bytes) -> bool:
    """Whether a chunk in OpenAI's form ends no choice, as nearly all of them."""
    return b'"finish_reason":null' in event or b'"finish_reason"' not in event


class EventTap:
    """Watches a stream of events; implements `ports.StreamTap` together with a dialect's own `look`."""

    text: tuple[re.Pattern[bytes], ...] = ()

    def __init__(self) -> None:
        self.finish = ""
        self.usages: list[Usage] = []
        self.ended = False
        self.failure: bytes | None = None
        self.events = 0

    def take(self, event: bytes) -> bytes:
        """One event: an error event is kept back, and all that comes behind it; the rest goes to `look`."""
        if self.failure is not None:
            return b""
        if event.startswith(b"event: error"):  # llama.cpp's /v1/messages: the bare error, without an envelope
            self.failure = event_data(event) or b""
            return b""
        if b'"error"' in event and self._is_error(event):
            return b""
        return self.look(event)

    def look(self, event: bytes) -> bytes:
        """What of an event the client gets; a dialect reads its usage and its end here."""
        raise NotImplementedError

    def stop(self, events: Sequence[bytes], usage: Usage) -> bytes:  # noqa: ARG002 - a port's method
        """Nothing, unless a dialect knows how."""
        return b""

    def finished(self, word: object) -> None:
        """An answer of the stream ended, with this word for why."""
        self.finish = ending.of_several(self.finish, ending.finish_of(word))

    def _is_error(self, event: bytes) -> bool:
        data = event_data(event)
        found = parsed(data)
        if isinstance(found, dict) and isinstance(found.get("error"), dict | str):
            self.failure = data
            return True
        return False


class NoStream(EventTap):
    """For what never streams: a stream all the same is passed on and is no proper end."""

    @property
    def told(self) -> Told | None:
        """Nothing."""
        return None

    def look(self, event: bytes) -> bytes:
        """The event as it came."""
        return event


def llamacpp_told(request: ReadRequest, body: bytes) -> Told | None:
    """What an answer in llama.cpp's own form cost: one object, or a list of one for each answer."""
    answer = parsed(body)
    every = answer if isinstance(answer, list) else [answer]
    finish = ""
    for one in every:
        finish = ending.of_several(finish, ending.finish_of(one.get("stop_type") if isinstance(one, dict) else None))
    return _llamacpp_sum(request, [_llamacpp_usage(one) for one in every], finish)


class LlamaCppTap(EventTap):
    """Watches a stream of llama.cpp's own: the last event of each answer has `stop: true` and its figures.

    There is no end marker: the stream has ended when every answer has.
    """

    text = generated.members("content")

    def __init__(self, request: ReadRequest) -> None:
        super().__init__()
        self._request = request
        self._finals: list[Usage | None] = []

    @property
    def told(self) -> Told | None:
        """The sum over the answers, once all have told."""
        return _llamacpp_sum(self._request, self._finals, self.finish) if self.ended else None

    def look(self, event: bytes) -> bytes:
        """Only last events are parsed."""
        if event.startswith(b"data: null"):
            return b""  # llama.cpp begins the stream of several answers so; clients stumble over it
        if b'"stop":true' in event and isinstance(final := parsed(event_data(event)), dict) and final.get("stop"):
            self._finals.append(_llamacpp_usage(final))
            self.finished(final.get("stop_type"))
            ask = self._request.ask
            self.ended = len(self._finals) >= len(ask.prompts) * ask.sequences
        else:
            self.events += event.startswith(b"data:")
        return event

    def stop(self, events: Sequence[bytes], usage: Usage) -> bytes:
        """The last event of an answer that reached its limit."""
        return stops.llamacpp(events, usage)


def _llamacpp_sum(request: ReadRequest, usages: list[Usage | None], finish: str) -> Told | None:
    """Each answer tells its prompt, so a prompt is told once for each of its answers."""
    ask = request.ask
    known = [usage for usage in usages if usage is not None]
    total = added(known, prompt_once=False)
    if total is None or len(known) != len(ask.prompts) * ask.sequences:
        return None
    prompt, cached = total.prompt_tokens // ask.sequences, total.cached_tokens // ask.sequences
    return Told(Usage(prompt, total.output_tokens, cached), prompts=len(ask.prompts), finish=finish)


def _llamacpp_usage(answer: Any) -> Usage | None:
    if not isinstance(answer, dict):
        return None
    timings = answer.get("timings")
    cached = timings.get("cache_n", 0) if isinstance(timings, dict) else 0
    return usage_from(answer.get("tokens_evaluated"), answer.get("tokens_predicted"), cached)
