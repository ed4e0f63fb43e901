"""The operator's listener of several worker processes: asks each on its own socket, and answers as one gate."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web

from kvgate.admin.routes import Operator, operators_app
from kvgate.metrics import merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ASK_TIMEOUT_S: Final = 5.0

NOBODY: Final = (503, b'{"problem": "no worker answers"}')

_LASTING: Final = re.compile(r"\b\d+ (?:s|min|h)\b")
"""A stretch of time, as `core.engine_state.lasting` writes it."""

SUMMED: Final = ("in_flight", "upstream_connections", "tasks")
"""Figures of `/status` that each worker has for itself; the others are of the engine and the store they share."""


async def ask(socket: Path, path: str) -> bytes | None:
    """One worker's answer, whatever its status; None where it does not answer."""
    found = await send(socket, "GET", path)
    return None if found is None else found[1]


async def send(socket: Path, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes] | None:
    """Status and body of one worker's answer; None where it does not answer."""
    connector = aiohttp.UnixConnector(str(socket))
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, f"http://worker{path}", data=body) as answer,
        ):
            return answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def merged_app(workers: Mapping[int, Path], body_bytes_max: int) -> web.Application:
    """The operator's application over these workers, by number; see `admin.routes.operators_app`.

    A worker that does not answer is a warning as long as another serves.
    """

    async def everyone(path: str) -> dict[int, bytes | None]:
        answers = await asyncio.gather(*(ask(socket, path) for socket in workers.values()))
        return dict(zip(workers, answers, strict=True))

    async def readiness() -> dict[str, Any]:
        return merged_readiness(_documents(await everyone("/readyz")))

    async def exposition() -> bytes:
        return merged([answer for answer in (await everyone("/metrics")).values() if answer is not None])

    async def status() -> dict[str, Any]:
        return merged_status(_documents(await everyone("/status")))

    async def explain(request: web.Request) -> web.Response:
        """Any worker's word: they share tenants, engine and ledger."""
        body = await request.read()
        for socket in workers.values():
            if (found := await send(socket, "POST", request.raw_path, body)) is not None:
                return _passed_on(*found)
        return _passed_on(*NOBODY)

    async def report(request: web.Request) -> web.Response:
        """Each worker asks the store; what one has not written yet, that one alone finds."""
        answers = await asyncio.gather(*(send(socket, "GET", request.raw_path) for socket in workers.values()))
        return _passed_on(*min((answer for answer in answers if answer is not None), default=NOBODY))

    return operators_app(Operator(readiness, exposition, status, explain, report), body_bytes_max)


def _passed_on(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def merged_readiness(answers: Mapping[int, Any]) -> dict[str, Any]:
    """Ready while every worker that answers is, and one does; what several say is said once.

    Of an engine that several found in the same state the first one tells: another may have met it in other words,
    as an engine that dies refuses one connection and breaks the next.
    """
    heard = [answer for answer in answers.values() if answer is not None]
    lives = [_life(answer) for answer in heard]
    first = {life["state"]: life for life in reversed(lives)}
    problems, warnings = (
        _once(
            first[life["state"]]["sentence"] if sentence == life["sentence"] else sentence
            for answer, life in zip(heard, lives, strict=True)
            for sentence in answer[kind]
        )
        for kind in ("problems", "warnings")
    )
    silent = ", ".join(str(number) for number, answer in answers.items() if answer is None)
    if not heard:
        problems = ["no worker answers"]
    elif silent:
        warnings.append(f"worker {silent} of {len(answers)} does not answer; it is being started again")
    rest = {name: value for answer in heard[:1] for name, value in answer.items()}
    return {**rest, "ready": not problems, "problems": problems, "warnings": warnings, "workers": len(heard)}


def merged_status(answers: Mapping[int, Any]) -> dict[str, Any]:
    """What the workers share, as the first tells it, and the sums of what each has for itself."""
    heard = {number: answer for number, answer in answers.items() if answer is not None}
    body: dict[str, Any] = {name: value for answer in list(heard.values())[:1] for name, value in answer.items()}
    for name in SUMMED:
        body[name] = sum(answer.get(name, 0) for answer in heard.values())
    readiness = merged_readiness(answers)
    body |= {name: readiness[name] for name in ("problems", "warnings")}
    body.pop("pid", None)
    body["workers"] = {
        number: None if answer is None else {name: answer.get(name) for name in ("pid", *SUMMED)}
        for number, answer in answers.items()
    }
    return body


def _life(answer: Mapping[str, Any]) -> Any:
    """The engine's state: under its own name in `/status`, where `engine` has the figures."""
    return answer["engine_life" if "engine_life" in answer else "engine"]


def _documents(answers: Mapping[int, bytes | None]) -> dict[int, Any]:
    return {number: None if answer is None else json.loads(answer) for number, answer in answers.items()}


def _once(sentences: Iterable[str]) -> list[str]:
    """What several say is said once, in the first one's words: each has a clock of its own."""
    said: dict[str, str] = {}
    for sentence in sentences:
        said.setdefault(_LASTING.sub("", sentence), sentence)
    return list(said.values())
