"""What a run is judged by: service against weight, gaps, waits, starvation, and slots that stood idle for nothing."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from loadtests.simulate.gaps import GapWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtests.simulate.workloads import Request, Workload

INPUT_PRICE: Final = 1.0
OUTPUT_PRICE: Final = 2.0
"""What a token counts as in service (DESIGN section 6)."""

WATCHED_MAX: Final = 32
"""Gaps are taken between all pairs of so many tenants; of more, of these, evenly chosen from all."""


class Queued(NamedTuple):
    """One that waits: since when, and for how many cells."""

    since_s: float
    cells: int


@dataclass(slots=True)
class Tally:
    """One tenant's run; `wanted` is the service that all its requests would take, `queue` who waits.

    `tokens_s` is, of each answer, the seconds from token to token.
    """

    sent: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    service: float = 0.0
    wanted: float = 0.0
    queue: dict[str, Queued] = field(default_factory=dict)
    running: int = 0
    waits_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)
    hungry_since_s: float | None = None
    starved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """All tenants' service and demand until a moment, and the largest gap at any moment since the sample before."""

    at_s: float
    service: dict[str, float]
    wanted: dict[str, float]
    gap: float


@dataclass(slots=True)
class Measures:
    """Told of everything that happens; measures by itself, from what the engine really gave, and asks no ledger."""

    workload: Workload
    sample_every_s: float
    tallies: dict[str, Tally] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    gaps: GapWatch = field(default_factory=lambda: GapWatch(frozenset()))
    busy_slot_s: float = 0.0
    idle_slot_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended_s: float = 0.0
    moments: int = 0
    _least: list[tuple[int, str]] = field(default_factory=list)
    _answered_s: dict[str, float] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    _since_s: float = 0.0
    _busy: int = 0
    _idle: tuple[str, int] | None = None
    _gap: float = 0.0

    def __post_init__(self) -> None:
        names = [sender.name for sender in self.workload.senders]
        self.tallies = {
            sender.name: Tally(wanted=math.inf if sender.standing else 0.0) for sender in self.workload.senders
        }
        step = max(len(names) / WATCHED_MAX, 1)
        self.gaps = GapWatch(frozenset(names[int(at * step)] for at in range(min(len(names), WATCHED_MAX))))

    # -- what happens to a request

    def sent(self, request: Request) -> None:
        """Its client has sent it."""
        tally = self.tallies[request.tenant]
        tally.sent += 1
        tally.wanted += INPUT_PRICE * request.prompt_tokens + OUTPUT_PRICE * request.output_tokens

    def refused(self, request: Request, reason: str) -> None:
        """It was told to come again, or gave up; it never does come again here."""
        self.tallies[request.tenant].refused[reason] += 1

    def waits(self, request: Request, cells: int, now_s: float) -> None:
        """It stands in the queue."""
        tally = self.tallies[request.tenant]
        tally.queue[request.lease_id] = Queued(request.at_s, cells)
        if len(tally.queue) == 1:
            self.gaps.waits(request.tenant)
            self._stands_first(request.tenant, request.lease_id, cells)
            if not tally.running:
                tally.hungry_since_s = now_s

    def gave_up(self, request: Request, now_s: float) -> None:
        """It left the queue unserved."""
        self._leaves(request)
        self._fed(request.tenant, now_s)
        self.refused(request, "gave up waiting")

    def granted(self, request: Request, now_s: float) -> None:
        """It is let in: its prompt counts as service from here on."""
        tally = self.tallies[request.tenant]
        if request.lease_id in tally.queue:
            self._leaves(request)
        tally.running += 1
        self._fed(request.tenant, now_s)
        tally.waits_s.append(now_s - request.at_s)
        tally.input_tokens += request.prompt_tokens
        self._serve(request.tenant, INPUT_PRICE * request.prompt_tokens)

    def answered(self, request: Request, now_s: float) -> None:
        """Its first token is out."""
        self._answered_s[request.lease_id] = now_s
        self.tallies[request.tenant].first_tokens_s.append(now_s - request.at_s)

    def produced(self, request: Request, tokens: int) -> None:
        """It was given so many output tokens more."""
        self.tallies[request.tenant].output_tokens += tokens
        self._serve(request.tenant, OUTPUT_PRICE * tokens)

    def finished(self, request: Request, now_s: float) -> None:
        """Its answer is whole."""
        tally = self.tallies[request.tenant]
        answered_s = self._answered_s.pop(request.lease_id)
        if request.output_tokens > 1:
            tally.tokens_s.append((now_s - answered_s) / (request.output_tokens - 1))
        tally.finished += 1
        tally.running -= 1
        if tally.queue and not tally.running:
            tally.hungry_since_s = now_s

    # -- moments

    def moment(self, now_s: float, *, busy: int, free_cells: int, held_back: Callable[[], str]) -> None:
        """All that happens at this time has happened.

        `held_back` tells why the ledger would leave slots idle beside a request that fits: "" for no reason at all.
        """
        self._pass_time(now_s)
        self.moments += 1
        if self._changed:
            weight = self.workload.sender
            services = [(name, self.tallies[name].service / weight(name).weight) for name in self._changed]
            self._gap = max(self._gap, self.gaps.moment(services))
            self._changed.clear()
        self._busy = busy
        free = self.workload.engine.pool.slots - busy
        self._idle = (held_back(), free) if free and self._least_cells() <= free_cells else None

    def end(self, now_s: float) -> None:
        """The run is over; who is hungry still was so until now."""
        self._pass_time(now_s)
        self.ended_s = now_s
        for name in self.tallies:
            self._fed(name, now_s)
        if not self.samples or self.samples[-1].at_s < now_s:
            self._sample(now_s)

    # -- steps

    def _serve(self, tenant: str, service: float) -> None:
        self.tallies[tenant].service += service
        self._changed.add(tenant)

    def _leaves(self, request: Request) -> None:
        tally = self.tallies[request.tenant]
        del tally.queue[request.lease_id]
        if self._first.pop(request.lease_id, None) is not None and tally.queue:
            lease_id, queued = next(iter(tally.queue.items()))
            self._stands_first(request.tenant, lease_id, queued.cells)
        if not tally.queue:
            self.gaps.waits_no_more(request.tenant)

    def _stands_first(self, tenant: str, lease_id: str, cells: int) -> None:
        """Only the first of each tenant may be let in: nobody overtakes an earlier request of its own tenant."""
        self._first[lease_id] = tenant
        heapq.heappush(self._least, (cells, lease_id))

    def _fed(self, tenant: str, now_s: float) -> None:
        tally = self.tallies[tenant]
        if tally.hungry_since_s is not None:
            tally.starved_s = max(tally.starved_s, now_s - tally.hungry_since_s)
            tally.hungry_since_s = now_s if tally.queue and not tally.running else None

    def _least_cells(self) -> float:
        while self._least and self._least[0][1] not in self._first:
            heapq.heappop(self._least)
        return self._least[0][0] if self._least else math.inf

    def _pass_time(self, now_s: float) -> None:
        passed_s = now_s - self._since_s
        self.busy_slot_s += self._busy * passed_s
        if self._idle is not None:
            self.idle_slot_s[self._idle[0]] += self._idle[1] * passed_s
        self._since_s = now_s
        while len(self.samples) * self.sample_every_s <= now_s:
            self._sample(len(self.samples) * self.sample_every_s)

    def _sample(self, at_s: float) -> None:
        service = {name: tally.service for name, tally in self.tallies.items()}
        wanted = {name: tally.wanted for name, tally in self.tallies.items()}
        self.samples.append(Sample(at_s, service, wanted, self._gap))
        self._gap = 0.0
