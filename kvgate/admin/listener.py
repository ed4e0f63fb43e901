"""The operator's listener: health, readiness, metrics, and the state of engine and ledger."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvgate.metrics import CONTENT_TYPE
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvgate.metrics import Metrics
    from kvgate.store.reports import Report

CHAT = "/v1/chat/completions"
"""What is explained where no path is named."""


def admin_app(
    metrics: Metrics,
    *,
    problems: Callable[[], list[str]],
    warnings: Callable[[], list[str]],
    status: Callable[[], dict[str, Any]],
    engine: Callable[[], dict[str, Any]],
    refresh: Callable[[], Awaitable[None]],
    explain: Callable[[str, str, bytes], Awaitable[dict[str, Any]]],
    reports: Callable[[str], Awaitable[tuple[Report, ...]]],
    body_bytes_max: int,
) -> web.Application:
    """The operator's application.

    `/healthz`: the process answers. `/readyz`: 200 while requests are served, else 503; with the sentences
    that say why not, the warnings, and the engine's state. `/metrics`: for Prometheus. `/status`: everything, as
    JSON. The last two `refresh` first, which a store that hangs can delay by no more than its timeout.
    `POST /explain?tenant=NAME&path=PATH`: the verdict that the body would get; 404 for an unknown tenant or path.
    `GET /report/ID`: what is kept of the requests with this id, the last one first; 404 where nothing is.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        found = problems()
        body = {"ready": not found, "problems": found, "warnings": warnings(), "engine": engine()}
        return web.json_response(body, status=503 if found else 200)

    async def exposition(_: web.Request) -> web.Response:
        await refresh()
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def everything(_: web.Request) -> web.Response:
        await refresh()
        return web.json_response(status(), dumps=lambda value: json.dumps(value, default=_plain, indent=2) + "\n")

    async def explanation(request: web.Request) -> web.Response:
        tenant, path = request.query.get("tenant", ""), request.query.get("path", CHAT)
        try:
            found = await explain(tenant, path, await request.read())
        except LookupError as error:
            return web.json_response({"problem": str(error)}, status=404)
        return web.json_response(found)

    async def report(request: web.Request) -> web.Response:
        try:
            found = await reports(request.match_info["id"])
        except StoreUnavailable as error:
            return web.json_response({"problem": str(error)}, status=503)
        problem = (
            "nothing is kept of a request with this id: it is the x-request-id of an answer, for [report] keep_s"
        )
        return web.json_response({"reports": found} if found else {"problem": problem}, status=200 if found else 404)

    app = web.Application(client_max_size=body_bytes_max)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    app.router.add_get("/status", everything)
    app.router.add_post("/explain", explanation)
    app.router.add_get("/report/{id}", report)
    return app


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is not for the status page")
