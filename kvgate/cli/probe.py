"""kvgate probe: what happens at the edge of a slot's context, asked of the engine and of the gate in front of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import refuse
from kvgate.core.probe_verdict import Pace
from kvgate.lab.admission_probe import fields_of, probe, slots_of
from kvgate.lab.asking import Asked, CannotAsk
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
    return 0 if answer["ok"] else 1


def say(progress: str) -> None:
    """One line of progress, on standard error."""
    print(f"== {progress}", file=sys.stderr, flush=True)


def _work(options: argparse.Namespace) -> Coroutine[Any, Any, tuple[dict[str, Any], list[str]]]:
    if options.upstream is None and options.gate is None:
        raise ValueError("nothing to ask: give --upstream URL, --gate URL with --key-env NAME, or both")
    if options.topology:
        if options.upstream is None:
            raise ValueError("--topology needs the engine itself: give --upstream URL")
        return _topology(options)
    return _admission(options)


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
            runs += await _probed(asked, pace, say, by_gate=True)
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


def key_of(variable: str | None, file: Path | None) -> str | None:
    """A key from where keys may be: arguments show in `ps`.

    Raises:
        ValueError: it is not there.
    """
    if variable is not None:
        if not (key := os.environ.get(variable)):
            raise ValueError(f"the variable {variable} holds no key")
        return key
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
