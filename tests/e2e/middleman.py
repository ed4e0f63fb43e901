"""A man in the middle that changes what passes: the engine that is not quite what it says it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self


class Middleman:
    """Passes whole requests on to `upstream`; `asked` and `answered` may change a body, by its path."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.asked: Callable[[str, bytes], bytes] = lambda path, body: body
        self.answered: Callable[[str, bytes], bytes] = lambda path, body: body
        self.url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = self.asked(request.path, await request.read())
        headers = {"Content-Type": "application/json"} if body else {}
        url = self._upstream + request.path_qs
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            found = self.answered(request.path, await answer.read())
            return web.Response(status=answer.status, body=found, content_type="application/json")
