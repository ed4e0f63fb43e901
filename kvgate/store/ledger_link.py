"""One gate's line to the shared ledger: steps bounded in time, the server's clock, whether the store is out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

from redis.asyncio import RedisCluster

from kvgate.store.errors import StoreUnavailable, store_errors
from kvgate.store.ledger_scripts import Unset, freed_of
from kvgate.store.patience import within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvgate.core.ledger import Freed
    from kvgate.ports import Clock
    from kvgate.store.client import StoreClient
    from kvgate.store.ledger_scripts import LedgerScripts

log = logging.getLogger("kvgate.ledger")

STEP_TIMEOUT_S = 0.5
"""A step takes a fraction of a millisecond: a store that needs longer hangs, and nobody waits for it any more."""

STEPS_AT_ONCE = 16
"""The server takes one step after the other; more connections than this help nobody."""


class LedgerLink:
    """Steps to the store while it answers; the first that fails opens the circuit, and then nothing is asked.

    Args:
        client: of the store.
        scripts: the steps of one engine's ledger.
        clock: seconds.
        on_freed: told what each step gave back.
    """

    def __init__(
        self, client: StoreClient, scripts: LedgerScripts, clock: Clock, on_freed: Callable[[Freed], None]
    ) -> None:
        self._client: Any = client  # redis-py types every answer as "awaitable or not"
        self._scripts = scripts
        self._clock = clock
        self._on_freed = on_freed
        self._at_once = asyncio.Semaphore(STEPS_AT_ONCE)
        self._ahead_s = -math.inf
        self.out_since_s: float | None = None
        """When the store failed, on the gate's clock; None while it answers."""
        self.back = asyncio.Event()
        self.out = asyncio.Event()
        self.back.set()

    @property
    def stream(self) -> str:
        """What the streams of gates begin with."""
        return f"{self._scripts.prefix}:to:"

    def server_time_s(self, local_s: float) -> float:
        """A moment of the gate's clock on the server's: the latest that it cannot have been before."""
        return local_s + self._ahead_s

    async def step(self, name: str, **ask: Any) -> dict[str, Any]:
        """Take a step.

        Raises:
            StoreUnavailable: the store is out, or failed now; whether the step was taken is unknown then.
        """
        async with self._at_once:
            if self.out_since_s is not None:
                raise StoreUnavailable("the store is out")
            try:
                return await self.probe(name, **ask)
            except StoreUnavailable as problem:
                self.fail(str(problem))
                raise

    async def probe(self, name: str, **ask: Any) -> dict[str, Any]:
        """Take a step whether the store is out or not.

        Raises:
            StoreUnavailable: the store failed.
        """
        async with _bounded("asking the ledger"):
            try:
                found = await self._scripts.run(name, **ask)
            except Unset:
                raise StoreUnavailable("the store has forgotten the ledger") from None
        for freed in freed_of(found):
            self._on_freed(freed)
        ahead_s = found["now"] / 1000 - self._clock()
        # No answer is older than a step may take: one that seems to be comes from a clock that was set back.
        self._ahead_s = ahead_s if ahead_s < self._ahead_s - 2 * STEP_TIMEOUT_S else max(self._ahead_s, ahead_s)
        return found

    async def server(self) -> str:
        """Which run of which server answers.

        Raises:
            StoreUnavailable: the store failed.
        """
        async with _bounded("asking the store who it is"):
            found = await self._client.info("server", **await self._holder())
        return str(found.get("run_id", ""))

    async def _holder(self) -> dict[str, Any]:
        """Of a cluster: the node that holds the ledger."""
        if not isinstance(self._client, RedisCluster):
            return {}
        await self._client.initialize()
        return {"target_nodes": self._client.get_node_from_key(self._scripts.prefix)}

    def fail(self, problem: str) -> None:
        """The store is out from now on."""
        if self.out_since_s is None:
            self.out_since_s = self._clock()
            self.back.clear()
            self.out.set()
            log.warning("the ledger's store is out", extra={"problem": problem})

    def recover(self) -> None:
        """The store answers, and has been told what this gate holds."""
        if self.out_since_s is not None:
            log.info("the ledger's store is back", extra={"out_s": round(self._clock() - self.out_since_s, 3)})
        self.out_since_s = None
        self.out.clear()
        self.back.set()

    def forget_time(self) -> None:
        """Another server's clock may be behind the last one's."""
        self._ahead_s = -math.inf


@contextlib.asynccontextmanager
async def _bounded(doing: str) -> AsyncIterator[None]:
    with store_errors(doing):
        async with within(STEP_TIMEOUT_S):
            yield
