"""How a command reaches the store that gates read: which one, and how it is opened and closed again."""

from __future__ import annotations

import asyncio
import difflib
import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import refuse, tell
from kvgate.settings import BadSettings, load
from kvgate.store.canary import CanaryStore
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable, store_errors
from kvgate.store.recent_sizes import RecentSizes
from kvgate.store.registry import NotDone, Registry
from kvgate.store.reports import Reports

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from kvgate.cli.answers import Told
    from kvgate.settings import Settings

    Work = Callable[["Desk"], Awaitable[Told]]

ANSWER_TIMEOUT_S = 5.0

_WHICH = (
    "A gate, or `kvgate tenants apply FILE`, makes one. Is it another? The embedded store is in .kvgate beside "
    "kvgate.toml (--config FILE; without, in this directory), or in [store] data_dir; --store URL names one that runs"
)

NAMES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Desk:
    """What a command works with; `where` is the store, as a person would name it."""

    registry: Registry
    sizes: RecentSizes
    reports: Reports
    where: str
    canary: CanaryStore


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which store, and how the answer is told."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="kvgate.toml of the gates; its [store] is used")
    parser.add_argument(
        "--store", metavar="URL", help="redis://, rediss:// or unix:// (default: the configuration's store)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of sentences")


def run(options: argparse.Namespace, work: Work) -> int:
    """Do a command's work at its store and tell the answer; the exit status. NotDone means that the answer is no."""
    return run_prepared(options, lambda _: work)


def run_prepared(
    options: argparse.Namespace, prepare: Callable[[Settings], Work], *, makes_store: bool = False
) -> int:
    """The same where the work is made from the settings first: what is wrong is told before a store is touched.

    Args:
        options: the command line.
        prepare: makes the work; raises BadSettings.
        makes_store: whether an embedded store that never was is made; only what fills it should.
    """
    command = " ".join(filter(None, (options.command, getattr(options, "action", None))))
    try:
        settings = load(options.config, {"store": {"url": options.store}} if options.store else {})
        told = asyncio.run(_at_store(settings, prepare(settings), makes_store=makes_store))
    except NotDone as no:
        return refuse(command, str(no), 1, as_json=options.json)
    except (BadSettings, StoreUnavailable) as problem:
        return refuse(command, str(problem), 2, as_json=options.json)
    return tell(told, as_json=options.json)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say after "there is no tenant NAME": the one that was meant, or which there are."""
    names = sorted(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.5):
        return f"; did you mean {close[0]}?"
    if not names:
        return ", nor any other: `kvgate tenants apply FILE` declares them"
    return f"; there are {', '.join(names)}" if len(names) <= NAMES_SHOWN_MAX else "; `kvgate tenants list` shows all"


async def _at_store(settings: Settings, work: Work, *, makes_store: bool) -> Told:
    async with _open(settings, makes_store=makes_store) as desk:
        return await work(desk)


@asynccontextmanager
async def _open(settings: Settings, *, makes_store: bool) -> AsyncIterator[Desk]:
    """Attach to the store; the embedded one is started where no gate runs, and stopped again.

    Raises:
        StoreUnavailable: it is not to be had.
    """
    async with AsyncExitStack() as stack:
        url = settings.store.url
        where = "" if url is None else f"the store {_without_password(url)}"
        if url is None:
            data_dir = (settings.store.data_dir or Path(".kvgate")).resolve()
            if not makes_store and not data_dir.is_dir():
                raise StoreUnavailable(f"there is no store in {data_dir}. {_WHICH}")
            embedded = EmbeddedValkey(data_dir)
            await stack.enter_async_context(embedded.alone())
            await embedded.start()
            stack.push_async_callback(embedded.stop)
            url, where = embedded.url, f"the store in {data_dir}"
        try:
            client = connect(url)
        except ValueError as error:
            raise StoreUnavailable(f"that is no URL of a store: {error}") from None
        stack.push_async_callback(client.aclose)
        await _check_answers(client, where)
        registry = Registry(client, timeout_s=ANSWER_TIMEOUT_S)
        sizes = RecentSizes(client, timeout_s=ANSWER_TIMEOUT_S)
        reports = Reports(client, timeout_s=ANSWER_TIMEOUT_S)
        yield Desk(registry, sizes, reports, where, CanaryStore(client, timeout_s=ANSWER_TIMEOUT_S))


async def _check_answers(client: Any, where: str) -> None:
    """Find out before anything is asked: then an outage in mid-command is told apart from a wrong address."""
    try:
        with store_errors("greeting it"):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await client.ping()
    except StoreUnavailable as error:
        cause = str(error.__cause__).rstrip(".") or f"no answer within {ANSWER_TIMEOUT_S:g} s"
        advice = "Does it run, and is this its address (--store, [store] url, KVGATE_STORE__URL)?"
        raise StoreUnavailable(f"{where} cannot be used: {cause}. {advice}") from None


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
