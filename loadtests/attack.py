"""The unified-pool attack over several gates: does the engine's shared KV cache ever overflow, and what does it cost?

    python -m loadtests.attack [--rounds 20] [--gates 4]

Each round asks everything at once, from many tenants, spread over the gates. The peer is the best that clients can
do without a ledger: the largest concurrency at which the worst requests still fit beside each other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.fleet import Fleet, Heard, gathered, say

POOL_TOKENS = 1024
SLOTS = 4
PROMPT_WORDS = (40, 320)
OUTPUT_TOKENS = (16, 120)
WORDS = ("river", "stone", "green", "seven", "cloud", "paper", "music", "horse", "lemon", "alpha")
TEMPLATE_TOKENS = 40


def main() -> int:
    """0 where nothing overflowed through kvgate, 1 where something did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--gates", type=int, default=4)
    parser.add_argument("--asks", type=int, default=10, help="requests a round")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tenants = {f"t{at}": "queue_timeout_s = 600\n" for at in range(options.asks)}
    flags = ["-c", str(POOL_TOKENS), "-np", str(SLOTS), "--kv-unified", "--no-cache-prompt", "--cache-ram", "0"]
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-attack-") as scratch,
        Fleet(Path(scratch), [*flags, "--no-cache-idle-slots"], options.gates, tenants) as fleet,
    ):
        return asyncio.run(_attack(fleet, options.rounds, options.asks, options.seed))


async def _attack(fleet: Fleet, rounds: int, asks: int, seed: int) -> int:
    worst = PROMPT_WORDS[1] + TEMPLATE_TOKENS + OUTPUT_TOKENS[1]
    safe = max(POOL_TOKENS // worst, 1)
    everything: dict[str, list[tuple[float, list[Heard]]]] = {"bare": [], "client": [], "kvgate": []}
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(rounds):
            draw = random.Random(seed * 1000 + number)
            bodies = [_body(draw) for _ in range(asks)]
            for kind, found in everything.items():
                begun_s = time.monotonic()
                heard = await _round(kind, fleet, session, bodies, safe)
                found.append((time.monotonic() - begun_s, heard))
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    fleet.until_empty(60)
    print(f"\none KV cache of {POOL_TOKENS} tokens, {SLOTS} slots; {asks} requests a round\n")
    return _report(everything, safe, len(fleet.members))


async def _round(
    kind: str, fleet: Fleet, session: aiohttp.ClientSession, bodies: list[dict[str, Any]], safe: int
) -> list[Heard]:
    if kind == "kvgate":
        gates = fleet.members
        return await gathered(
            *(say(session, gates[at % len(gates)].url, body, f"t{at}") for at, body in enumerate(bodies))
        )
    at_once = asyncio.Semaphore(safe if kind == "client" else len(bodies))

    async def one(body: dict[str, Any]) -> Heard:
        async with at_once:
            return await say(session, fleet.engine.url, body)

    return await gathered(*(one(body) for body in bodies))


def _body(draw: random.Random) -> dict[str, Any]:
    words = " ".join(draw.choice(WORDS) for _ in range(draw.randint(*PROMPT_WORDS)))
    messages = [{"role": "user", "content": words}]
    limit = draw.randint(*OUTPUT_TOKENS)
    return {"messages": messages, "max_tokens": limit, "ignore_eos": True, "temperature": 0, "cache_prompt": False}


def _report(everything: dict[str, list[tuple[float, list[Heard]]]], safe: int, gates: int) -> int:
    names = {
        "bare": "bare engine",
        "client": f"client-side limit, {safe} at once",
        "kvgate": f"kvgate, {gates} gates",
    }
    print(f"{'':<28} {'answered':>9} {'overflowed':>11} {'other':>6} {'tokens/s':>9}")
    rates, overflows = {}, Counter[str]()
    for kind, rounds in everything.items():
        heard = [one for _, answers in rounds for one in answers]
        served = [one for one in heard if one.status == 200]
        lost = [one for one in heard if "exceeded" in one.code or one.code == "engine_overflow"]
        overflows[kind] = len(lost)
        rates[kind] = sum(one.output_tokens for one in served) / sum(seconds for seconds, _ in rounds)
        others = len(heard) - len(served) - len(lost)
        print(f"{names[kind]:<28} {len(served):>9} {len(lost):>11} {others:>6} {rates[kind]:>9.1f}")
    print(f"\nkvgate's throughput is {rates['kvgate'] / rates['client']:.2f} x that of the client-side limit.")
    return 1 if overflows["kvgate"] else 0


if __name__ == "__main__":
    sys.exit(main())
