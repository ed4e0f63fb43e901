"""Trimming on the real engine: a conversation that never ends, on three chat templates, and texts that are cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvgate.core.trim_search import COUNTS_MAX
from tests.e2e.ask import WORDS, Answer, count, post
from tests.e2e.one_layer import one_layer
from tests.e2e.varied import TOOL, varied_chats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

TEMPLATES: Final = Path(__file__).parent / "templates"
FLAGS: Final = (
    "-c", "512", "-np", "1", "--no-kv-unified", "--jinja", "-lv", "4",
    "--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots",
)  # fmt: skip
TURNS: Final = 40
SLOT: Final = 512
TENANTS: Final = {
    "oldest": 'on_overflow = "trim"\ntrim_room_tokens = 160',
    "middle": 'on_overflow = "trim"\ntrim_strategy = "middle-out"\ntrim_room_tokens = 160',
    "tools": 'on_overflow = "trim"\ntrim_strategy = "tool-output-first"\ntrim_room_tokens = 160',
    "asking": "trim_on_request = true\ntrim_room_tokens = 160",
    "refusing": "",
    "text": 'on_overflow = "trim"\ntrim_room_tokens = 64',
    "right": 'on_overflow = "trim"\ntrim_room_tokens = 64\ntrim_side = "right"',
}


class Served:
    """An engine with one template, and a gate in front of it."""

    def __init__(self, engine: EngineProcess, gate: RunningGate) -> None:
        self.engine, self.gate = engine, gate

    async def ask(self, body: Any, key: str, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        return await post(self.gate.url, body, key=f"sk-{key}", path=path, headers=headers)


@pytest.fixture(scope="module")
def quick(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's first layer: whether a body is accepted is the tokenizer's and the template's business."""
    return one_layer(model, tmp_path_factory.mktemp("model") / "one-layer.gguf")


def _serve(start_engine: StartEngine, start_gate: StartGate, quick: Path, *flags: str) -> Served:
    engine = start_engine("-m", str(quick), *FLAGS, *flags)
    return Served(engine, start_gate(engine.url, tenants=TENANTS, config=f'[engine]\nlog = "{engine.log_path}"\n'))


@pytest.fixture(scope="module")
def own(start_engine: StartEngine, start_gate: StartGate, quick: Path) -> Served:
    """SmolLM2's own template: it renders no tools."""
    return _serve(start_engine, start_gate, quick)


@pytest.fixture(scope="module")
def strict(start_engine: StartEngine, start_gate: StartGate, quick: Path) -> Served:
    """A template that insists on user, assistant, user, assistant, ... (Mistral's way)."""
    return _serve(start_engine, start_gate, quick, "--chat-template-file", str(TEMPLATES / "strict.jinja"))


@pytest.fixture(scope="module")
def tools(start_engine: StartEngine, start_gate: StartGate, quick: Path) -> Served:
    """A template that renders tools, calls and results, and refuses a result without its call (Hermes's way)."""
    return _serve(start_engine, start_gate, quick, "--chat-template-file", str(TEMPLATES / "tools.jinja"))


def _words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(number))


def _turn(draw: random.Random, turn: int) -> list[dict[str, Any]]:
    """What happened between one question and the next: sometimes calls, side by side or one after another."""
    rounds = []
    for at in range(draw.choice((0, 1, 1, 2))):
        ids = [f"call{turn:02}{at}{letter}" for letter in "ab"[: draw.choice((1, 1, 2))]]
        calls = [
            {"id": one, "type": "function", "function": {"name": "lookup", "arguments": '{"query": "x"}'}}
            for one in ids
        ]
        rounds.append({"role": "assistant", "content": "", "tool_calls": calls})
        rounds += [{"role": "tool", "tool_call_id": one, "content": _words(draw, 12)} for one in ids]
    return rounds


async def _converse(served: Served, key: str, seed: int, fields: dict[str, Any]) -> list[Answer]:
    """A client that knows of no limit: it sends the whole conversation, forty times, longer each time."""
    draw = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer shortly."}]
    answers = []
    for turn in range(TURNS):
        messages += [{"role": "user", "content": _words(draw, 10)}, *_turn(draw, turn)]
        answer = await served.ask({"messages": messages, "max_tokens": 2, "temperature": 0, **fields}, key)
        assert answer.status == 200, (turn, answer.raw)
        answers.append(answer)
        text = answer.json["choices"][0]["message"].get("content") or "Yes."
        messages.append({"role": "assistant", "content": text.strip() or "Yes."})
    return answers


