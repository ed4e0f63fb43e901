"""The store's one error, and the one place that turns foreign exceptions into it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from redis.exceptions import RedisClusterException, RedisError

if TYPE_CHECKING:
    from collections.abc import Iterator


class StoreUnavailable(Exception):
    """The store cannot be reached, started, or used as it is."""


@contextlib.contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Raises StoreUnavailable for whatever goes wrong between here and the store.

    Args:
        doing: what the sentence says was being done, such as "reading the tenants".
    """
    try:
        yield
    except TimeoutError as error:
        raise StoreUnavailable(f"the store did not answer in time while {doing}") from error
    except (RedisError, RedisClusterException, OSError) as error:
        raise StoreUnavailable(f"the store failed while {doing}: {error}") from error
