"""The suite's judgement, and a run of it on an engine made of words."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.reuse import Reuse
from kvgate.core.reuse_case import DEEP_TOKENS, Case, Prompt, Scale, Step
from kvgate.core.reuse_cases import NAMES, NEEDLES, cases
from kvgate.core.reuse_suite import (
    FLOOR_NATS,
    MARGIN,
    SIGHT,
    CaseResult,
    Outcome,
    Reused,
    Scored,
    SuiteResult,
    Taken,
    Verdict,
    common_tokens,
    judge,
    threshold_of,
)
from kvgate.lab.reuse_suite import Notes, Progress, Stopped, SuiteSettings, Unasked, run_suite
from kvgate.lab.reuse_suite.notes_file import NotesFile
from tests.unit.doubles import ManualClock, profile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvgate.core.profile import EngineProfile
    from kvgate.core.reuse_case import Message

STEP = Step("a step", Prompt(text="x"), (" lemon",), judged=True, needles_at=(0,))
CASE = Case("a case", "nothing", (STEP,), Prompt(text="y"))


def scored(logprob: float, cached: int | None = 0, computed: int = 100) -> Scored:
    return Scored((logprob,), cached, computed, 1.0, 1.0)


def taken(difference: float = 0.0, cached: int | None = 90, *, common: int = 95, control: float = 9.0) -> Taken:
    answer = scored(-1.0 - difference, cached, 100 - (cached or 0))
    return Taken((Reused(STEP, 100, common, answer, scored(-1.0)),), (control,))


# -- judgement


@given(noise=st.floats(0, 50))
def test_noise_itself_is_never_a_difference(noise: float) -> None:
    threshold = threshold_of(noise)
    assert threshold >= FLOOR_NATS
    found = judge(CASE, taken(min(noise, threshold), control=SIGHT * threshold), threshold)
    assert found.outcome is Outcome.PASSED
    assert judge(CASE, taken(MARGIN * noise + FLOOR_NATS + 0.1), threshold).outcome is Outcome.FAILED


@given(
    difference=st.floats(0, 20),
    control=st.floats(0, 20),
    cached=st.integers(0, 99),
    common=st.integers(0, 99),
    threshold=st.floats(FLOOR_NATS, 5),
)
def test_a_case_passes_only_on_evidence(
    difference: float, control: float, cached: int, common: int, threshold: float
) -> None:
    """Seen reuse, a control that shows, counts that can be true, and no difference: it takes all of them."""
    found = judge(CASE, taken(difference, cached, common=common, control=control), threshold)
    evidence = 0 < cached <= common and found.difference_nats <= threshold and found.control_nats >= SIGHT * threshold
    assert (found.outcome is Outcome.PASSED) == evidence
    assert bool(found.why) == (found.outcome is not Outcome.PASSED)


@pytest.mark.parametrize(
    ("measured", "outcome", "words"),
    [
        (taken(3.0), Outcome.FAILED, "off by 3.00 nats"),
        (taken(3.0, control=0.1), Outcome.FAILED, "off by 3.00 nats"),
        (taken(cached=96), Outcome.FAILED, "only 95 in common"),
        (taken(cached=-4), Outcome.FAILED, "reused -4 tokens"),
        (taken(control=2.9), Outcome.BLIND, "moves the answer by 2.90 nats only"),
        (taken(cached=0), Outcome.NO_REUSE, "0 of 100 tokens were reused"),
        (taken(cached=None), Outcome.NO_REUSE, "does not say how many"),
    ],
)
def test_each_way_not_to_pass_has_its_sentence(measured: Taken, outcome: Outcome, words: str) -> None:
    found = judge(CASE, measured, FLOOR_NATS)
    assert found.outcome is outcome
    assert words in found.why


def test_the_head_that_all_prompts_share_is_no_evidence_of_reuse() -> None:
    """A template's opening is in every slot."""
    short = Reused(STEP, 100, 95, scored(-1.0, cached=7, computed=93), scored(-1.0), head_tokens=7)
    found = judge(CASE, Taken((short,), (9.0,)), FLOOR_NATS)
    assert found.outcome is Outcome.NO_REUSE
    assert "7 of 100 tokens were reused, not more than 7" in found.why


