"""Admission: whatever is let through fits, and whatever is refused is told why, with its figures."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvgate.core.admission import Admit, Clamp, Reject, Verdict, decide, room
from kvgate.core.ask import Ask, Size
from kvgate.core.ledger import Lease, Ledger, Reservation
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant

N_CTX_SLOT = 1536
DIVIDED = KvPool(tokens=6 * N_CTX_SLOT, slots=6, tokens_per_slot=N_CTX_SLOT)
PLAIN = Tenant("t")
CLAMPING = Tenant("t", Limits(on_overflow=OnOverflow.CLAMP))


def ask(output_tokens: int | None, sequences: int = 1) -> Ask:
    return Ask("m", output_tokens, sequences, stream=False)


def figures(verdict: Verdict) -> dict[str, int | str]:
    assert isinstance(verdict, Reject)
    return dict(verdict.refusal.figures)


# -- the two requests that the README opens with


def test_asking_512_with_256_left_is_refused_with_the_figures() -> None:
    """A prompt of n_ctx_slot - 256 with 512 asked: the engine would answer 200 and stop after 256 tokens."""
    verdict = decide(ask(512), (N_CTX_SLOT - 256,), DIVIDED, PLAIN)
    assert isinstance(verdict, Reject)
    assert verdict.refusal.reason is Reason.GENERATION_OVERFLOW
    assert verdict.refusal.param == "max_tokens"
    assert verdict.refusal.message == (
        "This model's maximum context length is 1536 tokens. However, you requested 1792 tokens (1280 in the "
        "prompt, 512 for the answer). At most 256 fit beside this prompt. Please ask for a shorter answer or "
        "shorten the messages."
    )
    assert figures(verdict) == {
        "n_prompt_tokens": 1280,
        "n_ctx": 1536,
        "limited_by": "slot",
        "usable_generation": 256,
        "requested_output_tokens": 512,
        "output_tokens_min": 1,
    }


def test_asking_512_with_256_left_is_clamped_to_256_where_the_tenant_wants_that() -> None:
    """The output limit becomes what fits, and the verdict remembers what was asked."""
    verdict = decide(ask(512), (N_CTX_SLOT - 256,), DIVIDED, CLAMPING)
    assert isinstance(verdict, Clamp)
    assert verdict.size == Size(1280, 256)
    assert verdict.asked_tokens == 512


# -- examples


@pytest.mark.parametrize("tenant", [PLAIN, CLAMPING], ids=["reject", "clamp"])
def test_the_last_token_that_fits_is_granted(tenant: Tenant) -> None:
    """Exactly full is not too full, whatever the policy."""
    verdict = decide(ask(256), (N_CTX_SLOT - 256,), DIVIDED, tenant)
    assert isinstance(verdict, Admit)
    assert verdict.size == Size(1280, 256)


@pytest.mark.parametrize("output", [None, 1, 512])
@pytest.mark.parametrize("tenant", [PLAIN, CLAMPING], ids=["reject", "clamp"])
def test_a_prompt_that_fills_the_slot_overflows_under_every_policy(tenant: Tenant, output: int | None) -> None:
    """The engine needs one free token (ENGINE_FACTS); no clamp helps, and `messages` is to blame."""
    verdict = decide(ask(output), (N_CTX_SLOT,), DIVIDED, tenant)
    assert isinstance(verdict, Reject)
    assert verdict.refusal.reason is Reason.PROMPT_OVERFLOW
    assert verdict.refusal.param == "messages"
    assert "maximum context length is 1536 tokens. However, your prompt has 1536 tokens" in verdict.refusal.message
    assert "leaves 0 for the answer where at least 1 must fit" in verdict.refusal.message


def test_a_negative_rest_is_told_as_none() -> None:
    """A sentence never says that a negative number of tokens is left; the figure keeps the truth."""
    verdict = decide(ask(10), (N_CTX_SLOT + 500,), DIVIDED, PLAIN)
    assert isinstance(verdict, Reject)
    assert "leaves 0 for the answer" in verdict.refusal.message
    assert figures(verdict)["usable_generation"] == -500


def test_less_room_than_the_tenants_minimum_is_a_prompt_overflow() -> None:
    """An answer of 63 tokens is of no use to a tenant that needs 64, even if it asked for less."""
    tenant = Tenant("t", Limits(output_tokens_min=64, on_overflow=OnOverflow.CLAMP))
    verdict = decide(ask(10), (N_CTX_SLOT - 63,), DIVIDED, tenant)
    assert isinstance(verdict, Reject)
    assert verdict.refusal.reason is Reason.PROMPT_OVERFLOW
    assert "at least 64 must fit" in verdict.refusal.message
    assert isinstance(decide(ask(10), (N_CTX_SLOT - 64,), DIVIDED, tenant), Admit)


@pytest.mark.parametrize(("prompt", "output"), [(100, 1024), (1280, 256)])
def test_no_asked_limit_gets_the_default_or_what_fits_of_it(prompt: int, output: int) -> None:
    """The output limit that reaches the engine is always explicit."""
    verdict = decide(ask(None), (prompt,), DIVIDED, PLAIN)
    assert isinstance(verdict, Admit)
    assert verdict.size == Size(prompt, output)


@pytest.mark.parametrize(
    ("pool", "tenant", "limit", "limited_by", "clause"),
    [
        (DIVIDED, PLAIN, 1536, "slot", "is 1536 tokens."),
        (DIVIDED, Tenant("t", Limits(context_tokens_max=1000)), 1000, "tenant", "is 1000 tokens for this key."),
        (
            replace(DIVIDED, tokens=1200),
            PLAIN,
            1200,
            "pool",
            "is 1200 tokens (shared by all requests on this server).",
        ),
        (
            DIVIDED,
            Tenant("t", quota=Quota(kv_tokens_max=900)),
            900,
            "tenant_kv",
            "is 900 tokens for all that this key may hold at once.",
        ),
        (
            replace(DIVIDED, tokens=1536),
            Tenant("t", Limits(context_tokens_max=1536), Quota(kv_tokens_max=1536)),
            1536,
            "slot",
            "is 1536 tokens.",
        ),
    ],
    ids=["slot", "tenant", "pool", "tenant_kv", "tie"],
)
def test_a_refusal_names_the_bound_that_binds(
    pool: KvPool, tenant: Tenant, limit: int, limited_by: str, clause: str
) -> None:
    """Slot, tenant or pool: the client and the operator are told which; a tie is the slot's."""
    verdict = decide(ask(800), (800,), pool, tenant)
    assert isinstance(verdict, Reject)
    assert (figures(verdict)["n_ctx"], figures(verdict)["limited_by"]) == (limit, limited_by)
    assert clause in verdict.refusal.message


