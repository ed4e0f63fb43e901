"""Engines whose prefix reuse corrupts, as men in the middle over a real one.

Each changes the prompt where a reuse bug would have changed the KV cache, and tells the counts that an engine unaware
of it would tell. So the engine computes honestly what it would say with a wrong cache.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from typing import Self

TURN = 1
"""SmolLM2's token for the beginning of a message."""

REUSED_MIN = 12
"""A beginning of so many tokens is reused; the head that the template gives every chat is shorter."""

Cold = dict[bytes, bytes]


def common(one: list[int], other: list[int]) -> int:
    at = 0
    while at < min(len(one), len(other)) and one[at] == other[at]:
        at += 1
    return at


class Honest:
    """Passes everything on, and remembers what may lie in a slot.

    `cold`: answers to requests without reuse, which are the same for each of these engines: asked once for all.
    """

    def __init__(self, upstream: str, cold: Cold | None = None) -> None:
        self._upstream = upstream
        self._cold = cold
        self.earlier: list[list[int]] = []
        self.corrupted = 0
        self.url = ""

    def corrupt(self, prompt: list[int], other: list[int], reused: int) -> list[int]:
        """What the slot holds in truth, where `reused` tokens are taken over from `other`."""
        return prompt

    def drop(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """What of a conversation with reuse is left."""
        return messages

    def told(self, cached: int, prompt: int) -> int:
        """How many tokens it says that it reused."""
        return cached

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def flush(self) -> None:
        """Leave nothing of earlier runs in the two slots."""
        for slot in (0, 1):
            body = {"prompt": [slot + 30, 31, 32], "id_slot": slot, "n_predict": 1, "cache_prompt": False}
            await self._send("POST", "/completion", json.dumps(body).encode())

    async def _send(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body else {}
        url = self._upstream + path
        async with self._session.request(method, url, data=body or None, headers=headers) as answer:
            return answer.status, await answer.read()

    async def _pass_on(self, request: web.Request) -> web.Response:
        status, body = await self._answer(request.method, request.path, await request.read())
        return web.Response(status=status, body=body, content_type="application/json")

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path not in {"/completion", "/v1/chat/completions"}:
            return await self._send(method, path, body)
        asked = json.loads(body)
        if asked["cache_prompt"]:
            return await (self._text(asked) if "prompt" in asked else self._chat(asked))
        if "prompt" in asked:
            self.earlier.append(asked["prompt"])
        if self._cold is None:
            return await self._send(method, path, body)
        if body not in self._cold:
            self._cold[body] = (await self._send(method, path, body))[1]
        return 200, self._cold[body]

    async def _text(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        prompt = asked["prompt"]
        others = [one for one in self.earlier if REUSED_MIN <= common(one, prompt) < len(prompt) - 1]
        other = max(reversed(others), key=lambda one: common(one, prompt), default=None)
        self.earlier.append(prompt)
        held = prompt if other is None else self.corrupt(prompt, other, common(other, prompt))
        status, body = await self._send("POST", "/completion", json.dumps(asked | {"prompt": held}).encode())
        answer = json.loads(body)
        cached = answer["timings"]["cache_n"]
        if held != prompt and other is not None:
            self.corrupted += 1
            cached = common(other, prompt)
        return status, self._as_told(answer, cached, len(prompt))

    async def _chat(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        path, counter = "/v1/chat/completions", "/v1/chat/completions/input_tokens"
        held = asked | {"messages": self.drop(asked["messages"])}
        status, body = await self._send("POST", path, json.dumps(held).encode())
        whole = json.loads((await self._send("POST", counter, json.dumps(asked).encode()))[1])["input_tokens"]
        answer = json.loads(body)
        timings = answer["timings"]
        missing = whole - timings["cache_n"] - timings["prompt_n"]
        self.corrupted += held != asked
        return status, self._as_told(answer, timings["cache_n"] + missing, whole)

    def _as_told(self, answer: dict[str, Any], cached: int, prompt: int) -> bytes:
        told = self.told(cached, prompt)
        answer["timings"] |= {"cache_n": told, "prompt_n": prompt - told}
        return json.dumps(answer).encode()


class Stale(Honest):
    """Answers from the conversation that had the slot before: its cells stay where the new prompt's should be."""

    def corrupt(self, prompt: list[int], other: list[int], reused: int) -> list[int]:
        until = min(len(other), len(prompt) - 3)  # the answer's opening is always computed
        return prompt[:reused] + other[reused:until] + prompt[max(reused, until) :]


class DroppedTurn(Honest):
    """Loses a turn in the middle of a conversation, question and answer."""

    def drop(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return messages[:1] + messages[3:] if len(messages) > 4 else messages


class NeighboursNeedle(Honest):
    """Keeps the neighbour's messages in front of the new ones."""

    def corrupt(self, prompt: list[int], other: list[int], reused: int) -> list[int]:
        turns = [at for at, token in enumerate(other) if token == TURN]
        return other[: turns[-1]] + prompt[_turn_before(prompt, reused) :] if turns else prompt


def _turn_before(prompt: list[int], at: int) -> int:
    return max(place for place, token in enumerate(prompt[: at + 1]) if token == TURN)


class Behind200(Honest):
    """Holds other words in the last of more than 200 reused cells."""

    def corrupt(self, prompt: list[int], other: list[int], reused: int) -> list[int]:
        return _mixed(prompt, reused) if reused > 200 else prompt


class SecondReuse(Honest):
    """Is right the first time a beginning is reused, and wrong the second."""

    def __init__(self, upstream: str, cold: Cold | None = None) -> None:
        super().__init__(upstream, cold)
        self._times: Counter[tuple[int, ...]] = Counter()

    def corrupt(self, prompt: list[int], other: list[int], reused: int) -> list[int]:
        if reused < 60:
            return prompt
        beginning = tuple(prompt[:60])
        self._times[beginning] += 1
        return _mixed(prompt, reused) if self._times[beginning] == 2 else prompt


def _mixed(prompt: list[int], reused: int) -> list[int]:
    """The last 40 reused cells hold what stood 40 before them."""
    return prompt[: reused - 40] + prompt[reused - 80 : reused - 40] + prompt[reused:]


class WrongCount(Honest):
    """Answers well, and says that it reused more than it can have."""

    def told(self, cached: int, prompt: int) -> int:
        self.corrupted += 1
        return prompt - 1


class NegativeCount(Honest):
    """Answers well, and counts backwards."""

    def told(self, cached: int, prompt: int) -> int:
        self.corrupted += 1
        return -cached


class NeverReuses(Honest):
    """Drops the wish for reuse."""

    async def _text(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        return await super()._text(asked | {"cache_prompt": False})

    async def _chat(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        return await super()._chat(asked | {"cache_prompt": False})


class AlwaysReuses(Honest):
    """Drops the wish for none, as llama.cpp does on /v1/messages."""

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        return await super()._answer(method, path, body.replace(b'"cache_prompt": false', b'"cache_prompt": true'))


class Constant(Honest):
    """Gives every token the same probability: whatever it holds in its cache, nobody could see it."""

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        status, found = await super()._answer(method, path, body)
        if path == "/completion":
            answer = json.loads(found)
            for one in answer["completion_probabilities"]:
                one["logprob"] = -1.0
            found = json.dumps(answer).encode()
        return status, found
