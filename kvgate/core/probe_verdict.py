"""What an answer at the edge of a slot's context means: the verdicts of the context admission test, one table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOM_TOKENS: Final = 256
"""What the test leaves of a slot for the answer; a quarter of a slot where that is less."""

LOOP_REPEATS_MIN: Final = 4
LOOP_RATIO_MIN: Final = 0.5
LOOP_UNIT_TOKENS_MAX: Final = 64
"""An answer loops where its end is one piece of at most so many tokens so often, over at least so much of it."""

TRUNCATED_RATIO_MAX: Final = 1 / 16
"""An answer that is over, unasked, within this share of the room that it had was truncated at once."""

NONSENSE_WORDS_MIN: Final = 0.2
"""At least this share of an answer's tokens has a letter or a digit, or it is nonsense."""

TOGETHER_S: Final = 1.0
"""Answers that break within so many seconds of each other were killed together."""

_WORDLIKE: Final = re.compile(r"\w")


class Verdict(Enum):
    """Each verdict: its name, whether it is fine, what it means and what to do."""

    ENDS_BY_CONTEXT = (
        "ends-by-context",
        True,
        "the answer filled its slot, ended there, and says that the context ended it",
        "nothing",
    )
    COMPLETES = ("completes", True, "the answer has every token that was asked for, and they fitted", "nothing")
    REFUSED_IN_TIME = (
        "refused-in-time",
        True,
        "the gate refused it before the engine saw it, with the figures",
        "nothing",
    )
    CLAMPED = ("clamped", True, "the gate lowered the output limit to what fits, and says so", "nothing")
    ENDS_EARLY = (
        "ends-early",
        False,
        "the answer ended before its limit and before the slot was full, though it may not end by itself",
        "look at the engine's log: --predict, or a smaller context than it advertises, limits its answers",
    )
    SILENT_CONTEXT_END = (
        "ends-by-context-silently",
        False,
        "the answer filled its slot, and looks like one that reached its own limit: nobody learns that it is cut off",
        "put the gate in front: it makes the limit explicit and says what ended an answer; or update the engine",
    )
    FORGETS = (
        "forgets",
        False,
        "the answer went on past the slot's end: the engine drops the beginning of the conversation and tells nobody",
        "start the engine with --no-context-shift",
    )
    LOOPS = (
        "loops",
        False,
        "the answer repeats itself until its end, and a short prompt's answer does not",
        "look at rope scaling and n_ctx_train, at the KV precision (try -ctk f16 -ctv f16), then at the build",
    )
    TRUNCATES_AT_ONCE = (
        "truncates-at-once",
        False,
        "the answer is empty, breaks off after a few tokens, or has no words: the slot has no room for an answer",
        "raise -c (context = slots x tokens per slot) or lower -np, and see what `kvgate check` says of the slot",
    )
    ABORTS = (
        "aborts",
        False,
        "the engine failed in the middle of the answer",
        "read the engine's log; out of memory and a full KV cache both end like this",
    )
    KILLED_TOGETHER = (
        "killed-together",
        False,
        "several answers failed at the same moment: the slots share a KV cache smaller than what they promise",
        'start the engine with {flags} --no-kv-unified, or put the gate in front with engine.kv_topology = "unified"',
    )
    REFUSED = (
        "refused",
        False,
        "a prompt that is shorter than the slot's context was refused",
        "see the engine's message: its context is not what it advertises, or the gate's tenant has a smaller window",
    )
    TURNED_AWAY = (
        "turned-away",
        False,
        "the gate had no room for it within the tenant's queue, or the key may not ask",
        "use a tenant whose quota lets {slots} requests run and wait (concurrency_max, queue_max, queue_timeout_s)",
    )
    SLOW = (
        "slow", False,
        "it works, and nobody would wait for it",
        "lower -np or the context, look at -b, -ub and -t, and see `kvgate measure`",
    )  # fmt: skip

    @property
    def label(self) -> str:
        """Its name in every output."""
        return self.value[0]

    @property
    def is_fine(self) -> bool:
        """Whether an engine may meet users with it."""
        return self.value[1]

    @property
    def meaning(self) -> str:
        """What it says of the engine."""
        return self.value[2]

    def to_do(self, slots: int, n_ctx_slot: int) -> str:
        """What to set, with this engine's figures."""
        flags = f"-c {slots * n_ctx_slot} -np {slots} (context = slots x tokens per slot: {slots} x {n_ctx_slot})"
        return self.value[3].replace("{flags}", flags).replace("{slots}", str(slots))


