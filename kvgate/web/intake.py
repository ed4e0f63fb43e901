"""What comes in: the key, the body, the request's id; each bounded and checked."""

from __future__ import annotations

import asyncio
import re
import secrets
import zlib
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kvgate.core.reason import Reason, refusal
from kvgate.ports import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""A client's own request id is taken where it looks like one, so that its logs and ours can be joined."""

BODY_ENCODINGS: Final = {"": None, "identity": None, "gzip": 31, "x-gzip": 31, "deflate": 15}
"""Each with zlib's window bits for it, None where nothing is to be decoded."""


def request_id(request: web.BaseRequest) -> str:
    """The client's own id, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else mint_id()


def mint_id() -> str:
    """A new request id."""
    return f"kvg-{secrets.token_hex(12)}"


def keys(request: web.BaseRequest) -> set[bytes]:
    """The different keys that a request carries; more than one is contradictory."""
    found: set[bytes] = set()
    for value in _all(request, "Authorization"):
        scheme, _, key = value.partition(" ")
        found.add(key.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b"")
    return found | {value.strip().encode("utf-8", "surrogateescape") for value in _all(request, "x-api-key")}


def _all(request: web.BaseRequest, name: str) -> Sequence[str]:
    return request.headers.getall(name, ())


async def read_body(request: web.BaseRequest, bytes_max: int, timeout_s: float) -> bytes:
    """The body, decoded, bounded in bytes (decoded ones too) and in seconds.

    Raises:
        Refused: BODY_TOO_LARGE, BODY_ENCODING or BODY_TIMEOUT.
    """
    too_large = Refused(refusal(Reason.BODY_TOO_LARGE, body_bytes_max=bytes_max))
    if (request.content_length or 0) > bytes_max:
        raise too_large
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in BODY_ENCODINGS or len(_all(request, "Content-Encoding")) > 1:
        raise Refused(refusal(Reason.BODY_ENCODING))
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    parts, total = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                total += len(chunk)
                if total > bytes_max:
                    raise too_large
                parts.append(chunk)
    except TimeoutError:
        raise Refused(refusal(Reason.BODY_TIMEOUT, timeout_s=timeout_s)) from None
    except web.RequestPayloadError:
        problem = "The request's body broke off."
        raise Refused(refusal(Reason.BAD_HTTP, problem=problem)) from None
    window_bits = BODY_ENCODINGS[encoding]
    body = b"".join(parts)
    return body if window_bits is None else _decoded(body, window_bits, bytes_max, too_large)


def _decoded(body: bytes, window_bits: int, bytes_max: int, too_large: Refused) -> bytes:
    """The decompressed body: all of it, to the checksum at its end, and never more than `bytes_max`."""
    stream = zlib.decompressobj(window_bits)
    try:
        decoded = stream.decompress(body, bytes_max + 1)
    except zlib.error:
        raise Refused(refusal(Reason.BODY_ENCODING)) from None
    if len(decoded) > bytes_max:
        raise too_large
    if not stream.eof or stream.unused_data:
        raise Refused(refusal(Reason.BODY_ENCODING))
    return decoded
