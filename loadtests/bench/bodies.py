"""The chats that are sent: 2 KB, 32 KB and 512 KB whole, and streams with and without a pace.

The long part of each stays the same, as a conversation's does, and the last message has another number every time.
"""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from loadtests.bench.client import CHAT, COUNTER

if TYPE_CHECKING:
    from pathlib import Path

SIZES: Final = {"2k": 2 * 1024, "32k": 32 * 1024, "512k": 512 * 1024}
PACED_CHUNKS: Final = 1_000_000
PACE_S: Final = 0.04
FLAT_CHUNKS: Final = 2000
_TURN_BYTES: Final = 1500
_WORDS: Final = (
    "the",
    "slot",
    "holds",
    "what",
    "was",
    "asked",
    "for",
    "and",
    "nothing",
    "more",
    "until",
    "it",
    "ends",
)


@dataclass(frozen=True)
class Body:
    """One chat: its label (the fast upstream knows it by that), and the file that holds it."""

    label: str
    path: Path


def chat(label: str, size_bytes: int, *, stream: bool) -> bytes:
    """A conversation of about so many bytes, the same each time but for the number in its last message."""
    rng = random.Random(label)
    turns: list[dict[str, str]] = [{"role": "system", "content": "You are brief."}]
    last = {"role": "user", "content": f"bench-{label} question {COUNTER.decode()}"}
    filled = 200
    while filled < size_bytes:
        text = " ".join(rng.choice(_WORDS) for _ in range(min(_TURN_BYTES, size_bytes - filled) // 5 + 1))
        turns.append({"role": "user" if len(turns) % 2 else "assistant", "content": text})
        filled += len(text) + 36
    if len(turns) % 2 == 0:
        turns.append({"role": "assistant", "content": "Yes."})
    body: dict[str, Any] = {"model": "bench", "messages": [*turns, last], "max_tokens": 3000, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


def prepare(upstream: str, directory: Path, sizes: dict[str, int]) -> dict[str, Body]:
    """Write the bodies, have each counted by the engine, and tell the fast upstream how to answer."""
    plain = {label: (size, False, 40, 0.0) for label, size in sizes.items()}
    streams = {"paced": (2048, True, PACED_CHUNKS, PACE_S), "flat": (2048, True, FLAT_CHUNKS, 0.0)}
    found, labels = {}, {}
    for label, (size, stream, chunks, pace_s) in {**plain, **streams}.items():
        body = chat(label, size, stream=stream)
        counts = {_counted(upstream, body.replace(COUNTER, number)) for number in (b"00000001", b"00000907")}
        if len(counts) != 1:
            raise RuntimeError(f"the engine's count of {label} depends on the number in it: {counts}")
        path = directory / f"{label}.json"
        path.write_bytes(body)
        found[label] = Body(label, path)
        labels[label] = {"prompt_tokens": counts.pop(), "chunks": chunks, "pace_s": pace_s}
    _post(f"{upstream}/bench/labels", json.dumps(labels).encode())
    return found


def _counted(upstream: str, body: bytes) -> int:
    found: int = _post(f"{upstream}{CHAT}/input_tokens", body)["input_tokens"]
    return found


def _post(url: str, body: bytes) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)
