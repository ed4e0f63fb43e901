"""What requests asked for, kept without their text, and what a tenant's other limits would have made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.core.admission import Clamp, Reject, decide
from kvgate.core.ask import Ask
from kvgate.core.reason import Reason
from kvgate.core.tenant import OnOverflow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgate.core.admission import Verdict
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Tenant

PROMPTS_KEPT_MAX: Final = 64
"""Of a prompt list at most so many sizes are kept, the largest: `decide` looks at no more than there are slots."""


OVERFLOWS: Final = frozenset({Reason.PROMPT_OVERFLOW, Reason.GENERATION_OVERFLOW})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as the arithmetic saw it: enough to judge it again.

    Args:
        output_tokens, sequences: as in `Ask`.
        prompts: tokens of its largest prompts, the largest first.
        prompts_count: how many prompts it had.
        pool: what it was judged against.
    """

    output_tokens: int | None
    sequences: int
    prompts: tuple[int, ...]
    prompts_count: int
    pool: KvPool

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompts) <= self.prompts_count or self.sequences < 1:
            raise ValueError(f"not a request's sizes: {self!r}")

    @classmethod
    def of(cls, ask: Ask, prompts: tuple[int, ...], pool: KvPool) -> Asked:
        """What `decide` is given, without what it makes no use of."""
        largest = tuple(sorted(prompts, reverse=True)[:PROMPTS_KEPT_MAX])
        return cls(ask.output_tokens, ask.sequences, largest, len(prompts), pool)

    def judged_for(self, tenant: Tenant) -> Verdict:
        """The verdict under this tenant's Limits and Quota.

        Of a list longer than was kept, the missing prompts count as the smallest kept one: on an engine with more
        slots than that, a bound rather than the truth.
        """
        missing = min(self.prompts_count, self.pool.slots) - len(self.prompts)
        prompts = self.prompts + self.prompts[-1:] * missing
        return decide(Ask(None, self.output_tokens, self.sequences, stream=False), prompts, self.pool, tenant)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one tenant's limits make of some requests.

    `rejected` is by reason, the most frequent first. `trimmed` would not fit as they are, under limits that trim: how
    much of them may go only their text tells.
    """

    requests: int
    rejected: tuple[tuple[str, int], ...]
    clamped: int
    prompt_tokens_max: int
    trimmed: int = 0

    @property
    def rejections(self) -> int:
        """How many would be rejected, for whatever reason."""
        return sum(count for _, count in self.rejected)


def replay(requests: Iterable[Asked], tenant: Tenant) -> Replayed:
    """Judge each of the requests for this tenant; nothing is reserved, so what waits or times out is not known."""
    total = clamped = trimmed = longest = 0
    trims = tenant.limits.on_overflow is OnOverflow.TRIM
    rejected: Counter[str] = Counter()
    for asked in requests:
        verdict = asked.judged_for(tenant)
        total += 1
        longest = max(longest, asked.prompts[0])
        clamped += isinstance(verdict, Clamp)
        if isinstance(verdict, Reject) and trims and verdict.refusal.reason in OVERFLOWS:
            trimmed += 1
        elif isinstance(verdict, Reject):
            rejected[verdict.refusal.reason.label] += 1
    return Replayed(total, tuple(rejected.most_common()), clamped, longest, trimmed)
