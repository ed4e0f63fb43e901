"""How the suite judges prefix reuse: log-probabilities, reused against cold, and whether the test could see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from kvgate.core.canary import Figures, SuiteReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgate.core.profile import EngineProfile
    from kvgate.core.reuse_case import Case, Step

SUITE_VERSION: Final = 1
"""Of the cases and of this judgement together: a pin says by which it was earned."""

MARGIN: Final = 4.0
"""So many times the noise is no noise any more."""

FLOOR_NATS: Final = 1.5
"""The least threshold, a factor of 4.5 in probability: noise is measured at few tokens, others have more of it."""

SIGHT: Final = 2.0
"""A changed needle must show by so many thresholds, else the case could not have seen corruption."""


class Outcome(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    BLIND = "blind"
    NO_REUSE = "no reuse seen"
    UNASKED = "not asked"


class Verdict(StrEnum):
    """How the whole suite ended: every case passed, one showed corruption, or neither can be said."""

    PASSED = "passed"
    FAILED = "failed"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Scored:
    """One forced answer to a prompt.

    Args:
        logprobs: of the needles in it, each at its first token: the natural logarithm of the probability that the
            model gives it, before any sampling.
        cached_tokens: how many tokens of the prompt it says it reused; None where it does not say.
        computed_tokens: how many it says it computed.
        prefill_s: how long that took, by its own word.
        duration_s: from request to answer.
    """

    logprobs: tuple[float, ...]
    cached_tokens: int | None
    computed_tokens: int
    prefill_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Reused:
    """A step that was asked with reuse on.

    `cold` is the answer to the same without reuse, of judged steps alone. `common_tokens` is the longest beginning
    that the prompt has in common with anything that could be in a slot, `head_tokens` what every prompt begins with.
    """

    step: Step
    prompt_tokens: int
    common_tokens: int
    answer: Scored
    cold: Scored | None = None
    head_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """What was measured of one case; `control_nats` has, for each needle, what changing it did to a cold answer."""

    reused: tuple[Reused, ...]
    control_nats: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What a case found.

    Args:
        why: a sentence, empty where it passed.
        difference_nats: the largest difference, reused against cold, at any needle.
        control_nats: what changing a needle did, the median of the needles.
        prompt_tokens, cached_tokens: of the judged answers with reuse.
        cold_prefill_s, prefill_s, cold_s, duration_s: of the judged answers, without reuse and with it.
    """

    name: str
    outcome: Outcome
    why: str = ""
    difference_nats: float = 0.0
    control_nats: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cold_prefill_s: float = 0.0
    prefill_s: float = 0.0
    cold_s: float = 0.0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What a run of the suite found on one engine process.

    `noise_nats` and `threshold_nats` are what cold answers differ by among themselves, and what counts as a
    difference therefore. `why` is set where the run did not come to its end.
    """

    fingerprint: str
    instance: str | None
    build: str | None
    n_ctx_slot: int
    depth_tokens: int
    noise_nats: float
    threshold_nats: float
    cases: tuple[CaseResult, ...]
    why: str = ""
    version: int = SUITE_VERSION

    @property
    def verdict(self) -> Verdict:
        """Corruption anywhere is corruption; passed only where every case ran and passed."""
        outcomes = {case.outcome for case in self.cases}
        if Outcome.FAILED in outcomes:
            return Verdict.FAILED
        if self.why or outcomes != {Outcome.PASSED}:
            return Verdict.CANNOT_TELL
        return Verdict.PASSED

    @property
    def figures(self) -> Figures:
        """What it measured over all cases."""
        prompt, cached = self._sum("prompt_tokens"), self._sum("cached_tokens")
        return Figures(
            noise_nats=self.noise_nats,
            difference_nats=max((case.difference_nats for case in self.cases), default=0.0),
            prefill_saved_ratio=cached / prompt if prompt else 0.0,
            latency_ratio=self._ratio("duration_s", "cold_s"),
        )

    @property
    def prefill_time_ratio(self) -> float:
        """Seconds of prefill with reuse, over those without."""
        return self._ratio("prefill_s", "cold_prefill_s")

    def report(self, finished_at_s: float) -> SuiteReport:
        """What a pin may rest on."""
        return SuiteReport(
            fingerprint=self.fingerprint,
            instance=self.instance,
            suite_version=self.version,
            passed=self.verdict is Verdict.PASSED,
            cases_run=sum(case.outcome is not Outcome.UNASKED for case in self.cases),
            cases_failed=sum(case.outcome is Outcome.FAILED for case in self.cases),
            figures=self.figures,
            finished_at_s=finished_at_s,
        )

    def _sum(self, name: str) -> float:
        return float(sum(getattr(case, name) for case in self.cases))

    def _ratio(self, over: str, under: str) -> float:
        divisor = self._sum(under)
        return self._sum(over) / divisor if divisor else 1.0


def result_of(
    profile: EngineProfile,
    *,
    depth_tokens: int,
    noise_nats: float,
    cases: Sequence[CaseResult],
    why: str = "",
) -> SuiteResult:
    """The result of a run on the engine of this profile."""
    return SuiteResult(
        fingerprint=profile.fingerprint,
        instance=profile.instance,
        build=profile.build,
        n_ctx_slot=profile.n_ctx_slot.value,
        depth_tokens=depth_tokens,
        noise_nats=noise_nats,
        threshold_nats=threshold_of(noise_nats),
        cases=tuple(cases),
        why=why,
    )


def threshold_of(noise_nats: float) -> float:
    """What counts as a difference where cold answers differ by up to `noise_nats`."""
    return max(FLOOR_NATS, MARGIN * noise_nats)


def differences(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """Of two rows of log-probabilities of the same tokens, token by token."""
    return tuple(abs(left - right) for left, right in zip(one, other, strict=True))


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    shortest = min(len(one), len(other))
    if one[:shortest] == other[:shortest]:
        return shortest
    return next(at for at in range(shortest) if one[at] != other[at])


def judge(case: Case, taken: Taken, threshold_nats: float) -> CaseResult:
    """What a case shows.

    1. A count that cannot be true is corruption: the engine does not know what is in its slots.
    2. A difference over the threshold is corruption, whether the control could be seen or not.
    3. Where most needles can be changed without that it shows, nothing could have been seen.
    4. Where a judged step reused less than it should, it proves nothing.
    """
    judged = [(reused, reused.cold) for reused in taken.reused if reused.cold is not None]
    rows = [(reused.step, differences(cold.logprobs, reused.answer.logprobs)) for reused, cold in judged]
    worst_step, worst = max(((step.name, max(row)) for step, row in rows), key=lambda pair: pair[1])
    control = sorted(taken.control_nats)[len(taken.control_nats) // 2] if taken.control_nats else 0.0

    def found(outcome: Outcome, why: str = "") -> CaseResult:
        return CaseResult(
            name=case.name,
            outcome=outcome,
            why=why,
            difference_nats=worst,
            control_nats=control,
            prompt_tokens=sum(reused.prompt_tokens for reused, _ in judged),
            cached_tokens=sum(reused.answer.cached_tokens or 0 for reused, _ in judged),
            cold_prefill_s=sum(cold.prefill_s for _, cold in judged),
            prefill_s=sum(reused.answer.prefill_s for reused, _ in judged),
            cold_s=sum(cold.duration_s for _, cold in judged),
            duration_s=sum(reused.answer.duration_s for reused, _ in judged),
        )

    if (wrong := _first(map(_wrong_count, taken.reused))) is not None:  # 1
        return found(Outcome.FAILED, wrong)
    if worst > threshold_nats:  # 2
        return found(
            Outcome.FAILED,
            f"{worst_step}: with reuse the log-probability of a word is off by {worst:.2f} nats, where "
            f"{threshold_nats:.2f} is the most that noise explains",
        )
    if control < SIGHT * threshold_nats:  # 3
        return found(
            Outcome.BLIND,
            f"changing the words to look for moves the answer by {control:.2f} nats only; at least "
            f"{SIGHT * threshold_nats:.2f} would be needed to see corruption",
        )
    if (short := _first(_too_little(reused) for reused, _ in judged)) is not None:  # 4
        return found(Outcome.NO_REUSE, short)
    return found(Outcome.PASSED)


def _first(sentences: Iterable[str | None]) -> str | None:
    return next((sentence for sentence in sentences if sentence is not None), None)


def _wrong_count(reused: Reused) -> str | None:
    cached, computed = reused.answer.cached_tokens, reused.answer.computed_tokens
    if cached is None:
        return None
    name = reused.step.name
    if cached < 0:
        return f"{name}: the engine says that it reused {cached} tokens"
    if cached > reused.common_tokens:
        return (
            f"{name}: the engine says that it reused {cached} tokens, but its prompt has only {reused.common_tokens} "
            "in common with anything asked before"
        )
    if cached + computed != reused.prompt_tokens:
        return (
            f"{name}: the engine says that it reused {cached} tokens and computed {computed}, of a prompt of "
            f"{reused.prompt_tokens}"
        )
    return None


def _too_little(reused: Reused) -> str | None:
    cached, reach = reused.answer.cached_tokens, reused.step.reach_tokens
    if cached is None:
        return f"{reused.step.name}: the engine does not say how many tokens it reused"
    least = max(reach, reused.head_tokens) if reach >= 0 else reach
    if cached > least:
        return None
    return (
        f"{reused.step.name}: {cached} of {reused.prompt_tokens} tokens were reused, not more than {least}: "
        "is reuse possible on this engine, and did nobody else need its slots?"
    )
