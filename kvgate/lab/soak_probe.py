"""The context admission test in one slot, again and again, with an eye on memory, speed and recall."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgate.core.probe_verdict import Verdict, judge, loops, room_of
from kvgate.core.soak import Round
from kvgate.lab.admission_probe import refuse_busy, seen_of, slots_of
from kvgate.lab.asking import CannotAsk
from kvgate.lab.process_memory import rss_mib
from kvgate.lab.prose import prompt_of
from kvgate.lab.recall_probe import recall_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.probe_verdict import Pace
    from kvgate.lab.asking import Asked, Heard


@dataclass(frozen=True, slots=True)
class Soaked:
    """What a soak saw: its rounds, the verdict of each, and what stopped it early, empty where nothing did."""

    rounds: tuple[Round, ...]
    verdicts: tuple[Verdict, ...]
    stopped: str


async def soak(
    asked: Asked,
    minutes: float,
    pace: Pace,
    say: Callable[[str], None],
    *,
    pid: int | None,
    recall_tokens: int | None,
) -> Soaked:
    """Rounds until the time is over, one at least; those before an engine is busy or gone count all the same.

    Args:
        asked: the engine.
        minutes: how long.
        pace: what is too slow.
        say: told of each round.
        pid: the engine's process on this machine, None where its memory cannot be watched.
        recall_tokens: the context at which recall is watched; None does not watch it.

    Raises:
        CannotAsk: the engine does not answer, or is busy, before a round was over.
    """
    known = await slots_of(asked)
    room = room_of(known.n_ctx_slot)
    prompt_tokens = known.n_ctx_slot - room
    rounds, verdicts, stopped = list[Round](), list[Verdict](), ""
    until_s = time.monotonic() + minutes * 60
    while not stopped and (not rounds or time.monotonic() < until_s):
        try:
            await refuse_busy(asked)
            prompt = await prompt_of(asked, prompt_tokens, seed=len(rounds))
        except CannotAsk as cannot:
            if not rounds:
                raise
            stopped = str(cannot)
            break
        heard = await asked.complete(prompt, 2 * room)
        # A model's own habit is the admission test's matter; here it would be the same in every round.
        verdicts += judge([seen_of(heard, 2 * room, room, by_gate=False)], pace, control_loops=loops(heard.pieces))
        share = None
        if recall_tokens is not None:
            try:
                recall = await recall_at(asked, recall_tokens, lambda _: None, depths=(0.5,), needles=1)
                share = recall.share(recall.by_depth[0][1])
            except CannotAsk as cannot:
                if not rounds and verdicts[-1].is_fine:
                    raise
                stopped = str(cannot)
        rounds.append(_round(heard, prompt_tokens, verdicts[-1], rss_mib(pid), share))
        say(_told(len(rounds), verdicts[-1], rounds[-1]))
    return Soaked(tuple(rounds), tuple(verdicts), stopped)


def _round(
    heard: Heard, prompt_tokens: int, verdict: Verdict, memory_mib: float | None, recall_share: float | None
) -> Round:
    ttft_s = heard.ttft_s
    return Round(
        is_fine=verdict.is_fine,
        prefill_tokens_per_second=prompt_tokens / ttft_s if ttft_s else None,
        tokens_per_second=heard.tokens_per_second,
        memory_mib=memory_mib,
        recall_share=recall_share,
    )


def _told(number: int, verdict: Verdict, found: Round) -> str:
    figures = (
        ("tokens a second", found.tokens_per_second),
        ("MiB", found.memory_mib),
        ("recall", found.recall_share),
    )
    told = ", ".join(f"{value:.2f} {name}" for name, value in figures if value is not None)
    return f"round {number}: {verdict.label}" + (f", {told}" if told else "")
