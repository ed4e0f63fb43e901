"""What a request wants to hold, and what becomes of it: the values that cross to and from the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgate.core.tenant import Share

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.pool import KvPool
    from kvgate.core.reason import Reason
    from kvgate.core.tenant import Quota


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one request wants to hold; its id is minted by the gate before it asks."""

    lease_id: str
    tenant: str
    quota: Quota
    size: Size
    share: Share = field(default_factory=Share)


@dataclass(frozen=True, slots=True)
class Lease:
    """A grant: these cells and sequences are held until settled. `queued_s` is how long it waited."""

    lease_id: str
    cells: int
    sequences: int
    queued_s: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue; `ahead` requests stand before it."""

    lease_id: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Denied:
    """No place: the queue or the minute is full, a spot tenant is not to be before others, or the engine has changed.

    ENGINE_CHANGED where the pool can no longer hold it at all.
    """

    lease_id: str
    reason: Reason
    waiting: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger at one moment, for metrics, readiness and people; numbers are sequences and cells."""

    pool: KvPool
    held_tokens: int
    running: int
    draining: int
    waiting: int
    running_by_tenant: tuple[tuple[str, int], ...]
    waiting_by_tenant: tuple[tuple[str, int], ...]
    held_tokens_by_tenant: tuple[tuple[str, int], ...]
    drains_overdue: int
    leases_expired: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """What somebody held, for how long: the KV bill is made of these."""

    tenant: str
    cells: int
    held_s: float


def asked_tokens(size: Size) -> int:
    """What a request counts as in its tenant's minute until it is known what it took."""
    return sum(size.distinct) + size.sequences * size.output_tokens
