"""A closed-loop HTTP client that adds little: each connection sends its next request when the last one is answered.

    python -m loadtests.bench.client --url URL --body FILE [--connections 32] [--seconds 2] [--key KEY]

`@@@@@@@@` in the body becomes a number of eight digits, another one in each request. It prints one JSON object:
requests, errors, latencies, and of streams the events and how long each was under way (the fast upstream writes the
moment of sending into it). Where wrk is installed, `wrk` here runs that instead for whole answers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

CHAT: Final = "/v1/chat/completions"
COUNTER: Final = b"@@@@@@@@"
_STAMP = re.compile(rb'"content": ?"(\d{8}\.\d{6})"')
_TOKEN = re.compile(rb'"delta": ?\{"content"')
_LATE_S: Final = 60.0


@dataclass
class Heard:
    """What the connections heard, seconds and counts.

    `first_s` is the time to the first event of a stream, `on_the_way_s` that of each event from the upstream's write
    to the client's read.
    """

    seconds: float = 0.0
    requests: int = 0
    errors: int = 0
    events: int = 0
    latencies_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    on_the_way_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """One run's figures: a second, milliseconds, and microseconds on the way."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    requests: int
    events_per_s: float = 0.0
    events: int = 0
    first_p50_ms: float = 0.0
    on_the_way_p50_us: float = 0.0


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie; 0 of none."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


