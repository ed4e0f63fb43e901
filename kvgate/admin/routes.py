"""The paths of the operator's listener, once for a gate of one process and for several workers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvgate.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass(frozen=True, slots=True)
class Operator:
    """Who answers the operator.

    Args:
        readiness: with `ready`, `problems` and `warnings`.
        exposition: metrics in Prometheus' format.
        status: everything that is known.
        explain: of `/explain`.
        report: of `/report/{id}`.
    """

    readiness: Callable[[], Awaitable[dict[str, Any]]]
    exposition: Callable[[], Awaitable[bytes]]
    status: Callable[[], Awaitable[dict[str, Any]]]
    explain: Callable[[web.Request], Awaitable[web.Response]]
    report: Callable[[web.Request], Awaitable[web.Response]]


def operators_app(operator: Operator, body_bytes_max: int) -> web.Application:
    """The operator's application.

    `/healthz`: the process answers. `/readyz`: 200 while requests are served, else 503; with the sentences
    that say why not, the warnings, and the engine's state. `/metrics`: for Prometheus. `/status`: everything, as
    JSON. `POST /explain?tenant=NAME&path=PATH`: the verdict that the body would get; 404 for an unknown tenant or
    path. `GET /report/ID`: what is kept of the requests with this id, the last one first; 404 where nothing is.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        body = await operator.readiness()
        return web.json_response(body, status=200 if body["ready"] else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=await operator.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def status(_: web.Request) -> web.Response:
        return web.Response(
            text=json.dumps(await operator.status(), default=_plain, indent=2) + "\n", content_type="application/json"
        )

    app = web.Application(client_max_size=body_bytes_max)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/status", status)
    app.router.add_post("/explain", operator.explain)
    app.router.add_get("/report/{id}", operator.report)
    return app


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is not for the status page")
