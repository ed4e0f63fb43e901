"""A command that asks an engine beside its gates: a member of their ledger for as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.app.engine_watch import SlotsWatch
from kvgate.app.gate_app import engine_settings
from kvgate.engines.llamacpp import LlamaCpp
from kvgate.settings import BadSettings
from kvgate.startup import LogFile
from kvgate.store.canary import CanaryStore
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable
from kvgate.store.shared_ledger import SharedLedger, SharedSettings, engine_id

if TYPE_CHECKING:
    from kvgate.settings import Settings


@dataclass(frozen=True, slots=True)
class Guest:
    """The engine as a gate with these settings would see it, the ledger that guards it, and what is on record."""

    engine: LlamaCpp
    ledger: SharedLedger
    canary: CanaryStore


async def join(stack: AsyncExitStack, settings: Settings) -> Guest:
    """Come in; the stack's end leaves again, and nothing is left behind.

    Raises:
        BadSettings: no engine is named.
        StoreUnavailable: the store is not to be had.
        ValueError: a URL is none.
    """
    if settings.engine.url is None:
        raise BadSettings("no engine: give --upstream http://host:port, or engine.url in kvgate.toml")
    url = settings.store.url or await _embedded(stack, settings.store.data_dir or Path(".kvgate"))
    client = connect(url)
    stack.push_async_callback(client.aclose)
    given = settings.engine
    api_key = given.api_key
    startup_log = LogFile(given.log) if given.log is not None else None
    engine = LlamaCpp(
        given.url or "", engine_settings(settings), time.monotonic, startup_log=startup_log, api_key=api_key
    )
    stack.push_async_callback(engine.close)
    shared = SharedSettings(
        lease_ttl_s=settings.store.lease_ttl_s, drain_max_s=given.drain_max_s, local=False, reserve_slots=0
    )
    ledger = SharedLedger(client, engine_id(str(given.url)), time.monotonic, shared)
    stack.push_async_callback(ledger.leave)
    for job in (ledger.run(), SlotsWatch(engine, ledger, time.monotonic).run()):
        stack.push_async_callback(_ended, asyncio.create_task(job))
    return Guest(engine, ledger, CanaryStore(client))


async def _embedded(stack: AsyncExitStack, data_dir: Path) -> str:
    """The URL of the store in this directory; where no gate keeps it up, it is started for as long as this lasts.

    Raises:
        StoreUnavailable: there never was one, or it cannot be started.
    """
    _check_there(data_dir)
    embedded = EmbeddedValkey(data_dir)
    alone = AsyncExitStack()
    await alone.enter_async_context(embedded.alone())
    try:
        await embedded.start()
    except BaseException:
        await alone.aclose()
        raise
    if embedded.pid is None:  # a gate keeps it up: others may come and go
        await alone.aclose()
    else:
        stack.push_async_exit(alone)
    stack.push_async_callback(embedded.stop)
    return embedded.url


def _check_there(data_dir: Path) -> None:
    if not data_dir.is_dir():
        raise StoreUnavailable(
            f"there is no store in {data_dir.resolve()}, so no gate ever ran with this configuration. Without a gate "
            "an engine is asked with --upstream URL alone"
        )


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
