"""What one gate may still let in while the store is out: no more than it held when the store last answered."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgate.core.ledger import Denied
from kvgate.core.reason import Reason
from kvgate.store.local_ledger import LocalLedger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgate.core.ledger import Lease, Reservation
    from kvgate.core.pool import KvPool
    from kvgate.ports import Clock
    from kvgate.store.in_hand import Hand


class Outage:
    """The rule of `core.ledger` over a pool of its own: what this gate held, and its reserve.

    What it held is its own only until its leases run out at the store, since other gates may see the store and
    grant it anew; the reserve stays.

    Args:
        pool: the engine's.
        held: this gate's leases, as last acknowledged.
        until_s: when they run out, on the clock.
        reserve_slots: slots that the operator leaves to this gate in an outage, each with its part of the pool.
    """

    def __init__(
        self,
        clock: Clock,
        drain_max_s: float,
        *,
        pool: KvPool,
        held: Sequence[Hand],
        until_s: float,
        reserve_slots: int,
    ) -> None:
        self._clock = clock
        self._until_s = until_s
        self._has_reserve = reserve_slots > 0
        leases = [(hand, hand.lease) for hand in held if hand.lease is not None]
        reserve = (
            min(reserve_slots, pool.slots),
            pool.grantable_tokens * min(reserve_slots, pool.slots) // pool.slots,
        )
        self._reserve = _part(pool, *reserve)
        slots = sum(lease.sequences for _, lease in leases) + reserve[0]
        self.pool = _part(pool, slots, sum(lease.cells for _, lease in leases) + reserve[1])
        self.ledger = LocalLedger(clock, drain_max_s)
        self._known = {hand.reservation.lease_id for hand, _ in leases}
        if self.pool is not None:
            self.ledger.resize(self.pool)
            for hand, lease in leases:
                self.ledger.adopt(hand.reservation, lease.cells, hand.handed_s, hand.answered_s)
        self._timer = asyncio.get_running_loop().call_later(max(until_s - clock(), 0), self._shrink)

    async def reserve(self, reservation: Reservation, wait_s: float) -> Lease | Denied:
        """As `ports.LedgerPort.reserve`, waiting at most `wait_s`; STORE_OUT for what this gate may not let in."""
        if self.pool is None:
            return self.denied(reservation.lease_id)
        patient = replace(reservation, quota=replace(reservation.quota, queue_timeout_s=wait_s))
        found = await self.ledger.reserve(patient, self.pool)
        if isinstance(found, Denied) and found.reason is Reason.ENGINE_CHANGED:
            return self.denied(reservation.lease_id)
        self._known.add(reservation.lease_id)
        return found

    @property
    def good_until_s(self) -> float:
        """Until when what is let in now may be handed over."""
        return math.inf if self._has_reserve else self._until_s

    def denied(self, lease_id: str) -> Denied:
        """There is nothing to give."""
        return Denied(lease_id, Reason.STORE_OUT, 0, 2.0)

    def saw_the_end_of(self, lease_id: str) -> bool:
        """Whether this lease was held here, and is over by the rule."""
        return lease_id in self._known and not self.ledger.holds(lease_id)

    def end(self) -> None:
        """The store is back: who waits here is to ask there."""
        self._timer.cancel()
        self.ledger.turn_away(Reason.STORE_OUT)

    def _shrink(self) -> None:
        """The leases have run out at the store: only the reserve is left."""
        self.pool = self._reserve
        if self.pool is None:
            self.ledger.turn_away(Reason.STORE_OUT)
        else:
            self.ledger.resize(self.pool)


def _part(pool: KvPool, slots: int, tokens: int) -> KvPool | None:
    if slots < 1 or tokens < 1:
        return None
    return replace(
        pool,
        tokens=tokens,
        slots=slots,
        tokens_per_slot=min(pool.tokens_per_slot, tokens),
        headroom_tokens=0,
    )
