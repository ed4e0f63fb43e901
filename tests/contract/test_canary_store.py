"""Pins and reports come back as they went, a failed suite unpins, and an outage is reuse off."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.canary import CanaryState, Figures, SuiteReport
from kvgate.store.canary import (
    EVENTS_MAX,
    PINS_MAX,
    REPORTS_MAX,
    SERVED_TTL_S,
    CanaryStore,
    CanaryWatch,
    NotPinned,
)
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from kvgate.store.embedded import EmbeddedValkey

FIGURES = Figures(noise_nats=0.0, difference_nats=0.001, prefill_saved_ratio=0.75, latency_ratio=0.5)
PASSED = SuiteReport("f1", "<one>", 3, True, 12, 0, FIGURES, 1_700_000_000.5)


async def test_a_passed_suite_is_pinned_with_its_evidence(client: Any) -> None:
    """Fingerprint, process, suite version, figures, time and person, by the store's clock."""
    store = CanaryStore(client)
    await store.report(PASSED)
    pin = await store.pin(PASSED, by="ann@host")
    assert (pin.fingerprint, pin.instance, pin.suite_version, pin.figures, pin.by) == (
        "f1",
        "<one>",
        3,
        FIGURES,
        "ann@host",
    )
    view = await store.view()
    (kept,) = view.state.pins
    assert replace(kept, pinned_at_s=pin.pinned_at_s) == pin
    assert kept.pinned_at_s == pytest.approx(pin.pinned_at_s, abs=0.01)
    assert view.reports == (PASSED,)
    assert [(event.what, event.subject, event.by) for event in view.events] == [("pin", "f1", "ann@host")]


async def test_what_did_not_pass_or_has_no_instance_is_not_pinned(client: Any) -> None:
    """There is no pin without evidence, nor one that the next process would inherit."""
    store = CanaryStore(client)
    with pytest.raises(NotPinned, match="2 of 12 failed"):
        await store.pin(replace(PASSED, passed=False, cases_failed=2), by="ann")
    with pytest.raises(NotPinned, match="cannot be pinned"):
        await store.pin(replace(PASSED, instance=None), by="ann")
    assert await store.state() == CanaryState()


async def test_a_failed_suite_unpins_every_process_of_its_fingerprint(client: Any) -> None:
    """They compute alike; another engine's pin stays."""
    store = CanaryStore(client)
    await store.pin(PASSED, by="ann")
    await store.pin(replace(PASSED, instance="<two>"), by="ann")
    await store.pin(replace(PASSED, fingerprint="f2"), by="ann")
    await store.report(replace(PASSED, instance=None, passed=False, cases_failed=1))
    assert [pin.fingerprint for pin in (await store.state()).pins] == ["f2"]
    event = (await store.view()).events[0]
    assert (event.what, event.subject, event.why) == ("unpin", "f1", "the suite failed")


async def test_one_gate_claims_a_run_and_no_other_until_its_time_is_over(client: Any) -> None:
    """Gates of one store share one schedule, for each engine process."""
    store = CanaryStore(client)
    assert [await store.claim("<one>", 60), await store.claim("<one>", 60)] == [True, False]
    assert await store.claim("<two>", 0.05)
    await asyncio.sleep(0.1)
    assert await store.claim("<two>", 0.05)
    await store.hold("<two>", 60)
    await asyncio.sleep(0.1)
    assert not await store.claim("<two>", 60)


async def test_a_pin_is_renewed_only_where_there_is_one(client: Any) -> None:
    """Of its fingerprint, so that a successor can be pinned; an operator's unpin in mid-run stays."""
    store = CanaryStore(client)
    with pytest.raises(NotPinned, match="unpinned while the suite ran"):
        await store.pin(PASSED, by="schedule", renew=True)
    await store.pin(PASSED, by="ann")
    await store.pin(replace(PASSED, instance="<two>"), by="schedule", renew=True)
    assert {pin.instance for pin in (await store.state()).pins} == {"<one>", "<two>"}


async def test_an_engine_that_reused_unasked_is_not_pinned_by_what_it_passed_before(client: Any) -> None:
    """Whether it was pinned then or not; the next run that passes makes it good, one that fails does not."""
    store = CanaryStore(client)
    await store.report(PASSED)
    assert await store.unpin("f1", by="kvgate", why="3 answers in a row", doubt=True) == 0
    for renew in (False, True):
        with pytest.raises(NotPinned, match="reused prefixes although it was told not to"):
            await store.pin(PASSED, by="ann", renew=renew)
    await store.pin(replace(PASSED, fingerprint="f2"), by="ann")
    await store.report(replace(PASSED, passed=False, cases_failed=1))
    with pytest.raises(NotPinned, match="although it was told not to"):
        await store.pin(PASSED, by="ann")
    await store.report(PASSED)
    assert await store.unpin("f1", by="ann", why="an exercise") == 0
    assert (await store.pin(PASSED, by="ann")).fingerprint == "f1"


