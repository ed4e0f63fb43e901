"""Reuse is kept to those who may have it, what should not have been is seen, and evidence is repeated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.app.canary_schedule import BY, CanarySchedule, NoResult
from kvgate.app.canary_schedule import RETRY_S as SCHEDULE_RETRY_S
from kvgate.app.reuse_keeper import RETRY_S, VIOLATION_WARNED_S, ReuseKeeper
from kvgate.core.ask import Usage
from kvgate.core.canary import VIOLATIONS_MAX, CanaryState, Figures, Pin, SuiteReport
from kvgate.core.reuse import Reuse
from kvgate.core.tenant import ReusePolicy, Tenant
from kvgate.ports import RequestRecord
from kvgate.store.canary import CanaryView, CanaryWatch, NotPinned
from kvgate.store.errors import StoreUnavailable
from tests.unit.doubles import ManualClock, profile

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINE = profile()
FIGURES = Figures(0.0, 0.0, 0.5, 0.5)
PASSED = SuiteReport(ENGINE.fingerprint, "<one>", 1, True, 9, 0, FIGURES, 1000.0)
RECORD = RequestRecord(
    "r1", "acme", "openai_chat", "/v1/chat/completions", 200, "admit", "", 0.1, reuse="off", profile=ENGINE
)
CLEAN = replace(RECORD, usage=Usage(9, 1))
VIOLATED = replace(RECORD, usage=Usage(9, 1, 8), reuse_violation=True)


@dataclass
class StoreDouble:
    """Pins and reports in memory; `out` while it does not answer."""

    pins: list[Pin] = field(default_factory=list)
    reports: list[SuiteReport] = field(default_factory=list)
    unpinned: list[tuple[str, str]] = field(default_factory=list)
    out: bool = False
    claims: int = 1
    served: dict[str, frozenset[str]] = field(default_factory=dict)
    named: dict[str, frozenset[str]] = field(default_factory=dict)
    claimed: list[str] = field(default_factory=list)
    held: list[tuple[str, float]] = field(default_factory=list)
    doubted: bool = False

    def _check(self) -> None:
        if self.out:
            raise StoreUnavailable("out")

    async def state(self) -> CanaryState:
        self._check()
        return CanaryState(tuple(self.pins))

    async def view(self) -> CanaryView:
        return CanaryView(await self.state(), tuple(self.reports), ())

    async def claim(self, instance: str, seconds: float) -> bool:
        self._check()
        self.claimed.append(instance)
        self.claims -= 1
        return self.claims >= 0

    async def hold(self, instance: str, seconds: float) -> None:
        self._check()
        self.held.append((instance, seconds))

    async def note_served(
        self, instance: str, strangers: frozenset[str], named: frozenset[str]
    ) -> tuple[frozenset[str], frozenset[str]]:
        self._check()
        noted = self.served[instance] = self.served.get(instance, frozenset()) | strangers
        dedicated = self.named[instance] = self.named.get(instance, frozenset()) | named
        return noted, dedicated

    async def report(self, report: SuiteReport) -> None:
        self._check()
        self.reports.insert(0, report)
        if not report.passed:
            self.pins = []

    async def pin(self, report: SuiteReport, by: str, *, renew: bool = False) -> Pin:
        if renew and not self.pins:
            raise NotPinned("unpinned meanwhile")
        pin = Pin(report.fingerprint, str(report.instance), 1, report.figures, 1.0, by)
        self.pins.append(pin)
        return pin

    async def unpin(
        self, fingerprint: str, *, by: str, why: str, instance: str | None = None, doubt: bool = False
    ) -> int:
        self._check()
        self.doubted = doubt
        self.unpinned.append((fingerprint, why))
        gone, self.pins = len(self.pins), []
        return gone


@dataclass
class TenantsDouble:
    names: dict[str, Tenant]

    def by_name(self, name: str) -> Tenant | None:
        return self.names.get(name)

    def by_key(self, key_sha256: str) -> Tenant | None:
        return None


class World:
    """A keeper over a store in memory, its engine pinned."""

    def __init__(self, *tenants: Tenant, dedicated_to: tuple[str, ...] = ("acme",)) -> None:
        found = tenants or (Tenant("acme", reuse=ReusePolicy.CANARY),)
        self.store = StoreDouble(pins=[Pin(ENGINE.fingerprint, "<one>", 1, FIGURES, 1.0, "ann")])
        store: Any = self.store
        self.clock = ManualClock()
        self.watch = CanaryWatch(store)
        self.engine = ENGINE
        self.tenants = TenantsDouble({tenant.name: tenant for tenant in found})
        self.keeper = ReuseKeeper(
            store,
            self.watch,
            self.tenants,
            dedicated_to=dedicated_to,
            profile=lambda: self.engine,
            clock=self.clock,
        )

    def of(self, name: str = "acme") -> Reuse:
        return self.keeper.of(self.tenants.names[name], ENGINE, asked=False)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a task does beside the test."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the keeper tells of no event
            await asyncio.sleep(0.001)


# -- the rule on what is known


async def test_reuse_follows_the_pin_and_the_store() -> None:
    """Unknown is off, pinned is on, an outage is off again."""
    world = World()
    seen = [world.of()]
    await world.watch.refresh()
    seen.append(world.of())
    world.store.out = True
    await world.watch.refresh()
    seen.append(world.of())
    assert seen == [Reuse.OFF, Reuse.KEEP, Reuse.OFF]


async def test_one_tenant_off_the_list_takes_it_from_all_who_share_the_engine() -> None:
    """What that one left can be found until the process is gone, also once it is on the list."""
    acme, beta = Tenant("acme", reuse=ReusePolicy.CANARY), Tenant("beta")
    world = World(acme, beta, dedicated_to=("acme", "beta"))
    await world.watch.refresh()
    assert world.of() is Reuse.OFF
    assert "also serves" in world.keeper.told()["tenants"]["acme"]
    world.tenants.names["beta"] = replace(beta, reuse=ReusePolicy.CANARY)
    await world.watch.refresh()
    assert world.of() is Reuse.OFF
    assert "has served beta" in world.keeper.told()["tenants"]["acme"]
    world.store.served.clear()  # another process
    await world.watch.refresh()
    assert world.keeper.told()["tenants"] == {"acme": "on", "beta": "on"}
    assert world.of() is Reuse.KEEP


async def test_a_gate_that_serves_everybody_says_so_to_all_gates() -> None:
    """An engine is not dedicated by one of its gates alone."""
    shared, world = World(dedicated_to=()), World()
    shared.watch = CanaryWatch(world.store)  # type: ignore[arg-type]
    await shared.keeper.look()
    world.store.served |= shared.store.served
    await world.watch.refresh()
    assert world.store.served == {"<one>": {"*"}}
    assert world.of() is Reuse.OFF


async def test_gates_that_name_other_tenants_take_reuse_from_each_other() -> None:
    """All are on the list, but who wrote one name believes it alone; a name that is no tenant counts for nothing."""
    acme, beta = (Tenant(name, reuse=ReusePolicy.CANARY) for name in ("acme", "beta"))
    one, other = World(acme, beta), World(acme, beta, dedicated_to=("beta", "betta"))
    same = World(acme, beta, dedicated_to=("acme", "beta"))
    for world in (other, same):
        world.watch._store = one.watch._store
    await one.watch.refresh()
    assert one.of() is Reuse.KEEP
    for world in (other, one, same):
        await world.watch.refresh()
    assert one.of() is Reuse.OFF
    assert "another gate's engine.dedicated_to names beta for" in one.keeper.told()["tenants"]["acme"]
    assert [same.of(name) for name in ("acme", "beta")] == [Reuse.KEEP, Reuse.KEEP]


def test_a_dedicated_engine_serves_its_tenants_and_the_suite() -> None:
    """And an engine that is not dedicated serves everybody."""
    suite = Tenant("kvgate-suite", reuse=ReusePolicy.SUITE)
    assert [World().keeper.serves(one) for one in (Tenant("acme"), Tenant("beta"), suite)] == [True, False, True]
    assert World(dedicated_to=()).keeper.serves(Tenant("beta"))


def test_a_name_that_is_no_tenant_is_warned_of() -> None:
    """A typing error would look like an engine that serves nobody."""
    assert "'acmee'" in World(dedicated_to=("acmee",)).keeper.warnings()[0]


# -- violations


async def test_violations_in_a_row_unpin_and_until_the_store_knows_reuse_is_off_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the store is out; and the reason is in the history."""
    monkeypatch.setattr("kvgate.app.reuse_keeper.RETRY_S", 0.001)
    assert RETRY_S > 0
    world = World()
    await world.watch.refresh()
    job = asyncio.create_task(world.keeper.run())
    for _ in range(VIOLATIONS_MAX - 1):
        world.keeper.request(VIOLATED)
    assert world.of() is Reuse.KEEP
    world.store.out = True
    world.keeper.request(VIOLATED)
    assert world.of() is Reuse.OFF
    await asyncio.sleep(0.01)
    assert world.store.unpinned == []
    world.store.out = False
    await until(lambda: bool(world.store.unpinned))
    ((fingerprint, why),) = world.store.unpinned
    assert fingerprint == ENGINE.fingerprint
    assert "3 answers in a row" in why
    assert world.store.doubted
    assert world.of() is Reuse.OFF
    job.cancel()


