"""kvgate canary run: can this engine's prefix reuse be trusted?"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvgate.app.gate_suite import waiting_in
from kvgate.app.guest import join
from kvgate.cli.answers import refuse
from kvgate.cli.canary_told import as_json, exit_status, junit, lines
from kvgate.cli.check import problem_of
from kvgate.cli.progress import ProgressBar
from kvgate.cli.store_access import add_options
from kvgate.cli.top import look
from kvgate.core.profile import KvSettings
from kvgate.core.reuse_case import DEPTH_TOKENS_MIN
from kvgate.core.reuse_cases import NAMES
from kvgate.core.reuse_suite import Verdict
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.lab.reuse_suite import PLANNED, EngineAccess, Notes, SuiteSettings, run_suite
from kvgate.lab.reuse_suite.notes_file import NotesFile
from kvgate.ports import Refused
from kvgate.settings import BadSettings, load
from kvgate.store.errors import StoreUnavailable
from kvgate.store.local_ledger import LocalLedger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvgate.core.reuse_suite import SuiteResult
    from kvgate.lab.reuse_suite import Progress
    from kvgate.ports import LedgerPort

STATE: Final = Path("kvgate-suite.json")


@dataclass(frozen=True, slots=True)
class _Way:
    """How the engine is reached, where a gate of it may answer, and where the report goes; None without a gate."""

    engine: LlamaCpp
    ledger: LedgerPort
    waiting: Callable[[], Awaitable[int]]
    admin: str | None = None
    report: Callable[[SuiteResult], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A run: what was found, what to say beside it, whether it is on record, or should be and the store was out."""

    result: SuiteResult
    notes: list[str]
    recorded: bool = False
    is_lost: bool = False


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action to the command's parser."""
    parser = actions.add_parser(
        "run",
        help="ask an engine whether its prefix reuse can be trusted",
        description="Compare the engine's answers with prefix reuse and without, on the traffic that reuse bugs are "
        "known from (docs/reuse-suite.md). With the configuration or the store of a gate it asks as the gate's "
        "last-ranked tenant and puts the report on record. With --upstream alone it asks an engine without a gate. "
        "Exit 0 where every case passed, 1 where reuse corrupts, 2 where neither can be said.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("--upstream", metavar="URL", help="the engine (default: engine.url of the configuration)")
    parser.add_argument(
        "--admin",
        metavar="URL",
        help="a gate of this engine process: the report gets the fingerprint that it has there, as it may know the "
        "engine's log (default: admin_listen of the configuration, where a gate answers)",
    )
    parser.add_argument("--case", action="append", choices=NAMES, default=[], help="this case alone; may be repeated")
    parser.add_argument("--fresh", action="store_true", help="begin anew where an earlier run was interrupted")
    parser.add_argument(
        "--state",
        type=Path,
        default=STATE,
        metavar="FILE",
        help="what an interrupted run keeps (default %(default)s)",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the report as JUnit XML, too")
    parser.add_argument(
        "--time-max-s",
        type=_seconds,
        default=900.0,
        metavar="S",
        help="begin no case after S seconds (default %(default)g)",
    )
    parser.add_argument(
        "--depth-tokens",
        type=_depth,
        metavar="N",
        help=f"the longest beginning that is reused, {DEPTH_TOKENS_MIN} or more (default: half a slot)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Run the suite and tell; the exit status."""
    try:
        _check_writable(options)
        done = asyncio.run(_run(options))
    except (Refused, ValueError) as error:
        return refuse("canary run", problem_of(error), 2, as_json=options.json)
    except (BadSettings, StoreUnavailable) as problem:
        return refuse("canary run", str(problem), 2, as_json=options.json)
    except OSError as error:
        return refuse("canary run", f"{error.filename} cannot be written: {error.strerror}", 2, as_json=options.json)
    return _tell(done, options)


def _tell(done: Done, options: argparse.Namespace) -> int:
    if options.json:
        print(as_json(done.result, recorded=done.recorded))
    else:
        print("\n".join(lines(done.result)))
    if done.is_lost or not options.json:
        for note in done.notes:
            print(note, file=sys.stderr)
    if options.junit is not None:
        try:
            options.junit.write_text(junit(done.result))
        except OSError as error:
            print(f"kvgate canary run: {options.junit} cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    return 2 if done.is_lost else exit_status(done.result)


def _check_writable(options: argparse.Namespace) -> None:
    """Find out before the engine is asked for minutes.

    Raises:
        OSError: what the run is to leave behind cannot be written.
    """
    for path in filter(None, (options.junit, options.state)):
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            number = errno.EISDIR if path.is_dir() else errno.EACCES if path.parent.is_dir() else errno.ENOENT
            raise OSError(number, os.strerror(number), str(path))


async def _run(options: argparse.Namespace) -> Done:
    async with _way(options) as way:
        profile = await way.engine.discover()
        if options.admin is not None:
            await asyncio.to_thread(look, options.admin)  # rather now than after minutes
        file = NotesFile(options.state, profile)
        if options.fresh:
            file.forget()
        access = EngineAccess(way.engine, profile, way.ledger, way.waiting, time.monotonic)
        kept = None if options.case or not file.keeps else file
        result, is_kept = await _asked(options, access, kept)
        if way.admin is not None:
            result = await asyncio.to_thread(_as_gate_sees_it, result, way.admin, must=options.admin is not None)
        done = await _recorded(way, result, is_whole=not options.case)
        if kept is None:
            return done
        if not result.why and not done.is_lost:
            kept.forget()
        elif is_kept:
            done.notes.append(_kept(options.state))
        return done


async def _recorded(way: _Way, result: SuiteResult, *, is_whole: bool) -> Done:
    """The result put on record, where it says something and there is one."""
    if way.report is None:
        return Done(result, ["not on record, since no gate's store was named: give --config or --store to pin by it"])
    if not is_whole:
        return Done(result, ["not on record, since not every case was asked"])
    if result.verdict is Verdict.CANNOT_TELL:
        return Done(result, ["not on record, since it says neither"])
    try:
        await way.report(result)
    except StoreUnavailable as problem:
        return Done(result, [f"kvgate canary run: not on record: {problem}"], is_lost=True)
    return Done(result, [], recorded=True)


async def _asked(
    options: argparse.Namespace, access: EngineAccess, file: NotesFile | None
) -> tuple[SuiteResult, bool]:
    """Ask, from where an interrupted run ended, where there is a file for that; whether anything is in it."""
    settings = SuiteSettings(options.time_max_s, options.depth_tokens, tuple(options.case))
    notes, keep = (Notes(), lambda _: None) if file is None else (file.read(), file.keep)
    with ProgressBar("suite") as bar:
        if notes.cases:
            bar.say(f"going on with an interrupted run, finished: {', '.join(notes.cases)} (--fresh begins anew)")
        try:
            result = await run_suite(
                access,
                settings,
                notes=notes,
                keep=keep,
                on_progress=lambda progress: _show(bar, progress, settings),
            )
        except asyncio.CancelledError:
            if file is not None and notes.cases:
                bar.say(f"interrupted; {_kept(options.state)}")
            raise
    return result, bool(notes.cases)


def _kept(state: Path) -> str:
    return f"what is finished is in {state}; the next run on this engine process goes on from there"


def _show(bar: ProgressBar, progress: Progress, settings: SuiteSettings) -> None:
    if progress.case == PLANNED:
        bar.say(
            f"the suite takes about {max(1, round(progress.left_s))} s, and begins no case after "
            f"{settings.time_max_s:g} s"
        )
    else:
        bar.show(progress.ratio, progress.case, progress.left_s)


@asynccontextmanager
async def _way(options: argparse.Namespace) -> AsyncIterator[_Way]:
    """The engine, behind the ledger of its gate, or alone.

    Raises:
        BadSettings, StoreUnavailable, ValueError: it cannot be opened.
    """
    async with AsyncExitStack() as stack:
        if options.upstream is not None and options.config is None and options.store is None:
            engine = LlamaCpp(options.upstream, LlamaCppSettings(KvSettings()), time.monotonic)
            stack.push_async_callback(engine.close)
            yield _Way(engine, LocalLedger(time.monotonic, 0.0), _nobody)
            return
        changes: dict[str, dict[str, str]] = {}
        if options.upstream is not None:
            changes["engine"] = {"url": options.upstream}
        if options.store is not None:
            changes["store"] = {"url": options.store}
        settings = load(options.config, changes)
        guest = await join(stack, settings)
        admin = options.admin or f"http://{settings.admin_listen}"

        async def report(result: SuiteResult) -> None:
            await guest.canary.report(result.report(time.time()))

        yield _Way(guest.engine, guest.ledger, waiting_in(guest.ledger), admin, report)


def _as_gate_sees_it(result: SuiteResult, admin: str, *, must: bool) -> SuiteResult:
    """The result under the fingerprint that the gate there gives the same process: of its own child it knows the log.

    Raises:
        ValueError: it `must` be so, and no gate answers there, or it is in front of another process.
    """
    try:
        engine = look(admin)["engine"]
    except ValueError:
        if must:
            raise
        return result
    if result.instance is not None and engine and engine["profile"]["instance"] == result.instance:
        return replace(result, fingerprint=engine["fingerprint"])
    if must:
        raise ValueError(f"the gate at {admin} is in front of another engine process than the one that was asked")
    return result


async def _nobody() -> int:
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 1 to 86400")
    return seconds


def _depth(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < DEPTH_TOKENS_MIN:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, {DEPTH_TOKENS_MIN} or more")
    return int(text)
