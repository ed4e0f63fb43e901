"""How llama-server words its answers on each path: whole, as a stream's events, and as errors in mid-stream."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = "/v1/chat/completions"
COUNTER = "/v1/chat/completions/input_tokens"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
RESPONSES_COUNTER = "/v1/responses/input_tokens"
MESSAGES = "/v1/messages"
MESSAGES_COUNTER = "/v1/messages/count_tokens"
COMPLETION = "/completion"
EMBEDDINGS = "/v1/embeddings"
TOKENIZE = "/tokenize"

OVERFLOWN = "Context size has been exceeded."
"""What llama-server says when its pool is full."""

DONE = b"data: [DONE]\n\n"


def data(document: Any) -> bytes:
    """An event without a name."""
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def named(name: str, **fields: Any) -> bytes:
    """An event with a name, which its data repeats."""
    return b"event: " + name.encode() + b"\n" + data({"type": name, **fields})


def mishap(message: str) -> dict[str, Any]:
    """What llama-server calls its own failure."""
    return {"code": 500, "message": message, "type": "server_error"}


@dataclass(frozen=True)
class Said:
    """What the engine says to one request, before any API's words are put around it."""

    words: tuple[str, ...]
    finish: str
    limit: int
    prompt_tokens: int
    cached_tokens: int
    model: str
    build: str
    usage_shown: bool = False
    sequences: int = 1
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def text(self) -> str:
        return "".join(self.words)

    @property
    def timings(self) -> dict[str, Any]:
        fresh = self.prompt_tokens - self.cached_tokens
        return {"cache_n": self.cached_tokens, "prompt_n": fresh, "predicted_n": len(self.words)}

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "completion_tokens": len(self.words),
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + len(self.words),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Family(ABC):
    """One inference path.

    `counter` sizes its prompts, and adds `counted` to its answer; `limits` name the output limit, the winner first;
    `part` is the member without which there is no request, `missing` what is said then.
    """

    path: str
    counter: str
    part: str
    missing: tuple[str, str]
    counted: ClassVar[dict[str, Any]] = {}
    limits: tuple[str, ...] = ("n_predict", "max_completion_tokens", "max_tokens")

    @abstractmethod
    def whole(self, said: Said) -> Any:
        """A whole answer."""

    @abstractmethod
    def chunks(self, said: Said) -> Iterator[bytes]:
        """A stream's HTTP chunks, each of one event or more."""

    def failure(self, message: str) -> bytes:
        """The event that tells of a failure in mid-stream; nothing comes behind it."""
        return data({"error": mishap(message)})


