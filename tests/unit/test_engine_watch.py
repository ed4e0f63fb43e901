"""The watchers beside the gate: every state is noticed, told once, and left again by itself; looks wake nobody."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.app import engine_watch as module
from kvgate.app.engine_watch import LifeWatch, SlotsLedger, SlotsWatch, look_at
from kvgate.core.ask import Size
from kvgate.core.engine_state import EngineState, Trouble
from kvgate.core.foreign import Tally
from kvgate.core.ledger import Reservation
from kvgate.core.profile import KvSettings
from kvgate.core.tenant import Quota
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.engines.llamacpp import calls as calls_module
from kvgate.metrics import Metrics
from kvgate.ports import Refused
from kvgate.store.local_ledger import LocalLedger
from kvgate.upstream import trouble_of
from tests import fake_engine as fault
from tests.fake_engine import COUNTER, FakeEngine, whole
from tests.unit.doubles import ManualClock, chat
from tests.unit.test_llamacpp import UNPROMPTED, until, until_gone
from tests.unit.test_metrics import value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvgate.core.drain import SlotsSeen
    from kvgate.core.ledger import LedgerView

BUSY = {"is_processing": True, "id_task": 7, "params": {"n_predict": 30}}


class World:
    """A fake engine, what watches it, and time that passes when told to."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.engine = engine
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.watch = LifeWatch(self.clock, self.metrics)
        self.llama = LlamaCpp(
            engine.url, LlamaCppSettings(KvSettings(), **settings), self.clock, on_profile=self.watch.profile
        )

    async def look(self) -> EngineState:
        self.clock.advance(1)
        self.watch.looked(await look_at(self.llama))
        return self.watch.life.state

    async def replaced(self, **changes: Any) -> None:
        await self.engine.replace(**changes)
        await until_gone(self.llama)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as found:
        yield found


@pytest.fixture
async def world(engine: FakeEngine) -> AsyncIterator[World]:
    found = World(engine)
    yield found
    await found.llama.close()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The states that the log was told of, in order."""
    return [record.state for record in caplog.records if hasattr(record, "state")]


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvgate.engine")


# -- states, and the way back


def _stop(engine: FakeEngine) -> None:
    engine.script("/health", *[fault.close_before_head] * 3)


def _load(engine: FakeEngine) -> None:
    engine.loading = True


def _hide(engine: FakeEngine) -> None:
    engine.script("/props", *[whole("404 Not Found", {})] * 3)


def _hang(engine: FakeEngine) -> None:
    engine.script("/health", *[fault.stall] * 3)


def _sleep(engine: FakeEngine) -> None:
    engine.asleep = True


def _shrink(engine: FakeEngine) -> None:
    engine.n_ctx = 256


@pytest.mark.parametrize(
    ("ail", "state"),
    [
        (_stop, EngineState.UNREACHABLE),
        (_load, EngineState.LOADING),
        (_hide, EngineState.UNKNOWN),
        (_hang, EngineState.HUNG),
        (_sleep, EngineState.ASLEEP),
        (_shrink, EngineState.UNDERSIZED),
    ],
)
async def test_every_state_is_told_once_and_left_by_itself(
    engine: FakeEngine,
    ail: Callable[[FakeEngine], None],
    state: EngineState,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line when it begins, none while it stays, one when the engine serves again; nobody does anything."""
    monkeypatch.setattr(calls_module, "HELLO_TIMEOUT_S", 0.2)
    world = World(engine, context_tokens_min=400)
    assert await world.look() is EngineState.SERVING
    await world.llama.close()
    ail(engine)
    for _ in range(3):
        assert await world.look() is state
        await world.llama.close()
    assert told(caplog) == [state.label]
    engine.loading = engine.asleep = False
    engine.n_ctx = 512
    engine._scripts.clear()
    assert await world.look() is EngineState.SERVING
    assert told(caplog) == [state.label, "serving"]
    assert world.watch.told()["sentence"] == "the engine serves"
    await world.llama.close()


async def test_an_engine_that_is_found_at_the_start_is_told_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.look()
    assert caplog.records[0].message == "engine found"
    assert told(caplog) == []


async def test_a_crash_is_told_from_an_engine_that_never_was(world: World) -> None:
    """The port is closed both times; what the operator should do differs."""
    await world.engine.stop()
    assert await world.look() is EngineState.UNREACHABLE
    assert world.watch.life.look.trouble is Trouble.REFUSED
    assert "never been reached" in world.watch.told()["sentence"]
    await world.engine.start()
    assert await world.look() is EngineState.SERVING
    await world.engine.stop()
    await until_gone(world.llama)
    assert await world.look() is EngineState.UNREACHABLE
    assert "it was serving until 1 s ago and is gone" in world.watch.told()["sentence"]
    assert world.engine.url in world.watch.told()["sentence"]


