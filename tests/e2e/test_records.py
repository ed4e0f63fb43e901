"""Answers that go round, answers that the context ends, and what can be told of a request afterwards."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from tests.e2e.ask import chat, count, post, prompt_of
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

SLOT = 512

REUSE_OFF = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots")

ROUND = "Round and round it goes, and again. " * 6
"""What the model goes on with for ever, at temperature 0."""

TENANTS = {
    "demo": "",
    "stop": 'loop_guard = "stop"\n',
    "clamp": 'on_overflow = "clamp"\n',
    "window": 'on_overflow = "clamp"\ncontext_tokens_max = 80\n',
}


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", str(2 * SLOT), "-np", "2", "--no-kv-unified", "-lv", "4", *REUSE_OFF)


@pytest.fixture(scope="module")
def gate(engine: EngineProcess, start_gate: StartGate) -> RunningGate:
    return start_gate(engine.url, tenants=TENANTS, flags=["--engine-log", str(engine.log_path)])


def endless(**fields: Any) -> dict[str, Any]:
    return {"prompt": ROUND, "temperature": 0, "ignore_eos": True, "max_tokens": 440, **fields}


def kvgate(gate: RunningGate, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command at the gate's own store."""
    command = [sys.executable, "-m", "kvgate", *arguments, "--config", "kvgate.toml"]
    return subprocess.run(command, cwd=gate.log_path.parent, capture_output=True, text=True, check=False, timeout=60)


def report(gate: RunningGate, request_id: str) -> dict[str, Any]:
    """The last report of an id, from the operator's side; asked again until it is there."""
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"{gate.admin_url}/report/{request_id}", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)["reports"][0]
                return found
        except urllib.error.HTTPError as error:
            with error:
                problem = json.load(error)["problem"]
        assert time.monotonic() < deadline, problem
        time.sleep(0.05)


def line_of(gate: RunningGate, request_id: str) -> dict[str, Any]:
    return next(line for line in gate.log_lines("request") if line["request_id"] == request_id)


# -- loops


@pytest.mark.engine
async def test_a_model_that_goes_round_is_stopped(gate: RunningGate) -> None:
    """The stream is whole, its finish reason is one that clients know, and the engine is at rest again at once."""
    answer = await post(
        gate.url, endless(stream=True), key="sk-stop", path="/v1/completions", headers=named("round-1")
    )
    *_, last, done = answer.events
    assert (last["choices"][0]["finish_reason"], last["kvgate"], done) == (
        "length",
        {"finish_reason": "loop"},
        "[DONE]",
    )
    assert 100 < last["usage"]["completion_tokens"] < 430
    await asyncio.to_thread(gate.wait_until_empty, 30)
    assert gate.metric("kvgate_loops_total", tenant="stop", sign="text", action="stopped") == 1
    told = report(gate, "round-1")
    assert (told["finish"], told["loop"], told["loop_stopped"]) == ("loop", "text", True)
    assert told["usage"]["output_tokens"] == last["usage"]["completion_tokens"]
    assert line_of(gate, "round-1")["finish"] == "loop"


@pytest.mark.engine
async def test_a_loop_that_is_observed_goes_on_to_its_end(gate: RunningGate) -> None:
    """Whole answers tell it in a header."""
    whole = await post(gate.url, endless(), path="/v1/completions", headers=named("round-2"))
    assert (whole.headers["x-kvgate-loop"], whole.json["usage"]["completion_tokens"]) == ("text", 440)
    assert whole.json["choices"][0]["finish_reason"] == "length"
    assert report(gate, "round-2")["loop"] == "text"
    assert gate.metric("kvgate_loops_total", tenant="demo", action="observed") == 1


def named(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id}


