"""The gate, as scripts without sockets: whatever happens to a request, its KV is given back exactly once."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.admission import Admit, Clamp, Reject
from kvgate.core.ask import Usage
from kvgate.core.counting import Proof
from kvgate.core.ledger import Denied
from kvgate.core.reason import Reason, refusal
from kvgate.core.reuse import Reuse
from kvgate.core.tenant import Tenant
from kvgate.core.warmth import Warmth
from kvgate.dialects.anthropic_messages import AnthropicMessages
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.dialects.openai_embeddings import OpenAiEmbeddings
from kvgate.gate import ATTEMPTS, PROBE_TENANT, Admitted, Call, Gate, Rejected, Weighed
from kvgate.ports import PROBE_SIZE, Refused, Told
from kvgate.store.local_ledger import LocalLedger
from tests.unit.doubles import (
    EngineDouble,
    LedgerDouble,
    ManualClock,
    broken,
    chat,
    forever,
    profile,
    refused,
    tenant,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvgate.core.profile import EngineProfile
    from kvgate.ports import LedgerPort, LineFailed, ReuseRule

OLD = profile(1024, instance="<old>")
NEW = profile(512, instance="<new>")
UNREACHABLE = refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))


def gate(
    engine: EngineDouble, ledger: LedgerPort, rule: ReuseRule | None = None, warmth: Warmth | None = None
) -> Gate:
    ids = vars(ledger).setdefault("ids", itertools.count(1))  # one story, one row of ids
    return Gate(engine, ledger, new_id=lambda: f"lease-{next(ids)}", rule=rule, warmth=warmth)


def call(body: bytes | None = None, who: Tenant | None = None) -> Call:
    return Call(who or tenant(), OpenAiChat(), chat() if body is None else body)


def messages(body: bytes | None = None, who: Tenant | None = None) -> Call:
    """A request of a dialect that cannot carry the switch for reuse."""
    return Call(who or tenant(), AnthropicMessages(), chat(max_tokens=5) if body is None else body)


def switchless(*probes: bool | LineFailed | Callable[[], Awaitable[None]], **fields: Any) -> EngineDouble:
    """An engine that nobody has probed yet; `probes` is what they will find."""
    return EngineDouble(reuse_off={"anthropic_messages": None}, probes=list(probes), **fields)


async def admit(
    engine: EngineDouble, ledger: LedgerPort, request: Call, then: Callable[[Admitted], Awaitable[None]] | None = None
) -> Admitted | Rejected:
    async with gate(engine, ledger).admit(request) as outcome:
        if then is not None:
            assert isinstance(outcome, Admitted)
            await then(outcome)
        return outcome


def assert_nothing_held(ledger: LocalLedger) -> None:
    view = ledger.view()
    assert view is not None
    assert (view.held_tokens, view.running, view.draining, view.waiting) == (0, 0, 0, 0)


# -- the three verdicts


async def test_a_request_that_fits_is_admitted() -> None:
    """Its holder gets a lease over its exact size, an open line, and the body as it was judged."""
    engine, ledger = EngineDouble(prompt_tokens=100), LedgerDouble()
    async with gate(engine, ledger).admit(call(chat(max_tokens=50, n=2))) as found:
        assert isinstance(found, Admitted)
        assert isinstance(found.verdict, Admit)
        (reservation,) = ledger.reservations
        size = reservation.size
        assert (size.prompt_tokens, size.output_tokens, size.sequences) == (100, 50, 2)
        assert (found.lease.lease_id, found.lease.cells) == ("lease-1", 300)
        assert found.line is engine.lines[0]
        assert found.profile == engine.now
        found.start()
        found.answered()
        found.receipt.ended = True
    told = [what for what, _ in ledger.told]
    assert told == ["reserve", "hand_over", "answered", "settle ended"]
    assert engine.lines[0].released == 1


async def test_a_bound_that_is_enough_admits_without_a_count() -> None:
    """Its lease is as large as the bound; nobody waits for cells on an engine that divides them."""
    engine, ledger = EngineDouble(bounds=[300]), LedgerDouble()
    found = await admit(engine, ledger, call(chat(max_tokens=50)))
    assert isinstance(found, Admitted)
    assert (found.counted.proof, found.counted.exact, found.is_bounded) == (Proof.BOUND, False, True)
    assert ledger.reservations[0].size.prompt_tokens == 300
    assert engine.counted == []


@pytest.mark.parametrize("clamp", [True, False])
async def test_a_bound_that_is_not_enough_is_replaced_by_the_count(clamp: bool) -> None:
    """What would be refused or clamped by the bound is judged by the count, and runs as asked."""
    engine, ledger = EngineDouble(prompt_tokens=100, bounds=[1000]), LedgerDouble()
    found = await admit(engine, ledger, call(chat(max_tokens=50), tenant(clamp=clamp)))
    assert isinstance(found, Admitted)
    assert isinstance(found.verdict, Admit)
    assert (found.counted.proof, ledger.reservations[0].size.prompt_tokens) == (Proof.ENGINE, 100)


async def test_weighing_decides_as_admitting_does_and_takes_nothing() -> None:
    """`explain`: the same count, the same verdict, no reservation, no line, nothing sent."""
    engine, ledger = EngineDouble(prompt_tokens=100), LedgerDouble()
    for body in (chat(max_tokens=50), chat(max_tokens=5000), b"{", chat(model="large")):
        request = call(body, replace(tenant(), models=frozenset({"small"})))
        weighed = await gate(engine, ledger).weigh(request)
        assert (ledger.told, engine.lines) == ([], [])
        admitted = await admit(engine, ledger, request)
        if isinstance(weighed, Weighed):
            assert (weighed.verdict, weighed.counted) == (admitted.verdict, admitted.counted)
        else:
            assert isinstance(admitted, Rejected)
            assert weighed.refusal == admitted.refusal
        ledger.told.clear()
        engine.lines.clear()


async def test_what_is_forwarded_is_what_was_judged() -> None:
    """One output limit, the judged one, reuse off, and every unknown field as it came."""
    sent = (
        b'{"future" : [1.50, {"a": null}], "max_tokens":4, "n_predict":-1, '
        b'"messages": [{"role":"user","content":"x"}], "cache_prompt": true, "id_slot": 0}'
    )
    engine = EngineDouble()
    found = await admit(engine, LedgerDouble(), call(sent))
    assert isinstance(found, Admitted)
    body = json.loads(found.body)
    assert body == {
        "future": [1.5, {"a": None}],
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "x"}],
        "cache_prompt": False,
    }
    assert b'"future" : [1.50, {"a": null}]' in found.body
    assert engine.counted == [("openai_chat", sent)]


async def test_no_asked_limit_becomes_an_explicit_one() -> None:
    """What the client left open is decided before the engine sees it: the default, or what fits of it."""
    found = await admit(EngineDouble(prompt_tokens=1000), LedgerDouble(), call())
    assert isinstance(found, Admitted)
    assert json.loads(found.body)["max_tokens"] == 24


async def test_a_clamping_tenant_gets_what_fits() -> None:
    found = await admit(
        EngineDouble(prompt_tokens=1000), LedgerDouble(), call(chat(max_tokens=32000), tenant(clamp=True))
    )
    assert isinstance(found, Admitted)
    assert isinstance(found.verdict, Clamp)
    assert (found.verdict.asked_tokens, found.verdict.size.output_tokens) == (32000, 24)
    assert json.loads(found.body)["max_tokens"] == 24


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "reason"),
    [(1024, 1, Reason.PROMPT_OVERFLOW), (1000, 25, Reason.GENERATION_OVERFLOW)],
)
async def test_what_cannot_fit_is_rejected_before_anything_is_held(
    prompt_tokens: int, asked: int, reason: Reason
) -> None:
    """A rejection is a value with its figures; nothing was reserved, no line was opened."""
    engine, ledger = EngineDouble(prompt_tokens=prompt_tokens), LedgerDouble()
    found = await admit(engine, ledger, call(chat(max_tokens=asked)))
    assert isinstance(found, Rejected)
    assert isinstance(found.verdict, Reject)
    assert found.refusal.reason is reason
    assert dict(found.refusal.figures)["n_prompt_tokens"] == prompt_tokens
    assert found.profile == engine.now
    assert ledger.reservations == []
    assert engine.lines == []


async def test_a_malformed_body_is_not_even_counted() -> None:
    engine = EngineDouble()
    found = await admit(engine, LedgerDouble(), call(b'{"messages": 5}'))
    assert isinstance(found, Rejected)
    assert found.refusal.reason is Reason.MALFORMED
    assert engine.counted == []


@pytest.mark.parametrize("model", [None, "large"])
async def test_a_model_that_is_not_the_tenants_is_refused(model: str | None) -> None:
    """Also where none is named: then the engine's own is meant. A named one is refused before anything is counted."""
    engine = EngineDouble()
    found = await admit(engine, LedgerDouble(), call(chat(model=model), Tenant("acme", models=frozenset({"medium"}))))
    assert isinstance(found, Rejected)
    assert (found.refusal.reason, found.refusal.param) == (Reason.MODEL_FORBIDDEN, "model")
    assert "medium" in found.refusal.message
    assert (engine.counted == []) is (model is not None)


