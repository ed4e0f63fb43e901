"""The process behind a port of this machine is found, and its memory read; of others nothing is said."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from kvgate.lab.process_memory import pid_of, rss_mib

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_the_process_that_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert pid_of(url) == os.getpid()
    assert pid_of(url) is None


@pytest.mark.parametrize("url", ["http://10.1.2.3:80", "http://127.0.0.1", "https://engine.example:8080/x"])
def test_another_machines_process_is_nobodys(url: str) -> None:
    assert pid_of(url) is None


def test_memory_that_is_used_shows() -> None:
    before = rss_mib(os.getpid())
    held = b"x" * (64 * 2**20)
    after = rss_mib(os.getpid())
    assert before is not None
    assert after is not None
    assert 32 < after - before < 128
    assert held


@pytest.mark.parametrize("pid", [None, 2**22 + 1])
def test_of_no_process_nothing_is_known(pid: int | None) -> None:
    assert rss_mib(pid) is None
