"""What one admission costs beside the engine's own counter, cold and warm, and how long it ever stalls the loop."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.core.profile import KvSettings, Topology
from kvgate.core.tenant import Tenant
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.engines.llamacpp import CountingSettings, LlamaCpp, LlamaCppSettings
from kvgate.gate import Call, Gate, Rejected
from kvgate.lab.engine_process import EngineProcess
from kvgate.lab.fetch import fetch_model
from kvgate.store.local_ledger import LocalLedger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


SIZES = (1_000, 8_000, 32_000, 128_000)
TOKENS_PER_MESSAGE = 500
TICK_S = 0.001
TIMES = {"bound": 20, "warm": 10}
"""What is done again as it stands; the others are new each time, or long."""
WORDS = [
    "The",
    "engine",
    "counts",
    "what",
    "the",
    "template",
    "makes",
    "of",
    "every",
    "message,",
    "and",
    "so",
    "does",
    "the",
    "gate",
    "in",
    "front",
    "of",
    "it.",
]


@dataclass
class Row:
    """One size's timings, in seconds, by what was timed."""

    tokens: int
    messages: int
    timings: dict[str, list[float]] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float, stall_s: float) -> None:
        """One timing, and the largest stall of the loop in it."""
        self.timings.setdefault(name, []).append(seconds)
        self.stalls[name] = max(self.stalls.get(name, 0.0), stall_s)


class Loop:
    """The loop's largest stall: how late a timer of a millisecond comes while something else is at work.

    As far as this process worked meanwhile: what another one took of the core is no doing of ours.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        """Look at the clock, for ever."""
        while True:
            begun, worked = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_S)
            late = time.perf_counter() - begun - TICK_S
            self.worst_s = max(self.worst_s, min(late, time.process_time() - worked))


def conversation(tokens: int, salt: int) -> bytes:
    """A chat of about so many tokens, none of whose messages was seen before."""
    number = max(1, tokens // TOKENS_PER_MESSAGE) | 1
    each = max(1, tokens // number - 6)
    messages = [
        {
            "role": ("user", "assistant")[at % 2],
            "content": f"{salt} {at} " + " ".join(WORDS[word % len(WORDS)] for word in range(each)),
        }
        for at in range(number)
    ]
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


async def timed(work: Callable[[], Awaitable[Any]], loop: Loop, times: int) -> tuple[float, float]:
    """How long it took (of several times the median), and how long the loop stood still at most, in seconds."""
    await asyncio.sleep(3 * TICK_S)
    loop.worst_s = 0.0
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        await work()
        took.append(time.perf_counter() - begun)
        await asyncio.sleep(0)
    await asyncio.sleep(2 * TICK_S)  # the watcher tells of a stall when it is over
    return statistics.median(took), loop.worst_s


async def measure(url: str, sizes: tuple[int, ...], rounds: int) -> list[Row]:
    """The engine's counter and each proof, one after the other, in interleaved rounds."""
    settings = LlamaCppSettings(KvSettings(Topology.DIVIDED), counting=CountingSettings())
    engine = LlamaCpp(url, settings, time.monotonic)
    await engine.discover()
    await engine.proofs_settled()
    for standing in engine.proofs():
        print(f"{standing.proof.value:10} {'in force' if standing.in_force else 'off: ' + standing.reason}")
    gate = Gate(engine, LocalLedger(time.monotonic, 120), new_id=lambda: "x")
    loop = Loop()
    watcher = asyncio.create_task(loop.watch())
    rows = []
    try:
        for size in sizes:
            row = Row(0, 0)
            rows.append(row)
            for at in range(rounds):
                body = conversation(size, at)
                row.tokens = await _round(engine, gate, body, loop=loop, row=row)
    finally:
        watcher.cancel()
        await engine.close()
    return rows


async def _round(engine: LlamaCpp, gate: Gate, body: bytes, *, loop: Loop, row: Row) -> int:
    request = OpenAiChat().read(body)
    row.messages = len(request.document.get("messages"))

    async def count() -> None:
        counted.append(await engine.count("openai_chat", request, body))

    async def by_engine() -> None:
        counted.append(await engine._count_by_engine("openai_chat", request, body))  # noqa: SLF001 - what is compared

    async def bound() -> None:
        await engine.bound("openai_chat", request, body)

    async def whole() -> None:
        found = await gate.weigh(Call(Tenant("load"), OpenAiChat(), body))
        if isinstance(found, Rejected) and found.refusal.reason.value.status >= 500:
            raise RuntimeError(found.refusal.message)

    async def nothing() -> None:
        await asyncio.sleep(0.005)

    counted: list[Any] = []
    works = {
        "nothing": nothing,
        "engine": by_engine,
        "bound": bound,
        "cold": count,
        "warm": count,
        "admission": whole,
    }
    for name, work in works.items():
        row.add(name, *await timed(work, loop, TIMES.get(name, 1)))
    if len({found.prompts for found in counted}) != 1:
        raise RuntimeError(f"the counts differ: {[(found.proof.value, found.prompts) for found in counted]}")
    tokens: int = counted[0].prompts[0]
    return tokens


def table(rows: list[Row]) -> str:
    """Medians in milliseconds, beside the engine's counter; stalls are the largest seen, minus nothing."""
    head = f"{'tokens':>8} {'messages':>8} | {'engine':>9} | "
    names = ("bound", "warm", "cold", "admission")
    lines = [head + " | ".join(f"{name:>9} {'ratio':>7} {'stall':>6}" for name in names) + " | idle loop's stall"]
    for row in rows:
        engine = statistics.median(row.timings["engine"])
        cells = []
        for name in names:
            median = statistics.median(row.timings[name])
            cells.append(f"{median * 1e3:9.3f} {median / engine:7.4f} {row.stalls[name] * 1e3:6.1f}")
        idle = row.stalls["nothing"] * 1e3
        lines.append(
            f"{row.tokens:8} {row.messages:8} | {engine * 1e3:9.3f} | " + " | ".join(cells) + f" | {idle:6.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.counting", description=__doc__)
    parser.add_argument("--upstream", metavar="URL", help="an engine that runs already; else one is started")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    sizes = tuple(options.sizes)
    if options.upstream:
        rows = asyncio.run(measure(options.upstream, sizes, options.rounds))
    else:
        flags = ("-c", "512", "-np", "1", "-t", "1", "--no-kv-unified")
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "engine.log"
            with EngineProcess(("-m", str(fetch_model()), *flags), log_path=log) as engine:
                rows = asyncio.run(measure(engine.url, sizes, options.rounds))
    print(
        "\nmilliseconds, medians; `admission` is reading, counting and deciding, warm; stalls are the largest seen\n"
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