@pytest.mark.parametrize("model", [None, "small"])
async def test_the_engines_own_model_need_not_be_named(model: str | None) -> None:
    """llama.cpp's clients never name one."""
    found = await admit(
        EngineDouble(), LedgerDouble(), call(chat(model=model), Tenant("acme", models=frozenset({"small"})))
    )
    assert isinstance(found, Admitted)


# -- every refusal of the world


async def test_an_engine_that_cannot_count_refuses() -> None:
    ledger = LedgerDouble()
    found = await admit(EngineDouble(counts=[UNREACHABLE]), ledger, call())
    assert isinstance(found, Rejected)
    assert found.refusal.reason is Reason.ENGINE_UNREACHABLE
    assert ledger.reservations == []


async def test_an_engine_gone_after_the_grant_gives_the_lease_back() -> None:
    ledger = LocalLedger(ManualClock(), 60)
    found = await admit(EngineDouble(opens=[UNREACHABLE]), ledger, call())
    assert isinstance(found, Rejected)
    assert found.refusal.reason is Reason.ENGINE_UNREACHABLE
    assert_nothing_held(ledger)


async def test_a_full_queue_is_told_with_when_to_come_back() -> None:
    engine = EngineDouble()
    ledger = LedgerDouble(replies=[Denied("", Reason.QUEUE_FULL, 7, 3.2)])
    found = await admit(engine, ledger, call())
    assert isinstance(found, Rejected)
    assert (found.refusal.reason, found.refusal.retry_after_s) == (Reason.QUEUE_FULL, 4)
    assert "7 of your requests" in found.refusal.message
    assert isinstance(found.verdict, Admit)
    assert engine.lines == []


