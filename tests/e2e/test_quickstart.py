"""docs/quickstart.md, its own lines in its own order, as a newcomer would paste them; on other ports alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0


def blocks() -> list[tuple[str, str]]:
    """Language and text of each."""
    text = (ROOT / "docs/quickstart.md").read_text()
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@contextmanager
def running(command: list[str], where: Path, word: str) -> Iterator[None]:
    """A command of another terminal, from the line with that word on."""
    log = where / f"{command[2]}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=where, stdout=out, stderr=out, env=environment())
    try:
        deadline = time.monotonic() + WAIT_S
        while word not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(40)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def paste(lines: str, where: Path, ports: dict[str, int]) -> str:
    """What a shell answers to these lines."""
    for port, other in ports.items():
        lines = lines.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
    lines = lines.replace("kvgate explain ", f"kvgate explain --admin http://127.0.0.1:{ports['8601']} ")
    done = subprocess.run(
        ["bash", "-c", lines],
        cwd=where,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.stdout


def test_a_newcomer_gets_from_nothing_to_an_alert_by_the_quickstart_alone(tmp_path: Path) -> None:
    """A tenant with a Quota, a request that is answered, a 429, a refused overflow, its arithmetic, its alert."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus): the quickstart's last step needs it")
    ports = {port: free_port() for port in ("8600", "8601", "9090")}
    installed = tmp_path / ".venv/bin/kvgate"
    installed.parent.mkdir(parents=True)
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvgate "$@"\n')
    installed.chmod(0o700)
    shown = blocks()
    (team,) = (text for language, text in shown if language == "toml")
    (tmp_path / "team.toml").write_text(team)
    key, answered, overflow, explain, alerts, check = (text for language, text in shown if language == "sh")
    listen, admin, watch = (f"127.0.0.1:{port}" for port in ports.values())
    gate = [sys.executable, "-m", "kvgate.cli.quickstart", "--listen", listen, "--admin-listen", admin]
    with running(gate, tmp_path, "ask for more than fits"):
        said = paste("\n".join((key, "sleep 1.5", answered)), tmp_path, ports)
        assert "HTTP/1.1 200" in said
        for header in ("x-kvgate-verdict: admit", "x-kvgate-usable-generation: ", "x-kvgate-count: "):
            assert header in said
        others = paste("\n".join((key, "sleep 1.5", *[answered] * 6, overflow, explain)), tmp_path, ports)
        assert re.findall(r"^HTTP/1.1 (\d+)", others, re.MULTILINE)[-2:] == ["429", "400"]
        assert "retry-after: " in others
        assert "context_length_exceeded" in others
        assert re.search(r"^tenant +context_tokens_max: 512 .*<- binds$", others, re.MULTILINE)
        assert "would fit  an output limit of at most" in others
        prometheus = [sys.executable, "-m", "deploy.watch", "--admin", admin, "--listen", watch]
        with running(prometheus, tmp_path, "/alerts"):
            deadline = time.monotonic() + WAIT_S
            while ("KvgateOverflowsRejected", "team", "firing") not in firing(paste(alerts, tmp_path, ports)):
                assert time.monotonic() < deadline
                time.sleep(0.5)
    said = paste("PATH=$PWD/.venv/bin:$PATH\n" + check, tmp_path, ports)
    assert "n_ctx_slot = 1365 tokens" in said


def firing(answer: str) -> set[tuple[str, str, str]]:
    found: list[dict[str, Any]] = json.loads(answer)["data"]["alerts"]
    return {(one["labels"]["alertname"], one["labels"].get("tenant", ""), one["state"]) for one in found}