def test_several_answers_are_named_in_the_sentence_and_leave_less_for_each() -> None:
    """The limit that is named is that of one answer: what the other one takes beside it is taken off."""
    pool = KvPool(tokens=2048, slots=4, tokens_per_slot=2048, prompt_shared=True)
    verdict = decide(ask(600, sequences=2), (1000,), pool, PLAIN)
    assert isinstance(verdict, Reject)
    assert "maximum context length is 1524 tokens (shared by all requests on this" in verdict.refusal.message
    assert "you requested 1600 tokens (1000 in the prompt, 600 for each of 2 answers)" in verdict.refusal.message
    assert "At most 524 fit" in verdict.refusal.message
    assert figures(verdict)["n_ctx"] == 2048


def test_the_sum_that_is_named_is_above_the_limit_that_is_named() -> None:
    """A margin comes off the limit, else the sentence would refuse 1536 tokens where 1536 are the maximum."""
    verdict = decide(ask(256), (1280,), replace(DIVIDED, margin_tokens=16), PLAIN)
    assert isinstance(verdict, Reject)
    assert "maximum context length is 1520 tokens. However, you requested 1536" in verdict.refusal.message


@pytest.mark.parametrize(
    ("slots", "concurrency_max", "most"), [(6, None, 6), (6, 2, 2), (2, 6, 2), (6, 0, 0)], ids=str
)
def test_more_answers_than_can_ever_run_are_refused_with_the_number_that_can(
    slots: int, concurrency_max: int | None, most: int
) -> None:
    """Bounded by the slots and by the tenant's own concurrency; nought is nought, not unlimited."""
    tenant = Tenant("t", quota=Quota(concurrency_max=concurrency_max))
    pool = replace(DIVIDED, slots=slots)
    verdict = decide(ask(10, sequences=most + 1), (10,), pool, tenant)
    assert isinstance(verdict, Reject)
    assert verdict.refusal.reason is Reason.TOO_MANY_SEQUENCES
    assert verdict.refusal.param == "n"
    assert figures(verdict) == {"sequences_max": most}
    assert f"runs {most + 1} sequences at once; at most {most} can run here" in verdict.refusal.message
    if most:
        assert isinstance(decide(ask(10, sequences=most), (10,), pool, tenant), Admit)


