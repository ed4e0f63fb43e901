"""`kvgate measure` on real engines: its figures are the engine's, and it compares nothing that it should not."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.commands import Done, kvgate

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import StartEngine

pytestmark = pytest.mark.engine

SMALL = ("--context-tokens", "64")
"""A target that a loaded machine reaches in seconds."""


@pytest.fixture(scope="module")
def divided(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", "512", "-np", "2", "--no-kv-unified", "-lv", "4")


@pytest.fixture(scope="module")
def unified(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", "256", "-np", "2", "--kv-unified", "-ctk", "q8_0", "-ctv", "q8_0", "-lv", "4")


def measure(engine: EngineProcess, *more: str) -> Done:
    return kvgate("measure", "run", "--upstream", engine.url, "--json", *SMALL, *more)


@pytest.fixture(scope="module")
def reports(divided: EngineProcess, unified: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both engines measured, the divided one also without its log and as a page."""
    directory = tmp_path_factory.mktemp("reports")
    page = ("--html", str(directory / "divided.html"))
    for name, engine, more in (("divided", divided, page), ("unified", unified, ())):
        log, output = ("--log", str(engine.log_path)), ("--output", str(directory / f"{name}.json"))
        done = measure(engine, *log, *output, *more)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ok"] is True
        assert "== a short prompt of" in done.stderr
    return directory


def report(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    return found


def test_the_allocation_is_what_the_engine_says(reports: Path, divided: EngineProcess) -> None:
    """KV bytes a token: 30 layers x 192 values x 2 (K and V) x 2 bytes, on this model."""
    found = report(reports, "divided")["allocation"]
    assert (found["kv_mib"], found["kv_bytes_per_token"]) == (11.25, 30 * 192 * 2 * 2)
    assert "size =   11.25 MiB" in divided.log()
    assert (found["n_ctx_slot"], found["total_slots"], found["pool_tokens"]) == (256, 2, 512)
    assert (found["kv_type_k"], found["is_speculating"], found["weights_mib"]) == ("f16", False, 92.1)
    assert report(reports, "unified")["allocation"]["kv_bytes_per_token"] < found["kv_bytes_per_token"]


def test_every_figure_was_measured(reports: Path) -> None:
    """Short, long, parallel and mixed; the memory is the engine's own, found by its port."""
    found = report(reports, "divided")
    assert found["short"]["ttft_s"] > 0
    assert len(found["short"]["tokens_per_second_all"]) == found["workload"]["short_times"]
    assert found["long_prefill"]["prompt_tokens"] == 48
    assert found["long_generation"]["output_tokens"] == found["workload"]["long_output_tokens"]
    assert len(found["long_generation"]["parts"]) > 5
    assert all(mib > 50 for _, mib in found["long_generation"]["memory"])
    assert found["long_generation"]["memory"]
    assert [run["at_once"] for run in found["parallel_control"]["runs"]] == [1, 2]
    assert found["parallel_control"]["desk_tokens"] == 256
    assert found["production"]["requests"] == 4


def test_unequal_desks_are_not_compared(reports: Path) -> None:
    """On a shared pool two at once have half of what one alone has; the flags that make desks equal are named."""
    refused = report(reports, "unified")["parallel_control"]
    assert set(refused) == {"refused"}
    assert "unequal desks: alone a request may use 256 tokens, 2 at once 128 each" in refused["refused"]
    assert "-c 512 -np 2 --no-kv-unified" in refused["refused"]


def test_the_page_has_the_plots(reports: Path) -> None:
    page = (reports / "divided.html").read_text()
    assert page.count("<svg") >= 5
    assert "SmolLM2" in page


def test_a_report_compares_with_itself_and_not_with_another_engine(reports: Path) -> None:
    """Exit 0 and figures; exit 1, no figures, and the runs that would prove something."""
    one, other = str(reports / "divided.json"), str(reports / "unified.json")
    same = kvgate("measure", "compare", one, one)
    assert same.returncode == 0
    assert same.stdout.startswith("fingerprints: the same\nnothing changed\n")
    different = kvgate("measure", "compare", one, other, "--json")
    assert different.returncode == 1
    found = different.json
    assert (found["same_fingerprint"], found["figures"]) == (False, [])
    assert {one["name"] for one in found["variables"]} == {"engine.kv_type", "engine.topology"}
    assert "proves nothing" in found["refused"]
    assert len(found["to_do"]) == 2


def test_without_a_log_the_topology_must_be_said(divided: EngineProcess) -> None:
    """The control is refused, with what to give; the weights are told by HTTP."""
    done = measure(divided)
    assert done.returncode == 0, done.stderr
    found = done.json
    assert "kvgate probe --topology" in found["parallel_control"]["refused"]
    assert (found["allocation"]["kv_mib"], found["allocation"]["weights_source"]) == (None, "models")
    assert found["engine"]["kv_type"] == "unknown"


def test_what_cannot_be_measured_is_exit_2(divided: EngineProcess, tmp_path: Path) -> None:
    """Another start's log, a target that no slot has, nobody there, a file that is no report."""
    log = tmp_path / "other.log"
    log.write_text(divided.log().replace("n_slots = 2", "n_slots = 6"))
    wrong = kvgate("measure", "run", "--upstream", divided.url, "--log", str(log))
    far = kvgate("measure", "run", "--upstream", divided.url, "--context-tokens", "100000")
    nobody = kvgate("measure", "run", "--upstream", "http://127.0.0.1:1")
    (tmp_path / "x.json").write_text("{}")
    no_report = kvgate("measure", "compare", str(tmp_path / "x.json"), str(tmp_path / "x.json"))
    gone = kvgate("measure", "compare", str(tmp_path / "y.json"), str(tmp_path / "x.json"))
    nowhere = kvgate("measure", "run", "--upstream", divided.url, "--output", str(tmp_path / "no" / "a.json"))
    assert "== " not in nowhere.stderr, "it measured for minutes, and then could not write"
    for done, says in (
        (nowhere, "No such file"),
        (wrong, "of another start"),
        (far, "more than a slot has (256)"),
        (nobody, "cannot be reached"),
        (no_report, "no engine and no workload"),
        (gone, "cannot be read"),
    ):
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr


def test_a_busy_engine_is_not_measured(divided: EngineProcess) -> None:
    body = {"prompt": "Once", "n_predict": 200, "ignore_eos": True, "stream": True}
    asked = urllib.request.Request(f"{divided.url}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.readline()
        done = measure(divided)
    assert done.returncode == 2
    assert "is busy" in done.stderr
