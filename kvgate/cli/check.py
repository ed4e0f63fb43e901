"""kvgate check: does an engine give each request enough context; for CI and deploy scripts."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from kvgate.core.profile import KvSettings
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.ports import Refused

if TYPE_CHECKING:
    from kvgate.core.profile import EngineProfile


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="fail where an engine's slots are too small",
        description="Exit 0 where the engine gives each request enough context, 1 where it does not, 2 where it "
        "cannot be asked.",
        allow_abbrev=False,
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="the engine, http://host:port")
    parser.add_argument(
        "--context-tokens-min", required=True, type=_tokens, metavar="N", help="the least n_ctx_slot, in tokens"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of sentences")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Ask the engine and say."""
    least = int(options.context_tokens_min)
    try:
        profile = asyncio.run(ask_engine(options.upstream))
    except (Refused, ValueError) as error:
        problem = problem_of(error)
        print(
            json.dumps({"ok": None, "problem": problem}) if options.json else f"kvgate check: {problem}",
            file=sys.stderr,
        )
        return 2
    found = profile.n_ctx_slot.value
    ok = found >= least
    if options.json:
        answer = {
            "ok": ok,
            "n_ctx_slot": found,
            "context_tokens_min": least,
            "total_slots": profile.total_slots.value,
            "source": profile.n_ctx_slot.source,
        }
        print(json.dumps(answer))
    else:
        print(_sentence(profile, least, ok=ok))
    return 0 if ok else 1


def problem_of(error: Refused | ValueError) -> str:
    """Why an engine could not be asked, with the cause."""
    if not isinstance(error, Refused):
        return str(error)
    return f"{error.refusal.message} ({error.detail})" if error.detail else error.refusal.message


def _sentence(profile: EngineProfile, least: int, *, ok: bool) -> str:
    found, slots = profile.n_ctx_slot, profile.total_slots.value
    if ok:
        return (
            f"ok: n_ctx_slot = {found.value} tokens ({found.source}), {slots} slots; at least {least} are asked for"
        )
    return (
        f"too small: n_ctx_slot = {found.value} tokens ({found.source}), {slots} slots; at least {least} are asked "
        f"for. Start the engine with -c {least * slots} -np {slots} (context = slots x tokens per slot), "
        "or with fewer slots"
    )


async def ask_engine(url: str) -> EngineProfile:
    """The profile of the engine at a URL.

    Raises:
        Refused: it cannot be reached, is loading, or does not say what must be known.
        ValueError: the URL is none.
    """
    engine = LlamaCpp(url, LlamaCppSettings(KvSettings()), time.monotonic)
    try:
        return await engine.discover()
    finally:
        await engine.close()


def _tokens(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, 1 or more")
    return int(text)
