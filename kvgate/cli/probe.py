"""kvgate probe: what happens at the edge of a slot's context, asked of the engine and of the gate in front of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import refuse
from kvgate.cli.check import key_of, tokens
from kvgate.core.probe_verdict import Pace
from kvgate.core.recall import RecallVerdict
from kvgate.core.soak import ROUNDS_MIN, RULE, drifts
from kvgate.lab.admission_probe import fields_of, probe, refuse_busy, slots_of
from kvgate.lab.asking import Asked, CannotAsk
from kvgate.lab.process_memory import pid_of
from kvgate.lab.recall_probe import recall_at
from kvgate.lab.soak_probe import soak
from kvgate.lab.topology_probe import find_topology

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "probe",
        help="fill the slots of an idle engine and see how answers end",
        description="The context admission test: a prompt that leaves 256 tokens of a slot (a quarter of a small "
        "one), asking twice as many, in one slot and in all at once, on the engine, through the gate, or both. For "
        "idle engines: a busy one is refused. Exit 0 where every answer ends as it should, 1 where one does not, 2 "
        "where it cannot be told.",
        allow_abbrev=False,
    )
    parser.add_argument("--upstream", metavar="URL", help="the engine, http://host:port")
    parser.add_argument("--gate", metavar="URL", help="the gate in front of it, as tenants see it")
    parser.add_argument("--key-env", metavar="NAME", help="the variable with the tenant's key for the gate")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="the file with it")
    parser.add_argument("--upstream-key-env", metavar="NAME", help="the variable with the engine's own key")
    parser.add_argument(
        "--topology",
        action="store_true",
        help="instead: find out whether slots divide the KV cache or share it, and print the setting",
    )
    parser.add_argument(
        "--recall",
        action="store_true",
        help="instead: hide needles at several depths of a slot's context, and see whether they are found; exit 2 "
        "where the model is blind to this test",
    )
    parser.add_argument(
        "--soak",
        type=_positive,
        metavar="MINUTES",
        help="instead: the test in one slot again and again, for drift; with --recall that too",
    )
    parser.add_argument(
        "--context-tokens", type=tokens, metavar="N", help="the context of --recall (default: a slot's)"
    )
    parser.add_argument(
        "--pid", type=tokens, metavar="N", help="the engine's process, for its memory (default: found by its port)"
    )
    parser.add_argument(
        "--ttft-max-s", type=_positive, default=60.0, metavar="S", help="a later first token is slow (default 60)"
    )
    parser.add_argument(
        "--tokens-per-second-min", type=_positive, default=1.0, metavar="N", help="fewer are slow (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of sentences")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Probe and say."""
    try:
        work = _work(options)
        answer, lines = asyncio.run(work)
    except (CannotAsk, ValueError) as error:
        return refuse("probe", str(error), 2, as_json=options.json)
    print(json.dumps(answer) if options.json else "\n".join(lines))
    return {True: 0, False: 1, None: 2}[answer["ok"]]


def say(progress: str) -> None:
    """One line of progress, on standard error."""
    print(f"== {progress}", file=sys.stderr, flush=True)


def _work(options: argparse.Namespace) -> Coroutine[Any, Any, tuple[dict[str, Any], list[str]]]:
    if options.upstream is None and options.gate is None:
        raise ValueError("nothing to ask: give --upstream URL, --gate URL with --key-env NAME, or both")
    alone = [name for name in ("topology", "recall", "soak") if getattr(options, name)]
    if alone and options.upstream is None:
        raise ValueError(f"--{alone[0]} needs the engine itself: give --upstream URL")
    if options.topology and len(alone) > 1:
        raise ValueError(f"--topology and --{alone[1]} are two probes: run one after the other")
    if options.context_tokens is not None and not options.recall:
        raise ValueError("--context-tokens is for --recall: the other probes take the context of a slot")
    if options.topology:
        return _topology(options)
    if options.soak:
        return _soak(options)
    return _recall(options) if options.recall else _admission(options)