@pytest.mark.parametrize(
    ("reason", "status"),
    [(Reason.REQUESTS_PER_MINUTE, 429), (Reason.TOKENS_PER_MINUTE, 429), (Reason.STORE_OUT, 503)],
)
async def test_a_full_minute_and_a_lost_store_are_told_with_when_to_come_back(reason: Reason, status: int) -> None:
    found = await admit(EngineDouble(), LedgerDouble(replies=[Denied("", reason, 0, 64.2)]), call())
    assert isinstance(found, Rejected)
    assert (found.refusal.reason.status, found.refusal.retry_after_s) == (status, 60)
    assert "60 s" in found.refusal.message


@pytest.mark.parametrize(
    ("told", "tokens"),
    [(Told(Usage(100, 7)), 107), (Told(Usage(100, 7), untold=("more",)), 150), (None, 150)],
    ids=["told", "told in part", "not told"],
)
async def test_a_minute_is_charged_what_was_used_where_that_is_known(told: Told | None, tokens: int) -> None:
    """Else what was reserved: prompt and output limit."""
    ledger = LocalLedger(ManualClock(), 60)
    who = tenant(tokens_per_minute=150)
    async with gate(EngineDouble(prompt_tokens=100), ledger).admit(call(chat(max_tokens=50), who=who)) as found:
        assert isinstance(found, Admitted)
        found.start()
        found.receipt.ended, found.receipt.told = True, told
    assert ledger._ledger is not None
    assert ledger._ledger.minute_of("acme", 1000.0) == (0, tokens)


async def test_a_request_that_waited_too_long_leaves_the_queue() -> None:
    """429 with the seconds waited, and the next in line does not find a ghost before it."""
    ledger = LocalLedger(ManualClock(), 60)
    engine = EngineDouble(now=profile(1024, 1))
    async with gate(engine, ledger).admit(call()):
        found = await admit(engine, ledger, call(who=tenant("other", queue_timeout_s=0.05)))
        assert isinstance(found, Rejected)
        assert found.refusal.reason is Reason.QUEUE_TIMEOUT
        assert 1 <= (found.refusal.retry_after_s or 0) <= 60
        assert "0.05 s" in found.refusal.message
        view = ledger.view()
        assert view is not None
        assert (view.waiting, view.running) == (0, 1)
    assert_nothing_held(ledger)


