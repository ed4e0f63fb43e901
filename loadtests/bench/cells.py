"""One cell of the table: one proxy under one load, for some seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from loadtests.bench import client
from loadtests.bench.client import Figures, Load
from loadtests.bench.processes import ROOT, cpu_s, resident_kb

if TYPE_CHECKING:
    from loadtests.bench.bodies import Body
    from loadtests.bench.proxies import Proxy

_QUIET_S: Final = 0.2
_QUIET_MAX_S: Final = 5.0
_MARGIN_S: Final = 120.0


def settle(proxy: Proxy) -> None:
    """Wait until a proxy has finished what the last load left behind, but not for long."""
    deadline = time.monotonic() + _QUIET_MAX_S
    while time.monotonic() < deadline:
        before_s = cpu_s(proxy.pids())
        time.sleep(_QUIET_S)
        if cpu_s(proxy.pids()) - before_s < _QUIET_S / 5:
            return


def _client(load: Load) -> list[str]:
    command = [sys.executable, "-m", "loadtests.bench.client", "--url", load.url, "--body", str(load.body)]
    command += ["--connections", str(load.connections), "--seconds", str(load.seconds)]
    return [*command, *(["--key", load.key] if load.key else []), *(["--cut"] if load.cut else [])]


def asked(proxy: Proxy, body: Body, connections: int, seconds: float, *, own: bool = False) -> Figures:
    """Whole answers by wrk where it is installed (and not `own`), else by the client here; streams by the latter."""
    load = Load(proxy.url, body.path, proxy.key, connections, seconds)
    program = None if own else shutil.which("wrk")
    if program is not None:
        return client.wrk(program, load)
    done = subprocess.run(
        _client(load), cwd=ROOT, capture_output=True, text=True, check=True, timeout=seconds + _MARGIN_S
    )
    return Figures(**json.loads(done.stdout))


def throughput(proxy: Proxy, body: Body, connections: int, seconds: float) -> dict[str, float]:
    """Requests a second with so many clients, and what each costs; nothing where none was answered."""
    pids = proxy.pids()
    before_s = cpu_s(pids)
    found = asked(proxy, body, connections, seconds)
    spent_s = cpu_s(pids) - before_s
    if found.requests == 0:
        return {"errors": float(found.errors)}
    values = {f"rps_{body.label}": found.requests_per_s, "errors": float(found.errors)}
    if pids:
        values[f"cpu_{body.label}"] = spent_s / found.requests * 1000
    return values


def latency(proxy: Proxy, body: Body, seconds: float) -> float | None:
    """The median answer time of one client alone, microseconds."""
    found = asked(proxy, body, 1, seconds)
    return found.p50_ms * 1000 if found.requests else None


def flat_out(proxy: Proxy, body: Body, streams: int, seconds: float) -> dict[str, float]:
    """Chunks a second of streams without a pace."""
    found = asked(proxy, body, streams, seconds, own=True)
    return {"flat_chunks": found.events_per_s, "errors": float(found.errors)}


def paced(proxy: Proxy, body: Body, streams: int, seconds: float) -> dict[str, float]:
    """Streams with a pace: what a chunk costs, how long it is under way, and the memory of a stream that is open."""
    pids = proxy.pids()
    empty_kb = resident_kb(pids)
    command = _client(Load(proxy.url, body.path, proxy.key, streams, seconds, cut=True))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(seconds * 0.5)
        begun_s, before_s = time.monotonic(), cpu_s(pids)
        time.sleep(seconds * 0.4)
        lasted_s, spent_s = time.monotonic() - begun_s, cpu_s(pids) - before_s
        open_kb = resident_kb(pids)
        out, _ = process.communicate(timeout=_MARGIN_S)
    found = Figures(**json.loads(out))
    values = {"paced_on_the_way": found.on_the_way_p50_us, "errors": float(found.errors)}
    if pids and found.events:
        values["paced_cpu"] = spent_s / (found.events_per_s * lasted_s) * 1e6
        values["stream_kb"] = max(open_kb - empty_kb, 0) / streams
    return values
