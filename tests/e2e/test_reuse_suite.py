"""The suite on the real engine: it passes an honest one, and every one that corrupts is caught."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from kvgate.core.profile import KvSettings
from kvgate.core.reuse_cases import NAMES
from kvgate.core.reuse_suite import SUITE_VERSION, Outcome, SuiteResult, Verdict
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.lab.reuse_suite import EngineAccess, SuiteSettings, run_suite
from kvgate.store.local_ledger import LocalLedger
from tests.e2e.ask import chat, post
from tests.e2e.corruptors import (
    AlwaysReuses,
    Behind200,
    Cold,
    Constant,
    DroppedTurn,
    Honest,
    NegativeCount,
    NeighboursNeedle,
    NeverReuses,
    SecondReuse,
    Stale,
    WrongCount,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import StartEngine, StartGate

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

OFF = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots")
"""The flags that docs/reuse.md asks for: reuse is off unless a request asks for it."""

HONEST_RUNS = int(os.environ.get("KVGATE_HONEST_RUNS", "2"))
EVERY_CASE = os.environ.get("KVGATE_SUITE_EVERY_CASE") == "1"


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", "1024", "-np", "2", "--no-kv-unified", *OFF)


@pytest.fixture(scope="module")
def cold() -> Cold:
    return {}


async def suite(url: str, *cases: str, nonce: str | None = None) -> SuiteResult:
    engine = LlamaCpp(url, LlamaCppSettings(KvSettings()), time.monotonic)

    async def nobody() -> int:
        return 0

    try:
        access = EngineAccess(engine, await engine.discover(), LocalLedger(time.monotonic, 0), nobody, time.monotonic)
        return await run_suite(access, SuiteSettings(only=() if EVERY_CASE else cases), nonce=nonce)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("corruptor", "cases"),
    [
        (Stale, ("tails", "churn")),
        (DroppedTurn, ("chain",)),
        (NeighboursNeedle, ("neighbour",)),
        (Behind200, ("deep",)),
        (SecondReuse, ("deep",)),
    ],
)
async def test_an_engine_whose_reuse_changes_answers_is_caught(
    engine: EngineProcess, cold: Cold, corruptor: type[Honest], cases: tuple[str, ...]
) -> None:
    """By its log-probabilities: its counts are those of an engine that notices nothing."""
    async with corruptor(engine.url, cold) as between:
        await between.flush()
        found = await suite(between.url, *cases, nonce="Run 5eed")
    assert between.corrupted
    assert found.verdict is Verdict.FAILED, found
    failed = [case for case in found.cases if case.outcome is Outcome.FAILED]
    sys.stdout.write(f"{corruptor.__name__} {[round(case.difference_nats, 2) for case in failed]}\n")
    assert all(case.difference_nats > found.threshold_nats for case in failed)
    assert all("nats" in case.why for case in failed)


@pytest.mark.parametrize("corruptor", [WrongCount, NegativeCount])
async def test_an_engine_that_does_not_know_what_it_reused_is_caught(
    engine: EngineProcess, cold: Cold, corruptor: type[Honest]
) -> None:
    """Though its answers are right: who miscounts cells will one day take others' for its own."""
    async with corruptor(engine.url, cold) as between:
        await between.flush()
        found = await suite(between.url, "tools", nonce="Run 5eed")
    assert between.corrupted
    assert found.verdict is Verdict.FAILED
    tools = next(case for case in found.cases if case.name == "tools")
    assert "says that it reused" in tools.why


async def test_the_middleman_alone_changes_nothing(engine: EngineProcess, cold: Cold) -> None:
    """What catches the corruptors is what they corrupt."""
    async with Honest(engine.url, cold) as between:
        await between.flush()
        found = await suite(between.url, "tails", "chain", "neighbour", "back", nonce="Run 5eed")
    assert found.verdict is Verdict.PASSED, found


@pytest.mark.parametrize(
    ("engine_kind", "outcome", "sentence"),
    [
        (NeverReuses, Outcome.NO_REUSE, "tokens were reused"),
        (AlwaysReuses, Outcome.UNASKED, "although it was told not to"),
        (Constant, Outcome.BLIND, "to see corruption"),
    ],
)
async def test_an_engine_that_gives_no_evidence_does_not_pass(
    engine: EngineProcess, engine_kind: type[Honest], outcome: Outcome, sentence: str
) -> None:
    async with engine_kind(engine.url) as between:
        found = await suite(between.url, "neighbour")
    assert found.verdict is Verdict.CANNOT_TELL
    case = next(case for case in found.cases if case.name == "neighbour")
    assert case.outcome is outcome
    assert sentence in (found.why or case.why)


