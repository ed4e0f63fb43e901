"""The composition root: puts the parts together, runs them, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvgate.admin.listener import admin_app
from kvgate.core.profile import KvSettings, Source, Topology
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.gate import Gate
from kvgate.log import RequestLog
from kvgate.metrics import Metrics
from kvgate.ports import LineFailed, Refused
from kvgate.settings import BadSettings, load_tenants
from kvgate.startup import Child, LogFile
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable
from kvgate.store.local_ledger import LocalLedger
from kvgate.store.tenants import DeclaredTenant, TenantsConflict, ValkeyTenants
from kvgate.web import Front, WebSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvgate.core.profile import EngineProfile
    from kvgate.core.reason import Refusal
    from kvgate.ports import Dialect, RequestRecord
    from kvgate.settings import Settings

log = logging.getLogger("kvgate.app")

ENGINE_POLL_S = 1.0
STORE_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.1
TENANTS_FILE_POLL_S = 0.5
CUT_S = 0.5
FIRST_LOOK_S = 300.0
"""How long a child engine may take to load its model before the gate gives up on it."""


class CannotStart(Exception):
    """The gate cannot start as configured; the message says why and what to do."""


@dataclass(slots=True)
class _Observers:
    metrics: Metrics
    request_log: RequestLog

    def request(self, record: RequestRecord) -> None:
        self.metrics.request(record)
        self.request_log.request(record)


class App:
    """One gate in front of one engine.

    Args:
        settings: all of them.
        command: run this as the engine, a child of the gate; empty where the engine runs elsewhere.
        announce: told, once, that the gate listens: the tenants' URL and the operator's.
    """

    def __init__(
        self, settings: Settings, command: Sequence[str] = (), announce: Callable[[str, str], None] | None = None
    ) -> None:
        if settings.engine.url is None:
            raise CannotStart("no engine: give --upstream http://host:port, or engine.url in kvgate.toml")
        self._settings = settings
        self._announce = announce
        self._clock = time.monotonic
        self._child = Child(command) if command else None
        self._metrics = Metrics()
        self._ledger = LocalLedger(self._clock, settings.engine.drain_max_s)
        self._engine = self._make_engine(settings.engine.url)
        self._engine_refusal: Refusal | None = None
        self._engine_seen = False
        self._tenants: ValkeyTenants | None = None
        self._front: Front | None = None
        self._stopping = asyncio.Event()
        self._reload = asyncio.Event()
        self._exit_status = 0

    def stop(self) -> None:
        """Drain and end; what SIGTERM does."""
        self._stopping.set()

    async def run(self) -> int:
        """Serve until stopped; the exit status.

        Raises:
            CannotStart: with a sentence for the operator.
        """
        async with AsyncExitStack() as stack:
            try:
                await self._start(stack)
                await self._stopping.wait()
            finally:
                await self._drain()
        return self._exit_status

    # -- start and stop

    async def _start(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        tenants = self._tenants = await self._open_tenants(stack)
        stack.push_async_callback(self._engine.close)
        if self._child is not None:
            try:
                await self._child.start()
            except OSError as error:
                raise CannotStart(f"the engine's command cannot be run: {error}") from None
            stack.push_async_callback(self._child.stop)
        self._front = front = self._make_front(tenants)
        await self._first_look()
        ready = lambda: not self._problems()  # noqa: E731 - one expression, handed on at once
        self._metrics.watch(
            lambda: self._engine.profile, self._ledger.view, ready, lambda: self._engine.upstream.open_connections
        )
        tasks = [tenants.watch(), self._watch_engine(), self._watch_drains(), self._watch_tenants_file(tenants)]
        if self._child is not None:
            tasks.append(self._watch_child(self._child))
        await self._run_beside(stack, tasks)
        admin = admin_app(self._metrics, self._problems, self._warnings, self._status)
        admin_runner = web.AppRunner(admin, access_log=None)
        await admin_runner.setup()
        stack.push_async_callback(admin_runner.cleanup)
        admin_url = await _listen(admin_runner, self._settings.admin_listen)
        # The grace period is over when the runner is cleaned up: aiohttp would wait another two minutes by itself.
        runner = web.ServerRunner(front.server(), shutdown_timeout=CUT_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        url = await _listen(runner, self._settings.listen)
        log.info("listening", extra={"url": url, "admin_url": admin_url})
        if self._announce is not None:
            self._announce(url, admin_url)

    async def _run_beside(self, stack: AsyncExitStack, jobs: list[Coroutine[Any, Any, None]]) -> None:
        """Run the watchers beside the servers; one that fails stops the gate rather than leave it half blind."""
        tasks = [asyncio.create_task(job) for job in jobs]

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.critical("a watcher failed, the gate stops", exc_info=error)
                self._exit_status = 1
                self.stop()

        async def cancel() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        for task in tasks:
            task.add_done_callback(ended)
        stack.push_async_callback(cancel)

    async def _drain(self) -> None:
        """Refuse what is new, and let what runs finish within the grace period."""
        if self._front is None:
            return
        self._front.draining = True
        log.info("stopping", extra={"in_flight": self._front.in_flight})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.http.stop_grace_s):
                await self._front.idle()

    async def _first_look(self) -> None:
        """Wait for a child engine to load its model; look once at an engine that runs elsewhere."""
        deadline = self._clock() + (FIRST_LOOK_S if self._child is not None else 0)
        while not await self._look_at_engine() and self._clock() < deadline and not self._stopping.is_set():
            if self._child is not None and self._child.ended:
                raise CannotStart("the engine ended while it was starting; its output is above")
            await asyncio.sleep(0.2)

    # -- watchers

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(ENGINE_POLL_S)
            await self._look_at_engine()

    async def _look_at_engine(self) -> bool:
        try:
            profile = await self._engine.discover()
        except Refused as refused:
            before, self._engine_refusal = self._engine_refusal, refused.refusal
            if before is None or before.reason is not refused.refusal.reason:
                log.warning("the engine does not serve", extra={"reason": refused.refusal.reason.label})
            return False
        if self._engine_refusal is not None:
            log.info("the engine serves again")
        self._engine_refusal = None
        self._ledger.resize(self._engine.pool(profile))
        return True

    async def _watch_drains(self) -> None:
        """While anything drains, look at the engine's slots until they show it over."""
        while True:
            await self._ledger.draining.wait()
            try:
                if (seen := await self._engine.look()) is not None:
                    self._ledger.observe(seen)
            except (Refused, LineFailed) as problem:
                log.info("no look at the slots", extra={"problem": str(problem)})
            self._ledger.expire()
            await asyncio.sleep(DRAIN_POLL_S)

    async def _watch_child(self, child: Child) -> None:
        status = await child.wait()
        if not self._stopping.is_set():
            log.critical("the engine ended, so the gate ends too", extra={"exit_status": status})
            self._exit_status = 1
            self.stop()

    async def _watch_tenants_file(self, tenants: ValkeyTenants) -> None:
        """Apply the tenants file again when it changes, on SIGHUP, and when the store comes back.

        A store may come back empty. A file that cannot be applied leaves the last one in force.
        """
        path = self._settings.tenants
        seen, stale = _mtime(path), False
        while True:
            was_stale, stale = stale, tenants.stale_since is not None
            try:
                async with asyncio.timeout(TENANTS_FILE_POLL_S):
                    await self._reload.wait()
            except TimeoutError:
                if _mtime(path) == seen and not (was_stale and not stale):
                    continue
            self._reload.clear()
            seen = _mtime(path)
            try:
                await self._apply_tenants(tenants)
            except CannotStart as error:
                problem = {"problem": str(error)}
                log.warning("the tenants file was not applied, the last one stays in force", extra=problem)

    # -- parts

    def _make_engine(self, url: str) -> LlamaCpp:
        given = self._settings.engine
        topology = None if given.kv_topology == "auto" else Topology(given.kv_topology)
        startup_log = self._child or (LogFile(given.log) if given.log is not None else None)
        try:
            return LlamaCpp(
                url,
                LlamaCppSettings(
                    kv=KvSettings(topology, given.pool_tokens),
                    context_tokens_min=given.context_tokens_min,
                    undersized_refused=given.on_undersized == "refuse",
                    margin_tokens=given.margin_tokens,
                    headroom_ratio=given.pool_headroom_ratio,
                ),
                self._clock,
                startup_log=startup_log,
                on_profile=self._engine_profile,
                api_key=given.api_key,
            )
        except ValueError as error:
            raise CannotStart(str(error)) from None

    def _engine_profile(self, before: EngineProfile | None, now: EngineProfile) -> None:
        fields = {
            "n_ctx_slot": str(now.n_ctx_slot),
            "total_slots": str(now.total_slots),
            "topology": str(now.topology),
            "pool_tokens": str(now.pool_tokens),
            "kv_type": now.kv_type,
            "build": now.build,
            "fingerprint": now.fingerprint,
        }
        if before is None:
            log.info("engine found", extra=fields)
        else:
            self._metrics.engine_changed()
            log.warning("the engine is another one now", extra={**fields, "fingerprint_before": before.fingerprint})
        for warning in _profile_warnings(now):
            log.warning(warning)

    async def _open_tenants(self, stack: AsyncExitStack) -> ValkeyTenants:
        given = self._settings.store
        try:
            url = given.url
            if url is None:
                embedded = EmbeddedValkey(given.data_dir or Path(".kvgate"))
                await embedded.start()
                stack.push_async_callback(embedded.stop)
                url = embedded.url
                await self._run_beside(stack, [embedded.supervise()])
            client = connect(url)
            stack.push_async_callback(client.aclose)
            tenants = ValkeyTenants(client)
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await tenants.refresh()
        except TimeoutError:
            raise CannotStart(f"the store did not answer within {STORE_TIMEOUT_S:g} s") from None
        except (StoreUnavailable, ValueError) as error:
            raise CannotStart(f"the store is not to be had: {error}") from None
        await self._apply_tenants(tenants)
        return tenants

    async def _apply_tenants(self, tenants: ValkeyTenants) -> None:
        path = self._settings.tenants
        try:
            declared = {} if path is None else load_tenants(path)
            sections = {name: DeclaredTenant(tenant, keys) for name, (tenant, keys) in declared.items()}
            if path is not None:
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    applied = await tenants.apply(
                        sections, source=self._settings.tenants_owner or str(path.resolve())
                    )
                log.info(
                    "tenants applied",
                    extra={"file": str(path), "changed": applied.added + applied.changed, "removed": applied.removed},
                )
        except TimeoutError:
            raise CannotStart(f"the store did not answer within {STORE_TIMEOUT_S:g} s") from None
        except TenantsConflict as error:
            raise CannotStart(f"{error}. Where the file has moved, set tenants_owner to the old path") from None
        except (BadSettings, StoreUnavailable) as error:
            raise CannotStart(str(error)) from None
        anonymous = self._settings.anonymous_tenant
        if anonymous is not None and tenants.by_name(anonymous) is None:
            raise CannotStart(f"anonymous_tenant = {anonymous!r}, but no tenant of that name is declared")

    def _make_front(self, tenants: ValkeyTenants) -> Front:
        chat: Dialect = OpenAiChat()
        given = self._settings.http
        return Front(
            Gate(self._engine, self._ledger, new_id=lambda: secrets.token_hex(16)),
            tenants,
            dict.fromkeys(("/v1/chat/completions", "/chat/completions"), (chat, "/v1/chat/completions")),
            profile=lambda: self._engine.profile,
            observer=_Observers(self._metrics, RequestLog()),
            clock=self._clock,
            settings=WebSettings(
                body_bytes_max=given.body_bytes_max,
                body_timeout_s=given.body_timeout_s,
                write_timeout_s=given.write_timeout_s,
                anonymous_tenant=self._settings.anonymous_tenant,
            ),
        )

    # -- what the operator sees

    def _problems(self) -> list[str]:
        """Why requests are not served now; empty while they are."""
        problems = []
        if self._front is not None and self._front.draining:
            problems.append("this gate is shutting down")
        if self._engine_refusal is not None:
            problems.append(self._engine_refusal.message)
        elif (undersized := self._engine.refusal_now()) is not None:
            problems.append(undersized.refusal.message)
        return problems

    def _warnings(self) -> list[str]:
        """What the operator should look at although requests are served."""
        warnings = [] if self._engine.profile is None else _profile_warnings(self._engine.profile)
        if self._engine.is_undersized and self._engine.profile is not None:
            warnings.append(
                f"the engine's n_ctx_slot of {self._engine.profile.n_ctx_slot.value} tokens is below "
                f"context_tokens_min = {self._settings.engine.context_tokens_min}"
            )
        if self._tenants is not None and self._tenants.stale_since is not None:
            warnings.append("the store is out: tenants and keys are as they were when it was last seen")
        return warnings

    def _status(self) -> dict[str, Any]:
        profile, view = self._engine.profile, self._ledger.view()
        return {
            "engine": profile
            and {"profile": profile, "fingerprint": profile.fingerprint, "kv_type": profile.kv_type},
            "ledger": view,
            "in_flight": 0 if self._front is None else self._front.in_flight,
            "upstream_connections": self._engine.upstream.open_connections,
            "tasks": len(asyncio.all_tasks()),
            "problems": self._problems(),
            "warnings": self._warnings(),
        }


