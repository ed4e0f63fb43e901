"""The tenants' listener: which paths are served, who asks, and what goes back to them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from kvgate.core.admission import Admit, Clamp
from kvgate.core.reason import Reason, Refusal, refusal
from kvgate.core.reuse import is_violation
from kvgate.gate import Admitted, Call, Rejected
from kvgate.ports import Refused, RequestRecord
from kvgate.relay import relay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvgate.core.admission import Verdict
    from kvgate.core.profile import EngineProfile
    from kvgate.core.tenant import Tenant
    from kvgate.gate import Gate
    from kvgate.ports import Clock, Dialect, Observer, Tenants

log = logging.getLogger("kvgate.web")

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""A client's own request id is taken where it looks like one, so that its logs and ours can be joined."""

SERVER: Final = "kvgate"

KEEPALIVE_S: Final = 75.0

HEADERS: Final = {
    "x-request-id": "The request's id in the log: the client's own where it looks like one, else minted.",
    "x-kvgate-verdict": "`admit`, `clamp` or `reject`.",
    "x-kvgate-reason": "Why it was refused, or clamped: a label of the table of reasons.",
    "x-kvgate-prompt-tokens": "Tokens of the prompt, counted before anything was sent.",
    "x-kvgate-count": "How they were counted: `engine`, by the engine's own counter.",
    "x-kvgate-output-limit": "Tokens of output that the engine was told to stop at.",
    "x-kvgate-usable-generation": "Tokens of output that fit beside this prompt.",
    "x-kvgate-n-ctx-slot": "Tokens that one sequence may hold on this engine.",
    "x-kvgate-kv-type": "Precision of the KV cache, `unknown` where no startup log told it.",
    "x-kvgate-engine-build": "The engine's own name for its build.",
    "x-kvgate-reuse": "What prefix reuse the request had: `off`.",
    "x-kvgate-queue-ms": "Milliseconds that it waited for room.",
    "retry-after": "Whole seconds, 1 to 60, after which trying again can help (429 and 503).",
}
"""Every header that kvgate itself adds, with its meaning; the reference is made of it."""

BODY_ENCODINGS: Final = frozenset({"", "identity", "gzip", "deflate"})


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The tenants' side of the gate; see `settings.HttpSettings`."""

    body_bytes_max: int
    body_timeout_s: float
    write_timeout_s: float
    anonymous_tenant: str | None


@dataclass(slots=True)
class _Exchange:
    """What is known of one request so far; becomes its record."""

    request_id: str
    started_s: float
    dialect: Dialect
    path: str = "-"
    tenant: str = "-"
    status: int = 0
    outcome: Admitted | Rejected | None = None
    refusal: Refusal | None = None
    hung_up: bool = False
    detail: str = ""


