"""The measurements of `kvgate measure`, each on an idle engine, one after the other."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.measured import desks
from kvgate.core.trend import trend_of
from kvgate.lab.asking import CannotAsk
from kvgate.lab.process_memory import rss_mib
from kvgate.lab.prose import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.lab.asking import Asked, Heard

PARTS: Final = 12
"""Into so many parts a long generation is cut, to see whether it slows down."""

MEMORY_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the engine, in tokens.

    Args:
        short_prompt_tokens, short_output_tokens, short_times: the fixed short prompt, one at a time.
        long_prompt_tokens: of the prefill.
        long_output_tokens: of the generation.
        clients, requests_each: of the mixed traffic at the end.
    """

    short_prompt_tokens: int
    short_output_tokens: int
    short_times: int
    long_prompt_tokens: int
    long_output_tokens: int
    clients: int
    requests_each: int


def workload_for(n_ctx_slot: int, context_tokens: int | None) -> Workload:
    """A workload at a target context, which is the slot's where none is named.

    Raises:
        ValueError: no slot is that long.
    """
    target = context_tokens or n_ctx_slot
    if target > n_ctx_slot:
        raise ValueError(f"--context-tokens {target} is more than a slot has ({n_ctx_slot}); name at most that")
    return Workload(
        short_prompt_tokens=min(64, target // 4),
        short_output_tokens=min(64, target // 4),
        short_times=5,
        long_prompt_tokens=target - 16,
        long_output_tokens=max(PARTS, target - min(64, target // 4) - 8),
        clients=0,
        requests_each=2,
    )


@dataclass(frozen=True, slots=True)
class Measuring:
    """One engine under measurement; `pid` where its memory can be watched."""

    asked: Asked
    workload: Workload
    pid: int | None
    say: Callable[[str], None]

    async def short(self) -> dict[str, Any]:
        """A fixed short prompt, one at a time: what a request costs at least."""
        load = self.workload
        self.say(f"a short prompt of {load.short_prompt_tokens} tokens, {load.short_times} times, one at a time")
        prompt = await prompt_of(self.asked, load.short_prompt_tokens)
        heard = [await self._ask(prompt, load.short_output_tokens) for _ in range(load.short_times)]
        return {
            "ttft_s": _median([one.ttft_s for one in heard]),
            "ttft_all_s": [_rounded(one.ttft_s) for one in heard],
            "tokens_per_second": _median([one.tokens_per_second for one in heard]),
            "tokens_per_second_all": [_rounded(one.tokens_per_second) for one in heard],
        }

    async def long_prefill(self) -> dict[str, Any]:
        """A prompt of the target context: how long until the first token."""
        tokens = self.workload.long_prompt_tokens
        self.say(f"a prompt of {tokens} tokens, for the time to its first token")
        heard = await self._ask(await prompt_of(self.asked, tokens), 1)
        ttft_s = heard.ttft_s
        return {
            "prompt_tokens": tokens,
            "ttft_s": _rounded(ttft_s),
            "prefill_tokens_per_second": _rounded(tokens / ttft_s if ttft_s else None),
        }

    async def long_generation(self) -> dict[str, Any]:
        """A long answer: whether it slows down, and whether the engine's memory grows."""
        load = self.workload
        self.say(f"an answer of {load.long_output_tokens} tokens, for speed and memory as it grows")
        prompt = await prompt_of(self.asked, load.short_prompt_tokens)
        memory: list[tuple[float, float]] = []
        watching = asyncio.create_task(self._watch_memory(memory))
        try:
            heard = await self._ask(prompt, load.long_output_tokens)
        finally:
            watching.cancel()
        trend = trend_of([mib for _, mib in memory])
        return {
            "output_tokens": heard.output_tokens,
            "tokens_per_second": _rounded(heard.tokens_per_second),
            "parts": _parts(heard),
            "memory": [[round(at, 2), round(mib, 1)] for at, mib in memory],
            "memory_change_mib": None if trend is None else round(trend.change, 1),
        }

    async def _watch_memory(self, into: list[tuple[float, float]]) -> None:
        begun_s = time.monotonic()
        while (mib := rss_mib(self.pid)) is not None:
            into.append((time.monotonic() - begun_s, mib))
            await asyncio.sleep(MEMORY_EVERY_S)

    async def parallel_control(
        self, topology: str | None, n_ctx_slot: int, slots: int, pool_tokens: int | None
    ) -> dict[str, Any]:
        """One request alone against all slots at once, the same request on the same desk; refused where they differ.

        A desk is the context that a request may use. On a shared pool it shrinks with the number of requests, so
        that "parallel 4" would be compared with a machine four times as large.
        """
        if slots == 1:
            return {"refused": "there is one slot: nothing runs in parallel"}
        try:
            alone, together = desks(topology, n_ctx_slot, slots, pool_tokens)
        except ValueError as error:
            return {"refused": str(error)}
        if alone != together:
            return {
                "refused": f"unequal desks: alone a request may use {alone} tokens, {slots} at once {together} each; "
                f"start the engine with -c {slots * alone} -np {slots} --no-kv-unified, where each has {alone}"
            }
        prompt_tokens, output_tokens = alone // 2, min(64, alone // 4)
        self.say(
            f"{prompt_tokens} + {output_tokens} tokens alone, then {slots} at once on equal desks of {alone} tokens"
        )
        runs = []
        for at_once in (1, slots):
            prompts = [await prompt_of(self.asked, prompt_tokens, seed) for seed in range(at_once)]
            begun_s = time.monotonic()
            heard = await asyncio.gather(*(self._ask(prompt, output_tokens) for prompt in prompts))
            took_s = time.monotonic() - begun_s
            runs.append(
                {
                    "at_once": at_once,
                    "ttft_s": _median([one.ttft_s for one in heard]),
                    "tokens_per_second_each": _median([one.tokens_per_second for one in heard]),
                    "output_tokens_per_second_together": _rounded(at_once * output_tokens / took_s),
                }
            )
        return {"desk_tokens": alone, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "runs": runs}

    async def production(self, slots: int, pool_tokens: int) -> dict[str, Any]:
        """Mixed sizes from as many clients as there are slots: how it feels, and nothing to compare engines by."""
        load = self.workload
        clients = load.clients or slots
        share = min(load.long_prompt_tokens, pool_tokens // clients) - 16
        chance = random.Random(7)  # noqa: S311 - sizes, not secrets
        sizes = [
            [max(4, int(share * chance.choice((0.1, 0.25, 0.25, 0.5, 0.75)))) for _ in range(load.requests_each)]
            for _ in range(clients)
        ]
        output = max(4, min(48, share // 4))
        self.say(f"{clients} clients with prompts of {min(map(min, sizes))} to {max(map(max, sizes))} tokens")

        async def client(number: int) -> list[Heard]:
            return [
                await self._ask(await prompt_of(self.asked, tokens, number * 100 + at), output)
                for at, tokens in enumerate(sizes[number])
            ]

        begun_s = time.monotonic()
        heard = [one for answers in await asyncio.gather(*map(client, range(clients))) for one in answers]
        took_s = time.monotonic() - begun_s
        waits = sorted(one.ttft_s or 0.0 for one in heard)
        return {
            "clients": clients,
            "requests": len(heard),
            "ttft_p50_s": _rounded(median(waits)),
            "ttft_max_s": _rounded(waits[-1]),
            "output_tokens_per_second": _rounded(len(heard) * output / took_s),
            "prompt_tokens_per_second": _rounded(sum(map(sum, sizes)) / took_s),
        }

    async def _ask(self, prompt: list[int], output_tokens: int) -> Heard:
        heard = await self.asked.complete(prompt, output_tokens)
        if heard.problem:
            raise CannotAsk(f"{self.asked.name} fails in the measurement: {heard.problem}; `kvgate probe` tells more")
        return heard


def _parts(heard: Heard) -> list[list[float]]:
    """The speed in each part of an answer: tokens until its end, and tokens a second in it."""
    moments = heard.moments_s
    size = max(len(moments) // PARTS, 1)
    found = []
    for end in range(2 * size - 1, len(moments), size):
        took_s = max(moments[end] - moments[end - size], 1e-6)
        found.append([end + 1, round(size / took_s, 2)])
    return found


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(median(known)) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
