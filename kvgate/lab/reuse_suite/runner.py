"""One run of the suite: plan, measure the noise, then each case cold, changed, and with reuse."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvgate.core.reuse_case import CONTEXT_TOKENS_MIN, DEPTH_TOKENS_MAX, DEPTH_TOKENS_MIN, Scale
from kvgate.core.reuse_cases import NAMES, cases, sample
from kvgate.core.reuse_suite import (
    CaseResult,
    Outcome,
    Reused,
    SuiteResult,
    Taken,
    differences,
    judge,
    result_of,
    threshold_of,
)
from kvgate.lab.reuse_suite.asking import Asked, Desk, Stopped, Unasked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgate.core.reuse_case import Case, Step
    from kvgate.lab.reuse_suite.asking import SuiteEngine
    from kvgate.ports import Clock

ATTEMPTS: Final = 3
"""A case whose beginning somebody else drove out of its slot is asked again, with other words, so often."""

DEPTH_RATIO: Final = 0.53
"""Of a slot's tokens; the rest is for the template, the turns and the answer."""

PLANNED: Final = "plan"
"""The case's name in the first progress, which is told once the run is planned and timed."""

EARLY_RATIO: Final = 0.1
"""So far into a run its forecast is better than what its own speed says."""

ASK_S: Final = 0.1
"""What a request costs beside its prefill, for the forecast: about that on the development engine."""


@dataclass(frozen=True, slots=True)
class SuiteSettings:
    """How much a run may take.

    Args:
        time_max_s: no case is begun after so long; the depth is chosen so that half of it should do.
        depth_tokens: the longest beginning that is reused; None takes what fits the slot and the time.
        only: names of the cases to run; empty runs all.
    """

    time_max_s: float = 900.0
    depth_tokens: int | None = None
    only: tuple[str, ...] = ()


