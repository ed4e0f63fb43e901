"""A flood of long prompts against a tenant with a guaranteed slot: what its time to the first token becomes.

    python -m loadtests.fairness [--asks 20] [--flood 6] [--whole-model]

The same victim and the same flood, three times in one run: the victim alone, both through kvgate, and both straight
at the engine. The goal is 1.5 times what it takes alone, plus one prefill batch, since a batch that has begun is not
interrupted by anybody: the batch is one prompt of the flood here, and how long that takes is measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from kvgate.lab.fetch import fetch_model
from loadtests.fleet import CHAT, Fleet
from tests.e2e.one_layer import one_layer

SLOTS, N_CTX_SLOT = 4, 1024
FLOOD_WORDS, FLOOD_OUTPUT = 500, 16
VICTIM_WORDS, VICTIM_OUTPUT = 20, 8
PREFILL_TOKENS_MAX = 256
"""Less than one prompt of the flood: each goes alone, and none begins while the victim's is being read."""

WORDS = ("river", "stone", "green", "seven", "cloud", "paper", "music", "horse", "lemon", "alpha")
TENANTS = {
    "victim": f'tier = "guaranteed"\nguaranteed_ratio = {1 / SLOTS}\nqueue_timeout_s = 600\n',
    "flood": "queue_timeout_s = 600\n",
}
CONFIG = f"[engine]\nprefill_tokens_max = {PREFILL_TOKENS_MAX}\n[fairness]\nlent_output_tokens_max = 0\n"
GOAL = 1.5


def main() -> int:
    """0 where all was answered; how fast is for people to read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asks", type=int, default=20, help="of the victim, each time")
    parser.add_argument("--flood", type=int, default=6, help="clients that send long prompts without a pause")
    parser.add_argument("--whole-model", action="store_true", help="not just its first layer: thirty times the time")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    flags = ["-c", str(SLOTS * N_CTX_SLOT), "-np", str(SLOTS), "--no-kv-unified", "--no-cache-prompt"]
    flags += ["--cache-ram", "0", "--no-cache-idle-slots"]
    with tempfile.TemporaryDirectory(prefix="kvgate-fairness-") as scratch, contextlib.ExitStack() as stack:
        if not options.whole_model:
            flags += ["-m", str(one_layer(fetch_model(), Path(scratch) / "one-layer.gguf"))]
        fleet = stack.enter_context(Fleet(Path(scratch), flags, 1, TENANTS, CONFIG))
        return asyncio.run(_measure(fleet, options.asks, options.flood, random.Random(options.seed)))


async def _measure(fleet: Fleet, asks: int, flood: int, chance: random.Random) -> int:
    gate, engine = fleet.members[0].url, fleet.engine.url
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        one = Clients(session, chance)
        await one.first_token_s(engine, VICTIM_WORDS, VICTIM_OUTPUT)  # the engine's first answer takes longer
        batch = [await one.first_token_s(engine, FLOOD_WORDS, 1) for _ in range(5)]
        found = {"alone": await one.victim(gate, asks)}
        for name, url in (("flood, kvgate", gate), ("flood, bare engine", engine)):
            found[name] = await one.victim_in_a_flood(url, asks, flood)
            await asyncio.to_thread(fleet.until_empty, 120)
    _report(found, percentile(batch, 0.5), one.refused)
    return 1 if one.refused else 0


class Clients:
    """The victim, and the flood beside it."""

    def __init__(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        self._session = session
        self._chance = chance
        self.refused = 0

    async def first_token_s(self, url: str, words: int, output: int, tenant: str | None = None) -> float:
        """Ask for a stream and read it to its end; how long its first event took."""
        text = " ".join(self._chance.choice(WORDS) for _ in range(words))
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": output}
        body |= {"stream": True, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        headers = {"Authorization": f"Bearer sk-{tenant}"} if tenant else {}
        begun_s, first_s = time.monotonic(), 0.0
        async with self._session.post(url + CHAT, json=body, headers=headers) as answer:
            async for data in answer.content.iter_any():
                if data and not first_s:
                    first_s = time.monotonic() - begun_s
            self.refused += answer.status != 200
        return first_s

    async def victim(self, url: str, asks: int) -> list[float]:
        """One short request after the other, with pauses of no rhythm."""
        found = []
        for number in range(asks):
            await asyncio.sleep(self._chance.uniform(0.0, 0.3))
            found.append(await self.first_token_s(url, VICTIM_WORDS, VICTIM_OUTPUT, "victim"))
            print(f"{number + 1} of {asks} ({found[-1] * 1e3:.0f} ms)", end="\r", file=sys.stderr, flush=True)
        return found

    async def victim_in_a_flood(self, url: str, asks: int, clients: int) -> list[float]:
        """The same while so many clients send long prompts without a pause."""

        async def without_a_pause() -> None:
            for _ in itertools.count():
                await self.first_token_s(url, FLOOD_WORDS, FLOOD_OUTPUT, "flood")

        flood = [asyncio.create_task(without_a_pause()) for _ in range(clients)]
        await asyncio.sleep(2.0)
        try:
            return await self.victim(url, asks)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.wait(flood)


def percentile(figures: list[float], part: float) -> float:
    """The least figure that so large a part does not exceed."""
    return sorted(figures)[min(int(part * len(figures)), len(figures) - 1)]


def _report(found: dict[str, list[float]], batch_s: float, refused: int) -> None:
    alone_s = percentile(found["alone"], 0.95)
    print(f"\n{'time to the first token':<24} {'p50 ms':>8} {'p95 ms':>8} {'p95 / alone':>12}")
    for name, figures in found.items():
        p50_s, p95_s = percentile(figures, 0.5), percentile(figures, 0.95)
        print(f"{name:<24} {p50_s * 1e3:>8.0f} {p95_s * 1e3:>8.0f} {p95_s / alone_s:>12.2f}")
    goal_s = GOAL * alone_s + batch_s
    with_s, without_s = (percentile(found[name], 0.95) for name in ("flood, kvgate", "flood, bare engine"))
    print(
        f"\none prefill batch: {batch_s * 1e3:.0f} ms; the goal: {GOAL} x alone + one batch = {goal_s * 1e3:.0f} ms"
    )
    print(f"with kvgate p95 is {with_s / goal_s:.2f} x the goal, without {without_s / goal_s:.2f} x")
    print(f"kvgate / bare engine: {with_s / without_s:.2f}; requests refused: {refused}")


if __name__ == "__main__":
    sys.exit(main())
