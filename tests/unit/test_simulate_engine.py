"""The simulated engine: jumps over like iterations give what single steps would, and no token is lost."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.pool import KvPool
from loadtests.simulate.calibrate import makespan_s
from loadtests.simulate.engine import EngineModel, Overflowed
from loadtests.simulate.speed import LARGE, SMALL, Engine, EngineFileError, Speed

if TYPE_CHECKING:
    from pathlib import Path

POOL = KvPool(tokens=4000, slots=4, tokens_per_slot=1000, prompt_shared=True)
SPEED = Speed(prefill_tokens_per_s=1000, step_s=((0, 0.01), (1, 0.02), (4, 0.05)), batch_tokens=128)
ENGINE = Engine(POOL, SPEED)

Job = tuple[int, int, float]  # prompt, output, when


@dataclass
class Slow:
    """One iteration at a time, written down as simply as it can be.

    Who finds no slot waits outside. What comes while an iteration runs, or at its very end, is in the one after the
    next boundary: its client hears of the free slot when the next iteration has begun.
    """

    speed: Speed
    slots: int
    jobs: list[Job]
    now_s: float = 0.0
    prompt_left: dict[int, int] = field(default_factory=dict)
    output_left: dict[int, int] = field(default_factory=dict)
    first_s: dict[int, float] = field(default_factory=dict)
    end_s: dict[int, float] = field(default_factory=dict)
    free_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        waiting = list(range(len(self.jobs)))
        self.free_s = [0.0] * self.slots
        while waiting or self.prompt_left or self.output_left:
            if not self.prompt_left and not self.output_left:
                self.now_s = max(self.now_s, self._ready_s(waiting[0]))
                self._admit(waiting.pop(0))
            while waiting and self._ready_s(waiting[0]) < self.now_s:
                self._admit(waiting.pop(0))
            self._iterate()

    def _ready_s(self, job: int) -> float:
        return max(self.jobs[job][2], min(self.free_s, default=math.inf))

    def _admit(self, job: int) -> None:
        self.free_s.remove(min(self.free_s))
        self.prompt_left[job] = self.jobs[job][0]

    def _iterate(self) -> None:
        decoding = list(self.output_left)
        room = read = max(self.speed.batch_tokens - len(decoding), 1)
        takes = {}
        for job, left in self.prompt_left.items():
            takes[job] = min(left, room)
            room -= takes[job]
        self.now_s += self.speed.iteration_s(len(decoding), read - room)
        for job in decoding:
            self.output_left[job] -= 1
            self._end_if_done(job)
        for job, tokens in takes.items():
            self.prompt_left[job] -= tokens
            if not self.prompt_left[job]:
                del self.prompt_left[job]
                self.first_s[job] = self.now_s
                self.output_left[job] = max(self.jobs[job][1] - 1, 0)
                self._end_if_done(job)

    def _end_if_done(self, job: int) -> None:
        if not self.output_left[job]:
            del self.output_left[job]
            self.end_s[job] = self.now_s
            self.free_s.append(self.now_s)


def simulated(engine: Engine, jobs: list[Job]) -> tuple[EngineModel, dict[int, float], dict[int, float]]:
    """When each job's first token and its end came; who finds no slot waits outside, in order."""
    model, waiting = EngineModel(engine), list(range(len(jobs)))
    first_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    now_s = 0.0
    while waiting or model.running:
        arrival_s = jobs[waiting[0]][2] if waiting and model.running < engine.pool.slots else math.inf
        if model.next_s() <= max(arrival_s, now_s):
            changes = model.change()
            now_s = changes.at_s
            first_s |= dict.fromkeys(map(int, changes.answered), now_s)
            end_s |= dict.fromkeys(map(int, changes.finished), now_s)
        else:
            now_s = max(arrival_s, now_s)
            job = waiting.pop(0)
            model.start(str(job), jobs[job][0], jobs[job][1], now_s, cells=1)
    return model, first_s, end_s


JOBS = st.lists(
    st.tuples(st.integers(1, 600), st.integers(1, 120), st.floats(0, 0.7).map(lambda s: round(s, 3))),
    min_size=1,
    max_size=9,
).map(lambda jobs: sorted(jobs, key=lambda job: job[2]))


@given(jobs=JOBS)
def test_jumping_over_like_iterations_is_as_good_as_taking_each(jobs: list[Job]) -> None:
    """First tokens and ends come when a loop over single iterations says, and no token is lost or made up.

    Arrivals are moved off each other and off the boundaries of iterations, where the two may round to different
    sides.
    """
    jobs = [(prompt, output, at_s + 0.000_37 + at * 1e-5) for at, (prompt, output, at_s) in enumerate(jobs)]
    slow = Slow(SPEED, POOL.slots, jobs)
    slow.run()
    model, first_s, end_s = simulated(ENGINE, jobs)
    assert first_s == pytest.approx(slow.first_s)
    assert end_s == pytest.approx(slow.end_s)
    assert model.prompt_tokens_read == sum(prompt for prompt, _, _ in jobs)
    assert (model.running, model.held_cells) == (0, 0)


