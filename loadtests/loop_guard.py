"""What the loop guard costs: the gate's processor time for an event of a stream, with it and without.

    python -m loadtests.loop_guard [--rounds 40] [--streams 8] [--events 600]

One gate, and a fast fake engine that streams ordinary prose to several clients at once. Two tenants differ in
`loop_guard` alone (`off`, `stop`) and take turns; the processor time is the gate process's own. Paced, each event is
a read of its own, as with a real engine; flat out, reads hold many events, and an event costs the gate less. Other
work on the machine disturbs both; so what the guard itself takes for these bytes is timed alone, too, in reads of as
many events as the clients' reads had.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp

from kvgate.dialects.openai_chat import ChatTap
from kvgate.wire.generated import StreamWatch
from loadtests.fleet import CHAT, GateProcess
from tests.fake_engine import FakeEngine
from tests.fake_engine.families import data

GUARDS: Final = ("off", "stop")
CORPUS: Final = Path(__file__).parent.parent / "tests" / "corpora" / "prose.txt"
PACE_S: Final = 0.001


def words(count: int) -> tuple[str, ...]:
    """Tokens of a text that never repeats itself: words of prose, drawn one by one."""
    order, known = random.Random(1), CORPUS.read_text().split()
    found: list[str] = []
    while len(found) < count:
        found += re.findall(r"\s?\S{1,5}", " " + order.choice(known))
    return tuple(found[:count])


def processor_s(process_id: int) -> float:
    """Processor time that a process has used."""
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def streamed(session: aiohttp.ClientSession, url: str, guard: str, events: int) -> int:
    """One answer, read to its end; it must have come whole. In how many reads it came."""
    body = {"messages": [{"role": "user", "content": "tell me"}], "stream": True, "max_tokens": events}
    async with session.post(url + CHAT, json=body, headers={"Authorization": f"Bearer sk-{guard}"}) as answer:
        found = reads = 0
        async for piece in answer.content.iter_any():
            found, reads = found + piece.count(b"data: "), reads + 1
        assert answer.status == 200, await answer.text()
        assert found >= events, f"{guard}: {found} events of {events}"
    return reads


async def measured(gate: GateProcess, options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Microseconds an event, by guard and round; and how many events a read had."""
    reads = 0
    found: dict[str, list[float]] = {guard: [] for guard in GUARDS}
    assert gate.process is not None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for guard in GUARDS:
            await streamed(session, gate.url, guard, options.events)
        for round_number in range(options.rounds):
            for guard in GUARDS if round_number % 2 else reversed(GUARDS):
                before = processor_s(gate.process.pid)
                reads += sum(
                    await asyncio.gather(
                        *(streamed(session, gate.url, guard, options.events) for _ in range(options.streams))
                    )
                )
                spent_s = processor_s(gate.process.pid) - before
                found[guard].append(spent_s / (options.streams * options.events) * 1e6)
    return found, max(len(GUARDS) * options.rounds * options.streams * options.events // reads, 1)


async def main(options: argparse.Namespace) -> None:
    """Measure both paces."""
    with tempfile.TemporaryDirectory() as directory:
        sections = [
            f'[tenant.{guard}]\nkeys_sha256 = ["{hashlib.sha256(f"sk-{guard}".encode()).hexdigest()}"]\n'
            f'loop_guard = "{guard}"\n'
            for guard in GUARDS
        ]
        (Path(directory) / "tenants.toml").write_text("".join(sections))
        async with FakeEngine(n_ctx=1_000_000, total_slots=2 * options.streams) as engine:
            engine.words = words(options.events)
            engine.model = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
            (Path(directory) / "kvgate.toml").write_text('[engine]\nkv_topology = "divided"\n')
            arguments = ["--config", "kvgate.toml", "--tenants", "tenants.toml", "--upstream", engine.url]
            gate = GateProcess(Path(directory), arguments)
            await asyncio.to_thread(gate.start)
            try:
                for name, pace_s in (("paced", PACE_S), ("flat out", 0.0)):
                    engine.word_delay_s = pace_s
                    found, events_a_read = await measured(gate, options)
                    own = alone_us(words(20_000), options.rounds, events_a_read)
                    print(told(name, found, own, events_a_read))
            finally:
                await asyncio.to_thread(gate.stop)


def alone_us(tokens: tuple[str, ...], rounds: int, events_a_read: int) -> float:
    """Microseconds an event that the guard takes for a stream of these tokens; the least of some rounds."""
    stamp = {"created": 1796069505, "id": "chatcmpl-" + 32 * "x", "model": "/models/SmolLM2-135M-Instruct.Q4_1.gguf"}
    events = [
        data(
            {
                "choices": [{"finish_reason": None, "index": 0, "delta": {"content": token}}],
                **stamp,
                "system_fingerprint": "b0-unknown",
                "object": "chat.completion.chunk",
            }
        )
        for token in tokens
    ]
    reads = [b"".join(events[at : at + events_a_read]) for at in range(0, len(events), events_a_read)]
    spent = []
    for _ in range(rounds):
        watch, before = StreamWatch(ChatTap.text, 1), time.process_time()
        for read in reads:
            watch.take(read)
        spent.append(time.process_time() - before)
        assert watch.look() is None
    return min(spent) / len(events) * 1e6


def told(name: str, found: dict[str, list[float]], own_us: float, events_a_read: int) -> str:
    """Medians, and their ratio; the median of the rounds' own ratios beside it, which a busy machine moves less."""
    off, on = (statistics.median(found[guard]) for guard in GUARDS)
    each = statistics.median(one / other for other, one in zip(found["off"], found["stop"], strict=True))
    return (
        f"{name:9} off {off:6.2f} us an event, guarded {on:6.2f} us, ratio {on / off:.3f}, "
        f"median of {len(found['off'])} rounds' ratios {each:.3f}; the guard alone {own_us:.3f} us in reads of "
        f"{events_a_read} events, {own_us / off:.2%} of the first"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--events", type=int, default=600)
    asyncio.run(main(parser.parse_args()))