async def test_a_clean_answer_in_between_begins_anew() -> None:
    """Each violation is counted, and warned of for an hour."""
    world = World()
    await world.watch.refresh()
    for record in (VIOLATED, VIOLATED, CLEAN, VIOLATED, VIOLATED):
        world.keeper.request(record)
    assert world.of() is Reuse.KEEP
    told = world.keeper.told()
    assert (told["violations"], told["violations_in_a_row"]) == (4, 2)
    assert "4 answers" in world.keeper.warnings()[0]
    assert "--no-cache-prompt" in world.keeper.warnings()[0]
    world.clock.advance(VIOLATION_WARNED_S)
    assert world.keeper.warnings() == []


def test_cached_tokens_of_who_may_reuse_are_no_violation() -> None:
    """Nor does an answer that told nothing say anything."""
    world = World()
    world.keeper.request(replace(RECORD, reuse="on", usage=Usage(9, 1, 8)))
    world.keeper.request(RECORD)
    assert world.keeper.told()["violations"] == 0


# -- the schedule


class Scheduled(World):
    """A schedule with a runner that gives what the test says."""

    def __init__(self, found: SuiteReport | Exception) -> None:
        super().__init__()
        self.found = found
        self.runs: list[str] = []
        self.now_s = 1000.0
        self.long_enough: Callable[[], bool] = lambda: True
        self.meanwhile: Callable[[], None] = lambda: None
        store: Any = self.store
        self.schedule = CanarySchedule(
            self.run, store, self.watch, profile=lambda: self.engine, every_s=100, now=lambda: self.now_s
        )

    async def run(self, url: str) -> SuiteReport:
        self.runs.append(url)
        await until(self.long_enough)
        self.meanwhile()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def look(self) -> SuiteReport | None:
        await self.watch.refresh()
        return await self.schedule.look("http://gate")


