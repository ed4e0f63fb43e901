"""Kills gates, the store and the engine at random under load; afterwards the ledger must equal the engine's slots.

    python -m loadtests.chaos [--kills 30] [--gates 3] [--seed 1]

What is killed is started again a moment later. Clients go on all the time; what they get is counted by status and
reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from loadtests.fleet import CHAT, Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

POOL_TOKENS = 1024
SLOTS = 4
CLIENTS = 8
PAUSE_S = (1.0, 4.0)
DOWN_S = (0.2, 3.0)
SETTLED_S = 90.0
LEASE_TTL_S = 4


def main() -> int:
    """0 where the ledger and the slots agree at the end and nothing overflowed, 1 where not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--gates", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    flags = ["-c", str(POOL_TOKENS), "-np", str(SLOTS), "--kv-unified", "--no-cache-prompt", "--cache-ram", "0"]
    tenants = {f"t{at}": "queue_timeout_s = 20\n" for at in range(CLIENTS)}
    config = f"[store]\nlease_ttl_s = {LEASE_TTL_S}\n"
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-chaos-") as scratch,
        Fleet(Path(scratch), [*flags, "--no-cache-idle-slots"], options.gates, tenants, config) as fleet,
    ):
        return asyncio.run(_chaos(fleet, options.kills, options.seed))


async def _chaos(fleet: Fleet, kills: int, seed: int) -> int:
    draw = random.Random(seed)
    heard: Counter[str] = Counter()
    stop = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.create_task(_client(session, fleet, at, heard, stop)) for at in range(CLIENTS)]
        for number in range(1, kills + 1):
            await asyncio.sleep(draw.uniform(*PAUSE_S))
            victim = await _kill_one(fleet, draw)
            print(f"kill {number} of {kills}: {victim}", file=sys.stderr, flush=True)
        await asyncio.sleep(2)
        stop.set()
        await asyncio.gather(*clients)
    print(f"\n{kills} kills; what {CLIENTS} clients got:\n")
    for what, times in heard.most_common():
        print(f"{what:<32} {times:>6}")
    overflowed = sum(times for what, times in heard.items() if "engine_overflow" in what)
    begun_s = time.monotonic()
    try:
        await asyncio.to_thread(fleet.until_empty, SETTLED_S)
    except AssertionError as error:
        print(f"\nthe ledger and the engine's slots differ: {error}")
        return 1
    took_s = time.monotonic() - begun_s
    print(f"\nthe ledger is empty on every gate and every slot is idle, {took_s:.1f} s after the last request")
    print(f"{overflowed} overflows at the engine")
    return 1 if overflowed else 0


async def _kill_one(fleet: Fleet, draw: random.Random) -> str:
    """Kill something, wait a moment, start it again."""
    kind = draw.choices(("gate", "store", "engine"), weights=(2, 1, 1))[0]
    back: Callable[[], None]
    if kind == "gate":
        at = draw.randrange(len(fleet.members))
        kill, back, name = fleet.members[at].kill, fleet.members[at].start, f"gate {at}"
    elif kind == "engine":
        kill, back, name = fleet.engine.kill, fleet.engine.start, "engine"
    else:
        kill, back, name = lambda: _kill_store(fleet), lambda: None, "store"  # a gate starts it again by itself
    await asyncio.to_thread(kill)
    down_s = draw.uniform(*DOWN_S)
    await asyncio.sleep(down_s)
    await asyncio.to_thread(back)
    return f"{name}, back after {down_s:.1f} s"


def _kill_store(fleet: Fleet) -> None:
    """End the embedded store by the pid that it tells."""
    import redis  # noqa: PLC0415 - for this one command

    socket = next(iter(fleet.directory.rglob("valkey.sock")), None)
    if socket is None:
        return
    with contextlib.suppress(redis.RedisError, OSError), redis.Redis(unix_socket_path=str(socket)) as client:
        os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)


async def _client(
    session: aiohttp.ClientSession, fleet: Fleet, at: int, heard: Counter[str], stop: asyncio.Event
) -> None:
    """Ask, again and again: streams and whole answers, and now and then a hang-up in the middle."""
    draw = random.Random(at)
    while not stop.is_set():
        gate = draw.choice(fleet.members)
        stream, leave_s = draw.random() < 0.5, draw.uniform(0.2, 3) if draw.random() < 0.2 else 120
        body = _body(draw, stream=stream)
        try:
            async with asyncio.timeout(leave_s):
                what = await _ask(session, gate.url, body, f"t{at}")
            heard[what] += 1
            if what.startswith(("503", "429")):
                await asyncio.sleep(0.5)
        except TimeoutError:
            heard["hung up"] += 1
        except (aiohttp.ClientError, OSError) as error:
            heard[f"no answer ({type(error).__name__})"] += 1
            await asyncio.sleep(0.2)


def _body(draw: random.Random, *, stream: bool) -> dict[str, Any]:
    words = " ".join(draw.choice(("river", "stone", "green", "seven")) for _ in range(draw.randint(5, 150)))
    messages = [{"role": "user", "content": words}]
    return {"messages": messages, "max_tokens": draw.randint(1, 60), "ignore_eos": True, "stream": stream}


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], tenant: str) -> str:
    async with session.post(url + CHAT, json=body, headers={"x-api-key": f"sk-{tenant}"}) as answer:
        raw = await answer.read()
    reason = answer.headers.get("x-kvgate-reason", "")
    if answer.status == 200 and body["stream"]:
        if b'"error"' in raw:
            reason = raw.partition(b'"reason": "')[2].partition(b'"')[0].decode()
            return f"200, then {reason or 'an error'}"
        return "200" if raw.endswith(b"[DONE]\n\n") else "200, cut without a word"
    return f"{answer.status} {reason}".strip()


if __name__ == "__main__":
    sys.exit(main())