@pytest.mark.parametrize("number", range(HONEST_RUNS - 1))
async def test_an_honest_engine_passes(engine: EngineProcess, tmp_path: Path, number: int) -> None:
    """As an operator asks, without a gate: the JSON, the XML for CI, status 0, and reuse pays in the same run."""
    process, answer = await canary_run(
        tmp_path, "--upstream", engine.url, "--json", "--junit", str(tmp_path / "junit.xml")
    )
    assert process == 0, answer
    told = json.loads(answer)
    assert told["verdict"] == "passed"
    assert [case["name"] for case in told["cases"]] == list(NAMES)
    deep = told["cases"][-1]
    assert deep["cached_tokens"] > 3 * 200
    assert told["figures"]["prefill_saved_ratio"] > 0.5
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == (str(len(NAMES)), "0", "0")
    assert not (tmp_path / "kvgate-suite.json").exists()  # it came to its end: nothing is left to go on from
    # With -s, what an honest engine's reuse differs by: the threshold must stay far above it.
    sys.stdout.write(f"{told['noise_nats']:.3f} {[round(case['difference_nats'], 3) for case in told['cases']]}\n")


async def test_through_a_gate_it_comes_last_and_its_report_can_be_pinned(
    engine: EngineProcess, start_gate: StartGate
) -> None:
    """Tenants who keep both slots and the queue busy get every answer; the suite finds its moments between them."""
    log = f'[engine]\nlog = "{engine.log_path}"\n'  # the gate knows it, the command does not
    gate = start_gate(engine.url, tenants={"busy": ""}, config=log)
    (gate.log_path.parent / "kvgate.toml").write_text("")
    directory, at_gate = gate.log_path.parent, ("--config", "kvgate.toml", "--json")
    beside = ("--upstream", engine.url, "--admin", gate.admin_url)
    running = asyncio.create_task(canary_run(directory, *beside, *at_gate))
    statuses = []
    for _ in range(3):
        body = chat("Count to nine.", max_tokens=12)
        answers = await asyncio.gather(*(post(gate.url, body, key="sk-busy") for _ in range(4)))
        statuses += [answer.status for answer in answers]
    status, answer = await running
    assert statuses == [200] * len(statuses)
    assert status == 0, answer
    told = json.loads(answer)
    assert (told["verdict"], told["recorded"]) == ("passed", True)
    shown = await asyncio.to_thread(gate.status)
    assert told["fingerprint"] == shown["engine"]["fingerprint"]
    gate.wait_until_empty(20)
    status, answer = await canary(directory, "status", *at_gate)
    assert [report["passed"] for report in json.loads(answer)["reports"]] == [True]
    status, answer = await canary(directory, "pin", *at_gate)
    assert status == 0, answer
    assert json.loads(answer)["pin"]["suite_version"] == SUITE_VERSION


async def test_on_an_engine_with_its_defaults_it_runs_too(start_engine: StartEngine, tmp_path: Path) -> None:
    """One shared pool and the RAM prompt cache on, as llama.cpp starts without flags."""
    engine = start_engine("-c", "512")
    status, answer = await canary_run(
        tmp_path, "--upstream", engine.url, "--json", "--case", "back", "--case", "tools"
    )
    assert status == 0, answer
    assert [case["outcome"] for case in json.loads(answer)["cases"]] == ["passed", "passed"]


async def test_an_engine_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    status, answer = await canary_run(tmp_path, "--upstream", "http://127.0.0.1:9", "--json")
    assert status == 2
    assert "127.0.0.1:9" in json.loads(answer)["problem"]


async def canary_run(directory: Path, *flags: str) -> tuple[int, str]:
    return await canary(directory, "run", *flags)


async def canary(directory: Path, *flags: str) -> tuple[int, str]:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvgate", "canary", *flags],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )

    done = await asyncio.to_thread(run)
    return done.returncode, done.stdout or done.stderr
