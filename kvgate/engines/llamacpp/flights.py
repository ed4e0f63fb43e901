"""Several who ask the same at the same time are answered by one call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

V = TypeVar("V")


@dataclass(slots=True)
class _Flight(Generic[V]):
    task: asyncio.Future[V]
    waiting: int = 0


class Flights(Generic[V]):
    """The calls that are under way, by key; one ends early only when nobody waits for it any more."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def join(self, key: bytes, start: Callable[[], Awaitable[V]]) -> V:
        """The answer of the call of this key; it is started where none is under way."""
        flight = self._under_way.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(start()))
            self._under_way[key] = flight
            flight.task.add_done_callback(lambda task: self._ended(key, task))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._forget(key, flight.task)  # before it ends: whoever comes now must not join what is cancelled
                flight.task.cancel()

    def _ended(self, key: bytes, task: asyncio.Future[V]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # whoever still waits gets it; where nobody does, it is no news

    def _forget(self, key: bytes, task: asyncio.Future[V]) -> None:
        flight = self._under_way.get(key)
        if flight is not None and flight.task is task:
            del self._under_way[key]
