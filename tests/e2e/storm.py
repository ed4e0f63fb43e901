"""Requests of every kind in an order that a seed gives, and clients that leave in every phase."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any, Final, Literal

from tests.e2e.faults.asking import PATHS, Ask, Client, view
from tests.samples import SAMPLES

Leaves = Literal["never", "in mid-request", "soon", "later", "at the first bytes", "in mid-answer"]

LEAVES: Final[tuple[Leaves, ...]] = ("in mid-request", "soon", "later", "at the first bytes", "in mid-answer")
AFTER_S: Final[dict[Leaves, tuple[float, float]]] = {"soon": (0.0, 0.02), "later": (0.05, 1.5)}
"""How long such a client waits for nothing: while it is counted, and while it is queued or its prompt is read."""

UNSUPPORTED: Final = {
    "openai_embeddings": "/v1/embeddings",
    "llamacpp_embedding": "/embedding",
    "llamacpp_rerank": "/v1/rerank",
    "llamacpp_infill": "/infill",
}
"""Dialects that this model or this engine has no answer for: counted, held and sent all the same."""

LIMITS: Final = {"openai_responses": "max_output_tokens", "llamacpp_completion": "n_predict"}

KEYS: Final = (*["sk-wide"] * 6, *["sk-shy"] * 2, "sk-narrow")

BUSY: Final = frozenset({"429 queue_full", "429 queue_timeout"})


@dataclass(frozen=True)
class Call:
    """One request: what may become of it, and how its client behaves."""

    request_id: str
    key: str
    path: str
    body: bytes
    ask: Ask
    expected: frozenset[str]
    leaves: Leaves
    after_s: float

    async def run(self, url: str) -> str | None:
        """Ask; the client's view where it stays to the end."""
        async with Client(url) as client:
            upto = len(self.body) // 2 if self.leaves == "in mid-request" else None
            await client.post(self.path, self.body, key=self.key, request_id=self.request_id, upto=upto)
            if self.leaves == "never":
                return view(self.ask, await client.receive())
            await asyncio.sleep(self.after_s)
            if self.leaves in {"at the first bytes", "in mid-answer"}:
                await client.hear()
            if self.leaves == "in mid-answer":
                await client.hear_more(self.after_s)
        return None


def calls(number: int, seed: int, slot: int) -> list[Call]:
    """So many calls for an engine whose slots hold so many tokens."""
    chance = random.Random(seed)
    return [_call(chance, f"storm-{seed}-{at:05}", slot) for at in range(number)]


def _call(chance: random.Random, request_id: str, slot: int) -> Call:
    leaves = chance.choice(LEAVES) if chance.random() < 0.3 else "never"
    kind = chance.choices(
        ("plain", "malformed", "long prompt", "long answer", "unsupported", "two answers"), (70, 7, 7, 5, 7, 4)
    )[0]
    dialect = chance.choice(list(UNSUPPORTED if kind == "unsupported" else PATHS))
    body: dict[str, Any] = {"temperature": 0, "stream": chance.random() < 0.5}
    body |= _prompt(dialect, chance, words=chance.randint(1, 12))
    body[LIMITS.get(dialect, "max_tokens")] = chance.randint(1, 6)
    expected = {"200"}
    if kind == "malformed":
        body |= chance.choice(SAMPLES[dialect].malformed)
        expected = {"400 malformed"}
    elif kind == "long prompt":
        body |= _prompt(dialect, chance, words=2 * slot)
        expected = {"400 prompt_overflow"}
    elif kind == "long answer":
        body[LIMITS.get(dialect, "max_tokens")] = chance.choice((slot, 10 * slot, 10**9))
        expected = {"400 generation_overflow"}
    elif kind == "unsupported":
        body = dict(SAMPLES[dialect].body)
        expected = {"501 engine_cannot", "400 engine_refused", *BUSY}
        # What the engine puts around a pair that it ranks is bounded from above, by more than a small slot holds.
        expected |= {"400 prompt_overflow"} if dialect == "llamacpp_rerank" else set()
    elif kind == "two answers" and SAMPLES[dialect].sequences:
        body["n"] = 2
    key = chance.choice(KEYS)
    several = body.get("n") == 2 or isinstance(body.get("input", body.get("content")), list)
    several |= len(body.get("documents", ())) > 1
    if key == "sk-narrow" and several and kind != "malformed":
        expected = {"400 too_many_sequences"}
    expected |= BUSY if expected == {"200"} else set()
    low, high = AFTER_S.get(leaves, (0.0, 0.05))
    return Call(
        request_id=request_id,
        key=key,
        path=UNSUPPORTED.get(dialect) or PATHS[dialect],
        body=json.dumps(body).encode(),
        ask=Ask(dialect, bool(body.get("stream"))),
        expected=frozenset(expected),
        leaves=leaves,
        after_s=chance.uniform(low, high),
    )


def _prompt(dialect: str, chance: random.Random, *, words: int) -> dict[str, Any]:
    text = " ".join(chance.choice(("sea", "tree", "old", "song", "rain", "fox")) for _ in range(words))
    match dialect:
        case "openai_chat" | "anthropic_messages":
            return {"messages": [{"role": "user", "content": text}]}
        case "openai_responses":
            return {"input": text}
        case _:
            return {"prompt": text}
