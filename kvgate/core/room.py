"""What is held of a pool, by whom, and what still has room in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgate.core.fairness import MILLI, FairRule
from kvgate.core.guarantee import Guarantees, Part
from kvgate.core.minute import Minutes
from kvgate.core.tenant import Tier

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.claims import Reservation
    from kvgate.core.fair_queue import Waiting
    from kvgate.core.pool import KvPool


@dataclass(slots=True)
class Held:
    """One lease: what it holds, since when, how far it has come, and what it was charged."""

    waited: Waiting
    cells: int
    granted_at_s: float
    handed_over_at_s: float | None = None
    answered_at_s: float | None = None
    draining_since_s: float | None = None
    prefill_tokens: int = 0
    streamed_tokens: int = 0
    service_milli: int = 0

    @property
    def size(self) -> Size:
        """What it holds at most."""
        return self.waited.reservation.size

    @property
    def filled_tokens(self) -> int:
        """Of its cells, those that have a token in them by now."""
        return min(sum(self.size.distinct) + self.streamed_tokens, self.cells)


@dataclass(slots=True)
class Account:
    """What the ledger keeps of one tenant, in sequences and cells."""

    running: int = 0
    draining: int = 0
    cells: int = 0
    filled: int = 0
    weight_milli: int = MILLI
    minutes: Minutes = field(default_factory=Minutes)

    def add(self, held: Held, sign: int) -> None:
        """One more lease, or, with -1, one less."""
        sequences = sign * held.size.sequences
        if held.draining_since_s is None:
            self.running += sequences
        else:
            self.draining += sequences
        self.cells += sign * held.cells
        self.filled += sign * held.filled_tokens


@dataclass(slots=True)
class Room:
    """The sums of what is held, and what they leave.

    Args:
        pool: what the engine can hold.
        rule: bounds of fairness.
        guarantees: what of it is held back for whom.
    """

    pool: KvPool
    rule: FairRule = field(default_factory=FairRule)
    guarantees: Guarantees = field(default_factory=Guarantees)
    accounts: dict[str, Account] = field(default_factory=dict)
    sequences: int = 0
    cells: int = 0
    prefill_tokens: int = 0

    def account(self, tenant: str) -> Account:
        """A tenant's account."""
        return self.accounts.setdefault(tenant, Account())

    def add(self, held: Held, sign: int) -> None:
        """One more is held, or, with -1, one less."""
        self.sequences += sign * held.size.sequences
        self.cells += sign * held.cells
        self.prefill_tokens += sign * held.prefill_tokens
        self.account(held.waited.tenant).add(held, sign)

    def can_ever_fit(self, reservation: Reservation) -> bool:
        """Whether the pool could hold it if it held nothing else."""
        size, pool = reservation.size, self.pool
        one = size.prompt_tokens + size.output_tokens + pool.margin_tokens
        return (
            one <= pool.tokens_per_slot and size.sequences <= pool.slots and pool.cells(size) <= pool.grantable_tokens
        )

    def has_room(self, reservation: Reservation) -> bool:
        """Whether slots, cells and prefill have room, whoever they are held back for."""
        size, most = reservation.size, self.rule.prefill_tokens_max
        prefill = self.prefill_tokens
        return (
            self.sequences + size.sequences <= self.pool.slots
            and self.cells + self.pool.cells(size) <= self.pool.grantable_tokens
            and (most is None or prefill == 0 or prefill + sum(size.distinct) <= most)
        )

    def fits(self, reservation: Reservation) -> bool:
        """Whether it has room beside what is held back for others, or may have that lent."""
        if not self.has_room(reservation):
            return False
        size, back = reservation.size, self._held_back(reservation.tenant)
        beside = (
            self.sequences + size.sequences + back.slots <= self.pool.slots
            and self.cells + self.pool.cells(size) + back.tokens <= self.pool.grantable_tokens
        )
        is_short = size.output_tokens * (1 + size.queued) <= self.rule.lent_output_tokens_max
        return beside or (is_short and reservation.share.tier is not Tier.SPOT)

    def will_fit(self, reservation: Reservation) -> bool:
        """Whether it fits when all others have ended, without being lent anything: it is worth draining for."""
        size, others = reservation.size, self.guarantees.of_others(reservation.tenant)
        return (
            size.sequences + others.slots <= self.pool.slots
            and self.pool.cells(size) + others.tokens <= self.pool.grantable_tokens
        )

    def in_its_share(self, reservation: Reservation) -> bool:
        """Whether it is inside what is guaranteed to its tenant, with what that holds already."""
        part = self.guarantees.of(reservation.tenant)
        sequences, cells = self._with(reservation)
        return sequences <= part.slots and cells <= part.tokens

    def inside_quota(self, reservation: Reservation) -> bool:
        """Whether it is inside its tenant's Quota, with what that holds already."""
        quota = reservation.quota
        sequences, cells = self._with(reservation)
        return (quota.concurrency_max is None or sequences <= quota.concurrency_max) and (
            quota.kv_tokens_max is None or cells <= quota.kv_tokens_max
        )

    def _with(self, reservation: Reservation) -> tuple[int, int]:
        account = self.accounts.get(reservation.tenant) or Account()
        sequences = account.running + account.draining + reservation.size.sequences
        return sequences, account.cells + self.pool.cells(reservation.size)

    def _held_back(self, tenant: str) -> Part:
        """What the others have of guaranteed slots and cells and do not use."""
        slots = tokens = 0
        for name, part in self.guarantees.parts.items():
            if name != tenant:
                account = self.accounts.get(name) or Account()
                slots += max(part.slots - account.running - account.draining, 0)
                tokens += max(part.tokens - account.cells, 0)
        return Part(slots, tokens)