async def test_every_stream_is_stopped_as_its_clients_understand(start_gate: StartGate) -> None:
    """OpenAI's and Anthropic's SDKs read each to its end, find it cut for its length, and know what it cost."""
    async with FakeEngine(n_ctx=8192, total_slots=4) as engine:
        engine.words = ("I ", "am ", "so ", "sorry. ") * 1000
        engine.word_delay_s = 0.0005
        config = '[engine]\nkv_topology = "divided"\n'
        tenants = {"stop": 'loop_guard = "stop"\n', "off": 'loop_guard = "off"\n'}
        gate = await asyncio.to_thread(start_gate, engine.url, tenants=tenants, config=config)
        cheap = openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="sk-stop", max_retries=0)
        say: list[Any] = [{"role": "user", "content": "Say it."}]
        async with cheap:
            chunks = [
                chunk
                async for chunk in await cheap.chat.completions.create(
                    model="small", messages=say, max_tokens=4000, stream=True, stream_options={"include_usage": True}
                )
            ]
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
            assert reasons == ["length"]
            assert chunks[-1].usage is not None
            assert 100 < chunks[-1].usage.completion_tokens < 2000
            events = [
                event
                async for event in await cheap.responses.create(
                    model="small", input="Say it.", max_output_tokens=4000, stream=True
                )
            ]
            ended = events[-1]
            assert ended.type == "response.incomplete"
            assert ended.response.incomplete_details is not None
            assert ended.response.incomplete_details.reason == "max_output_tokens"
            assert ended.response.usage is not None
            assert 100 < ended.response.usage.output_tokens < 2000
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key="sk-stop", max_retries=0) as claude:
            async with claude.messages.stream(model="small", messages=say, max_tokens=4000) as stream:
                message = await stream.get_final_message()
            assert (message.stop_reason, message.usage.output_tokens < 2000) == ("max_tokens", True)
            assert message.content[0].type == "text"
            assert message.content[0].text.startswith("I am so sorry. ")
        own = await post(
            gate.url, {"prompt": "Say it.", "n_predict": 4000, "stream": True}, key="sk-stop", path="/completion"
        )
        last = own.events[-1]
        assert (last["stop"], last["stop_type"], last["kvgate"]) == (True, "limit", {"finish_reason": "loop"})
        assert 100 < last["tokens_predicted"] < 2000
        await asyncio.to_thread(gate.wait_until_empty, 30)
        assert gate.metric("kvgate_loops_total", tenant="stop", action="stopped") == 4
        unguarded = await post(gate.url, chat(max_tokens=2000, stream=True), key="sk-off")
        assert unguarded.events[-1] == "[DONE]"
        assert sum("kvgate" in event for event in unguarded.events) == 0
        assert len(unguarded.events) >= 2000
        assert gate.metric("kvgate_loops_total", tenant="off") == 0


# -- ended by the context


@pytest.mark.engine
@pytest.mark.parametrize("ended", [("clamp", "slot", SLOT - 30), ("window", "tenant", 60)])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_context_ends_says_so(
    engine: EngineProcess, gate: RunningGate, ended: tuple[str, str, int], stream: bool
) -> None:
    """In a header where the answer is whole; in the log, the metric and the report always."""
    tenant, bound, prompt = ended
    before = gate.metric("kvgate_ended_by_context_total", tenant=tenant, bound=bound)
    body = await prompt_of(engine.url, prompt, max_tokens=5000, ignore_eos=True, stream=stream)
    answer = await post(gate.url, body, key=f"sk-{tenant}", headers=named(f"cut-{tenant}-{stream}"))
    assert answer.status == 200
    if not stream:
        assert answer.headers["x-kvgate-ended-by-context"] == bound
    told = await asyncio.to_thread(report, gate, f"cut-{tenant}-{stream}")
    assert (told["finish"], told["ended_by_context"]) == ("length", bound)
    assert told["usage"]["output_tokens"] == told["usable_generation"] == told["output_limit"]
    assert line_of(gate, f"cut-{tenant}-{stream}")["ended_by_context"] == bound
    assert gate.metric("kvgate_ended_by_context_total", tenant=tenant, bound=bound) == before + 1


@pytest.mark.engine
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/completion"])
async def test_an_answer_that_its_client_ended_does_not(gate: RunningGate, path: str) -> None:
    """Just as long as it asked for: that is no matter of the context, in any API."""
    parts = {"/v1/responses": {"input": "Hi"}, "/completion": {"prompt": "Hi"}}
    body = {**parts.get(path, chat("Hi")), "max_tokens": 4, "ignore_eos": True}
    answer = await post(gate.url, body, path=path, headers=named(f"own{path.replace('/', '-')}"))
    assert answer.status == 200
    assert "x-kvgate-ended-by-context" not in answer.headers
    told = await asyncio.to_thread(report, gate, f"own{path.replace('/', '-')}")
    assert (told["ended_by_context"], told["usage"]["output_tokens"]) == (None, 4)


# -- reports


