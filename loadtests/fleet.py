"""What the long runs are run on: a real engine, several gates over one store, and clients that add nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from kvgate.lab.engine_process import EngineProcess
from kvgate.lab.fetch import fetch_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Self

START_TIMEOUT_S = 90.0
CHAT = "/v1/chat/completions"


@dataclass
class GateProcess:
    """`kvgate serve` in a process of its own; it keeps its addresses over restarts."""

    directory: Path
    arguments: Sequence[str]
    url: str = ""
    admin_url: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it listens."""
        log_path = self.directory / "gate.log"
        before = log_path.stat().st_size if log_path.exists() else 0
        listen, admin = (url.removeprefix("http://") or "127.0.0.1:0" for url in (self.url, self.admin_url))
        command = [sys.executable, "-m", "kvgate", "serve", *self.arguments, "--listen", listen]
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--admin-listen", admin], cwd=self.directory, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in log_path.read_bytes()[before:].splitlines():
                if b'"event": "listening"' in line:
                    found = json.loads(line)
                    self.url, self.admin_url = found["url"], found["admin_url"]
                    return
            time.sleep(0.05)
        raise RuntimeError(f"a gate did not start: {log_path.read_text()[before:][-2000:]}")

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def status(self) -> dict[str, Any]:
        """Its `/status`."""
        with urllib.request.urlopen(f"{self.admin_url}/status", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@dataclass
class Fleet:
    """One engine, one embedded store, and so many gates; everything ends with the context.

    Args:
        directory: for logs, settings and the store's data.
        engine_flags: llama-server's.
        gates: how many.
        tenants: name to the lines of its section. Every key is `sk-NAME`.
        config: more lines of kvgate.toml.
    """

    directory: Path
    engine_flags: Sequence[str]
    gates: int
    tenants: Mapping[str, str]
    config: str = ""
    engine: EngineProcess = field(init=False)
    members: list[GateProcess] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            log_path = self.directory / "engine.log"
            flags = ["-m", str(fetch_model()), "-t", "1", "-lv", "4", *self.engine_flags]
            self.engine = stack.enter_context(EngineProcess(flags, log_path=log_path))
            (self.directory / "tenants.toml").write_text(_tenants(self.tenants))
            (self.directory / "kvgate.toml").write_text(self.config)
            arguments = ["--config", str(self.directory / "kvgate.toml")]
            arguments += ["--tenants", str(self.directory / "tenants.toml")]
            arguments += ["--upstream", self.engine.url, "--engine-log", str(log_path)]
            for at in range(self.gates):
                directory = self.directory / f"gate{at}"
                directory.mkdir()
                gate = GateProcess(directory, arguments)
                stack.callback(gate.stop)
                gate.start()
                self.members.append(gate)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def slots_busy(self) -> int:
        """How many of the engine's slots are at work, as it shows them."""
        with urllib.request.urlopen(f"{self.engine.url}/slots", timeout=30) as answer:
            return sum(bool(slot["is_processing"]) for slot in json.load(answer))

    def until_empty(self, timeout_s: float) -> None:
        """Wait until every gate's view of the ledger is empty and every slot of the engine idle.

        Raises:
            AssertionError: it does not come to that; with what is held.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            held: list[Any] = []
            for gate in self.members:
                try:
                    status = gate.status()
                except (OSError, urllib.error.URLError) as error:
                    held.append(str(error))
                    continue
                ledger = status["ledger"] or {"held_tokens": 0, "waiting": 0, "running": 0, "draining": 0}
                if ledger["held_tokens"] or ledger["waiting"] or status["in_flight"]:
                    held.append(status)
            if not held and not self.slots_busy():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"still held after {timeout_s:g} s: {json.dumps(held)[:3000]}")
            time.sleep(0.1)


def _tenants(sections: Mapping[str, str]) -> str:
    return "\n".join(
        f'[tenant.{name}]\nkeys_sha256 = ["{hashlib.sha256(f"sk-{name}".encode()).hexdigest()}"]\n{lines}'
        for name, lines in sections.items()
    )


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer: its status (0 where there was none), its error's code, its tokens of output, its seconds."""

    status: int
    code: str = ""
    output_tokens: int = 0
    seconds: float = 0.0


async def say(session: aiohttp.ClientSession, url: str, body: dict[str, Any], tenant: str | None = None) -> Heard:
    """One chat request, not streamed."""
    begun_s = time.monotonic()
    headers = {"Authorization": f"Bearer sk-{tenant}"} if tenant else {}
    try:
        async with session.post(url + CHAT, json=body, headers=headers) as answer:
            found = await answer.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        return Heard(0, type(error).__name__, seconds=time.monotonic() - begun_s)
    seconds = time.monotonic() - begun_s
    if answer.status != 200:
        code, message = found["error"].get("code"), found["error"].get("message")  # llama.cpp's code is the status
        return Heard(answer.status, code if isinstance(code, str) else str(message), 0, seconds)
    return Heard(200, "", found["usage"]["completion_tokens"], seconds)


async def gathered(*asking: Any) -> list[Heard]:
    """All of them at once."""
    return list(await asyncio.gather(*asking))
