"""`kvgate canary`: nothing is pinned without evidence, and every answer can be acted on."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.cli import main
from kvgate.cli.canary_run import Done
from kvgate.core.canary import Figures, SuiteReport
from kvgate.core.reuse_suite import CaseResult, Outcome, SuiteResult, result_of
from kvgate.core.tenant import ReusePolicy, Tenant
from kvgate.store.canary import CanaryStore
from kvgate.store.client import connect
from kvgate.store.errors import StoreUnavailable
from kvgate.store.registry import DeclaredTenant, Registry
from tests.unit.doubles import profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvgate.core.profile import EngineProfile
    from kvgate.lab.reuse_suite import Notes

PASSED = SuiteReport("f1e2", "<one>", 3, True, 12, 0, Figures(0.01, 0.02, 0.75, 0.5), 1_700_000_000.0)
RESULT = result_of(profile(), depth_tokens=1, noise_nats=0.0, cases=[CaseResult("chain", Outcome.PASSED)])
FAILED = replace(PASSED, fingerprint="dead", passed=False, cases_failed=2)


@pytest.fixture
def store(server: str) -> str:
    """Empty but for two tenants, one of them a canary."""

    async def fill() -> None:
        async with connect(server) as client:
            await client.flushall()
            tenants = [Tenant("acme", reuse=ReusePolicy.CANARY), Tenant("beta")]
            await Registry(client).apply({one.name: DeclaredTenant(one) for one in tenants}, "file")

    asyncio.run(fill())
    return server


def report(store: str, *reports: SuiteReport) -> None:
    async def write() -> None:
        async with connect(store) as client:
            for one in reports:
                await CanaryStore(client).report(one)

    asyncio.run(write())


class Canary:
    """The command at one store."""

    def __init__(self, store: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._store = store
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        status = main(["canary", *arguments, "--store", self._store])
        said = self._capsys.readouterr()
        return status, said.out, said.err

    def json(self, *arguments: str) -> Any:
        status, out, err = self(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def canary(store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Canary:
    """No gate answers beside it."""

    def nobody(admin: str) -> Any:
        raise ValueError(admin)

    monkeypatch.setattr("kvgate.cli.canary_pins.look", nobody)
    return Canary(store, capsys)


def test_nothing_is_pinned_without_a_suite_that_passed(canary: Canary, store: str) -> None:
    """1, and what to do or which engine was meant."""
    status, _, err = canary("pin")
    assert (status, "kvgate canary run" in err) == (1, True)
    report(store, FAILED)
    status, _, err = canary("pin")
    assert (status, "2 of 12 failed" in err) == (1, True)
    status, _, err = canary("pin", "daed")
    assert (status, "did you mean dead" in err) == (1, True)
    assert canary.json("status")["pins"] == []


def test_the_latest_run_counts(canary: Canary, store: str) -> None:
    """An engine whose latest run failed is not pinned by an earlier one."""
    report(store, PASSED, replace(PASSED, passed=False, cases_failed=1))
    status, _, err = canary("pin", "f1e2")
    assert (status, "1 of 12 failed" in err) == (1, True)


def test_a_pin_is_told_with_its_evidence_and_taken_away_with_its_reason(canary: Canary, store: str) -> None:
    report(store, PASSED)
    status, out, err = canary("pin")
    assert status == 0
    assert "pinned: engine f1e2, by version 3 of the suite, which finished 2023-11-14T22:13:20Z" in out
    assert "prefill saved 75%, time 50% of cold, difference 0.02 nats at a noise of 0.01" in out
    assert "dedicated" in err
    answer = canary.json("status")
    assert [pin["instance"] for pin in answer["pins"]] == ["<one>"]
    status, _, err = canary("unpin", "f2")
    assert (status, "is not pinned" in err) == (1, True)
    status, out, _ = canary("unpin", "--why", "an exercise")
    assert (status, "unpinned: f1e2" in out) == (0, True)
    assert canary("unpin")[1] == "nothing was pinned\n"
    event = canary.json("status")["events"][0]
    assert (event["what"], event["subject"], event["why"]) == ("unpin", "f1e2", "an exercise")


def test_a_pin_that_changes_nothing_says_so(canary: Canary, store: str) -> None:
    """The process has served others: it needs a restart, and the suite again."""

    async def serve_everybody() -> None:
        async with connect(store) as client:
            await CanaryStore(client).note_served("<one>", frozenset({"*"}))

    report(store, PASSED)
    assert canary.json("pin")["strangers"] == []
    asyncio.run(serve_everybody())
    status, out, err = canary("pin")
    assert (status, "pinned: engine f1e2" in out) == (0, True)
    assert "reuse stays off: this engine process has served everybody off the allowlist" in err
    assert "within a second" not in err


@pytest.mark.parametrize(("engine", "is_on"), [("f1e2 <one>", True), ("f1e2 <two>", False), ("f3 <two>", True)])
def test_a_pin_of_a_process_that_is_gone_says_so(
    canary: Canary, store: str, engine: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a gate of this configuration answers it is known; a gate of another engine says nothing of it."""
    fingerprint, instance = engine.split()
    seen = {"engine": {"fingerprint": fingerprint, "profile": {"instance": instance}}}
    monkeypatch.setattr("kvgate.cli.canary_pins.look", lambda _: seen)
    report(store, PASSED)
    status, _, err = canary("pin")
    assert status == 0
    assert ("within a second" in err, "another engine process" in err) == (is_on, not is_on)


