"""The plainest proxy that aiohttp makes: every request goes to one place, every byte comes back.

python -m loadtests.bench.passthrough --upstream URL
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import aiohttp
from aiohttp import web

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})


async def serve(upstream: str) -> None:
    """Serve until killed."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:

        async def passed_on(request: web.Request) -> web.StreamResponse:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
            body = await request.read()
            async with session.request(
                request.method, upstream + request.path_qs, data=body, headers=headers
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", passed_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
        await asyncio.Event().wait()


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description="A passthrough made of aiohttp alone.")
    parser.add_argument("--upstream", required=True, metavar="URL")
    asyncio.run(serve(parser.parse_args().upstream))
    return 0


if __name__ == "__main__":
    sys.exit(main())
