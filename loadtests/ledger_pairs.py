"""Pairs of reserve and settle a second at the shared ledger, and what a queue of thousands does to them.

    python -m loadtests.ledger_pairs [--pairs 2000] [--waiting 0,100,1000,10000]

For each server to be had: through one gate's `SharedLedger` (client and server together, and the processor time of
each), then at the scripts alone with so many tenants waiting, one request each: every round reserves, settles,
and claims what was granted. Last, so many tenants wait for cells that are not free, beside a free slot: what it costs
to find that nobody fits, and to find the one behind them all that does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvgate.core.ask import Size
from kvgate.core.fairness import FairRule
from kvgate.core.ledger import Lease, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Quota
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey, server_binaries
from kvgate.store.ledger_scripts import LedgerScripts, pool_json, reservation_json, rule_json
from kvgate.store.shared_ledger import SharedLedger, SharedSettings

POOL = KvPool(tokens=16_000, slots=16, tokens_per_slot=1000)
UNIFIED = KvPool(tokens=16_000, slots=16, tokens_per_slot=16_000, prompt_shared=True)
AT_ONCE = (1, 8, 100)


@dataclass
class Bench:
    """One server, and what is measured on it."""

    name: str
    client: Any
    pairs: int
    numbers: itertools.count[int]

    def reservation(self, tenant: str) -> Reservation:
        """One more request."""
        return Reservation(f"r{next(self.numbers)}", tenant, Quota(), Size(100, 50))

    async def through_a_gate(self, at_once: int) -> None:
        """So many clients, each with one request after the other."""
        ledger = SharedLedger(self.client, f"gate{at_once}", time.monotonic, SharedSettings())
        beside = asyncio.create_task(ledger.run())

        async def client(number: int) -> None:
            for _ in range(max(self.pairs // at_once, 1)):
                reservation = self.reservation(f"t{number}")
                assert isinstance(await ledger.reserve(reservation, POOL), Lease)
                ledger.hand_over(reservation.lease_id)
                await ledger.settle(reservation.lease_id, ended=True)

        await client(0) if at_once == 1 else None  # connections and scripts are there
        begun, client_s, server_s = time.perf_counter(), time.process_time(), await self.server_s()
        await asyncio.gather(*(client(number) for number in range(at_once)))
        took_s, pairs = time.perf_counter() - begun, max(self.pairs // at_once, 1) * at_once
        client_us = (time.process_time() - client_s) / pairs * 1e6
        server_us = (await self.server_s() - server_s) / pairs * 1e6
        print(
            f"{self.name:13} {at_once:4} at once: {pairs / took_s:6.0f} pairs/s, processor time a pair: "
            f"client {client_us:.0f} us, server {server_us:.0f} us"
        )
        beside.cancel()
        await asyncio.wait([beside])
        await ledger.leave()

    async def behind_a_queue(self, waiting: int) -> None:
        """So many tenants wait; whoever ends lets the first of them in, and another one comes."""
        scripts = LedgerScripts(self.client, f"queue{waiting}")
        kept = {"ttl": 3_600_000, "drain_max": 3_600_000, "server": "", "knew": False}
        await scripts.run("join", gate="g", pool=pool_json(POOL), **kept)
        running = []
        for number in range(POOL.slots + waiting):
            reservation = self.reservation(f"t{number}")
            found = await scripts.run("reserve", gate="g", **reservation_json(reservation))
            running += [reservation.lease_id] if "lease" in found else []
        rounds, slowest_s = self.pairs // 4, 0.0
        begun, server_s = time.perf_counter(), await self.server_s()
        for number in range(rounds):
            at_s = time.perf_counter()
            ended, reservation = running.pop(0), self.reservation(f"u{number}")
            found = await scripts.run("settle", id=ended, ended=True, handed_age=1)
            more = await scripts.run("reserve", gate="g", **reservation_json(reservation))
            for lease_id in found.get("granted", ()):
                await scripts.run("claim", id=lease_id)
                running.append(lease_id)
            running += [reservation.lease_id] if "lease" in more else []
            slowest_s = max(slowest_s, time.perf_counter() - at_s)
        server_us = (await self.server_s() - server_s) / rounds * 1e6
        took_s = time.perf_counter() - begun
        print(
            f"{self.name:13} {waiting:6} tenants waiting: {rounds / took_s:6.0f} rounds/s, "
            f"server {server_us:.0f} us a round, slowest round {slowest_s * 1e3:.1f} ms"
        )

    async def behind_the_blocked(self, blocked: int, prompt: int) -> float:
        """So many tenants wait for cells that are not free; one more comes with this prompt, and goes again.

        Processor time of the server for one step, in microseconds.
        """
        scripts = LedgerScripts(self.client, f"blocked{blocked}-{prompt}")
        rule = rule_json(FairRule(bypass_max=1_000_000))
        kept = {"ttl": 3_600_000, "drain_max": 3_600_000, "server": "", "knew": False, "rule": rule}
        await scripts.run("join", gate="g", pool=pool_json(UNIFIED), **kept)
        for number in range(blocked + 1):
            reservation = replace(self.reservation(f"t{number}"), size=Size(9000 + number % 1000, 50))
            await scripts.run("reserve", gate="g", **reservation_json(reservation))
        rounds, slowest_s = self.pairs // 4, 0.0
        server_s = await self.server_s()
        for number in range(rounds):
            at_s = time.perf_counter()
            reservation = replace(self.reservation(f"u{number}"), size=Size(prompt, 50))
            await scripts.run("reserve", gate="g", **reservation_json(reservation))
            await scripts.run("settle", id=reservation.lease_id, ended=True, handed_age=1)
            slowest_s = max(slowest_s, time.perf_counter() - at_s)
        step_us = (await self.server_s() - server_s) / rounds / 2 * 1e6
        what = "the last fits" if prompt < 1000 else "nobody fits"
        print(
            f"{self.name:13} {blocked:6} tenants blocked, {what:13}: server {step_us:.0f} us a step, "
            f"slowest two {slowest_s * 1e3:.1f} ms"
        )
        return step_us

    async def server_s(self) -> float:
        """Processor time that the server has used."""
        found = await self.client.info("cpu")
        return float(found["used_cpu_sys"] + found["used_cpu_user"])


async def main(pairs: int, waiting: list[int]) -> None:
    """Measure every server to be had."""
    for name, binary in server_binaries().items():
        with tempfile.TemporaryDirectory() as directory:
            store = EmbeddedValkey(Path(directory), binary=binary)
            await store.start()
            client = connect(store.url)
            bench = Bench(name, client, pairs, itertools.count())
            for at_once in AT_ONCE:
                await bench.through_a_gate(at_once)
            for depth in waiting:
                await bench.behind_a_queue(depth)
            for prompt in (9000, 100):
                alone_us = await bench.behind_the_blocked(0, prompt)
                for depth in filter(None, waiting):
                    step_us = await bench.behind_the_blocked(depth, prompt)
                    print(f"{'':13} {step_us / alone_us:.2f} of a step behind nobody")
            await client.aclose()
            await store.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--waiting", default="0,100,1000,10000")
    options = parser.parse_args()
    asyncio.run(main(options.pairs, [int(depth) for depth in options.waiting.split(",")]))