@pytest.mark.parametrize(
    ("template", "key", "fields"),
    [("own", "oldest", {}), ("strict", "middle", {}), ("tools", "tools", {"tools": [TOOL], "tool_choice": "none"})],
)
async def test_a_conversation_goes_on_for_forty_turns(
    request: pytest.FixtureRequest, template: str, key: str, fields: dict[str, Any]
) -> None:
    """Every request is accepted by the real engine, with the count that was foreseen, and its answer has room."""
    served: Served = request.getfixturevalue(template)
    answers = await _converse(served, key, seed=len(key), fields=fields)
    trims = [answer for answer in answers if answer.headers["x-kvgate-verdict"] == "trim"]
    assert len(trims) > TURNS // 2
    for answer in answers:
        used = answer.json["usage"]["prompt_tokens"]
        assert used == int(answer.headers["x-kvgate-prompt-tokens"]) < SLOT
        assert int(answer.headers["x-kvgate-usable-generation"]) >= 2
        assert answer.headers["x-kvgate-output-limit"] == "2"
    lines = [line for line in served.gate.log_lines("request") if line["tenant"] == key and "trim_how" in line]
    assert len(lines) == len(trims)
    counts = [line["trim_counts"] for line in lines]
    assert max(counts) <= COUNTS_MAX
    assert served.gate.metric("kvgate_trims_total", tenant=key) == len(trims)
    assert served.gate.metric("kvgate_trimmed_tokens_total", tenant=key) == sum(
        int(answer.headers["x-kvgate-trimmed-tokens"]) for answer in trims
    )
    assert served.gate.metric("kvgate_count_drift_total") == 0


def _calls_anthropic(draw: random.Random, turn: int) -> list[dict[str, Any]]:
    ids = [f"toolu{turn}{letter}" for letter in "ab"[: draw.choice((1, 2))]]
    uses = [{"type": "tool_use", "id": one, "name": "lookup", "input": {"query": "x"}} for one in ids]
    results = [{"type": "tool_result", "tool_use_id": one, "content": _words(draw, 30)} for one in ids]
    return [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]


def _calls_responses(draw: random.Random, turn: int) -> list[dict[str, Any]]:
    ids = [f"fc{turn}{letter}" for letter in "ab"[: draw.choice((1, 2))]]
    calls = [{"type": "function_call", "call_id": one, "name": "lookup", "arguments": "{}"} for one in ids]
    return calls + [{"type": "function_call_output", "call_id": one, "output": _words(draw, 30)} for one in ids]


def _answer(draw: random.Random, turn: int, field: str) -> dict[str, Any]:
    """An earlier answer; in a list of items llama.cpp wants it as it gave it."""
    if field == "messages":
        return {"role": "assistant", "content": _words(draw, 6)}
    text = {"type": "output_text", "text": _words(draw, 6)}
    return {"type": "message", "role": "assistant", "content": [text], "id": f"msg{turn}", "status": "completed"}


@pytest.mark.parametrize("template", ["own", "strict", "tools"])
@pytest.mark.parametrize(
    ("path", "field", "calls", "asked"),
    [
        (
            "/v1/messages",
            "messages",
            _calls_anthropic,
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"value": 1}}]}},
        ),
        ("/v1/responses", "input", _calls_responses, {"truncation": "auto"}),
    ],
    ids=["anthropic", "responses"],
)
async def test_the_other_chat_apis_go_on_when_a_request_asks(
    *, request: pytest.FixtureRequest, template: str, path: str, field: str, calls: Any, asked: dict[str, Any]
) -> None:
    """The API's own spelling is enough where the tenant allows it; without it the same body is refused."""
    served: Served = request.getfixturevalue(template)
    draw = random.Random(template)
    history: list[dict[str, Any]] = []
    for turn in range(16):
        history += [{"role": "user", "content": _words(draw, 12)}, *calls(draw, turn)]
        history.append(_answer(draw, turn, field))
    history.append({"role": "user", "content": "And now?"})
    limit = {"max_tokens": 2} if field == "messages" else {"max_output_tokens": 2}
    answer = await served.ask({field: history, **limit, **asked}, "asking", path)
    assert (answer.status, answer.headers["x-kvgate-verdict"]) == (200, "trim"), answer.raw
    assert int(answer.headers["x-kvgate-trimmed-messages"]) > 0
    plain = await served.ask({field: history, **limit}, "asking", path)
    assert (plain.status, plain.error["reason"]) == (400, "prompt_overflow")
    denied = await served.ask({field: history, **limit, **asked}, "refusing", path)
    assert (denied.status, denied.error["reason"]) == (400, "prompt_overflow")


