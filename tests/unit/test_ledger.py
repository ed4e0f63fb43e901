"""The ledger's promises, one example each; `test_ledger_story` checks them all against random stories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgate.core.ask import Size
from kvgate.core.drain import HANDOVER_S, BusySlot, LeaseFacts, SlotsSeen, handover_s
from kvgate.core.fairness import FairRule
from kvgate.core.foreign import Tally
from kvgate.core.ledger import (
    Denied,
    Lease,
    Ledger,
    LedgerView,
    Reservation,
    Ticket,
)
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota

DIVIDED = KvPool(tokens=200, slots=2, tokens_per_slot=100)
UNIFIED = KvPool(tokens=150, slots=4, tokens_per_slot=100, prompt_shared=True)
FREE = Quota()


def want(
    lease_id: str,
    tenant: str = "t",
    quota: Quota = FREE,
    *,
    prompt: int = 50,
    output: int = 50,
    sequences: int = 1,
) -> Reservation:
    return Reservation(lease_id, tenant, quota, Size(prompt, output, sequences))


def ids(*granted: Lease | Denied) -> list[str]:
    return [lease.lease_id for lease in granted if isinstance(lease, Lease)]


def serve(ledger: Ledger, reservation: Reservation, now_s: float = 0.0) -> None:
    """A request that the engine has begun to answer."""
    assert isinstance(ledger.reserve(reservation, now_s), Lease)
    ledger.hand_over(reservation.lease_id, now_s)
    ledger.answered(reservation.lease_id, now_s)


def look(ledger: Ledger, at_s: float, *busy: BusySlot, identified: bool = True) -> list[str]:
    return ids(*ledger.observe(SlotsSeen(busy, at_s, identified), at_s))


def draining(ledger: Ledger) -> int:
    return ledger.view().draining


# -- taking


def test_a_request_that_fits_is_served_at_once_and_waited_for_nothing() -> None:
    """An idle engine makes nobody wait, and the lease says what it holds."""
    assert Ledger(DIVIDED).reserve(want("a"), 7.0) == Lease("a", cells=100, sequences=1, queued_s=0.0)


def test_full_slots_queue_in_order_of_arrival_and_free_slots_go_to_the_first() -> None:
    """First come, first served; the lease tells how long it queued."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    serve(ledger, want("b"))
    assert ledger.reserve(want("c"), 1.0) == Ticket("c", ahead=0)
    assert ledger.reserve(want("d"), 2.0) == Ticket("d", ahead=1)
    assert ledger.settle("a", 5.0, ended=True) == (Lease("c", 100, 1, queued_s=4.0),)
    assert ids(*ledger.settle("c", 6.0, ended=True)) == ["d"]


def test_a_shared_pool_is_guarded_although_slots_are_free() -> None:
    """Four slots over one pool of 150 cells: the second request of 100 cells waits (llama.cpp issue 23652)."""
    ledger = Ledger(UNIFIED)
    serve(ledger, want("a"))
    assert isinstance(ledger.reserve(want("b"), 0.0), Ticket)
    assert ledger.view().held_tokens == 100


def test_cells_of_the_headroom_are_never_granted() -> None:
    """Headroom stays free although nothing else holds anything."""
    ledger = Ledger(replace(UNIFIED, headroom_tokens=60))
    assert isinstance(ledger.reserve(want("a", prompt=40, output=50), 0.0), Lease)
    assert isinstance(ledger.reserve(want("b", prompt=1, output=1), 0.0), Ticket)


def test_nobody_eligible_overtakes_a_request_that_does_not_fit_yet_where_none_may() -> None:
    """A large request at the head is not starved by small ones that would fit beside what runs."""
    ledger = Ledger(UNIFIED, rule=FairRule(bypass_max=0))
    serve(ledger, want("a"))
    assert isinstance(ledger.reserve(want("large", "v"), 0.0), Ticket)
    assert isinstance(ledger.reserve(want("small", "u", prompt=1, output=1), 0.0), Ticket)
    assert ids(*ledger.settle("a", 1.0, ended=True)) == ["large", "small"]


def test_a_tenant_at_its_quota_holds_up_nobody_else() -> None:
    """Its next request waits; another tenant's, later one is served."""
    ledger, one = Ledger(DIVIDED), Quota(concurrency_max=1)
    serve(ledger, want("a", quota=one))
    assert isinstance(ledger.reserve(want("b", quota=one), 0.0), Ticket)
    assert isinstance(ledger.reserve(want("c", "u"), 0.0), Lease)
    assert ids(*ledger.settle("a", 1.0, ended=True)) == ["b"]