# -- lists of prompts


def test_a_list_holds_the_longest_of_its_prompts_that_run_side_by_side() -> None:
    """The engine runs them in any free slot: two of these five at once, and it may be the two longest."""
    verdict = decide(ask(100), (10, 900, 20, 700, 30), replace(DIVIDED, slots=2), PLAIN)
    assert isinstance(verdict, Admit)
    assert verdict.size == Size(900, 100, sequences=2, prompts=(900, 700), queued=3)


def test_answers_of_a_list_run_side_by_side_prompt_by_prompt() -> None:
    """Six slots hold two prompts of three answers each, whatever else is in the list."""
    verdict = decide(ask(100, sequences=3), (10, 900, 20), DIVIDED, PLAIN)
    assert isinstance(verdict, Admit)
    assert verdict.size == Size(900, 100, sequences=6, prompts=(900, 20), queued=1)
    alone = decide(ask(100, sequences=4), (10, 900, 20), DIVIDED, PLAIN)
    assert isinstance(alone, Admit)
    assert alone.size == Size(900, 100, sequences=4, queued=2)


def test_a_list_above_the_tenants_concurrency_is_to_be_split() -> None:
    """The engine would run as many side by side as it has slots for, whatever the tenant may have."""
    verdict = decide(
        replace(ask(10), prompt_field="prompt"), (5, 5, 5), DIVIDED, Tenant("t", quota=Quota(concurrency_max=2))
    )
    assert isinstance(verdict, Reject)
    assert (verdict.refusal.reason, verdict.refusal.param) == (Reason.TOO_MANY_SEQUENCES, "prompt")
    assert verdict.refusal.message.endswith("runs 3 sequences at once; at most 2 can run here. Please split it.")


def test_a_list_that_is_too_much_at_once_is_refused_by_the_pool() -> None:
    """Each prompt would fit alone; a pool of one slot's size cannot hold two of them."""
    pool = KvPool(tokens=1000, slots=4, tokens_per_slot=1000, prompt_shared=True)
    assert isinstance(decide(ask(10), (600,), pool, PLAIN), Admit)
    verdict = decide(ask(10), (600, 600), pool, PLAIN)
    assert isinstance(verdict, Reject)
    assert figures(verdict)["limited_by"] == "pool"


@pytest.mark.parametrize("tenant", [PLAIN, CLAMPING, Tenant("t", Limits(output_tokens_min=64))], ids=str)
def test_without_output_a_prompt_may_fill_its_slot(tenant: Tenant) -> None:
    """Embeddings generate nothing, so there is no least output that must fit."""
    verdict = decide(ask(0), (N_CTX_SLOT, 5), DIVIDED, tenant)
    assert isinstance(verdict, Admit)
    assert verdict.size == Size(N_CTX_SLOT, 0, sequences=2, prompts=(N_CTX_SLOT, 5))
    refused = decide(ask(0), (5, N_CTX_SLOT + 1), DIVIDED, tenant)
    assert isinstance(refused, Reject)
    assert refused.refusal.reason is Reason.PROMPT_OVERFLOW
    assert figures(refused)["n_prompt_tokens"] == N_CTX_SLOT + 1


# -- properties