@pytest.mark.parametrize("reason", [Reason.ENGINE_UNREACHABLE, Reason.ENGINE_LOADING, Reason.ENGINE_UNKNOWN])
async def test_who_waits_for_an_engine_that_is_gone_is_sent_away(reason: Reason) -> None:
    """With whatever is wrong with it, and nothing left in the queue."""
    ledger = LocalLedger(ManualClock(), 60)
    engine = EngineDouble(now=profile(1024, 1))
    async with gate(engine, ledger).admit(call()):
        waiting = asyncio.create_task(admit(engine, ledger, call()))
        await _settled_down()
        ledger.turn_away(reason)
        found = await waiting
        assert isinstance(found, Rejected)
        assert found.refusal.reason is reason
        assert 1 <= (found.refusal.retry_after_s or 0) <= 60
    assert_nothing_held(ledger)


async def test_one_waits_and_goes_when_the_other_ends() -> None:
    ledger = LocalLedger(clock := ManualClock(), 60)
    engine = EngineDouble(now=profile(1024, 1))
    async with gate(engine, ledger).admit(call()):
        waiting = asyncio.create_task(admit(engine, ledger, call()))
        await _settled_down()
        assert not waiting.done()
        clock.advance(1.5)
    found = await waiting
    assert isinstance(found, Admitted)
    assert found.lease.queued_s == 1.5
    assert_nothing_held(ledger)


# -- whatever happens, one settle


async def test_an_exception_of_the_holder_settles_and_goes_on() -> None:
    engine, ledger = EngineDouble(), LedgerDouble()

    async def fail(_: Admitted) -> None:
        raise KeyError("the relay failed")

    with pytest.raises(KeyError, match="the relay failed"):
        await admit(engine, ledger, call(), fail)
    assert ledger.told[-1] == ("settle", "lease-1")
    assert ledger.settled == ["lease-1"]
    assert engine.lines[0].released == 1


async def test_an_unforeseen_exception_of_an_adapter_settles_too() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    for ledger, engine in (
        (LedgerDouble(replies=[fail]), EngineDouble()),
        (LedgerDouble(), EngineDouble(opens=[fail])),
    ):
        with pytest.raises(ZeroDivisionError):
            await admit(engine, ledger, call())
        assert ledger.settled == ["lease-1"]


@pytest.mark.parametrize("stage", ["count", "reserve", "open", "relay"])
async def test_a_cancelled_request_gives_back_what_it_held(stage: str) -> None:
    """At any moment: one settle under the id that was minted first, the line back, and the cancel goes on."""
    engine = EngineDouble(counts=[forever] if stage == "count" else [], opens=[forever] if stage == "open" else [])
    ledger = LedgerDouble(replies=[forever] if stage == "reserve" else [])

    async def relaying(admitted: Admitted) -> None:
        admitted.start()
        await forever()

    task = asyncio.create_task(admit(engine, ledger, call(), relaying))
    await _settled_down()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger.settled == ["lease-1"]
    assert ledger.told[-1][0] == "settle"
    assert [line.released for line in engine.lines] == ([1] if stage == "relay" else [])


async def test_a_cancel_right_at_the_grant_cannot_lose_the_lease() -> None:
    """The grant is on its way to the waiter when the client hangs up: nobody would ever come to take it."""
    ledger = LocalLedger(ManualClock(), 60)
    engine = EngineDouble(now=profile(1024, 1))
    async with gate(engine, ledger).admit(call()) as first:
        assert isinstance(first, Admitted)
        waiting = asyncio.create_task(admit(engine, ledger, call()))
        await _settled_down()
        await ledger.settle(first.lease.lease_id, ended=True)  # grants
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert_nothing_held(ledger)


