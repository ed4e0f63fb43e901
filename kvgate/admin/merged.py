"""The operator's listener of several worker processes: asks each on its own socket, and answers as one gate."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web

from kvgate.metrics import CONTENT_TYPE, merged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

ASK_TIMEOUT_S: Final = 5.0

NOBODY: Final = (503, b'{"problem": "no worker answers"}')

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
    """The operator's application over these workers, by number; see `admin.listener.admin_app`.

    A worker that does not answer is a warning as long as another serves.
    """

    async def everyone(path: str) -> dict[int, bytes | None]:
        answers = await asyncio.gather(*(ask(socket, path) for socket in workers.values()))
        return dict(zip(workers, answers, strict=True))

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        body = merged_readiness(_documents(await everyone("/readyz")))
        return web.json_response(body, status=200 if body["ready"] else 503)

    async def exposition(_: web.Request) -> web.Response:
        found = [answer for answer in (await everyone("/metrics")).values() if answer is not None]
        return web.Response(body=merged(found), headers={"Content-Type": CONTENT_TYPE})

    async def status(_: web.Request) -> web.Response:
        body = merged_status(_documents(await everyone("/status")))
        return web.json_response(body, dumps=lambda value: json.dumps(value, indent=2) + "\n")

    async def explain(request: web.Request) -> web.Response:
        """Any worker's word: they share tenants, engine and ledger."""
        body = await request.read()
        for socket in workers.values():
            if (found := await send(socket, "POST", request.raw_path, body)) is not None:
                return web.Response(status=found[0], body=found[1], content_type="application/json")
        return web.json_response({"problem": "no worker answers"}, status=503)

    app = web.Application(client_max_size=body_bytes_max)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    app.router.add_get("/status", status)
    app.router.add_post("/explain", explain)
    app.router.add_get("/report/{id}", _best_answer(workers))
    return app


def _best_answer(workers: Mapping[int, Path]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Each worker asks the store for a report; what one has not written yet, that one alone finds."""

    async def answer(request: web.Request) -> web.Response:
        answers = await asyncio.gather(*(send(socket, "GET", request.raw_path) for socket in workers.values()))
        status, body = min((answer for answer in answers if answer is not None), default=NOBODY)
        return web.Response(status=status, body=body, content_type="application/json")

    return answer


def merged_readiness(answers: Mapping[int, Any]) -> dict[str, Any]:
    """Ready while every worker that answers is, and one does; what several say is said once."""
    heard = [answer for answer in answers.values() if answer is not None]
    problems = _once(problem for answer in heard for problem in answer["problems"])
    warnings = _once(warning for answer in heard for warning in answer["warnings"])
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


def _documents(answers: Mapping[int, bytes | None]) -> dict[int, Any]:
    return {number: None if answer is None else json.loads(answer) for number, answer in answers.items()}


def _once(sentences: Any) -> list[str]:
    return list(dict.fromkeys(sentences))
