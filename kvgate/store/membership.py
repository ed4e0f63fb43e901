"""What one gate and the store tell each other: it joins, renews what it has in hand, and tells what is over."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvgate.core.foreign import Tally
from kvgate.core.reason import Reason
from kvgate.store.errors import StoreUnavailable
from kvgate.store.ledger_scripts import facts_of, pool_json, pool_of, rule_json

if TYPE_CHECKING:
    from kvgate.core.drain import LeaseFacts
    from kvgate.core.fairness import FairRule
    from kvgate.core.pool import KvPool
    from kvgate.ports import Clock
    from kvgate.store.in_hand import Hand, Settled
    from kvgate.store.ledger_link import LedgerLink

log = logging.getLogger("kvgate.ledger")


class Membership:
    """One gate among those that share a ledger.

    Args:
        link: to the store.
        clock: seconds.
        lease_ttl_s: how long a lease outlives the last that was heard of its gate.
        drain_max_s: see `core.ledger.Ledger`.
        rule: prices and bounds of fairness; the gate that joined last says them for all.
    """

    def __init__(
        self, link: LedgerLink, clock: Clock, lease_ttl_s: float, drain_max_s: float, rule: FairRule
    ) -> None:
        self.gate = secrets.token_hex(8)
        self.pool: KvPool | None = None
        """The pool that this gate would guard."""
        self.other_pool: KvPool | None = None
        """The one that is guarded, where it is another one."""
        self.tally = Tally()
        """What all gates hold, as the latest renewal told."""
        self.joined = False
        self.in_hand: dict[str, Hand] = {}
        self.settled: dict[str, Settled] = {}
        self.draining = asyncio.Event()
        self.tally = Tally()
        """What all gates hold, and have been granted, as of the last renewal."""
        self.telling = asyncio.Lock()
        """Held while the store is told all that is in hand: nothing of it may be over before that is done."""
        self._link = link
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._drain_max_s = drain_max_s
        self._rule = rule
        self._guaranteed: dict[str, int] | None = None

    async def sized(self, pool: KvPool) -> None:
        """Guard this pool from here on: join where there is no ledger yet, resize where the engine has changed.

        Raises:
            StoreUnavailable: the store is out.
        """
        if pool == self.pool and self.joined:
            return
        before, self.pool = self.pool, pool
        if not self.joined:
            async with self.telling:
                if not self.joined:
                    await self._join_first(pool)
            await self.renew()  # what an earlier gate left draining is to be looked at
        elif before != pool:
            log.warning("the KV pool changed", extra={"before": repr(before), "after": repr(pool)})
            self.wake_granted(await self._link.step("resize", pool=pool_json(pool)))

    async def _join_first(self, pool: KvPool) -> None:
        try:
            await self.join(pool, knew=False)
        except StoreUnavailable as problem:
            self._link.fail(str(problem))
            raise

    async def join(self, pool: KvPool, *, knew: bool) -> None:
        """Come, or come back; `knew` where this gate knew a ledger here before."""
        found = await self._link.probe(
            "join",
            gate=self.gate,
            pool=pool_json(pool),
            ttl=int(self._lease_ttl_s * 1000),
            drain_max=int(self._drain_max_s * 1000),
            server=await self._link.server(),
            knew=knew,
            rule=rule_json(self._rule),
        )
        await self._link.probe("register", gate=self.gate, held=[])
        if self._guaranteed is not None:
            await self._link.probe("guarantee", shares=self._guaranteed)
        self.joined = True
        self._compare(found)

    async def guarantee(self, ratios_ppm: dict[str, int]) -> None:
        """These tenants, and no others, have these shares of the pool from now on.

        Raises:
            StoreUnavailable: the store is out; it is told when it is back.
        """
        if ratios_ppm != self._guaranteed:
            self._guaranteed = ratios_ppm
            if self.joined:
                self.wake_granted(await self._link.step("guarantee", shares=ratios_ppm))

    async def renew(self) -> list[LeaseFacts]:
        """Tell what is in hand; the facts of all leases, of any gate, while anything drains."""
        sent_s = self._clock()
        held = [hand for hand in self.in_hand.values() if hand.lease is not None]
        for hand in held:
            hand.told_tokens = hand.streamed()
        sent = int(max(self._link.server_time_s(sent_s), 0) * 1000)
        found = await self._link.step("renew", gate=self.gate, held=[hand.told(sent_s) for hand in held], sent=sent)
        self.tally = Tally(**found["tally"])
        unknown, lost = set(found.get("unknown", ())), set(found.get("lost", ()))
        for hand in held:
            if hand.reservation.lease_id in lost:
                hand.good_until_s = -math.inf
            elif hand.reservation.lease_id not in unknown:
                hand.good_until_s = sent_s + self._lease_ttl_s
        if unknown:
            await self.register()
        self.wake_granted(found)
        self._compare(found)
        leases = [facts_of(one) for one in found.get("leases", ())]
        self.show_drains(bool(leases))
        return [
            replace(facts, unsettled_at_s=math.inf) if facts.lease_id in self.in_hand else facts
            for facts, _ in leases
        ]

    def has_output(self) -> bool:
        """Whether output has come that the store has not heard of."""
        return any(hand.lease is not None and hand.streamed() > hand.told_tokens for hand in self.in_hand.values())

    async def register(self) -> None:
        """Have counted whatever is in hand, and what drains unheard of; but not what ran out before it was used."""
        async with self.telling:
            now_s = self._clock()
            hands = [
                hand
                for hand in self.in_hand.values()
                if hand.lease is not None and (hand.handed_s is not None or now_s < hand.good_until_s)
            ]
            drains = [settled.hand for settled in self.settled.values() if settled.drains]
            held = [hand.whole(now_s) for hand in [*hands, *drains]]
            await self._link.probe("register", gate=self.gate, held=held)
            for hand in hands:
                hand.good_until_s = now_s + self._lease_ttl_s

    async def send_one(self, settled: Settled) -> None:
        """Tell that a lease is over; it stays to be told until the store has heard it."""
        found = await self._link.step("settle", **settled.told(self._clock()))
        self.settled.pop(settled.hand.reservation.lease_id, None)
        self.wake_granted(found)
        if settled.drains:
            self.draining.set()

    async def send_settled(self) -> None:
        """Tell of all that are over."""
        for settled in list(self.settled.values()):
            await self.send_one(settled)

    def pushed(self, lease_id: str, field: str) -> None:
        """Something was told of a request that waits, or of a drain."""
        hand = self.in_hand.get(lease_id)
        if field == "drains":
            self.draining.set()
        elif hand is not None and hand.lease is None:
            if field == "changed":
                hand.refused, hand.at_store = Reason.ENGINE_CHANGED, False
            hand.woken.set()

    def show_drains(self, there_are: bool) -> None:
        """Have the slots looked at, or no longer."""
        if there_are:
            self.draining.set()
        else:
            self.draining.clear()

    def wake_granted(self, found: dict[str, Any]) -> None:
        """Wake those whom a step let in."""
        for lease_id in found.get("granted", ()):
            self.pushed(lease_id, "granted")

    def _compare(self, found: dict[str, Any]) -> None:
        """See whether another gate guards this engine by other figures."""
        pool = pool_of(found["pool"])
        other = pool if pool != self.pool else None
        if other is not None and other != self.other_pool:
            log.warning("another gate guards another pool", extra={"its": repr(other), "mine": repr(self.pool)})
        self.other_pool = other
