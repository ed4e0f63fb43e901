"""The benchmarks run; what they measure is for people to read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import StartEngine

pytestmark = pytest.mark.engine

BENCH_TITLES = ("Over an engine that costs nothing", "Over a real engine")


def test_the_counting_benchmark_runs(start_engine: StartEngine) -> None:
    """A short one, with every proof in force and all counts alike; no time is asserted."""
    engine = start_engine("-c", "512", "-np", "1")
    command = [sys.executable, "-m", "loadtests.counting", "--upstream", engine.url, "--sizes", "300", "3000"]
    done = subprocess.run([*command, "--rounds", "2"], capture_output=True, text=True, check=False, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")
    for proof in ("bound", "sum", "tokenizer", "engine"):
        assert f"{proof:10} in force" in done.stdout
    header, *rows = done.stdout.splitlines()[-3:]
    assert [len(row.split("|")) for row in rows] == [len(header.split("|"))] * 2


def ran(*command: str, timeout_s: float, stream: str = "stdout") -> str:
    """What it prints, or tells; its exit status must say that all held."""
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout if stream == "stdout" else done.stderr


@pytest.mark.timeout(400)
def test_the_attack_on_a_shared_cache_runs_and_overflows_nothing() -> None:
    """One round over two gates; the bare engine beside them shows what is guarded against."""
    said = ran("loadtests.attack", "--rounds", "1", "--gates", "2", "--asks", "4", timeout_s=380)
    rows = {line.split("  ")[0]: line.split()[-4:] for line in said.splitlines() if line[:6] in {"bare e", "kvgate"}}
    assert rows["kvgate, 2 gates"][:3] == ["4", "0", "0"]
    assert "x that of the client-side limit" in said


@pytest.mark.timeout(400)
def test_chaos_runs_and_leaves_nothing_held() -> None:
    """Three random kills; then the ledger is empty on every gate and every slot idle."""
    said = ran("loadtests.chaos", "--kills", "3", "--gates", "2", timeout_s=380)
    assert "the ledger is empty on every gate and every slot is idle" in said
    assert "0 overflows at the engine" in said


@pytest.mark.timeout(400)
def test_the_flood_against_a_guaranteed_slot_runs() -> None:
    """A short one: everything is answered, and the goal is told beside what was reached; no time is asserted."""
    said = ran("loadtests.fairness", "--asks", "2", "--flood", "2", timeout_s=380)
    assert "requests refused: 0" in said
    assert said.count(" x the goal") == 1


def test_the_benchmark_of_the_ledger_runs() -> None:
    assert "pairs" in ran("loadtests.ledger_pairs", "--pairs", "40", "--waiting", "0,20", timeout_s=150)


def test_the_benchmark_of_the_loop_guard_runs() -> None:
    """Both paces, short; what it measures is for people to read."""
    said = ran("loadtests.loop_guard", "--rounds", "2", "--streams", "2", "--events", "300", timeout_s=150)
    assert [line.split()[0] for line in said.splitlines()] == ["paced", "flat"]
    assert said.count("ratio") == 4
    assert said.count("the guard alone") == 2


@pytest.mark.timeout(400)
def test_the_comparison_of_proxies_runs(tmp_path: Path) -> None:
    """Each proxy that is here answers every load without an error, and has its figures; none is judged."""
    names, markdown = "aiohttp;kvgate, 1 worker", tmp_path / "tables.md"
    said = ran(
        "loadtests.bench", "--quick", "--only", names, "--json", "-", "--markdown", str(markdown), timeout_s=380
    )
    fast, real = (json.loads(said)[title] for title in BENCH_TITLES)
    assert fast["missing"] == {}
    for name in ("direct", *names.split(";")):
        medians = fast["medians"][name]
        assert medians["errors"] == 0
        assert medians["rps_2k"] > 0
        assert medians["flat_chunks"] > 0
    assert fast["medians"]["kvgate, 1 worker"]["cpu_2k"] > 0
    assert all(found["errors"] == 0 and found["tokens_2"] > 0 for found in real["medians"].values())
    assert all(title in markdown.read_text() for title in BENCH_TITLES)


def test_the_benchmark_of_reuse_runs() -> None:
    """Two turns of each conversation: the second one reuses most of the first where reuse is on, and nothing else."""
    said = ran("loadtests.reuse", "--turns", "2", "--words", "5", timeout_s=150)
    rows = [line.split() for line in said.splitlines()[1:]]
    assert [row[:3] for row in rows] == [[on, stride, "2"] for on in ("off", "on") for stride in ("0", "128")]
    reused = [int(row[4].rstrip("%")) for row in rows]
    assert (reused[:2], min(reused[2:]) > 20) == ([0, 0], True)


@pytest.mark.timeout(300)
def test_a_simulation_of_the_measured_engine_runs(start_engine: StartEngine, tmp_path: Path) -> None:
    """A real engine is calibrated, and policies are simulated on one like it; no speed is asserted."""
    engine, saved = start_engine("-c", "1024", "-np", "2", "--no-kv-unified"), tmp_path / "engine.json"
    measure = ("calibrate", engine.url, "--kv", "divided", "--rounds", "1", "--save", str(saved))
    said = ran("loadtests.simulate", *measure, timeout_s=200, stream="stderr")
    took_s, told_s = map(
        float, re.findall(r"8 requests of many sizes took ([\d.]+) s; .* ([\d.]+) s$", said, re.MULTILINE)[0]
    )
    assert 0.1 < told_s / took_s < 10  # a loaded machine is no clock; a wrong unit would show
    found = json.loads(saved.read_text())
    pool, speed = found["pool"], found["speed"]
    assert (pool["slots"], pool["tokens_per_slot"], pool["tokens"], pool["unified"]) == (2, 512, 1024, False)
    assert [at for at, _ in speed["step_s"]] == [0, 1, 2]
    assert speed["prefill_tokens_per_s"] > 0
    assert min(s for _, s in speed["step_s"][1:]) > 0
    simulated = ("overload", "--duration-s", "60", "--engine", str(saved), "--json", "--policies", "fcfs", "vtc")
    ((_, vtc),) = [each["results"] for each in json.loads(ran("loadtests.simulate", *simulated, timeout_s=90))]
    assert vtc["idle_for_nothing_s"] == 0
    assert vtc["gap"] <= vtc["ruling"]["bound"]


def test_an_engine_at_work_is_not_measured(start_engine: StartEngine) -> None:
    """A busy slot would be measured as slowness; the sentence says so."""
    engine = start_engine("-c", "8192", "-np", "1")
    body = json.dumps({"prompt": "Tell me a long story.", "n_predict": 8000, "ignore_eos": True, "stream": True})
    with urllib.request.urlopen(f"{engine.url}/completion", data=body.encode(), timeout=60) as answer:
        assert answer.read(1)
        command = [sys.executable, "-m", "loadtests.simulate", "calibrate", engine.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 2
    assert "1 of 1 slots are busy; measure an engine that nobody else uses" in done.stderr