class Connection(asyncio.Protocol):
    """One of the clients."""

    def __init__(self, requests: Any, heard: Heard, until_s: float) -> None:
        self._requests, self._heard, self._until_s = requests, heard, until_s
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._begun_s = 0.0
        self._first, self._part = True, b""
        self._begun, self._kept, self._stopped = False, False, False
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it is over; True asks for another connection, since the server closed this one between two."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._begun_s = time.monotonic()
        if self._transport is None or self._begun_s >= self._until_s:
            self._end(again=False)
            return
        self._parser, self._first, self._part = httptools.HttpResponseParser(self), True, b""
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._heard.errors += 1
            self._end(again=True)

    def on_body(self, body: bytes) -> None:
        """Events, where it is a stream; one may come in two parts."""
        now_s, whole = time.monotonic(), self._part + body
        end = whole.rfind(b"\n\n") + 2
        if end < 2:
            self._part = whole
            return
        self._part = whole[end:]
        stamps = _STAMP.findall(whole, 0, end)
        events = len(stamps) or len(_TOKEN.findall(whole, 0, end))
        self._heard.events += events
        if stamps:
            self._heard.on_the_way_s.append(now_s - float(stamps[-1]))
        if events and self._first:
            self._first = False
            self._heard.first_s.append(now_s - self._begun_s)

    def on_message_complete(self) -> None:
        """One more was answered."""
        if self._stopped:
            return
        now_s = time.monotonic()
        if self._parser.get_status_code() == 200:
            self._heard.requests += 1
            self._heard.latencies_s.append(now_s - self._begun_s)
        else:
            self._heard.errors += 1
        self._begun, self._kept = False, True
        if self._parser.should_keep_alive():
            asyncio.get_running_loop().call_soon(self._send)
        else:
            self._end(again=now_s < self._until_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by the server: an error, but on a kept connection before a byte of the next answer."""
        del exc
        if not self.done.done():
            self._heard.errors += self._begun or not self._kept
            self._end(again=True)

    def hang_up(self) -> None:
        """Leave in the middle of an answer."""
        self._end(again=False)

    def _end(self, *, again: bool) -> None:
        self._stopped = True
        if not self.done.done():
            self.done.set_result(again)
        if self._transport is not None:
            self._transport.close()


@dataclass(frozen=True)
class Load:
    """What is asked, and for how long.

    Args:
        url: of the proxy.
        body: file with the chat.
        key: its tenant's, where it wants one.
        connections: side by side, each with one request after the other.
        seconds: until the last request is begun.
        cut: hang up then, rather than hear to its end what was begun.
    """

    url: str
    body: Path
    key: str | None
    connections: int
    seconds: float
    cut: bool = False


async def _one(load: Load, requests: Any, heard: Heard, until_s: float) -> None:
    loop, parts = asyncio.get_running_loop(), urlsplit(load.url)
    host, port, late_s = str(parts.hostname), int(parts.port or 80), 0.0 if load.cut else _LATE_S
    while time.monotonic() < until_s:
        try:
            _, connection = await loop.create_connection(lambda: Connection(requests, heard, until_s), host, port)
        except OSError:
            heard.errors += 1
            await asyncio.sleep(0.05)
            continue
        try:
            async with asyncio.timeout_at(loop.time() + max(until_s - time.monotonic(), 0) + late_s):
                await connection.done
        except TimeoutError:
            heard.errors += not load.cut
            connection.hang_up()
            return


def requests_of(url: str, body: bytes, key: str | None) -> Any:
    """Requests without end, each with a number of its own."""
    authority = urlsplit(url).netloc
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    start = f"{head}Content-Length: {len(body)}\r\n\r\n".encode()
    before, counter, after = body.partition(COUNTER)
    if not counter:
        return itertools.repeat(start + body)
    before = start + before
    return (b"%b%08d%b" % (before, number, after) for number in itertools.count(1))


async def ask(load: Load) -> Heard:
    """Ask for so long."""
    heard, requests = Heard(), requests_of(load.url, load.body.read_bytes(), load.key)
    begun_s = time.monotonic()
    await asyncio.gather(*(_one(load, requests, heard, begun_s + load.seconds) for _ in range(load.connections)))
    heard.seconds = time.monotonic() - begun_s
    return heard


def figures(heard: Heard) -> Figures:
    """What was heard, in figures."""
    return Figures(
        requests_per_s=heard.requests / heard.seconds,
        p50_ms=quantile(heard.latencies_s, 0.5) * 1e3,
        p99_ms=quantile(heard.latencies_s, 0.99) * 1e3,
        errors=heard.errors,
        requests=heard.requests,
        events_per_s=heard.events / heard.seconds,
        events=heard.events,
        first_p50_ms=quantile(heard.first_s, 0.5) * 1e3,
        on_the_way_p50_us=quantile(heard.on_the_way_s, 0.5) * 1e6,
    )


_WRK_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local key, path = os.getenv("BENCH_KEY"), os.getenv("BENCH_BODY")
if key ~= "" then wrk.headers["Authorization"] = "Bearer " .. key end
local file = io.open(path, "rb")
local body = file:read("*all")
file:close()
local from, to = body:find("@@@@@@@@", 1, true)
local before, after, number = body:sub(1, from - 1), body:sub(to + 1), 0
function request()
  number = number + 1
  return wrk.format(nil, nil, nil, before .. string.format("%08d", number) .. after)
end
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format("\\nBENCH %d %d %d %.3f %.3f\\n", summary.requests, summary.duration,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


def wrk(program: str, load: Load) -> Figures:
    """The same by wrk, which takes less of the machine.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    script = load.body.parent / "wrk.lua"
    script.write_text(_WRK_SCRIPT)
    command = [program, "-t", "1", "-c", str(load.connections), "-d", f"{max(round(load.seconds), 1)}s"]
    command += ["--timeout", "30s", "-s", str(script), load.url + CHAT]
    done = subprocess.run(
        command,
        env={"BENCH_KEY": load.key or "", "BENCH_BODY": str(load.body)},
        capture_output=True,
        text=True,
        check=False,
        timeout=load.seconds + 90,
    )
    found = re.search(r"^BENCH (\d+) (\d+) (\d+) (\S+) (\S+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"wrk failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    requests, micros, errors = int(found[1]), int(found[2]), int(found[3])
    return Figures(requests / (micros / 1e6), float(found[4]) / 1e3, float(found[5]) / 1e3, errors, requests)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description="A closed-loop client.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--body", required=True, type=Path, metavar="FILE")
    parser.add_argument("--key")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--cut", action="store_true", help="hang up when the time is over")
    options = parser.parse_args()
    load = Load(options.url, options.body, options.key, options.connections, options.seconds, options.cut)
    print(json.dumps(asdict(figures(asyncio.run(ask(load))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
