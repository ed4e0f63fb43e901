"""`make bench`: one table of what each proxy costs, over an engine that costs nothing, then over a real one.

    python -m loadtests.bench [--quick] [--rounds 3] [--json FILE] [--markdown FILE] [--plot FILE]

Everything runs at once and is asked in turns, another one first in each round, so that what else the machine does
hits all of them. docs/performance.md says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvgate.lab.engine_process import EngineProcess
from kvgate.lab.fetch import fetch_model
from loadtests.bench import bodies, cells, figures, machine, proxies, real_engine
from loadtests.bench.figures import Book, Column
from loadtests.bench.processes import running, said_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadtests.bench.bodies import Body
    from loadtests.bench.proxies import Proxy

PROXIES = ("direct", "nginx", "kvgate, 1 worker", "kvgate, 2 workers", "aiohttp", "LiteLLM")
ENGINE_FLAGS = ("-c", "2048", "-np", "1", "-t", "1", "--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots")
BARS = ("rps_2k", "cpu_2k", "added_2k", "cpu_32k", "cpu_512k", "paced_cpu", "stream_kb")


@dataclass(frozen=True)
class Scale:
    """How long it all takes."""

    rounds: int
    seconds: float
    paced_seconds: float
    sizes: dict[str, int]
    clients: int
    streams: int
    flat_streams: int
    engine: real_engine.Scale


WHOLE = Scale(3, 2.0, 4.0, bodies.SIZES, 32, 200, 8, real_engine.Scale(2, 3.0, (1, 4, 16)))
QUICK = Scale(1, 1.0, 1.0, {"2k": 2048}, 4, 8, 2, real_engine.Scale(1, 1.0, (2,)))


def columns(sizes: dict[str, int], clients: int, streams: int, flat_streams: int) -> list[Column]:
    """What is measured."""
    found = []
    for label, size in sizes.items():
        kb = f"{size // 1024} KB"
        found += [
            Column(f"rps_{label}", f"requests/s, {kb}, {clients} clients", "more"),
            Column(f"cpu_{label}", f"CPU seconds per 1,000 requests, {kb}", "less", 3),
            Column(f"added_{label}", f"added p50, us, {kb}, 1 client", "less"),
        ]
    return [
        *found,
        Column("flat_chunks", f"stream chunks/s, {flat_streams} streams flat out", "more"),
        Column("paced_cpu", f"CPU us per chunk, {streams} streams at 25/s", "less"),
        Column("paced_added", f"added p50 per chunk, us, {streams} streams at 25/s", "less"),
        Column("stream_kb", "KB of memory per open stream", "less", 1),
        Column("errors", "errors", "less", ratio=False),
    ]


def started(
    names: Sequence[str], upstream: str, directory: Path, stack: contextlib.ExitStack, book: Book
) -> list[Proxy]:
    """Every proxy that can be had here; the others are named in the book with the reason."""
    starts: dict[str, Callable[[], Proxy]] = {
        "direct": lambda: proxies.direct(upstream),
        "nginx": lambda: proxies.nginx(upstream, directory, stack),
        "kvgate, 1 worker": lambda: proxies.kvgate(upstream, directory, stack, workers=1),
        "kvgate, 2 workers": lambda: proxies.kvgate(upstream, directory, stack, workers=2),
        "aiohttp": lambda: proxies.aiohttp_passthrough(upstream, directory, stack),
        "LiteLLM": lambda: proxies.litellm(upstream, directory, stack),
    }
    found = []
    for name in names:
        say(f"starting {name}")
        try:
            found.append(starts[name]())
        except proxies.NotHere as error:
            book.missing[name] = str(error)
    return found


def say(sentence: str) -> None:
    """Progress, on standard error."""
    print(f"{time.strftime('%H:%M:%S')}  {sentence}", file=sys.stderr, flush=True)


class Round:
    """Every proxy under every load once, a different one first each time."""

    def __init__(self, number: int, compared: Sequence[Proxy], chats: dict[str, Body], book: Book) -> None:
        self._number, self._chats, self._book = number, chats, book
        first = number % len(compared)
        self._turned = [*compared[first:], *compared[:first]]
        self._errors = dict.fromkeys((proxy.name for proxy in compared), 0.0)

    def run(self, scale: Scale) -> None:
        """All of it."""
        for label in scale.sizes:
            say(f"round {self._number + 1} of {scale.rounds}: {label}")
            self._whole(label, scale)
        say(f"round {self._number + 1} of {scale.rounds}: streams")
        self._streams(scale)
        for name, count in self._errors.items():
            self._book.add(name, "errors", self._number, count)

    def _enter(self, proxy: Proxy, values: dict[str, float]) -> None:
        self._errors[proxy.name] += values.pop("errors", 0.0)
        for key, value in values.items():
            self._book.add(proxy.name, key, self._number, value)

    def _enter_beyond_direct(self, key: str, values: dict[str, float]) -> None:
        """What each adds to what it takes without any."""
        for name, value in values.items():
            if name != "direct" and "direct" in values:
                self._book.add(name, key, self._number, value - values["direct"])

    def _whole(self, label: str, scale: Scale) -> None:
        chat, alone_us = self._chats[label], {}
        for proxy in self._turned:
            self._enter(proxy, cells.throughput(proxy, chat, scale.clients, scale.seconds))
            cells.settle(proxy)
            if (found_us := cells.latency(proxy, chat, scale.seconds)) is not None:
                alone_us[proxy.name] = found_us
        self._enter_beyond_direct(f"added_{label}", alone_us)

    def _streams(self, scale: Scale) -> None:
        way_us = {}
        for proxy in self._turned:
            self._enter(proxy, cells.flat_out(proxy, self._chats["flat"], scale.flat_streams, scale.seconds))
            cells.settle(proxy)
            values = cells.paced(proxy, self._chats["paced"], scale.streams, scale.paced_seconds)
            way_us[proxy.name] = values.pop("paced_on_the_way")
            self._enter(proxy, values)
            cells.settle(proxy)
        self._enter_beyond_direct("paced_added", way_us)


def over_the_fast_upstream(names: Sequence[str], scale: Scale, directory: Path) -> Book:
    """The first table."""
    book = Book(columns(scale.sizes, scale.clients, scale.streams, scale.flat_streams), names)
    with contextlib.ExitStack() as stack:
        flags = ["-m", str(fetch_model()), *ENGINE_FLAGS]
        engine = stack.enter_context(EngineProcess(flags, log_path=directory / "engine.log"))
        command = [sys.executable, "-m", "loadtests.bench.fast_upstream", "--engine", engine.url]
        upstream = said_url(stack.enter_context(running(command, directory, name="upstream", says_url=True)))
        chats = bodies.prepare(upstream, directory, scale.sizes)
        compared = started(names, upstream, directory, stack, book)
        gates = [proxy for proxy in compared if proxy.admin_url]
        for gate in gates:
            proxies.until_counting_is_settled(gate)
        say("warming up")
        for proxy in compared:
            for label in scale.sizes:
                cells.asked(proxy, chats[label], 4, 1.0)
        for number in range(scale.rounds):
            Round(number, compared, chats, book).run(scale)
        for gate in gates:
            counted = ", ".join(f"{count:,} by {proof}" for proof, count in proxies.counted_by(gate).items() if count)
            book.notes.append(f"{gate.name} counted {counted}.")
    return book


def shown(title: str, book: Book, *, markdown: bool) -> str:
    """A table with what is to be said of it."""
    table = figures.rows(book)
    if markdown:
        notes = "\n".join(f"- {note}" for note in figures.footnotes(book))
        return f"### {title}\n\n{figures.markdown_table(table)}\n\n{notes}\n"
    return f"{title}\n\n{figures.text_table(table)}\n\n" + "\n".join(figures.footnotes(book)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="loadtests.bench", description="What each proxy costs.")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes: whether it runs, no figures"
    )
    parser.add_argument("--rounds", type=int, help="how often each cell is measured (default 3)")
    parser.add_argument("--only", metavar="NAMES", help=f"some of: {'; '.join(PROXIES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every value, - for standard output")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write the tables there; into docs/performance.md, between its marks",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG (needs matplotlib); else bars are printed")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else WHOLE
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    names = PROXIES if options.only is None else tuple(name.strip() for name in options.only.split(";"))
    if unknown := [name for name in names if name not in PROXIES]:
        parser.error(f"there is no proxy {unknown[0]!r}; there are: {'; '.join(PROXIES)}")
    if "direct" not in names:
        names = ("direct", *names)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as given:
        fast, real = Path(given) / "fast", Path(given) / "real"
        fast.mkdir()
        real.mkdir()
        books = {
            "Over an engine that costs nothing": over_the_fast_upstream(names, scale, fast),
            "Over a real engine": real_engine.measured(scale.engine, real, say),
        }
    told = machine.told(time.monotonic() - begun_s)
    document = {"machine": told, **{title: book.document() for title, book in books.items()}}
    show(options, books, told, document)
    return 0


def show(options: argparse.Namespace, books: dict[str, Book], told: str, document: Mapping[str, object]) -> None:
    """Print the tables, and write the files that were asked for."""
    if options.json is not None and str(options.json) == "-":
        print(json.dumps(document))
    else:
        for title, book in books.items():
            print(shown(title, book, markdown=False))
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    first = next(iter(books.values()))
    if options.plot is not None and figures.plot(first, BARS, options.plot):
        say(f"wrote {options.plot}")
    elif str(options.json) != "-":
        print(figures.bars(first, BARS) + "\n")
    if options.markdown is not None:
        parts = [f"{told}\n", *(shown(title, book, markdown=True) for title, book in books.items())]
        figures.write_between_marks(options.markdown, "\n".join(parts))
        say(f"wrote {options.markdown}")
    if str(options.json) != "-":
        print(told)


if __name__ == "__main__":
    sys.exit(main())