class Front:
    """Answers tenants: an allow-list of exact paths, the key, the body, then the gate.

    Args:
        gate: judges inference requests.
        tenants: who may ask.
        inference: served inference paths, each with its dialect; aliases name the same dialect.
        profile: the engine as it was last seen, for `/v1/models`.
        observer: told of every request.
    """

    def __init__(
        self,
        gate: Gate,
        tenants: Tenants,
        inference: Mapping[str, tuple[Dialect, str]],
        *,
        profile: Callable[[], EngineProfile | None],
        observer: Observer,
        clock: Clock,
        settings: WebSettings,
    ) -> None:
        self._gate = gate
        self._tenants = tenants
        self._inference = inference
        self._profile = profile
        self._observer = observer
        self._clock = clock
        self._settings = settings
        self._dialect = next(iter(inference.values()))[0]
        self._served = ", ".join(["GET /v1/models", *(f"POST {path}" for path in inference)])
        self.draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests whose answer has not ended."""
        return self._in_flight

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def server(self) -> web.Server:
        """The server to listen with: every error, also of the HTTP parser, is answered by this front."""
        return _Server(
            self.handle,
            self.refuse_head,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=2.0,
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its head to the end of its answer.

        1. The path, exactly as it was sent, is on the allow-list, or it is refused.
        2. The key belongs to a tenant.
        3. The body is read, bounded in bytes and time.
        4. The gate judges; what it admits is relayed under its lease, what it rejects is told.
        """
        exchange = _Exchange(_request_id(request), self._clock(), self._dialect)
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self._answer(request, exchange)
        except Refused as refused:
            return self._refused(exchange, refused.refusal)
        except (asyncio.CancelledError, ConnectionError):
            exchange.hung_up = True
            raise
        except Exception:
            log.exception("kvgate failed on a request", extra={"request_id": exchange.request_id})
            if request.writer.output_size > 0:  # the answer has begun: another head inside it would be read as body
                exchange.refusal = refusal(Reason.INTERNAL)
                raise ConnectionError from None
            return self._refused(exchange, refusal(Reason.INTERNAL))
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
            self._observer.request(self._record(exchange))

    def refuse_head(self, status: int, error: BaseException | None) -> web.StreamResponse:
        """The answer to what was not HTTP; nothing of it is logged, since a head may hold a key."""
        problem = "The request's head is too large." if isinstance(error, LineTooLong) else "This is not valid HTTP."
        exchange = _Exchange(_mint_id(), self._clock(), self._dialect)
        reason = Reason.BAD_HTTP if status < 500 else Reason.INTERNAL
        if isinstance(error, ContentEncodingError):
            reason = Reason.BODY_ENCODING
        response = self._refused(exchange, refusal(reason, problem=problem))
        self._observer.request(self._record(exchange))
        response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest, exchange: _Exchange) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if path == "/v1/models":  # 1
            exchange.path = path
            _check_method(request, "GET")
            return self._models(self._authenticated(request, exchange), exchange)
        if path not in self._inference:
            raise Refused(refusal(Reason.PATH_FORBIDDEN, served=self._served))
        exchange.dialect, engine_path = self._inference[path]
        exchange.path = path
        _check_method(request, "POST")
        tenant = self._authenticated(request, exchange)  # 2
        if self.draining:
            raise Refused(refusal(Reason.GATE_DRAINING, retry_after_s=5))
        body = await self._read_body(request)  # 3
        async with self._gate.admit(Call(tenant, exchange.dialect, body)) as outcome:  # 4
            exchange.outcome = outcome
            if isinstance(outcome, Rejected):
                return self._refused(exchange, outcome.refusal)
            headers = {**verdict_headers(outcome), "x-request-id": exchange.request_id, "server": SERVER}
            client = _Client(request, self._settings.write_timeout_s, exchange)
            relayed = await relay(outcome, exchange.dialect, engine_path, client, headers)
            exchange.status, exchange.refusal, exchange.detail = relayed.status, relayed.failure, relayed.detail
        return client.response

    # -- who asks

    def _authenticated(self, request: web.BaseRequest, exchange: _Exchange) -> Tenant:
        keys = _keys(request)
        if not keys:
            anonymous = self._settings.anonymous_tenant
            tenant = None if anonymous is None else self._tenants.by_name(anonymous)
            missing = Reason.MISSING_KEY
        else:
            tenant = self._tenants.by_key(hashlib.sha256(keys.pop()).hexdigest()) if len(keys) == 1 else None
            missing = Reason.UNKNOWN_KEY
        if tenant is None:
            raise Refused(refusal(missing))
        exchange.tenant = tenant.name
        return tenant

    # -- what comes in

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        most = self._settings.body_bytes_max
        too_large = Refused(refusal(Reason.BODY_TOO_LARGE, body_bytes_max=most))
        if (request.content_length or 0) > most:
            raise too_large
        if request.headers.get("Content-Encoding", "").strip().lower() not in BODY_ENCODINGS:
            raise Refused(refusal(Reason.BODY_ENCODING))
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        timeout_s, parts, total = self._settings.body_timeout_s, [], 0
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in request.content.iter_any():
                    total += len(chunk)
                    if total > most:
                        raise too_large
                    parts.append(chunk)
        except TimeoutError:
            raise Refused(refusal(Reason.BODY_TIMEOUT, timeout_s=timeout_s)) from None
        except web.RequestPayloadError:
            raise Refused(refusal(Reason.BODY_ENCODING)) from None
        return b"".join(parts)

    # -- what goes back

    def _models(self, tenant: Tenant, exchange: _Exchange) -> web.StreamResponse:
        """The engine's models, with the window that this tenant has in them, so that clients compact in time."""
        profile = self._profile()
        if profile is None:
            raise Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))
        own = tenant.limits.context_tokens_max
        window = profile.n_ctx_slot.value if own is None else min(own, profile.n_ctx_slot.value)
        data = [
            {
                "id": name,
                "object": "model",
                "owned_by": profile.kind,
                "created": 0,
                "context_length": window,
                "max_model_len": window,
                "meta": {"n_ctx": window},
            }
            for name in profile.models
            if tenant.models is None or name in tenant.models
        ]
        exchange.status = 200
        body = json.dumps({"object": "list", "data": data}).encode()
        headers = {"x-request-id": exchange.request_id, "server": SERVER}
        return web.Response(status=200, body=body, content_type="application/json", headers=headers)

    def _refused(self, exchange: _Exchange, refused: Refusal) -> web.Response:
        exchange.status, exchange.refusal = refused.reason.status, refused
        headers = {
            "x-request-id": exchange.request_id,
            "server": SERVER,
            "x-kvgate-reason": refused.reason.label,
        }
        if isinstance(exchange.outcome, Rejected):
            headers |= rejected_headers(exchange.outcome)
        if refused.retry_after_s is not None:
            headers["retry-after"] = str(refused.retry_after_s)
        body = exchange.dialect.refuse(refused)
        return web.Response(status=exchange.status, body=body, content_type="application/json", headers=headers)

    def _record(self, exchange: _Exchange) -> RequestRecord:
        record = RequestRecord(
            request_id=exchange.request_id,
            tenant=exchange.tenant,
            dialect=exchange.dialect.name if exchange.path != "-" else "-",
            path=exchange.path,
            status=exchange.status or (499 if exchange.hung_up else 0),
            verdict="",
            reason=exchange.refusal.reason.label if exchange.refusal else "",
            duration_s=self._clock() - exchange.started_s,
            hung_up=exchange.hung_up,
            detail=exchange.detail,
        )
        outcome = exchange.outcome
        if outcome is None:
            return record
        if outcome.request is not None:
            ask = outcome.request.ask
            record = replace(record, stream=ask.stream, sequences=ask.sequences)
        if outcome.profile is not None:
            record = replace(record, n_ctx_slot=outcome.profile.n_ctx_slot.value)
        if outcome.verdict is not None:
            record = _with_verdict(record, outcome.verdict)
        if isinstance(outcome, Admitted):
            usage = outcome.receipt.usage
            violated = usage is not None and is_violation(outcome.reuse, usage)
            record = replace(record, queued_s=outcome.lease.queued_s, usage=usage, reuse_violation=violated)
        return record


