"""Every spelling in which a request asks for trimming is read as one policy, and none reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgate.core.ask import Size
from kvgate.core.tenant import Limits, OnOverflow, Tenant, TrimSide, TrimStrategy
from kvgate.core.trim_policy import TrimAsk, TrimPolicy, judged_as, trim_policy
from kvgate.ports import Refused
from kvgate.wire import trim_asks
from tests.samples import SAMPLES
from tests.unit.test_dialects import DIALECTS

MIDDLE, TOOLS = TrimStrategy.MIDDLE_OUT, TrimStrategy.TOOL_OUTPUT_FIRST
CLEAR: dict[str, Any] = {"type": "clear_tool_uses_20250919"}
TEXTS = ("openai_completions", "llamacpp_completion")
OPENAI = ("openai_chat", "openai_responses", *TEXTS)


def ask(name: str, **fields: Any) -> TrimAsk:
    return DIALECTS[name].read(SAMPLES[name].request(**fields)).trim


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, TrimAsk()),
        ({"transforms": ["middle-out"]}, TrimAsk(True, MIDDLE)),
        ({"transforms": []}, TrimAsk(False)),
        ({"transforms": None}, TrimAsk()),
        ({"plugins": [{"id": "context-compression"}]}, TrimAsk(True, MIDDLE)),
        ({"plugins": [{"id": "web"}, {"id": "context-compression", "enabled": False}]}, TrimAsk(False)),
        ({"plugins": [{"id": "web"}]}, TrimAsk()),
        ({"plugins": "web"}, TrimAsk()),
        ({"truncate_prompt_tokens": -1}, TrimAsk(True)),
        ({"truncate_prompt_tokens": 50, "truncation_side": "right"}, TrimAsk(True, None, TrimSide.RIGHT, 50)),
        ({"truncation_side": "left"}, TrimAsk(None, None, TrimSide.LEFT)),
        ({"transforms": [], "truncate_prompt_tokens": 9}, TrimAsk(True, None, None, 9)),
    ],
)
def test_what_openais_relatives_say(name: str, fields: dict[str, Any], expected: TrimAsk) -> None:
    """OpenRouter's two forms and vLLM's, in every API of theirs."""
    assert ask(name, **fields) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", TrimAsk(True)), ("disabled", TrimAsk(False)), (None, TrimAsk())]
)
def test_what_a_response_says(value: str | None, expected: TrimAsk) -> None:
    """OpenAI's own field."""
    assert ask("openai_responses", truncation=value) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, TrimAsk()),
        ({"edits": []}, TrimAsk()),
        ({}, TrimAsk()),
        ({"edits": [{"type": "clear_thinking_20251015"}]}, TrimAsk()),
        ({"edits": [CLEAR]}, TrimAsk(True, TOOLS, keep_calls=3)),
        (
            {"edits": [{"type": "compact"}, {**CLEAR, "keep": {"value": 1}, "exclude_tools": ["a"]}]},
            TrimAsk(True, TOOLS, keep_calls=1, keep_tools=frozenset("a")),
        ),
        (
            {"edits": [{**CLEAR, "trigger": {"type": "input_tokens", "value": 9}, "clear_tool_inputs": True}]},
            TrimAsk(True, TOOLS, keep_calls=3),
        ),
    ],
)
def test_what_anthropics_field_says(given: Any, expected: TrimAsk) -> None:
    """Clearing tool uses asks for calls to go first; its other edits ask for what is not done here."""
    assert ask("anthropic_messages", context_management=given) == expected


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "anthropic_messages"])
def test_pins_are_indexes_of_the_list(name: str) -> None:
    """Whatever else a request says."""
    message = {"role": "user", "content": "a"}
    listed = {"input" if name == "openai_responses" else "messages": [message] * 3}
    assert ask(name, **listed, kvgate_pinned=[2, 0]).pinned == {0, 2}
    assert ask(name, **listed, kvgate_pinned=[]).pinned == set()
    for wrong in (3, -1, "0", True, 0.5, None):
        with pytest.raises(Refused, match="malformed"):
            ask(name, **listed, kvgate_pinned=[wrong])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("openai_responses", {"truncation": "x"}),
        ("openai_responses", {"truncation": True}),
        ("openai_chat", {"transforms": "middle-out"}),
        ("openai_chat", {"transforms": ["other"]}),
        ("openai_chat", {"transforms": [[]]}),
        ("openai_chat", {"plugins": [{"id": "context-compression", "enabled": "no"}]}),
        ("openai_chat", {"truncate_prompt_tokens": 0}),
        ("openai_chat", {"truncate_prompt_tokens": True}),
        ("openai_chat", {"truncate_prompt_tokens": 1.5}),
        ("openai_chat", {"truncate_prompt_tokens": "9"}),
        ("openai_chat", {"truncation_side": "up"}),
        ("openai_chat", {"truncation_side": []}),
        ("openai_chat", {"kvgate_pinned": 0}),
        ("anthropic_messages", {"context_management": []}),
        ("anthropic_messages", {"context_management": {"edits": {}}}),
        ("anthropic_messages", {"context_management": {"edits": [{**CLEAR, "keep": 3}]}}),
        ("anthropic_messages", {"context_management": {"edits": [{**CLEAR, "keep": {"value": True}}]}}),
        ("anthropic_messages", {"context_management": {"edits": [{**CLEAR, "exclude_tools": [1]}]}}),
    ],
)
def test_what_is_no_way_to_ask_is_refused_under_its_name(name: str, fields: dict[str, Any]) -> None:
    """Never guessed: a spelling that is not understood would be a silent loss, or a silent refusal to lose."""
    with pytest.raises(Refused, match="malformed") as refused:
        ask(name, **fields)
    assert refused.value.refusal.param == next(iter(fields))


