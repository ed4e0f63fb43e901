"""An engine that reuses although it was told not to: nobody sees it but the operator, and the pin goes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.canary import VIOLATIONS_MAX
from tests.e2e.ask import post
from tests.e2e.canaries import command, record
from tests.fake_engine import CHAT, COMPLETION, COMPLETIONS, MESSAGES, RESPONSES, FakeEngine

if TYPE_CHECKING:
    from tests.e2e.ask import Answer
    from tests.e2e.conftest import RunningGate, StartGate

CACHED = 7
MESSAGE = {"messages": [{"role": "user", "content": "Say hi to all of them."}], "max_tokens": 3}
ASKED: dict[str, dict[str, Any]] = {
    MESSAGES: MESSAGE,
    CHAT: MESSAGE | {"stream_options": {"include_usage": True}},
    COMPLETIONS: {"prompt": "Once upon a time there was a king", "max_tokens": 3},
    RESPONSES: {"input": "Say hi to all of them.", "max_output_tokens": 3},
    COMPLETION: {"prompt": "Once upon a time there was a king", "n_predict": 3},
}

CACHE_FIGURES = ("cache_n", "cached_tokens", "cache_read_input_tokens")
PROMPT_FIGURES = ("prompt_n", "prompt_tokens", "input_tokens", "tokens_evaluated")


def figures(value: Any, names: tuple[str, ...]) -> list[int]:
    """Every figure of these names, at any depth."""
    if isinstance(value, list):
        return [found for one in value for found in figures(one, names)]
    if isinstance(value, dict):
        own = [one for name, one in value.items() if name in names and isinstance(one, int)]
        return own + [found for one in value.values() for found in figures(one, names)]
    return []


def assert_masked(answer: Answer, path: str) -> None:
    """Served, without a figure of what was cached, and with the whole prompt in every sum."""
    assert (answer.status, answer.headers["x-kvgate-reuse"]) == (200, "off"), path
    told = answer.json if answer.raw.startswith(b"{") else [one for one in answer.events if one != "[DONE]"]
    assert set(figures(told, CACHE_FIGURES)) == {0}, path
    count = int(answer.headers["x-kvgate-prompt-tokens"])
    assert set(figures(told, PROMPT_FIGURES)) - {0} == {count}, path


async def until_unpinned(gate: RunningGate) -> dict[str, Any]:
    """The first event of the history, once it tells of an unpin."""
    deadline = time.monotonic() + 60
    while True:
        status = await command(gate, "status")
        event: dict[str, Any] = status["events"][0]
        if event["what"] == "unpin":
            assert status["pins"] == []
            return event
        if time.monotonic() > deadline:
            raise AssertionError(f"not unpinned: {status}")
        await asyncio.sleep(0.2)


@pytest.mark.timeout(120)
async def test_reuse_that_should_not_be_is_masked_counted_alarmed_and_unpins(start_gate: StartGate) -> None:
    """In every dialect, streamed or not: no figure of it, sums of the whole prompt; the operator sees each."""
    async with FakeEngine(n_ctx=512) as engine:
        gate = await asyncio.to_thread(start_gate, engine.url, tenants={"off": ""})
        assert (await post(gate.url, ASKED[MESSAGES], path=MESSAGES, key="sk-off")).status == 200  # probed, and off
        report = await record(gate, pin=True)
        engine.cached_tokens = CACHED
        seen = 0
        for path, body in ASKED.items():
            for stream in (False, True):
                answer = await post(gate.url, body | {"stream": stream}, path=path, key="sk-off")
                if path == MESSAGES and stream:  # the first violation closes them
                    assert (answer.status, answer.headers["x-kvgate-reason"]) == (503, "reuse_switch")
                    continue
                assert_masked(answer, path)
                seen += 1
        assert seen == 9 > VIOLATIONS_MAX
        event = await until_unpinned(gate)
        assert (event["subject"], event["by"]) == (report.fingerprint, "kvgate")
        assert "answers in a row reused although told not to" in event["why"]
        await asyncio.to_thread(gate.wait_until_empty, 30)
        assert gate.metric("kvgate_reuse_violations_total", tenant="off") == seen
        assert gate.metric("kvgate_tokens_total", tenant="off", kind="cached") == seen * CACHED
        warnings = (await asyncio.to_thread(gate.ready))["warnings"]
        assert [f"in {seen} answers although it was told not to" in one for one in warnings].count(True) == 1
        assert len(gate.log_lines("reused tokens although reuse was off")) == seen
        assert "king" not in gate.log_path.read_text()
        assert json.dumps(report.fingerprint) in json.dumps(gate.log_lines("prefix reuse was unpinned"))


async def test_a_stream_of_messages_is_masked_too(start_gate: StartGate) -> None:
    """The input that Anthropic's form leaves cached tokens out of is the whole prompt again."""
    async with FakeEngine(n_ctx=512) as engine:
        gate = await asyncio.to_thread(start_gate, engine.url, tenants={"off": ""})
        assert (await post(gate.url, MESSAGE, path=MESSAGES, key="sk-off")).status == 200
        engine.cached_tokens = CACHED
        assert_masked(await post(gate.url, MESSAGE | {"stream": True}, path=MESSAGES, key="sk-off"), MESSAGES)