@given(prompt=st.integers(1, 900), output=st.integers(1, 100))
def test_a_request_alone_takes_its_batches_and_its_steps(prompt: int, output: int) -> None:
    _, first_s, end_s = simulated(ENGINE, [(prompt, output, 0.0)])
    batches = math.ceil(prompt / SPEED.batch_tokens)
    assert first_s[0] == pytest.approx(batches * 0.01 + prompt / 1000)
    assert end_s[0] == pytest.approx(first_s[0] + (output - 1) * 0.02)


def test_a_prefill_stalls_its_neighbours_decode_for_a_batch_at_a_time() -> None:
    """While 900 tokens are read in batches of 128, a neighbour gets a token a batch, not one each 20 ms."""
    model = EngineModel(ENGINE)
    model.start("decodes", 1, 500, 0.0, cells=501)
    model.start("reads", 900, 1, model.change().at_s + 0.001, cells=901)
    since_s = model.change().at_s
    before = model.produced("decodes", since_s)
    while "reads" not in (changes := model.change()).finished:
        pass
    iterations = math.ceil(900 / 127)
    assert changes.at_s - since_s == pytest.approx(iterations * 0.02 + 0.9)
    assert model.produced("decodes", changes.at_s) - before <= iterations


def test_what_streams_is_seen_between_the_changes() -> None:
    model = EngineModel(ENGINE)
    model.start("a", 100, 50, 0.0, cells=150)
    first_s = model.change().at_s
    assert model.produced("a", first_s) == 1
    assert model.produced("a", first_s + 10.5 * 0.02) == 11
    assert model.next_s() == pytest.approx(first_s + 49 * 0.02)
    assert model.change().finished == ("a",)


@given(sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=6))
def test_a_burst_in_one_slot_takes_as_long_as_its_requests_one_after_the_other(sizes: list[tuple[int, int]]) -> None:
    one = Engine(KvPool(1000, 1, 1000), SPEED)
    each = [simulated(one, [(prompt, output, 0.0)])[2][0] for prompt, output in sizes]
    assert makespan_s(one, sizes) == pytest.approx(sum(each))
    assert makespan_s(ENGINE, sizes) <= sum(each) + 1e-9


def test_the_engine_takes_no_more_than_it_holds() -> None:
    model = EngineModel(Engine(KvPool(100, 2, 100, prompt_shared=True), SPEED))
    model.start("a", 50, 10, 0.0, cells=60)
    with pytest.raises(Overflowed, match="60 of 100 cells"):
        model.start("b", 50, 10, 0.0, cells=60)
    model.start("c", 10, 10, 0.0, cells=20)
    with pytest.raises(Overflowed, match="2 of 2 slots"):
        model.start("d", 1, 1, 0.0, cells=2)


def test_steps_between_two_measured_numbers_are_on_their_line() -> None:
    assert SPEED.decode_s(0) == pytest.approx(0.01)
    assert SPEED.decode_s(1) == pytest.approx(0.02)
    assert SPEED.decode_s(2) == pytest.approx(0.03)
    assert SPEED.decode_s(8) == pytest.approx(0.09)


@pytest.mark.parametrize("engine", [SMALL, LARGE, ENGINE], ids=["small", "large", "other"])
def test_an_engines_file_says_all_of_it(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(engine.as_json()))
    assert Engine.read(path) == engine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no engine's file"),
        ("[]", "is no engine's file"),
        ('{"pool": {}, "speed": {}}', "'unified'"),
        (json.dumps({"pool": SMALL.as_json()["pool"], "speed": {"step_s": [[1, 2]]}}), "prefill_tokens_per_s"),
        (json.dumps(SMALL.as_json() | {"speed": {"prefill_tokens_per_s": 0, "step_s": [[0, 1], [1, 1]]}}), "above 0"),
    ],
)
def test_what_is_no_engines_file_is_told_with_the_command_that_writes_one(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text)
    with pytest.raises(EngineFileError, match="calibrate URL --save FILE") as told:
        Engine.read(path)
    assert said in str(told.value)
    with pytest.raises(EngineFileError, match="cannot be read"):
        Engine.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": ((1, 0.1), (2, 0.2))},
        {"step_s": ((0, 0.1), (2, 0.2), (2, 0.3))},
        {"step_s": ((0, 0.1), (2, 0.0))},
        {"step_s": ((0, 0.1),)},
        {"prefill_tokens_per_s": 0.0},
        {"batch_tokens": 0},
    ],
)
def test_no_speed_without_figures(wrong: dict[str, object]) -> None:
    found: dict[str, object] = {"prefill_tokens_per_s": 1.0, "step_s": ((0, 0.1), (1, 0.1))}
    with pytest.raises(ValueError, match=r"above 0|begins at 0"):
        Speed(**(found | wrong))  # type: ignore[arg-type]
