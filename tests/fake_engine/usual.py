"""What llama-server replies when nothing is wrong, and what it says of a request that is."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.fake_engine.families import EMBEDDINGS, FAMILIES, TOKENIZE, limit_of

if TYPE_CHECKING:
    from tests.fake_engine.families import Family
    from tests.fake_engine.wire import Exchange

COUNTERS = {family.counter: family for family in FAMILIES.values() if family.counter != TOKENIZE}

INVALID = "invalid_request_error"


async def usual(exchange: Exchange) -> None:
    """What llama-server replies."""
    engine, request = exchange.engine, exchange.request
    if engine.asleep and (request.method == "POST" or request.path == "/slots"):
        engine.asleep = False  # from here on, though the model is not loaded yet (seen)
        engine.wakes += 1
        await asyncio.sleep(engine.load_s)
    shown = {"/health": {"status": "ok"}, "/props": engine.props(), "/v1/models": engine.models()}
    if engine.loading:
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
        await exchange.json("503 Service Unavailable", {"error": error})
    elif request.method == "GET" and request.path in shown:
        await exchange.json("200 OK", shown[request.path])
    elif (request.method, request.path) == ("GET", "/slots"):
        await _slots(exchange)
    elif request.method == "POST" and request.path in {TOKENIZE, EMBEDDINGS, *COUNTERS, *FAMILIES}:
        await _posted(exchange)
    else:
        error = {"message": "File Not Found", "type": "not_found_error", "code": 404}
        await exchange.json("404 Not Found", {"error": error})


async def error(exchange: Exchange, status: str, message: str, kind: str, **more: Any) -> None:
    """llama-server's own envelope, the same on all paths."""
    said = {"code": int(status.split(maxsplit=1)[0]), "message": message, "type": kind, **more}
    await exchange.json(status, {"error": said})


async def _slots(exchange: Exchange) -> None:
    if exchange.engine.slots_shown:
        return await exchange.json("200 OK", exchange.engine.slots())
    problem = "This server does not support slots endpoint. Start it with `--slots`"
    return await error(exchange, "501 Not Implemented", problem, "not_supported_error")


async def _posted(exchange: Exchange) -> None:
    engine, path = exchange.engine, exchange.request.path
    if path == EMBEDDINGS and not engine.embeds:
        problem = "This server does not support embeddings. Start it with `--embeddings`"
        await error(exchange, "501 Not Implemented", problem, "not_supported_error")
    elif (body := await _parsed(exchange)) is None:
        return
    elif path == TOKENIZE:
        await exchange.json("200 OK", {"tokens": engine.tokens(body)})
    elif path == EMBEDDINGS:
        await _embed(exchange, body)
    else:
        await _asked(exchange, COUNTERS.get(path) or FAMILIES[path], body)


async def _asked(exchange: Exchange, family: Family, body: dict[str, Any]) -> None:
    if family.part not in body:
        status, missing = family.missing
        await error(exchange, status, missing, "server_error" if status.startswith("500") else INVALID)
    elif (problem := _problem(body)) is not None:
        await error(exchange, "500 Internal Server Error", problem, "server_error")
    elif exchange.request.path in COUNTERS:
        answer = {"input_tokens": exchange.engine.count(body), **family.counted}
        await exchange.json("200 OK", answer)
    else:
        await _infer(exchange, family, body)


async def _parsed(exchange: Exchange) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = json.loads(exchange.request.body)
    except ValueError:
        await error(exchange, "400 Bad Request", "[json.exception.parse_error.101]", INVALID)
        return None
    return body


def _problem(body: dict[str, Any]) -> str | None:
    """A mistake of the client that llama-server takes for its own."""
    for message in body.get("messages", []):
        if "role" not in message:
            return f"Failed to parse messages: Missing 'role' in message: {json.dumps(message)}"
        if isinstance(message.get("content"), list) and "image_url" in {part["type"] for part in message["content"]}:
            return "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
    return None


async def _infer(exchange: Exchange, family: Family, body: dict[str, Any]) -> None:
    engine, prompt = exchange.engine, exchange.engine.prompt_tokens(family, body)
    name, limit = limit_of(family, body)
    if limit < -1:
        problem = f"Field '{name}': Value must be between -1 <= value <= 2147483647, but got {limit}"
        return await error(exchange, "400 Bad Request", problem, INVALID)
    if prompt >= engine.n_ctx:
        problem = (
            f"request ({prompt} tokens) exceeds the available context size ({engine.n_ctx} tokens), try increasing it"
        )
        figures = {"n_prompt_tokens": prompt, "n_ctx": engine.n_ctx}
        return await error(exchange, "400 Bad Request", problem, "exceed_context_size_error", **figures)
    said = engine.says(family, body)
    if not body.get("stream"):
        if engine.word_delay_s:
            await asyncio.sleep(engine.word_delay_s * len(said.words))
        return await exchange.json("200 OK", family.whole(said))
    await exchange.begin_stream()
    for chunk in family.chunks(said):
        await asyncio.sleep(engine.word_delay_s)
        await exchange.chunk(chunk)
    return await exchange.end_stream()


async def _embed(exchange: Exchange, body: dict[str, Any]) -> None:
    given = body["input"] if isinstance(body["input"], list) else [body["input"]]
    tokens = sum(len(exchange.engine.tokens({"content": text, "add_special": True})) for text in given)
    found = [{"embedding": [0.5, -0.5], "index": at, "object": "embedding"} for at in range(len(given))]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"model": exchange.engine.model, "object": "list", "usage": usage, "data": found}
    await exchange.json("200 OK", answer)
