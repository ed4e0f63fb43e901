"""One sample per dialect, as a real llama.cpp (b11549) spoke it: a request, its answers, its stream, its error.

A new dialect is one file in `kvgate/dialects`, its route, and one sample here; the conformance suite sees to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvgate.core.ask import Usage
from kvgate.ports import Told


@dataclass(frozen=True)
class Whole:
    """A whole answer: what the request said beside the sample's body, the answer, and what it told."""

    asked: dict[str, Any]
    answer: Any
    told: Told | None


@dataclass(frozen=True)
class Stream:
    """A stream, event by event; `kept` are those that the client does not get."""

    asked: dict[str, Any]
    events: tuple[str, ...]
    told: Told | None
    kept: frozenset[int] = frozenset()

    @property
    def raw(self) -> bytes:
        return "".join(self.events).encode()


@dataclass(frozen=True)
class Sample:
    """A dialect as its clients and its engine speak it.

    Args:
        body: the smallest request, without an output limit.
        family: whose errors its clients read.
        limits: the names of the output limit that the engine reads on this path, the winner first.
        fields: the fields that kvgate judges.
        malformed: what is no request of this dialect, as changes to `body`.
        wholes: whole answers.
        stream: None where the dialect does not stream.
        failure: how the engine tells of an overflown pool in mid-stream.
        sequences: whether several answers can be asked for.
    """

    body: dict[str, Any]
    family: Literal["openai", "llamacpp", "anthropic"]
    limits: tuple[str, ...]
    fields: tuple[str, ...]
    malformed: tuple[dict[str, Any], ...]
    wholes: tuple[Whole, ...]
    stream: Stream | None = None
    failure: str = field(default='data: {"error":{"code":500,"message":"Context size has been exceeded."}}\n\n')
    sequences: bool = False

    def request(self, **fields: Any) -> bytes:
        return json.dumps({**self.body, **fields}).encode()


def data(value: Any) -> str:
    return f"data: {value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}\n\n"


def event(name: str, **fields: Any) -> str:
    return f"event: {name}\n{data({'type': name, **fields})}"


def _openai(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    total = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"usage": {**total, "prompt_tokens_details": {"cached_tokens": cached}}}


def _delta(index: int, reason: str | None = None, **delta: Any) -> str:
    return data({"choices": [{"finish_reason": reason, "index": index, "delta": delta}], "id": "chatcmpl-1"})


def _text(index: int, text: str, reason: str | None = None, **more: Any) -> Any:
    return {"choices": [{"text": text, "index": index, "logprobs": None, "finish_reason": reason}], **more}


def _response(text: str, prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    usage = {"input_tokens": prompt, "output_tokens": output, "input_tokens_details": {"cached_tokens": cached}}
    content = [{"type": "output_text", "annotations": [], "text": text}]
    return {"object": "response", "status": "completed", "output": [{"content": content}], "usage": usage}


def _native(index: int, text: str, *, stop: bool, predicted: int, evaluated: int, cached: int = 0) -> dict[str, Any]:
    answer = {"index": index, "content": text, "stop": stop, "tokens_predicted": predicted}
    answer |= {"tokens_evaluated": evaluated}
    if stop:
        answer |= {"stop_type": "limit"}
        answer |= {"prompt": 'Once "stop":true', "timings": {"cache_n": cached, "prompt_n": evaluated - cached}}
    return answer


_CHAT: Final = Sample(
    body={"messages": [{"role": "user", "content": "Say hello."}]},
    family="openai",
    limits=("n_predict", "max_completion_tokens", "max_tokens"),
    fields=("messages", "model", "stream", "stream_options", "n", "n_cmpl", "n_predict", "max_tokens"),
    malformed=({"messages": []}, {"messages": "x"}, {"messages": [1]}, {"messages": [{"content": "x"}]}),
    wholes=(
        Whole(
            {},
            {
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": "I'm"}, "finish_reason": "stop"}
                ],
                **_openai(33, 2, 24),
            },
            Told(Usage(33, 2, 24), finish="stop"),
        ),
        Whole(
            {"n": 3},
            {
                "choices": [
                    {"index": 0, "message": {"content": "I'm"}},
                    {"index": 1, "message": {"content": "Ah,", "reasoning_content": "hm "}},
                    {"index": 2, "message": {"content": None}, "finish_reason": "length"},
                ],
                **_openai(33, 2),
            },
            Told(Usage(33, 2), untold=("hm Ah,", ""), finish="length"),
        ),
    ),
    stream=Stream(
        {"n": 2},
        (
            _delta(1, role="assistant", content=None),
            _delta(1, content="émigré 🦜"),
            _delta(0, role="assistant", content=None),
            _delta(0, content='the word "usage", "error": {}'),
            _delta(1, "length"),
            data({"choices": [], "id": "chatcmpl-1", **_openai(33, 2, 5), "timings": {"cache_n": 5}}),
            ": ping\n\n",
            _delta(0, content="'s"),
            _delta(0, "length"),
            data({"choices": [], "id": "chatcmpl-1", **_openai(33, 3), "timings": {"cache_n": 0}}),
            data("[DONE]"),
        ),
        Told(Usage(33, 5, 5), finish="length"),
        kept=frozenset({5, 9}),
    ),
    sequences=True,
)

