"""Finds out whether an idle engine's slots divide its KV cache or share it: fills it until it breaks, or does not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.core.profile import Topology
from kvgate.lab.admission_probe import refuse_busy, slots_of
from kvgate.lab.asking import CannotAsk
from kvgate.lab.prose import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.lab.admission_probe import Slots
    from kvgate.lab.asking import Asked

BATCH_TOKENS_LEAST: Final = 256
"""While one prompt is read, the others' answers grow by a token for each batch of at least so many."""

OUTPUT_TOKENS_LEAST: Final = 32


@dataclass(frozen=True, slots=True)
class Found:
    """An engine's KV cache.

    Args:
        pool_tokens: cells in all; of a shared pool the most that was seen to fit, never less than n_ctx_slot.
    """

    topology: Topology
    n_ctx_slot: int
    slots: int
    pool_tokens: int

    @property
    def setting(self) -> str:
        """The lines for kvgate.toml."""
        lines = f'[engine]\nkv_topology = "{self.topology}"'
        if self.topology is Topology.UNIFIED and self.pool_tokens > self.n_ctx_slot:
            lines += f"\npool_tokens = {self.pool_tokens}"
        return lines


async def find_topology(asked: Asked, say: Callable[[str], None]) -> Found:
    """Fill the slots of an idle engine, at most all of them at once.

    1. Two answers that together are as long as one slot must fit on any engine; else nothing can be told.
    2. A little longer together: on the usual shared pool, as large as one slot, both die.
    3. Every slot full at once: where that works each has its own, or as good as that.
    4. Between, the pool's size is searched.

    Raises:
        CannotAsk: the engine does not answer, is busy, or fails where every engine works.
    """
    known = await slots_of(asked)
    n_ctx, slots = known.n_ctx_slot, known.slots
    if slots == 1:
        return Found(Topology.DIVIDED, n_ctx, 1, n_ctx)
    fill = _Fill(asked, known, say)
    if not await fill.holds(n_ctx, 2):  # 1
        raise CannotAsk(
            f"{asked.name} fails two answers that together fit into one slot: see its log, and `kvgate probe` "
            "without --topology"
        )
    little_more, everything = n_ctx + max(n_ctx // 8, fill.blur(2 * n_ctx, 2) * 2), slots * n_ctx
    if not await fill.holds(min(little_more, 2 * n_ctx), 2):  # 2
        return Found(Topology.UNIFIED, n_ctx, slots, n_ctx)
    if await fill.holds(everything, slots):  # 3
        return Found(Topology.DIVIDED, n_ctx, slots, everything)
    low, high = little_more, everything
    while high - low > max(n_ctx // 8, fill.blur(high, slots)):  # 4
        middle = (low + high) // 2
        if await fill.holds(middle, slots):
            low = middle
        else:
            high = middle
    return Found(Topology.UNIFIED, n_ctx, slots, max(n_ctx, low - fill.blur(low, slots)))


@dataclass(frozen=True, slots=True)
class _Fill:
    asked: Asked
    known: Slots
    say: Callable[[str], None]

    def blur(self, total: int, at_once: int) -> int:
        """By how much the cells in use may fall short of `total`: the first answer ends before the last began."""
        return at_once * (total // BATCH_TOKENS_LEAST + 2)

    async def holds(self, total: int, at_once: int) -> bool:
        """Whether so many answers, together so many tokens, live side by side."""
        await refuse_busy(self.asked)
        output = min(OUTPUT_TOKENS_LEAST + total // BATCH_TOKENS_LEAST, total // at_once // 2)
        prompt = total // at_once - output
        self.say(f"{at_once} answers of {prompt} + {output} tokens at once, {total} together")
        prompts = [await prompt_of(self.asked, prompt, seed) for seed in range(at_once)]
        heard = await asyncio.gather(*(self.asked.complete(one, output) for one in prompts))
        problems = {one.problem for one in heard if one.problem}
        if any(one.status in range(400, 500) for one in heard):
            raise CannotAsk(f"{self.asked.name} at {self.asked.url} refuses: {', '.join(sorted(problems))}")
        self.say("they fit" if not problems else f"they do not: {', '.join(sorted(problems))}")
        return not problems
