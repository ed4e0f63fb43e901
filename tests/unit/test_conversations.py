"""What each chat API's elements are to the conversation."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.core.turns import Kind
from kvgate.wire import conversations
from kvgate.wire.conversations import MEDIA_WEIGHT, OVERHEAD

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "kind", "calls", "results", "tools"),
    [
        ({"role": "system", "content": "x"}, Kind.SYSTEM, (), (), set()),
        ({"role": "developer", "content": "x"}, Kind.SYSTEM, (), (), set()),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, Kind.USER, (), (), set()),
        ({"role": "assistant", "content": "x", "tool_calls": []}, Kind.ANSWER, (), (), set()),
        ({"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, Kind.CALL, ("c1", "c1"), (), {"f"}),
        ({"role": "assistant", "function_call": {"name": "g", "arguments": ""}}, Kind.CALL, (), (), {"g"}),
        ({"role": "tool", "tool_call_id": "c1", "content": "x"}, Kind.RESULT, (), ("c1",), set()),
        ({"role": "function", "name": "g", "content": "x"}, Kind.RESULT, (), (), set()),
        ({"role": "user", "tool_calls": [CALL]}, Kind.USER, (), (), {"f"}),
        ({"role": "assistant", "tool_calls": "x"}, Kind.ANSWER, (), (), set()),
        ({"role": "assistant", "tool_calls": [None, {"id": 5, "function": []}]}, Kind.CALL, (), (), set()),
        ({"role": "ipython", "content": "x"}, Kind.OTHER, (), (), set()),
    ],
)
def test_messages_of_a_chat(
    message: dict[str, Any], kind: Kind, calls: tuple[str, ...], results: tuple[str, ...], tools: set[str]
) -> None:
    """By role, and by the calls that are in it; the older `function_call` is one too."""
    (item,) = conversations.chat([message])
    assert (item.kind, item.role, item.calls, item.results) == (kind, message["role"], calls, results)
    assert item.tools == tools


USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]}
TEXT = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("message", "kind", "ids", "speaks"),
    [
        ({"role": "user", "content": "x"}, Kind.USER, ((), ()), False),
        ({"role": "assistant", "content": [TEXT, USE, USE]}, Kind.CALL, (("t1", "t1"), ()), False),
        ({"role": "assistant", "content": [{"type": "thinking"}, TEXT]}, Kind.ANSWER, ((), ()), False),
        ({"role": "user", "content": [RESULT, RESULT]}, Kind.RESULT, ((), ("t1", "t1")), False),
        ({"role": "user", "content": [RESULT, TEXT]}, Kind.RESULT, ((), ("t1",)), True),
        ({"role": "system", "content": "x"}, Kind.SYSTEM, ((), ()), False),
        ({"role": "user", "content": [None, "x"]}, Kind.USER, ((), ()), False),
    ],
)
def test_messages_of_anthropics_api(message: dict[str, Any], kind: Kind, ids: Any, speaks: bool) -> None:
    """By the blocks: a user message that holds results is one, and may speak beside them."""
    (item,) = conversations.messages([message])
    assert (item.kind, (item.calls, item.results)) == (kind, ids)
    assert item.speaks == speaks


@pytest.mark.parametrize(
    ("given", "kind", "ids"),
    [
        ({"role": "user", "content": "x"}, Kind.USER, ((), ())),
        ({"type": "message", "role": "developer", "content": "x"}, Kind.SYSTEM, ((), ())),
        ({"type": "message", "role": "assistant", "content": []}, Kind.ANSWER, ((), ())),
        ({"type": "reasoning", "summary": []}, Kind.THOUGHT, ((), ())),
        ({"type": "function_call", "call_id": "f1", "name": "f", "arguments": "{}"}, Kind.CALL, (("f1",), ())),
        ({"type": "custom_tool_call", "call_id": "f1", "name": "f"}, Kind.CALL, (("f1",), ())),
        ({"type": "web_search_call", "id": "w"}, Kind.CALL, ((), ())),
        ({"type": "function_call_output", "call_id": "f1", "output": "x"}, Kind.RESULT, ((), ("f1",))),
        ({"type": "local_shell_call_output", "call_id": "f1"}, Kind.RESULT, ((), ("f1",))),
        ({"type": "item_reference", "id": "x"}, Kind.OTHER, ((), ())),
        ({}, Kind.OTHER, ((), ())),
    ],
)
def test_items_of_a_response(given: dict[str, Any], kind: Kind, ids: Any) -> None:
    """By type, or as a message by role; a bare string is a user message."""
    (item,) = conversations.responses([given])
    assert (item.kind, (item.calls, item.results)) == (kind, ids)
    assert [one.kind for one in conversations.responses("x")] == [Kind.USER]


@pytest.mark.parametrize(
    ("content", "weight"),
    [
        ("x" * 10, 10),
        ("é" * 10, 20),
        ("long words " * 1000, 11_000),
        ("東" * 5000, 15_000),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500_000}}], 9 + MEDIA_WEIGHT),
        ([{"source": {"data": "A" * 500_000}}, 5, None, True], MEDIA_WEIGHT),
    ],
)
def test_a_weight_is_that_of_the_text(content: Any, weight: int) -> None:
    """In bytes; an image in base64 weighs what no text of its length would."""
    (item,) = conversations.chat([{"role": "user", "content": content}])
    assert item.weight == OVERHEAD + len("user") + weight
