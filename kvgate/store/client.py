"""How a client of the store is made, so that it can be cancelled and never repeats a command on its own."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from kvgate.store.script_line import Address, ScriptLine

CONNECT_TIMEOUT_S = 2.0

CLUSTER: Final = frozenset({"cluster", "clusters"})
SENTINEL: Final = frozenset({"sentinel", "sentinels"})
_PORTS: Final = {"cluster": 6379, "clusters": 6379, "sentinel": 26379, "sentinels": 26379}

StoreClient = Redis | RedisCluster


class Master(Redis):
    """The master that Sentinels know; closing it closes the connections to them too, which redis-py leaves open."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close everything."""
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


class Server(Redis):
    """One server, whose scripts run over a pipelined connection of their own where that needs no TLS."""

    line: ScriptLine | None = None

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close everything."""
        await super().aclose(close_connection_pool)
        if self.line is not None:
            await self.line.aclose()


def scripting(client: StoreClient) -> Any:
    """What the ledger's scripts are run with: `evalsha` and `eval`, as redis-py has them."""
    if not isinstance(client, Server) or client.connection_pool.connection_class is SSLConnection:
        return client
    if client.line is None:
        client.line = ScriptLine(Address.of(client.connection_pool.connection_kwargs))
    return client.line


def connect(url: str) -> StoreClient:
    """A client of the store; it connects at its first command. Close it.

    One server: `redis://`, `rediss://` (TLS) or `unix://`. A cluster: `cluster://HOST:PORT,HOST:PORT`. The master
    that Sentinels know: `sentinel://HOST:PORT,HOST:PORT/NAME`. `clusters://` and `sentinels://` with TLS; all of them
    with `USER:PASSWORD@` in front where the servers ask for it.

    It has no timeout for a command of its own: callers bound theirs with `asyncio.timeout`. With one, redis-py
    sends through `asyncio.wait_for`, which on Python 3.11 loses a cancellation that comes while it returns (CPython
    issue 86296): the command of a client that hung up would go on. And it does not retry: whether a command may
    run twice is for its caller to know. (A cluster's client asks again where it was sent to the wrong node.)

    Raises:
        ValueError: it is none of these.
    """
    parts = urlsplit(url)
    if parts.scheme in CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in _addresses(parts)]
        return RedisCluster(startup_nodes=nodes, **_options(parts))
    if parts.scheme in SENTINEL:
        name = parts.path.strip("/")
        if not name:
            raise ValueError("store.url must name the master that the Sentinels watch: sentinel://HOST:PORT/NAME")
        tls = {"ssl": True} if parts.scheme == "sentinels" else {}
        untyped: Any = Sentinel
        sentinel = untyped(_addresses(parts), sentinel_kwargs={**_UNTIMED, **tls}, **_UNTIMED)
        master: Redis = sentinel.master_for(name, redis_class=Master, **_options(parts))
        return master
    client: Redis = Server.from_url(url, **_UNTIMED, retry=Retry(NoBackoff(), 0))
    return client


_UNTIMED: Final[dict[str, Any]] = {"socket_timeout": None, "socket_connect_timeout": CONNECT_TIMEOUT_S}


def _options(parts: SplitResult) -> dict[str, Any]:
    given = {"username": parts.username, "password": parts.password}
    options = {name: unquote(value) for name, value in given.items() if value}
    tls = {"ssl": True} if parts.scheme in {"clusters", "sentinels"} else {}
    return {**_UNTIMED, **options, **tls}


def _addresses(parts: SplitResult) -> list[tuple[str, int]]:
    found = []
    for address in parts.netloc.rpartition("@")[2].split(","):
        host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
        if not host or (port and not port.isdigit()):
            raise ValueError(f"store.url: {address!r} is not HOST:PORT")
        found.append((host.strip("[]"), int(port or _PORTS[parts.scheme])))
    return found
