"""The development engine is llama.cpp's own server: its flags mean what llama-server's mean."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.lab.engine_process import EngineFailed, EngineProcess
from kvgate.lab.fetch import fetch_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

ONE_THREAD = ("-t", "1")
"""Two threads that wait for each other by spinning are 60 times slower where anything else needs a core."""

CHAT = {"messages": [{"role": "user", "content": "Name the four seasons of the year, in order."}], "max_tokens": 4}


@pytest.fixture(scope="module")
def model() -> str:
    return str(fetch_model())


@pytest.fixture(scope="module")
def divided(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine for the tests that only look at it: 8192 / 6, prefix reuse off, /slots off."""
    arguments = ["-m", model, "-c", "8192", "-np", "6", "-lv", "4", "--alias", "small", *ONE_THREAD]
    arguments += ["--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots", "--no-slots"]
    arguments += ["-ctk", "q8_0", "-ctv", "f16"]
    with EngineProcess(arguments, log_path=tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine


def ask(engine: EngineProcess, path: str, body: object = None) -> tuple[int, Any]:
    line = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    with contextlib.closing(line):
        line.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = line.getresponse()
        return answer.status, json.load(answer)


def call(engine: EngineProcess, path: str, body: object = None) -> Any:
    status, answer = ask(engine, path, body)
    assert status == 200, answer
    return answer


def slots_line(engine: EngineProcess) -> str:
    (line,) = [line for line in engine.log().splitlines() if "n_slots = " in line]
    return line.partition("initializing, ")[2]


def cached_tokens(engine: EngineProcess) -> list[int]:
    """What two identical requests, one after the other, were told of reuse."""
    usages = [call(engine, "/v1/chat/completions", CHAT)["usage"] for _ in range(2)]
    return [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]


def test_dividing_8192_by_6_gives_each_slot_1536(divided: EngineProcess) -> None:
    """The engine pads 1365 to 1536, and says the same over HTTP and in its log."""
    props = call(divided, "/props")
    assert props["total_slots"] == 6
    assert props["default_generation_settings"]["n_ctx"] == 1536
    assert slots_line(divided) == "n_slots = 6, n_ctx_slot = 1536, kv_unified = 'false'"


def test_kv_precision_flags_reach_the_cache(divided: EngineProcess) -> None:
    (line,) = [line for line in divided.log().splitlines() if "llama_kv_cache: size" in line]
    assert "K (q8_0):" in line
    assert "V (f16):" in line


def test_the_alias_is_the_models_name(divided: EngineProcess) -> None:
    assert [model["id"] for model in call(divided, "/v1/models")["data"]] == ["small"]


def test_reuse_switched_off_reuses_nothing(divided: EngineProcess) -> None:
    """`--no-cache-prompt --cache-ram 0 --no-cache-idle-slots`: identical requests share no token."""
    assert cached_tokens(divided) == [0, 0]


def test_slots_switched_off_answers_501(divided: EngineProcess) -> None:
    assert ask(divided, "/slots")[0] == 501


def test_without_np_four_slots_share_one_pool(model: str, tmp_path: Path) -> None:
    """And /slots is on, reuse is on, /metrics and POST /props are off: llama-server's defaults."""
    with EngineProcess(["-m", model, "-c", "2048", *ONE_THREAD], log_path=tmp_path / "engine.log") as engine:
        assert slots_line(engine) == "n_slots = 4, n_ctx_slot = 2048, kv_unified = 'true'"
        assert [slot["n_ctx"] for slot in call(engine, "/slots")] == [2048] * 4
        assert cached_tokens(engine)[1] > 0
        assert [ask(engine, "/metrics")[0], ask(engine, "/props", {})[0]] == [501, 501]


def test_restart_keeps_the_port_after_an_end_of_either_kind(model: str, tmp_path: Path) -> None:
    """And `--kv-unified-per-slot` caps each slot below the pool; the log continues, each start's part its own."""
    engine = EngineProcess(["-m", model, "-c", "512", "-np", "1", *ONE_THREAD], log_path=tmp_path / "engine.log")
    with engine:
        url = engine.url
        engine.restart(["-m", model, "-np", "3", "--kv-unified", "--kv-unified-per-slot", "700", *ONE_THREAD])
        assert slots_line(engine) == "n_slots = 3, n_ctx_slot = 700, kv_unified = 'true'"
        assert call(engine, "/props")["default_generation_settings"]["n_ctx"] == 700
        engine.kill()
        assert engine.pid is None
        engine.start()
        assert engine.url == url
        assert engine.log_path.read_text(errors="replace").count("n_slots = ") == 3


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    engine = EngineProcess(["-m", str(tmp_path / "none.gguf")], log_path=tmp_path / "engine.log")
    with pytest.raises(EngineFailed, match=r"there is no model file .*kvgate\.lab\.fetch"):
        engine.start()


def test_a_file_that_is_no_model_ends_the_command_with_1(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    command = [sys.executable, "-m", "kvgate.lab.llama_server", "-m", str(tmp_path / "text.gguf"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "llama.cpp did not start" in done.stderr
