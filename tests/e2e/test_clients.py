"""The `llm` command and curl scripts, as people have them, with nothing changed but the address and the key."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.ask import chat

if TYPE_CHECKING:
    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

SLOT = 512
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineProcess:
    """Two slots of 512 tokens."""
    flags = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots", "--alias", "smollm2")
    return start_engine("-c", "1024", "-np", "2", "--no-kv-unified", *flags)


@pytest.fixture(scope="module")
def gate(engine: EngineProcess, start_gate: StartGate) -> RunningGate:
    config = '[engine]\nkv_topology = "divided"\n'
    return start_gate(engine.url, tenants={"demo": "output_tokens_default = 8\n"}, config=config)


# -- llm


@pytest.fixture
def llm_home(gate: RunningGate, tmp_path: Path) -> Path:
    """A home of the `llm` command that knows two models behind the gate, as its documentation says to set them up."""
    models = [
        {"model_id": "gated", "model_name": "smollm2", "api_base": f"{gate.url}/v1", "api_key_name": "kvgate"},
        {"model_id": "text", "model_name": "smollm2", "api_base": f"{gate.url}/v1", "api_key_name": "kvgate"}
        | {"completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    (tmp_path / "keys.json").write_text(json.dumps({"kvgate": "sk-demo"}))
    return tmp_path


def llm(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("llm")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "LLM", "PYTHON"))}
    environment = kept | {"LLM_USER_PATH": str(home), "HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [command, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("name", ["gated", "text"])
@pytest.mark.parametrize("streaming", [(), ("--no-stream",)], ids=["stream", "no-stream"])
def test_llm_works_unchanged(gate: RunningGate, llm_home: Path, name: str, streaming: tuple[str, ...]) -> None:
    """Chat and text completion, streamed and not; its own log shows the usage that the gate counted."""
    options = ("-o", "max_tokens", "6", "-o", "temperature", "0")
    ran = llm(llm_home, "-m", name, *options, *streaming, "Say hello, 🦜.")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.strip()
    logged = json.loads(llm(llm_home, "logs", "--json").stdout)
    assert [entry["model"] for entry in logged] == [name]
    requests = gate.log_lines("request")
    assert (requests[-1]["status"], requests[-1]["stream"]) == (200, not streaming)
    assert requests[-1]["used_output_tokens"] <= 6
    assert logged[0]["input_tokens"] in {None, requests[-1]["prompt_tokens"]}


@pytest.mark.parametrize("streaming", [(), ("--no-stream",)], ids=["stream", "no-stream"])
def test_llm_shows_the_sentence_of_an_overflow(llm_home: Path, streaming: tuple[str, ...]) -> None:
    """Its user reads what did not fit and what to do, and a script sees the exit status."""
    ran = llm(llm_home, "-m", "gated", "-o", "max_tokens", "5000", *streaming, "Say hello.")
    assert ran.returncode == 1
    assert f"maximum context length is {SLOT} tokens" in ran.stderr
    assert "5000 for the answer" in ran.stderr
    long = llm(llm_home, "-m", "gated", *streaming, "word " * 800)
    assert long.returncode == 1
    assert "Please shorten the messages" in long.stderr


def test_llm_continues_a_conversation(gate: RunningGate, llm_home: Path) -> None:
    """The second turn carries the first, and is counted with it."""
    assert llm(llm_home, "-m", "gated", "-o", "max_tokens", "4", "Say hello.").returncode == 0
    before = gate.log_lines("request")[-1]["prompt_tokens"]
    assert llm(llm_home, "-c", "-o", "max_tokens", "4", "And again.").returncode == 0
    assert gate.log_lines("request")[-1]["prompt_tokens"] > before


def test_llm_shows_an_unknown_key(llm_home: Path) -> None:
    ran = llm(llm_home, "-m", "gated", "--key", "sk-wrong", "Say hello.")
    assert ran.returncode == 1
    assert "API key is not known here" in ran.stderr


# -- curl


def curl(gate: RunningGate, path: str, *arguments: str, body: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs curl as a script would: the body from standard input, quiet, errors told."""
    if (command := shutil.which("curl")) is None:
        pytest.skip("CURL IS MISSING: its scripts are not shown to work; install curl")
    fixed = [
        command,
        "-q",
        "-sS",
        "--noproxy",
        "*",
        "--max-time",
        str(TIMEOUT_S),
        "-H",
        "Authorization: Bearer sk-demo",
    ]
    return subprocess.run(
        [*fixed, *arguments, "--data-binary", "@-", f"{gate.url}{path}"],
        input=body,
        capture_output=True,
        timeout=TIMEOUT_S + 5,
        check=False,
    )


def asked(**fields: Any) -> bytes:
    return json.dumps(chat("Say hello.", **fields)).encode()


JSON = ("-H", "Content-Type: application/json")


@pytest.mark.parametrize("extra", [JSON, ()], ids=["json", "form"])
def test_curl_chats(gate: RunningGate, extra: tuple[str, ...]) -> None:
    """With the header that everybody writes, and with the one that curl sends where it is forgotten."""
    ran = curl(gate, "/v1/chat/completions", "--fail", *extra, body=asked(max_tokens=4))
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["usage"]["completion_tokens"] <= 4


def test_curl_streams(gate: RunningGate) -> None:
    """`-N`: events as they come, and the end marker."""
    ran = curl(gate, "/v1/chat/completions", "-N", "--fail", *JSON, body=asked(max_tokens=4, stream=True))
    assert (ran.returncode, ran.stderr) == (0, b"")
    events = ran.stdout.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") for event in events[:-1])