def test_the_allowlist_takes_tenants_that_there_are(canary: Canary) -> None:
    status, _, err = canary("widen", "beta", "bata")
    assert (status, "there is no tenant 'bata'; did you mean beta?" in err) == (1, True)
    assert canary.json("widen", "beta") == {"ok": True, "changed": 1, "widened": ["beta"]}
    status, out, err = canary("widen", "beta", "acme", "--remove")
    assert (status, "1 tenant taken off the allowlist; widened to: nobody" in out) == (0, True)
    assert "by their own setting" in err
    assert "acme" in err


def test_status_shows_all_of_it(canary: Canary, store: str) -> None:
    """For people too: pins, who is on the list, the latest runs and what changed."""
    status, out, err = canary("status")
    assert (status, "no engine is pinned" in out, "kvgate canary run" in err) == (0, True, True)
    report(store, FAILED, PASSED)
    canary("pin")
    canary("widen", "beta")
    status, out, err = canary("status")
    assert (status, err) == (0, "")
    for said in ("f1e2", "2 of 12 failed", "passed", 'acme (reuse = "canary")', "widened:   beta", "widen"):
        assert said in out


@pytest.mark.parametrize(
    ("option", "path", "why"),
    [("--junit", "gone/report.xml", "No such file"), ("--junit", ".", "directory"), ("--state", ".", "directory")],
)
def test_what_cannot_be_written_is_told_before_the_engine_is_asked(
    option: str, path: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after minutes of a run whose result is lost with it."""
    monkeypatch.setattr("kvgate.cli.canary_run._run", None)
    assert main(["canary", "run", "--upstream", "http://127.0.0.1:9", option, path]) == 2
    said = capsys.readouterr()
    assert (said.out, why in said.err, path in said.err) == ("", True, True)


def test_a_report_that_cannot_be_written_does_not_lose_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is told first; 2, since CI looks for the file."""

    async def done(options: Any) -> Done:
        options.junit.mkdir()
        return Done(RESULT, [])

    monkeypatch.setattr("kvgate.cli.canary_run._run", done)
    given = ["--upstream", "http://127.0.0.1:9", "--state", str(tmp_path / "s"), "--junit", str(tmp_path / "r.xml")]
    assert main(["canary", "run", *given]) == 2
    said = capsys.readouterr()
    assert ("suite version" in said.out, "r.xml cannot be written" in said.err) == (True, True)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_store_that_is_out_at_the_end_does_not_lose_the_result(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, 2 says that it is not on record, and what was found is kept for the next run."""
    state = tmp_path / "state.json"

    async def report(_: SuiteResult) -> None:
        raise StoreUnavailable("the store does not answer")

    class Engine:
        async def discover(self) -> EngineProfile:
            return profile()

    @asynccontextmanager
    async def way(_: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(engine=Engine(), ledger=None, waiting=None, admin=None, report=report)

    async def suite(*_: object, notes: Notes, keep: Callable[[Notes], None], **__: object) -> SuiteResult:
        notes.cases["chain"] = RESULT.cases[0]
        keep(notes)
        return RESULT

    monkeypatch.setattr("kvgate.cli.canary_run._way", way)
    monkeypatch.setattr("kvgate.cli.canary_run.run_suite", suite)
    given = ["--upstream", "http://127.0.0.1:9", "--state", str(state), *(["--json"] if as_json else [])]
    assert main(["canary", "run", *given]) == 2
    said = capsys.readouterr()
    assert ("passed" in said.out, "not on record: the store does not answer" in said.err) == (True, True)
    assert "the next run on this engine process goes on from there" in said.err
    assert "chain" in state.read_text()