async def test_a_pinned_engine_is_tried_again_when_it_is_time() -> None:
    """Not before, and its pin is renewed."""
    world = Scheduled(replace(PASSED, finished_at_s=1100.0))
    world.store.reports = [PASSED]
    world.now_s = 1099.9
    assert (await world.look(), world.runs) == (None, [])
    world.now_s = 1100.0
    assert await world.look() == world.found
    assert world.runs == ["http://gate"]
    assert world.store.pins[-1].by == BY


async def test_a_failure_unpins_by_itself() -> None:
    """And what is unpinned is not tried again: that is the operator's to do."""
    world = Scheduled(replace(PASSED, passed=False, cases_failed=1))
    await world.look()
    assert world.store.pins == []
    assert world.of() is Reuse.OFF
    world.store.claims, world.now_s = 1, 9999.0
    assert await world.look() is None
    assert len(world.runs) == 1


async def test_who_unpins_in_mid_run_has_the_last_word(caplog: pytest.LogCaptureFixture) -> None:
    """A run that passes renews a pin, and makes none."""
    world = Scheduled(PASSED)
    world.meanwhile = world.store.pins.clear
    assert await world.look() is None
    assert world.store.reports == [PASSED]
    assert world.store.pins == []
    assert caplog.records[-1].__dict__["problem"] == "unpinned meanwhile"