def test_counts_that_do_not_add_up_are_corruption() -> None:
    short = Reused(STEP, 100, 95, scored(-1.0, cached=90, computed=9), scored(-1.0))
    assert "reused 90 tokens and computed 9, of a prompt of 100" in judge(CASE, Taken((short,), (9.0,)), 1.0).why


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_beginning_is_the_longest(one: list[int], other: list[int]) -> None:
    found = common_tokens(one, other)
    assert one[:found] == other[:found]
    assert found == min(len(one), len(other)) or one[found] != other[found]
    assert found == common_tokens(other, one)


def result(*outcomes: Outcome, why: str = "") -> SuiteResult:
    found = tuple(CaseResult(str(at), outcome) for at, outcome in enumerate(outcomes))
    return SuiteResult("f", "i", "b", 512, 270, 0.1, 1.0, found, why)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (result(Outcome.PASSED, Outcome.PASSED), Verdict.PASSED),
        (result(Outcome.PASSED, Outcome.FAILED, Outcome.BLIND), Verdict.FAILED),
        (result(Outcome.FAILED, Outcome.UNASKED, why="it went away"), Verdict.FAILED),
        (result(Outcome.PASSED, Outcome.BLIND), Verdict.CANNOT_TELL),
        (result(Outcome.PASSED, Outcome.NO_REUSE), Verdict.CANNOT_TELL),
        (result(Outcome.PASSED, why="it went away"), Verdict.CANNOT_TELL),
        (result(), Verdict.CANNOT_TELL),
    ],
)
def test_the_suite_passes_only_where_every_case_did(found: SuiteResult, verdict: Verdict) -> None:
    assert found.verdict is verdict
    report = found.report(7.0)
    assert report.passed == (verdict is Verdict.PASSED)
    assert report.cases_failed == sum(case.outcome is Outcome.FAILED for case in found.cases)


# -- cases


@given(st.integers(270, 3000), st.floats(1.0, 2.0), st.integers(1, 9))
def test_cases_are_data_that_hold_what_they_promise(depth: int, tokens_per_word: float, slots: int) -> None:
    """Each begins with the nonce, is judged, names its needles, and its control has none of them."""
    scale = Scale(depth, tokens_per_word, slots)
    found = cases("Run 1", scale)
    assert found == cases("Run 1", scale)
    assert tuple(case.name for case in found) == NAMES
    for case in found:
        assert case.judged
        for step in (*case.steps, Step("control", case.control, ())):
            first = step.prompt.text or step.prompt.messages[0].content
            assert first.startswith("Run 1")
        needles = {case.judged[-1].answer[at].strip() for at in case.judged[-1].needles_at}
        assert needles <= set(NEEDLES)
        held = _words(case.control)
        asked = _words(case.judged[-1].prompt)
        assert needles <= (held if case.name == "neighbour" else asked)
        assert not needles & (asked if case.name == "neighbour" else held)


def _words(prompt: Prompt) -> set[str]:
    text = " ".join([prompt.text, *(message.content for message in prompt.messages), *prompt.tools])
    return set(re.findall(r"[a-z]+", text))


# -- a run


