"""A gate of its own in front of a fake engine of its own, both in this process, real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvgate.app import App
from kvgate.settings import load
from tests.e2e.faults.asking import Ask, Client
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.ledger import LedgerView

N_CTX: Final = 512
WORDS: Final = ("Hi", " 🦜", " how", " can", " émigrés", " help", "?")

IDLE_TIMEOUT_S: Final = 1.0
WRITE_TIMEOUT_S: Final = 1.5

BOUND_S: Final = 30.0
"""How long anything may take to be over, on any machine."""


@dataclass
class Lane:
    """One gate and its engine."""

    engine: FakeEngine
    app: App
    url: str
    known: str | None = None

    @property
    def status(self) -> dict[str, Any]:
        assert self.app._health is not None
        return self.app._health.status()

    @property
    def ledger(self) -> LedgerView:
        assert self.app._health is not None
        view = self.app._health.ledger.view()
        assert view is not None
        return view

    @property
    def buffered_bytes(self) -> int:
        """What the gate holds of answers whose clients are behind."""
        return sum(connection._buffered for connection in self.app._engine.upstream._open)

    @property
    def admitted(self) -> float:
        """How many requests have held a lease, and are over."""
        return self.app._metrics.registry.get_sample_value("kvgate_queue_seconds_count", {"tenant": "demo"}) or 0

    async def until(self, condition: Callable[[], object], what: str) -> None:
        assert self.app._health is not None
        ledger, deadline = self.app._health.ledger, time.monotonic() + BOUND_S
        while True:
            await ledger.refresh()
            # In an outage that the machine's load makes there may be no view for a moment.
            if ledger.view() is not None and condition():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not {what} after {BOUND_S} s: {self.status}")
            await asyncio.sleep(0.01)

    async def quiet(self) -> LedgerView:
        """The ledger once nothing runs, waits or is in flight; what drains may still do so."""
        await self.until(
            lambda: not (self.ledger.running or self.ledger.waiting or self.status["in_flight"]), "at an end"
        )
        return self.ledger

    async def heal(self) -> None:
        """The engine is well again; return when nothing is held and the gate serves."""
        engine = self.engine
        engine._scripts.clear()
        engine.always.clear()
        engine.words, engine.frozen, engine.turns_away = WORDS, False, False
        engine.slots_stick = False
        engine.let_go()
        if engine._server is None:
            await engine.start()
        if engine.n_ctx != N_CTX:
            await engine.replace(n_ctx=N_CTX)
        await self.until(lambda: not self.ledger.held_tokens and not self.status["problems"], "empty and ready")
        await self.until(lambda: self.ledger.pool.tokens_per_slot == N_CTX, "sized anew")
        await self.warm_up()

    async def warm_up(self) -> None:
        """Let the gate probe an engine that it does not know: what a test scripts is for its own request."""
        if self.known != self.engine.media_marker:
            self.known = self.engine.media_marker
            async with Client(self.url) as client:
                await client.send(Ask("anthropic_messages", stream=False))
                assert (await client.receive()).status == 200


@contextlib.asynccontextmanager
async def open_lane(directory: Path, store_url: str, tenants: Path) -> AsyncIterator[Lane]:
    """A lane that is warm."""
    async with FakeEngine(n_ctx=N_CTX) as engine:
        engine.words = WORDS
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        config = directory / "kvgate.toml"
        config.write_text(
            f"""
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"
tenants = "{tenants}"
[engine]
url = "{engine.url}"
kv_topology = "divided"
idle_timeout_s = {IDLE_TIMEOUT_S}
# What goes wrong while the engine counts must have it count.
counting = "engine"
[store]
url = "{store_url}"
[http]
write_timeout_s = {WRITE_TIMEOUT_S}
stop_grace_s = 0
"""
        )
        app = App(load(config, {}, {}), announce=lambda url, _: listening.set_result(url))
        running = asyncio.create_task(app.run())
        running.add_done_callback(lambda task: _ended(task, listening))
        lane = Lane(engine, app, await listening)
        try:
            await lane.warm_up()
            yield lane
        finally:
            app.stop()
            await running


def _ended(running: asyncio.Task[int], listening: asyncio.Future[str]) -> None:
    """A gate that ends before it listens says why."""
    if not listening.done():
        listening.set_exception(running.exception() or RuntimeError("the gate ended before it listened"))
