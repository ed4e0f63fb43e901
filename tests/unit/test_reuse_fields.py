"""Nothing of a client's own says what of the cache it reads: one table, every API, at every depth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgate.core.ask import Size
from kvgate.core.json_object import read_object
from kvgate.core.reuse import Reuse
from kvgate.dialects import all_dialects
from kvgate.engines.llamacpp import FIELDS, REUSE_FIELDS
from kvgate.engines.llamacpp.reuse_fields import reuse_edit, unmarked

MARK = {"type": "ephemeral", "ttl": "1h"}


def sent(body: dict[str, Any], reuse: Reuse = Reuse.OFF) -> Any:
    document = unmarked(read_object(json.dumps(body).encode()))
    return json.loads(document.edited(reuse_edit(reuse)))


@pytest.mark.parametrize("field", sorted(REUSE_FIELDS))
@pytest.mark.parametrize("reuse", list(Reuse))
def test_what_the_client_says_is_replaced_by_what_the_gate_says(field: str, reuse: Reuse) -> None:
    """On or off, it is kvgate's own word, under the two names that llama.cpp reads."""
    own = {"cache_prompt": False} if reuse is Reuse.OFF else {"cache_prompt": True, "n_cache_reuse": 0}
    assert sent({"a": 1, field: 7}, reuse) == {"a": 1, **own}


def placed(path: tuple[str, ...], mark: dict[str, Any]) -> Any:
    """A value with `mark` at the end of the path, and something beside it at each step."""
    if not path:
        return {"kept": 1, **mark}
    inner = placed(path[1:], mark)
    return [inner, {"kept": 2}] if path[0] == "*" else {"kept": 3, path[0]: inner}


PLACES = [(row.name, place) for row in FIELDS for place in row.inside]


@pytest.mark.parametrize(("name", "place"), PLACES, ids=str)
def test_a_mark_goes_at_every_depth(name: str, place: tuple[str, ...]) -> None:
    """Messages, blocks in blocks, tools, system, items; what stands beside it stays."""
    assert sent(placed(place, {name: MARK})) == {**placed(place, {}), "cache_prompt": False}


def test_marks_are_looked_for_where_anthropic_and_routers_put_them() -> None:
    """The body of a coding agent: system, tools, messages, results within results."""
    block = {"type": "text", "text": "t", "cache_control": MARK}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block], "cache_control": MARK}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"cache_control": "max-age=0"}}
    body = {
        "cache_control": MARK,
        "system": [block],
        "tools": [
            {
                "name": "f",
                "input_schema": {"type": "object", "properties": {"cache_control": {"type": "string"}}},
                "cache_control": MARK,
            }
        ],
        "messages": [{"role": "user", "content": [block, result]}, {"role": "assistant", "content": [call]}],
    }
    left = sent(body)
    assert json.dumps(left).count("cache_control") == 2
    assert left["messages"][1] == body["messages"][1]  # type: ignore[index]
    assert left["tools"][0]["input_schema"] == body["tools"][0]["input_schema"]  # type: ignore[index]


def test_unknown_fields_keep_their_bytes_around_a_mark() -> None:
    """Spacing, number spellings and escapes are the client's own."""
    body = (
        b'{ "messages" : [ {"role":"user", "cache_control": {"type":"x"} , "content":"\\u00e9"} ],\n "zz": 1.500, '
        b'"id_slot": 3 }'
    )
    document = unmarked(read_object(body))
    assert document.edited(reuse_edit(Reuse.OFF)) == (
        b'{ "messages" : [ {"role":"user" , "content":"\\u00e9"} ],\n "zz": 1.500,"cache_prompt":false }'
    )


def test_a_body_without_marks_is_the_same_object() -> None:
    """The usual request costs one look at its text."""
    document = read_object(b'{"messages":[{"role":"user","content":"cache_control"}]}')
    assert unmarked(document) is document


@pytest.mark.parametrize("dialect", all_dialects(), ids=lambda dialect: dialect.name)
def test_no_dialect_puts_back_what_the_table_takes_out(dialect: Any) -> None:
    """The cap of each API sets none of these names."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "input": "hi",
        "input_prefix": "hi",
        "query": "q",
        "documents": ["d"],
        **dict.fromkeys(REUSE_FIELDS, 1),
    }
    if dialect.name != "openai_responses":  # which knows no stored prompts
        body["prompt"] = "hi"
    request = dialect.read(json.dumps(body).encode())
    edit = dialect.cap(request, Size(1, 1)) | reuse_edit(Reuse.OFF)
    assert set(json.loads(request.document.edited(edit))) & REUSE_FIELDS == {"cache_prompt"}