async def test_a_timeout_right_at_the_grant_cannot_lose_the_lease() -> None:
    """The queue's deadline passes in the very moment of the grant."""
    ledger = LocalLedger(ManualClock(), 60)
    engine = EngineDouble(now=profile(1024, 1))
    loop = asyncio.get_running_loop()
    async with gate(engine, ledger).admit(call()) as first:
        assert isinstance(first, Admitted)
        waiting = asyncio.create_task(admit(engine, ledger, call(who=tenant("other", queue_timeout_s=0.05))))
        await _settled_down()
        granted = asyncio.create_task(_after_blocking(loop, ledger, first.lease.lease_id))
        await granted
    found = await waiting
    assert isinstance(found, Admitted | Rejected)
    assert_nothing_held(ledger)


async def _after_blocking(loop: asyncio.AbstractEventLoop, ledger: LocalLedger, lease_id: str) -> None:
    until = loop.time() + 0.08
    while loop.time() < until:
        pass
    await ledger.settle(lease_id, ended=True)


async def test_a_cancel_during_the_settle_does_not_stop_it() -> None:
    """A store that is slow to take the settle gets it all the same, once."""
    slow = asyncio.Event()

    async def wait() -> None:
        await slow.wait()

    engine, ledger = EngineDouble(), LedgerDouble(before_settle=wait)
    task = asyncio.create_task(admit(engine, ledger, call()))
    await _settled_down()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger.settled == []
    slow.set()
    await _settled_down()
    assert ledger.settled == ["lease-1"]
    assert engine.lines[0].released == 1


async def test_a_second_cancel_during_the_settle_of_the_first_does_not_stop_it() -> None:
    slow = asyncio.Event()

    async def wait() -> None:
        await slow.wait()

    ledger = LedgerDouble(before_settle=wait)

    async def relaying(_: Admitted) -> None:
        await forever()

    task = asyncio.create_task(admit(EngineDouble(), ledger, call(), relaying))
    await _settled_down()
    task.cancel()
    await _settled_down()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    slow.set()
    await _settled_down()
    assert ledger.settled == ["lease-1"]


async def test_what_was_handed_over_and_did_not_end_drains() -> None:
    """A hang-up is no proof of free KV: the cells stay counted until the engine shows the slot idle."""
    ledger = LocalLedger(ManualClock(), 60)

    async def relaying(admitted: Admitted) -> None:
        admitted.start()

    found = await admit(EngineDouble(prompt_tokens=10), ledger, call(chat(max_tokens=5)), relaying)
    assert isinstance(found, Admitted)
    view = ledger.view()
    assert view is not None
    assert (view.held_tokens, view.running, view.draining) == (15, 0, 1)
    assert ledger.draining.is_set()


async def test_what_ended_is_free_at_once() -> None:
    ledger = LocalLedger(ManualClock(), 60)

    async def relaying(admitted: Admitted) -> None:
        admitted.start()
        admitted.answered()
        admitted.receipt.ended = True

    await admit(EngineDouble(), ledger, call(), relaying)
    assert_nothing_held(ledger)
    assert not ledger.draining.is_set()


# -- lists of prompts


async def test_a_list_of_prompts_reserves_those_that_run_side_by_side() -> None:
    """Two slots: the two longest of three, without output, under one lease."""
    engine, ledger = EngineDouble(prompts=(10, 300, 200)), LedgerDouble()
    body = b'{"input": ["a", "b", "c"]}'
    found = await admit(engine, ledger, Call(tenant(), OpenAiEmbeddings(), body))
    assert isinstance(found, Admitted)
    (reservation,) = ledger.reservations
    assert (reservation.size.prompts, reservation.size.sequences) == ((300, 200), 2)
    assert (found.lease.cells, found.body) == (500, b'{"input": ["a", "b", "c"],"cache_prompt":false}')


# -- dialects that cannot carry the switch for reuse


async def test_an_engine_is_probed_before_it_gets_what_cannot_carry_the_switch() -> None:
    """Under a lease of its own, on a line of its own, both given back before the request reserves anything."""
    engine, ledger = switchless(True), LedgerDouble()
    found = await admit(engine, ledger, messages())
    assert isinstance(found, Admitted)
    probe, own = ledger.reservations
    assert (probe.tenant, probe.size) == (PROBE_TENANT, PROBE_SIZE)
    assert own.tenant == "acme"
    assert ledger.told == [
        ("reserve", "lease-2"),
        ("hand_over", "lease-2"),
        ("settle ended", "lease-2"),
        ("reserve", "lease-1"),
        ("settle", "lease-1"),
    ]
    assert engine.probed == [engine.lines[0]]
    assert engine.fresh == [True, False]  # several exchanges in a row want a line that is not near its end
    assert [line.released for line in engine.lines] == [1, 1]


