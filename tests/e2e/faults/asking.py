"""One request of each dialect over a plain socket, and what its client would make of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from dataclasses import dataclass
from typing import Any, Final, Self

from kvgate.core.reason import Reason
from tests.fake_engine import CHAT, COMPLETION, COMPLETIONS, MESSAGES, RESPONSES

ANSWER_TIMEOUT_S: Final = 60

PATHS: Final = {
    "openai_chat": CHAT,
    "openai_completions": COMPLETIONS,
    "openai_responses": RESPONSES,
    "anthropic_messages": MESSAGES,
    "llamacpp_completion": COMPLETION,
}
PROMPT: Final = "one two three " * 7
PARTS: Final[dict[str, dict[str, Any]]] = {
    "openai_chat": {"messages": [{"role": "user", "content": PROMPT}]},
    "openai_completions": {"prompt": PROMPT},
    "openai_responses": {"input": PROMPT},
    "anthropic_messages": {"messages": [{"role": "user", "content": PROMPT}]},
    "llamacpp_completion": {"prompt": PROMPT},
}
_NUMBERS: Final = itertools.count(1)
REASONS: Final = {reason.label: reason for reason in Reason}


@dataclass(frozen=True)
class Ask:
    """What is asked: a dialect, streamed or whole."""

    dialect: str
    stream: bool

    @property
    def path(self) -> str:
        return PATHS[self.dialect]

    @property
    def body(self) -> bytes:
        """A body of the same size each time, and of its own words: a count that is known is not asked for again."""
        limit = {"openai_responses": "max_output_tokens", "llamacpp_completion": "n_predict"}
        body = {**PARTS[self.dialect], "stream": self.stream, limit.get(self.dialect, "max_tokens"): 8}
        return json.dumps(body).replace("two", f"two{next(_NUMBERS)}", 1).encode()


@dataclass(frozen=True)
class Answer:
    """An answer as it stood on the wire; `cut`: the connection ended before it was complete."""

    status: int
    headers: dict[str, str]
    body: bytes
    cut: bool


class Client:
    """One connection to the gate; leaving its context hangs up."""

    def __init__(self, url: str, *, receive_bytes: int | None = None) -> None:
        self._port = int(url.rpartition(":")[2])
        self._receive_bytes = receive_bytes

    async def __aenter__(self) -> Self:
        sock = socket.socket()
        if self._receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=2**16)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def send(self, ask: Ask) -> None:
        await self.post(ask.path, ask.body)

    async def post(
        self, path: str, body: bytes, *, key: str = "sk-demo", request_id: str = "", upto: int | None = None
    ) -> None:
        """Send a request, or so many bytes of its body."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Type: application/json"]
        lines += [f"x-request-id: {request_id}"] if request_id else []
        lines += [f"Content-Length: {len(body)}", "", ""]
        self._writer.write("\r\n".join(lines).encode() + body[:upto])

    async def hear(self) -> None:
        """Wait for the first bytes of an answer; they are still there to be received."""
        while not self._reader._buffer and not self._reader.at_eof():  # type: ignore[attr-defined]
            await self._reader._wait_for_data("hear")  # type: ignore[attr-defined]

    async def hear_more(self, seconds: float) -> None:
        """Read on for so long, or to the connection's end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await self._reader.read(1024):
                    pass

    async def read_head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:-2])
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields}

    async def receive(self) -> Answer:
        """The whole answer."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            try:
                status, headers = await self.read_head()
            except (asyncio.IncompleteReadError, ConnectionError):
                return Answer(0, {}, b"", cut=True)
            body = bytearray()
            try:
                if "content-length" in headers:
                    body += await self._reader.readexactly(int(headers["content-length"]))
                else:
                    while size := int(await self._reader.readuntil(b"\r\n"), 16):
                        body += (await self._reader.readexactly(size + 2))[:-2]
            except (asyncio.IncompleteReadError, ConnectionError):
                return Answer(status, headers, bytes(body), cut=True)
            return Answer(status, headers, bytes(body), cut=False)


# -- what a client makes of it


def view(ask: Ask, answer: Answer, text: str | None = None) -> str:
    """The answer in a few words: the status and reason of an error, `200` for the whole text, and what is between.

    Without `text` any text is whole that has its end.
    """
    if answer.cut:
        return "cut"
    if answer.status != 200:
        reason = error_of(ask, json.loads(answer.body))
        late = answer.status in {429, 503} and "retry-after" not in answer.headers
        return f"{answer.status} {reason}" + (" without retry-after" if late else "")
    if not ask.stream:
        return _whole(ask, answer.body, text)
    return _stream(ask, answer.body, text)


