"""The operator's listener of one gate: health, readiness, metrics, and the state of engine and ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvgate.admin.routes import Operator, operators_app
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
    """The operator's application; its paths are those of `admin.routes.operators_app`.

    Metrics and status `refresh` first, which a store that hangs can delay by no more than its timeout.
    """

    async def readiness() -> dict[str, Any]:
        found = problems()
        return {"ready": not found, "problems": found, "warnings": warnings(), "engine": engine()}

    async def exposition() -> bytes:
        await refresh()
        return metrics.exposition()

    async def everything() -> dict[str, Any]:
        await refresh()
        return status()

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

    return operators_app(Operator(readiness, exposition, everything, explanation, report), body_bytes_max)