@pytest.mark.engine
async def test_a_report_says_what_a_bad_answer_needs(engine: EngineProcess, gate: RunningGate) -> None:
    """Of the very request and engine; by the command and the operator's side alike; without a word of it."""
    secret = "the password is swordfish"
    answer = await post(gate.url, chat(secret, max_tokens=5), headers=named("bad-1"))
    told = await asyncio.to_thread(report, gate, "bad-1")
    assert told["engine"]["n_ctx_slot"] == SLOT
    assert told["engine"]["kv_type"] == "f16"
    assert told["engine"]["topology"] == "divided"
    assert told["engine"]["fingerprint"] == gate.status()["engine"]["fingerprint"]
    assert told["prompt_tokens"] == answer.json["usage"]["prompt_tokens"] == await count(engine.url, chat(secret))
    assert (told["verdict"], told["reuse"], told["status"], told["tenant"]) == ("admit", "off", 200, "demo")
    assert 0 <= told["queued_ms"] <= told["answered_ms"] <= told["duration_ms"]
    done = await asyncio.to_thread(kvgate, gate, "report", "bad-1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["reports"] == [told]
    pasted = (await asyncio.to_thread(kvgate, gate, "report", "bad-1", "--markdown")).stdout
    assert "| KV precision | f16 |" in pasted
    assert not any(word in text for word in ("swordfish", "sk-demo") for text in (pasted, done.stdout))
    assert str(engine.log_path.parent) not in done.stdout


@pytest.mark.engine
@pytest.mark.parametrize(
    ("body", "reason", "judged"),
    [
        (chat("word " * 2000), "prompt_overflow", True),
        (chat(max_tokens=5000), "generation_overflow", True),
        (b"{", "malformed", False),
    ],
)
async def test_a_refused_request_has_a_report_too(gate: RunningGate, body: Any, reason: str, judged: bool) -> None:
    answer = await post(gate.url, body, headers=named(f"no-{reason}"))
    assert answer.status == 400
    told = await asyncio.to_thread(report, gate, f"no-{reason}")
    assert (told["status"], told["reason"], told["engine"] is not None) == (400, reason, judged)


def test_an_unknown_request_is_a_clear_no(gate: RunningGate) -> None:
    done = kvgate(gate, "report", "kvg-nobody")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing is kept of a request 'kvg-nobody'" in done.stderr
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{gate.admin_url}/report/kvg-nobody", timeout=10)


async def test_workers_answer_for_each_other(start_gate: StartGate) -> None:
    """Whichever worker served it, the operator's side finds it; without reports there is none."""
    async with FakeEngine() as engine:
        gate = await asyncio.to_thread(start_gate, engine.url, flags=["--workers", "2"])
        for at in range(4):
            await post(gate.url, chat(max_tokens=2), headers=named(f"w-{at}"))
        for at in range(4):
            assert (await asyncio.to_thread(report, gate, f"w-{at}"))["status"] == 200


# -- histogram and plan


def proposals(gate: RunningGate, *arguments: str) -> dict[str, Any]:
    done = kvgate(gate, "histogram", *arguments, "--plan", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.engine
async def test_a_gates_records_and_the_engines_log_tell_the_same(engine: EngineProcess, gate: RunningGate) -> None:
    """Each request that ran stands in both, prompt by prompt."""
    prompts = sorted(
        [
            (await post(gate.url, chat("word " * 20 * at, max_tokens=2), key="sk-clamp")).json["usage"][
                "prompt_tokens"
            ]
            for at in (1, 5, 9)
        ]
    )
    deadline = time.monotonic() + 20
    while True:
        records = proposals(gate, "--tenant", "clamp", "--kv-log", str(engine.log_path))
        if records["tenants"]["clamp"]["requests"] >= 3:
            break
        assert time.monotonic() < deadline
    logged = proposals(gate, "--log", str(engine.log_path))
    assert dict(records["tenants"]["clamp"]["prompts"])[100] >= prompts[-1]
    assert logged["plan"]["bytes_per_token"] == records["plan"]["bytes_per_token"] == 23040
    assert logged["tenants"]["engine log"]["n_ctx_slot"] == SLOT


@pytest.mark.engine
def test_each_kind_of_line_starts_as_promised(
    engine: EngineProcess, gate: RunningGate, start_engine: StartEngine, tmp_path: Path
) -> None:
    """One slot, several of their own, several over one cache: n_ctx_slot, slots and memory as the engine says."""
    page = tmp_path / "page.html"
    answer = proposals(gate, "--log", str(engine.log_path), "--memory-mib", "60", "--html", str(page))
    assert "<svg" in page.read_text()
    planned = answer["plan"]["proposals"]
    kinds = [
        next(one for one in planned if one["slots"] == slots and one["kv_unified"] == unified)
        for slots, unified in ((1, False), (2, False), (4, False), (4, True))
    ]
    for one in kinds:
        assert one["kv_mib"] <= 60
        log = start_engine(*one["flags"].split(), "-lv", "4")
        with urllib.request.urlopen(f"{log.url}/props", timeout=20) as props:
            found = json.load(props)
        shown = found["default_generation_settings"]["n_ctx"], found["total_slots"]
        assert shown == (one["n_ctx_slot"], one["slots"]), one["flags"]
        said = log.log_path.read_text()
        assert f"kv_unified = '{str(one['kv_unified'] and one['slots'] > 1).lower()}'" in said
        assert f"llama_kv_cache: size = {one['kv_mib']:7.2f} MiB" in said, one["flags"]
        log.stop()
