"""When what a dead request held is free again: what looks at the engine's slots prove, and what they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgate.core.ask import Size

HANDOVER_S = 1.5
"""How long after its bytes left the gate a request may still be on its way into a slot.

The engine looks for closed sockets about once a second (ENGINE_FACTS "Hang-up"), and launches a queued task
only between two batches; an idle slot seen earlier than this after the handover proves nothing.
"""

HANDOVER_S_PER_TOKEN = 2e-5
"""And this much longer for each token of the prompt, which the engine counts again first: 5e-6 s measured."""

SETTLE_S = 0.1
"""How long another gate may take to settle a lease whose task has ended: its last bytes, and a call to the store."""

_LEFTS_KEPT = 64


def handover_s(prompt_tokens: int) -> float:
    """How long a request with prompts of so many tokens in all may still be on its way into a slot, in seconds."""
    return HANDOVER_S + HANDOVER_S_PER_TOKEN * prompt_tokens


@dataclass(frozen=True, slots=True)
class BusySlot:
    """A slot seen at work: which slot, on which of the engine's tasks, and under which output limit."""

    slot_id: int
    task_id: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class SlotsSeen:
    """One look at the engine's slots, asked for at `asked_at_s`.

    `identified` is False where only the number of busy slots is known (ids are then made up).
    """

    busy: tuple[BusySlot, ...]
    asked_at_s: float
    identified: bool = True


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """What is known of one lease, which may be another gate's; what is known late must only make it more careful.

    Args:
        output_tokens: each answer's limit; 0 where nothing is generated.
        queued: further prompts that wait in the engine for this request's sequences to end.
        prompt_tokens: of its prompts together.
        handed_over_at_s: the latest moment at which it may have left its gate.
        answered_at_s: the latest moment at which the engine may have begun to answer; None where nobody knows.
        draining_since_s: None while it runs.
        unsettled_at_s: the last moment at which its gate is known to have had it unsettled.
    """

    lease_id: str
    output_tokens: int
    queued: int
    prompt_tokens: int
    handed_over_at_s: float | None
    answered_at_s: float | None
    draining_since_s: float | None
    unsettled_at_s: float = math.inf

    @classmethod
    def of_size(
        cls, lease_id: str, size: Size, handed_s: float | None, answered_s: float | None, since_s: float | None
    ) -> LeaseFacts:
        """The facts of a lease of this gate's own, which it would know to be settled."""
        return cls(lease_id, size.output_tokens, size.queued, sum(size.distinct), handed_s, answered_s, since_s)


@dataclass(frozen=True, slots=True)
class _Left:
    """What a look of `asked_at_s` found at work: suspects (first seen at `suspected_at_s`) and newer tasks.

    All of them under one output limit; None where looks do not tell it.
    """

    suspects: int
    suspected_at_s: float
    newer: int
    asked_at_s: float
    output_tokens: int | None


@dataclass(slots=True)
class _Watched:
    looks: int = 0
    identified: bool = True
    suspects: frozenset[tuple[int, int | None]] = frozenset()
    suspected_at_s: float = 0.0
    left: list[_Left] = field(default_factory=list)

    def begin_again(self, *, identified: bool) -> None:
        self.looks, self.identified, self.suspects = 0, identified, frozenset()
        self.left.clear()


@dataclass(slots=True)
class DrainWatch:
    """Follows the drains of one engine from look to look; several may follow the same ones, a drain ends once."""

    _watched: dict[str, _Watched] = field(default_factory=dict)

    def observe(self, leases: Sequence[LeaseFacts], seen: SlotsSeen) -> tuple[str, ...]:
        """The drains that this look proves to be over.

        `leases` are all that are held, running and draining, as they are known once the look has come back.
        """
        drains = [lease for lease in leases if lease.draining_since_s is not None]
        running = [lease for lease in leases if lease.draining_since_s is None]
        self._watched = {lease.lease_id: self._watched.get(lease.lease_id, _Watched()) for lease in drains}
        return tuple(
            lease.lease_id for lease in drains if _is_over(lease, self._watched[lease.lease_id], seen, running)
        )


def _is_over(lease: LeaseFacts, watched: _Watched, seen: SlotsSeen, running: Sequence[LeaseFacts]) -> bool:
    """Whether the engine no longer works for a request whose client, or gate, is gone.

    1. A look from before the drain, or from before the request can have reached a slot, proves nothing.
    2. Only slots under this request's own output limit can be its own: kvgate always sets one, but for requests
       without output (embeddings), which may be in any slot.
    3. Of those, only tasks that the first looks saw: a later task is somebody else's. One look where the
       engine had begun to answer, else two, since a task may be launched right behind a look. A list that waits
       in the engine goes on in later tasks: for it each look begins anew.
    4. None left: over. No more left, at an earlier look, than leases that ran in them then and still run:
       over too. A neighbour that had ended by then is settled by now: its last bytes are faster than the
       next look.
    """
    since, handed = lease.draining_since_s, lease.handed_over_at_s
    if since is None or handed is None or seen.asked_at_s <= since:  # 1
        return False
    certain = lease.answered_at_s is not None
    if not certain and seen.asked_at_s < handed + handover_s(lease.prompt_tokens):
        return False
    if seen.identified is not watched.identified:  # looks of two kinds cannot be compared
        watched.begin_again(identified=seen.identified)
    limit = lease.output_tokens or None
    mine = frozenset(
        (slot.slot_id, slot.task_id) for slot in seen.busy if limit is None or slot.output_tokens in {None, limit}
    )  # 2
    watched.looks += 1
    looks_needed = 1 if certain and not lease.queued else 2
    if watched.looks <= looks_needed or not seen.identified or lease.queued:  # 3
        watched.suspects, watched.suspected_at_s = mine, seen.asked_at_s
    else:
        watched.suspects &= mine
    if watched.looks < looks_needed:
        return False
    explained = not watched.suspects or any(left.suspects <= _explained(left, running) for left in watched.left)  # 4
    watched.left.append(
        _Left(
            suspects=len(watched.suspects),
            suspected_at_s=watched.suspected_at_s,
            newer=len(mine - watched.suspects),
            asked_at_s=seen.asked_at_s,
            output_tokens=limit if seen.identified else None,
        )
    )
    del watched.left[:-_LEFTS_KEPT]
    return explained


def _explained(left: _Left, running: Iterable[LeaseFacts]) -> int:
    """How many of the suspects that a look left are at work for leases that run to this day.

    A lease that was answered before the suspects were taken is in one of them. A later one, and a list that has
    gone on to its next prompts, is in one of them or in a newer task, of which each holds one.
    """
    answers = [
        (lease.answered_at_s, lease.queued)
        for lease in running
        if lease.answered_at_s is not None
        and lease.answered_at_s < left.asked_at_s
        and lease.unsettled_at_s >= left.asked_at_s + SETTLE_S
        and left.output_tokens in {None, lease.output_tokens}
    ]
    older = sum(answered_at_s < left.suspected_at_s and not queued for answered_at_s, queued in answers)
    return older + max(len(answers) - older - left.newer, 0)
