"""What `make demo` shows: the same requests to a bare engine and through kvgate, side by side."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from kvgate.app import App, CannotStart
from kvgate.cli.quickstart import engine, say
from kvgate.lab.engine_process import EngineFailed
from kvgate.lab.fetch import FetchFailed
from kvgate.log import start_logging
from kvgate.settings import load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POOL_TOKENS = 768
TENANTS = ("ann", "bob", "cyd")
PROMPT_WORDS, OUTPUT_TOKENS = 250, 150
_CHAT = "/v1/chat/completions"
_COLUMN = 46


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client got, in its own words, and after how many seconds."""

    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.text} ({self.seconds:.1f} s)"


def main() -> int:
    """Run the demonstration; 0 where it showed what it promises, 1 where it did not, 2 where it could not run."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvgate-demo-") as scratch:
            return _demonstrate(Path(scratch))
    except (EngineFailed, FetchFailed, CannotStart) as problem:
        print(f"kvgate demo: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _demonstrate(scratch: Path) -> int:
    flags = ("-c", str(POOL_TOKENS), "-np", "4", "--kv-unified")
    with engine(scratch, *flags) as bare, (scratch / "gate.log").open("w") as log:
        start_logging(to=log)
        return asyncio.run(_compare(scratch, bare.url, bare.log_path))


async def _compare(scratch: Path, bare: str, engine_log: Path) -> int:
    async with _gate(scratch, bare, engine_log) as gate, aiohttp.ClientSession() as session:
        bodies = [_story(name, at) for at, name in enumerate(TENANTS)]
        prompts = [await _count(session, bare, body) for body in bodies]
        print(
            f"\nOne engine, one KV cache of {POOL_TOKENS} tokens, 4 slots, each of which advertises all of it.\n\n"
            f"1. Three tenants at once: prompts of {', '.join(map(str, prompts))} tokens, {OUTPUT_TOKENS} tokens of "
            "answer each.\n"
        )
        say("to the bare engine ...")
        without = await asyncio.gather(*(_ask(session, bare, body) for body in bodies))
        say("through kvgate ...")
        guarded = await asyncio.gather(
            *(_ask(session, gate, body, name) for body, name in zip(bodies, TENANTS, strict=True))
        )
        rows = zip(TENANTS, without, guarded, strict=True)
        _table([(f"tenant {name}", direct, through) for name, direct, through in rows])
        long = _story("dan", 3, words=POOL_TOKENS - 160, output_tokens=512)
        size = await _count(session, bare, long)
        print(
            f"\n2. One request: a prompt of {size} tokens asking for 512 more, where {POOL_TOKENS - size} are left.\n"
        )
        say("to the bare engine, then through kvgate ...")
        alone = await _ask(session, bare, long)
        told = await _ask(session, gate, long, "ann")
        _table([("one request", alone, told)])
        print("\n   In full, kvgate's answer:\n")
        print(textwrap.indent(textwrap.fill(told.text.removeprefix("400: "), 116), "   "))
    shown = all("500" in seen.text for seen in without) and all("all 150" in seen.text for seen in guarded)
    shown = shown and alone.text.startswith("200") and told.text.startswith("400")
    print("\n" + ("As promised." if shown else "Not what was promised: please report this output."))
    return 0 if shown else 1


@contextlib.asynccontextmanager
async def _gate(scratch: Path, upstream: str, engine_log: Path) -> AsyncIterator[str]:
    """A gate of this process; its URL."""
    tenants = scratch / "tenants.toml"
    sections = [f'[tenant.{name}]\nkeys_sha256 = ["{_sha256(name)}"]\nqueue_timeout_s = 120' for name in TENANTS]
    tenants.write_text("\n".join(sections), encoding="utf-8")
    flags = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "tenants": tenants,
        "engine": {"url": upstream, "log": engine_log},
        "store": {"data_dir": scratch / "store"},
    }
    urls: asyncio.Queue[str] = asyncio.Queue()
    app = App(load(None, flags, {}), announce=lambda url, _: urls.put_nowait(url))
    running = asyncio.create_task(app.run())
    listening = asyncio.create_task(urls.get())
    try:
        await asyncio.wait({listening, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            listening.cancel()
            running.result()
        yield listening.result()
    finally:
        app.stop()
        await running


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _story(name: str, at: int, words: int = PROMPT_WORDS, output_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    vocabulary = ("river", "stone", "green", "seven", "cloud", "paper", "music", "horse", "lemon", "alpha")
    text = " ".join(vocabulary[(7 * word + word // 10 + at) % 10] for word in range(words))
    content = f"This is {name}. Tell a story with these words: {text}"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": output_tokens, "ignore_eos": True}


async def _count(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with session.post(f"{url}{_CHAT}/input_tokens", json=body) as answer:
        found: int = (await answer.json())["input_tokens"]
        return found


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str = "") -> Seen:
    begun = time.monotonic()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with session.post(url + _CHAT, json=body, headers=headers) as answer:
        told = json.loads(await answer.read())
    if answer.status != 200:
        return Seen(f"{answer.status}: {told['error']['message']}", time.monotonic() - begun)
    got, asked = told["usage"]["completion_tokens"], body["max_tokens"]
    text = f"200: all {asked} tokens" if got == asked else f"200: {got} of {asked}, and not a word"
    return Seen(text, time.monotonic() - begun)


def _table(rows: list[tuple[str, Seen, Seen]]) -> None:
    print(f"   {'':12} {'bare engine':{_COLUMN}} through kvgate")
    for label, bare, gate in rows:
        print(f"   {label:12} {_short(bare):{_COLUMN}} {_short(gate)}")


def _short(seen: Seen) -> str:
    text = seen.text if len(seen.text) <= _COLUMN - 8 else seen.text[: _COLUMN - 12] + "..."
    return f"{text} ({seen.seconds:.1f} s)"


if __name__ == "__main__":
    raise SystemExit(main())
