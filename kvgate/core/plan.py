"""Which lines of a llama-server fit a memory budget, and what each would make of the requests that were recorded.

A line is `-c`, `-np` and `--kv-unified` or not. Nothing is proposed that does not fit; what it rejects is what
`core.admission.decide` would say of each request on an engine that was started so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvgate.core.pool import KvPool
from kvgate.core.replay import replay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgate.core.replay import Asked
    from kvgate.core.tenant import Tenant

PAD_TOKENS: Final = 256
"""llama.cpp rounds contexts up to a multiple of it (b11434, b11549; measured); lines that it need not round are exact
on builds that do not."""

SLOTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of slots that are tried."""


def padded(tokens: int) -> int:
    """Rounded up as the engine does."""
    return -(-tokens // PAD_TOKENS) * PAD_TOKENS


@dataclass(frozen=True, slots=True)
class Line:
    """How a llama-server is started.

    Args:
        context_tokens: `-c`.
        slots: `-np`.
        unified: whether the slots share one KV cache.
        n_ctx_train: what the model was trained for, which no slot exceeds; None where that is not known.
    """

    context_tokens: int
    slots: int
    unified: bool
    n_ctx_train: int | None = None

    @property
    def flags(self) -> str:
        """As they are written."""
        topology = "--kv-unified" if self.unified else "--no-kv-unified"
        return f"-c {self.context_tokens} -np {self.slots} {topology}"

    @property
    def cells(self) -> int:
        """Cells that the engine will allocate: divided, each slot's part is rounded up by itself."""
        whole = padded(self.context_tokens)
        return whole if self.unified else padded(whole // self.slots) * self.slots

    @property
    def n_ctx_slot(self) -> int:
        """What the engine will show as a slot's context."""
        each = self.cells if self.unified else self.cells // self.slots
        return each if self.n_ctx_train is None else min(each, self.n_ctx_train)

    def pool(self, like: KvPool) -> KvPool:
        """What kvgate would guard on such an engine, with the margin and the share of headroom of another pool."""
        tokens = self.cells if self.unified else self.n_ctx_slot * self.slots
        return KvPool(
            tokens,
            self.slots,
            self.n_ctx_slot,
            prompt_shared=self.unified,
            margin_tokens=like.margin_tokens,
            headroom_tokens=tokens * like.headroom_tokens // like.tokens,
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """A line that fits, and what it would make of the requests.

    Args:
        line: how the engine is started.
        kv_bytes: what its KV cache takes.
        rejected: recorded requests that it would reject, by reason, the most frequent first.
        rejected_of: the same by tenant.
        requests: how many were looked at.
        side_by_side: requests of the size that 95% do not exceed, that run at once.
    """

    line: Line
    kv_bytes: int
    rejected: tuple[tuple[str, int], ...]
    rejected_of: tuple[tuple[str, int], ...]
    requests: int
    side_by_side: int

    @property
    def rejections(self) -> int:
        """How many it would reject, for whatever reason."""
        return sum(count for _, count in self.rejected)


Requests = list["tuple[Tenant, Sequence[Asked]]"]


def lines(
    cells: int, n_ctx_train: int | None = None, needed_tokens: int | None = None, *, slots_max: int = SLOTS[-1]
) -> Iterator[Line]:
    """Every line whose KV cache has at most so many cells, for each number of slots the largest that makes sense.

    A divided slot is no larger than what the model can use, and than `needed_tokens`, the longest request: more would
    serve nobody. A shared cache holds no more than all slots can fill.
    """
    for slots in (number for number in SLOTS if number <= slots_max):
        if each := min([_down(cells // slots), *_bounds(n_ctx_train, needed_tokens)]):
            yield Line(each * slots, slots, unified=False, n_ctx_train=n_ctx_train)
        whole = _down(cells) if n_ctx_train is None else min(_down(cells), padded(n_ctx_train) * slots)
        if slots > 1 and whole:
            yield Line(whole, slots, unified=True, n_ctx_train=n_ctx_train)


def plan(
    requests: Requests,
    budget_bytes: int,
    bytes_per_token: float,
    n_ctx_train: int | None = None,
    *,
    slots_max: int = SLOTS[-1],
) -> tuple[Planned, ...]:
    """What fits the budget, the best first: fewest rejected, then most side by side, then the least memory.

    Args:
        requests: each tenant with what is recorded of it.
        budget_bytes: for the KV cache.
        bytes_per_token: of the KV cache, all layers.
        n_ctx_train: what the model was trained for, if known.
        slots_max: slots of a line at most.
    """
    every = [(tenant, asked) for tenant, some in requests for asked in some]
    needs = sorted(_needed(asked, tenant) for tenant, asked in every)
    needed = needs[-1] if needs else None
    usual = needs[-(-95 * len(needs) // 100) - 1] if needs else PAD_TOKENS
    planned = [
        _judged(line, requests, bytes_per_token, usual)
        for line in lines(int(budget_bytes / bytes_per_token), n_ctx_train, needed, slots_max=slots_max)
    ]
    return tuple(sorted(planned, key=lambda one: (one.rejections, -one.side_by_side, one.kv_bytes, one.line.slots)))


def _needed(asked: Asked, tenant: Tenant) -> int:
    """The slot that one sequence of a request needs, with the headroom that is never granted."""
    output = 0 if asked.output_tokens == 0 else max(asked.output_tokens or 0, tenant.limits.output_tokens_min)
    tokens, pool = asked.prompts[0] + output + asked.pool.margin_tokens, asked.pool
    return -(-tokens * pool.tokens // pool.grantable_tokens) + bool(pool.headroom_tokens)


def _judged(line: Line, requests: Requests, bytes_per_token: float, usual_tokens: int) -> Planned:
    reasons: Counter[str] = Counter()
    of: dict[str, int] = {}
    for tenant, some in requests:
        found = replay((replace(asked, pool=line.pool(asked.pool)) for asked in some), tenant)
        of[tenant.name] = found.rejections
        reasons.update(dict(found.rejected))
    at_once = line.cells // max(usual_tokens, 1) if line.unified else line.slots
    fits = usual_tokens <= line.n_ctx_slot
    return Planned(
        line,
        round(line.cells * bytes_per_token),
        tuple(reasons.most_common()),
        tuple(of.items()),
        sum(len(some) for _, some in requests),
        min(line.slots, at_once) if fits else 0,
    )


def _down(tokens: int) -> int:
    return tokens // PAD_TOKENS * PAD_TOKENS


def _bounds(n_ctx_train: int | None, needed_tokens: int | None) -> list[int]:
    return [max(padded(bound), PAD_TOKENS) for bound in (n_ctx_train, needed_tokens) if bound is not None]
