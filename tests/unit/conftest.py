"""What several unit tests stand on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvgate.store.embedded import EmbeddedValkey

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One store for all tests of a module, as a gate beside the commands would keep it up; its URL."""
    store = EmbeddedValkey(tmp_path_factory.mktemp("store"))
    asyncio.run(store.start())
    yield store.url
    asyncio.run(store.stop())