async def test_an_engine_is_probed_once() -> None:
    """Later requests go by what it found; requests side by side wait for one probe together."""
    engine, ledger = switchless(True), LocalLedger(ManualClock(), 60)
    judge = gate(engine, ledger)

    async def one() -> Admitted | Rejected:
        async with judge.admit(messages()) as outcome:
            return outcome

    found = await asyncio.gather(*(one() for _ in range(12)))
    found.append(await one())
    assert all(isinstance(outcome, Admitted) for outcome in found)
    assert len(engine.probed) == 1
    assert_nothing_held(ledger)


async def test_a_dialect_that_carries_the_switch_is_never_probed_for() -> None:
    engine = switchless(False)
    assert isinstance(await admit(engine, LedgerDouble(), call()), Admitted)
    assert engine.probed == []


async def test_an_engine_with_reuse_on_is_refused_with_the_flags() -> None:
    """503 for that dialect, nothing reserved for the request; every other dialect is served."""
    engine, ledger = switchless(False), LocalLedger(ManualClock(), 60)
    judge = gate(engine, ledger)
    for _ in range(3):
        async with judge.admit(messages()) as found:
            assert isinstance(found, Rejected)
            assert (found.refusal.reason, found.refusal.retry_after_s) == (Reason.REUSE_SWITCH, 60)
            assert "--no-cache-prompt --cache-ram 0 --no-cache-idle-slots" in found.refusal.message
    async with judge.admit(call()) as found:
        assert isinstance(found, Admitted)
    assert len(engine.probed) == 1
    assert_nothing_held(ledger)


async def test_what_cannot_fit_is_told_so_before_anything_is_probed() -> None:
    engine = switchless(True, prompt_tokens=5000)
    found = await admit(engine, LedgerDouble(), messages())
    assert isinstance(found, Rejected)
    assert found.refusal.reason is Reason.PROMPT_OVERFLOW
    assert engine.probed == []


async def test_a_probe_that_finds_nothing_lets_nobody_in() -> None:
    """Until something is seen the answer is no; the next request tries again."""

    async def nothing() -> None:
        pass

    engine, ledger = switchless(nothing), LocalLedger(ManualClock(), 60)
    found = await admit(engine, ledger, messages())
    assert isinstance(found, Rejected)
    assert found.refusal.reason is Reason.REUSE_UNPROVEN
    assert found.refusal.retry_after_s == 2
    engine.probes = [True]
    assert isinstance(await admit(engine, ledger, messages()), Admitted)
    assert_nothing_held(ledger)


async def test_a_probe_without_room_is_no_proof() -> None:
    """Nobody may run then, the probe neither."""
    engine = switchless(True)
    found = await admit(engine, LedgerDouble(replies=[Denied("", Reason.QUEUE_TIMEOUT, 0, 1)]), messages())
    assert isinstance(found, Rejected)
    assert engine.probed == []
    assert engine.lines == []


async def test_a_probe_whose_line_breaks_drains() -> None:
    """What it asked may still be at work; the request is told that the engine cannot be reached."""
    engine, ledger = switchless(broken()), LocalLedger(ManualClock(), 60)
    found = await admit(engine, ledger, messages())
    assert isinstance(found, Rejected)
    assert (found.refusal.reason, found.refusal.retry_after_s) == (Reason.ENGINE_UNREACHABLE, 1)
    view = ledger.view()
    assert view is not None
    assert (view.running, view.draining) == (0, 1)
    assert [line.released for line in engine.lines] == [1]


async def test_a_probe_of_an_engine_that_is_gone_is_a_refusal() -> None:
    engine, ledger = switchless(True, opens=[UNREACHABLE]), LocalLedger(ManualClock(), 60)
    found = await admit(engine, ledger, messages())
    assert isinstance(found, Rejected)
    assert found.refusal.reason is Reason.ENGINE_UNREACHABLE
    assert_nothing_held(ledger)


