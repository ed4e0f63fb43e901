"""How a client of the store is made, so that it can be cancelled and never repeats a command on its own."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

CONNECT_TIMEOUT_S = 2.0


def connect(url: str) -> Redis:
    """A client of one server: `redis://`, `rediss://` or `unix://`. It connects at its first command; close it.

    It has no timeout for a command of its own: callers bound theirs with `asyncio.timeout`. With one, redis-py
    sends through `asyncio.wait_for`, which on Python 3.11 loses a cancellation that comes while it returns (CPython
    issue 86296): the command of a client that hung up would go on. And it does not retry: whether a command may
    run twice is for its caller to know.
    """
    client: Redis = Redis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    return client
