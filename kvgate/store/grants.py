"""How a gate hears of what was granted to those of its requests that wait: its own stream at the store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvgate.store.errors import StoreUnavailable, store_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.store.client import StoreClient
    from kvgate.store.ledger_link import LedgerLink

BLOCK_S = 2.0
RETRY_S = 0.2


class Grants:
    """Reads one gate's stream; what is lost on the way is asked for by those who wait.

    Args:
        client: of the store.
        link: says whether the store is out.
        gate: whose stream.
        told: called with an id and what became of it.
    """

    def __init__(self, client: StoreClient, link: LedgerLink, gate: str, told: Callable[[str, str], None]) -> None:
        self._client: Any = client
        self._link = link
        self._stream = f"{link.stream}{gate}"
        self._told = told

    async def listen(self) -> None:
        """Until cancelled; on a connection of its own, since it blocks."""
        last: Any = "0"
        while True:
            await self._link.back.wait()
            try:
                with store_errors("waiting for grants"):
                    async with asyncio.timeout(BLOCK_S + 1):
                        found = await self._client.xread({self._stream: last}, block=int(BLOCK_S * 1000))
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            for entry_id, fields in _entries(found):
                last = entry_id
                for field, lease_id in fields.items():
                    self._told(lease_id.decode(), field.decode())


def _entries(found: Any) -> list[Any]:
    """The entries of the only stream asked for; RESP2 gives a list of pairs, RESP3 a map of lists of lists."""
    if not found:
        return []
    if isinstance(found, dict):
        return [entry for part in next(iter(found.values())) for entry in part]
    return list(found[0][1])
