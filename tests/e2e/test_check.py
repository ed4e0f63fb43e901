"""`kvgate check` on real engines, their logs and command lines: what it finds, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.commands import Done, kvgate

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import StartEngine

pytestmark = pytest.mark.engine

EVERYTHING_SAID = (
    *("-c", "1024", "-np", "2", "--no-kv-unified", "-ctk", "f16", "-ctv", "f16", "-lv", "4"),
    *("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots"),
)


@pytest.fixture(scope="module")
def careful(start_engine: StartEngine) -> EngineProcess:
    """An engine whose operator chose everything."""
    return start_engine(*EVERYTHING_SAID)


@pytest.fixture(scope="module")
def careless(start_engine: StartEngine) -> EngineProcess:
    """An engine whose operator gave a context and no more."""
    return start_engine("-c", "1024", "-lv", "4")


def check(*arguments: str, stdin: str = "") -> Done:
    return kvgate("check", *arguments, stdin=stdin)


def broken(done: Done) -> set[str]:
    return {finding["rule"] for finding in done.json["findings"]}


def command_of(engine: EngineProcess) -> list[str]:
    return ["llama-server", *engine.arguments]


def test_a_healthy_deployment_passes_by_all_three_sources(careful: EngineProcess, tmp_path: Path) -> None:
    """Engine, log and command line of the same start: exit 0, every rule judged."""
    junit = tmp_path / "check.xml"
    sources = ["--upstream", careful.url, "--log", str(careful.log_path)]
    asked = ["--context-tokens-min", "512", "--tenants", "3", "--json", "--junit", str(junit)]
    done = check(*asked, *sources, "--", *command_of(careful))
    assert done.returncode == 0, done.stderr
    found = done.json
    assert (found["ok"], found["findings"], found["not_judged"]) == (True, [], [])
    assert (found["n_ctx_slot"], found["topology"], found["pool_tokens"]) == (512, "divided", 1024)
    assert 'failures="0"' in junit.read_text()


@pytest.mark.parametrize("source", ["engine", "log", "stdin", "command", "line"])
def test_each_source_alone_fails_a_slot_that_is_too_small(careful: EngineProcess, source: str) -> None:
    """Exit 1, and the sentence that says what to set: context = slots x what a slot needs."""
    arguments, stdin = ["--context-tokens-min", "513"], ""
    match source:
        case "engine":
            arguments += ["--upstream", careful.url]
        case "log":
            arguments += ["--log", str(careful.log_path)]
        case "stdin":
            arguments, stdin = [*arguments, "--log", "-"], careful.log()
        case "command":
            arguments += ["--", *command_of(careful)]
        case "line":
            arguments += ["--command", " ".join(command_of(careful))]
    done = check(*arguments, stdin=stdin)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("error slot-context: n_ctx_slot = 512 tokens")
    assert "-c 1026 -np 2 (context = slots x tokens per slot: 2 x 513)" in done.stdout


def test_an_engine_with_a_key_of_its_own_is_asked_with_it(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the check cannot tell; the key itself stands in no argument."""
    engine = start_engine("-c", "256", "-np", "1", "--api-key", "sk-engine")
    asked = ["--context-tokens-min", "256", "--upstream", engine.url]
    assert check(*asked).returncode == 2
    monkeypatch.setenv("ENGINE_KEY", "sk-engine")
    assert check(*asked, "--upstream-key-env", "ENGINE_KEY").returncode == 0


def test_the_defaults_of_llama_server_fail(careless: EngineProcess) -> None:
    """Four slots that promise 1024 tokens each out of 1024, and caches that nobody chose."""
    log, command = ["--log", str(careless.log_path)], ["--", *command_of(careless)]
    asked = ["--context-tokens-min", "1024", "--tenants", "2", "--json"]
    by_log = check(*asked, *log)
    assert by_log.returncode == 1
    assert broken(by_log) == {"pool", "parallel", "ram-cache", "idle-slots-cache"}
    by_command = check(*asked, *command)
    assert broken(by_command) == broken(by_log) | {"kv-precision", "reuse"}
    by_both = check(*asked, *log, *command, "--upstream", careless.url)
    assert broken(by_both) == broken(by_command)


def test_what_is_acknowledged_does_not_fail(careless: EngineProcess) -> None:
    """The operator's word, by the rule's name, and the gate in front of a shared pool is a reason for it."""
    asked = ["--context-tokens-min", "1024", "--log", str(careless.log_path)]
    done = check(*asked, "--acknowledge", "pool", "--acknowledge", "parallel", "--github")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("::notice title=kvgate check%3A ") == 2


def test_the_command_line_of_a_larger_start_is_noticed(careful: EngineProcess) -> None:
    """As many slots, and four times the context: written down, and never restarted."""
    command = [word if word != "1024" else "4096" for word in command_of(careful)]
    for source in (["--upstream", careful.url], ["--log", str(careful.log_path)]):
        done = check("--context-tokens-min", "512", "--json", *source, "--", *command)
        assert (done.returncode, broken(done)) == (1, {"sources-disagree"})


def test_a_reader_that_has_read_enough_is_no_fault() -> None:
    """`kvgate check ... | head -0`: no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvgate", "check", "--context-tokens-min", "1", "--", "llama-server"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_starts_log_is_noticed(careful: EngineProcess, careless: EngineProcess) -> None:
    done = check("--context-tokens-min", "1", "--upstream", careful.url, "--log", str(careless.log_path), "--json")
    assert done.returncode == 1
    assert "sources-disagree" in broken(done)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--upstream", "http://127.0.0.1:1"], "cannot be reached"),
        (["--log", "/nowhere/engine.log"], "No such file"),
        (["--log", "-"], "no start that was completed"),
        (["--command", " "], "is empty"),
        (["--", "llama-server", "-c", "many"], "takes a number"),
        ([], "nothing to look at"),
    ],
    ids=str,
)
def test_what_cannot_be_told_is_neither_right_nor_wrong(arguments: list[str], says: str) -> None:
    """Exit 2, and what to give instead."""
    done = check("--context-tokens-min", "1", *arguments, stdin="")
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