@dataclass
class Wordy:
    """An engine whose tokens are words: it finds likely what its prompt has, and keeps each prompt in a slot."""

    slots: int = 2
    n_ctx: int = 600
    room_tokens: int = 600
    chats: bool = True
    knows_system: bool = True
    knows_tools: bool = False
    obeys: bool = True
    gone_after: int = 10**9
    stolen: int = 0
    kept: list[tuple[int, ...]] = field(default_factory=list)
    asked: list[tuple[str, Reuse]] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)

    @property
    def profile(self) -> EngineProfile:
        return profile(self.n_ctx, self.slots)

    async def tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\w+|[^\w\s]", text))

    async def rendered(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        if not self.knows_system and any(message.role == "system" for message in messages):
            raise Unasked("System role not supported")
        listed = " ".join(tool["function"]["description"] for tool in tools) if self.knows_tools else ""
        return listed + " ".join(f"< {message.role} > {message.content}" for message in messages) + " < assistant >"

    async def ask(self, prompt: Sequence[int], answer: Sequence[int], reuse: Reuse) -> Scored:
        return self._scored("text", tuple(prompt), answer, reuse)

    async def chat(
        self, messages: Sequence[Message], prompt_tokens: int, answer: Sequence[int], reuse: Reuse
    ) -> Scored:
        if not self.chats:
            raise Unasked("no chat here")
        prompt = await self.tokens(await self.rendered(messages, ()), special=True)
        return self._scored("chat", prompt, answer, reuse)

    def _scored(self, way: str, prompt: tuple[int, ...], answer: Sequence[int], reuse: Reuse) -> Scored:
        if len(self.asked) >= self.gone_after:
            raise Stopped("it went away")
        self.asked.append((way, reuse))
        cached = 0
        if reuse is Reuse.KEEP or not self.obeys:
            cached = min(max((common_tokens(prompt, one) for one in self.kept), default=0), len(prompt) - 1)
        if reuse is Reuse.KEEP and self.stolen:
            self.stolen, cached = self.stolen - 1, 0
        self.kept = [prompt + tuple(answer[:-1]), *self.kept][:9]
        logprobs = tuple(-0.5 if token in prompt else -9.0 for token in answer)
        return Scored(logprobs, cached, len(prompt) - cached, 0.001 * (len(prompt) - cached), 0.002 * len(prompt))


async def test_an_honest_engine_passes_every_case() -> None:
    engine, seen = Wordy(), list[Progress]()
    found = await run_suite(engine, on_progress=seen.append, clock=ManualClock())
    assert found.verdict is Verdict.PASSED, found
    assert [case.name for case in found.cases] == list(NAMES)
    assert found.noise_nats == 0.0
    assert 0.5 < found.figures.prefill_saved_ratio < 1.0
    assert ("chat", Reuse.KEEP) in engine.asked
    assert [one.ratio for one in seen] == sorted(one.ratio for one in seen)
    assert seen[0].case == "plan"
    deep = found.cases[-1]
    assert deep.cached_tokens > 3 * DEEP_TOKENS


async def test_where_chat_cannot_be_forced_tokens_are_asked() -> None:
    engine = Wordy(chats=False)
    assert (await run_suite(engine, clock=ManualClock())).verdict is Verdict.PASSED
    assert {way for way, _ in engine.asked} == {"text"}


@pytest.mark.parametrize("knows_system", [True, False])
@pytest.mark.parametrize("knows_tools", [True, False])
async def test_templates_without_system_messages_or_tools_do_too(*, knows_system: bool, knows_tools: bool) -> None:
    engine = Wordy(knows_system=knows_system, knows_tools=knows_tools)
    found = await run_suite(engine, clock=ManualClock())
    assert found.verdict is Verdict.PASSED, found
    assert ("chat", Reuse.KEEP) in engine.asked


async def test_an_engine_that_reuses_unasked_cannot_be_judged() -> None:
    found = await run_suite(Wordy(obeys=False), clock=ManualClock())
    assert found.verdict is Verdict.CANNOT_TELL
    assert "although it was told not to" in found.why


async def test_a_slot_that_others_took_is_tried_again() -> None:
    """Reuse that was not seen once proves nothing; the case is asked again in other words, and not for ever."""
    only = SuiteSettings(only=("tools",))
    assert (await run_suite(Wordy(stolen=2), only, clock=ManualClock())).verdict is Verdict.PASSED
    found = await run_suite(Wordy(stolen=99), only, clock=ManualClock())
    assert [case.outcome for case in found.cases] == [Outcome.NO_REUSE]


async def test_a_slot_too_small_is_told_with_what_to_do() -> None:
    found = await run_suite(Wordy(room_tokens=400), clock=ManualClock())
    assert found.verdict is Verdict.CANNOT_TELL
    assert "needs 512 tokens a slot, this engine has room for 400: start it with a larger context" in found.why
    assert {case.outcome for case in found.cases} == {Outcome.UNASKED}


async def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Finished cases are not asked again on the same process; on another, or with another suite, all are."""
    file = NotesFile(tmp_path / "notes.json", profile())
    first = await run_suite(Wordy(gone_after=45), keep=file.keep, clock=ManualClock())
    assert (first.verdict, first.why) == (Verdict.CANNOT_TELL, "it went away")
    done = [case.name for case in first.cases if case.outcome is Outcome.PASSED]
    assert done
    notes = file.read()
    assert list(notes.cases) == done
    engine, seen = Wordy(), set[str]()
    second = await run_suite(engine, notes=notes, on_progress=lambda now: seen.add(now.case), clock=ManualClock())
    assert second.verdict is Verdict.PASSED
    assert not seen & set(done)
    assert [case.name for case in second.cases] == list(NAMES)
    notes.cases["deep"] = CaseResult("deep", Outcome.NO_REUSE)
    file.keep(notes)
    assert "deep" not in file.read().cases  # it may be seen the next time
    assert NotesFile(tmp_path / "notes.json", profile(instance="<another>")).read() == Notes()
    assert NotesFile(tmp_path / "notes.json", profile(build="b2")).read() == Notes()
    file.forget()
    assert file.read() == Notes()


def test_of_a_process_that_cannot_be_told_from_its_successor_nothing_is_kept(tmp_path: Path) -> None:
    file = NotesFile(tmp_path / "notes.json", profile(instance=None))
    file.keep(Notes(270, [0.1], {"deep": CaseResult("deep", Outcome.PASSED)}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"of": 1}', '{"of": null, "noise": "x"}'])
def test_a_broken_notes_file_is_no_notes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.json"
    path.write_text(text)
    assert NotesFile(path, profile()).read() == Notes()


async def test_time_that_is_over_ends_a_run_between_two_cases() -> None:
    clock = ManualClock()

    def slow(_: Progress) -> None:
        clock.advance(10)

    found = await run_suite(Wordy(), SuiteSettings(time_max_s=300), on_progress=slow, clock=clock)
    assert found.verdict is Verdict.CANNOT_TELL
    assert "the 300 s given are over" in found.why
    outcomes = [case.outcome for case in found.cases]
    assert outcomes == sorted(outcomes, key=lambda one: one is Outcome.UNASKED)
    assert outcomes[0] is Outcome.PASSED
    assert outcomes[-1] is Outcome.UNASKED


async def test_a_larger_slot_is_looked_at_deeper_as_far_as_time_allows() -> None:
    engine = Wordy(n_ctx=4096, room_tokens=4096)
    deep = await run_suite(engine, SuiteSettings(only=("deep",)), clock=ManualClock())
    quick = await run_suite(engine, SuiteSettings(only=("deep",), time_max_s=12), clock=ManualClock())
    assert deep.depth_tokens > 2000 > quick.depth_tokens
    assert deep.cases[0].cached_tokens > 2 * quick.cases[0].cached_tokens


def test_the_report_holds_what_a_pin_needs() -> None:
    found = dataclasses.replace(
        result(Outcome.PASSED),
        cases=(
            CaseResult(
                "a", Outcome.PASSED, prompt_tokens=100, cached_tokens=80, cold_s=4.0, duration_s=1.0,
                difference_nats=0.2, cold_prefill_s=2.0, prefill_s=0.5,
            ),
        ),
    )  # fmt: skip
    report = found.report(12.0)
    assert (report.fingerprint, report.instance, report.finished_at_s) == ("f", "i", 12.0)
    assert report.figures.prefill_saved_ratio == 0.8
    assert report.figures.latency_ratio == 0.25
    assert found.prefill_time_ratio == 0.25
    assert report.figures.difference_nats == 0.2
