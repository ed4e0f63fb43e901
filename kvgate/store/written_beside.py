"""What is written to the store beside the gate: gathered, sent now and then, lost rather than waited for."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kvgate.store.errors import StoreUnavailable, store_errors
from kvgate.store.records import Names

if TYPE_CHECKING:
    import logging

    from kvgate.store.client import StoreClient

WAITING_MAX: Final = 8192
"""What waits to be written, of all tenants; beyond it the oldest are dropped."""

T = TypeVar("T")


class WrittenBeside(ABC, Generic[T]):
    """Keeps account of requests at the store; no request waits for it.

    What cannot be written is dropped, never kept: statistics are not worth memory. An outage is told once.

    Args:
        client: made by `store.client.connect`; its owner closes it.
        names: where it is written.
        timeout_s: for one step at the store.
        what: is written, for sentences.
        log: where an outage is told.
        lost: how.
    """

    def __init__(
        self,
        client: StoreClient,
        names: Names | None,
        timeout_s: float,
        *,
        what: str,
        log: logging.Logger,
        lost: str,
    ) -> None:
        self._client: Any = client  # redis-py types every answer as "awaitable or not"
        self._names = names or Names()
        self._timeout_s = timeout_s
        self._what, self._log, self._lost = what, log, lost
        self._waiting: deque[T] = deque(maxlen=WAITING_MAX)
        self._failing = False

    async def run(self, interval_s: float = 1.0) -> None:
        """Flush every `interval_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits, in one go; what an outage of the store hits is lost."""
        if not self._waiting:
            return
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            with store_errors(f"writing {self._what}"):
                async with asyncio.timeout(self._timeout_s):
                    await self._write(waiting)
        except StoreUnavailable as problem:
            if not self._failing:
                self._log.warning(self._lost, extra={"problem": str(problem)})
            self._failing = True
        else:
            self._failing = False

    @abstractmethod
    async def _write(self, waiting: list[T]) -> None:
        """Send these to the store.

        Raises:
            RedisError, OSError: the store failed.
        """
