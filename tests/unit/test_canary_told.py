"""How a run of the suite is told: people, programs and CI hear the same."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from kvgate.cli import canary_run, main
from kvgate.cli.canary_told import as_json, exit_status, junit, lines
from kvgate.cli.progress import ProgressBar
from kvgate.core.reuse_suite import CaseResult, Outcome, SuiteResult

if TYPE_CHECKING:
    from pathlib import Path

PASSED = CaseResult(
    "deep", Outcome.PASSED, "", 0.25, 8.0, 1000, 900, cold_prefill_s=4.0, prefill_s=0.4, cold_s=5.0, duration_s=1.0
)
FAILED = CaseResult("tails", Outcome.FAILED, "second tail: off by 3.00 nats", 3.0, 8.0, 100, 90, 1.0, 0.5, 1.0, 0.5)
BLIND = CaseResult("tools", Outcome.BLIND, "moves by 0.1", 0.1, 0.1, 100, 90, 1.0, 0.5, 1.0, 0.5)
UNASKED = CaseResult("churn", Outcome.UNASKED, "the run ended before it")


def result(*cases: CaseResult, why: str = "") -> SuiteResult:
    return SuiteResult("f00", "i", None, 512, 270, 0.1, 1.0, cases, why)


@pytest.mark.parametrize(
    ("found", "status", "ok", "words"),
    [
        (result(PASSED), 0, True, "passed: every case ran, could have seen corruption, and saw none"),
        (
            result(PASSED, FAILED, BLIND),
            1,
            False,
            "failed: reuse gives other answers on this engine (tails): leave it",
        ),
        (result(PASSED, BLIND), 2, None, "cannot tell: some cases show neither"),
        (result(PASSED, UNASKED, why="it went away"), 2, None, "cannot tell: it went away"),
    ],
)
def test_status_json_and_the_last_line_say_the_same(
    found: SuiteResult, status: int, ok: bool | None, words: str
) -> None:
    assert exit_status(found) == status
    assert json.loads(as_json(found, recorded=False))["ok"] is ok
    assert lines(found)[-1].startswith(words)


def test_the_table_has_ratios_and_the_sentences_below_it() -> None:
    told = lines(result(PASSED, FAILED, UNASKED))
    assert told[0].split() == ["CASE", "RESULT", "DIFFERENCE", "CONTROL", "REUSED", "PREFILL", "TIME"]
    assert told[1].split() == ["deep", "passed", "0.25", "8.00", "90%", "0.10", "0.20"]
    assert told[3].split() == ["churn", "not", "asked", "-", "-", "-", "-", "-"]
    assert told[4] == "tails: second tail: off by 3.00 nats"
    assert "with reuse 90% of the prompts was not computed again" in "\n".join(told)


def test_junit_tells_corruption_from_what_could_not_be_said() -> None:
    root = ElementTree.fromstring(junit(result(PASSED, FAILED, BLIND, UNASKED)))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "1", "2")
    kinds = {case.get("name"): [child.tag for child in case] for case in root}
    assert kinds == {"deep": [], "tails": ["failure"], "tools": ["error"], "churn": ["error"]}


def test_the_json_has_every_case_with_its_figures() -> None:
    told = json.loads(as_json(result(PASSED), recorded=True))
    assert told["cases"][0]["cached_tokens"] == 900
    assert told["figures"]["prefill_saved_ratio"] == 0.9
    assert told["figures"]["latency_ratio"] == 0.2
    assert told["figures"]["prefill_time_ratio"] == 0.1
    assert (told["version"], told["recorded"]) == (1, True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_over_itself_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with ProgressBar("suite") as bar:
        bar.show(0.5, "deep", 12)
        bar.say("a word")
        bar.show(1.0, "deep", 0)
    written = screen.getvalue()
    assert "suite [###############...............]  50% deep, 12 s left" in written
    assert "\nsuite: a word\n" in written.replace("\r", "\n").replace(" \n", "\n")
    assert written.endswith("\r")


def test_where_there_is_no_terminal_each_step_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("suite") as bar:
        for ratio in (0.1, 0.2, 0.3):
            bar.show(ratio, "deep", 1)
    assert capsys.readouterr().err == "suite: 10%, deep\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--upstream", "nonsense"], "engine.url must look like"),
        ([], "no engine: give --upstream"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_what_cannot_be_asked_is_status_2_with_what_to_do(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["canary", "run", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--time-max-s", "0"], ["--depth-tokens", "100"], ["--case", "nonsense"]])
def test_a_flag_out_of_range_is_told(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["canary", "run", "--upstream", "http://127.0.0.1:9", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "fingerprint"),
    [
        ({"fingerprint": "f01", "profile": {"instance": "i"}}, "f01"),
        ({"fingerprint": "f01", "profile": {"instance": "another"}}, "f00"),
        (None, "f00"),
    ],
)
def test_the_gates_fingerprint_is_taken_for_the_same_process_alone(
    engine: dict[str, Any] | None, fingerprint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may know the engine's log; of another process it knows nothing that counts here."""
    monkeypatch.setattr(canary_run, "look", lambda _: {"engine": engine})
    found = canary_run._as_gate_sees_it(result(PASSED), "http://gate", must=False)
    assert found.fingerprint == fingerprint
    if fingerprint == "f00":
        with pytest.raises(ValueError, match="another engine process"):
            canary_run._as_gate_sees_it(result(PASSED), "http://gate", must=True)