async def test_a_client_that_leaves_during_the_probe_it_waits_for_leaves_nothing() -> None:
    """Neither the one that runs it nor the one that waits for it; and the next one probes anew."""
    engine, ledger = switchless(forever), LocalLedger(ManualClock(), 60)
    judge = gate(engine, ledger)

    async def one() -> Admitted | Rejected:
        async with judge.admit(messages()) as outcome:
            return outcome

    first, second, third = (asyncio.create_task(one()) for _ in range(3))
    await _settled_down()
    second.cancel()
    first.cancel()
    engine.probes = [True]
    assert isinstance(await third, Admitted)
    for left in (first, second):
        with pytest.raises(asyncio.CancelledError):
            await left
    view = ledger.view()
    assert view is not None
    assert (view.running, view.draining, view.waiting) == (0, 1, 0)  # the first probe's words are with the engine


# -- an engine that changes under a request


async def test_a_replaced_engine_is_judged_by_its_own_figures() -> None:
    """Counted on the old engine, opened on the new one: nothing of the old judgement reaches the new engine."""
    engine = EngineDouble(counts=[OLD], opens=[NEW], now=NEW)
    ledger = LedgerDouble()
    found = await admit(engine, ledger, call(chat(max_tokens=600), tenant(clamp=True)))
    assert isinstance(found, Admitted)
    assert (found.profile, found.lease.lease_id) == (NEW, "lease-2")
    assert json.loads(found.body)["max_tokens"] == 502
    assert [line.sent for line in engine.lines] == [[], []]
    assert [line.released for line in engine.lines] == [1, 1]
    assert ledger.settled == ["lease-1", "lease-2"]


async def test_what_fitted_the_old_engine_only_is_rejected_by_the_new_ones_figures() -> None:
    engine = EngineDouble(counts=[OLD], opens=[NEW], now=NEW)
    found = await admit(engine, LedgerDouble(), call(chat(max_tokens=600)))
    assert isinstance(found, Rejected)
    assert found.refusal.reason is Reason.GENERATION_OVERFLOW
    assert dict(found.refusal.figures)["n_ctx"] == 512


async def test_an_engine_of_the_same_figures_is_another_one_all_the_same() -> None:
    """Its prompt cache, its log, its template may be others: the process is compared, not its size."""
    engine = EngineDouble(counts=[OLD], opens=[profile(1024, instance="<other>")], now=OLD)
    found = await admit(engine, LedgerDouble(), call())
    assert isinstance(found, Admitted)
    assert len(engine.counted) == 2


async def test_a_pool_that_shrank_while_waiting_is_judged_anew() -> None:
    ledger = LedgerDouble(replies=[Denied("", Reason.ENGINE_CHANGED, 0, 1)])
    engine = EngineDouble()
    found = await admit(engine, ledger, call())
    assert isinstance(found, Admitted)
    assert ledger.settled == ["lease-1", "lease-2"]


async def test_an_engine_that_never_stays_is_given_up() -> None:
    """After three judgements: 503, come back, and nothing is left behind."""
    engine = EngineDouble(counts=[OLD] * ATTEMPTS, opens=[NEW] * ATTEMPTS)
    ledger = LocalLedger(ManualClock(), 60)
    found = await admit(engine, ledger, call())
    assert isinstance(found, Rejected)
    assert (found.refusal.reason, found.refusal.retry_after_s) == (Reason.ENGINE_CHANGED, 1)
    assert len(engine.counted) == ATTEMPTS == 3
    assert [line.released for line in engine.lines] == [1, 1, 1]
    assert_nothing_held(ledger)


# -- many at once


async def test_many_requests_cancelled_at_random_leave_nothing() -> None:
    """Sixty requests over two slots, each cancelled after a few turns of the loop: the ledger ends empty."""
    ledger = LocalLedger(ManualClock(), 60)
    engine = EngineDouble()

    async def relaying(admitted: Admitted) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        admitted.receipt.ended = True

    tasks = [asyncio.create_task(admit(engine, ledger, call(), relaying)) for _ in range(60)]
    for at in range(len(tasks)):
        await asyncio.sleep(0)
        if at % 3:
            tasks[(at * 7) % 60].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert_nothing_held(ledger)
    assert all(line.released == 1 for line in engine.lines)


async def _settled_down() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# -- a connection that is gone before anything was sent on it


async def test_a_line_may_be_renewed() -> None:
    """The gate gives back the first at once and the second at the end."""
    engine, ledger = EngineDouble(), LedgerDouble()
    async with gate(engine, ledger).admit(call()) as found:
        assert isinstance(found, Admitted)
        first = found.line
        await found.renew_line()
        assert (found.line is engine.lines[1], first is engine.lines[0]) == (True, True)
        assert [line.released for line in engine.lines] == [1, 0]
    assert [line.released for line in engine.lines] == [1, 1]
    assert len(ledger.settled) == 1


