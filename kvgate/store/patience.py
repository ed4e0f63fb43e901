"""A timeout for a peer that does not blame the peer for this process's own standstill."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LATE_S: Final = 0.1
"""A timer that fires so much later than it was set for: the loop stood still, or the whole machine did."""


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`; after a standstill the peer gets its `seconds` anew.

    Its answer may lie in the socket by then: asyncio would run the late timer before the reader's task.

    Raises:
        TimeoutError: the peer took too long while this process did not.
    """
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def over(due_s: float) -> None:
        now_s = loop.time()
        if now_s - due_s > LATE_S:
            timers[0] = loop.call_at(now_s + seconds, over, now_s + seconds)
        else:
            timeout.reschedule(now_s)

    async with asyncio.timeout(None) as timeout:
        due_s = loop.time() + seconds
        timers.append(loop.call_at(due_s, over, due_s))
        try:
            yield
        finally:
            timers[0].cancel()