def test_within_a_tenant_a_small_request_does_not_overtake_a_large_one() -> None:
    """The tenant's KV share is taken in the order in which the tenant asked."""
    ledger, share = Ledger(replace(DIVIDED, tokens=400, slots=4)), Quota(kv_tokens_max=120)
    serve(ledger, want("a", quota=share))
    assert isinstance(ledger.reserve(want("b", quota=share), 0.0), Ticket)
    assert isinstance(ledger.reserve(want("c", quota=share, prompt=10, output=10), 0.0), Ticket)
    assert ids(*ledger.settle("a", 1.0, ended=True)) == ["b", "c"]


def test_n_answers_take_n_slots_and_count_n_times_in_the_quota() -> None:
    """`n` is as many sequences as it says."""
    ledger, two = Ledger(replace(UNIFIED, tokens=400)), Quota(concurrency_max=2)
    lease = ledger.reserve(want("a", quota=two, prompt=40, output=10, sequences=2), 0.0)
    assert lease == Lease("a", cells=60, sequences=2, queued_s=0.0)
    assert isinstance(ledger.reserve(want("b", quota=two), 0.0), Ticket)
    assert isinstance(ledger.reserve(want("c", "u", prompt=10, output=10, sequences=3), 0.0), Ticket)


# -- refusing


def test_a_full_queue_refuses_and_leaves_nothing_behind() -> None:
    """The refusal says how many of the tenant's own requests wait; nothing of the refused one is kept."""
    ledger, quota = Ledger(DIVIDED), Quota(queue_max=1)
    serve(ledger, want("a"))
    serve(ledger, want("b"))
    ledger.reserve(want("c", quota=quota), 0.0)
    before = ledger.view()
    denied = ledger.reserve(want("d", quota=quota), 0.0)
    assert isinstance(denied, Denied)
    assert (denied.reason, denied.waiting) == (Reason.QUEUE_FULL, 1)
    assert ledger.view() == before
    assert ledger.settle("d", 1.0, ended=True) == ledger.cancel("d", 1.0) == ()
    assert ledger.view() == before


def test_one_tenants_queue_does_not_fill_anothers() -> None:
    """`queue_max` counts the tenant's own waiting requests."""
    ledger, quota = Ledger(DIVIDED), Quota(queue_max=1)
    serve(ledger, want("a"))
    serve(ledger, want("b"))
    assert isinstance(ledger.reserve(want("c", "t", quota), 0.0), Ticket)
    assert isinstance(ledger.reserve(want("d", "u", quota), 0.0), Ticket)
    assert (ledger.waiting_of("t"), ledger.waiting_of("u"), ledger.waiting_of("v")) == (1, 1, 0)


def test_a_queue_of_none_still_serves_what_fits_at_once() -> None:
    """`queue_max = 0` means: now or not at all."""
    ledger, quota = Ledger(DIVIDED), Quota(queue_max=0)
    assert isinstance(ledger.reserve(want("a", quota=quota), 0.0), Lease)
    assert isinstance(ledger.reserve(want("b", quota=quota), 0.0), Lease)
    assert isinstance(ledger.reserve(want("c", quota=quota), 0.0), Denied)


@pytest.mark.parametrize(
    "size", [Size(60, 41), Size(1, 1, sequences=3), Size(50, 50, sequences=2)], ids=["slot", "slots", "pool"]
)
def test_what_can_never_fit_is_refused_and_not_queued(size: Size) -> None:
    """Such a request was judged against another engine; waiting would be for ever."""
    ledger = Ledger(replace(DIVIDED, headroom_tokens=50))
    denied = ledger.reserve(Reservation("a", "t", FREE, size), 0.0)
    assert isinstance(denied, Denied)
    assert denied.reason is Reason.ENGINE_CHANGED
    assert ledger.view().waiting == 0


def test_the_margin_counts_when_a_request_is_measured_against_its_slot() -> None:
    """A draft of 4 tokens beyond the output limit must fit as well."""
    pool = replace(DIVIDED, margin_tokens=4)
    assert isinstance(Ledger(pool).reserve(want("a", prompt=50, output=47), 0.0), Denied)
    assert Ledger(pool).reserve(want("a", prompt=50, output=46), 0.0) == Lease("a", 100, 1, 0.0)


