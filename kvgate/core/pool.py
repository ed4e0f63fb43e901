"""What an engine's KV cache can hold, and how many of its cells a request takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgate.core.ask import Size


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV cache as one rule sees it, divided or unified (DESIGN section 2).

    Args:
        tokens: cells in all. Divided engines: slots x tokens_per_slot. Unified ones: the shared pool, which
            may be far less than that product (llama.cpp issue 23652).
        slots: sequences that run side by side.
        tokens_per_slot: the longest one sequence may become, prompt and output together (n_ctx_slot).
        prompt_shared: whether n answers to one prompt share its cells (llama.cpp unified: yes).
        margin_tokens: cells a sequence may take beyond its output limit, such as a speculative draft.
        headroom_tokens: cells that are never granted.
    """

    tokens: int
    slots: int
    tokens_per_slot: int
    prompt_shared: bool = False
    margin_tokens: int = 0
    headroom_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.slots, self.tokens_per_slot) < 1:
            raise ValueError(f"a pool needs tokens, slots and tokens per slot: {self!r}")
        if self.margin_tokens < 0 or not 0 <= self.headroom_tokens < self.tokens:
            raise ValueError(f"margin and headroom must leave something to grant: {self!r}")

    @property
    def grantable_tokens(self) -> int:
        """Cells that may be held at once by all leases together."""
        return self.tokens - self.headroom_tokens

    def cells(self, size: Size) -> int:
        """Cells that a request of this size can take at most.

        Shared prompt: each prompt once, plus each sequence's output and margin, measured on llama.cpp (pool
        1024, prompt 591, 100 out, n=4 runs). Otherwise each sequence holds a copy of its prompt.
        """
        output = size.sequences * (size.output_tokens + self.margin_tokens)
        return output + self._prompt_cells(size.distinct, size.sequences)

    def output_room(self, prompts: tuple[int, ...], sequences: int, within_tokens: int) -> int:
        """The largest output limit with which the request's cells stay within `within_tokens`.

        The inverse of `cells`; negative where the prompts alone are too much.
        """
        return (within_tokens - self._prompt_cells(prompts, sequences)) // sequences - self.margin_tokens

    def _prompt_cells(self, prompts: tuple[int, ...], sequences: int) -> int:
        return sum(prompts) * (1 if self.prompt_shared else sequences // len(prompts))
