"""What prefix reuse saves a conversation, and what a trim stride saves of it once its window is full.

    python -m loadtests.reuse --turns 16

One conversation after the other on a real engine that is dedicated to its tenants: each without reuse and with it,
trimmed turn by turn and in strides. The tokens are llama.cpp's own (`timings`), the seconds those of its prefill. The
pin is set without a run of the suite: this measures, it proves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from kvgate.core.canary import Figures, SuiteReport
from kvgate.store.canary import CanaryStore
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from loadtests.fleet import CHAT, Fleet

if TYPE_CHECKING:
    from loadtests.fleet import GateProcess

SLOT = 512
WORDS = ("alpha", "river", "stone", "green", "seven", "cloud", "paper", "music", "horse", "lemon", "amber", "quiet")
WAIT_S = 30.0


@dataclass
class Row:
    """One conversation: tokens of its prompts and how many of them were reused; of trimmed turns alone likewise."""

    reuse: str
    stride: int
    turns: int = 0
    trimmed_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    trimmed_prompt_tokens: int = 0
    trimmed_cached_tokens: int = 0
    trimmed_prefill_s: float = 0.0

    def add(self, timings: dict[str, Any], *, trimmed: bool) -> None:
        """Another turn."""
        cached = timings["cache_n"]
        prompt, seconds = timings["prompt_n"] + cached, timings["prompt_ms"] / 1000
        self.turns += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.prefill_s += seconds
        if trimmed:
            self.trimmed_turns += 1
            self.trimmed_prompt_tokens += prompt
            self.trimmed_cached_tokens += cached
            self.trimmed_prefill_s += seconds


async def converse(url: str, tenant: str, topic: str, options: argparse.Namespace, row: Row) -> None:
    """One conversation, each turn sending all that was said; kvgate trims it once it is too long."""
    messages: list[dict[str, str]] = [{"role": "system", "content": f"You speak of {topic}."}]
    headers = {"Authorization": f"Bearer sk-{tenant}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for turn in range(options.turns):
            said = " ".join(WORDS[(turn * 5 + number * 7) % len(WORDS)] for number in range(options.words))
            messages.append({"role": "user", "content": f"Turn {turn} of {topic}: {said}."})
            body = {"messages": messages, "max_tokens": 8, "temperature": 0}
            async with session.post(url + CHAT, json=body, headers=headers) as answer:
                found = await answer.json(content_type=None)
            if answer.status != 200 or answer.headers["x-kvgate-reuse"] != row.reuse:
                raise RuntimeError(f"turn {turn}: {answer.status} {answer.headers.get('x-kvgate-reuse')} {found}")
            row.add(found["timings"], trimmed=answer.headers["x-kvgate-verdict"] == "trim")
            messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"] or "-"})


async def pin(gate: GateProcess, data_dir: Path) -> None:
    """Have the gate's engine pinned, and wait until the gate knows."""
    engine = gate.status()["engine"]
    figures = Figures(0.0, 0.0, 0.0, 1.0)
    report = SuiteReport(engine["fingerprint"], engine["profile"]["instance"], 0, True, 0, 0, figures, time.time())
    embedded = EmbeddedValkey(data_dir)
    await embedded.start()
    client = connect(embedded.url)
    try:
        await CanaryStore(client).pin(report, by="loadtests.reuse")
    finally:
        await client.aclose()
        await embedded.stop()
    deadline = time.monotonic() + WAIT_S
    while set(gate.status()["reuse"]["tenants"].values()) != {"on"}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"reuse did not come on: {gate.status()['reuse']}")
        await asyncio.sleep(0.1)


async def measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    """Four conversations: off and on, without a stride and with one."""
    strides = (0, options.stride)
    lines = 'reuse = "canary"\non_overflow = "trim"\ntrim_room_tokens = 32\ntrim_stride_tokens = '
    tenants = {f"stride{stride}": f"{lines}{stride}\n" for stride in strides}
    flags = ("-c", str(2 * SLOT), "-np", "2", "--no-kv-unified", "--no-cache-prompt", "--cache-ram", "0")
    names = ", ".join(f'"{name}"' for name in tenants)
    config = f"[engine]\ndedicated_to = [{names}]\n"
    rows = []
    with Fleet(directory, (*flags, "--no-cache-idle-slots"), 1, tenants, config) as fleet:
        (gate,) = fleet.members
        for reuse in ("off", "on"):
            if reuse == "on":
                await pin(gate, directory / ".kvgate")
            for stride in strides:
                rows.append(Row(reuse, stride))
                await converse(gate.url, f"stride{stride}", f"{reuse} {stride}", options, rows[-1])
    return rows


def table(rows: list[Row]) -> list[str]:
    """For people."""
    head = "reuse  stride  turns  prompt tokens  reused  prefill s | trimmed turns  prompt tokens  reused  prefill s"
    lines = [head]
    for row in rows:
        whole = f"{row.prompt_tokens:13}  {_share(row.cached_tokens, row.prompt_tokens):>6}  {row.prefill_s:9.2f}"
        reused = _share(row.trimmed_cached_tokens, row.trimmed_prompt_tokens)
        cut = f"{row.trimmed_turns:13}  {row.trimmed_prompt_tokens:13}  {reused:>6}  {row.trimmed_prefill_s:9.2f}"
        lines.append(f"{row.reuse:5}  {row.stride:6}  {row.turns:5}  {whole} | {cut}")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description="What prefix reuse and trim strides save.", allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=16, help="of each conversation")
    parser.add_argument("--words", type=int, default=20, help="of each turn")
    parser.add_argument("--stride", type=int, default=128, help="tokens; compared with none")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(measure(options, Path(directory)))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
