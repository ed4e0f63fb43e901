"""Foreign traffic: when busy slots that no lease explains mean that somebody uses the engine around the gate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvgate.core.engine_state import lasting

APART_S: Final = 1.0
"""How far apart two looks must be to prove foreign traffic.

One look is no proof. It rests on llama.cpp freeing a slot in the very step that sends the answer's end, which is a
build's habit and no promise; and what another gate was granted is known here a moment later.
"""

QUIET_S: Final = 10.0
"""How long after its last sighting an episode goes on.

A lease that is granted and not in its slot yet explains a foreigner's slot for a moment: a look without surplus
ends nothing by itself, or one episode would be told as many.
"""


@dataclass(frozen=True, slots=True)
class Tally:
    """The sequences that the ledger holds, running and draining, and all that it has granted since start."""

    held: int = 0
    granted: int = 0


def surplus(busy: int, asked: Tally, answered: Tally) -> int:
    """Busy slots that nobody can hold a lease for.

    Whatever was held at any moment of the look counts: the tally when it was asked for, and what was granted until
    it was answered. An answer that ended in between is no foreigner.

    A slot's output limit, which drains go by, is no evidence here: tasks without output (embeddings) show the
    engine's default, as do foreign ones without a limit, and a foreigner may set any.
    """
    return max(busy - asked.held - (answered.granted - asked.granted), 0)


@dataclass(frozen=True, slots=True)
class ForeignWatch:
    """What looks at the slots have told until now; each look makes the next of these.

    Args:
        suspected: the least surplus of an unbroken run of looks that each had one, 0 where the latest had none.
        suspected_at_s: when the first of the run was answered.
        slots: foreign busy slots at the latest look.
        most: the most of this episode.
        seen_at_s: when foreign traffic was seen last, None outside an episode.
        sightings: episodes since start.
    """

    suspected: int = 0
    suspected_at_s: float = 0.0
    slots: int = 0
    most: int = 0
    seen_at_s: float | None = None
    sightings: int = 0

    @property
    def is_on(self) -> bool:
        """Whether an episode is going on."""
        return self.seen_at_s is not None

    @property
    def wants_look(self) -> bool:
        """Whether the matter is open, so that the slots should be looked at although the gate is idle."""
        return self.is_on or self.suspected > 0

    def looked(self, found: int, asked_at_s: float, now_s: float) -> ForeignWatch:
        """After a look that was asked for at `asked_at_s` and found this surplus."""
        if found == 0:
            return _aged(replace(self, suspected=0, slots=0), now_s)
        if self.suspected == 0:
            return _aged(replace(self, suspected=found, suspected_at_s=now_s, slots=0), now_s)
        suspected = min(self.suspected, found)
        if asked_at_s < self.suspected_at_s + APART_S:
            return replace(self, suspected=suspected, slots=min(self.slots, found))
        return replace(
            self,
            # The run goes on from here, with this look as its first.
            suspected=found,
            suspected_at_s=now_s,
            slots=suspected,
            most=max(self.most, suspected),
            seen_at_s=now_s,
            sightings=self.sightings + (not self.is_on),
        )

    def unseen(self, now_s: float) -> ForeignWatch:
        """After a look that had no answer: it breaks the run, and proves nothing else."""
        return _aged(replace(self, suspected=0, slots=0), now_s)

    def warning(self, now_s: float, overdue: int = 0) -> str | None:
        """What readiness says of it; `overdue` drains have ended by time since start."""
        if self.seen_at_s is None:
            return None
        slots = "1 busy slot" if self.most == 1 else f"{self.most} busy slots"
        own = (
            f" It may also be this gate's own: {overdue} drains have ended by drain_max_s since start, with their "
            "slots unproven."
            if overdue
            else ""
        )
        return (
            f"somebody uses the engine around this gate: {slots} more than leases (seen "
            f"{lasting(now_s - self.seen_at_s)} ago); what it holds of the KV cache is not in the ledger.{own} Close "
            "the engine's port to everybody but kvgate"
        )


def _aged(watch: ForeignWatch, now_s: float) -> ForeignWatch:
    if watch.seen_at_s is not None and now_s - watch.seen_at_s >= QUIET_S:
        return replace(watch, seen_at_s=None, most=0)
    return watch
