"""A peer is given its time, whatever else this process does meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvgate.store.patience import within


async def test_a_peer_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        async with within(0.05):
            await asyncio.get_running_loop().create_future()


async def test_a_standstill_of_ones_own_is_not_the_peers() -> None:
    """What was there when the loop went on is taken."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    async with within(0.1):
        loop.call_soon(time.sleep, 0.5)
        loop.call_later(0.15, answer.set_result, "late, and there")
        assert await answer == "late, and there"


async def test_a_peer_that_is_silent_after_a_standstill_is_given_up_all_the_same() -> None:
    asyncio.get_running_loop().call_soon(time.sleep, 0.3)
    with pytest.raises(TimeoutError):
        async with within(0.05):
            await asyncio.get_running_loop().create_future()


async def test_a_cancel_is_a_cancel_and_leaves_no_timer() -> None:
    async def wait() -> None:
        async with within(60):
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with within(0.01):
        pass
    await asyncio.sleep(0.05)
