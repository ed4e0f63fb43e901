"""What a tenant asked for in the last minute, and how long it must wait until more of it is inside its Quota."""

from __future__ import annotations

from dataclasses import dataclass, field

STEP_S = 5
STEPS = 12
"""A minute is twelve steps of five seconds and the one that has begun: what is counted stays so for 60 to 65 s.

So in no 60 seconds is more let in than the Quota says. A fixed minute lets twice as much through around its turn,
and a bucket that refills lets it through after every rest.
"""


def step_of(now_s: float) -> int:
    """The step that a moment is in."""
    return int(now_s // STEP_S)


@dataclass(slots=True)
class Minute:
    """One figure of one tenant, step by step: requests or tokens."""

    counts: dict[int, int] = field(default_factory=dict)

    def total(self, now_s: float) -> int:
        """All that counts now."""
        self.counts = {step: n for step, n in self.counts.items() if step >= step_of(now_s) - STEPS}
        return sum(self.counts.values())

    def add(self, step: int, amount: int) -> None:
        """Count more, or less, in a step; one that is past and forgotten stays so."""
        found = self.counts.get(step, 0) + amount
        if found > 0:
            self.counts[step] = found
        else:
            self.counts.pop(step, None)

    def wait_s(self, amount: int, most: int | None, now_s: float) -> float:
        """Seconds until this much more is within `most`; 0 where it is now.

        What is more than `most` by itself may go when nothing else counts: else it could never.
        """
        total = self.total(now_s)
        if most is None or total == 0 or total + amount <= most:
            return 0.0
        excess = min(total + amount - most, total)
        for step in sorted(self.counts):
            excess -= self.counts[step]
            if excess <= 0:
                return (step + STEPS + 1) * STEP_S - now_s
        raise AssertionError("unreachable: the excess is part of the total")


@dataclass(frozen=True, slots=True)
class Charge:
    """What one request was counted as, and in which step."""

    step: int
    requests: int
    tokens: int


@dataclass(slots=True)
class Minutes:
    """A tenant's requests, tokens and service (`core.fairness`) of the last minute."""

    requests: Minute = field(default_factory=Minute)
    tokens: Minute = field(default_factory=Minute)
    service: Minute = field(default_factory=Minute)

    def take(self, charge: Charge) -> None:
        """Count a request."""
        self.requests.add(charge.step, charge.requests)
        self.tokens.add(charge.step, charge.tokens)

    def give_back(self, charge: Charge) -> None:
        """The request never ran."""
        self._add(charge, -charge.requests, -charge.tokens)

    def correct(self, charge: Charge, used_tokens: int) -> None:
        """The request took so many tokens in truth."""
        if charge.tokens:
            self._add(charge, 0, used_tokens - charge.tokens)

    def _add(self, charge: Charge, requests: int, tokens: int) -> None:
        if charge.step in self.requests.counts:
            self.requests.add(charge.step, requests)
        if charge.step in self.tokens.counts:
            self.tokens.add(charge.step, tokens)