_COMPLETIONS: Final = Sample(
    body={"prompt": ["Once", "Twice"]},
    family="openai",
    limits=("n_predict", "max_completion_tokens", "max_tokens"),
    fields=("prompt", "model", "stream", "stream_options", "n", "n_cmpl", "n_predict", "max_tokens", "best_of"),
    malformed=({"prompt": []}, {"prompt": None}, {"prompt": 5}, {"prompt": [1, None]}, {"prompt": {"a": 1}}),
    wholes=(
        Whole(
            {},
            {"choices": [*_text(0, "-and")["choices"], *_text(1, " = ")["choices"]], **_openai(1, 2)},
            Told(Usage(1, 2), untold=(" = ",)),
        ),
    ),
    stream=Stream(
        {},
        (
            data("null"),
            data(_text(0, "'s")),
            data(_text(1, "(🦜")),
            data(_text(0, "", "length", **_openai(1, 2))),
            data(_text(1, "0")),
            data(_text(1, "", "length", **_openai(2, 2))),
            data("[DONE]"),
        ),
        Told(Usage(3, 4), prompts=2, finish="length"),
        kept=frozenset({0}),
    ),
    sequences=True,
)

_RESPONSES: Final = Sample(
    body={"input": "Hi"},
    family="openai",
    limits=("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens"),
    fields=("input", "instructions", "model", "stream", "n", "n_cmpl", "max_output_tokens", "previous_response_id"),
    malformed=({"input": []}, {"input": None}, {"input": [1]}, {"instructions": 5}, {"previous_response_id": "r"}),
    wholes=(
        Whole({}, _response("Hi there", 31, 2, 7), Told(Usage(31, 2, 7))),
        Whole({"n": 2}, [_response("Hi there", 31, 2), _response("Hello!", 31, 3)], Told(Usage(31, 5))),
    ),
    stream=Stream(
        {},
        (
            event("response.created", response={"status": "in_progress"}),
            event("response.in_progress", response={"status": "in_progress"}),
            event("response.output_item.added", item={"content": []}),
            event("response.output_text.delta", delta="Hel"),
            event("response.output_text.delta", delta="lo 🦜"),
            event("response.output_text.done", text="Hello"),
            event(
                "response.incomplete",
                response={
                    **_response("Hello", 31, 2),
                    "error": None,
                    "incomplete_details": {"reason": "max_output_tokens"},
                },
            ),
        ),
        Told(Usage(31, 2), finish="length"),
    ),
    sequences=True,
)

_OPENAI_EMBEDDINGS: Final = Sample(
    body={"input": ["a", "b c"]},
    family="openai",
    limits=(),
    fields=("input", "content", "model"),
    malformed=({"input": []}, {"input": None}, {"input": None, "content": "a"}, {"input": [[]]}, {"input": True}),
    wholes=(Whole({}, {"object": "list", "data": [], "usage": {"prompt_tokens": 3}}, Told(Usage(3, 0), prompts=2)),),
)

_MESSAGES: Final = Sample(
    body={"messages": [{"role": "user", "content": "Say hello."}]},
    family="anthropic",
    limits=("max_tokens",),
    fields=("messages", "system", "model", "stream", "max_tokens"),
    malformed=({"messages": []}, {"messages": {}}, {"messages": [{"role": 1}]}, {"system": 5}),
    wholes=(
        Whole(
            {},
            {
                "type": "message",
                "content": [{"type": "text", "text": "Hi"}],
                "stop_reason": "tool_use",
                "usage": {"cache_read_input_tokens": 20, "input_tokens": 13, "output_tokens": 2},
            },
            Told(Usage(33, 2, 20), finish="tool_calls"),
        ),
        Whole(
            {},
            {"usage": {"cache_creation_input_tokens": 5, "input_tokens": 28, "output_tokens": 2}},
            Told(Usage(33, 2)),
        ),
    ),
    stream=Stream(
        {},
        (
            event(
                "message_start",
                message={"usage": {"cache_read_input_tokens": 4, "input_tokens": 29, "output_tokens": 0}},
            ),
            event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": "How"}),
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": " can 🦜"}),
            event("content_block_stop", index=0),
            event("message_delta", delta={"stop_reason": "max_tokens"}, usage={"output_tokens": 2}),
            event("message_stop"),
        ),
        Told(Usage(33, 2, 4), finish="length"),
    ),
    # Without an envelope: only the event's name tells (seen on a pool of 256 cells).
    failure='event: error\ndata: {"code":500,"message":"Context size has been exceeded.","type":"server_error"}\n\n',
)