def test_curl_waits_for_100_continue(gate: RunningGate) -> None:
    """A large body is sent after the gate has said that it wants it."""
    body = asked(max_tokens=4, metadata={"padding": "x" * 1_500_000})
    expect = ("-H", "Expect: 100-continue", "--expect100-timeout", "20", "-v")
    ran = curl(gate, "/v1/chat/completions", "--fail", *JSON, *expect, "-w", "\n%{time_total}", body=body)
    assert ran.returncode == 0, ran.stderr[-500:]
    assert b"< HTTP/1.1 100 Continue" in ran.stderr
    answer, _, seconds = ran.stdout.rpartition(b"\n")
    assert json.loads(answer)["choices"]
    assert float(seconds) < 15, "it waited for its own timeout"


def test_curl_is_spared_a_body_that_is_too_large(engine: EngineProcess, start_gate: StartGate) -> None:
    """With Expect the refusal comes first, and the body is never sent."""
    gate = start_gate(engine.url, config='[engine]\nkv_topology = "divided"\n[http]\nbody_bytes_max = 2048\n')
    extra = ("-H", "Expect: 100-continue", "--expect100-timeout", "20", "-w", "\n%{http_code} %{size_upload}")
    ran = curl(gate, "/v1/chat/completions", *JSON, *extra, body=asked(metadata="x" * 500_000))
    answer, _, told = ran.stdout.rpartition(b"\n")
    assert told == b"413 0"
    assert json.loads(answer)["error"]["code"] == "request_too_large"


def test_curl_compresses_its_body(gate: RunningGate) -> None:
    """A gzip body is read like any other; the engine itself would answer 415."""
    extra = (*JSON, "-H", "Content-Encoding: gzip")
    ran = curl(gate, "/v1/chat/completions", "--fail", *extra, body=gzip.compress(asked(max_tokens=4)))
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["choices"]
    broken = curl(gate, "/v1/chat/completions", "-w", "\n%{http_code}", *extra, body=gzip.compress(asked())[:-9])
    assert broken.stdout.endswith(b"\n415")


@pytest.mark.parametrize("stream", [False, True])
def test_curl_speaks_http_1_0(gate: RunningGate, stream: bool) -> None:
    """No chunks, no 100; a stream ends with its connection."""
    extra = (*JSON, "--http1.0", "-i", "--fail")
    ran = curl(gate, "/v1/chat/completions", *extra, body=asked(max_tokens=4, stream=stream))
    assert (ran.returncode, ran.stderr) == (0, b"")
    head, _, body = ran.stdout.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0]
    assert b"transfer-encoding" not in head.lower()
    assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"]


def test_curl_sees_an_overflow(gate: RunningGate) -> None:
    """`--fail` gives scripts curl's exit status 22; the body has the code, the figures and the sentence."""
    body = asked(max_tokens=5000)
    failed = curl(gate, "/v1/chat/completions", "--fail", *JSON, body=body)
    assert (failed.returncode, failed.stdout) == (22, b"")
    assert b"400" in failed.stderr
    told = curl(gate, "/v1/chat/completions", "--fail-with-body", *JSON, "-w", "\n%{http_code}", body=body)
    answer, _, status = told.stdout.rpartition(b"\n")
    assert (told.returncode, status) == (22, b"400")
    error = json.loads(answer)["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", SLOT)


@pytest.mark.parametrize("stream", [False, True])
def test_curl_completes_in_llamacpps_own_words(gate: RunningGate, stream: bool) -> None:
    """The README of llama-server, word for word, with a key; and its own overflow error."""
    body = {"prompt": "Building a website can be done in 10 simple steps:", "n_predict": 4, "stream": stream}
    ran = curl(gate, "/completion", "--fail", *JSON, body=json.dumps(body).encode())
    assert (ran.returncode, ran.stderr) == (0, b"")
    if stream:
        events = [json.loads(line[6:]) for line in ran.stdout.split(b"\n\n")[:-1]]
        assert [event["stop"] for event in events][-1] is True
        assert events[-1]["tokens_predicted"] <= 4
    else:
        assert json.loads(ran.stdout)["tokens_predicted"] <= 4
    long = curl(gate, "/completion", *JSON, body=json.dumps({"prompt": "word " * 800}).encode())
    error = json.loads(long.stdout)["error"]
    assert (error["code"], error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", SLOT)


def test_an_answer_without_its_figures_cannot_be_had(gate: RunningGate) -> None:
    """`response_fields` would leave out what tells the end and the cost: both are there, streamed or not."""
    for stream in (False, True):
        body = {
            "prompt": "Once",
            "n_predict": 3,
            "ignore_eos": True,
            "response_fields": ["content"],
            "stream": stream,
        }
        ran = curl(gate, "/completion", "--fail", *JSON, body=json.dumps({**body, "stream": stream}).encode())
        assert ran.returncode == 0
        assert b'"error"' not in ran.stdout
        request = gate.log_lines("request")[-1]
        assert (request["status"], request["reason"], request["used_output_tokens"]) == (200, "", 3)


def test_nothing_is_left_behind(gate: RunningGate) -> None:
    status = gate.wait_until_empty(10)
    assert status["ledger"]["drains_overdue"] == 0
    assert gate.metric("kvgate_count_drift_total") == 0
    assert "sk-demo" not in gate.log_path.read_text()
