"""Answers tenants: an allow-list of exact paths, the key, the body, then the gate."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong

from kvgate.core.reason import Reason, Refusal, refusal
from kvgate.gate import Admitted, Call, Rejected
from kvgate.ports import Refused
from kvgate.relay import relay
from kvgate.web.headers import HEADERS, rejected_headers, verdict_headers
from kvgate.web.intake import keys, mint_id, read_body, request_id
from kvgate.web.own import models, props
from kvgate.web.record import Exchange
from kvgate.web.routes import Control, Inference, Own
from kvgate.web.server import ClientStuck, Server, TenantSide, send_large
from kvgate.wire import fields

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from kvgate.core.profile import EngineProfile
    from kvgate.core.tenant import Tenant
    from kvgate.gate import Gate
    from kvgate.ports import Clock, Counted, Observer, ReadRequest, Tenants
    from kvgate.web.routes import Route

log = logging.getLogger("kvgate.web")

SERVER: Final = "kvgate"

HTTP_VERSIONS: Final = frozenset({HttpVersion10, HttpVersion11})

HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9, -]{1,1000}")

MODEL_PREFIX: Final = "/v1/models/"

HOUSE_DIALECT: Final = "openai_chat"
"""In whose words errors are told where no path names another."""


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The tenants' side of the gate; see `settings.HttpSettings`."""

    body_bytes_max: int
    body_timeout_s: float
    write_timeout_s: float
    anonymous_tenant: str | None
    cors_origins: frozenset[str] = frozenset()


class EngineSide(Protocol):
    """What the front asks of the engine beside the gate; nothing of it runs inference."""

    @property
    def profile(self) -> EngineProfile | None:
        """The engine as it was last seen."""

    async def control(self, path: str, body: bytes) -> tuple[int, bytes]:
        """One call to the tokenizer, the template or a counter."""

    async def props(self) -> dict[str, Any]:
        """The engine's `/props`, whole."""

    async def count_text(self, text: str) -> int:
        """The tokens of a bare text."""

    async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
        """The exact number of prompt tokens."""

    def explain(self, status: int, body: bytes) -> Refusal:
        """What an error answer means."""

    def reuse_seen(self, profile: EngineProfile) -> None:
        """An answer showed reuse where there should be none."""

    def count_erred(self, counted: Counted, drift_tokens: int) -> None:
        """An answer's usage differs from what was counted."""