async def test_an_unpin_tells_how_many_and_why(client: Any) -> None:
    """All processes of a fingerprint, or one; none is no event."""
    store = CanaryStore(client)
    for instance in ("<one>", "<two>"):
        await store.pin(replace(PASSED, instance=instance), by="ann")
    await store.pin(replace(PASSED, fingerprint="f2"), by="ann")
    assert await store.unpin("f1", by="bob", why="slow", instance="<one>") == 1
    assert await store.unpin("f1", by="bob", why="slow") == 1
    assert await store.unpin("f1", by="bob", why="slow") == 0
    assert [pin.fingerprint for pin in (await store.state()).pins] == ["f2"]
    assert [event.why for event in (await store.view()).events] == ["slow", "slow", "", "", ""]


async def test_the_allowlist_widens_and_narrows(client: Any) -> None:
    """Twice is as good as once."""
    store = CanaryStore(client)
    assert await store.widen(["acme", "beta"], by="ann") == 2
    assert await store.widen(["acme"], by="ann") == 0
    assert await store.widen(["beta", "nobody"], by="ann", narrow=True) == 1
    assert (await store.state()).widened == {"acme"}


async def test_the_history_is_bounded(client: Any) -> None:
    """Reports, pins and events: the oldest go."""
    store = CanaryStore(client)
    for number in range(EVENTS_MAX + 3):
        await store.pin(replace(PASSED, instance=f"<{number}>"), by="ann")
    for number in range(REPORTS_MAX + 3):
        await store.report(replace(PASSED, cases_run=number))
    view = await store.view()
    assert (len(view.reports), view.reports[0].cases_run) == (REPORTS_MAX, REPORTS_MAX + 2)
    assert (len(view.events), len(view.state.pins)) == (EVENTS_MAX, PINS_MAX)
    assert {pin.instance for pin in view.state.pins} == {f"<{n}>" for n in range(EVENTS_MAX + 3)[-PINS_MAX:]}


async def test_what_another_version_wrote_is_no_pin(client: Any) -> None:
    """Unreadable is closed, and takes nothing else with it."""
    store = CanaryStore(client)
    await store.pin(PASSED, by="ann")
    await client.hset("{kvgate}:canary:pins", "x y", '{"fingerprint": "f3"}')
    await client.hset("{kvgate}:canary:pins", "y z", "no JSON")
    await client.lpush("{kvgate}:canary:reports", "[]")
    view = await store.view()
    assert [pin.fingerprint for pin in view.state.pins] == ["f1"]
    assert view.reports == ()


async def test_whom_a_process_served_is_never_forgotten_while_a_gate_looks(client: Any) -> None:
    """Every gate reads what any of them wrote; another process is clean."""
    store = CanaryStore(client)
    nobody: frozenset[str] = frozenset()
    first = frozenset({"beta"}), frozenset({"acme"})
    everyone = frozenset({"beta", "*"}), frozenset({"acme", "gamma"})
    assert await store.note_served("<one>", nobody) == (nobody, nobody)
    assert await store.note_served("<one>", *first) == first
    assert await store.note_served("<one>", frozenset({"*"}), frozenset({"gamma"})) == everyone
    assert await store.note_served("<one>", nobody) == everyone
    assert await store.note_served("<two>", nobody) == (nobody, nobody)
    assert [await store.strangers(instance) for instance in ("<one>", "<two>")] == [everyone[0], nobody]
    (key,) = await client.keys("*dedicated*")
    assert SERVED_TTL_S - 60 < await client.ttl(key) <= SERVED_TTL_S
    (key,) = await client.keys("*served*")
    assert SERVED_TTL_S - 60 < await client.ttl(key) <= SERVED_TTL_S


def strangers_of(gate: CanaryWatch) -> set[str]:
    assert gate.state is not None
    return set(gate.state.strangers)


async def test_a_gate_that_looks_tells_whom_it_serves(client: Any) -> None:
    """With the allowlist as it is now, so that who was just put on it is no stranger."""
    gates = [CanaryWatch(CanaryStore(client)) for _ in range(2)]
    gates[0].serving = lambda state: ("<one>", frozenset({"beta"}) - state.widened, frozenset())
    gates[1].serving = lambda _: ("<one>", frozenset(), frozenset())
    await CanaryStore(client).widen(["beta"], by="ann")
    for gate in gates:
        await gate.refresh()
    assert [strangers_of(gate) for gate in gates] == [set(), set()]
    await CanaryStore(client).widen(["beta"], by="ann", narrow=True)
    for gate in gates:
        await gate.refresh()
    assert [strangers_of(gate) for gate in gates] == [{"beta"}, {"beta"}]


async def test_an_outage_is_reuse_off_until_the_store_is_back(store: EmbeddedValkey, client: Any) -> None:
    """Nobody knows what was unpinned meanwhile."""
    canary = CanaryStore(client)
    watch = CanaryWatch(canary)
    seen = [watch.state]
    await canary.pin(PASSED, by="ann")
    await watch.refresh()
    seen.append(watch.state)
    await store.stop()
    await watch.refresh()
    seen.append(watch.state)
    with pytest.raises(StoreUnavailable):
        await canary.unpin("f1", by="ann", why="")
    await store.start()
    await watch.refresh()
    seen.append(watch.state)
    assert [state and len(state.pins) for state in seen] == [None, 1, None, 1]