@pytest.mark.parametrize("name", [*OPENAI, "anthropic_messages"])
def test_none_of_it_reaches_the_engine(name: str) -> None:
    """It would cut by itself, after kvgate has counted; another plug-in in the same list stays."""
    dialect, sample = DIALECTS[name], SAMPLES[name]
    fields: dict[str, Any] = {
        "truncation": "auto",
        "transforms": [],
        "truncate_prompt_tokens": 5,
        "truncation_side": "left",
        "context_management": {"edits": []},
        "kvgate_pinned": [],
        "plugins": [{"id": "web", "n": 1.0}, {"id": "context-compression"}],
        "kept": 1,
    }
    assert set(trim_asks.FIELDS) < set(fields)
    request = dialect.read(sample.request(**fields))
    sent = json.loads(request.document.edited(dialect.cap(request, Size(9, 5))))
    assert not set(trim_asks.FIELDS) & set(sent)
    assert (sent["plugins"], sent["kept"]) == ([{"id": "web", "n": 1.0}], 1)
    alone = dialect.read(sample.request(plugins=[{"id": "context-compression"}]))
    assert "plugins" not in json.loads(alone.document.edited(dialect.cap(alone, Size(9, 5))))


@pytest.mark.parametrize(
    ("on_overflow", "on_request", "wanted", "trimmed", "judged"),
    [
        ("reject", False, None, False, "reject"),
        ("reject", False, True, False, "reject"),
        ("reject", True, None, False, "reject"),
        ("reject", True, True, True, "trim"),
        ("clamp", True, True, True, "trim"),
        ("clamp", True, False, False, "clamp"),
        ("clamp", False, True, False, "clamp"),
        ("trim", False, None, True, "trim"),
        ("trim", False, True, True, "trim"),
        ("trim", True, False, False, "clamp"),
    ],
)
def test_who_is_trimmed(
    *, on_overflow: str, on_request: bool, wanted: bool | None, trimmed: bool, judged: str
) -> None:
    """The tenant's policy decides; within it the request does. Who declines is clamped, never cut."""
    limits = Limits(on_overflow=OnOverflow(on_overflow), trim_on_request=on_request)
    asked = TrimAsk(wanted)
    assert (trim_policy(limits, asked) is not None) == trimmed
    assert judged_as(Tenant("t", limits), asked).limits.on_overflow == judged


def test_the_requests_own_words_come_first() -> None:
    """Strategy and side are the request's where it names them; room and stride are the tenant's alone."""
    limits = Limits(on_overflow=OnOverflow.TRIM, trim_room_tokens=9, trim_stride_tokens=7)
    assert trim_policy(limits, TrimAsk()) == TrimPolicy(TrimStrategy.OLDEST_FIRST, TrimSide.LEFT, 9, 7)
    asked = TrimAsk(True, TOOLS, TrimSide.RIGHT, 50, 2, frozenset("a"), frozenset({1}))
    expected = TrimPolicy(TOOLS, TrimSide.RIGHT, 9, 7, 50, 2, frozenset("a"), frozenset({1}))
    assert trim_policy(limits, asked) == expected
