"""When a bound is proof enough, which chats are plain, and that what is kept stays small."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.admission import decide
from kvgate.core.ask import Ask
from kvgate.core.counting import Kept, PlainChat, bound_suffices, plain_chat
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant

POOL = KvPool(tokens=2048, slots=2, tokens_per_slot=1024)
TENANT = Tenant("acme")
ASK = Ask(None, 100, 1, stream=False)


def suffices(bound: int, ask: Ask = ASK, pool: KvPool = POOL, tenant: Tenant = TENANT) -> bool:
    return bound_suffices(decide(ask, (bound,), pool, tenant), ask, pool, tenant)


def test_a_bound_admits_what_fits_beside_it() -> None:
    assert suffices(924)


@pytest.mark.parametrize("policy", [OnOverflow.REJECT, OnOverflow.CLAMP])
def test_a_bound_never_refuses_and_never_clamps(policy: OnOverflow) -> None:
    """What does not fit beside the bound is counted: the prompt may be a third of it."""
    assert not suffices(925, tenant=Tenant("acme", Limits(on_overflow=policy)))
    assert not suffices(5000, tenant=Tenant("acme", Limits(on_overflow=policy)))


def test_a_default_output_limit_is_not_cut_by_a_bound() -> None:
    """Without a limit of its own a request gets the tenant's default, or what fits beside its prompt."""
    unlimited = replace(ASK, output_tokens=None)
    tenant = Tenant("acme", Limits(output_tokens_default=500))
    assert suffices(524, unlimited, tenant=tenant)
    assert not suffices(525, unlimited, tenant=tenant)


@pytest.mark.parametrize(
    "pool",
    [
        KvPool(tokens=1024, slots=2, tokens_per_slot=1024, prompt_shared=True),
        KvPool(tokens=2047, slots=2, tokens_per_slot=1024, prompt_shared=True),
        KvPool(tokens=2048, slots=2, tokens_per_slot=1024, headroom_tokens=1),
    ],
)
def test_where_requests_wait_for_cells_nobody_waits_for_a_bound(pool: KvPool) -> None:
    """A reservation by a bound is too large for as long as it lasts: not where cells are scarce."""
    assert not suffices(100, pool=pool)


def test_a_tenant_that_pays_in_cells_is_counted_exactly() -> None:
    assert not suffices(100, tenant=Tenant("acme", quota=Quota(kv_tokens_max=2000)))


def plain(messages: Any, **fields: Any) -> PlainChat | None:
    return plain_chat(frozenset({"messages", *fields}), messages)


def test_roles_and_texts_are_a_plain_chat() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]
    found = plain(messages, model="x", temperature=1, max_tokens=5, stream=True, n=2, seed=1)
    assert found == PlainChat((("system", "a"), ("user", "bc")), 3)
    assert found is not None
    assert not found.is_continued


def test_text_parts_are_joined_as_the_engine_joins_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain([{"role": "user", "content": parts}]) == PlainChat((("user", "a\nb"),), 3, in_parts=True)
    empty = {"type": "text", "text": ""}
    found = plain([{"role": "user", "content": [empty, *parts[:1], empty, *parts[1:], empty]}])
    assert found == PlainChat((("user", "a\n\nb\n"),), 5, in_parts=True)


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {"tools": []}),
        ([USER], {"tool_choice": "none"}),
        ([USER], {"response_format": {}}),
        ([USER], {"chat_template_kwargs": {}}),
        ([USER], {"add_generation_prompt": False}),
        ([USER], {"grammar": "x"}),
        ([USER], {"something_new": 1}),
        ([{**USER, "name": "bob"}], {}),
        ([{"role": "assistant", "content": None}], {}),
        ([{"role": "assistant", "tool_calls": []}], {}),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], {}),
        ([{"role": "tool", "content": "x"}], {}),
        ([{"role": "developer", "content": "x"}], {}),
        ([{"role": "user", "content": []}], {}),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], {}),
        ([{"role": "user", "content": ["x"]}], {}),
        ([USER, {"role": "user", "text": "x"}], {}),
    ],
)
def test_whatever_a_template_could_make_more_of_is_not_plain(messages: Any, fields: Any) -> None:
    """Tools, schemas, names, images, other roles and fields that nobody knows are the engine's to count."""
    assert plain(messages, **fields) is None


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text()), min_size=1))
def test_no_text_has_more_bytes_than_the_body_that_holds_it(pairs: list[tuple[str, str]]) -> None:
    """What the bound by bytes rests on, however the JSON is spelled."""
    messages = [{"role": role, "content": text} for role, text in pairs]
    texts = sum(len(text.encode("utf-8", "surrogatepass")) for _, text in pairs)
    assert texts <= len(json.dumps({"messages": messages}))
    unescaped = json.dumps({"messages": messages}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert texts <= len(unescaped)


def test_what_is_kept_is_bounded_and_the_least_recently_used_goes_first() -> None:
    kept: Kept[int] = Kept(2)
    kept.put(b"a", 1)
    kept.put(b"b", 2)
    assert kept.get(b"a") == 1
    kept.put(b"c", 3)
    assert (kept.get(b"a"), kept.get(b"b"), kept.get(b"c"), len(kept)) == (1, None, 3, 2)
    kept.clear()
    assert (kept.get(b"a"), len(kept)) == (None, 0)
