"""Puts the parts of a gate together, runs them, and stops them in order."""

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
from kvgate.app.engine_watch import ENGINE_POLL_S, LifeWatch, SlotsWatch, look_at
from kvgate.app.explaining import Explainer
from kvgate.app.gate_suite import GateSuite
from kvgate.app.health import Health
from kvgate.app.reuse_keeper import ReuseKeeper
from kvgate.app.tenants_file import STORE_TIMEOUT_S, NotApplied, TenantsFile
from kvgate.core.engine_state import EngineState
from kvgate.core.guarantee import guaranteed
from kvgate.core.profile import KvSettings, Topology
from kvgate.core.reason import Reason
from kvgate.core.warmth import Warmth
from kvgate.engines.llamacpp import CountingSettings, LlamaCpp, LlamaCppSettings
from kvgate.gate import Gate
from kvgate.log import RequestLog
from kvgate.metrics import Metrics
from kvgate.settings import BadSettings, reloaded
from kvgate.startup import Child, LogFile
from kvgate.store.canary import CanaryStore, CanaryWatch
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.errors import StoreUnavailable
from kvgate.store.recent_sizes import RecentSizes
from kvgate.store.reports import Reports
from kvgate.store.shared_ledger import SharedLedger, SharedSettings, engine_id
from kvgate.store.tenants import ValkeyTenants
from kvgate.web import Front, WebSettings, served_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvgate.app.canary_schedule import SuiteRunner
    from kvgate.ports import RequestRecord
    from kvgate.settings import Reloaded, Settings
    from kvgate.store.client import StoreClient

log = logging.getLogger("kvgate.app")

CUT_S = 0.5
GUARANTEES_POLL_S = 0.5
FIRST_LOOK_S = 300.0
"""How long a child engine may take to load its model before the gate gives up on it."""


class CannotStart(Exception):
    """The gate cannot start as configured; the message says why and what to do."""


@dataclass(slots=True)
class _Observers:
    metrics: Metrics
    request_log: RequestLog
    sizes: RecentSizes
    reports: Reports
    reuse: ReuseKeeper

    def request(self, record: RequestRecord) -> None:
        self.metrics.request(record)
        self.request_log.request(record)
        self.sizes.request(record)
        self.reports.request(record)
        self.reuse.request(record)