class Chat(Family):
    path, counter, part = CHAT, COUNTER, "messages"
    counted: ClassVar[dict[str, Any]] = {"object": "response.input_tokens"}
    missing = ("400 Bad Request", "'messages' is required")

    def whole(self, said: Said) -> Any:
        message = {"role": "assistant", "content": said.text}
        choices = [{"finish_reason": said.finish, "index": at, "message": message} for at in range(said.sequences)]
        told = {"usage": said.usage, "timings": said.timings}
        return {"choices": choices, **_stamp(said), "object": "chat.completion", **told}

    def chunks(self, said: Said) -> Iterator[bytes]:
        """The role with the first word in one HTTP chunk, the end with the usage in another, for each choice."""
        for at in range(said.sequences):
            held = self._delta(said, at, {"role": "assistant", "content": None})
            for word in said.words:
                yield held + self._delta(said, at, {"content": word})
                held = b""
            if said.usage_shown:
                yield self._delta(said, at, {}, said.finish) + self.usage(said)
            else:
                yield self._delta(said, at, {}, said.finish, timings=said.timings)
        yield DONE

    def usage(self, said: Said) -> bytes:
        return self._event(said, [], usage=said.usage, timings=said.timings)

    def _delta(self, said: Said, at: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        return self._event(said, [{"finish_reason": reason, "index": at, "delta": delta}], **more)

    def _event(self, said: Said, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return data({"choices": choices, **_stamp(said), "object": "chat.completion.chunk", **more})


class Completions(Family):
    path, counter, part = COMPLETIONS, TOKENIZE, "prompt"
    missing = ("400 Bad Request", "[json.exception.out_of_range.403] key 'prompt' not found")

    def whole(self, said: Said) -> Any:
        choices = [self._choice(said.text, said.finish, at) for at in range(said.sequences)]
        told = {"usage": said.usage, "timings": said.timings}
        return {"choices": choices, **_stamp(said), "object": "text_completion", **told}

    def chunks(self, said: Said) -> Iterator[bytes]:
        """The last event carries the usage, asked for or not."""
        common = {**_stamp(said), "object": "text_completion"}
        for word in said.words:
            yield data({"choices": [self._choice(word, None)], **common})
        told = {"usage": said.usage, "timings": said.timings}
        yield data({"choices": [self._choice("", said.finish)], **common, **told})
        yield DONE

    def _choice(self, text: str, reason: str | None, at: int = 0) -> dict[str, Any]:
        return {"text": text, "index": at, "logprobs": None, "finish_reason": reason}


class Responses(Family):
    path, counter, part = RESPONSES, RESPONSES_COUNTER, "input"
    counted: ClassVar[dict[str, Any]] = {"object": "response.input_tokens"}
    limits = ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens")
    missing = ("400 Bad Request", "'input' is required")

    def whole(self, said: Said) -> Any:
        return {"completed_at": 1, **self._response(said)}

    def chunks(self, said: Said) -> Iterator[bytes]:
        """All that begins a response stands before the first word in one HTTP chunk, all that ends it in the last."""
        item = {"item_id": f"msg_{said.key}"}
        begun = {"id": f"resp_{said.key}", "object": "response", "status": "in_progress"}
        opened = {"content": [], "id": f"msg_{said.key}", "role": "assistant", "status": "in_progress"}
        held = named("response.created", response=begun) + named("response.in_progress", response=begun)
        held += named("response.output_item.added", item={**opened, "type": "message"})
        held += named("response.content_part.added", **item, part={"type": "output_text", "text": ""})
        for word in said.words:
            yield held + named("response.output_text.delta", **item, delta=word)
            held = b""
        yield b"".join(
            (
                named("response.output_text.done", **item, text=said.text),
                named("response.content_part.done", **item, part=self._part(said)),
                named("response.output_item.done", item=self._message(said)),
                named("response.completed", response=self._response(said), timings=said.timings),
            )
        )

    def _response(self, said: Said) -> dict[str, Any]:
        usage = {
            "input_tokens": said.prompt_tokens,
            "output_tokens": len(said.words),
            "total_tokens": said.prompt_tokens + len(said.words),
            "input_tokens_details": {"cached_tokens": said.cached_tokens},
        }
        stamp = {"id": f"resp_{said.key}", "object": "response", "created_at": 1, "status": "completed"}
        return {**stamp, "model": said.model, "output": [self._message(said)], "usage": usage}

    def _message(self, said: Said) -> dict[str, Any]:
        stamp = {"type": "message", "status": "completed", "id": f"msg_{said.key}"}
        return {**stamp, "content": [self._part(said)], "role": "assistant"}

    def _part(self, said: Said) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": said.text}


class Messages(Family):
    path, counter, part = MESSAGES, MESSAGES_COUNTER, "messages"
    limits = ("max_tokens",)
    missing = ("500 Internal Server Error", "'messages' is required")

    def whole(self, said: Said) -> Any:
        content = [{"type": "text", "text": said.text}]
        return self._message(
            said, content, self._reason(said), {**self._read(said), "output_tokens": len(said.words)}
        )

    def chunks(self, said: Said) -> Iterator[bytes]:
        """As of a response: the beginning with the first word, the end in one HTTP chunk."""
        started = self._message(said, [], None, {**self._read(said), "output_tokens": 0})
        held = named("message_start", message=started)
        held += named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for word in said.words:
            yield held + named("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
            held = b""
        stop = {"stop_reason": self._reason(said), "stop_sequence": None}
        yield b"".join(
            (
                named("content_block_stop", index=0),
                named("message_delta", delta=stop, usage={"output_tokens": len(said.words)}),
                named("message_stop"),
            )
        )

    def failure(self, message: str) -> bytes:
        """The bare error without an envelope: only the event's name tells."""
        return b"event: error\n" + data(mishap(message))

    def _reason(self, said: Said) -> str:
        return {"length": "max_tokens", "stop": "end_turn"}[said.finish]

    def _read(self, said: Said) -> dict[str, Any]:
        fresh = said.prompt_tokens - said.cached_tokens
        return {"cache_read_input_tokens": said.cached_tokens, "input_tokens": fresh}

    def _message(self, said: Said, content: list[Any], reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        stamp = {"id": f"chatcmpl-{said.key}", "type": "message", "role": "assistant", "content": content}
        return {**stamp, "model": said.model, "stop_reason": reason, "stop_sequence": None, "usage": usage}


class Completion(Family):
    path, counter, part = COMPLETION, TOKENIZE, "prompt"
    missing = ("400 Bad Request", "[json.exception.out_of_range.403] key 'prompt' not found")

    def whole(self, said: Said) -> Any:
        return self._last(said, said.text)

    def chunks(self, said: Said) -> Iterator[bytes]:
        """One event a chunk; the last one holds all figures, and there is no end marker."""
        for at, word in enumerate(said.words, 1):
            piece = {"index": 0, "content": word, "tokens": [7], "stop": False, "id_slot": -1}
            yield data({**piece, "tokens_predicted": at, "tokens_evaluated": said.prompt_tokens})
        yield data(self._last(said, ""))

    def _last(self, said: Said, text: str) -> dict[str, Any]:
        stamp = {"index": 0, "content": text, "tokens": [], "id_slot": 1, "stop": True, "model": said.model}
        figures = {"tokens_predicted": len(said.words), "tokens_evaluated": said.prompt_tokens}
        how = {"stop_type": {"length": "limit", "stop": "eos"}[said.finish], "stopping_word": "", "truncated": False}
        settings = {"generation_settings": {"n_predict": said.limit, "stream": text == ""}}
        return {**stamp, **figures, **settings, **how, "timings": said.timings}


FAMILIES: dict[str, Family] = {
    family.path: family for family in (Chat(), Completions(), Responses(), Messages(), Completion())
}


def limit_of(family: Family, body: dict[str, Any]) -> tuple[str, int]:
    """The name and the value of the output limit that counts; -1 is none."""
    names = (name for name in family.limits if body.get(name) is not None)
    name = next(names, family.limits[-1])
    return name, body.get(name, -1)


def _stamp(said: Said) -> dict[str, Any]:
    created = {"created": 1, "model": said.model, "system_fingerprint": said.build}
    return {**created, "id": f"chatcmpl-{said.key}"}
