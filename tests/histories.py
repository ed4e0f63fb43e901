"""Conversations of every kind, well-formed and not, as each chat API would send them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

Says = Literal["system", "user", "assistant", "call", "result", "thought", "odd"]


@dataclass(frozen=True)
class Said:
    """One step of a conversation, in no dialect: who, which ids, how many tokens, how many bytes."""

    who: Says
    ids: tuple[int, ...] = ()
    tokens: int = 1
    size: int = 8
    speaks: bool = False


@dataclass(frozen=True)
class Written:
    """A conversation in a dialect: its elements, and which step each is of."""

    elements: list[dict[str, Any]]
    steps: list[int] = field(default_factory=list)


tokens = st.integers(1, 80)
sizes = st.sampled_from([1, 8, 40, 400])
ids = st.lists(st.integers(0, 3), max_size=3, unique=True).map(tuple)


@st.composite
def _rounds(draw: Any) -> list[Said]:
    made = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple))
    call = Said("call", made, draw(tokens), draw(sizes))
    return [call, Said("result", tuple(draw(st.permutations(made))), draw(tokens), draw(sizes))]


@st.composite
def well_formed(draw: Any, *, is_strict: bool = True) -> list[Said]:
    """System, then user and assistant in turns, tool calls with all their results between them.

    Not strict: an answer may also come before calls, and a turn end with its question or its calls, as where a client
    broke it off.
    """
    found: list[Said] = [Said("system", (), draw(tokens), draw(sizes))] if draw(st.booleans()) else []
    turns = draw(st.integers(1, 12))
    for turn in range(turns):
        found.append(Said("user", (), draw(tokens), draw(sizes)))
        for _ in range(draw(st.sampled_from([0, 0, 1, 2, 3]))):
            if not is_strict and draw(st.booleans()):
                found.append(Said("assistant", (), draw(tokens), draw(sizes)))
            found += draw(_rounds())
        if (is_strict and turn < turns - 1) or draw(st.booleans()):
            found.append(Said("assistant", (), draw(tokens), draw(sizes)))
    return found


anything = st.lists(
    st.builds(
        Said,
        st.sampled_from(
            ["system", "user", "user", "assistant", "call", "call", "result", "result", "thought", "odd"]
        ),
        ids,
        tokens,
        sizes,
        st.booleans(),
    ),
    min_size=1,
    max_size=24,
)
"""Whatever a client can send: results before their calls, ids twice, calls without results, two users in a row."""

histories = well_formed() | well_formed(is_strict=False) | anything


def _chat(said: Said) -> list[dict[str, Any]]:
    text = "x" * said.size
    match said.who:
        case "call":
            calls = [{"id": f"c{one}", "function": {"name": f"f{one}", "arguments": "{}"}} for one in said.ids]
            return [{"role": "assistant", "content": text, "tool_calls": calls, "t": said.tokens}]
        case "result":
            return [
                {"role": "tool", "tool_call_id": f"c{one}", "content": text, "t": said.tokens} for one in said.ids
            ] or [{"role": "tool", "content": text, "t": said.tokens}]
        case "thought":
            return [{"role": "ipython", "content": text, "t": said.tokens}]
        case "odd":
            return [{"role": "odd", "content": [{"type": "text", "text": text}], "t": said.tokens}]
        case role:
            return [{"role": role, "content": text, "t": said.tokens}]


def _messages(said: Said) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "x" * said.size}
    match said.who:
        case "call":
            uses = [{"type": "tool_use", "id": f"c{one}", "name": f"f{one}", "input": {}} for one in said.ids]
            return [{"role": "assistant", "content": [text, *uses], "t": said.tokens}]
        case "result":
            results = [
                {"type": "tool_result", "tool_use_id": f"c{one}", "content": "x" * said.size} for one in said.ids
            ]
            return [{"role": "user", "content": [*results, *([text] if said.speaks else [])], "t": said.tokens}]
        case "thought" | "odd":
            return [{"role": "odd", "content": [text], "t": said.tokens}]
        case role:
            return [{"role": role, "content": text["text"], "t": said.tokens}]


def _responses(said: Said) -> list[dict[str, Any]]:
    text, count = "x" * said.size, {"t": said.tokens}
    match said.who:
        case "call":
            return [
                {"type": "function_call", "call_id": f"c{one}", "name": f"f{one}", "arguments": text, **count}
                for one in said.ids
            ] or [{"type": "web_search_call", **count}]
        case "result":
            return [
                {"type": "function_call_output", "call_id": f"c{one}", "output": text, **count} for one in said.ids
            ] or [{"type": "function_call_output", "output": text, **count}]
        case "thought":
            return [{"type": "reasoning", "summary": [], **count}]
        case "odd":
            return [{"type": "odd_thing", "text": text, **count}]
        case role:
            return [{"role": role, "content": text, **count}]


RENDERERS: dict[str, Callable[[Said], list[dict[str, Any]]]] = {
    "openai_chat": _chat,
    "anthropic_messages": _messages,
    "openai_responses": _responses,
}
LIST_FIELD = {"openai_chat": "messages", "anthropic_messages": "messages", "openai_responses": "input"}


def written(dialect: str, history: list[Said]) -> Written:
    """The conversation in a dialect's words."""
    found = Written([])
    for step, said in enumerate(history):
        for element in RENDERERS[dialect](said):
            found.elements.append(element)
            found.steps.append(step)
    return found


def body(dialect: str, history: list[Said], **fields: Any) -> bytes:
    """A request of it, with spacing and spellings of a client's own."""
    elements = written(dialect, history).elements
    listed = " ,\n ".join(json.dumps(one) for one in elements)
    others = "".join(f' , "{name}" :{json.dumps(value)}' for name, value in fields.items())
    return f'{{"odd": 1.50e+1,"{LIST_FIELD[dialect]}" : [ {listed} ]{others}, "\\u0078": "\\u00e9"}}'.encode()