_COMPLETION: Final = Sample(
    body={"prompt": ["Once", "Twice"]},
    family="llamacpp",
    limits=("n_predict", "max_completion_tokens", "max_tokens"),
    fields=("prompt", "model", "stream", "n", "n_cmpl", "n_predict", "max_tokens", "response_fields"),
    malformed=({"prompt": []}, {"prompt": None}, {"prompt": [[]]}, {"prompt": {"prompt_string": "a"}}),
    wholes=(
        Whole(
            {},
            [
                _native(0, "-will", stop=True, predicted=2, evaluated=4, cached=3),
                _native(1, ";", stop=True, predicted=1, evaluated=2),
            ],
            Told(Usage(6, 3, 3), prompts=2, finish="length"),
        ),
        Whole(
            {"prompt": "Once", "n": 2},
            [
                _native(0, "a", stop=True, predicted=2, evaluated=4),
                _native(1, "b", stop=True, predicted=2, evaluated=4),
            ],
            Told(Usage(4, 4), finish="length"),
        ),
        Whole(
            {"prompt": "Once"},
            _native(0, "a", stop=True, predicted=2, evaluated=4),
            Told(Usage(4, 2), finish="length"),
        ),
    ),
    stream=Stream(
        {},
        (
            data("null"),
            data(_native(1, "[", stop=False, predicted=1, evaluated=2)),
            data(_native(0, "-", stop=False, predicted=1, evaluated=1)),
            data(_native(1, "🦜", stop=False, predicted=2, evaluated=2)),
            data(_native(1, "", stop=True, predicted=2, evaluated=2)),
            data(_native(0, '"stop":true', stop=False, predicted=2, evaluated=1)),
            data(_native(0, "", stop=True, predicted=2, evaluated=1)),
        ),
        Told(Usage(3, 4), prompts=2, finish="length"),
        kept=frozenset({0}),
    ),
    sequences=True,
)

_INFILL: Final = Sample(
    body={"input_prefix": "def f(", "input_suffix": "):", "input_extra": [{"filename": "a.py", "text": "x = 1"}]},
    family="llamacpp",
    limits=("n_predict", "max_completion_tokens", "max_tokens"),
    fields=("input_prefix", "input_suffix", "input_extra", "prompt", "stream", "n", "n_predict", "response_fields"),
    malformed=({"input_prefix": 5}, {"input_extra": [1]}, {"input_extra": [{"text": 1}]}, {"prompt": ["a"]}),
    wholes=(
        Whole(
            {}, _native(0, "x", stop=True, predicted=2, evaluated=9, cached=1), Told(Usage(9, 2, 1), finish="length")
        ),
    ),
    stream=Stream(
        {},
        (
            data(_native(0, "x", stop=False, predicted=1, evaluated=9)),
            data(_native(0, "🦜", stop=False, predicted=2, evaluated=9)),
            data(_native(0, "", stop=True, predicted=2, evaluated=9)),
        ),
        Told(Usage(9, 2), finish="length"),
    ),
    sequences=True,
)

_EMBEDDING: Final = Sample(
    body={"content": ["a", "b c"]},
    family="llamacpp",
    limits=(),
    fields=("input", "content", "model"),
    malformed=({"content": []}, {"content": None}, {"content": [1, None]}, {"input": {}}),
    wholes=(Whole({}, [{"index": 0, "embedding": [[0.1]]}, {"index": 1, "embedding": [[0.2]]}], None),),
)

_RERANK: Final = Sample(
    body={"query": "a", "documents": ["b", "c d"]},
    family="llamacpp",
    limits=(),
    fields=("query", "documents", "texts", "model"),
    malformed=({"query": ""}, {"query": None}, {"documents": []}, {"documents": [1]}, {"documents": None}),
    wholes=(
        Whole({}, {"object": "list", "usage": {"prompt_tokens": 5}, "results": []}, Told(Usage(5, 0), prompts=2)),
    ),
)

SAMPLES: Final[dict[str, Sample]] = {
    "openai_chat": _CHAT,
    "openai_completions": _COMPLETIONS,
    "openai_responses": _RESPONSES,
    "openai_embeddings": _OPENAI_EMBEDDINGS,
    "anthropic_messages": _MESSAGES,
    "llamacpp_completion": _COMPLETION,
    "llamacpp_infill": _INFILL,
    "llamacpp_embedding": _EMBEDDING,
    "llamacpp_rerank": _RERANK,
}
