"""Runs a workload through a policy and an engine, event by event, in simulated time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from kvgate.core.ask import Size, Usage
from kvgate.core.ledger import Denied, Lease
from loadtests.simulate.engine import EngineModel
from loadtests.simulate.measures import Measures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from loadtests.simulate.policies import Policy
    from loadtests.simulate.workloads import Request, Workload

CHARGE_EVERY_S: Final = 1.0
"""How often the ledger hears of the output that has streamed."""

SAMPLES: Final = 120
TOLD_EVERY: Final = 200


@dataclass(slots=True)
class Simulation:
    """One policy on one workload; `run` it once.

    Args:
        charge_every_s: how often the ledger is told of the output that has streamed.
        patience_s: how long a client waits in the queue before it hangs up for good.
        told: called now and then with the simulated time.
    """

    workload: Workload
    policy: Policy
    charge_every_s: float = CHARGE_EVERY_S
    patience_s: float = math.inf
    told: Callable[[float, int], None] | None = None
    measures: Measures = field(init=False)
    engine: EngineModel = field(init=False)
    _arrivals: Iterator[Request] = field(init=False)
    _next: Request | None = None
    _standing: dict[str, Iterator[Request]] = field(default_factory=dict)
    _sent: deque[Request] = field(default_factory=deque)
    _waiting: dict[str, Request] = field(default_factory=dict)
    _running: dict[str, Request] = field(default_factory=dict)
    _produced: dict[str, int] = field(default_factory=dict)
    _deadlines: deque[tuple[float, str]] = field(default_factory=deque)
    _charge_s: float = 0.0
    _again: list[tuple[float, str, Request]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.measures = Measures(self.workload, self.workload.duration_s / SAMPLES)
        self.engine = EngineModel(self.workload.engine)
        self._arrivals = self.workload.requests()
        self._charge_s = self.charge_every_s

    def run(self) -> Measures:
        """From 0 s to the workload's end; what runs or waits then is left as it is."""
        self._begin()
        while (now_s := self._next_s()) < self.workload.duration_s:
            self._step(now_s)
            self._send_standing(now_s)
            pool = self.workload.engine.pool
            self.measures.moment(
                now_s,
                busy=self.engine.running,
                free_cells=pool.grantable_tokens - self.engine.held_cells,
                held_back=self.policy.held_back,
            )
            if self.told is not None and self.measures.moments % TOLD_EVERY == 0:
                self.told(now_s, self.measures.moments)
        self._measure_output(self.workload.duration_s)
        self.measures.end(self.workload.duration_s)
        return self.measures

    # -- what happens next

    def _begin(self) -> None:
        self._next = next(self._arrivals, None)
        for sender in self.workload.senders:
            if sender.standing:
                self._standing[sender.name] = sender.sized(self.workload.seed)
        # In turns, or the first of them would fill the engine.
        for turn in range(max((s.standing for s in self.workload.senders), default=0)):
            self._sent += [next(self._standing[s.name]) for s in self.workload.senders if turn < s.standing]
        self._send_standing(0.0)

    def _next_s(self) -> float:
        arrival_s = self._next.at_s if self._next is not None else math.inf
        charge_s = self._charge_s if self._running else math.inf
        deadline_s = self._deadlines[0][0] if self._deadlines else math.inf
        again_s = self._again[0][0] if self._again else math.inf
        return min(self.engine.next_s(), charge_s, deadline_s, arrival_s, again_s)

    def _step(self, now_s: float) -> None:
        """What is due now; the engine first, since what ends makes room for what comes."""
        if self.engine.next_s() <= now_s:
            self._engine_changes()
        else:
            self._measure_output(now_s)
        if self._running and self._charge_s <= now_s:
            self._charge(now_s)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            self._give_up(self._deadlines.popleft()[1], now_s)
        while self._next is not None and self._next.at_s <= now_s:
            self._arrive(self._next, now_s)
            self._next = next(self._arrivals, None)
        while self._again and self._again[0][0] <= now_s:
            self._sent.append(heappop(self._again)[-1])

    # -- steps

    def _arrive(self, request: Request, now_s: float) -> None:
        self.measures.sent(request)
        outcome = self.policy.reserve(request, now_s)
        if isinstance(outcome, Denied):
            self.measures.refused(request, outcome.reason.label)
            if request.tenant in self._standing:
                again = next(self._standing[request.tenant])
                heappush(self._again, (now_s + outcome.retry_after_s, again.lease_id, again))
        elif isinstance(outcome, Lease):
            self._grant(request, outcome, now_s)
        else:
            self._waiting[request.lease_id] = request
            cells = self.workload.engine.pool.cells(Size(request.prompt_tokens, request.limit_tokens))
            self.measures.waits(request, cells, now_s)
            if self.patience_s < math.inf:
                self._deadlines.append((now_s + self.patience_s, request.lease_id))

    def _engine_changes(self) -> None:
        changes, let_in = self.engine.change(), list[Lease]()
        for lease_id in changes.answered:
            let_in += self.policy.ledger.answered(lease_id, changes.at_s)
            self.measures.answered(self._running[lease_id], changes.at_s)
        finished = [self._running.pop(lease_id) for lease_id in changes.finished]
        for request in finished:
            self.measures.produced(request, request.output_tokens - self._produced.pop(request.lease_id))
            self.measures.finished(request, changes.at_s)
        self._measure_output(changes.at_s)
        for request in finished:
            used = Usage(request.prompt_tokens, request.output_tokens)
            let_in += self.policy.ledger.settle(request.lease_id, changes.at_s, ended=True, used=used)
        self._let_in(let_in, changes.at_s)

    def _charge(self, now_s: float) -> None:
        for lease_id, tokens in self._produced.items():
            self.policy.ledger.streamed(lease_id, tokens, now_s)
        self._charge_s = now_s + self.charge_every_s

    def _give_up(self, lease_id: str, now_s: float) -> None:
        if (request := self._waiting.pop(lease_id, None)) is not None:
            self.measures.gave_up(request, now_s)
            self._let_in(self.policy.ledger.cancel(lease_id, now_s), now_s)

    def _let_in(self, leases: Iterable[Lease], now_s: float) -> None:
        for lease in leases:
            self._grant(self._waiting.pop(lease.lease_id), lease, now_s)

    def _grant(self, request: Request, lease: Lease, now_s: float) -> None:
        self.measures.granted(request, now_s)
        self.policy.ledger.hand_over(lease.lease_id, now_s)
        self._running[lease.lease_id] = request
        self._produced[lease.lease_id] = 0
        self.engine.start(lease.lease_id, request.prompt_tokens, request.output_tokens, now_s, cells=lease.cells)
        if request.tenant in self._standing:
            self._sent.append(next(self._standing[request.tenant]))

    def _send_standing(self, now_s: float) -> None:
        while self._sent:
            self._arrive(replace(self._sent.popleft(), at_s=now_s), now_s)

    def _measure_output(self, now_s: float) -> None:
        for lease_id, request in self._running.items():
            tokens = self.engine.produced(lease_id, now_s)
            if (more := tokens - self._produced[lease_id]) > 0:
                self._produced[lease_id] = tokens
                self.measures.produced(request, more)
