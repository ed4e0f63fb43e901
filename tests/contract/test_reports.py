"""What is kept of requests is found by their id, is bounded in number and time, and never holds anybody up."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.ask import Usage
from kvgate.core.loops import Loop
from kvgate.core.pool import KvPool
from kvgate.core.replay import Asked
from kvgate.core.trim_search import Trimmed
from kvgate.ports import RequestRecord
from kvgate.store import reports as module
from kvgate.store.errors import StoreUnavailable
from kvgate.store.reports import SAME_ID_MAX, Reports, report_of
from tests.unit.doubles import profile

if TYPE_CHECKING:
    from kvgate.store.embedded import EmbeddedValkey

RECORD = RequestRecord("r1", "acme", "openai_chat", "/v1/chat/completions", 200, "admit", "", 0.1)

FULL = replace(
    RECORD,
    verdict="trim",
    reason="prompt_overflow",
    stream=True,
    sequences=1,
    proof="engine",
    prompt_tokens=900,
    output_limit=100,
    usable_generation=124,
    n_ctx_slot=1024,
    queued_s=0.25,
    usage=Usage(900, 100, 3),
    hung_up=True,
    reuse_violation=True,
    count_drift_tokens=2,
    detail="why",
    asked=Asked(500, 1, (1900,), 1, KvPool(1024, 1, 1024)),
    trimmed=Trimmed("oldest-first", 4, 1000, 2),
    finish="length",
    loop=Loop.LINE,
    loop_stopped=True,
    ended_by_context="slot",
    profile=profile(1024, model_path="/secret/place/m.gguf", models=("/secret/place/m.gguf",)),
    reuse="off",
    answered_s=0.5,
)


def record(request_id: str, **changes: Any) -> RequestRecord:
    return replace(RECORD, request_id=request_id, **changes)


def test_everything_that_is_remembered_is_in_the_report() -> None:
    """Each field shows somewhere: a record that lacks it has another report. Paths of the machine do not."""
    told = report_of(FULL, 1_700_000_000.0)
    assert told["ended_at"] == "2023-11-14T22:13:20Z"
    assert "secret" not in json.dumps(told)
    for field in fields(RequestRecord):
        if field.name == "n_ctx_slot":  # the engine's own says it
            continue
        less: Any = {field.name: "-" if type(getattr(FULL, field.name)) is str else None}
        other = replace(FULL, **less)
        assert report_of(other, 1_700_000_000.0) != told, field.name


async def test_what_was_remembered_is_found(client: Any) -> None:
    reports = Reports(client, now=lambda: 1_700_000_000.0)
    reports.request(FULL)
    assert await reports.of("r1") == (report_of(FULL, 1_700_000_000.0),)
    assert await Reports(client).of("r1") == (report_of(FULL, 1_700_000_000.0),)
    assert await reports.of("r2") == ()
    assert 0 < await client.ttl("{kvgate}:report:r1") <= module.KEEP_S
    assert 0 < await client.ttl("{kvgate}:reports") <= module.KEEP_S


async def test_only_inference_of_a_tenant_is_kept(client: Any) -> None:
    """Nobody without a key can fill the store; refused requests of tenants are kept."""
    reports = Reports(client)
    reports.request(record("anybody", tenant="-", verdict="", reason="unknown_key"))
    reports.request(record("models", verdict=""))
    reports.request(record("refused", verdict="", reason="malformed"))
    await reports.flush()
    assert await client.keys("*") != []
    assert [len(await reports.of(name)) for name in ("anybody", "models", "refused")] == [0, 0, 1]


async def test_the_oldest_go(client: Any) -> None:
    """Beyond the number that is kept; of one id the last few."""
    clock = iter(range(1000, 5000))
    reports = Reports(client, kept_max=5, now=lambda: float(next(clock)))
    for at in range(9):
        reports.request(record(f"r{at}"))
        if at % 2:
            await reports.flush()
    await reports.flush()
    assert [len(await reports.of(f"r{at}")) for at in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert await client.zcard("{kvgate}:reports") == 5
    for at in range(20):
        reports.request(record("again", status=200 + at))
    assert [found["status"] for found in await reports.of("again")] == [219 - at for at in range(SAME_ID_MAX)]


async def test_a_report_is_forgotten_in_time(client: Any) -> None:
    """The store forgets it by itself, and its place in the index with the next one."""
    now = 1000.0
    reports = Reports(client, keep_s=1, now=lambda: now)
    reports.request(record("old"))
    await reports.flush()
    async with asyncio.timeout(30):
        while await reports.of("old"):  # noqa: ASYNC110 - the store tells of no event
            await asyncio.sleep(0.05)
    now += 60
    reports.request(record("new"))
    await reports.flush()
    assert await client.zrange("{kvgate}:reports", 0, -1) in ([b"new"], ["new"])


@pytest.mark.parametrize(("keep_s", "kept_max"), [(0, 9), (9, 0)])
async def test_none_is_kept_where_none_shall_be(client: Any, keep_s: int, kept_max: int) -> None:
    reports = Reports(client, keep_s=keep_s, kept_max=kept_max)
    reports.request(FULL)
    await reports.flush()
    assert await client.keys("*") == []


async def test_it_flushes_by_itself(client: Any) -> None:
    reports = Reports(client)
    running = asyncio.create_task(reports.run(interval_s=0.01))
    reports.request(FULL)
    async with asyncio.timeout(20):
        while not await Reports(client).of("r1"):  # noqa: ASYNC110 - the store tells of no event
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])


async def test_an_outage_loses_what_it_hits_and_no_more(
    client: Any, store: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; nothing grows, and afterwards it goes on."""
    caplog.set_level(logging.INFO)
    reports = Reports(client)
    await store.stop()
    for name in ("a", "b"):
        reports.request(record(name))
        await reports.flush()
    assert len(reports._waiting) == 0
    with pytest.raises(StoreUnavailable, match="reading a report"):
        await reports.of("a")
    await store.start()
    reports.request(record("c"))
    assert [len(await reports.of(name)) for name in ("a", "b", "c")] == [0, 0, 1]
    said = [line.getMessage() for line in caplog.records if line.name == module.__name__]
    assert said == ["reports are not kept"]