def test_the_advised_wait_grows_with_the_queue_and_follows_the_usual_hold() -> None:
    """`retry-after` is an estimate from what leases really took, times the rounds that the queue needs."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    serve(ledger, want("b"))
    idle = ledger.retry_after_s()
    ledger.reserve(want("c"), 0.0)
    ledger.reserve(want("d"), 0.0)
    assert ledger.retry_after_s() == pytest.approx(2 * idle)
    ledger.cancel("c", 0.0)
    ledger.cancel("d", 0.0)
    ledger.settle("a", 100.0, ended=True)
    assert idle < ledger.retry_after_s() < 100.0


# -- giving back


def test_cancelling_a_waiting_request_lets_those_behind_it_go() -> None:
    """Whoever leaves the queue holds up nobody."""
    ledger = Ledger(UNIFIED)
    serve(ledger, want("a", prompt=60, output=40))
    ledger.reserve(want("large"), 0.0)
    ledger.reserve(want("small", prompt=20, output=20), 0.0)
    assert ids(*ledger.cancel("large", 1.0)) == ["small"]
    assert ledger.cancel("large", 1.0) == ()


def test_cancel_frees_nothing_that_was_granted() -> None:
    """A cancel that crosses a grant leaves the lease to `settle`."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    assert ledger.cancel("a", 1.0) == ()
    assert ledger.view().running == 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_lease_that_was_never_handed_over_is_free_at_once(ended: bool) -> None:
    """The engine has not seen the request, so there is nothing to wait for."""
    ledger = Ledger(DIVIDED)
    ledger.reserve(want("a"), 0.0)
    ledger.settle("a", 1.0, ended=ended)
    assert ledger.view().held_tokens == 0


def test_settling_twice_frees_nothing_twice() -> None:
    """Neither a second settle nor one after a hang-up ends what another look must end."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    serve(ledger, want("b"))
    ledger.settle("a", 1.0, ended=True)
    assert ledger.settle("a", 1.0, ended=True) == ()
    ledger.settle("b", 1.0, ended=False)
    assert ledger.settle("b", 2.0, ended=True) == ()
    assert (ledger.view().held_tokens, draining(ledger), ledger.is_draining()) == (100, 1, True)


def test_a_hang_up_holds_the_cells_until_the_engine_is_seen_idle() -> None:
    """A closed socket is no proof of free KV."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    serve(ledger, want("b", "u", output=40))
    ledger.reserve(want("c"), 0.0)
    assert ledger.settle("a", 1.0, ended=False) == ()
    mine, other = BusySlot(0, 10, 50), BusySlot(1, 11, 40)
    assert look(ledger, 1.5, mine, other) == []
    assert (ledger.view().held_tokens, ledger.view().draining) == (190, 1)
    assert look(ledger, 2.0, other) == ["c"]
    assert not ledger.is_draining()


def test_a_drain_ends_by_itself_in_the_end_and_is_counted() -> None:
    """After `drain_max_s` an engine that never shows the slot idle does not hold it for ever; metrics tell."""
    ledger = Ledger(DIVIDED, drain_max_s=30.0)
    serve(ledger, want("a"))
    serve(ledger, want("b"))
    ledger.reserve(want("c"), 0.0)
    ledger.settle("a", 10.0, ended=False)
    assert ledger.expire(39.9) == ()
    assert ids(*ledger.expire(40.0)) == ["c"]
    assert (ledger.view().drains_overdue, ledger.view().running) == (1, 2)


# -- what ends a drain


def hung_up(*neighbours: Reservation, answered: bool = True) -> Ledger:
    """A ledger where request "a", output limit 50, hung up at 1.0 and the neighbours run."""
    ledger = Ledger(KvPool(tokens=800, slots=8, tokens_per_slot=100))
    for reservation in neighbours:
        serve(ledger, reservation)
    ledger.reserve(want("a"), 0.0)
    ledger.hand_over("a", 0.0)
    if answered:
        ledger.answered("a", 0.5)
    ledger.settle("a", 1.0, ended=False)
    return ledger


def test_a_look_from_before_the_hang_up_proves_nothing() -> None:
    """What counts is when the engine was asked, not when its answer came."""
    ledger = hung_up()
    ledger.observe(SlotsSeen((), asked_at_s=0.9), 5.0)
    ledger.observe(SlotsSeen((), asked_at_s=1.0), 5.0)  # before it or behind it, who knows
    assert draining(ledger) == 1
    look(ledger, 1.1)
    assert draining(ledger) == 0


