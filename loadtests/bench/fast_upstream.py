"""A llama-server that answers inference at once and hands every other question to a real one.

    python -m loadtests.bench.fast_upstream --engine http://127.0.0.1:8080

So a gate in front discovers, probes and counts as it would in earnest, and what is measured behind it costs next to
nothing. It prints its URL as one JSON line. `POST /bench/labels` with `{"LABEL": {"prompt_tokens": N, "chunks": N,
"pace_s": S}}` tells how to answer chats that hold `bench-LABEL ` somewhere near their end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
import urllib.error
import urllib.request
from typing import Any, Final

import httptools

CHAT: Final = "/v1/chat/completions"
COUNTER: Final = f"{CHAT}/input_tokens"
N_CTX: Final = 1_048_576
SLOTS: Final = 512
_LABEL = re.compile(rb"bench-([a-z0-9]+) ")
_TAIL_BYTES: Final = 2048
_BURST: Final = 32
"""Chunks written before others have their turn, where no pace is set."""


class Answers:
    """What is said to each label, made once."""

    def __init__(self, engine_url: str) -> None:
        self.engine_url = engine_url
        self._whole: dict[str, bytes] = {}
        self.streams: dict[str, tuple[int, float]] = {}
        self.ends: dict[str, bytes] = {}

    def learn(self, labels: dict[str, dict[str, Any]]) -> None:
        """Make the answers to these labels."""
        for label, told in labels.items():
            chunks = int(told["chunks"])
            usage = {
                "completion_tokens": chunks,
                "prompt_tokens": told["prompt_tokens"],
                "total_tokens": told["prompt_tokens"] + chunks,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            timings = {"cache_n": 0, "prompt_n": told["prompt_tokens"], "predicted_n": chunks}
            common = {"created": 1, "model": "bench", "system_fingerprint": "b1", "id": "chatcmpl-bench"}
            message = {"role": "assistant", "content": "It is what it is. " * 12}
            choice = {"finish_reason": "stop", "index": 0, "message": message}
            told_whole = {"choices": [choice], **common, "object": "chat.completion", "usage": usage}
            self._whole[label] = _whole("200 OK", json.dumps({**told_whole, "timings": timings}).encode())
            last = {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}], **common}
            counted = {"choices": [], **common, "usage": usage, "timings": timings}
            events = b"".join(
                b"data: " + json.dumps({**event, "object": "chat.completion.chunk"}).encode() + b"\n\n"
                for event in (last, counted)
            )
            self.ends[label] = _chunk(events) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            self.streams[label] = (chunks, float(told["pace_s"]))

    def whole(self, label: str) -> bytes:
        """A whole answer, head and body."""
        return self._whole.get(label) or _whole("400 Bad Request", b'{"error":{"message":"no such label"}}')

    async def asked_of_the_engine(self, method: str, path: str, body: bytes) -> bytes:
        """The real engine's answer, with a window that no benchmark fills."""
        if (method, path) == ("GET", "/slots"):
            idle = [{"id": at, "n_ctx": N_CTX, "speculative": False, "is_processing": False} for at in range(SLOTS)]
            return _whole("200 OK", json.dumps(idle).encode())
        status, found = await asyncio.to_thread(_ask, self.engine_url + path, method, body)
        if status == 200 and (method, path) == ("GET", "/props"):
            props = json.loads(found)
            props["default_generation_settings"]["n_ctx"], props["total_slots"] = N_CTX, SLOTS
            found = json.dumps(props).encode()
        elif status == 200 and (method, path) == ("GET", "/v1/models"):
            models = json.loads(found)
            for model in models.get("data", []):
                model.setdefault("meta", {})["n_ctx"] = N_CTX
            found = json.dumps(models).encode()
        return _whole(f"{status} Status", found)


def _ask(url: str, method: str, body: bytes) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body if method == "POST" else None, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _whole(status: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Accel-Buffering: no\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def delta(stamp_s: float) -> bytes:
    """One event of a stream, with the moment at which it was sent as its text."""
    return (
        b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"%015.6f"}}],"created":1,'
        b'"id":"chatcmpl-bench","model":"bench","system_fingerprint":"b1","object":"chat.completion.chunk"}\n\n'
        % stamp_s
    )


class Link(asyncio.Protocol):
    """One connection; requests on it are answered in their order."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = ""
        self._body: list[bytes] = []
        self._jobs: set[asyncio.Task[None]] = set()
        self._label = ""
        self._left = 0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connects."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Who hangs up gets no more."""
        del exc
        self._left, self._transport = 0, None

    def pause_writing(self) -> None:
        """The reader is behind."""
        self._paused = True

    def resume_writing(self) -> None:
        """It caught up."""
        self._paused = False
        if self._left and not self._answers.streams[self._label][1]:
            self._burst()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.close()

    # -- the parser's side

    def on_message_begin(self) -> None:
        """A request begins."""
        self._path, self._body = "", []

    def on_url(self, url: bytes) -> None:
        """Its path."""
        self._path += url.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """Some of its body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Answer it."""
        if self._path != CHAT:
            method, body = self._parser.get_method().decode(), b"".join(self._body)
            job = self._loop.create_task(self._other(method, self._path, body))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        found = _LABEL.search(body, max(len(body) - _TAIL_BYTES, 0)) or _LABEL.search(body)
        label = found[1].decode() if found else ""
        if re.search(rb'"stream": ?true', body) and label in self._answers.streams:
            self._label, self._left = label, self._answers.streams[label][0]
            self._write(_STREAM_HEAD)
            self._next()
        else:
            self._write(self._answers.whole(label))

    async def _other(self, method: str, path: str, body: bytes) -> None:
        if path == "/bench/labels":
            self._answers.learn(json.loads(body))
            self._write(_whole("200 OK", b"{}"))
        else:
            self._write(await self._answers.asked_of_the_engine(method, path, body))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # -- streams

    def _next(self) -> None:
        pace_s = self._answers.streams[self._label][1]
        if not pace_s:
            self._burst()
        elif self._left:
            self._write(_chunk(delta(time.monotonic())))
            self._left -= 1
            self._loop.call_later(pace_s, self._next)
        else:
            self._write(self._answers.ends[self._label])

    def _burst(self) -> None:
        for _ in range(min(_BURST, self._left)):
            self._write(_chunk(delta(time.monotonic())))
            self._left -= 1
            if self._paused:
                return
        if self._left:
            self._loop.call_soon(self._burst)
        else:
            self._write(self._answers.ends[self._label])


async def serve(engine_url: str) -> None:
    """Serve until killed."""
    answers = Answers(engine_url)
    server = await asyncio.get_running_loop().create_server(lambda: Link(answers), "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    async with server:
        await server.serve_forever()


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description="A fast engine over a real one.")
    parser.add_argument("--engine", required=True, metavar="URL", help="a llama-server, for all but chats")
    asyncio.run(serve(parser.parse_args().engine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