@st.composite
def any_pool(draw: st.DrawFn) -> KvPool:
    slot, slots, shared = draw(st.integers(1, 4000)), draw(st.integers(1, 8)), draw(st.booleans())
    tokens = draw(st.one_of(st.just(slot * slots), st.integers(1, slot * slots)))
    return KvPool(
        tokens=tokens,
        slots=slots,
        tokens_per_slot=slot,
        prompt_shared=shared,
        margin_tokens=draw(st.sampled_from([0, 0, 1, 16])),
        headroom_tokens=draw(st.integers(0, (tokens - 1) // 2)),
    )


limits = st.builds(
    Limits,
    context_tokens_max=st.none() | st.integers(1, 4000),
    output_tokens_min=st.integers(1, 64),
    output_tokens_default=st.integers(1, 4000),
    on_overflow=st.sampled_from(OnOverflow),
)
tenants = st.builds(
    Tenant,
    st.just("t"),
    limits,
    st.builds(Quota, concurrency_max=st.none() | st.integers(1, 8), kv_tokens_max=st.none() | st.integers(1, 8000)),
)
asks = st.builds(
    Ask,
    model=st.none(),
    output_tokens=st.none() | st.integers(0, 4000) | st.sampled_from([0, 32_000, 2**31, 2**63]),
    sequences=st.integers(1, 9),
    stream=st.booleans(),
)
a_prompt = st.integers(0, 600) | st.integers(0, 4000)
prompts = st.one_of(st.tuples(a_prompt), st.lists(a_prompt, min_size=1, max_size=12).map(tuple))


def fits(size: Size, pool: KvPool, tenant: Tenant) -> bool:
    """The definition, told once more and as plainly as possible."""
    one = size.prompt_tokens + size.output_tokens + pool.margin_tokens
    cells = pool.cells(size)
    return (
        one <= pool.tokens_per_slot
        and one <= (tenant.limits.context_tokens_max or one)
        and cells <= pool.tokens - pool.headroom_tokens
        and cells <= (tenant.quota.kv_tokens_max or cells)
        and size.sequences <= pool.slots
        and size.sequences <= (tenant.quota.concurrency_max or size.sequences)
    )


def size_of(asked: Ask, sent: tuple[int, ...], pool: KvPool, output_tokens: int) -> Size:
    """What runs at once: as many prompts as there are slots for, and it may be the longest ones."""
    at_once = max(min(len(sent), pool.slots // asked.sequences), 1)
    held = tuple(sorted(sent)[-at_once:][::-1])
    side_by_side, queued = held if at_once > 1 else (), len(sent) - at_once
    return Size(max(sent), output_tokens, asked.sequences * at_once, side_by_side, queued)


def least(asked: Ask, tenant: Tenant) -> int:
    """Of no use without so much output."""
    return tenant.limits.output_tokens_min if asked.output_tokens != 0 else 0


@given(asks, prompts, any_pool(), tenants)
def test_whatever_is_let_through_fits_every_bound(
    asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant
) -> None:
    """Slot, pool, headroom, margin, the tenant's context and its KV share: never one of them is exceeded."""
    verdict = decide(asked, sent, pool, tenant)
    if isinstance(verdict, Reject):
        return
    assert fits(verdict.size, pool, tenant)
    assert verdict.size == size_of(asked, sent, pool, verdict.size.output_tokens)
    wanted = tenant.limits.output_tokens_default if asked.output_tokens is None else asked.output_tokens
    assert verdict.size.output_tokens <= wanted


@given(asks, prompts, any_pool(), tenants, st.randoms())
def test_whichever_prompts_the_engine_runs_first_they_are_reserved(
    asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant, random: Random
) -> None:
    """Whatever is in the slots at once, in any order of the list, its cells are no more than the request's own."""
    verdict = decide(asked, sent, pool, tenant)
    if isinstance(verdict, Reject):
        return
    size = verdict.size
    running = tuple(random.sample(sent, size.sequences // asked.sequences))
    now = Size(max(running), size.output_tokens, size.sequences, running)
    assert pool.cells(now) <= pool.cells(size) <= pool.grantable_tokens
    assert size.sequences == len(sent) * asked.sequences or size.sequences + asked.sequences > pool.slots


@given(asks, prompts, any_pool(), tenants)
def test_whatever_is_let_through_an_idle_ledger_can_grant(
    asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant
) -> None:
    """Nothing is admitted that would wait for ever."""
    verdict = decide(asked, sent, pool, tenant)
    if not isinstance(verdict, Reject):
        answer = Ledger(pool).reserve(Reservation("a", "t", tenant.quota, verdict.size), 0.0)
        assert answer == Lease("a", pool.cells(verdict.size), verdict.size.sequences, 0.0)


@given(asks, prompts, any_pool(), tenants)
def test_nothing_is_refused_or_clamped_that_fits(
    asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant
) -> None:
    """An asked limit is admitted as it is exactly when it fits and leaves the tenant's minimum."""
    assume(asked.output_tokens is not None)
    assert asked.output_tokens is not None
    verdict = decide(asked, sent, pool, tenant)
    needed = size_of(asked, sent, pool, least(asked, tenant))
    wanted = size_of(asked, sent, pool, asked.output_tokens)
    assert isinstance(verdict, Admit) == (fits(needed, pool, tenant) and fits(wanted, pool, tenant))
    if isinstance(verdict, Admit):
        assert verdict.size == wanted


@given(asks, prompts, any_pool(), tenants)
def test_a_clamp_gives_all_that_fits_and_not_one_token_more(
    asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant
) -> None:
    """The clamped limit is `usable_generation`, and that is the largest that fits."""
    tenant = replace(tenant, limits=replace(tenant.limits, on_overflow=OnOverflow.CLAMP))
    verdict = decide(asked, sent, pool, tenant)
    if isinstance(verdict, Clamp):
        assert verdict.size.output_tokens == verdict.room.usable_generation
        assert verdict.size.output_tokens < verdict.asked_tokens == asked.output_tokens
        assert not fits(replace(verdict.size, output_tokens=verdict.size.output_tokens + 1), pool, tenant)
    if isinstance(verdict, Reject):
        assert verdict.refusal.reason is not Reason.GENERATION_OVERFLOW


@given(asks, prompts, any_pool(), tenants)
def test_a_default_never_causes_a_rejection(asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant) -> None:
    """Without an asked limit, a request is refused only where the prompt itself is too long."""
    silent = replace(asked, output_tokens=None)
    verdict = decide(silent, sent, pool, tenant)
    if isinstance(verdict, Reject):
        assert not fits(size_of(silent, sent, pool, tenant.limits.output_tokens_min), pool, tenant)
        return
    assert isinstance(verdict, Admit)
    output, most = verdict.size.output_tokens, tenant.limits.output_tokens_default
    assert output == most or (
        output < most and not fits(replace(verdict.size, output_tokens=output + 1), pool, tenant)
    )


@given(asks, prompts, any_pool(), tenants)
def test_a_refusal_tells_its_figures_and_never_of_rates(
    asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant
) -> None:
    """The numbers are in the sentence and beside it; nothing in it makes a client wait and try again."""
    verdict = decide(asked, sent, pool, tenant)
    if not isinstance(verdict, Reject):
        return
    message = verdict.refusal.message
    numbers = {int(number) for number in re.findall(r"\d+", message)}
    assert not re.search(r"rate.?limit|quota|try again", message, re.IGNORECASE)
    assert verdict.refusal.retry_after_s is None
    size = size_of(asked, sent, pool, 0)
    if verdict.refusal.reason is Reason.TOO_MANY_SEQUENCES:
        assert {size.sequences, figures(verdict)["sequences_max"]} == numbers
        return
    told, found = figures(verdict), verdict.room
    assert found == room(size.distinct, size.sequences, pool, tenant)
    usable, prompt = found.usable_generation, max(sent)
    assert (told["n_prompt_tokens"], told["n_ctx"], told["usable_generation"]) == (prompt, found.limit_tokens, usable)
    listed = len(size.distinct) > 1
    assert max(usable, 0) in numbers or not asked.generates
    assert ("split the list" in message) is listed
    if verdict.refusal.reason is Reason.PROMPT_OVERFLOW:
        assert (sum(size.distinct) if listed else prompt) in numbers
        assert found.limit_tokens in numbers
        assert told["output_tokens_min"] in numbers or not asked.generates
        assert usable < int(told["output_tokens_min"]) == least(asked, tenant)
    else:
        assert prompt in numbers
        assert asked.output_tokens is not None
        assert asked.output_tokens > usable
        assert told["requested_output_tokens"] == asked.output_tokens
        assert {prompt + usable, asked.output_tokens, prompt + asked.output_tokens} <= numbers


@given(asks, prompts, any_pool(), tenants, st.tuples(st.integers(0, 4000), st.integers(0, 4), st.integers(0, 4000)))
def test_a_bigger_engine_never_refuses_what_a_smaller_one_served(
    asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant, more: tuple[int, int, int]
) -> None:
    """More cells, more slots, longer slots: no admission is lost, and none gets a smaller output limit.

    But for one case: in more slots, more of a list's prompts run side by side.
    """
    tokens, slots, tokens_per_slot = more
    small = decide(asked, sent, pool, tenant)
    bigger = replace(
        pool,
        tokens=pool.tokens + tokens,
        slots=pool.slots + (slots if len(sent) == 1 else 0),
        tokens_per_slot=pool.tokens_per_slot + tokens_per_slot,
    )
    big = decide(asked, sent, bigger, tenant)
    if not isinstance(small, Reject):
        assert not isinstance(big, Reject)
        assert big.size.output_tokens >= small.size.output_tokens
    if isinstance(small, Admit):
        assert isinstance(big, Admit)


@given(asks, prompts, any_pool(), tenants)
def test_shorter_prompts_never_fare_worse(asked: Ask, sent: tuple[int, ...], pool: KvPool, tenant: Tenant) -> None:
    """What an agent that shortens its history relies on."""
    if not isinstance(decide(asked, sent, pool, tenant), Reject):
        assert not isinstance(decide(asked, tuple(prompt // 2 for prompt in sent), pool, tenant), Reject)
        assert not isinstance(decide(asked, sent[:1], pool, tenant), Reject)
