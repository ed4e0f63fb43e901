"""Short calls to the engine that run no inference: sent, awaited and parsed, each within bounds."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from kvgate.ports import LineFailed
from kvgate.upstream import whole_body
from kvgate.wire.answers import parsed

if TYPE_CHECKING:
    from kvgate.ports import Line

CONTROL_TIMEOUT_S = 30.0
"""For counters and the tokenizer: the longest prompts take seconds on a busy machine."""

WAKE_TIMEOUT_S = 300.0
"""For a call that wakes the engine, which loads its model first."""

HELLO_TIMEOUT_S = 5.0
"""For `/health` and `/props`, which llama-server answers at once unless it hangs."""

ANSWER_BYTES_MAX = 16 * 1024 * 1024


async def exchange(line: Line, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """As `ask`, without the bytes."""
    status, answer, _ = await ask(line, method, path, body)
    return status, answer


async def ask(
    line: Line, method: str, path: str, body: bytes = b"", *, waking: bool = False
) -> tuple[int, Any, bytes]:
    """One control call: status, the JSON of its answer (None where it is none), and its bytes.

    `waking` where the engine may have to load its model first.

    Raises:
        LineFailed: the connection broke, or there was no answer in time: a GET has `HELLO_TIMEOUT_S`.
    """
    timeout_s = WAKE_TIMEOUT_S if waking else CONTROL_TIMEOUT_S
    if method == "GET" and path != "/slots":
        timeout_s = HELLO_TIMEOUT_S
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        async with asyncio.timeout(timeout_s):
            head = await line.send(method, path, headers, body)
            raw = await whole_body(line, ANSWER_BYTES_MAX)
    except TimeoutError:
        raise LineFailed(f"no answer to {method} {path} in {timeout_s:g} s", sent=True, silent=True) from None
    return head.status, parsed(raw), raw


def json_bytes(value: Any) -> bytes:
    """The value as a request body."""
    return json.dumps(value).encode()