def _whole(ask: Ask, body: bytes, text: str | None) -> str:
    try:
        found = json.loads(body)
    except ValueError:
        return "200, unreadable"
    found = found[0] if isinstance(found, list) else found  # several answers, in llama.cpp's own form
    if found.get("error") is not None:
        return "200 with an error in it"
    match ask.dialect:
        case "openai_chat":
            said = found["choices"][0]["message"]["content"]
        case "openai_completions":
            said = found["choices"][0]["text"]
        case "openai_responses":
            said = found["output"][0]["content"][0]["text"]
        case "anthropic_messages":
            said = found["content"][0]["text"]
        case _:
            said = found["content"]
    return "200" if text in {said, None} else "200, another text"


def _stream(ask: Ask, body: bytes, text: str | None) -> str:
    try:
        events = [_event(block) for block in body.decode().split("\n\n")[:-1] if not block.startswith(":")]
    except ValueError:
        return "200, unreadable"
    said, marks, reason = "", 0, None
    for name, found in events:
        if found == "[DONE]":
            marks += 1
        elif (error := _error_event(ask, name, found)) is not None:
            if marks or reason is not None:
                return "200, an error behind the end"
            reason = error_of(ask, error, in_stream=True)
        elif reason is not None:
            return "200, more behind an error"
        else:
            said += _piece(ask, found)
            marks += _ends(ask, found)
    ends_well = body.endswith(b"\n\n") and (
        events[-1][1] == "[DONE]" if ask.dialect in {"openai_chat", "openai_completions"} else True
    )
    if reason is not None:
        whole = ends_well and (text is None or text.startswith(said))
        return f"200, then {reason}" if whole else f"200, then {reason}, broken"
    return "200" if text in {said, None} and marks and ends_well else "200, broken"


def _event(block: str) -> tuple[str | None, Any]:
    """Name and data of an event; every one must be whole."""
    name, data = None, None
    for line in block.split("\n"):
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data = value if value == "[DONE]" else json.loads(value)
        else:
            raise ValueError(line)
    if isinstance(data, dict) and name is not None and data.get("type") != name:
        raise ValueError("an event's name and its type differ")
    return name, data


def _error_event(ask: Ask, name: str | None, found: Any) -> Any:
    if ask.dialect in {"openai_responses", "anthropic_messages"}:
        return found if name == "error" else None
    return found if found.get("error") is not None else None


def _piece(ask: Ask, found: Any) -> str:
    """The text in an event."""
    piece: Any = ""
    match ask.dialect:
        case "openai_chat":
            piece = found["choices"][0]["delta"].get("content") if found["choices"] else ""
        case "openai_completions":
            piece = found["choices"][0]["text"] if found["choices"] else ""
        case "openai_responses":
            piece = found["delta"] if found["type"] == "response.output_text.delta" else ""
        case "anthropic_messages":
            piece = found["delta"]["text"] if found["type"] == "content_block_delta" else ""
        case _:
            piece = found["content"]
    return piece or ""


def _ends(ask: Ask, found: Any) -> bool:
    match ask.dialect:
        case "openai_responses" | "anthropic_messages":
            return found["type"] in {"response.completed", "message_stop"}
        case "llamacpp_completion":
            return bool(found["stop"])
        case _:
            return False


# -- errors in each dialect's own shape


def error_of(ask: Ask, found: Any, *, in_stream: bool = False) -> str:
    """The reason that an error tells, where it has the shape that the dialect's clients read."""
    try:
        if ask.dialect == "openai_responses" and in_stream:
            return _responses_event(found)
        reason = REASONS[found["error"]["reason"]]
        shapes = {"openai": _openai, "anthropic": _anthropic, "llamacpp": _llamacpp}
        fits = shapes[ask.dialect.partition("_")[0]](found, reason)
    except (KeyError, TypeError):
        return "an error of another shape"
    return reason.label if fits else "an error of another shape"


def _openai(found: Any, reason: Reason) -> bool:
    error, row = found["error"], reason.value
    return (error["code"], error["type"]) == (row.code, row.error_type) and {"message", "param"} <= set(error)


def _anthropic(found: Any, reason: Reason) -> bool:
    error = found["error"]
    kinds = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}
    fallback = "api_error" if reason.status >= 500 else "invalid_request_error"
    return found["type"] == "error" and error["type"] == kinds.get(reason.status, fallback) and bool(error["message"])


def _llamacpp(found: Any, reason: Reason) -> bool:
    error, row = found["error"], reason.value
    kind = "exceed_context_size_error" if row.code == "context_length_exceeded" else row.error_type
    return (error["code"], error["type"]) == (row.status, kind) and bool(error["message"])


def _responses_event(found: Any) -> str:
    fits = found["type"] == "error" and found["message"] and "param" in found
    labels = [reason.label for reason in Reason if reason.value.code == found["code"]]
    return labels[0] if fits and labels else "an error of another shape"
