"""The ledger against random stories of clients and an engine that does whatever it may do."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgate.core.ask import Size
from kvgate.core.drain import HANDOVER_S, SETTLE_S, BusySlot, DrainWatch, LeaseFacts, SlotsSeen, handover_s
from kvgate.core.fairness import FairRule
from kvgate.core.ledger import (
    Denied,
    Lease,
    Ledger,
    Reservation,
    Ticket,
)
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota

FREE = Quota()

FIRST_COME = FairRule(0, 0, 0, bypass_max=10**9)
"""Service costs nothing, so that whoever came first is next, and may always be passed: fairness has its own tests."""


@dataclass
class Life:
    """One request, as the story knows it."""

    reservation: Reservation
    since_s: float
    engine: int
    cells: int = 0
    handed: bool = False
    launched: bool = False
    queued: int = 0
    gone: bool = False
    done_at_step: int | None = None

    @property
    def lease_id(self) -> str:
        return self.reservation.lease_id

    @property
    def sequences(self) -> int:
        return self.reservation.size.sequences


@dataclass
class Pending:
    """A request between the gate and a slot; a late one is launched right behind the first look after its time."""

    life: Life
    until_s: float
    late: bool


@dataclass
class SimulatedEngine:
    """An engine that does whatever the story wants, within what `Ledger` assumes of it."""

    slots: int
    tasks: dict[int, tuple[int, Life]] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    last_task_id: int = 0

    def launch(self, life: Life) -> None:
        del self.pending[life.lease_id]
        idle = [slot for slot in range(self.slots) if slot not in self.tasks]
        assert len(idle) >= life.sequences, "the engine's own queue is used: a drain was ended too early"
        for slot in idle[: life.sequences]:
            self.last_task_id += 1
            self.tasks[slot] = (self.last_task_id, life)
        life.launched, life.queued = True, life.reservation.size.queued

    def go_on(self, slot: int, life: Life) -> None:
        """The next prompt of its list, in the slot that has just come free."""
        life.queued -= 1
        self.last_task_id += 1
        self.tasks[slot] = (self.last_task_id, life)

    def works_for(self, life: Life) -> bool:
        return life.lease_id in self.pending or any(running is life for _, running in self.tasks.values())

    def drop(self, life: Life) -> None:
        self.pending.pop(life.lease_id, None)
        self.tasks = {slot: task for slot, task in self.tasks.items() if task[1] is not life}

    def busy(self, kind: str) -> tuple[BusySlot, ...]:
        if kind == "counted":
            return tuple(BusySlot(number, None, None) for number in range(len(self.tasks)))
        return tuple(
            BusySlot(
                slot,
                None if kind == "no tasks" else task_id,
                None if kind == "no limits" else life.reservation.size.output_tokens or -1,
            )
            for slot, (task_id, life) in self.tasks.items()
        )


@dataclass
class Look:
    asked_at_s: float
    kind: str
    busy: tuple[BusySlot, ...] | None = None
    taken_at_step: int = 0


margins = st.sampled_from([0, 0, 4])
pools = st.one_of(
    st.builds(
        lambda slots, margin: KvPool(100 * slots, slots, 100, margin_tokens=margin), st.integers(1, 4), margins
    ),
    st.builds(
        lambda tokens, slots, margin, headroom: KvPool(
            tokens, slots, 100, prompt_shared=True, margin_tokens=margin, headroom_tokens=headroom
        ),
        st.integers(100, 400),
        st.integers(1, 5),
        margins,
        st.sampled_from([0, 0, 20]),
    ),
)
quotas = st.builds(
    Quota,
    concurrency_max=st.sampled_from([None, None, 1, 2, 3]),
    kv_tokens_max=st.sampled_from([None, None, 60, 120, 200]),
    queue_max=st.sampled_from([0, 1, 2, 8]),
)
outputs = st.sampled_from([16, 16, 16, 40, 0])
lists = st.builds(
    lambda prompts, output, queued: Size(
        max(prompts), output, len(prompts), tuple(prompts) if len(prompts) > 1 else (), queued
    ),
    st.lists(st.sampled_from([0, 1, 20, 40]), min_size=1, max_size=3),
    outputs,
    st.sampled_from([0, 1, 3]),
)
sizes = lists | st.builds(
    Size,
    prompt_tokens=st.sampled_from([0, 1, 20, 40, 60, 84]),
    output_tokens=outputs,
    sequences=st.sampled_from([1, 1, 1, 1, 2, 3]),
)
TENANTS = ("a", "b", "c")


class Story(RuleBasedStateMachine):
    """Any number of clients, hang-ups and looks, in any order.

    The story keeps its own, naive account of who should hold what and who should be next, and an engine. It
    keeps to what `Ledger` assumes: a request is in its slots within HANDOVER_S of its handover or right behind
    the next look, a look shows one moment between its asking and its arrival, and a lease whose last task
    ended before a look is settled before the look after that.
    """

    def begin(self, pool: KvPool, quotas: list[Quota], kinds: tuple[str, ...]) -> None:
        self.ledger = Ledger(pool, drain_max_s=1000.0, rule=FIRST_COME)
        self.pool = pool
        self.quotas = dict(zip(TENANTS, quotas, strict=True))
        self.kinds = kinds
        self.now_s = 0.0
        self.step = 0
        self.queue: list[Life] = []
        self.held: list[Life] = []
        self.ever: list[str] = []
        self.engines = 1
        self.engine = SimulatedEngine(pool.slots)
        self.look: Look | None = None
        self.last_look_step = 0
        self.overdue = 0

    # -- the naive account

    def fits(self, life: Life) -> bool:
        return (
            sum(other.sequences for other in self.held) + life.sequences <= self.pool.slots
            and sum(other.cells for other in self.held) + self.pool.cells(life.reservation.size)
            <= self.pool.tokens - self.pool.headroom_tokens
        )

    def inside_quota(self, life: Life) -> bool:
        mine = [other for other in self.held if other.reservation.tenant == life.reservation.tenant]
        quota = life.reservation.quota
        sequences = sum(other.sequences for other in mine) + life.sequences
        cells = sum(other.cells for other in mine) + self.pool.cells(life.reservation.size)
        return sequences <= (quota.concurrency_max or sequences) and cells <= (quota.kv_tokens_max or cells)

    def next_in_line(self) -> Life | None:
        heads: dict[str, Life] = {}
        for life in self.queue:
            heads.setdefault(life.reservation.tenant, life)
        return next(
            (
                life
                for life in self.queue
                if life is heads[life.reservation.tenant] and self.inside_quota(life) and self.fits(life)
            ),
            None,
        )

    def expect(self, granted: tuple[Lease | Denied, ...]) -> None:
        """Those let in are the first eligible ones that fit, in order, and nobody who could go is left."""
        for lease in granted:
            life = self.next_in_line()
            assert life is not None
            cells = self.pool.cells(life.reservation.size)
            assert lease == Lease(life.lease_id, cells, life.sequences, self.now_s - life.since_s)
            self.queue.remove(life)
            life.cells, life.engine = cells, self.engines
            self.held.append(life)
        assert self.next_in_line() is None, "a request waits although it is next and fits"

    def free(self, life: Life) -> None:
        self.held.remove(life)
        self.ever.append(life.lease_id)

    def pick(self, data: st.DataObject, lives: list[Life]) -> Life:
        return data.draw(st.sampled_from(lives))

    def running(self) -> list[Life]:
        return [life for life in self.held if not life.gone]

    def answering(self) -> list[Life]:
        return [life for life in self.running() if life.launched]

    def ended(self) -> list[Life]:
        return [life for life in self.running() if life.done_at_step is not None]

    # -- what clients, the gate and the engine do

    def ask_for(self, tenant: str, size: Size) -> Life:
        self.step += 1
        life = Life(Reservation(f"r{self.step}", tenant, self.quotas[tenant], size), self.now_s, self.engines)
        before, waiting = self.ledger.view(), [w for w in self.queue if w.reservation.tenant == tenant]
        answer = self.ledger.reserve(life.reservation, self.now_s)
        never = (
            size.prompt_tokens + size.output_tokens + self.pool.margin_tokens > self.pool.tokens_per_slot
            or size.sequences > self.pool.slots
            or self.pool.cells(size) > self.pool.grantable_tokens
        )
        if isinstance(answer, Denied):
            assert answer.reason is (Reason.ENGINE_CHANGED if never else Reason.QUEUE_FULL)
            assert never or len(waiting) >= life.reservation.quota.queue_max
            assert answer.waiting == len(waiting)
            assert self.ledger.view() == before, "a refusal left something behind"
            self.ever.append(life.lease_id)
            self.expect(())
            return life
        assert not never
        self.queue.append(life)
        self.expect((answer,) if isinstance(answer, Lease) else ())
        assert life in self.held or answer == Ticket(life.lease_id, len(self.queue) - 1)
        return life

    def start(self, life: Life) -> None:
        self.hand_over_now(life, late=False)
        self.engine.launch(life)
        self.ledger.answered(life.lease_id, self.now_s)

    def hand_over_now(self, life: Life, *, late: bool) -> None:
        self.ledger.hand_over(life.lease_id, self.now_s)
        life.handed = True
        self.engine.pending[life.lease_id] = Pending(
            life, self.now_s + handover_s(sum(life.reservation.size.distinct)), late
        )

    @precondition(lambda self: self.answering())
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.ledger.answered(self.pick(data, self.answering()).lease_id, self.now_s)

    def leave(self, life: Life) -> None:
        self.queue.remove(life)
        self.ever.append(life.lease_id)
        self.expect(self.ledger.cancel(life.lease_id, self.now_s))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        self.hang_up_now(self.pick(data, self.running()))

    def hang_up_now(self, life: Life) -> None:
        life.gone = True
        if not life.handed:
            self.free(life)
        self.expect(self.ledger.settle(life.lease_id, self.now_s, ended=False))

    @precondition(lambda self: self.ended())
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.settle_now(self.pick(data, self.ended()))

    def settle_now(self, life: Life) -> None:
        self.free(life)
        self.expect(self.ledger.settle(life.lease_id, self.now_s, ended=True))

    @precondition(lambda self: self.engine.pending)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        self.engine.launch(self.pick(data, [pending.life for pending in self.engine.pending.values()]))

    @precondition(lambda self: self.engine.tasks)
    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        self.step += 1
        slot = data.draw(st.sampled_from(sorted(self.engine.tasks)))
        _, life = self.engine.tasks.pop(slot)
        if life.queued and life.gone and data.draw(st.booleans()):
            life.queued = 0  # the engine has seen the hang-up
        if life.queued:
            self.engine.go_on(slot, life)
        if not self.engine.works_for(life):
            life.done_at_step = self.step

    @rule(seconds=st.sampled_from([0.125, 0.5, 1.0, HANDOVER_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for pending in list(self.engine.pending.values()):
            if self.now_s >= pending.until_s and not pending.late:
                self.engine.launch(pending.life)

    @precondition(lambda self: self.look is None)
    @rule(data=st.data())
    def look_at_once(self, data: st.DataObject) -> None:
        self.wait(0.125)
        self.look_now(data.draw(st.sampled_from(self.kinds)))

    def look_now(self, kind: str) -> None:
        self.look = Look(self.now_s, kind)
        self.take_look(self.look)
        self.deliver_look(self.look)

    def take_look(self, look: Look) -> None:
        self.step += 1
        look.busy, look.taken_at_step = self.engine.busy(look.kind), self.step
        for pending in list(self.engine.pending.values()):
            if look.asked_at_s >= pending.until_s:
                self.engine.launch(pending.life)

    def deliver_look(self, look: Look) -> None:
        self.look = None
        for life in self.ended():
            if life.done_at_step is not None and life.done_at_step < self.last_look_step:
                self.settle_now(life)
        assert look.busy is not None
        granted = self.observe(SlotsSeen(look.busy, look.asked_at_s, look.kind != "counted"))
        self.last_look_step = look.taken_at_step
        for life in [life for life in self.held if life.gone and life.lease_id not in self.ledger._held]:
            assert not self.engine.works_for(life), "a drain was ended while the engine still worked for it"
            self.free(life)
        self.expect(granted)

    def observe(self, seen: SlotsSeen) -> tuple[Lease, ...]:
        return self.ledger.observe(seen, self.now_s)

    @precondition(lambda self: self.look is None)
    @rule(rarely=st.sampled_from(range(6)))
    def everybody_leaves(self, rarely: int) -> None:
        """Whatever happened: once all clients are gone and the engine is idle, nothing is held."""
        if rarely:
            return
        while self.queue or self.running():
            while self.queue:
                self.leave(self.queue[-1])
            for life in self.running():
                self.hang_up_now(life)
        self.engine = SimulatedEngine(self.pool.slots)
        self.now_s += HANDOVER_S + 1
        for _ in range(2):
            self.look_now(self.kinds[0])
        view = self.ledger.view()
        assert (view.held_tokens, view.running, view.draining, view.waiting) == (0, 0, 0, 0)
        assert not self.ledger.is_draining()

    # -- promises that hold at every moment

    @invariant()
    def the_view_is_the_naive_account(self) -> None:
        view, running, tokens = self.ledger.view(), self.running(), Counter[str]()
        for life in self.held:
            tokens[life.reservation.tenant] += life.cells
        assert view.held_tokens_by_tenant == tuple(sorted(tokens.items()))
        assert view.held_tokens == sum(tokens.values())
        assert view.running == sum(life.sequences for life in running)
        assert view.running + view.draining == sum(life.sequences for life in self.held)
        assert view.waiting == len(self.queue)
        assert view.drains_overdue == self.overdue
        assert self.ledger.is_draining() == any(life.gone for life in self.held)
        assert self.ledger.retry_after_s() >= 0

    @invariant()
    def the_engine_is_never_overcommitted(self) -> None:
        """What the engine really works on fits it, whatever the ledger believes."""
        lives = {id(life): life for _, life in self.engine.tasks.values()}
        assert sum(life.cells for life in lives.values()) <= self.pool.grantable_tokens
        mine = [life for life in self.held if life.engine == self.engines]
        assert sum(life.cells for life in mine) <= self.pool.grantable_tokens
        assert sum(life.sequences for life in mine) <= self.pool.slots

    @invariant()
    def no_tenant_is_above_its_quota(self) -> None:
        for tenant, quota in self.quotas.items():
            mine = [life for life in self.held if life.reservation.tenant == tenant]
            assert quota.concurrency_max is None or sum(life.sequences for life in mine) <= quota.concurrency_max
            assert quota.kv_tokens_max is None or sum(life.cells for life in mine) <= quota.kv_tokens_max
            waiting = [life for life in self.queue if life.reservation.tenant == tenant]
            assert len(waiting) <= quota.queue_max


class LedgerStory(Story):
    """Everything at once: tenants with every Quota, pools of both kinds, slow looks, other engines."""

    @initialize(
        pool=pools,
        limits=st.lists(quotas, min_size=3, max_size=3),
        kinds=st.sampled_from(
            [("told",), ("told",), ("no limits",), ("no tasks",), ("counted",), ("told", "counted")]
        ),
    )
    def start_story(self, pool: KvPool, limits: list[Quota], kinds: tuple[str, ...]) -> None:
        self.begin(pool, limits, kinds)

    @rule(tenant=st.sampled_from(TENANTS), size=sizes, at_once=st.booleans())
    def reserve(self, tenant: str, size: Size, at_once: bool) -> None:
        life = self.ask_for(tenant, size)
        if at_once and life in self.held:
            self.start(life)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def leave_the_queue(self, data: st.DataObject) -> None:
        self.leave(self.pick(data, self.queue))

    def ready(self) -> list[Life]:
        return [life for life in self.held if not life.handed and life.engine == self.engines]

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), late=st.booleans())
    def hand_over(self, data: st.DataObject, late: bool) -> None:
        self.hand_over_now(self.pick(data, self.ready()), late=late)

    @rule(data=st.data(), ended=st.booleans())
    def settle_again(self, data: st.DataObject, ended: bool) -> None:
        known = [*self.ever, *(life.lease_id for life in self.held if life.gone), "unknown"]
        lease_id, before = data.draw(st.sampled_from(known)), self.ledger.view()
        assert self.ledger.settle(lease_id, self.now_s, ended=ended) == ()
        assert self.ledger.cancel(lease_id, self.now_s) == ()
        assert self.ledger.view() == before

    @precondition(lambda self: self.engine.pending)
    @rule(data=st.data())
    def refuse_or_drop(self, data: st.DataObject) -> None:
        life = self.pick(data, [pending.life for pending in self.engine.pending.values()])
        self.engine.drop(life)
        life.done_at_step = self.step

    @precondition(lambda self: self.look is None)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        self.look = Look(self.now_s, data.draw(st.sampled_from(self.kinds)))

    @precondition(lambda self: self.look is not None and self.look.busy is None)
    @rule()
    def take(self) -> None:
        assert self.look is not None
        self.take_look(self.look)

    @precondition(lambda self: self.look is not None and self.look.busy is not None)
    @rule()
    def deliver(self) -> None:
        assert self.look is not None
        self.deliver_look(self.look)

    @precondition(lambda self: self.look is not None)
    @rule()
    def lose(self) -> None:
        self.look = None

    @precondition(lambda self: any(life.gone for life in self.held))
    @rule(rarely=st.sampled_from(range(6)))
    def give_up_drains(self, rarely: int) -> None:
        if rarely:
            return
        self.now_s += 1000.0
        late = [life for life in self.held if life.gone]
        for life in late:  # the engine ends them too: what it would do otherwise is nobody's promise
            self.engine.drop(life)
            self.free(life)
        self.overdue += len(late)
        self.wait(0.0)
        self.expect(self.ledger.expire(self.now_s))

    @rule(pool=pools, rarely=st.sampled_from(range(6)))
    def another_engine(self, pool: KvPool, rarely: int) -> None:
        if rarely:
            return
        self.step += 1
        for life in self.held:
            if self.engine.works_for(life):
                life.done_at_step = self.step
        self.engines += 1
        self.engine, self.pool = SimulatedEngine(pool.slots), pool
        told = self.ledger.resize(pool, self.now_s)
        lost = [answer for answer in told if isinstance(answer, Denied)]
        assert all(denied.reason is Reason.ENGINE_CHANGED for denied in lost)
        stay = [life for life in self.queue if self.could_ever_fit(life.reservation.size)]
        assert [denied.lease_id for denied in lost] == [life.lease_id for life in self.queue if life not in stay]
        self.ever += [denied.lease_id for denied in lost]
        self.queue = stay
        self.expect(told[len(lost) :])

    def could_ever_fit(self, size: Size) -> bool:
        return isinstance(Ledger(self.pool).reserve(Reservation("x", "x", FREE, size), 0.0), Lease)


class DrainStory(Story):
    """Hang-ups among neighbours that all have the same output limit: the hardest case to tell apart."""

    @initialize(kinds=st.sampled_from([("told",), ("told",), ("counted",), ("told", "counted")]))
    def start_story(self, kinds: tuple[str, ...]) -> None:
        self.begin(KvPool(tokens=600, slots=6, tokens_per_slot=100), [FREE] * 3, kinds)

    @rule(
        sequences=st.sampled_from([1, 1, 1, 2, 3]),
        queued=st.sampled_from([0, 0, 0, 2]),
        begun=st.sampled_from([True, True, False]),
    )
    def serve(self, sequences: int, queued: int, begun: bool) -> None:
        life = self.ask_for("a", Size(10, 16, sequences, queued=queued))
        if life in self.held:
            if begun:
                self.start(life)
            else:
                self.hand_over_now(life, late=True)


class LateStory(DrainStory):
    """The same, where half of the leases are another gate's, which is heard of now and then, or is cut off.

    It tells what it has not settled; of what has ended it may tell so for SETTLE_S more, and where it is cut off
    it settles nothing at all.
    """

    @initialize(kinds=st.sampled_from([("told",), ("told",), ("counted",), ("told", "counted")]))
    def start_story(self, kinds: tuple[str, ...]) -> None:
        super().start_story(kinds)
        self.watch = DrainWatch()
        self.heard: dict[str, tuple[float | None, float]] = {}
        self.seen_done_s: dict[str, float] = {}

    def is_anothers(self, lease_id: str) -> bool:
        return int(lease_id[1:]) % 2 == 1

    def ended(self) -> list[Life]:
        return [life for life in super().ended() if not self.is_anothers(life.lease_id)]

    @rule(data=st.data())
    def two_come_and_the_others_work_ends(self, data: st.DataObject) -> None:
        """Two side by side, both heard of, and then the other gate's is done and nobody tells."""
        lives = [self.ask_for("a", Size(10, 16)) for _ in range(2)]
        if not all(life in self.held for life in lives):
            return
        for life in lives:
            self.start(life)
        self.the_other_gate_is_heard_of()
        others = next(life for life in lives if self.is_anothers(life.lease_id))
        self.engine.drop(others)
        others.done_at_step = self.step
        if data.draw(st.booleans()):
            self.hang_up_now(next(life for life in lives if life is not others))

    @rule()
    def the_other_gate_is_heard_of(self) -> None:
        for facts in self.ledger.facts():
            done_s = self.seen_done_s.get(facts.lease_id)
            if done_s is None or self.now_s - done_s < SETTLE_S:
                self.heard[facts.lease_id] = (facts.answered_at_s, self.now_s)

    @invariant()
    def remember_when_what_was_done(self) -> None:
        for life in getattr(self, "held", []):
            if life.done_at_step is not None:
                self.seen_done_s.setdefault(life.lease_id, self.now_s)

    def observe(self, seen: SlotsSeen) -> tuple[Lease, ...]:
        facts = [self.known(facts) for facts in self.ledger.facts()]
        return self.ledger.free(self.watch.observe(facts, seen), self.now_s)

    def known(self, facts: LeaseFacts) -> LeaseFacts:
        if facts.draining_since_s is not None or not self.is_anothers(facts.lease_id):
            return facts
        answered_at_s, unsettled_at_s = self.heard.get(facts.lease_id, (None, -math.inf))
        return replace(facts, answered_at_s=answered_at_s, unsettled_at_s=unsettled_at_s)


# A failing story takes a while to shrink, and what the explain phase adds is rarely worth its minutes.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

TestLedgerStory = pytest.mark.timeout(900)(LedgerStory.TestCase)
TestLedgerStory.settings = settings(max_examples=250, stateful_step_count=60, phases=_PHASES)
TestDrainStory = pytest.mark.timeout(900)(DrainStory.TestCase)
TestDrainStory.settings = settings(max_examples=400, stateful_step_count=50, phases=_PHASES)
TestLateStory = pytest.mark.timeout(900)(LateStory.TestCase)
TestLateStory.settings = settings(max_examples=300, stateful_step_count=50, phases=_PHASES)