@dataclass(slots=True)
class Notes:
    """What an interrupted run has found, so that the next goes on: figures and verdicts, no text."""

    depth_tokens: int = 0
    noise: list[float] = field(default_factory=list)
    cases: dict[str, CaseResult] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: the share of its prompt tokens, the case under way, and the seconds that are left."""

    ratio: float
    case: str
    left_s: float


@dataclass(frozen=True, slots=True)
class _Planned:
    """A case in tokens; `judged` are the places of the judged steps."""

    case: Case
    steps: tuple[Asked, ...]
    control: Asked

    @property
    def judged(self) -> tuple[int, ...]:
        return tuple(at for at, step in enumerate(self.case.steps) if step.judged)

    @property
    def noise_of(self) -> Asked:
        """The shortest judged prompt."""
        return min((self.steps[at] for at in self.judged), key=lambda asked: len(asked.prompt))

    @property
    def longest(self) -> int:
        return max(len(asked.prompt) + len(asked.answer) for asked in (*self.steps, self.control))

    @property
    def cost(self) -> int:
        """Prompt tokens to compute, about: judged steps are short with reuse, the others are not."""
        cold = {self.steps[at].key: len(self.steps[at].prompt) for at in self.judged}
        first = sum(len(asked.prompt) for at, asked in enumerate(self.steps) if at not in self.judged)
        return sum(cold.values()) + first + len(self.control.prompt) + len(self.noise_of.prompt)


async def run_suite(
    engine: SuiteEngine,
    settings: SuiteSettings | None = None,
    *,
    notes: Notes | None = None,
    keep: Callable[[Notes], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    clock: Clock = time.monotonic,
    nonce: str | None = None,
) -> SuiteResult:
    """Run the suite on an engine; nothing is raised for what the engine does, the result tells.

    Args:
        engine: how it is reached.
        settings: how much it may take.
        notes: of a run on the same engine process that was interrupted; what it finished is not repeated.
        keep: told of the notes whenever a case is finished.
        on_progress: told after every request.
        clock: seconds.
        nonce: how every prompt begins; drawn where none is given.
    """
    run = _Run(engine, settings or SuiteSettings(), notes or Notes(), keep=keep, on_progress=on_progress, clock=clock)
    try:
        await run.all_of_it(nonce or f"Run {secrets.token_hex(4)}")
    except (Stopped, Unasked) as problem:
        run.why = str(problem)
    return run.result()


class _Run:
    def __init__(
        self,
        engine: SuiteEngine,
        settings: SuiteSettings,
        notes: Notes,
        *,
        keep: Callable[[Notes], None],
        on_progress: Callable[[Progress], None],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._notes = notes
        self._keep = keep
        self._on_progress = on_progress
        self._clock = clock
        self._began_s = clock()
        self._cost = 0
        self._done = 0
        self._forecast_s = 0.0
        self._case = PLANNED
        self.why = ""

    async def all_of_it(self, nonce: str) -> None:
        """Every case that is asked for and not finished."""
        scale = await self._scale()
        desk = Desk(self._engine, nonce, self._asked)
        plan = await self._plan(desk, nonce, scale)
        self._forecast_s = await self._forecast(desk, plan)
        while self._forecast_s > self._settings.time_max_s / 2 and scale.depth_tokens > DEPTH_TOKENS_MIN:
            scale = replace(scale, depth_tokens=max(DEPTH_TOKENS_MIN, scale.depth_tokens // 2))
            plan = await self._plan(desk, nonce, scale)
            self._forecast_s = await self._forecast(desk, plan)
        self._on_progress(Progress(0.0, PLANNED, self._forecast_s))
        self._notes.depth_tokens = scale.depth_tokens
        await self._noise(desk, plan)
        for number, planned in enumerate(plan):
            if self._clock() - self._began_s > self._settings.time_max_s:
                raise Stopped(
                    f"the {self._settings.time_max_s:g} s given are over; what is finished is kept: run it again"
                )
            self._case = planned.case.name
            found = await self._attempts(desk, planned, f"{nonce} {number}", scale)
            self._notes.cases[planned.case.name] = found
            self._keep(self._notes)

    def result(self) -> SuiteResult:
        """What was found; cases that were not come to are in it as such."""
        names = self._settings.only or NAMES
        unasked = CaseResult("", Outcome.UNASKED, "the run ended before it")
        return result_of(
            self._engine.profile,
            depth_tokens=self._notes.depth_tokens,
            noise_nats=max(self._notes.noise, default=0.0),
            cases=[self._notes.cases.get(name, replace(unasked, name=name)) for name in names],
            why=self.why,
        )

    # -- plan

    async def _scale(self) -> Scale:
        """How large the cases are made: as the slot allows."""
        room, slots = self._engine.room_tokens, self._engine.profile.total_slots.value
        if room < CONTEXT_TOKENS_MIN:
            raise Stopped(
                f"the suite needs {CONTEXT_TOKENS_MIN} tokens a slot, this engine has room for {room}: start it with "
                "a larger context (-c) or fewer slots (-np)"
            )
        text = sample()
        found = await self._engine.tokens(text, special=False)
        depth = self._notes.depth_tokens or self._settings.depth_tokens or int(DEPTH_RATIO * room)
        depth = max(DEPTH_TOKENS_MIN, min(depth, DEPTH_TOKENS_MAX, int(DEPTH_RATIO * room)))
        return Scale(depth, len(found) / len(text.split()), slots)

    async def _plan(self, desk: Desk, nonce: str, scale: Scale) -> list[_Planned]:
        names = self._settings.only or NAMES
        wanted = [case for case in cases(nonce, scale) if case.name in names and case.name not in self._notes.cases]
        plan = [await self._planned(desk, case) for case in wanted]
        if (longest := max((planned.longest for planned in plan), default=0)) > self._engine.room_tokens:
            raise Stopped(
                f"with this model's vocabulary the suite needs {longest} tokens a slot, the engine has room for "
                f"{self._engine.room_tokens}: start it with a larger context (-c) or fewer slots (-np)"
            )
        self._cost = self._done + sum(planned.cost for planned in plan)
        return plan

    async def _planned(self, desk: Desk, case: Case) -> _Planned:
        steps = [await desk.prepared(step.prompt, step, as_chat=case.as_chat) for step in case.steps]
        return _Planned(case, tuple(steps), await desk.prepared(case.control, case.judged[-1], as_chat=case.as_chat))

    async def _forecast(self, desk: Desk, plan: Sequence[_Planned]) -> float:
        """Seconds for all of it, at the speed of one cold prompt."""
        if not plan:
            return 0.0
        first = await desk.cold(plan[0].noise_of)
        asks = sum(2 * len(planned.steps) + 2 for planned in plan)
        return self._cost * first.prefill_s / max(1, first.computed_tokens) + asks * ASK_S

    # -- measure

    async def _noise(self, desk: Desk, plan: Sequence[_Planned]) -> None:
        """What cold answers differ by among themselves, where only the batches are others."""
        self._case = "noise"
        for planned in plan:
            one, other = await desk.twice(planned.noise_of)
            self._notes.noise += differences(one.logprobs, other.logprobs)

    async def _attempts(self, desk: Desk, planned: _Planned, nonce: str, scale: Scale) -> CaseResult:
        """A case, again with other words where its reuse was not seen: somebody may have needed the slot."""
        found = await self._judged(desk, planned)
        for attempt in range(1, ATTEMPTS):
            if found.outcome is not Outcome.NO_REUSE:
                break
            own = f"{nonce} {attempt}"
            other = Desk(self._engine, own, self._asked)
            case = next(case for case in cases(own, scale) if case.name == planned.case.name)
            again = await self._planned(other, case)
            self._cost += again.cost
            found = await self._judged(other, again)
        return found

    async def _judged(self, desk: Desk, planned: _Planned) -> CaseResult:
        try:
            taken = await self._taken(desk, planned)
        except Unasked as problem:
            return CaseResult(planned.case.name, Outcome.UNASKED, str(problem))
        return judge(planned.case, taken, threshold_of(max(self._notes.noise, default=0.0)))

    async def _taken(self, desk: Desk, planned: _Planned) -> Taken:
        """Cold answers first, then the control, then the whole case with reuse, step after step."""
        colds = {at: await desk.cold(planned.steps[at]) for at in planned.judged}
        changed = differences(colds[planned.judged[-1]].logprobs, (await desk.cold(planned.control)).logprobs)
        reused = await self._reused(desk, planned)
        return Taken(
            reused=tuple(replace(one, cold=colds.get(at)) for at, one in enumerate(reused)),
            control_nats=changed,
        )

    async def _reused(self, desk: Desk, planned: _Planned) -> list[Reused]:
        """All steps in order, or two and two."""
        pairs = list(zip(planned.case.steps, planned.steps, strict=True))
        width = min(2, self._engine.profile.total_slots.value) if planned.case.at_once else 1
        found: list[Reused] = []
        for at in range(0, len(pairs), width):
            asking = [asyncio.ensure_future(self._step(desk, *pair)) for pair in pairs[at : at + width]]
            try:
                found += await asyncio.gather(*asking)
            finally:
                for task in asking:  # where one cannot be asked the other need not be
                    task.cancel()
                await asyncio.wait(asking)
        return found

    async def _step(self, desk: Desk, step: Step, asked: Asked) -> Reused:
        answer, common = await desk.reused(asked)
        return Reused(step, len(asked.prompt), common, answer, head_tokens=asked.own_from)

    def _asked(self, computed_tokens: int) -> None:
        self._done += computed_tokens
        spent_s = self._clock() - self._began_s
        ratio = min(1.0, self._done / max(1, self._cost))
        if self._case != PLANNED:
            left_s = spent_s / ratio - spent_s if ratio > EARLY_RATIO else self._forecast_s - spent_s
            self._on_progress(Progress(ratio, self._case, max(0.0, left_s)))
