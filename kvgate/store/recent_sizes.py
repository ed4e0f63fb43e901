"""The sizes of each tenant's recent requests, kept in the store so that other limits can be tried on them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from dataclasses import astuple
from typing import TYPE_CHECKING, Final

from kvgate.core.pool import KvPool
from kvgate.core.replay import Asked
from kvgate.store.errors import store_errors
from kvgate.store.records import text_of
from kvgate.store.written_beside import WrittenBeside

if TYPE_CHECKING:
    from kvgate.ports import RequestRecord
    from kvgate.store.client import StoreClient
    from kvgate.store.records import Names

_log = logging.getLogger(__name__)

KEPT_MAX: Final = 4000
"""Of each tenant: the last so many requests."""

TTL_S: Final = 7 * 24 * 3600
"""A tenant that asks no more is forgotten after so long."""

_FORMAT: Final = 1


class RecentSizes(WrittenBeside[tuple[str, Asked]]):
    """Writes down how large requests are, beside the gate; implements `ports.Observer`.

    Args:
        client: made by `store.client.connect`; its owner closes it.
        names: where the lists are kept.
        timeout_s: for one step at the store.
    """

    def __init__(self, client: StoreClient, *, names: Names | None = None, timeout_s: float = 2.0) -> None:
        lost = "request sizes are not recorded"
        super().__init__(client, names, timeout_s, what="request sizes", log=_log, lost=lost)

    def request(self, record: RequestRecord) -> None:
        """Remember a request that came as far as the arithmetic, until the next flush."""
        if record.asked is not None:
            self._waiting.append((record.tenant, record.asked))

    async def _write(self, waiting: list[tuple[str, Asked]]) -> None:
        by_tenant: dict[str, list[str]] = defaultdict(list)
        for tenant, asked in waiting:
            by_tenant[tenant].append(_encode(asked))
        async with self._client.pipeline(transaction=False) as pipe:
            for tenant, sizes in by_tenant.items():
                key = self._names.sizes(tenant)
                pipe.lpush(key, *sizes[-KEPT_MAX:]).ltrim(key, 0, KEPT_MAX - 1).expire(key, TTL_S)
            await pipe.execute()

    async def of(self, tenant: str) -> tuple[Asked, ...]:
        """A tenant's recent requests, the last one first.

        Raises:
            StoreUnavailable: the store failed.
        """
        with store_errors("reading request sizes"):
            async with asyncio.timeout(self._timeout_s):
                found = await self._client.lrange(self._names.sizes(tenant), 0, KEPT_MAX - 1)
        return tuple(asked for asked in map(_decode, map(text_of, found)) if asked is not None)


def _encode(asked: Asked) -> str:
    pool = list(astuple(asked.pool))
    values = [_FORMAT, asked.output_tokens, asked.sequences, list(asked.prompts), asked.prompts_count, pool]
    return json.dumps(values, separators=(",", ":"))


def _decode(text: str) -> Asked | None:
    """What `_encode` wrote, or None for what another version of kvgate did."""
    try:
        written, output_tokens, sequences, prompts, prompts_count, pool = json.loads(text)
        sizes = (sequences, prompts_count, *prompts, *pool, output_tokens or 0)
        if written != _FORMAT or not all(isinstance(size, int) for size in sizes):
            return None
        return Asked(output_tokens, sequences, tuple(prompts), prompts_count, KvPool(*pool))
    except (ValueError, TypeError):
        return None
