"""The benchmarks run; what they measure is for people to read."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import StartEngine

pytestmark = pytest.mark.engine


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