@pytest.mark.parametrize("then", [NEW, UNREACHABLE], ids=["another engine", "no engine"])
async def test_a_line_to_another_engine_is_none(then: Any) -> None:
    """What was judged for one engine never goes to another."""
    engine, ledger = EngineDouble(now=OLD, opens=[OLD, then]), LedgerDouble()
    async with gate(engine, ledger).admit(call()) as found:
        assert isinstance(found, Admitted)
        with pytest.raises(Refused) as refusal_raised:
            await found.renew_line()
        expected = Reason.ENGINE_CHANGED if then is NEW else Reason.ENGINE_UNREACHABLE
        assert refusal_raised.value.refusal.reason is expected
    assert all(line.released == 1 for line in engine.lines)
    assert len(ledger.settled) == 1


# -- prefix reuse


class Rule:
    """Serves everybody but `stranger`; who `asked` or is `acme` may reuse, on engines of this instance."""

    def __init__(self, instance: str = "<one>") -> None:
        self.instance = instance

    def serves(self, tenant: Tenant) -> bool:
        return tenant.name != "stranger"

    def of(self, tenant: Tenant, profile: EngineProfile, *, asked: bool) -> Reuse:
        may = profile.instance == self.instance and (asked or tenant.name == "acme")
        return Reuse.KEEP if may else Reuse.OFF


@pytest.mark.parametrize(
    ("request_", "reuse"),
    [
        (call(), Reuse.KEEP),
        (call(who=tenant("beta")), Reuse.OFF),
        (call(chat(cache_prompt=True), tenant("beta")), Reuse.KEEP),
        (call(chat(cache_prompt=1), tenant("beta")), Reuse.OFF),
        (Call(tenant(), OpenAiEmbeddings(), b'{"input": "a"}'), Reuse.OFF),
        (messages(), Reuse.OFF),
    ],
)
async def test_reuse_is_by_the_rule_where_the_request_can_carry_it(request_: Call, reuse: Reuse) -> None:
    """What generates nothing, or cannot say so, has none; the body says what was decided."""
    engine = EngineDouble(reuse_off={"anthropic_messages": True})
    async with gate(engine, LedgerDouble(), Rule()).admit(request_) as found:
        assert isinstance(found, Admitted)
        assert found.reuse is reuse
        assert json.loads(found.body)["cache_prompt"] is (reuse is Reuse.KEEP)


async def test_reuse_is_decided_by_the_connection_that_the_request_goes_out_on() -> None:
    """An engine that was swapped after the count is judged anew, and the successor is not pinned."""
    engine = EngineDouble(counts=[OLD], opens=[NEW], now=NEW)
    async with gate(engine, LedgerDouble(), Rule("<old>")).admit(call()) as found:
        assert isinstance(found, Admitted)
        assert (found.profile, found.reuse) == (NEW, Reuse.OFF)


async def test_a_dedicated_engine_refuses_all_others_before_anything_is_done() -> None:
    """403, nothing counted, and `explain` says the same."""
    engine, ledger = EngineDouble(), LedgerDouble()
    judge, stranger = gate(engine, ledger, Rule()), call(who=tenant("stranger"))
    async with judge.admit(stranger) as found:
        assert isinstance(found, Rejected)
        assert (found.refusal.reason, found.refusal.reason.status) == (Reason.ENGINE_DEDICATED, 403)
    weighed = await judge.weigh(stranger)
    assert isinstance(weighed, Rejected)
    assert weighed.refusal == found.refusal
    assert (engine.counted, ledger.told) == ([], [])


async def test_a_conversation_is_told_once_that_its_kv_is_gone() -> None:
    """By how it begins, so its later turns are the same; others are not concerned."""
    rule, warmth = Rule("<old>"), Warmth(b"s")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    longer = chat(messages=[*turns, {"role": "user", "content": "more"}])
    cold = []
    for profile_, body in [(OLD, chat()), (OLD, longer), (NEW, chat("other")), (NEW, longer), (NEW, longer)]:
        async with gate(EngineDouble(now=profile_), LedgerDouble(), rule, warmth).admit(call(body)) as found:
            assert isinstance(found, Admitted)
            cold.append(found.cold)
    assert cold == [False, False, False, True, False]
