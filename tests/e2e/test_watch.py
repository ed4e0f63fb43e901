"""`make watch`: the alert of a refused request fires in a Prometheus beside a gate, as the quickstart says."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.ask import chat, post
from tests.e2e.ports import free_port
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.conftest import StartGate

WAIT_S = 60.0


@contextmanager
def watching(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "deploy.watch", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=40)
        assert not answers(flags)


def answers(flags: tuple[str, ...]) -> bool:
    """Whether its Prometheus is still there."""
    host, port = flags[flags.index("--listen") + 1].split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def firing(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=20) as answer:
        alerts: list[dict[str, Any]] = json.load(answer)["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


async def test_a_refused_overflow_fires_its_alert(start_gate: StartGate, tmp_path: Path) -> None:
    """The very first one: its counter had no sample before."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus): nothing watched the gate")
    async with FakeEngine(n_ctx=512) as engine:
        gate = await asyncio.to_thread(start_gate, engine.url)
        listen = f"127.0.0.1:{free_port()}"
        flags = ("--admin", gate.admin_url.removeprefix("http://"), "--listen", listen, "--data-dir", str(tmp_path))
        with watching(*flags) as process:
            assert process.stdout is not None
            line = ""
            while "/alerts" not in line:
                line = await asyncio.to_thread(process.stdout.readline)
                assert line, process.stderr and process.stderr.read()
            assert f"http://{listen}/alerts" in line
            await asyncio.sleep(5)  # it has looked at the gate before
            assert (await post(gate.url, chat(max_tokens=100_000))).status == 400
            deadline = time.monotonic() + WAIT_S
            while "KvgateOverflowsRejected" not in await asyncio.to_thread(firing, f"http://{listen}"):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("flags", "sentence"), [(("--admin", "127.0.0.1:1"), "no gate answers"), (("--nonsense",), "unrecognized")]
)
def test_what_is_missing_is_said(flags: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None and sentence == "no gate answers":
        sentence = "there is no prometheus here"
    command = [sys.executable, "-m", "deploy.watch", *flags, "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert sentence in done.stderr