class Front:
    """The tenants' listener.

    Args:
        gate: judges inference requests.
        engine: answers what is no inference.
        tenants: who may ask.
        routes: the allow-list.
        observer: told of every request.
        clock: seconds.
        settings: bounds, the anonymous tenant, CORS.
    """

    def __init__(
        self,
        gate: Gate,
        engine: EngineSide,
        *,
        tenants: Tenants,
        routes: Mapping[str, Route],
        observer: Observer,
        clock: Clock,
        settings: WebSettings,
    ) -> None:
        self._gate = gate
        self._engine = engine
        self._tenants = tenants
        self._routes = routes
        self._observer = observer
        self._clock = clock
        self._settings = settings
        everyone = {route.dialect.name: route.dialect for route in routes.values()}
        self._dialect = everyone.get(HOUSE_DIALECT) or next(iter(everyone.values()))
        self._served = ", ".join(f"{route.method} {path}" for path, route in sorted(routes.items()))
        self.draining = False
        self._cutting = False
        self._handlers: set[asyncio.Task[Any] | None] = set()
        self._observing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def configure(self, settings: WebSettings) -> None:
        """Go by other settings from the next request on."""
        self._settings = settings

    @property
    def in_flight(self) -> int:
        """Requests whose answer has not ended."""
        return len(self._handlers)

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def cut(self) -> None:
        """End every request now, each with an error of its dialect; for the end of a grace period."""
        self._cutting = True
        for task in self._handlers:
            if task is not None:
                task.cancel()

    async def _cut_short(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        """The answer of a request that was cut: an error of its own, or the last event of its stream."""
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        draining = refusal(Reason.GATE_DRAINING, retry_after_s=5)
        if exchange.stream is None and request.writer.output_size > 0:  # in the middle of a whole answer
            exchange.refusal = draining
            raise ConnectionError
        if exchange.stream is None:
            return self._refused(request, exchange, draining)
        exchange.refusal = draining
        await exchange.stream.write(exchange.dialect.refuse_in_stream(draining))
        return exchange.stream

    def server(self) -> web.Server:
        """The server to listen with: every error, also of the HTTP parser, is answered by this front."""
        return Server(self.handle, self.refuse_head)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its head to the end of its answer.

        1. The path, exactly as it was sent, is on the allow-list, or it is refused.
        2. The key belongs to a tenant.
        3. The body is read, bounded in bytes and time.
        4. The gate judges; what it admits is relayed under its lease, what it rejects is told.
        """
        exchange = Exchange(request_id(request), self._clock(), self._dialect)
        task = asyncio.current_task()
        self._handlers.add(task)
        self._idle.clear()
        try:
            return await send_large(request, await self._answer(request, exchange), self._settings.write_timeout_s)
        except Refused as refused:
            return self._refused(request, exchange, refused.refusal)
        except asyncio.CancelledError:
            if not self._cutting:
                exchange.hung_up = True
                raise
            return await self._cut_short(request, exchange)
        except ConnectionError as error:
            exchange.hung_up = True
            exchange.detail = str(error) if isinstance(error, ClientStuck) else ""
            raise
        except Exception as error:  # noqa: BLE001 - the last guard: a defect is a 500 in JSON, whatever it is
            log.error(  # noqa: TRY400 - the exception's own words may quote the request
                "kvgate failed on a request", extra={"request_id": exchange.request_id, **_where(error)}
            )
            if request.writer.output_size > 0:  # the answer has begun: another head inside it would be read as body
                exchange.refusal = refusal(Reason.INTERNAL)
                raise ConnectionError from None
            return self._refused(request, exchange, refusal(Reason.INTERNAL))
        finally:
            self._handlers.discard(task)
            if not self._handlers:
                self._idle.set()
            self._observe(exchange)

    def refuse_head(self, status: int, error: BaseException | None) -> web.StreamResponse:
        """The answer to what was not HTTP; nothing of it is logged, since a head may hold a key."""
        too_long = isinstance(error, LineTooLong)
        problem = "The request's head is too large." if too_long else "This is not valid HTTP."
        exchange = Exchange(mint_id(), self._clock(), self._dialect)
        mistake = Reason.HEAD_TOO_LARGE if too_long else Reason.BAD_HTTP
        reason = mistake if status < 500 else Reason.INTERNAL
        if isinstance(error, ContentEncodingError):
            reason = Reason.BODY_ENCODING
        response = self._refused(None, exchange, refusal(reason, problem=problem))
        self._observe(exchange)
        response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        if request.version not in HTTP_VERSIONS:
            raise Refused(refusal(Reason.HTTP_VERSION))
        path = request.raw_path.partition("?")[0]
        route = self._routes.get(path)  # 1
        if route is None and path.startswith(MODEL_PREFIX) and path != MODEL_PREFIX and request.method == "GET":
            return self._model(request, exchange, path.removeprefix(MODEL_PREFIX))
        if route is None:
            parent = self._routes.get("/".join(path.split("/")[:3]))
            exchange.dialect = exchange.dialect if parent is None else parent.dialect
            raise Refused(refusal(Reason.PATH_FORBIDDEN, served=self._served))
        exchange.dialect, exchange.path = route.dialect, path
        if request.method == "OPTIONS":
            return self._preflight(request, exchange, route)
        if request.method != route.method:
            raise Refused(refusal(Reason.METHOD_NOT_ALLOWED, allowed=route.method))
        tenant = self._authenticated(request, exchange)  # 2
        if self.draining:
            raise Refused(refusal(Reason.GATE_DRAINING, retry_after_s=5))
        if isinstance(route, Own):
            return await self._own(request, exchange, route, tenant)
        body = await read_body(request, self._settings.body_bytes_max, self._settings.body_timeout_s)  # 3
        if isinstance(route, Control):
            return await self._control(request, exchange, route, body)
        return await self._infer(request, exchange, route, tenant, body)  # 4

    async def _infer(
        self, request: web.BaseRequest, exchange: Exchange, route: Inference, tenant: Tenant, body: bytes
    ) -> web.StreamResponse:
        async with self._gate.admit(Call(tenant, route.dialect, body)) as outcome:
            exchange.outcome = outcome
            if isinstance(outcome, Rejected):
                return self._refused(request, exchange, outcome.refusal)
            details = request.headers.get("x-kvgate-trim-details", "0") != "0"
            headers = {**verdict_headers(outcome, details=details), **self._headers(request, exchange)}
            exchange.clock = self._clock
            client = TenantSide(request, self._settings.write_timeout_s, exchange.begun)
            guard = tenant.limits.loop_guard
            relayed = await relay(outcome, route.dialect, route.engine_path, client, headers, loop_guard=guard)
            exchange.status, exchange.refusal, exchange.detail = relayed.status, relayed.failure, relayed.detail
        return client.response

    def _observe(self, exchange: Exchange) -> None:
        """Record a request; where the engine told nothing of some output, that is counted first, on the side."""
        outcome = exchange.outcome
        told = outcome.receipt.told if isinstance(outcome, Admitted) else None
        if told is not None and told.untold:
            self._observe_later(self._observe_untold(exchange, told.untold))
        elif isinstance(outcome, Admitted) and told is None and outcome.is_bounded:
            self._observe_later(self._observe_unsized(exchange, outcome))
        else:
            self._record(exchange)

    def _observe_later(self, observing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(observing)
        self._observing.add(task)
        task.add_done_callback(self._observing.discard)

    async def _observe_unsized(self, exchange: Exchange, admitted: Admitted) -> None:
        """An answer that told nothing is charged for its prompt, and not for a bound of it: it is counted now."""
        request = admitted.request
        try:
            body = request.document.text.encode()
            exchange.recounted = await self._engine.count(exchange.dialect.name, request, body)
        except Refused as refused:
            extra = {"request_id": exchange.request_id, "reason": refused.refusal.reason.label}
            log.warning("the prompt of this request could not be counted", extra=extra)
        finally:
            self._record(exchange)

    async def _observe_untold(self, exchange: Exchange, texts: tuple[str, ...]) -> None:
        try:
            exchange.untold_tokens = sum([await self._engine.count_text(text) for text in texts])
        except Refused as refused:
            extra = {"request_id": exchange.request_id, "reason": refused.refusal.reason.label}
            log.warning("some output of this request could not be counted", extra=extra)
        finally:
            self._record(exchange)

    def _record(self, exchange: Exchange) -> None:
        record = exchange.record(self._clock())
        if record.reuse_violation and exchange.outcome is not None and exchange.outcome.profile is not None:
            self._engine.reuse_seen(exchange.outcome.profile)
        if record.count_drift_tokens and exchange.outcome is not None and exchange.outcome.counted is not None:
            self._engine.count_erred(exchange.outcome.counted, record.count_drift_tokens)
        self._observer.request(record)

    # -- who asks

    def _authenticated(self, request: web.BaseRequest, exchange: Exchange) -> Tenant:
        given = keys(request)
        if not given:
            anonymous = self._settings.anonymous_tenant
            tenant = None if anonymous is None else self._tenants.by_name(anonymous)
            missing = Reason.MISSING_KEY
        else:
            tenant = self._tenants.by_key(hashlib.sha256(given.pop()).hexdigest()) if len(given) == 1 else None
            missing = Reason.UNKNOWN_KEY
        if tenant is None:
            raise Refused(refusal(missing))
        exchange.tenant = tenant.name
        return tenant

    # -- what goes back

    def _preflight(self, request: web.BaseRequest, exchange: Exchange, route: Route) -> web.Response:
        """A browser asks before it sends a key; the answer names origins that the operator listed, and no others."""
        exchange.status = 204
        headers = self._headers(request, exchange)
        if "access-control-allow-origin" in headers:
            headers["access-control-allow-methods"] = f"{route.method}, OPTIONS"
            # SDKs in browsers send headers of their own; none of a client's headers reaches the engine anyway.
            asked = request.headers.get("Access-Control-Request-Headers", "")
            allowed = asked if HEADER_NAMES.fullmatch(asked) else "authorization, content-type, x-api-key"
            headers["access-control-allow-headers"] = allowed
            headers["access-control-max-age"] = "600"
        headers["allow"] = f"{route.method}, OPTIONS"
        return web.Response(status=204, headers=headers)

    async def _own(
        self, request: web.BaseRequest, exchange: Exchange, route: Own, tenant: Tenant
    ) -> web.StreamResponse:
        profile = self._engine.profile
        if profile is None:
            raise Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))
        body = models(profile, tenant) if route.what == "models" else props(await self._engine.props(), tenant)
        exchange.status = 200
        headers = self._headers(request, exchange)
        return web.json_response(body, headers=headers)

    def _model(self, request: web.BaseRequest, exchange: Exchange, name: str) -> web.StreamResponse:
        exchange.path = MODEL_PREFIX
        tenant, profile = self._authenticated(request, exchange), self._engine.profile
        if profile is None:
            raise Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))
        found = next((one for one in models(profile, tenant)["data"] if one["id"] == name), None)
        if found is None:
            raise Refused(refusal(Reason.MODEL_NOT_FOUND, param="model"))
        exchange.status = 200
        return web.json_response(found, headers=self._headers(request, exchange))

    async def _control(
        self, request: web.BaseRequest, exchange: Exchange, route: Control, body: bytes
    ) -> web.StreamResponse:
        document = fields.document_of(body)
        status, answer = await self._engine.control(route.engine_path, document.text.encode())
        if status != 200:
            # llama.cpp says 500 to some mistakes of clients (a token id out of range); there is no inference to fail.
            raise Refused(self._engine.explain(400 if status == 500 else status, answer))
        exchange.status = 200
        headers = self._headers(request, exchange)
        return web.Response(status=200, body=answer, content_type="application/json", headers=headers)

    def _refused(self, request: web.BaseRequest | None, exchange: Exchange, refused: Refusal) -> web.Response:
        exchange.status, exchange.refusal = refused.reason.status, refused
        headers = self._headers(request, exchange)
        headers["x-kvgate-reason"] = refused.reason.label
        if isinstance(exchange.outcome, Rejected):
            headers |= rejected_headers(exchange.outcome)
        if refused.retry_after_s is not None:
            headers["retry-after"] = str(refused.retry_after_s)
        if refused.reason is Reason.METHOD_NOT_ALLOWED:
            headers["allow"] = f"{self._routes[exchange.path].method}, OPTIONS"
        body = exchange.dialect.refuse(refused)
        return web.Response(status=exchange.status, body=body, content_type="application/json", headers=headers)

    def _headers(self, request: web.BaseRequest | None, exchange: Exchange) -> dict[str, str]:
        """What every answer carries."""
        headers = {"x-request-id": exchange.request_id, "server": SERVER}
        origin = None if request is None else request.headers.get("Origin")
        if origin is not None and ({origin, "*"} & self._settings.cors_origins):
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = ", ".join(HEADERS)
            headers["vary"] = "Origin"
        return headers


def _where(error: Exception) -> dict[str, Any]:
    """What failed and where, without the exception's own words, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "where": [f"{f.filename}:{f.lineno} {f.name}" for f in frames]}