class App:
    """One gate in front of one engine.

    Args:
        settings: all of them.
        command: run this as the engine, a child of the gate; empty where the engine runs elsewhere.
        announce: told, once, that the gate listens: the tenants' URL and the operator's.
        reread: reads the settings anew, on SIGHUP; raises `BadSettings`.
        worker: one of several processes on one address: the socket where its operator's side listens.
        suite: runs the reuse suite by schedule (`canary.every_h`).
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] = (),
        announce: Callable[[str, str], None] | None = None,
        reread: Callable[[], Settings] | None = None,
        worker: Path | None = None,
        *,
        suite: SuiteRunner | None = None,
    ) -> None:
        if settings.engine.url is None:
            raise CannotStart("no engine: give --upstream http://host:port, or engine.url in kvgate.toml")
        self._settings = settings
        self._announce = announce
        self._reread = reread
        self._worker = worker
        self._suite = suite
        self._clock = time.monotonic
        self._child = Child(command) if command else None
        self._metrics = Metrics()
        self._life = LifeWatch(self._clock, self._metrics)
        self._engine = self._make_engine(settings.engine.url)
        self._health: Health | None = None
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._exit_status = 0

    def stop(self) -> None:
        """Drain and end; what SIGTERM does. A second time: end now."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    def reload(self) -> None:
        """Read settings and tenants anew; what SIGHUP does. What cannot be used leaves the last ones in force."""
        if (health := self._health) is None:
            return
        if self._reread is not None:
            try:
                self._take_over(health, reloaded(self._settings, self._reread()))
            except BadSettings as error:
                health.settings_problem = f"the settings were not reloaded, the last ones stay in force: {error}"
                log.warning("the settings were not reloaded", extra={"problem": str(error)})
        health.tenants_file.reload.set()

    def _take_over(self, health: Health, found: Reloaded) -> None:
        settings = self._settings = health.settings = found.settings
        health.settings_problem = None
        if found.needs_restart:
            names = ", ".join(found.needs_restart)
            health.settings_problem = f"these settings were changed and need a restart to come into force: {names}"
        if any(name.startswith("engine.") for name in found.changed):
            self._engine.configure(engine_settings(settings))
        health.front.configure(_web_settings(settings))
        health.tenants_file.anonymous = settings.anonymous_tenant
        log.info("settings reloaded", extra={"changed": found.changed, "needs_restart": found.needs_restart})

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
        health = self._health = await self._open_store(stack)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        stack.push_async_callback(self._engine.close)
        if self._child is not None:
            await self._child.start()
            stack.push_async_callback(self._child.stop)
        await health.ledger.guarantee(guaranteed(health.tenants.all()))
        await self._first_look(health.ledger)
        await health.reuse.look()  # whom this engine serves is known before the first request
        jobs = [
            health.tenants.watch(),
            health.tenants_file.watch(),
            self._watch_engine(health.ledger),
            health.slots.run(),
            self._watch_guarantees(health),
        ]
        if self._child is not None:
            jobs.append(self._watch_child(self._child))
        await self._run_beside(stack, jobs)
        await self._listen(stack, health)

    async def _listen(self, stack: AsyncExitStack, health: Health) -> None:
        """Open both listeners, the operator's first: what it says is true before the first request comes."""
        connections = lambda: self._engine.upstream.open_connections  # noqa: E731 - one expression, handed on at once
        ready = lambda: not health.problems()  # noqa: E731 - likewise
        store_out = lambda: health.ledger.is_out  # noqa: E731 - likewise
        least = lambda: health.settings.engine.context_tokens_min  # noqa: E731 - likewise
        self._metrics.watch(
            lambda: self._engine.profile, health.ledger.view, ready, connections, store_out, context_tokens_min=least
        )
        self._metrics.kv_bytes_per_token = lambda: getattr(self._engine.profile, "kv_bytes_per_token", None)
        self._metrics.watch_fairness(health.ledger.fair, lambda: getattr(health.ledger.view(), "pool", None))
        self._metrics.watch_life(lambda: self._life.life.state, lambda: health.slots.foreign)
        told = admin_app(
            self._metrics,
            problems=health.problems,
            warnings=health.warnings,
            status=health.status,
            engine=self._life.told,
            refresh=health.ledger.refresh,
            explain=health.explain,
            reports=health.reports,
            body_bytes_max=self._settings.http.body_bytes_max,
        )
        admin = web.AppRunner(told, access_log=None)
        admin_url = await open_listener(stack, admin, self._worker or self._settings.admin_listen)
        # The grace period is over when the runner is cleaned up: aiohttp would wait another two minutes by itself.
        tenants = web.ServerRunner(health.front.server(), shutdown_timeout=CUT_S)
        url = await open_listener(stack, tenants, self._settings.listen, shared=self._worker is not None)
        event = "listening" if self._worker is None else "worker listening"
        log.info(event, extra={"url": url, "admin_url": admin_url})
        if self._announce is not None:
            self._announce(url, admin_url)
        suite = self._suite or GateSuite(self._engine, health.ledger, self._clock)
        if (schedule := health.reuse.schedule(suite, self._settings.canary.every_h)) is not None:
            await self._run_beside(stack, [schedule.watch(url)])

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
        """Refuse what is new, let what runs finish within the grace period, then cut it with an error of its own."""
        if self._health is None:
            return
        front = self._health.front
        front.draining = True
        self._health.ledger.close_queue(Reason.GATE_DRAINING)
        grace_s = self._settings.http.stop_grace_s
        log.info("stopping", extra={"in_flight": front.in_flight, "grace_s": grace_s})
        waiters = [asyncio.create_task(front.idle()), asyncio.create_task(self._hurrying.wait())]
        await asyncio.wait(waiters, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for waiter in waiters:
            waiter.cancel()
        if front.in_flight:
            log.warning("the grace period is over, requests are cut", extra={"in_flight": front.in_flight})
            front.cut()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await front.idle()

    async def _first_look(self, ledger: SharedLedger) -> None:
        """Wait for a child engine to load its model; look once at an engine that runs elsewhere."""
        deadline = self._clock() + (FIRST_LOOK_S if self._child is not None else 0)
        while not await self._look_at_engine(ledger) and self._clock() < deadline and not self._stopping.is_set():
            if self._child is not None and self._child.ended:
                raise CannotStart("the engine ended while it was starting; its output is above")
            await asyncio.sleep(0.2)

    # -- watchers

    async def _watch_engine(self, ledger: SharedLedger) -> None:
        while True:
            await asyncio.sleep(ENGINE_POLL_S)
            await self._look_at_engine(ledger)

    async def _look_at_engine(self, ledger: SharedLedger) -> bool:
        look = await look_at(self._engine)
        self._life.looked(look)
        profile, reason = self._engine.profile, look.state.value.reason
        if reason is not None and look.state is not EngineState.UNDERSIZED:
            # Who waits for room on an engine that is gone would wait for nothing.
            ledger.turn_away(reason)
            return False
        if profile is not None:
            await ledger.resize(self._engine.pool(profile))
        return True

    async def _watch_guarantees(self, health: Health) -> None:
        """Have the ledger hold back what tenants are guaranteed, as the store has it."""
        while True:
            await health.ledger.guarantee(guaranteed(health.tenants.all()))
            await asyncio.sleep(GUARANTEES_POLL_S)

    async def _watch_child(self, child: Child) -> None:
        status = await child.wait()
        if not self._stopping.is_set():
            log.critical("the engine ended, so the gate ends too", extra={"exit_status": status})
            self._exit_status = 1
            self.stop()

    # -- parts

    def _make_engine(self, url: str) -> LlamaCpp:
        given = self._settings.engine
        startup_log = self._child or (LogFile(given.log) if given.log is not None else None)
        try:
            return LlamaCpp(
                url,
                engine_settings(self._settings),
                self._clock,
                startup_log=startup_log,
                on_profile=self._life.profile,
                api_key=given.api_key,
            )
        except ValueError as error:
            raise CannotStart(str(error)) from None

    async def _open_store(self, stack: AsyncExitStack) -> Health:
        """Open the store, the ledger in it, and apply the tenants file."""
        given = self._settings.store
        try:
            url = given.url
            if url is None:
                embedded = EmbeddedValkey(given.data_dir or Path(".kvgate"))
                async with embedded.alone():  # else it might attach to a command's, which is about to end
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
        self._metrics.rule = self._settings.fairness.rule(self._settings.engine.prefill_tokens_max)
        ledger = SharedLedger(
            client,
            engine_id(str(self._settings.engine.url)),
            self._clock,
            SharedSettings(
                lease_ttl_s=given.lease_ttl_s,
                drain_max_s=self._settings.engine.drain_max_s,
                local=given.on_outage == "local",
                reserve_slots=given.outage_reserve_slots,
                rule=self._metrics.rule,
            ),
            self._metrics.freed,
        )
        stack.push_async_callback(ledger.leave)
        await self._run_beside(stack, [ledger.run()])
        file = TenantsFile(self._settings, tenants)
        try:
            await file.apply()
        except NotApplied as error:
            raise CannotStart(str(error)) from None
        sizes = RecentSizes(client)
        stack.push_async_callback(sizes.flush)
        reports = Reports(client, keep_s=self._settings.report.keep_s, kept_max=self._settings.report.kept_max)
        stack.push_async_callback(reports.flush)
        await self._run_beside(stack, [sizes.run(), reports.run()])
        reuse = await self._open_reuse(stack, client, tenants)
        warmth = Warmth(secrets.token_bytes(32))
        gate = Gate(self._engine, ledger, new_id=lambda: secrets.token_hex(16), rule=reuse, warmth=warmth)
        return Health(
            self._settings,
            self._engine,
            ledger,
            self._metrics,
            tenants,
            file,
            self._make_front(gate, tenants, _Observers(self._metrics, RequestLog(), sizes, reports, reuse)),
            self._life,
            SlotsWatch(self._engine, ledger, self._clock),
            Explainer(gate, tenants, served_routes(), ledger.view).explain,
            reports.of,
            reuse,
        )

    async def _open_reuse(self, stack: AsyncExitStack, client: StoreClient, tenants: ValkeyTenants) -> ReuseKeeper:
        """Who keeps prefix reuse to those who may have it, told by the store before the first request."""
        canary = CanaryStore(client)
        watch = CanaryWatch(canary)
        await watch.refresh()
        reuse = ReuseKeeper(
            canary,
            watch,
            tenants,
            dedicated_to=self._settings.engine.dedicated_to,
            profile=lambda: self._engine.profile,
            clock=self._clock,
        )
        await self._run_beside(stack, [watch.watch(), reuse.run()])
        return reuse

    def _make_front(self, gate: Gate, tenants: ValkeyTenants, observer: _Observers) -> Front:
        return Front(
            gate,
            self._engine,
            tenants=tenants,
            routes=served_routes(),
            observer=observer,
            clock=self._clock,
            settings=_web_settings(self._settings),
        )


def engine_settings(settings: Settings) -> LlamaCppSettings:
    """What the settings say of the engine."""
    given = settings.engine
    topology = None if given.kv_topology == "auto" else Topology(given.kv_topology)
    return LlamaCppSettings(
        kv=KvSettings(topology, given.pool_tokens),
        context_tokens_min=given.context_tokens_min,
        undersized_refused=given.on_undersized == "refuse",
        margin_tokens=given.margin_tokens,
        headroom_ratio=given.pool_headroom_ratio,
        idle_timeout_s=given.idle_timeout_s,
        counting=CountingSettings(local=given.counting == "auto", vocabulary=given.tokenizer),
    )


def _web_settings(settings: Settings) -> WebSettings:
    given = settings.http
    return WebSettings(
        body_bytes_max=given.body_bytes_max,
        body_timeout_s=given.body_timeout_s,
        write_timeout_s=given.write_timeout_s,
        anonymous_tenant=settings.anonymous_tenant,
        cors_origins=frozenset(given.cors_origins),
    )


async def open_listener(
    stack: AsyncExitStack, runner: web.BaseRunner, address: str | Path, *, shared: bool = False
) -> str:
    """Listen on HOST:PORT, or on a unix socket; its URL, with the port that was found where it says 0.

    `shared`: beside other processes that listen there too.

    Raises:
        CannotStart: somebody else has the address.
    """
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    if isinstance(address, Path):
        await web.UnixSite(runner, str(address)).start()
        return f"unix:{address}"
    host, port = str(address).rsplit(":", 1)
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), reuse_port=shared or None).start()
    except OSError as error:
        cause = error.strerror or str(error)
        raise CannotStart(
            f"cannot listen on {address}: {cause}. Stop who does, or choose another address with --listen or "
            "--admin-listen"
        ) from None
    return f"http://{host}:{runner.addresses[0][1]}"