def test_a_request_that_may_still_be_on_its_way_is_not_over() -> None:
    """Without an answer, only looks from `handover_s` after the handover on count, and it takes two of them."""
    ledger = hung_up(answered=False)
    look(ledger, 1.2)
    look(ledger, HANDOVER_S)
    look(ledger, HANDOVER_S + 0.01)
    assert draining(ledger) == 1
    look(ledger, HANDOVER_S + 0.2)
    assert draining(ledger) == 0


def test_a_long_prompt_may_be_on_its_way_for_longer() -> None:
    """The engine counts a prompt again before it launches it: a second more for 50,000 tokens."""
    assert handover_s(0) == HANDOVER_S
    assert handover_s(50_000) == pytest.approx(HANDOVER_S + 1)
    facts = LeaseFacts.of_size("a", Size(30_000, 1, 2, (30_000, 20_000)), None, None, None)
    assert facts.prompt_tokens == 50_000


def test_without_output_any_slot_may_be_its_own() -> None:
    """An embedding has no output limit, and the engine shows its own default for it: -1, never 0."""
    ledger = Ledger(KvPool(tokens=800, slots=8, tokens_per_slot=100))
    serve(ledger, want("b", output=20))
    size = Size(40, 0, sequences=2, prompts=(40, 30))
    ledger.reserve(Reservation("a", "t", Quota(), size), 0.0)
    ledger.hand_over("a", 0.0)
    ledger.settle("a", 1.0, ended=False)
    neighbour = BusySlot(0, 1, 20)
    for at_s in (2.0, 3.0, 4.0, 5.0):
        look(ledger, at_s, neighbour, BusySlot(1, 2, -1), BusySlot(2, 3, -1))
    assert draining(ledger) == 2
    look(ledger, 6.0, neighbour)
    look(ledger, 7.0, neighbour)
    assert draining(ledger) == 0


def test_the_rest_of_a_list_may_run_in_later_tasks() -> None:
    """A list longer than its slots waits in the engine: what the first looks saw is not all of it."""
    ledger = Ledger(KvPool(tokens=800, slots=8, tokens_per_slot=100))
    ledger.reserve(Reservation("a", "t", Quota(), Size(40, 50, 2, (40, 30), queued=3)), 0.0)
    ledger.hand_over("a", 0.0)
    ledger.answered("a", 0.5)
    ledger.settle("a", 1.0, ended=False)
    for at_s, tasks in ((2.0, (1, 2)), (3.0, (3, 4)), (4.0, (5,))):
        look(ledger, at_s, *(BusySlot(slot, task, 50) for slot, task in enumerate(tasks)))
        assert draining(ledger) == 2
    look(ledger, 5.0)
    assert draining(ledger) == 0


def test_a_neighbours_list_does_not_explain_a_task_that_it_has_left() -> None:
    """It was in one of the two tasks that were seen, and has gone on to a later one."""
    neighbour = Reservation("b", "t", Quota(), Size(50, 50, queued=3))
    ledger = hung_up(neighbour)
    look(ledger, 2.0, BusySlot(0, 1, 50), BusySlot(1, 2, 50))
    for at_s in (3.0, 4.0, 5.0):
        look(ledger, at_s, BusySlot(0, 3, 50), BusySlot(1, 2, 50))
        assert draining(ledger) == 1
    look(ledger, 6.0, BusySlot(0, 4, 50))
    assert draining(ledger) == 0


def test_a_task_launched_right_behind_the_first_look_is_seen_by_the_second() -> None:
    """The second look may still add a suspect where the engine had not begun to answer."""
    ledger = hung_up(answered=False)
    look(ledger, 2.0)
    for at_s in (2.2, 2.4, 2.6):
        look(ledger, at_s, BusySlot(0, 10, 50))
        assert draining(ledger) == 1
    look(ledger, 2.8)
    assert draining(ledger) == 0


def test_a_slot_under_another_output_limit_is_somebody_elses() -> None:
    """Every output limit is set by kvgate, so a slot that shows another one is not this request's."""
    ledger = hung_up()
    look(ledger, 1.2, BusySlot(0, 10, 40))
    assert draining(ledger) == 0


def test_a_slot_that_shows_no_output_limit_may_be_anybodys() -> None:
    """Older engines do not tell it; then every slot is suspect."""
    ledger = hung_up()
    look(ledger, 1.2, BusySlot(0, 10, None))
    assert draining(ledger) == 1


def test_a_later_task_in_the_same_slot_is_somebody_elses() -> None:
    """The slot's next task does not keep the drain going."""
    ledger = hung_up()
    look(ledger, 1.2, BusySlot(0, 10, 50))
    assert draining(ledger) == 1
    look(ledger, 1.4, BusySlot(0, 11, 50), BusySlot(1, 12, 50))
    assert draining(ledger) == 0


