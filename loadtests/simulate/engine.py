"""A continuous-batching engine in simulated time: which sequence gets its tokens when, as far as speed decides it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtests.simulate.speed import Engine


class Overflowed(Exception):
    """More was started than the engine holds: a real one ends every sequence then, so no ledger may let it happen."""


@dataclass(slots=True)
class _Sequence:
    lease_id: str
    prompt_left: int
    output_tokens: int
    cells: int
    decodes_from: int | None = None


@dataclass(slots=True)
class _Plan:
    """Iterations that are all alike: what is in each, how long each is, and how many there will be."""

    begun_s: float
    each_s: float
    count: int
    reads: tuple[tuple[_Sequence, int], ...]
    decodes: bool

    @property
    def ends_s(self) -> float:
        return self.begun_s + self.count * self.each_s

    def done(self, now_s: float) -> int:
        return min(int((now_s - self.begun_s) / self.each_s), self.count)


@dataclass(frozen=True, slots=True)
class Changes:
    """What has come about at the end of an iteration: whose first token is out, and who is finished."""

    at_s: float
    answered: tuple[str, ...]
    finished: tuple[str, ...]


@dataclass(slots=True)
class EngineModel:
    """One engine. Each iteration gives every decoding sequence a token and reads prompts, first come first read.

    What is started while an iteration runs joins the next one. The last piece of a prompt gives the first token.
    A change takes O(log n): iterations that are alike are one step.
    """

    engine: Engine
    held_cells: int = 0
    prompt_tokens_read: int = 0
    _reading: deque[_Sequence] = field(default_factory=deque)
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _ends: list[tuple[int, int, str]] = field(default_factory=list)
    _decoding: int = 0
    _steps: int = 0
    _started: int = 0
    _plan: _Plan | None = None

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return len(self._sequences)

    @property
    def prompt_tokens_unread(self) -> int:
        """Of the prompts in slots, what is still to be read, as of the last change."""
        return sum(sequence.prompt_left for sequence in self._reading)

    def start(self, lease_id: str, prompt_tokens: int, output_tokens: int, now_s: float, *, cells: int) -> None:
        """A request takes a slot; it will stop by itself after `output_tokens`.

        Raises:
            Overflowed: there is no slot, or no cells, for it.
        """
        pool = self.engine.pool
        if self.running == pool.slots or self.held_cells + cells > pool.tokens:
            raise Overflowed(
                f"{lease_id}: {self.running} of {pool.slots} slots, {self.held_cells} of {pool.tokens} cells"
            )
        sequence = _Sequence(lease_id, max(prompt_tokens, 1), output_tokens, cells)
        self._sequences[lease_id] = sequence
        self._reading.append(sequence)
        self.held_cells += cells
        if self._plan is None:
            self._plan = self._next_plan(now_s)
        else:  # the iteration that runs ends first
            self._plan.count = min(self._plan.done(now_s) + 1, self._plan.count)

    def next_s(self) -> float:
        """When something changes next by itself; infinity where nothing runs."""
        return math.inf if self._plan is None else self._plan.ends_s

    def change(self) -> Changes:
        """Go to `next_s()`: the iterations until then are done."""
        plan = self._plan
        if plan is None:
            raise ValueError("nothing runs")
        now_s, answered, finished = plan.ends_s, [], []
        if plan.decodes:
            self._steps += plan.count
        while self._ends and self._ends[0][0] <= self._steps:
            finished.append(heappop(self._ends)[2])
            self._decoding -= 1
        for sequence, tokens in plan.reads:
            sequence.prompt_left -= tokens * plan.count
            self.prompt_tokens_read += tokens * plan.count
            if sequence.prompt_left == 0:
                self._reading.popleft()
                answered.append(sequence.lease_id)
                if not self._decode(sequence):
                    finished.append(sequence.lease_id)
        for lease_id in finished:
            self.held_cells -= self._sequences.pop(lease_id).cells
        self._plan = self._next_plan(now_s)
        return Changes(now_s, tuple(answered), tuple(finished))

    def produced(self, lease_id: str, now_s: float) -> int:
        """Output tokens of a running sequence by now."""
        sequence = self._sequences[lease_id]
        if sequence.decodes_from is None:
            return 0
        ahead = self._plan.done(now_s) if self._plan is not None and self._plan.decodes else 0
        return min(1 + self._steps + ahead - sequence.decodes_from, sequence.output_tokens)

    def _decode(self, sequence: _Sequence) -> bool:
        """Its prompt is read and its first token out; whether there is more to come."""
        if sequence.output_tokens <= 1:
            return False
        sequence.decodes_from = self._steps
        self._started += 1
        heappush(self._ends, (self._steps + sequence.output_tokens - 1, self._started, sequence.lease_id))
        self._decoding += 1
        return True

    def _next_plan(self, now_s: float) -> _Plan | None:
        if not self._sequences:
            return None
        speed = self.engine.speed
        room = max(speed.batch_tokens - self._decoding, 1)
        reads: list[tuple[_Sequence, int]] = []
        left = room
        for sequence in self._reading:
            if left == 0:
                break
            tokens = min(sequence.prompt_left, left)
            reads.append((sequence, tokens))
            left -= tokens
        each_s = speed.iteration_s(self._decoding, room - left)
        count = self._ends[0][0] - self._steps if self._ends else 1 << 40
        if reads:
            head, tokens = reads[0]
            count = min(count, head.prompt_left // tokens if len(reads) == 1 else 1)
        return _Plan(now_s, each_s, count, tuple(reads), decodes=self._decoding > 0)