def _profile_warnings(profile: EngineProfile) -> list[str]:
    warnings = []
    n_ctx, slots = profile.n_ctx_slot.value, profile.total_slots.value
    if profile.topology.source is Source.ASSUMED and slots > 1:
        warnings.append(
            f"nothing tells whether the engine's {slots} slots share one KV cache, so kvgate guards them as one pool "
            f"of {n_ctx} tokens: safe, and slower than need be. Name the engine's log (--engine-log FILE), or write "
            f'kv_topology = "divided" (or "unified", with pool_tokens) under [engine]'
        )
    if not profile.slots_visible:
        warnings.append(
            "the engine does not show its slots (started with --no-slots), so what a hung-up request held is counted "
            "until drain_max_s has passed"
        )
    return warnings


async def _listen(runner: web.BaseRunner, address: str) -> str:
    host, _, port = address.rpartition(":")
    site = web.TCPSite(runner, host.strip("[]"), int(port))
    try:
        await site.start()
    except OSError as error:
        raise CannotStart(f"cannot listen on {address}: {error.strerror}") from None
    found = runner.addresses[0]
    return f"http://{host}:{found[1]}"


def _mtime(path: Path | None) -> float | None:
    try:
        return None if path is None else path.stat().st_mtime_ns
    except OSError:
        return None