async def test_a_run_that_failed_is_recorded_as_soon_as_the_store_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the pin would come back with the store."""
    monkeypatch.setattr("kvgate.app.canary_schedule.RECORD_AGAIN_S", 0.001)
    world = Scheduled(replace(PASSED, passed=False, cases_failed=1))

    def out() -> None:
        world.store.out = True

    world.meanwhile = out
    looking = asyncio.create_task(world.look())
    await until(lambda: bool(world.runs))
    await asyncio.sleep(0.01)
    assert (looking.done(), len(world.store.pins)) == (False, 1)
    world.store.out = False
    assert await looking == world.found
    assert world.store.pins == []


async def test_a_run_without_a_result_says_why_and_is_not_tried_again_soon(caplog: pytest.LogCaptureFixture) -> None:
    """By any gate, on this process; on another one it may be."""
    world = Scheduled(NoResult("its slots are too small"))
    await world.look()
    assert caplog.records[-1].__dict__["problem"] == "its slots are too small"
    assert world.store.claimed == ["<one>"]
    assert world.store.held == [("<one>", SCHEDULE_RETRY_S)]


async def test_a_long_run_stays_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a second gate would begin beside it; once it is over nobody holds the claim up."""
    monkeypatch.setattr("kvgate.app.canary_schedule.CLAIM_S", 0.003)
    world = Scheduled(PASSED)
    world.long_enough = lambda: len(world.store.held) > 2
    assert await world.look() == PASSED
    held = len(world.store.held)
    await asyncio.sleep(0.01)
    assert len(world.store.held) == held


async def test_the_successor_of_a_pinned_process_is_tried_at_once_and_pinned() -> None:
    """The same fingerprint, another process: reuse is off until it has passed."""
    world = Scheduled(replace(PASSED, instance="<two>"))
    world.store.reports = [PASSED]
    world.engine = replace(ENGINE, instance="<two>")
    await world.look()
    assert [pin.instance for pin in world.store.pins] == ["<one>", "<two>"]


@pytest.mark.parametrize("other", [{"build": "b2"}, {"instance": None}])
async def test_an_engine_that_nobody_pinned_is_left_alone(other: dict[str, Any]) -> None:
    """Nor one that could not be told from its successor."""
    world = Scheduled(PASSED)
    world.engine = replace(ENGINE, **other)
    assert (await world.look(), world.runs) == (None, [])


async def test_of_several_gates_one_runs_it() -> None:
    """The others look again later."""
    world = Scheduled(PASSED)
    world.store.claims = 0
    assert (await world.look(), world.runs) == (None, [])


@pytest.mark.parametrize("trouble", [StoreUnavailable("out"), RuntimeError("the prompt was: secret")])
async def test_a_run_without_a_result_changes_nothing(trouble: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged without the words of the error, which may quote a prompt."""
    world = Scheduled(trouble)
    assert await world.look() is None
    assert len(world.store.pins) == 1
    assert "secret" not in caplog.text
    assert len(caplog.records) == 1


def test_there_is_a_schedule_where_one_is_wanted_and_somebody_runs_it() -> None:
    world = Scheduled(PASSED)
    schedules = [world.keeper.schedule(run, every_h) for run in (None, world.run) for every_h in (0.0, 2.0)]
    assert [schedule is not None for schedule in schedules] == [False, False, False, True]