def test_where_tasks_have_no_ids_the_slot_must_be_seen_idle() -> None:
    """Then a later task looks like the same one, and the safe answer is to wait."""
    ledger = hung_up()
    for at_s in (1.2, 1.4, 1.6):
        look(ledger, at_s, BusySlot(0, None, 50))
    assert draining(ledger) == 1
    look(ledger, 1.8)
    assert draining(ledger) == 0


def test_a_neighbour_with_the_same_output_limit_does_not_keep_the_drain_going() -> None:
    """One slot is at work and one lease of that limit has been running all the while: it is the neighbour's."""
    ledger = hung_up(want("b"))
    mine, theirs = BusySlot(0, 10, 50), BusySlot(1, 11, 50)
    look(ledger, 1.2, mine, theirs)
    look(ledger, 1.4, theirs)
    assert draining(ledger) == 1
    look(ledger, 1.6, theirs)
    assert draining(ledger) == 0


def test_a_neighbour_whose_answer_began_after_the_hang_up_does_not_keep_it_going_either() -> None:
    """Whether the neighbour's task is among the suspects or newer does not matter: it has one task."""
    for seen in ([BusySlot(1, 11, 50)], [BusySlot(1, 12, 50)]):
        ledger = hung_up()
        ledger.reserve(want("b"), 1.0)
        ledger.hand_over("b", 1.0)
        look(ledger, 1.1, BusySlot(0, 10, 50), BusySlot(1, 11, 50))
        ledger.answered("b", 1.2)
        look(ledger, 1.3, *seen)
        look(ledger, 1.5, *seen)
        assert draining(ledger) == 0


def test_a_neighbour_that_just_ended_hides_no_task_that_still_runs() -> None:
    """Its lease outlives its task by some last bytes; one look must not take it for running."""
    ledger = hung_up(want("b"))
    mine, theirs = BusySlot(0, 10, 50), BusySlot(1, 11, 50)
    look(ledger, 1.2, mine, theirs)
    look(ledger, 1.4, mine)
    ledger.settle("b", 1.5, ended=True)
    look(ledger, 1.6, mine)
    look(ledger, 1.8, mine)
    assert draining(ledger) == 1


def test_neighbours_that_end_one_after_another_hide_no_task_that_still_runs() -> None:
    """Two leases, each outliving its task over another look, are no two looks that agree."""
    ledger = hung_up(want("b"), want("c"))
    mine = BusySlot(0, 10, 50)
    look(ledger, 1.2, mine, BusySlot(1, 11, 50), BusySlot(2, 12, 50))
    look(ledger, 1.4, mine, BusySlot(2, 12, 50))  # b has ended, its last bytes are on their way
    ledger.settle("b", 1.5, ended=True)
    look(ledger, 1.6, mine)  # and now c
    ledger.settle("c", 1.7, ended=True)
    look(ledger, 1.8, mine)
    assert draining(ledger) == 1


def test_a_neighbour_that_came_later_explains_no_older_task() -> None:
    """A task older than the neighbour cannot be the neighbour's."""
    ledger = hung_up(want("b"))
    mine, theirs = BusySlot(0, 10, 50), BusySlot(1, 11, 50)
    look(ledger, 1.2, mine, theirs)
    look(ledger, 1.4, mine)
    ledger.settle("b", 1.5, ended=True)
    serve(ledger, want("c"), 1.5)
    for at_s in (1.6, 1.8, 2.0):
        look(ledger, at_s, mine, BusySlot(1, 12, 50))
    assert draining(ledger) == 1


def test_a_neighbour_of_n_answers_is_sure_of_one_task_only() -> None:
    """Its other answers may have ended long before the last one does."""
    ledger = hung_up(want("b", sequences=3))
    mine, theirs = BusySlot(0, 10, 50), BusySlot(1, 11, 50)
    for at_s in (1.2, 1.4, 1.6):
        look(ledger, at_s, mine, theirs)
    assert draining(ledger) == 1
    look(ledger, 1.8, theirs)
    look(ledger, 2.0, theirs)
    assert draining(ledger) == 0


