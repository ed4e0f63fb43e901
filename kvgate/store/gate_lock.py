"""Who is the one gate in front of an engine: while each gate has its own ledger, two would grant the same KV."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import socket
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kvgate.store.errors import StoreUnavailable, store_errors

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("kvgate.store")

TTL_S = 6.0
"""How long a gate that is gone without a word keeps its place."""

_TIMEOUT_S = 2.0


class GateLock:
    """One gate's place in front of one engine.

    Args:
        client: of the store.
        engine_url: what is guarded; gates that spell it alike see each other.
    """

    def __init__(self, client: Redis, engine_url: str) -> None:
        normal = engine_url.rstrip("/").replace("//localhost", "//127.0.0.1")
        self._key = f"kvgate:gate:{hashlib.sha256(normal.encode()).hexdigest()[:16]}"
        self._me = f"pid {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(4)}"
        untyped: Any = client  # redis-py types every answer as "awaitable or not"
        self._script = untyped.register_script(files("kvgate.store").joinpath("gate_lock.lua").read_text())
        self.rival: str | None = None
        """Another gate that has the place, as last seen."""

    async def take(self) -> None:
        """Take the place; wait for one that is gone without a word to lose it.

        `rival` says afterwards who has the place instead, if somebody does.

        Raises:
            StoreUnavailable: the store failed.
        """
        for _ in range(int(TTL_S) + 2):
            self.rival = await self._ask(TTL_S)
            if self.rival is None:
                return
            await asyncio.sleep(1)

    async def hold(self) -> None:
        """Keep the place until cancelled; an outage of the store is waited out."""
        while True:
            await asyncio.sleep(TTL_S / 3)
            try:
                before, self.rival = self.rival, await self._ask(TTL_S)
            except StoreUnavailable:
                continue  # ValkeyTenants.watch tells of the outage
            if self.rival is not None and before is None:
                log.error("another gate guards this engine too", extra={"rival": self.rival})

    async def give_back(self) -> None:
        """Let the next gate have the place at once."""
        try:
            await self._ask(0)
        except StoreUnavailable:
            return  # it will expire

    async def _ask(self, ttl_s: float) -> str | None:
        with store_errors("keeping the gate's place"):
            async with asyncio.timeout(_TIMEOUT_S):
                found = await self._script(keys=[self._key], args=[self._me, int(ttl_s * 1000)])
        holder = found.decode() if isinstance(found, bytes) else str(found)
        return None if holder in {"", self._me} else holder