async def test_an_agent_goes_on_within_one_turn(tools: Served) -> None:
    """One question and forty calls: with `tool-output-first` the older ones go, the question and the latest stay."""
    draw = random.Random(4)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the river. " + _words(draw, 20)}]
    for at in range(TURNS):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{at}", "content": _words(draw, 25)})
    body = {"messages": messages, "max_tokens": 2, "tools": [TOOL], "tool_choice": "none"}
    answer = await tools.ask(body, "tools", **{"x-kvgate-trim-details": "1"})
    assert (answer.status, answer.headers["x-kvgate-verdict"]) == (200, "trim"), answer.raw
    told = json.loads(answer.headers["x-kvgate-trim-details"])
    assert [(run["first"], run["last"] % 2) for run in told["dropped"]] == [(1, 0)]
    assert told["dropped"][0]["last"] < len(messages) - 2
    assert sum(run["tokens"] for run in told["dropped"]) == int(answer.headers["x-kvgate-trimmed-tokens"])
    oldest = await tools.ask(body, "oldest")
    assert (oldest.status, oldest.error["reason"]) == (400, "untrimmable")


@pytest.mark.parametrize("template", ["own", "strict", "tools"])
@pytest.mark.parametrize("key", ["oldest", "middle", "tools"])
async def test_what_the_engine_takes_whole_it_takes_trimmed(
    request: pytest.FixtureRequest, template: str, key: str
) -> None:
    """Bodies of every shape behind a long history: none that the template accepts is refused once it is trimmed."""
    served: Served = request.getfixturevalue(template)
    draw = random.Random(key)
    trimmed = 0
    for at, body in enumerate(varied_chats(6, seed=len(key))):
        body["messages"] = _behind_history(draw, at, body["messages"])
        try:
            whole = await count(served.engine.url, body)
        except KeyError:
            continue  # the template refuses it as it is
        answer = await served.ask(body, key)
        assert answer.status == 200, (whole, answer.raw, body)
        trimmed += answer.headers["x-kvgate-verdict"] == "trim"
    assert trimmed > 2


def _behind_history(draw: random.Random, at: int, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    system = [message for message in messages if message["role"] == "system"]
    history: list[dict[str, Any]] = []
    for turn in range(25):
        history += [{"role": "user", "content": _words(draw, 12)}, *_turn(draw, turn + at)]
        history.append({"role": "assistant", "content": _words(draw, 8)})
    return [*system, *history, *(message for message in messages if message["role"] != "system")]


async def test_a_giant_last_message_is_refused_with_the_reason(own: Served) -> None:
    """No endless loop, no silent loss: the sentence says what takes the room, and clients can read the figures."""
    giant = [*[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 5]
    giant.append({"role": "user", "content": "river " * 900})
    refused = await own.ask({"messages": giant, "max_tokens": 5}, "oldest")
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert refused.error["reason"] == refused.headers["x-kvgate-reason"] == "untrimmable"
    assert refused.error["n_protected_tokens"] > SLOT
    assert "shorten the last user message" in refused.error["message"]
    anthropic = await own.ask({"messages": giant, "max_tokens": 5}, "oldest", "/v1/messages")
    assert anthropic.error["message"].startswith(
        f"prompt is too long: {anthropic.error['n_prompt_tokens']} tokens > 511"
    )


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
async def test_a_text_is_cut_at_one_end_between_two_characters(own: Served, path: str) -> None:
    """The end, or the beginning, of the text goes on, to within a few tokens of all that fits."""
    text = " ".join(f"{at} émigré 東京 🦜 river" for at in range(120))
    for key in ("text", "right"):
        answer = await own.ask({"prompt": text, "max_tokens": 2, "n_predict": 2}, key, path)
        assert (answer.status, answer.headers["x-kvgate-verdict"]) == (200, "trim"), answer.raw
        assert SLOT - 12 <= int(answer.headers["x-kvgate-prompt-tokens"]) <= SLOT - 2
        assert "x-kvgate-trimmed-messages" not in answer.headers
    listed = await own.ask({"prompt": [text, "short"], "max_tokens": 2}, "text", path)
    assert (listed.status, listed.headers["x-kvgate-verdict"]) == (200, "trim"), listed.raw
    fixed = await own.ask(
        {"prompt": list(range(100, 900)), "max_tokens": 2, "truncate_prompt_tokens": 50}, "text", path
    )
    assert fixed.headers["x-kvgate-prompt-tokens"] == "50"
    assert own.gate.metric("kvgate_count_drift_total") == 0
