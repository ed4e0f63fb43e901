"""What the tests of prefix reuse share: a pinned engine without running the suite, and conversations that go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvgate.core.canary import Figures, SuiteReport
from kvgate.store.canary import CanaryStore
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from tests.e2e.ask import WORDS, post

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.ask import Answer
    from tests.e2e.conftest import RunningGate

REUSE_OFF = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots")
FIGURES = Figures(0.0, 0.0, 0.5, 0.5)


async def command(gate: RunningGate, *arguments: str) -> dict[str, Any]:
    """`kvgate canary ...` beside the gate, on its own store; what it answers."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "kvgate", "canary", *arguments, "--config", "kvgate.toml", "--json"],
        cwd=gate.log_path.parent,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    found: dict[str, Any] = json.loads(out or errors)
    return found


async def record(gate: RunningGate, *, passed: bool = True, pin: bool = False) -> SuiteReport:
    """A run of the suite on the gate's engine, as if it had been, and its pin."""
    engine = (await asyncio.to_thread(gate.status))["engine"]
    report = SuiteReport(
        engine["fingerprint"], engine["profile"]["instance"], 1, passed, 9, 0 if passed else 2, FIGURES, time.time()
    )
    async with store_of(gate) as store:
        await store.report(report)
        if pin:
            await store.pin(report, by="e2e")
    return report


@contextlib.asynccontextmanager
async def store_of(gate: RunningGate) -> AsyncIterator[CanaryStore]:
    """The pins in the store that a gate embeds."""
    embedded = EmbeddedValkey(gate.log_path.parent / ".kvgate")
    await embedded.start()
    client = connect(embedded.url)
    try:
        yield CanaryStore(client)
    finally:
        await client.aclose()
        await embedded.stop()


async def until_reuse(gate: RunningGate, tenant: str, *, on: bool, within_s: float = 30) -> dict[str, Any]:
    """Wait until the gate says that a tenant has reuse, or has none."""
    deadline = time.monotonic() + within_s
    while True:
        told: dict[str, Any] = (await asyncio.to_thread(gate.status))["reuse"]
        if (told["tenants"].get(tenant) == "on") is on:
            return told
        if time.monotonic() > deadline:
            raise AssertionError(f"reuse did not become {'on' if on else 'off'}: {told}")
        await asyncio.sleep(0.1)


async def pinned(gate: RunningGate, tenant: str) -> None:
    """Reuse is on for a tenant of a gate."""
    await record(gate, pin=True)
    await until_reuse(gate, tenant, on=True)


async def restarted(gate: RunningGate, engine: EngineProcess) -> None:
    """Another process of the engine, and the gate has seen it."""

    async def instance() -> str:
        found: str = (await asyncio.to_thread(gate.status))["engine"]["profile"]["instance"]
        return found

    before = await instance()
    await asyncio.to_thread(engine.restart)
    async with asyncio.timeout(60):
        while await instance() == before:  # noqa: ASYNC110 - the gate tells of no event
            await asyncio.sleep(0.1)


@dataclass
class Talk:
    """A conversation; each turn sends all that was said before."""

    url: str
    key: str
    topic: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    async def turn(self, words: int = 40, **fields: Any) -> Answer:
        at = len(self.messages) * 7
        said = " ".join(WORDS[(at + number * 3) % len(WORDS)] for number in range(words))
        asked = [*self.messages, {"role": "user", "content": f"{self.topic} {said}"}]
        answer = await post(self.url, {"messages": asked, "max_tokens": 6, "temperature": 0, **fields}, key=self.key)
        if answer.status == 200:
            usage = answer.json["usage"]
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            said = answer.json["choices"][0]["message"]["content"] or ""
            self.messages = [*asked, {"role": "assistant", "content": said}]
        return answer
