"""An explanation is the verdict itself: its arithmetic adds up, and what it says would fit does fit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from kvgate.admin.listener import admin_app
from kvgate.app.explaining import CannotExplain, Explainer
from kvgate.core.admission import Admit, decide
from kvgate.core.ask import Ask, Size
from kvgate.core.counting import Proof
from kvgate.core.explain import Explained, as_json, explained, lines_of
from kvgate.core.ledger import Ledger, LedgerView, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason, refusal
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant
from kvgate.gate import Gate
from kvgate.metrics import Metrics
from kvgate.store.errors import StoreUnavailable
from kvgate.web import served_routes
from tests.unit.doubles import EngineDouble, LedgerDouble, TenantsDouble, chat, refused, tenant

POOL = KvPool(tokens=4096, slots=4, tokens_per_slot=2048, prompt_shared=True, margin_tokens=8, headroom_tokens=96)
ACME = Tenant("acme", Limits(context_tokens_max=1500), Quota(kv_tokens_max=3000))
ASK = Ask(None, 100, 1, stream=False)


def explain(
    ask: Ask = ASK, *prompts: int, pool: KvPool = POOL, who: Tenant = ACME, view: LedgerView | None = None
) -> Explained:
    found = prompts or (1000,)
    verdict = decide(ask, found, pool, who)
    return explained(ask, found, Proof.SUM, pool=pool, tenant=who, verdict=verdict, view=view)


def table(found: Explained) -> dict[str, str]:
    return dict(lines_of(json.loads(json.dumps(as_json(found)))))


def test_every_bound_is_shown_and_the_tightest_marked() -> None:
    found = explain()
    assert [(bound.name, bound.usable_generation) for bound in found.bounds] == [
        ("slot", 2048 - 1000 - 8),
        ("tenant", 1500 - 1000 - 8),
        ("pool", 4000 - 1000 - 8),
        ("tenant_kv", 3000 - 1000 - 8),
    ]
    assert [bound.name for bound in found.bounds if bound.binds] == ["tenant"]
    shown = table(found)
    assert shown["verdict"] == "admit"
    assert shown["prompt"] == "1000 tokens, by sum"
    assert shown["tenant"] == "context_tokens_max: 1500 - 1000 prompt - 8 margin = 492  <- binds"
    assert shown["pool"] == "the pool: 4000 - 1000 prompt - 8 margin = 2992 (96 of it kept free)"
    assert shown["usable"] == "492 tokens"
    assert shown["holds"] == "1108 cells in 1 slots"
    assert "would fit" not in shown


def test_a_refusal_shows_what_would_fit_and_by_how_much_the_prompt_is_over() -> None:
    shown = table(explain(replace(ASK, output_tokens=600)))
    assert shown["verdict"] == "reject (generation_overflow)"
    assert "1600 tokens (1000 in the prompt, 600 for the answer)" in shown["answer"]
    assert shown["would fit"] == "an output limit of at most 492"
    assert shown["or"] == "a prompt shorter by 108 tokens"


def test_a_clamp_shows_from_what() -> None:
    who = replace(ACME, limits=replace(ACME.limits, on_overflow=OnOverflow.CLAMP))
    shown = table(explain(replace(ASK, output_tokens=600), who=who))
    assert shown["verdict"] == "clamp (generation_overflow)"
    assert shown["output limit"] == "492 tokens of output, clamped from 600"


def test_a_prompt_that_no_answer_fits_beside_must_be_shorter() -> None:
    shown = table(explain(ASK, 1500))
    assert shown["verdict"] == "reject (prompt_overflow)"
    assert shown["would fit"] == "a prompt shorter by 108 tokens"
    assert "or" not in shown


def test_several_sequences_share_the_pool() -> None:
    shown = table(explain(replace(ASK, sequences=2)))
    assert shown["pool"].startswith("the pool: 4000 shared by 2 sequences, with their prompts and margins: 1492 each")
    assert shown["holds"] == f"{1000 + 2 * 108} cells in 2 slots"


def test_more_sequences_than_slots_have_no_arithmetic() -> None:
    found = explain(replace(ASK, sequences=5))
    assert (found.verdict, found.bounds, found.output_tokens_max) == ("reject", (), None)
    assert table(found)["verdict"] == "reject (too_many_sequences)"


LIMITS = st.one_of(st.none(), st.integers(0, 5000))


@given(LIMITS, st.integers(1, 4), st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.booleans())
def test_what_would_fit_fits_and_one_more_does_not(
    output: int | None, sequences: int, prompts: list[int], clamp: bool
) -> None:
    """The largest limit that is named is admitted; a prompt shorter by what is named is admitted as asked."""
    who = replace(ACME, limits=replace(ACME.limits, on_overflow=OnOverflow.CLAMP if clamp else OnOverflow.REJECT))
    ask = Ask(None, output, sequences, stream=False)
    found = explain(ask, *prompts, who=who)
    if (most := found.output_tokens_max) is not None and output != 0:
        assert isinstance(decide(replace(ask, output_tokens=most), tuple(prompts), POOL, who), Admit)
        assert not isinstance(decide(replace(ask, output_tokens=most + 1), tuple(prompts), POOL, who), Admit)
    if over := found.prompt_tokens_over:
        shorter = tuple(max(prompt - over, 0) for prompt in prompts)
        assert isinstance(decide(ask, shorter, POOL, who), Admit)
        assert not isinstance(decide(ask, tuple(prompt + 1 for prompt in shorter), POOL, who), Admit)
    if isinstance(decide(ask, tuple(prompts), POOL, who), Admit):
        assert found.prompt_tokens_over == 0


# -- the ledger's part


def ledger_with(*held: tuple[str, Size]) -> Ledger:
    ledger = Ledger(POOL)
    for at, (who, size) in enumerate(held):
        ledger.reserve(Reservation(f"l{at}", who, Quota(), size), 0)
    return ledger


@pytest.mark.parametrize(
    ("held", "quota", "said"),
    [
        ([], Quota(), "it would run at once"),
        ([("b", Size(10, 10))] * 4, Quota(), "it needs 1 slots and 0 of 4 are free"),
        ([("b", Size(1492, 500))] * 2, Quota(), "it needs 1108 cells and 0 of 4000 are free"),
        ([("acme", Size(10, 10))] * 2, Quota(concurrency_max=2), "the tenant runs 2 of its 2 sequences"),
        ([("acme", Size(1000, 100))], Quota(kv_tokens_max=2000), "the tenant holds 1108 of its 2000 cells"),
        ([("b", Size(10, 10))] * 5, Quota(), "1 requests wait before it"),
        ([("b", Size(10, 10))] * 4, Quota(queue_max=0), "it would be refused: the tenant's queue of 0 is full"),
    ],
)
def test_what_the_ledger_would_say_is_what_it_says(held: list[tuple[str, Size]], quota: Quota, said: str) -> None:
    """Beside the sentence, the ledger itself: at once where it says so, and not where it says not."""
    ledger = ledger_with(*held)
    who = replace(ACME, quota=quota)
    found = explain(view=ledger.view(), who=who)
    assert said in found.ledger
    granted = ledger.reserve(Reservation("x", "acme", quota, Size(1000, 100)), 0)
    assert (type(granted).__name__ == "Lease") == (found.ledger == "it would run at once")


# -- asked of a gate


def explainer(engine: EngineDouble, ledger: LedgerDouble | None = None) -> Explainer:
    gate = Gate(engine, ledger or LedgerDouble(), new_id=lambda: "x")
    return Explainer(gate, TenantsDouble({"k": tenant()}), served_routes(), lambda: None)


async def test_nothing_is_reserved_or_sent() -> None:
    engine, ledger = EngineDouble(), LedgerDouble()
    found = await explainer(engine, ledger).explain("acme", "/v1/chat/completions", chat("hi", max_tokens=5))
    assert (found["admitted"], found["prompt_tokens"], found["tenant"]) == (True, 10, "acme")
    assert (ledger.told, engine.lines) == ([], [])


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"{", "malformed"), (chat(model="other"), "model_forbidden")],
)
async def test_what_is_refused_before_the_arithmetic_says_so(body: bytes, reason: str) -> None:
    gate = Gate(EngineDouble(), LedgerDouble(), new_id=lambda: "x")
    tenants = TenantsDouble({"k": replace(tenant(), models=frozenset({"small"}))})
    found = await Explainer(gate, tenants, served_routes(), lambda: None).explain(
        "acme", "/v1/chat/completions", body
    )
    assert (found["verdict"], found["reason"], found["admitted"]) == ("reject", reason, False)


async def test_an_engine_that_is_gone_is_said_with_its_status() -> None:
    engine = EngineDouble(counts=[refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))])
    found = await explainer(engine).explain("acme", "/v1/chat/completions", chat())
    assert (found["reason"], found["status"]) == ("engine_unreachable", 503)


@pytest.mark.parametrize(
    ("who", "path"), [("nobody", "/v1/chat/completions"), ("acme", "/v1/models"), ("acme", "/x")]
)
async def test_an_unknown_tenant_or_path_cannot_be_explained(who: str, path: str) -> None:
    with pytest.raises(CannotExplain):
        await explainer(EngineDouble()).explain(who, path, chat())


async def admin(engine: EngineDouble) -> TestClient[web.Request, web.Application]:
    async def refresh() -> None:
        return

    async def reports(request_id: str) -> tuple[dict[str, Any], ...]:
        if request_id == "out":
            raise StoreUnavailable("the store is out")
        return ({"request_id": request_id},) if request_id == "kvg-1" else ()

    explain = explainer(engine).explain
    app = admin_app(
        Metrics(),
        problems=list,
        warnings=list,
        status=dict,
        engine=dict,
        refresh=refresh,
        explain=explain,
        reports=reports,
        body_bytes_max=4096,
    )
    client = TestClient(TestServer(app))
    await client.start_server()
    return client


async def test_the_operators_listener_explains() -> None:
    """The path is the chat's where none is named; what nobody knows is 404, a giant body 413."""
    client = await admin(EngineDouble())
    try:
        async with client.post("/explain?tenant=acme", data=chat(max_tokens=5)) as answer:
            found: dict[str, Any] = await answer.json()
            assert (answer.status, found["verdict"], found["proof"]) == (200, "admit", "engine")
        async with client.post("/explain?tenant=nobody", data=chat()) as answer:
            assert (answer.status, (await answer.json())["problem"]) == (404, "there is no tenant 'nobody'")
        async with client.post("/explain?tenant=acme", data=chat("x" * 5000)) as answer:
            assert answer.status == 413
    finally:
        await client.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("request_id", "status", "said"),
    [("kvg-1", 200, '"request_id": "kvg-1"'), ("kvg-2", 404, "x-request-id"), ("out", 503, "the store is out")],
)
async def test_the_operators_listener_reports(request_id: str, status: int, said: str) -> None:
    client = await admin(EngineDouble())
    try:
        async with client.get(f"/report/{request_id}") as answer:
            assert answer.status == status
            assert said in await answer.text()
    finally:
        await client.close()
        await asyncio.sleep(0)
