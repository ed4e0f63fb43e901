"""What is remembered of requests is bounded, comes back as it went, and never holds anybody up."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.pool import KvPool
from kvgate.core.replay import PROMPTS_KEPT_MAX, Asked
from kvgate.ports import RequestRecord
from kvgate.store import recent_sizes, written_beside
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable
from kvgate.store.recent_sizes import RecentSizes, _decode, _encode

if TYPE_CHECKING:
    pass

POOL = KvPool(4096, 4, 1024, prompt_shared=True, margin_tokens=2, headroom_tokens=3)
RECORD = RequestRecord("r1", "acme", "openai_chat", "/v1/chat/completions", 200, "admit", "", 0.1)


def record(prompt: int, tenant: str = "acme") -> RequestRecord:
    return replace(RECORD, tenant=tenant, asked=Asked(None, 1, (prompt,), 1, POOL))


def prompts(found: tuple[Asked, ...]) -> list[int]:
    return [asked.prompts[0] for asked in found]


@given(
    st.none() | st.integers(0, 2**63),
    st.integers(1, 64),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=PROMPTS_KEPT_MAX),
    st.integers(0, 10**6),
    st.builds(
        KvPool,
        st.integers(1, 2**40),
        st.integers(1, 512),
        st.integers(1, 2**40),
        st.booleans(),
        st.integers(0, 64),
        st.just(0),
    ),
)
def test_what_was_asked_comes_back_as_it_went(
    output: int | None, sequences: int, kept: list[int], more: int, pool: KvPool
) -> None:
    asked = Asked(output, sequences, tuple(sorted(kept, reverse=True)), len(kept) + more, pool)
    assert _decode(_encode(asked)) == asked


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "{}",
        "[]",
        "[1,2,3]",
        "[2,null,1,[5],1,[10,1,10,false,0,0]]",
        '[1,null,1,["5"],1,[10,1,10,false,0,0]]',
        "[1,null,1,[5],1,[0,1,10,false,0,0]]",
        "[1,null,1,[],1,[10,1,10,false,0,0]]",
        "[1,null,1,[5],1,[1,2,3,4,5,6,7,8]]",
    ],
)
def test_what_another_version_wrote_is_passed_over(text: str) -> None:
    assert _decode(text) is None


async def test_the_last_requests_of_each_tenant_are_kept(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for, the last one first; a tenant that asks no more is forgotten in the end."""
    monkeypatch.setattr(recent_sizes, "KEPT_MAX", 5)
    sizes = RecentSizes(client)
    for prompt in range(1, 4):
        sizes.request(record(prompt))
        sizes.request(record(prompt * 10, "beta"))
    sizes.request(RECORD)
    await sizes.flush()
    for prompt in range(4, 8):
        sizes.request(record(prompt))
    await sizes.flush()
    assert prompts(await sizes.of("acme")) == [7, 6, 5, 4, 3]
    assert prompts(await sizes.of("beta")) == [30, 20, 10]
    assert await sizes.of("nobody") == ()
    assert await client.llen("{kvgate}:sizes:acme") == 5
    assert 0 < await client.ttl("{kvgate}:sizes:acme") <= recent_sizes.TTL_S


async def test_a_burst_larger_than_the_memory_keeps_its_end(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_beside, "WAITING_MAX", 10)
    sizes = RecentSizes(client)
    for prompt in range(1000):
        sizes.request(record(prompt))
    await sizes.flush()
    assert prompts(await sizes.of("acme")) == list(range(999, 989, -1))


async def test_it_flushes_by_itself(client: Any) -> None:
    sizes = RecentSizes(client)
    running = asyncio.create_task(sizes.run(interval_s=0.01))
    sizes.request(record(1))
    async with asyncio.timeout(20):
        while not await sizes.of("acme"):  # noqa: ASYNC110 - the store tells of no event
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])


async def test_an_outage_loses_what_it_hits_and_no_more(
    client: Any, store: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; nothing grows, nobody waits, and afterwards it goes on."""
    caplog.set_level(logging.INFO)
    sizes = RecentSizes(client)
    sizes.request(record(1))
    await sizes.flush()
    await store.stop()
    for prompt in (2, 3):
        sizes.request(record(prompt))
        await sizes.flush()
    assert len(sizes._waiting) == 0
    with pytest.raises(StoreUnavailable, match="reading request sizes"):
        await sizes.of("acme")
    await store.start()
    sizes.request(record(4))
    await sizes.flush()
    assert prompts(await sizes.of("acme")) == [4, 1]
    said = [line.getMessage() for line in caplog.records if line.name == recent_sizes.__name__]
    assert said == ["request sizes are not recorded"]