def verdict_headers(admitted: Admitted) -> dict[str, str]:
    """What an admitted request's answer says of its verdict (DESIGN section 8)."""
    size, room, profile = admitted.verdict.size, admitted.verdict.room, admitted.profile
    headers = {
        "x-kvgate-verdict": admitted.verdict.label,
        "x-kvgate-prompt-tokens": str(size.prompt_tokens),
        "x-kvgate-output-limit": str(size.output_tokens),
        "x-kvgate-usable-generation": str(room.usable_generation),
        "x-kvgate-count": "engine",
        "x-kvgate-n-ctx-slot": str(profile.n_ctx_slot.value),
        "x-kvgate-kv-type": profile.kv_type,
        "x-kvgate-engine-build": _header_text(profile.build or "unknown"),
        "x-kvgate-reuse": admitted.reuse.value,
        "x-kvgate-queue-ms": str(round(admitted.lease.queued_s * 1000)),
    }
    if isinstance(admitted.verdict, Clamp):
        headers["x-kvgate-reason"] = Reason.GENERATION_OVERFLOW.label
    return headers


def rejected_headers(rejected: Rejected) -> dict[str, str]:
    """What a rejected request's answer says of its verdict."""
    headers = {"x-kvgate-verdict": "reject"}
    if (verdict := rejected.verdict) is not None and verdict.room is not None:
        headers["x-kvgate-prompt-tokens"] = str(verdict.room.prompt_tokens)
        headers["x-kvgate-usable-generation"] = str(max(verdict.room.usable_generation, 0))
        headers["x-kvgate-count"] = "engine"
    if rejected.profile is not None:
        headers["x-kvgate-n-ctx-slot"] = str(rejected.profile.n_ctx_slot.value)
    return headers