async def test_an_engine_that_hides_something_is_told_by_what(world: World) -> None:
    _hide(world.engine)
    await world.look()
    assert "GET /props answered 404" in world.watch.told()["sentence"]


async def test_an_undersized_engine_is_told_with_both_figures(engine: FakeEngine) -> None:
    world = World(engine, context_tokens_min=4096)
    await world.look()
    sentence = world.watch.told()["sentence"]
    assert "a slot has 512 tokens" in sentence
    assert "context_tokens_min = 4096" in sentence
    await world.llama.close()


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), Trouble.REFUSED),
        (OSError("Multiple exceptions: [Errno 111] Connect call ('::1', 1), [Errno 111] Connect"), Trouble.REFUSED),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Trouble.NAME_UNKNOWN),
        (OSError(errno.EHOSTUNREACH, "No route to host"), Trouble.NO_ROUTE),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), Trouble.NO_ROUTE),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Trouble.BROKEN),
        (ssl.SSLError(1, "wrong version number"), Trouble.TLS),
        (OSError(errno.EMFILE, "Too many open files"), Trouble.NO_CONNECTION),
    ],
)
def test_why_there_is_no_connection_is_known(error: OSError, trouble: Trouble) -> None:
    assert trouble_of(error) is trouble


async def test_an_engine_that_hangs_is_asked_again_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try costs its caller the whole timeout: clients are told to wait longer than for one that restarts."""
    monkeypatch.setattr(calls_module, "HELLO_TIMEOUT_S", 0.2)
    world.engine.script("/health", fault.stall)
    with pytest.raises(Refused) as hung:
        await world.llama.discover()
    await until_gone(world.llama)
    await world.engine.stop()
    with pytest.raises(Refused) as gone:
        await world.llama.discover()
    assert (hung.value.refusal.retry_after_s or 0) > (gone.value.refusal.retry_after_s or 0) > 0


async def test_a_replacement_is_warned_of_and_counted(world: World) -> None:
    await world.look()
    await world.replaced(n_ctx=256)
    await world.look()
    assert "n_ctx_slot 512 -> 256" in world.watch.warnings()[0]
    assert value(world.metrics, "kvgate_engine_changes_total", what="smaller") == 1
    await world.replaced(n_ctx=256)
    await world.look()
    assert value(world.metrics, "kvgate_engine_changes_total", what="restarted") == 1
    await world.replaced(n_ctx=512)
    await world.look()
    assert value(world.metrics, "kvgate_engine_changes_total", what="larger") == 1
    assert world.watch.warnings() == []


# -- sleep


async def test_watching_never_wakes_an_engine(world: World) -> None:
    """Neither the very first look at it, nor later ones, on old connections or new ones; nor one at its slots."""
    world.engine.asleep = True
    for _ in range(3):
        assert await world.look() is EngineState.ASLEEP
        seen = await world.llama.look()
        assert seen is not None
        assert seen.busy == ()
        await world.llama.close()
    assert world.engine.wakes == 0
    assert world.engine.asked("/slots") == []
    assert world.llama.profile is not None
    assert world.llama.profile.n_ctx_slot.value == 512
    assert world.llama.profile.slots_visible


async def test_sleep_is_no_other_engine(world: World) -> None:
    """What `/props` says of its sleep is no part of what it is: nothing is discovered anew, nothing is replaced."""
    await world.look()
    before = world.llama.profile
    for asleep in (True, False, True):
        world.engine.asleep = asleep
        await world.llama.close()
        await world.look()
        assert world.llama.profile is before
    assert len(world.engine.asked("/slots")) == 1


async def test_an_engine_that_was_first_seen_asleep_shows_its_slots_when_it_is_up(world: World) -> None:
    """A slot may hold less than /props says: what was found asleep is looked at again, not before it has loaded."""
    world.engine.asleep, world.engine.slots_n_ctx = True, 256
    await world.look()
    world.engine.asleep = False  # somebody woke it; it may be loading still
    await world.llama.close()
    await world.look()
    assert world.engine.asked("/slots") == []
    await world.llama.count("openai_chat", UNPROMPTED, chat())
    await world.llama.close()
    await world.look()
    assert world.llama.profile is not None
    assert world.llama.profile.n_ctx_slot.value == 256
    assert world.watch.told()["changed"] is None


async def test_a_request_wakes_it_and_waits_for_the_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a count may take otherwise, also for those that come while it loads; and no longer afterwards."""
    monkeypatch.setattr(calls_module, "CONTROL_TIMEOUT_S", 0.1)
    world.engine.asleep, world.engine.load_s = True, 0.5
    await world.look()
    first = asyncio.create_task(world.llama.count("openai_chat", UNPROMPTED, chat()))
    await until(lambda: world.engine.wakes == 1)
    await world.look()  # it says that it sleeps no more, while it loads
    assert (await first).prompts == (31,)
    world.engine.script(COUNTER, fault.stall)
    with pytest.raises(Refused):
        await world.llama.count("openai_chat", UNPROMPTED, chat())


