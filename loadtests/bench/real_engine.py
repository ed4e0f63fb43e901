"""The same question over a real engine: what of the proxy can still be seen when a model does the work."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.lab.engine_process import EngineProcess
from kvgate.lab.fetch import fetch_model
from loadtests.bench import cells, proxies
from loadtests.bench.bodies import Body
from loadtests.bench.client import COUNTER
from loadtests.bench.figures import Book, Column

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loadtests.bench.proxies import Proxy

ENGINE_FLAGS: Final = (
    *("-c", "4096", "-np", "4", "--no-kv-unified", "-t", "1", "-lv", "4"),
    *("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots"),
)
OUTPUT_TOKENS: Final = 24
_NAMES: Final = ("direct", "nginx", "kvgate, 1 worker")
_TEXT: Final = "The slot holds what was asked for, and nothing more, until it is seen idle. " * 4


@dataclass(frozen=True)
class Scale:
    """How often, for how long, and with how many clients."""

    rounds: int
    seconds: float
    clients: tuple[int, ...]


def measured(scale: Scale, directory: Path, say: Callable[[str], None]) -> Book:
    """Tokens a second and the time to the first one, with so many clients that ask without a pause."""
    columns = []
    for count in scale.clients:
        who = f"{count} client{'s' if count > 1 else ''}"
        columns += [
            Column(f"tokens_{count}", f"tokens/s, {who}", "more", 1),
            Column(f"first_{count}", f"p50 to the first token, ms, {who}", "less"),
            Column(f"whole_{count}", f"p50 of an answer, ms, {who}", "less"),
        ]
    book = Book([*columns, Column("errors", "errors", "less", ratio=False)], _NAMES)
    with contextlib.ExitStack() as stack:
        flags = ["-m", str(fetch_model()), *ENGINE_FLAGS]
        engine = stack.enter_context(EngineProcess(flags, log_path=directory / "engine.log"))
        compared = [proxies.direct(engine.url)]
        try:
            compared.append(proxies.nginx(engine.url, directory, stack))
        except proxies.NotHere as error:
            book.missing["nginx"] = str(error)
        config = f'[engine]\nlog = "{directory / "engine.log"}"\n'
        gate = proxies.kvgate(engine.url, directory, stack, workers=1, config=config)
        proxies.until_counting_is_settled(gate)
        compared.append(gate)
        body = Body("real", directory / "body.json")
        body.path.write_bytes(_chat())
        for number in range(scale.rounds):
            say(f"the real engine, round {number + 1} of {scale.rounds}")
            first = number % len(compared)
            for proxy in [*compared[first:], *compared[:first]]:
                _ask_as_many(proxy, body, scale, number, book)
    return book


def _ask_as_many(proxy: Proxy, body: Body, scale: Scale, number: int, book: Book) -> None:
    errors = 0
    for count in scale.clients:
        found = cells.asked(proxy, body, count, scale.seconds, own=True)
        book.add(proxy.name, f"tokens_{count}", number, found.events_per_s)
        book.add(proxy.name, f"first_{count}", number, found.first_p50_ms)
        book.add(proxy.name, f"whole_{count}", number, found.p50_ms)
        errors += found.errors
    book.add(proxy.name, "errors", number, float(errors))


def _chat() -> bytes:
    message = {"role": "user", "content": f"{COUNTER.decode()} {_TEXT}"}
    body = {"model": "bench", "messages": [message], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    return json.dumps(body).encode()