def _with_verdict(record: RequestRecord, verdict: Verdict) -> RequestRecord:
    record = replace(record, verdict=verdict.label)
    if (room := verdict.room) is not None:
        record = replace(record, prompt_tokens=room.prompt_tokens, usable_generation=room.usable_generation)
    if isinstance(verdict, Admit | Clamp):
        record = replace(record, output_limit=verdict.size.output_tokens)
    return record


class _Client:
    """The tenant's side of a relay; implements `relay.Client`."""

    def __init__(self, request: web.BaseRequest, write_timeout_s: float, exchange: _Exchange) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._exchange = exchange
        self.response: web.StreamResponse = web.Response(status=500)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._exchange.status = status
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.response = web.Response(status=status, headers=headers, body=body)


class _Server(web.Server):
    """aiohttp's server, with this front's answers to what the HTTP parser refuses."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], object],
        refuse_head: Callable[[int, BaseException | None], web.StreamResponse],
        **options: object,
    ) -> None:
        super().__init__(handler, **options)  # type: ignore[arg-type]  # aiohttp's own alias is private
        self._refuse_head = refuse_head

    def __call__(self) -> RequestHandler:
        return _Handler(self, self._refuse_head, loop=self._loop, **self._kwargs)


class _Handler(RequestHandler):
    __slots__ = ("_refuse_head",)

    def __init__(
        self,
        manager: web.Server,
        refuse_head: Callable[[int, BaseException | None], web.StreamResponse],
        **options: object,
    ) -> None:
        super().__init__(manager, **options)  # type: ignore[arg-type]  # passed through as given
        self._refuse_head = refuse_head

    def data_received(self, data: bytes) -> None:
        """Bytes of a client; a body whose chunks break off fails its reader, whom aiohttp lets wait for the rest."""
        super().data_received(data)
        reading = self._current_request
        if reading is not None and self._messages and not reading.content.is_eof():
            problem = "The chunks of the request's body are not valid HTTP."
            reading.content.set_exception(Refused(refusal(Reason.BAD_HTTP, problem=problem)))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - quotes the head, which may hold a key
    ) -> web.StreamResponse:
        """Answer in JSON, log nothing of the head."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the answer has begun; it can only be cut")
        return self._refuse_head(status, exc)


def _check_method(request: web.BaseRequest, allowed: str) -> None:
    if request.method != allowed:
        raise Refused(refusal(Reason.METHOD_NOT_ALLOWED, allowed=allowed))


def _keys(request: web.BaseRequest) -> set[bytes]:
    """The different keys that a request carries; more than one is contradictory."""
    keys: set[bytes] = set()
    for value in _all(request, "Authorization"):
        scheme, _, key = value.partition(" ")
        keys.add(key.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b"")
    keys |= {value.strip().encode("utf-8", "surrogateescape") for value in _all(request, "x-api-key")}
    return keys


def _all(request: web.BaseRequest, name: str) -> Sequence[str]:
    return request.headers.getall(name, ())


def _request_id(request: web.BaseRequest) -> str:
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else _mint_id()


def _mint_id() -> str:
    return f"kvg-{secrets.token_hex(12)}"


def _header_text(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", text)