async def _recall(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with Asked(options.upstream, key_of(options.upstream_key_env, None)) as asked:
        await refuse_busy(asked)
        context = options.context_tokens or (await slots_of(asked)).n_ctx_slot
        found = await recall_at(asked, context, say)
    verdict = found.verdict
    answer = {
        "ok": None if found.is_blind else verdict is RecallVerdict.RECALLS,
        "verdict": verdict.label,
        "meaning": verdict.meaning,
        "to_do": verdict.to_do,
        "context_tokens": context,
        "nats_without": round(found.without, 3),
        "nats_near": round(found.near, 3),
        "depths": [
            {"depth": depth, "nats": round(nats, 3), "recalled": round(found.share(nats), 3)}
            for depth, nats in found.by_depth
        ],
    }
    lines = [f"{verdict.label}: {verdict.meaning}"]
    lines += [f"  depth {depth:g}: {share:.0%} of what a near needle gives" for depth, share in found.shares]
    if verdict is not RecallVerdict.RECALLS:
        lines.append(f"  to do: {verdict.to_do}")
    return answer, lines


async def _soak(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with Asked(options.upstream, key_of(options.upstream_key_env, None)) as asked:
        known = await slots_of(asked)
        soaked = await soak(
            asked,
            options.soak,
            Pace(options.ttft_max_s, options.tokens_per_second_min),
            say,
            pid=options.pid or pid_of(options.upstream),
            recall_tokens=(options.context_tokens or known.n_ctx_slot) if options.recall else None,
        )
    rounds, verdicts = soaked.rounds, soaked.verdicts
    found = drifts(rounds)
    bad = sorted({verdict.label for verdict in verdicts if not verdict.is_fine})
    few = len(rounds) < ROUNDS_MIN
    answer = {
        "ok": False if found or bad else None if few or soaked.stopped else True,
        "rounds": [
            {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(one).items()}
            for one in rounds
        ],
        "verdicts": [verdict.label for verdict in verdicts],
        "drifts": [asdict(one) for one in found],
        "stopped": soaked.stopped or None,
        "rule": RULE,
    }
    lines = [f"{len(rounds)} rounds: {', '.join(sorted({verdict.label for verdict in verdicts}))}"]
    lines += [f"drift: {one.sentence}" for one in found]
    if soaked.stopped:
        lines.append(f"stopped before its time: {soaked.stopped}")
    elif few:
        lines.append(f"a drift shows from {ROUNDS_MIN} rounds on: give more minutes")
    return answer, [*lines, f"rule: {RULE}"]


async def _topology(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with Asked(options.upstream, key_of(options.upstream_key_env, None)) as asked:
        found = await find_topology(asked, say)
    answer = {
        "ok": True,
        "topology": found.topology,
        "n_ctx_slot": found.n_ctx_slot,
        "total_slots": found.slots,
        "pool_tokens": found.pool_tokens,
        "setting": found.setting,
    }
    slots = f"{found.slots} slots of {found.n_ctx_slot} tokens"
    return answer, [
        f"{found.topology}: {slots}, a KV cache of {found.pool_tokens} tokens",
        "write into kvgate.toml:",
        "",
        found.setting,
    ]


async def _admission(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    pace = Pace(options.ttft_max_s, options.tokens_per_second_min)
    runs: list[dict[str, Any]] = []
    if options.upstream is not None:
        async with Asked(options.upstream, key_of(options.upstream_key_env, None)) as asked:
            runs += await _probed(asked, pace, say, by_gate=False)
    if options.gate is not None:
        async with Asked(options.gate, key_of(options.key_env, options.key_file), name="the gate") as asked:
            try:
                runs += await _probed(asked, pace, say, by_gate=True)
            except CannotAsk as cannot:
                if all(found["ok"] for found in runs):
                    raise
                say(f"{cannot}: it was not probed; what is told above may be why")
    lines = []
    for found in runs:
        size = f"{found['prompt_tokens']} + {found['asked_tokens']} tokens"
        head = f"{found['target']}, {found['at_once']} at once, {size}"
        lines.append(f"{head}: {found['verdict']}: {found['meaning']}")
        if not found["ok"]:
            problems = {one["problem"] for one in found["answers"] if one["problem"]}
            lines += [f"  it said: {problem}" for problem in sorted(problems)]
            lines.append(f"  to do: {found['to_do']}")
    return {"ok": all(found["ok"] for found in runs), "runs": runs}, lines


async def _probed(asked: Asked, pace: Pace, say: Callable[[str], None], *, by_gate: bool) -> list[dict[str, Any]]:
    known = await slots_of(asked)
    return [
        {"n_ctx_slot": known.n_ctx_slot, "total_slots": known.slots, **fields_of(found, known)}
        for found in await probe(asked, pace, say, by_gate=by_gate)
    ]


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
