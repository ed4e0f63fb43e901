"""The context admission test: fills a slot, then every slot at once, and judges how each answer ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.probe_verdict import Seen, Verdict, judge, loops, room_of
from kvgate.lab.asking import CannotAsk
from kvgate.lab.prose import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.probe_verdict import Pace
    from kvgate.lab.asking import Asked, Heard

CONTROL_PROMPT_TOKENS: Final = 64

BUSY_S: Final = 1.0
LOOK_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Slots:
    """How much context each of how many slots has, by a server's own word."""

    n_ctx_slot: int
    slots: int


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that were asked at once, with a verdict each.

    Args:
        target: engine or gate.
        at_once: how many.
        prompt_tokens, asked_tokens: of each.
        verdicts, heard: in the same order.
    """

    target: str
    at_once: int
    prompt_tokens: int
    asked_tokens: int
    verdicts: tuple[Verdict, ...]
    heard: tuple[Heard, ...]

    @property
    def is_fine(self) -> bool:
        """Whether every answer is."""
        return all(verdict.is_fine for verdict in self.verdicts)


async def slots_of(asked: Asked) -> Slots:
    """What `/props` says; of a gate, its tenant's own window.

    Raises:
        CannotAsk: it does not answer, or not as a llama-server does.
    """
    props = await asked.get("/props")
    settings = props.get("default_generation_settings") if isinstance(props, dict) else None
    n_ctx = settings.get("n_ctx") if isinstance(settings, dict) else None
    total = props.get("total_slots") if isinstance(props, dict) else None
    if not isinstance(n_ctx, int) or not isinstance(total, int) or n_ctx < 8 or total < 1:
        raise CannotAsk(f"{asked.name} at {asked.url} does not say in /props how much context its slots have")
    return Slots(n_ctx, total)


async def busy_slots(asked: Asked) -> int:
    """How many of an engine's slots are at work.

    Raises:
        CannotAsk: it does not show them.
    """
    try:
        slots = await asked.get("/slots")
    except CannotAsk as cannot:
        raise CannotAsk(f"{cannot}: whether it is idle is seen there; start it without --no-slots") from None
    if not isinstance(slots, list):
        raise CannotAsk(f"{asked.name} at {asked.url} does not show its slots at /slots")
    return sum(1 for slot in slots if isinstance(slot, dict) and slot.get("is_processing"))


async def refuse_busy(asked: Asked) -> None:
    """Probes fill slots and pools: on a busy engine they would stall or kill its users' answers.

    A slot whose answer is over may be shown at work for a moment longer, so a busy one is looked at again.

    Raises:
        CannotAsk: it is busy, or does not show whether it is.
    """
    busy = await busy_slots(asked)
    for _ in range(round(BUSY_S / LOOK_EVERY_S)):
        if not busy:
            return
        await asyncio.sleep(LOOK_EVERY_S)
        busy = await busy_slots(asked)
    if busy:
        raise CannotAsk(
            f"{asked.name} at {asked.url} is busy ({busy} slots at work): this would stall or kill its users' "
            "answers; ask when it is idle"
        )


async def probe(asked: Asked, pace: Pace, say: Callable[[str], None], *, by_gate: bool = False) -> list[Run]:
    """The runs: one slot, then all at once; of a gate that refuses, also what it would let in.

    Raises:
        CannotAsk: the server does not answer, or is busy, and no run before says why.
    """
    if not by_gate:
        await refuse_busy(asked)
    known = await slots_of(asked)
    room = room_of(known.n_ctx_slot)
    bench = _Bench(asked, known, pace, say, by_gate, await _control_loops(asked, room, say))
    runs = []
    for at_once in (1, known.slots) if known.slots > 1 else (1,):
        try:
            runs.append(await bench.run(at_once, 2 * room))
        except CannotAsk as cannot:
            if all(run.is_fine for run in runs):
                raise
            say(f"{cannot}: not asked further; what came before may be why")
            break
        if Verdict.REFUSED_IN_TIME in runs[-1].verdicts:  # the engine saw nothing of it
            runs.append(await bench.run(at_once, room))
    return runs


async def _control_loops(asked: Asked, room: int, say: Callable[[str], None]) -> bool:
    say(f"{asked.name}: a short prompt, to know whether the model repeats itself without any pressure")
    heard = await asked.complete(await prompt_of(asked, CONTROL_PROMPT_TOKENS, seed=999), room)
    return loops(heard.pieces)


@dataclass(frozen=True, slots=True)
class _Bench:
    asked: Asked
    known: Slots
    pace: Pace
    say: Callable[[str], None]
    by_gate: bool
    control_loops: bool

    async def run(self, at_once: int, asked_tokens: int) -> Run:
        """Ask so many at once, each with a prompt of its own."""
        name, known = self.asked.name, self.known
        room = room_of(known.n_ctx_slot)
        prompt_tokens = known.n_ctx_slot - room
        self.say(
            f"{name}: {at_once} of {known.slots} slots, a prompt of {prompt_tokens} of {known.n_ctx_slot} tokens, "
            f"asking {asked_tokens}"
        )
        prompts = [await prompt_of(self.asked, prompt_tokens, seed) for seed in range(at_once)]
        heard = await asyncio.gather(*(self.asked.complete(prompt, asked_tokens) for prompt in prompts))
        seen = [seen_of(one, asked_tokens, room, by_gate=self.by_gate) for one in heard]
        verdicts = judge(seen, self.pace, control_loops=self.control_loops)
        self.say(f"{name}: {', '.join(sorted({verdict.label for verdict in verdicts}))}")
        target = "gate" if self.by_gate else "engine"
        return Run(target, at_once, prompt_tokens, asked_tokens, tuple(verdicts), tuple(heard))


def seen_of(heard: Heard, asked_tokens: int, room_tokens: int, *, by_gate: bool) -> Seen:
    """An answer as the verdicts look at it."""
    return Seen(
        status=heard.status,
        pieces=heard.pieces,
        output_tokens=heard.output_tokens,
        asked_tokens=asked_tokens,
        room_tokens=room_tokens,
        says_context=heard.was_truncated,
        problem=heard.problem,
        problem_code=heard.problem_code,
        was_clamped=heard.headers.get("x-kvgate-verdict") == "clamp",
        ttft_s=heard.ttft_s,
        tokens_per_second=heard.tokens_per_second,
        ended_s=heard.ended_s,
        by_gate=by_gate,
    )


def fields_of(run: Run, known: Slots) -> dict[str, Any]:
    """A run as members of a JSON object."""
    worst = next((verdict for verdict in run.verdicts if not verdict.is_fine), run.verdicts[0])
    return {
        "target": run.target,
        "at_once": run.at_once,
        "prompt_tokens": run.prompt_tokens,
        "asked_tokens": run.asked_tokens,
        "ok": run.is_fine,
        "verdict": worst.label,
        "meaning": worst.meaning,
        "to_do": worst.to_do(known.slots, known.n_ctx_slot),
        "answers": [
            {
                "verdict": verdict.label,
                "status": heard.status,
                "prompt_tokens": heard.prompt_tokens,
                "output_tokens": heard.output_tokens,
                "ttft_s": _rounded(heard.ttft_s),
                "tokens_per_second": _rounded(heard.tokens_per_second),
                "problem": heard.problem or None,
            }
            for verdict, heard in zip(run.verdicts, run.heard, strict=True)
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
