"""Asks a chat endpoint over a plain socket client, so that a test sees just what was sent and what came."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

WORDS = ("alpha", "river", "stone", "green", "seven", "cloud", "paper", "music", "horse", "lemon")


@dataclass
class Answer:
    """An answer's status, headers and body."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, the end marker as the string it is."""
        data = [line[6:] for line in self.raw.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]


def chat(content: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


async def post(
    url: str,
    body: Any,
    *,
    key: str | None = "sk-demo",
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
) -> Answer:
    """Post a body (bytes as they are, anything else as JSON)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
        **(headers or {}),
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=150)) as session,
        session.post(url + path, data=data, headers=sent) as answer,
    ):
        raw = await answer.read()
        return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, raw)


async def count(engine_url: str, body: dict[str, Any]) -> int:
    """The engine's own count of a chat body's prompt tokens."""
    answer = await post(engine_url, body, key=None, path="/v1/chat/completions/input_tokens")
    found: int = answer.json["input_tokens"]
    return found


async def prompt_of(engine_url: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """A chat body whose prompt is exactly `tokens` long on this engine; a body of its own for each `seed`."""
    seed = fields.pop("variant", 0)
    words = [WORDS[(at * 7 + at // 10 + seed) % len(WORDS)] for at in range(tokens)]
    low, high = 1, tokens
    while low < high:
        middle = (low + high + 1) // 2
        if await count(engine_url, chat(" ".join(words[:middle]))) <= tokens:
            low = middle
        else:
            high = middle - 1
    body = chat(" ".join(words[:low]), **fields)
    missing = tokens - await count(engine_url, body)
    body["messages"][0]["content"] += " a" * missing
    found = await count(engine_url, body)
    if found != tokens:
        raise AssertionError(f"wanted a prompt of {tokens} tokens, made one of {found}")
    return body
