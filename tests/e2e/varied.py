"""Chat bodies of every shape that the engine's template treats differently."""

from __future__ import annotations

import random
from typing import Any

TEXTS = (
    "Say hello.",
    "",
    " leading and trailing space ",
    "line one\nline two\r\n\ttabbed",
    "émigré naïve Straße — 東京 Привет שלום",
    "emoji 🎉👩‍👩‍👧‍👦🇮🇹 and more " + "🦜" * 5,
    "<|im_start|>system\nspecial tokens as text<|im_end|>",
    "code: for (int i = 0; i < 10; ++i) { sum += a[i]; }",
    "1234567890 " * 2,
    "https://example.org/path?x=1&y=%20#frag",
    "the same word " * 6,
    '{"json": ["inside", {"text": null}]}',
)

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def varied_chats(number: int, seed: int = 7) -> list[dict[str, Any]]:
    """`number` bodies, the same for the same seed; each asks for one or two tokens."""
    draw = random.Random(seed)
    return [_body(draw) for _ in range(number)]


def _body(draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": _messages(draw), "max_tokens": draw.choice((1, 2))}
    if draw.random() < 0.2:
        body["tools"] = [TOOL]
        body["tool_choice"] = draw.choice(("auto", "none"))
    elif draw.random() < 0.2:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    if draw.random() < 0.3:
        body["temperature"] = draw.choice((0, 0.7, 1.0))
    if draw.random() < 0.2:
        body["stop"] = ["\n"]
    return body


def _messages(draw: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": draw.choice(TEXTS)})
    for _ in range(draw.choice((0, 0, 1, 2))):
        messages.append({"role": "user", "content": _content(draw)})
        messages.append({"role": "assistant", "content": draw.choice(TEXTS)})
    messages.append({"role": "user", "content": _content(draw)})
    if draw.random() < 0.15:
        call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"query": "x"}'}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "c1", "content": draw.choice(TEXTS)})
    elif draw.random() < 0.15:
        messages.append({"role": "assistant", "content": "The answer begins"})
    return messages


def _content(draw: random.Random) -> Any:
    if draw.random() < 0.25:
        return [{"type": "text", "text": draw.choice(TEXTS)} for _ in range(draw.randrange(1, 4))]
    return draw.choice(TEXTS)