@dataclass(frozen=True, slots=True)
class Seen:
    """What one answer of the test looked like.

    Args:
        status: of HTTP, 0 where no answer came.
        pieces: its text, token by token.
        output_tokens: by the server's own word.
        asked_tokens: the limit that was asked for.
        room_tokens: what the slot had left beside the prompt.
        says_context: the server tells that the context ended it.
        problem, problem_code: the error, empty where none.
        was_clamped: a gate says that it lowered the limit.
        ttft_s, tokens_per_second: None where no token came.
        ended_s: when it was over, on the clock of all answers of the run.
        by_gate: a gate answered.
    """

    status: int
    pieces: Sequence[str]
    output_tokens: int | None
    asked_tokens: int
    room_tokens: int
    says_context: bool
    problem: str
    problem_code: str
    was_clamped: bool
    ttft_s: float | None
    tokens_per_second: float | None
    ended_s: float
    by_gate: bool


@dataclass(frozen=True, slots=True)
class Pace:
    """What is too slow for the product."""

    ttft_max_s: float = 60.0
    tokens_per_second_min: float = 1.0


def room_of(n_ctx_slot: int) -> int:
    """The room that the test leaves for an answer in a slot of this context, in tokens."""
    return max(1, min(ROOM_TOKENS, n_ctx_slot // 4))


def judge(seen: Sequence[Seen], pace: Pace, *, control_loops: bool) -> list[Verdict]:
    """The verdict for each answer of one run, whose requests were asked at once.

    Args:
        seen: the answers.
        pace: what is too slow.
        control_loops: the model repeats itself after a short prompt as well, so that loops prove nothing.
    """
    found = [_judge_one(one, pace, control_loops=control_loops) for one in seen]
    failed = [one.ended_s for one, verdict in zip(seen, found, strict=True) if verdict is Verdict.ABORTS]
    if len(failed) > 1 and max(failed) - min(failed) <= TOGETHER_S:
        found = [Verdict.KILLED_TOGETHER if verdict is Verdict.ABORTS else verdict for verdict in found]
    return found


def _judge_one(seen: Seen, pace: Pace, *, control_loops: bool) -> Verdict:
    """The first that holds: failures, then what is wrong with an answer, then how a good one ended."""
    if (failure := _failure(seen)) is not None:
        return failure
    tokens = len(seen.pieces) if seen.output_tokens is None else seen.output_tokens
    is_short = tokens < min(seen.asked_tokens, seen.room_tokens)
    breaks_off = is_short and tokens <= seen.room_tokens * TRUNCATED_RATIO_MAX
    wrong = (
        (tokens > seen.room_tokens + 1, Verdict.FORGETS),
        (breaks_off or is_nonsense(seen.pieces), Verdict.TRUNCATES_AT_ONCE),
        (not control_loops and loops(seen.pieces), Verdict.LOOPS),
        (is_short and not seen.says_context, Verdict.ENDS_EARLY),
        (_is_slow(seen, pace), Verdict.SLOW),
        (seen.was_clamped, Verdict.CLAMPED),
        (tokens >= seen.asked_tokens, Verdict.COMPLETES),
        (seen.says_context, Verdict.ENDS_BY_CONTEXT),
    )
    return next((verdict for holds, verdict in wrong if holds), Verdict.SILENT_CONTEXT_END)


def _failure(seen: Seen) -> Verdict | None:
    if seen.by_gate and seen.status in {401, 403, 429}:
        return Verdict.TURNED_AWAY
    if seen.status == 400 and seen.by_gate and seen.asked_tokens > seen.room_tokens:
        return Verdict.REFUSED_IN_TIME
    if 400 <= seen.status < 500:
        return Verdict.REFUSED
    return Verdict.ABORTS if seen.problem or seen.status != 200 else None


def _is_slow(seen: Seen, pace: Pace) -> bool:
    late = seen.ttft_s is not None and seen.ttft_s > pace.ttft_max_s
    return late or (seen.tokens_per_second is not None and seen.tokens_per_second < pace.tokens_per_second_min)


def loops(pieces: Sequence[str]) -> bool:
    """Whether an answer that is over ends in one piece over and over, for at least half of it.

    For whole answers of a test, also short ones, token by token; `core.loops` watches users' streams, where a
    refrain of fifty tokens must be no loop.
    """
    for unit in range(1, min(LOOP_UNIT_TOKENS_MAX, len(pieces) // LOOP_REPEATS_MIN) + 1):
        same = 0
        while same < len(pieces) - unit and pieces[-1 - same] == pieces[-1 - same - unit]:
            same += 1
        if same + unit >= max(LOOP_REPEATS_MIN * unit, LOOP_RATIO_MIN * len(pieces), LOOP_REPEATS_MIN * 2):
            return True
    return False


def is_nonsense(pieces: Sequence[str]) -> bool:
    """Whether hardly a token of an answer has a letter or a digit."""
    return sum(_WORDLIKE.search(piece) is not None for piece in pieces) < NONSENSE_WORDS_MIN * max(len(pieces), 1)
