"""The ledger of a single gate, in its own memory: the rule of `core.ledger` behind the ledger port."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvgate.core.ledger import Denied, Lease, Ledger, LedgerView
from kvgate.core.reason import Reason
from kvgate.ports import nothing_yet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvgate.core.ask import Usage
    from kvgate.core.drain import SlotsSeen
    from kvgate.core.ledger import Reservation
    from kvgate.core.pool import KvPool
    from kvgate.ports import Clock

log = logging.getLogger("kvgate.ledger")


class LocalLedger:
    """Implements `ports.LedgerPort` for one process; nothing here decides, it only waits and wakes.

    Args:
        clock: seconds.
        drain_max_s: see `core.ledger.Ledger`.
    """

    def __init__(self, clock: Clock, drain_max_s: float) -> None:
        self._clock = clock
        self._drain_max_s = drain_max_s
        self._ledger: Ledger | None = None
        self._waiters: dict[str, asyncio.Future[Lease | Denied]] = {}
        self._closed: Reason | None = None
        self.draining = asyncio.Event()

    async def reserve(self, reservation: Reservation, pool: KvPool) -> Lease | Denied:
        """Wait for room, at most `queue_timeout_s`; cancelling it leaves nothing behind."""
        ledger = self._sized(pool)
        found = ledger.reserve(reservation, self._clock())
        if isinstance(found, Lease | Denied):
            return found
        if self._closed is not None:
            self._wake(ledger.cancel(reservation.lease_id, self._clock()))
            return Denied(reservation.lease_id, self._closed, 0, ledger.retry_after_s())
        waiter: asyncio.Future[Lease | Denied] = asyncio.get_running_loop().create_future()
        self._waiters[reservation.lease_id] = waiter
        try:
            async with asyncio.timeout(reservation.quota.queue_timeout_s):
                return await waiter
        except TimeoutError:
            return Denied(
                reservation.lease_id,
                Reason.QUEUE_TIMEOUT,
                ledger.waiting_of(reservation.tenant),
                ledger.retry_after_s(),
            )
        finally:
            del self._waiters[reservation.lease_id]
            self._wake(ledger.cancel(reservation.lease_id, self._clock()))

    def hand_over(self, lease_id: str, streamed: Callable[[], int] = nothing_yet) -> None:  # noqa: ARG002 - the port's
        """See `core.ledger.Ledger.hand_over`; the output is charged when it has ended."""
        if self._ledger is not None:
            self._ledger.hand_over(lease_id, self._clock())

    def answered(self, lease_id: str) -> None:
        """See `core.ledger.Ledger.answered`."""
        if self._ledger is not None:
            self._wake(self._ledger.answered(lease_id, self._clock()))

    async def settle(self, lease_id: str, *, ended: bool, used: Usage | None = None) -> None:
        """See `core.ledger.Ledger.settle`."""
        if self._ledger is not None:
            self._wake(self._ledger.settle(lease_id, self._clock(), ended=ended, used=used))
            self._show_draining()

    def observe(self, seen: SlotsSeen) -> None:
        """A look at the engine's slots: ends the drains that it proves to be over."""
        if self._ledger is not None:
            self._wake(self._ledger.observe(seen, self._clock()))
            self._show_draining()

    def expire(self) -> None:
        """End the drains that have lasted too long."""
        if self._ledger is not None:
            self._wake(self._ledger.expire(self._clock()))
            self._show_draining()

    def turn_away(self, reason: Reason) -> None:
        """Everybody who waits is refused with this reason; what is held stays counted."""
        if self._ledger is not None:
            for lease_id in list(self._waiters):
                denied = Denied(lease_id, reason, 0, self._ledger.retry_after_s())
                self._wake([denied])

    def close_queue(self, reason: Reason) -> None:
        """Nobody waits here any more: who does, and who would, is refused with this reason."""
        self._closed = reason
        self.turn_away(reason)

    def adopt(self, reservation: Reservation, cells: int, handed_s: float | None, answered_s: float | None) -> None:
        """Count a lease that another ledger granted, once the pool is known."""
        if self._ledger is not None:
            self._ledger.restore(reservation, cells, self._clock())
            if handed_s is not None:
                self._ledger.hand_over(reservation.lease_id, handed_s)
            if answered_s is not None:
                self._wake(self._ledger.answered(reservation.lease_id, answered_s))

    def holds(self, lease_id: str) -> bool:
        """Whether anything is held under this id, running or draining."""
        return self._ledger is not None and self._ledger.holds(lease_id)

    def resize(self, pool: KvPool) -> None:
        """Another engine is there now: guard its pool from here on."""
        self._sized(pool)

    def view(self) -> LedgerView | None:
        """What is held and who waits; None before the first request."""
        return None if self._ledger is None else self._ledger.view()

    def _sized(self, pool: KvPool) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(pool, self._drain_max_s)
        elif self._ledger.pool != pool:
            log.warning("the KV pool changed", extra={"before": repr(self._ledger.pool), "after": repr(pool)})
            self._wake(self._ledger.resize(pool, self._clock()))
        return self._ledger

    def _show_draining(self) -> None:
        if self._ledger is not None:
            self._ledger.freed.clear()  # the bill is made at the store, which hears of the same leases
        if self._ledger is not None and self._ledger.is_draining():
            self.draining.set()
        else:
            self.draining.clear()

    def _wake(self, outcomes: Iterable[Lease | Denied]) -> None:
        for outcome in outcomes:
            waiter = self._waiters.get(outcome.lease_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(outcome)