def test_n_answers_drain_until_the_last_of_them_is_gone() -> None:
    """One idle slot of three is no end."""
    ledger = Ledger(replace(UNIFIED, tokens=400))
    serve(ledger, want("a", prompt=10, output=50, sequences=3))
    ledger.settle("a", 1.0, ended=False)
    tasks = [BusySlot(slot, 10 + slot, 50) for slot in range(3)]
    for at_s, left in ((1.1, 3), (1.2, 2), (1.3, 1)):
        look(ledger, at_s, *tasks[:left])
        assert draining(ledger) == 3
    look(ledger, 1.4)
    assert draining(ledger) == 0


def test_where_only_the_number_of_busy_slots_is_known_it_must_be_explained() -> None:
    """No more busy slots than leases that run, over two looks: none is left for the one that hung up."""
    ledger = hung_up(want("b", output=40), want("c", output=30))
    three, two = [BusySlot(i, None, None) for i in range(3)], [BusySlot(i, None, None) for i in range(2)]
    look(ledger, 1.2, *three, identified=False)
    look(ledger, 1.4, *three, identified=False)
    look(ledger, 1.6, *two, identified=False)
    assert draining(ledger) == 1
    look(ledger, 1.8, *two, identified=False)
    assert draining(ledger) == 0


def test_looks_of_two_kinds_are_not_compared() -> None:
    """A count taken while `/slots` failed names no suspects, and so clears none."""
    ledger = hung_up(want("b", output=40))
    mine, theirs = BusySlot(0, 10, 50), BusySlot(1, 11, 40)
    counted = [BusySlot(0, None, None), BusySlot(1, None, None)]
    for at_s in (1.2, 1.6, 2.0):
        look(ledger, at_s, *counted, identified=False)
        look(ledger, at_s + 0.2, mine, theirs)
        assert draining(ledger) == 1
    look(ledger, 2.4, theirs)
    assert draining(ledger) == 0


# -- another engine


def test_a_smaller_pool_grants_nothing_until_what_is_held_fits_it() -> None:
    """What is held stays counted with the figure it was granted with."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a"))
    serve(ledger, want("b"))
    ledger.reserve(want("c", prompt=10, output=10), 0.0)
    assert ledger.resize(replace(DIVIDED, tokens=100, slots=1), 1.0) == ()
    assert ledger.settle("a", 2.0, ended=True) == ()
    assert ids(*ledger.settle("b", 3.0, ended=True)) == ["c"]


def test_who_can_never_fit_the_new_engine_is_told_and_the_others_go_on() -> None:
    """A waiting request that is too large for the new slots is refused with its reason, not left waiting."""
    ledger = Ledger(replace(DIVIDED, tokens=100, slots=1))
    serve(ledger, want("a"))
    ledger.reserve(want("large", prompt=90, output=10), 0.0)
    ledger.reserve(want("small", prompt=10, output=10), 0.0)
    denied, lease = ledger.resize(KvPool(tokens=180, slots=3, tokens_per_slot=60), 1.0)
    assert isinstance(denied, Denied)
    assert (denied.lease_id, denied.reason) == ("large", Reason.ENGINE_CHANGED)
    assert lease == Lease("small", 20, 1, queued_s=1.0)


def test_a_view_tells_what_is_held_by_whom() -> None:
    """Running and draining are sequences, held tokens are cells, and both are told per tenant."""
    ledger = Ledger(DIVIDED)
    serve(ledger, want("a", "t", prompt=10, output=20))
    serve(ledger, want("b", "u", prompt=30, output=40))
    ledger.reserve(want("c", "t"), 0.0)
    ledger.settle("b", 1.0, ended=False)
    assert ledger.view() == LedgerView(
        pool=DIVIDED,
        held_tokens=100,
        running=1,
        draining=1,
        waiting=1,
        running_by_tenant=(("t", 1),),
        waiting_by_tenant=(("t", 1),),
        held_tokens_by_tenant=(("t", 30), ("u", 70)),
        drains_overdue=0,
    )


def test_a_tally_is_of_all_that_may_be_in_a_slot() -> None:
    """Draining ones are held, those that wait are not; what was granted stays counted when it is free again."""
    ledger = Ledger(DIVIDED)
    assert ledger.tally() == Tally(0, 0)
    serve(ledger, want("a", prompt=10, output=20, sequences=2))
    ledger.reserve(want("b"), 0.0)
    assert ledger.tally() == Tally(2, 2)
    ledger.settle("a", 1.0, ended=False)
    assert ledger.tally() == Tally(2, 2)
    ledger.expire(1000.0)
    assert ledger.tally() == Tally(1, 3)
    ledger.settle("b", 1001.0, ended=True)
    assert ledger.tally() == Tally(0, 3)
