"""A conversation that lost its KV is told so once, and nobody remembers what it said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvgate.core.reuse import Reuse
from kvgate.core.warmth import Warmth
from kvgate.dialects.llamacpp_completion import LlamaCppCompletion
from kvgate.dialects.llamacpp_infill import LlamaCppInfill
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.dialects.openai_responses import OpenAiResponses
from kvgate.wire.beginnings import TEXT_CHARS, beginning
from tests.unit.doubles import profile

ONE = profile()
TWO = replace(ONE, instance="<two>")
ON, OFF = Reuse.KEEP, Reuse.OFF


def test_the_first_answer_after_a_restart_is_cold_and_no_other() -> None:
    """On, on, then a new process: cold once, then on again."""
    warmth = Warmth(b"s")
    asked = [(ONE, ON), (ONE, ON), (TWO, ON), (TWO, ON)]
    assert [warmth.is_cold("acme", "hi", *one) for one in asked] == [False, False, True, False]


def test_a_successor_without_reuse_is_cold_once_too() -> None:
    """The new process is not pinned yet; what the conversation had is gone all the same."""
    warmth = Warmth(b"s")
    asked = [(ONE, ON), (ONE, OFF), (TWO, OFF), (TWO, OFF)]
    assert [warmth.is_cold("acme", "hi", *one) for one in asked] == [False, False, True, False]


def test_who_never_had_reuse_loses_nothing() -> None:
    """Nor is anything remembered of it."""
    warmth = Warmth(b"s")
    assert [warmth.is_cold("acme", "hi", one, OFF) for one in (ONE, TWO)] == [False, False]
    assert len(warmth) == 0


def test_conversations_and_tenants_are_told_apart() -> None:
    """Another beginning, another tenant."""
    warmth = Warmth(b"s")
    warmth.is_cold("acme", "hi", ONE, ON)
    assert not warmth.is_cold("acme", "ho", TWO, ON)
    assert not warmth.is_cold("beta", "hi", TWO, ON)
    assert warmth.is_cold("acme", "hi", TWO, ON)


def test_without_an_instance_the_fingerprint_tells() -> None:
    """The same engine again is then no other one."""
    warmth, bare = Warmth(b"s"), replace(ONE, instance=None)
    warmth.is_cold("acme", "hi", bare, ON)
    assert not warmth.is_cold("acme", "hi", bare, ON)
    assert warmth.is_cold("acme", "hi", replace(bare, build="b2"), ON)


def test_memory_is_bounded_and_holds_no_text() -> None:
    """The longest unheard-of goes; what is kept is hashes under a secret of the process."""
    warmth = Warmth(b"s", kept_max=3)
    for number in range(5):
        warmth.is_cold("acme", f"secret {number}", ONE, ON)
    assert len(warmth) == 3
    assert [warmth.is_cold("acme", f"secret {number}", TWO, OFF) for number in range(5)] == [False] * 2 + [True] * 3
    other = Warmth(b"t")
    warmth.is_cold("acme", "hi", ONE, ON)
    other.is_cold("acme", "hi", ONE, ON)
    assert not set(warmth._kept) & set(other._kept)


# -- how a conversation begins


def of(dialect: Any, **body: Any) -> str:
    request = dialect.read(json.dumps(body).encode())
    return beginning(dialect.trimmable(request), request)


def test_a_conversation_begins_the_same_however_long_it_becomes() -> None:
    """All up to the first user's message; what comes behind it is another turn of the same."""
    dialect = OpenAiChat()
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ]
    first = of(dialect, messages=turns[:2])
    assert first == of(dialect, messages=turns) == '[{"role": "system", "content": "s"}, ' + json.dumps(turns[1])
    assert first != of(dialect, messages=[turns[0], {"role": "user", "content": "other"}])


@pytest.mark.parametrize(
    ("dialect", "body", "begins"),
    [
        (OpenAiResponses(), {"input": "hello"}, '"hello"'),
        (OpenAiResponses(), {"input": [{"role": "user", "content": "a"}]}, '[{"role": "user", "content": "a"}'),
        (LlamaCppCompletion(), {"prompt": "x" * 500}, '"' + "x" * (TEXT_CHARS - 1)),
        (LlamaCppCompletion(), {"prompt": "x"}, '"x"'),
        (LlamaCppInfill(), {"input_prefix": "x"}, ""),
        (OpenAiChat(), {"messages": [{"role": "system", "content": "s"}]}, '[{"role": "system", "content": "s"}]'),
    ],
)
def test_each_api_has_its_own_beginning(dialect: Any, body: dict[str, Any], begins: str) -> None:
    """A text's first characters; nothing where there are no conversations."""
    assert of(dialect, **body) == begins