# -- the slots


class HeldHere(SlotsLedger):
    """The rule, in memory."""

    def __init__(self, clock: ManualClock) -> None:
        self.local = LocalLedger(clock, 60)

    @property
    def draining(self) -> asyncio.Event:
        return self.local.draining

    async def observe(self, seen: SlotsSeen) -> Tally | None:
        tally = await self.tally()
        self.local.observe(seen)
        self.local.expire()
        return tally

    async def expire(self) -> None:
        self.local.expire()

    async def tally(self) -> Tally | None:
        return Tally() if self.local._ledger is None else self.local._ledger.tally()

    def view(self) -> LedgerView | None:
        return self.local.view()


def local(slots: SlotsWatch) -> LocalLedger:
    assert isinstance(slots._ledger, HeldHere)
    return slots._ledger.local


@pytest.fixture
async def slots(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlotsWatch]:
    monkeypatch.setattr(module, "FOREIGN_POLL_S", 0.01)
    monkeypatch.setattr(module, "DRAIN_POLL_S", 0)
    found = SlotsWatch(world.llama, HeldHere(world.clock), world.clock)
    task = asyncio.create_task(found.run())
    yield found
    task.cancel()
    await asyncio.wait([task])


async def held(slots: SlotsWatch, lease_id: str) -> None:
    profile = await slots._engine.discover()
    size = Size(90, 10, 1)
    await local(slots).reserve(Reservation(lease_id, "acme", Quota(), size), slots._engine.pool(profile))


async def more_looks(world: World, number: int) -> None:
    wanted = len(world.engine.asked("/slots")) + number
    await until(lambda: len(world.engine.asked("/slots")) >= wanted)


async def test_a_foreigner_is_told_of_at_the_beginning_and_at_the_end(
    world: World, slots: SlotsWatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line each, and the warning in between, however often the slots are looked at."""
    await held(slots, "a")
    world.engine.busy = [BUSY, {**BUSY, "id_task": 8}]
    await more_looks(world, 2)
    assert slots.warning() is None
    world.clock.advance(2)
    await until(lambda: slots.foreign.is_on)
    assert "1 busy slot more than leases" in (slots.warning() or "")
    await more_looks(world, 3)
    world.engine.busy = [BUSY]
    await until(lambda: slots.foreign.slots == 0)
    world.clock.advance(20)
    await until(lambda: not slots.foreign.is_on)
    assert slots.warning() is None
    lines = [record.message for record in caplog.records if "around this gate" in record.message]
    assert lines == [
        "somebody uses the engine around this gate",
        "nobody uses the engine around this gate any more",
    ]


async def test_an_idle_gate_does_not_look(world: World, slots: SlotsWatch) -> None:
    """One look after the last lease, then none: the engine may sleep."""
    await held(slots, "a")
    await more_looks(world, 1)
    await local(slots).settle("a", ended=True)
    async with asyncio.timeout(10):
        while await slots._wants_look():  # noqa: ASYNC110 - another task tells of no event
            await asyncio.sleep(0.005)
    number = len(world.engine.asked("/slots"))
    await asyncio.sleep(0.1)
    assert len(world.engine.asked("/slots")) <= number + 1  # one may have been on its way


async def test_traffic_that_is_over_is_looked_after_once(world: World) -> None:
    """Short requests between two looks are traffic too; an old grant is none."""
    slots = SlotsWatch(world.llama, HeldHere(world.clock), world.clock)
    assert not await slots._wants_look()
    await held(slots, "a")
    await local(slots).settle("a", ended=True)
    assert await slots._wants_look()
    await slots._look()
    assert not await slots._wants_look()


async def test_looks_do_not_pile_up_behind_one_that_is_late(world: World, slots: SlotsWatch) -> None:
    """During a long prefill /slots answers late."""
    release = asyncio.Event()

    async def late(exchange: fault.Exchange) -> None:
        await release.wait()
        await fault.usual(exchange)

    await held(slots, "a")
    await more_looks(world, 1)
    world.engine.script("/slots", late)
    await until(lambda: not world.engine._scripts["/slots"])
    number = len(world.engine.asked("/slots"))
    local(slots).hand_over("a")
    await local(slots).settle("a", ended=False)
    await asyncio.sleep(0.1)
    assert len(world.engine.asked("/slots")) == number
    release.set()
    await more_looks(world, 1)
