"""What the elements of each chat API's list are to the conversation: who speaks, which call has which result."""

from __future__ import annotations

from typing import Any, Final

from kvgate.core.turns import Item, Kind

OVERHEAD: Final = 16
"""Bytes that stand for what a template writes around one message."""

MEDIA_WEIGHT: Final = 2048
"""Bytes that stand for an image or other data, whose own length in base64 says nothing of its tokens."""

ROLES: Final = {
    "system": Kind.SYSTEM,
    "developer": Kind.SYSTEM,
    "user": Kind.USER,
    "assistant": Kind.ANSWER,
    "tool": Kind.RESULT,
    "function": Kind.RESULT,
}


def chat(messages: list[dict[str, Any]]) -> tuple[Item, ...]:
    """The messages of an OpenAI chat."""
    return tuple(_chat_message(message) for message in messages)


def _chat_message(message: dict[str, Any]) -> Item:
    role, calls = str(message.get("role")), _objects(message.get("tool_calls"))
    kind = ROLES.get(role, Kind.OTHER)
    legacy = message.get("function_call")
    if kind is Kind.ANSWER and (calls or legacy):
        kind = Kind.CALL
    functions = [call.get("function") for call in calls] + [legacy]
    return Item(
        kind,
        role,
        _weight(message),
        calls=_ids(calls, "id") if kind is Kind.CALL else (),
        results=_ids([message], "tool_call_id") if kind is Kind.RESULT else (),
        tools=_names(functions),
    )


def messages(given: list[dict[str, Any]]) -> tuple[Item, ...]:
    """The messages of Anthropic's API: calls and results are blocks of their contents."""
    return tuple(_blocks(message) for message in given)


def _blocks(message: dict[str, Any]) -> Item:
    role, blocks = str(message.get("role")), _objects(message.get("content"))
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    kind = ROLES.get(role, Kind.OTHER)
    if kind is Kind.ANSWER and calls:
        kind = Kind.CALL
    if kind is Kind.USER and results:
        kind = Kind.RESULT
    return Item(
        kind,
        role,
        _weight(message),
        calls=_ids(calls, "id") if kind is Kind.CALL else (),
        results=_ids(results, "tool_use_id") if kind is Kind.RESULT else (),
        tools=_names(calls),
        speaks=kind is Kind.RESULT and len(results) < len(blocks),
    )


def responses(given: str | list[dict[str, Any]]) -> tuple[Item, ...]:
    """The items of a responses request; a bare string is one user message."""
    if isinstance(given, str):
        return (Item(Kind.USER, "user", len(given.encode()) + OVERHEAD),)
    return tuple(_response_item(item) for item in given)


def _response_item(item: dict[str, Any]) -> Item:
    """By its type; without one, or as a message, by its role. Every kind of call and its output share a `call_id`.

    Some calls (a web search) hold their result themselves: they are calls that need no output.
    """
    kind_name, role = str(item.get("type") or "message"), item.get("role")
    weight = _weight(item)
    if kind_name == "message":
        return Item(ROLES.get(str(role), Kind.OTHER), str(role), weight)
    if kind_name == "reasoning":
        return Item(Kind.THOUGHT, kind_name, weight)
    if kind_name.endswith("_output"):
        return Item(Kind.RESULT, kind_name, weight, results=_ids([item], "call_id"))
    if kind_name.endswith("_call"):
        return Item(Kind.CALL, kind_name, weight, calls=_ids([item], "call_id"), tools=_names([item]))
    return Item(Kind.OTHER, kind_name, weight)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _ids(objects: list[dict[str, Any]], name: str) -> tuple[str, ...]:
    return tuple(value for one in objects if isinstance(value := one.get(name), str))


def _names(objects: list[Any]) -> frozenset[str]:
    return frozenset(name for one in objects if isinstance(one, dict) and isinstance(name := one.get("name"), str))


def _weight(element: Any) -> int:
    """The size of an element's texts in bytes; what is data rather than text is taken for a fixed size."""
    total, left = OVERHEAD, [element]
    while left:
        value = left.pop()
        if isinstance(value, str):
            is_data = len(value) > MEDIA_WEIGHT and value[:512].isascii() and not set(" \n") & set(value[:512])
            total += MEDIA_WEIGHT if is_data else len(value.encode())
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return total
