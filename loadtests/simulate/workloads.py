"""Who asks for how much, and when: each workload is its tenants and their requests, the same for the same seed."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from kvgate.core.tenant import Tier
from loadtests.simulate.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtests.simulate.speed import Engine


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its client sends it; `output_tokens` is where its answer will end, `limit_tokens` its limit."""

    lease_id: str
    tenant: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    limit_tokens: int


@dataclass(frozen=True, slots=True)
class Phase:
    """From `from_s` on a tenant sends this many requests a second; 0 is silence."""

    from_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Sender:
    """One tenant: what it is given (weight, tier), and how it asks.

    Args:
        phases: its rate over time, the first from 0 s.
        poisson: requests come at random at that rate; else evenly spaced, from a random moment on.
        standing: instead of a rate, so many requests always wait: whenever one is let in, or a refused one may come
            again, the next is sent.
    """

    name: str
    phases: tuple[Phase, ...]
    prompts: Lengths
    outputs: Lengths
    weight: float = 1.0
    tier: Tier = Tier.ELASTIC
    guaranteed_ratio: float = 0.0
    poisson: bool = False
    standing: int = 0

    @property
    def limit_tokens(self) -> int:
        """The output limit that each of its requests sets."""
        return self.outputs.longest

    def requests(self, seed: int, until_s: float) -> Iterator[Request]:
        """What it sends before `until_s` by its rate, in order."""
        when, sized = Random(f"{seed}/{self.name}/when"), self.sized(seed)
        for at, phase in enumerate(self.phases):
            end_s = min(self.phases[at + 1].from_s if at + 1 < len(self.phases) else math.inf, until_s)
            if phase.requests_per_s <= 0:
                continue
            at_s = phase.from_s + self._gap_s(when, phase.requests_per_s, first=True)
            while at_s < end_s:
                yield replace(next(sized), at_s=at_s)
                at_s += self._gap_s(when, phase.requests_per_s)

    def sized(self, seed: int) -> Iterator[Request]:
        """Its requests, one after the other for ever, as if each were sent at 0 s."""
        sizes = Random(f"{seed}/{self.name}/sizes")
        for number in count(1):
            prompt, output = self.prompts.draw(sizes), self.outputs.draw(sizes)
            yield Request(f"{self.name}-{number}", self.name, 0.0, prompt, output, self.limit_tokens)

    def _gap_s(self, when: Random, requests_per_s: float, *, first: bool = False) -> float:
        if self.poisson:
            return when.expovariate(requests_per_s)
        return (when.random() if first else 1.0) / requests_per_s


@dataclass(frozen=True, slots=True)
class Workload:
    """A named load on one engine for a time."""

    name: str
    about: str
    engine: Engine
    senders: tuple[Sender, ...]
    duration_s: float
    seed: int = 1
    _by_name: dict[str, Sender] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self._by_name.update({sender.name: sender for sender in self.senders})
        if len(self._by_name) != len(self.senders):
            raise ValueError("two tenants of one name")

    def sender(self, name: str) -> Sender:
        """The tenant of this name."""
        return self._by_name[name]

    def requests(self) -> Iterator[Request]:
        """What all of them send by their rates, in order; one request of each tenant is in memory."""
        streams = [sender.requests(self.seed, self.duration_s) for sender in self.senders]
        return heapq.merge(*streams, key=lambda request: (request.at_s, request.lease_id))

    @property
    def longest_prompt(self) -> int:
        """No prompt is longer."""
        return max(sender.prompts.longest for sender in self.senders)

    @property
    def has_tiers(self) -> bool:
        """Whether any tenant is not elastic."""
        return any(sender.tier is not Tier.ELASTIC for sender in self.senders)

    @property
    def even_requests_per_minute(self) -> int:
        """What the engine could serve a minute, in even shares among the tenants; at least 1."""
        return max(int(60 * mean_capacity(self.engine, self.senders) / len(self.senders)), 1)

    def lasting(self, duration_s: float | None) -> Workload:
        """The same for another time; None leaves it."""
        return self if duration_s is None else replace(self, duration_s=duration_s, _by_name={})

    def fitted(self, engine: Engine) -> Workload:
        """The same on another engine: rates in proportion to its speed, lengths to its slot.

        Every length shrinks by one factor where the longest prompt with the longest answer is more than a slot.
        """
        longest = max(s.prompts.longest + s.outputs.longest for s in self.senders)
        shrink = min(engine.pool.tokens_per_slot / longest, 1.0)
        shrunk = [
            replace(s, prompts=_scaled(s.prompts, shrink), outputs=_scaled(s.outputs, shrink)) for s in self.senders
        ]
        ratio = mean_capacity(engine, shrunk) / mean_capacity(self.engine, self.senders)
        senders = tuple(
            replace(s, phases=tuple(replace(p, requests_per_s=p.requests_per_s * ratio) for p in s.phases))
            for s in shrunk
        )
        return replace(self, engine=engine, senders=senders, _by_name={})


def _scaled(lengths: Lengths, factor: float) -> Lengths:
    return Lengths(tuple((share, max(int(tokens * factor), 1)) for share, tokens in lengths.quantiles))


def mean_capacity(engine: Engine, senders: tuple[Sender, ...] | list[Sender]) -> float:
    """Requests a second that the engine serves of these tenants' mean size."""
    prompt = sum(s.prompts.mean() for s in senders) / len(senders)
    output = sum(s.outputs.mean() for s in senders) / len(senders)
    limit = sum(s.limit_tokens for s in senders) / len(senders)
    return engine.requests_per_s(prompt, output, prompt + limit)
