"""What is kept of each request for a while, in the store, so that a bad answer can be looked into by its request id.

Figures and words of kvgate's own; no text of a prompt or an answer, and no key, comes this far.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from kvgate import __version__
from kvgate.ports import RequestRecord
from kvgate.store.errors import store_errors
from kvgate.store.records import text_of
from kvgate.store.written_beside import WrittenBeside

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.profile import EngineProfile
    from kvgate.store.client import StoreClient
    from kvgate.store.records import Names

_log = logging.getLogger(__name__)

KEEP_S: Final = 24 * 3600
KEPT_MAX: Final = 20_000
"""Reports are kept for so long and at most so many, of all tenants and gates of a store; about a kilobyte each."""

SAME_ID_MAX: Final = 8
"""Clients may name their requests, and name several alike: so many of them are kept."""

FLUSH_S: Final = 0.5

Report = dict[str, Any]


class Reports(WrittenBeside[tuple[RequestRecord, float]]):
    """Writes down what is to know of requests, beside the gate, and finds it again; implements `ports.Observer`.

    Args:
        client: made by `store.client.connect`; its owner closes it.
        names: where reports are kept.
        keep_s, kept_max: for how long, and how many; 0 keeps none.
        timeout_s: for one step at the store.
        now: the time of day, in Unix seconds.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        names: Names | None = None,
        keep_s: int = KEEP_S,
        kept_max: int = KEPT_MAX,
        timeout_s: float = 2.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(client, names, timeout_s, what="reports", log=_log, lost="reports are not kept")
        self._keep_s, self._kept_max = keep_s, kept_max
        self._now = now

    def request(self, record: RequestRecord) -> None:
        """Remember an inference request of a tenant, served or refused, until the next flush."""
        if self._keep_s and self._kept_max and record.tenant != "-" and (record.verdict or record.reason):
            self._waiting.append((record, self._now()))

    async def run(self, interval_s: float = FLUSH_S) -> None:
        """Flush every `interval_s` seconds until cancelled."""
        await super().run(interval_s)

    async def _write(self, waiting: list[tuple[RequestRecord, float]]) -> None:
        index = self._names.reports
        async with self._client.pipeline(transaction=False) as pipe:
            for record, at_s in waiting:
                key = self._names.report(record.request_id)
                pipe.lpush(key, json.dumps(report_of(record, at_s), separators=(",", ":")))
                pipe.ltrim(key, 0, SAME_ID_MAX - 1).expire(key, self._keep_s)
            pipe.zadd(index, {record.request_id: at_s for record, at_s in waiting})
            pipe.zremrangebyscore(index, "-inf", self._now() - self._keep_s)
            pipe.expire(index, self._keep_s).zcard(index)
            *_, kept = await pipe.execute()
        if kept > self._kept_max:
            oldest = await self._client.zpopmin(index, kept - self._kept_max)
            await self._client.delete(*(self._names.report(text_of(request_id)) for request_id, _ in oldest))

    async def of(self, request_id: str) -> tuple[Report, ...]:
        """All that is kept of requests with this id, the last one first; nothing where it is unknown or forgotten.

        Raises:
            StoreUnavailable: the store failed.
        """
        await self.flush()
        with store_errors("reading a report"):
            async with asyncio.timeout(self._timeout_s):
                found = await self._client.lrange(self._names.report(request_id), 0, SAME_ID_MAX - 1)
        return tuple(json.loads(text_of(one)) for one in found)


def report_of(record: RequestRecord, at_s: float) -> Report:
    """What is to know of one request that ended at this time, as JSON values; null where it did not come so far."""
    usage, trimmed, asked = record.usage, record.trimmed, record.asked
    return {
        "request_id": record.request_id,
        "ended_at": datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "kvgate_version": __version__,
        "tenant": record.tenant,
        "dialect": record.dialect,
        "path": record.path,
        "status": record.status,
        "verdict": record.verdict or None,
        "reason": record.reason or None,
        "detail": record.detail or None,
        "stream": record.stream,
        "sequences": record.sequences,
        "counted_by": record.proof or None,
        "prompt_tokens": record.prompt_tokens,
        "asked_output_tokens": None if asked is None else asked.output_tokens,
        "output_limit": record.output_limit,
        "usable_generation": record.usable_generation,
        "trimmed": trimmed
        and {
            "how": trimmed.how,
            "messages": trimmed.messages,
            "tokens": trimmed.tokens,
            "counts": trimmed.counts,
            "runs": len(trimmed.dropped),
        },
        "engine": None if record.profile is None else _engine(record.profile),
        "reuse": record.reuse or None,
        "reuse_violation": record.reuse_violation,
        "usage": usage
        and {
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "count_drift_tokens": record.count_drift_tokens,
        "finish": record.finish or None,
        "ended_by_context": record.ended_by_context or None,
        "loop": None if record.loop is None else record.loop.value,
        "loop_stopped": record.loop_stopped,
        "hung_up": record.hung_up,
        "queued_ms": _ms(record.queued_s),
        "answered_ms": _ms(record.answered_s),
        "duration_ms": _ms(record.duration_s),
    }


def _engine(profile: EngineProfile) -> Report:
    models = [PurePath(name).name for name in profile.models]  # llama.cpp calls a model by its path on the machine
    return {
        "kind": profile.kind,
        "build": profile.build,
        "fingerprint": profile.fingerprint,
        "models": models,
        "model_ftype": profile.model_ftype,
        "n_ctx_slot": profile.n_ctx_slot.value,
        "n_ctx_slot_source": profile.n_ctx_slot.source.value,
        "n_ctx_train": profile.n_ctx_train,
        "slots": profile.total_slots.value,
        "topology": profile.topology.value.value,
        "topology_source": profile.topology.source.value,
        "pool_tokens": profile.pool_tokens.value,
        "kv_type": profile.kv_type,
        "chat_template_sha256": profile.chat_template_sha256,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
