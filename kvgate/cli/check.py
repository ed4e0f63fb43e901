"""kvgate check: may this engine meet users; for CI and deploy scripts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import refuse
from kvgate.cli.check_reports import as_fields, as_github, as_junit, as_lines
from kvgate.core.command_line import read_line, read_words
from kvgate.core.deploy import Rule, Seen, Wanted
from kvgate.core.deploy_check import check
from kvgate.core.profile import KvSettings
from kvgate.core.startup_log import StartupLog
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.ports import Refused
from kvgate.settings import load_tenants

if TYPE_CHECKING:
    from kvgate.core.profile import EngineProfile, StartupFacts


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="fail a deploy whose slots are too small, or whose caches nobody chose",
        description="Judge an engine, its startup log and its command line, as many of them as are given; what "
        "follows -- is read as a command line, and not run. Exit 0 where nothing is wrong, 1 where an error was "
        "found that nobody acknowledged, 2 where it cannot be told.",
        usage="kvgate check --context-tokens-min N [options] [-- llama-server ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--upstream", metavar="URL", help="the engine, http://host:port")
    parser.add_argument("--upstream-key-env", metavar="NAME", help="the variable with the engine's own key")
    parser.add_argument("--log", metavar="FILE", help="the engine's startup log, - for standard input")
    parser.add_argument("--command", dest="line", metavar="LINE", help="its command line as one argument")
    parser.add_argument(
        "--context-tokens-min", required=True, type=tokens, metavar="N", help="the least n_ctx_slot, in tokens"
    )
    parser.add_argument(
        "--tenants", metavar="FILE|N", help="who shares the engine: tenants.toml, or how many; 1 may keep its caches"
    )
    parser.add_argument(
        "--margin-tokens", type=tokens, default=0, metavar="N", help="the gate's engine.margin_tokens (default 0)"
    )
    parser.add_argument(
        "--acknowledge",
        action="append",
        default=[],
        choices=[rule.label for rule in Rule],
        metavar="RULE",
        help="a rule that is broken on purpose: told, but no failure; once for each",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of sentences")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="write a JUnit file too, a test case for each rule"
    )
    form.add_argument("--github", action="store_true", help="annotations of a GitHub workflow instead of sentences")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, command: list[str]) -> int:
    """Look, judge and say."""
    try:
        found = check(_seen(options, command), _wanted(options))
        if options.junit is not None:
            options.junit.write_text(as_junit(found), encoding="utf-8")
    except (Refused, ValueError) as error:  # BadCommandLine, BadSettings among them
        return refuse("check", problem_of(error), 2, as_json=options.json)
    except OSError as error:
        return refuse("check", f"{error.filename}: {error.strerror}", 2, as_json=options.json)
    if options.json:
        print(json.dumps(as_fields(found, options.context_tokens_min)))
    else:
        for line in as_github(found) if options.github else as_lines(found, options.context_tokens_min):
            print(line)
    return 0 if found.ok else 1


def _seen(options: argparse.Namespace, command: list[str]) -> Seen:
    if command and options.line is not None:
        raise ValueError("give the command line after --, or with --command, not both")
    if options.line is not None and not options.line.strip():
        raise ValueError("--command is empty: is the variable set that it came from?")
    if not command and options.line is None and options.log is None and options.upstream is None:
        raise ValueError("nothing to look at: give --upstream URL, --log FILE, or a command line after --")
    return Seen(
        None
        if options.upstream is None
        else asyncio.run(ask_engine(options.upstream, key_of(options.upstream_key_env, None))),
        None if options.log is None else facts_of(options.log),
        read_words(command) if command else None if options.line is None else read_line(options.line),
    )


def facts_of(source: str) -> StartupFacts:
    """What a startup log says; `-` is standard input.

    Raises:
        ValueError: it tells of no start that was completed.
        OSError: it cannot be read.
    """
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    log = StartupLog()
    log.feed(data.decode("utf-8", "replace").splitlines())
    if log.facts is None:
        name = "standard input" if source == "-" else source
        raise ValueError(
            f"{name} tells of no start that was completed (a line with n_slots and n_ctx_slot): give all that the "
            "engine wrote from its start until the model was loaded"
        )
    return log.facts


def _wanted(options: argparse.Namespace) -> Wanted:
    tenants: str | None = options.tenants
    count = None
    if tenants is not None:
        count = int(tenants) if tenants.isascii() and tenants.isdigit() else len(load_tenants(Path(tenants)))
        if count == 0:
            raise ValueError(
                f"--tenants {tenants} names nobody: give how many share the engine, 1 or more, or a file of tenants"
            )
    return Wanted(options.context_tokens_min, count, options.margin_tokens, frozenset(options.acknowledge))


def problem_of(error: Refused | ValueError) -> str:
    """Why an engine could not be asked, with the cause."""
    if not isinstance(error, Refused):
        return str(error)
    return f"{error.refusal.message} ({error.detail})" if error.detail else error.refusal.message


async def ask_engine(url: str, key: str | None = None) -> EngineProfile:
    """The profile of the engine at a URL; `key` is the engine's own.

    Raises:
        Refused: it cannot be reached, is loading, or does not say what must be known.
        ValueError: the URL is none.
    """
    engine = LlamaCpp(url, LlamaCppSettings(KvSettings()), time.monotonic, api_key=key)
    try:
        return await engine.discover()
    finally:
        await engine.close()


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


def tokens(text: str) -> int:
    """An argument that is a number, 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, 1 or more")
    return int(text)
