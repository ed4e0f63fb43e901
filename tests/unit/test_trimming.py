"""Trimming, end to end without sockets: whatever the history, what goes on is shorter, whole, and fits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvgate.core import json_list
from kvgate.core.admission import Admit, Clamp, Reject, Trim, decide
from kvgate.core.json_object import read_object
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason, refusal
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant, TrimSide, TrimStrategy
from kvgate.core.trim import plan
from kvgate.core.trim_policy import TrimPolicy
from kvgate.core.trim_search import COUNTS_MAX
from kvgate.dialects.anthropic_messages import AnthropicMessages
from kvgate.dialects.llamacpp_completion import LlamaCppCompletion
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.dialects.openai_completions import OpenAiCompletions
from kvgate.dialects.openai_responses import OpenAiResponses
from kvgate.ports import Counted, History, Refused
from kvgate.trimming import NOT_ALLOWED, Decision, decided, foreseen_trim
from tests.histories import LIST_FIELD, Said, body, histories, well_formed, written
from tests.unit.doubles import EngineDouble, profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.json_object import JsonObject
    from kvgate.ports import Dialect, ReadRequest

CHATS: dict[str, Dialect] = {one.name: one for one in (OpenAiChat(), AnthropicMessages(), OpenAiResponses())}
FRAME = 5
"""Tokens of a template around everything."""


@dataclass
class Counter(EngineDouble):
    """Counts what each element says of itself in `t`; refuses what `refuses` says."""

    refuses: Callable[[list[dict[str, Any]]], bool] = lambda _: False
    bodies: list[bytes] = field(default_factory=list)

    async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
        self.bodies.append(body)
        given = json.loads(body)
        if request.ask.prompts:
            texts = given["prompt"] if isinstance(given["prompt"], list) else [given["prompt"]]
            texts = [given["prompt"]] if texts and isinstance(texts[0], int) else texts
            return Counted(tuple(1 + words(text) if isinstance(text, str) else len(text) for text in texts), self.now)
        listed = given[LIST_FIELD[dialect]]
        if self.refuses(listed):
            raise Refused(refusal(Reason.UNCOUNTED, problem="roles"))
        return Counted((FRAME + sum(one.get("t", 0) for one in listed),), self.now)


def words(text: str) -> int:
    return len(text.split()) + (text != text.rstrip() or not text)


def trimming(**limits: Any) -> Tenant:
    return Tenant("t", Limits(on_overflow=OnOverflow.TRIM, **{"trim_room_tokens": 16, **limits}))


def judge(
    dialect: Dialect, sent: bytes, tenant: Tenant, slot: int, engine: Counter | None = None, *, slots: int = 2
) -> tuple[Decision, Counter]:
    engine = engine or Counter()
    pool = KvPool(slot * slots, slots, slot)

    async def run() -> Decision:
        request = dialect.read(sent)
        counted = await engine.count(dialect.name, request, sent)
        return await decided(engine, dialect, request, counted, pool=pool, tenant=tenant)

    return asyncio.run(run()), engine


def kept(dialect: str, decision: Decision) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = decision.request.document.get(LIST_FIELD[dialect])
    return found


def dropped(decision: Decision) -> set[int]:
    """The indexes that the verdict says went."""
    assert isinstance(decision.verdict, Trim)
    return {at for run in decision.verdict.trimmed.dropped for at in range(run.first, run.last + 1)}


strategies = st.sampled_from(TrimStrategy)
dialects = st.sampled_from(sorted(CHATS))
slots = st.sampled_from([250, 400, 160, 120, 200, 300, 90, 600, 40])


@dataclass(frozen=True)
class Case:
    """A history in a dialect, and what became of it."""

    name: str
    history: list[Said]
    sent: bytes
    decision: Decision
    counts: int

    @property
    def elements(self) -> list[dict[str, Any]]:
        return written(self.name, self.history).elements

    @property
    def gone(self) -> set[int]:
        return dropped(self.decision) if isinstance(self.decision.verdict, Trim) else set()


def case(name: str, history: list[Said], strategy: TrimStrategy, slot: int, **limits: Any) -> Case:
    sent = body(name, history, max_tokens=limits.pop("asked", 10), extra={"kept": [1, None]})
    tenant = trimming(trim_strategy=strategy, **limits)
    decision, engine = judge(CHATS[name], sent, tenant, slot)
    return Case(name, history, sent, decision, len(engine.bodies) - 1)


@given(dialects, histories, strategies, slots, st.integers(1, 64))
def test_what_is_let_through_fits_and_is_counted_boundedly(
    name: str, history: list[Said], strategy: TrimStrategy, slot: int, asked: int
) -> None:
    """Never above the limit, by the engine's own count of the very body; never more than six counts for it."""
    found = case(name, history, strategy, slot, asked=asked)
    assert found.counts <= COUNTS_MAX
    verdict = found.decision.verdict
    if isinstance(verdict, Reject):
        assert verdict.refusal.reason in {Reason.UNTRIMMABLE, Reason.PROMPT_OVERFLOW}
        return
    assert verdict.size.prompt_tokens + verdict.size.output_tokens <= slot
    listed = kept(name, found.decision)
    assert verdict.size.prompt_tokens == FRAME + sum(one["t"] for one in listed) == found.decision.counted.prompts[0]


@given(dialects, histories, strategies, slots)
def test_what_is_left_is_the_rest_in_order_and_less(
    name: str, history: list[Said], strategy: TrimStrategy, slot: int
) -> None:
    """Strict progress: something went, the verdict says just what, and the tokens are the difference."""
    found = case(name, history, strategy, slot)
    verdict = found.decision.verdict
    assume(isinstance(verdict, Trim))
    assert isinstance(verdict, Trim)
    gone = found.gone
    assert gone
    assert verdict.trimmed.messages == len(gone)
    assert verdict.trimmed.tokens == sum(found.elements[at]["t"] for at in gone) > 0
    assert kept(name, found.decision) == [one for at, one in enumerate(found.elements) if at not in gone]


def ids_of(element: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The calls that an element makes, and those that it answers, in any of the dialects."""
    blocks = element["content"] if isinstance(element.get("content"), list) else []
    calls = {one["id"] for one in element.get("tool_calls", [])}
    calls |= {one["id"] for one in blocks if one["type"] == "tool_use"}
    answers = {one["tool_use_id"] for one in blocks if one["type"] == "tool_result"}
    answers |= {element["tool_call_id"]} if "tool_call_id" in element else set()
    if element.get("type") == "function_call":
        calls.add(element["call_id"])
    if element.get("type") == "function_call_output" and "call_id" in element:
        answers.add(element["call_id"])
    return calls, answers


def ways(
    name: str, history: list[Said], strategy: TrimStrategy, pinned: frozenset[int] = frozenset(), keep: int = 1
) -> tuple[list[dict[str, Any]], list[set[int]]]:
    """The elements, and what is gone after each part of the plan: every rung there could be, and more."""
    request = CHATS[name].read(body(name, history))
    may = CHATS[name].trimmable(request)
    assert isinstance(may, History)
    policy = TrimPolicy(strategy, TrimSide.LEFT, 16, keep_calls=keep, pinned=pinned)
    every: list[set[int]] = []
    for part in plan(may.items, policy).drops:
        every.append((every[-1] if every else set()) | set(part))
    return written(name, history).elements, every


keeps = st.sampled_from([1, 1, 0, 2, 5])


@given(dialects, histories, strategies, keeps)
def test_no_result_loses_its_call_and_no_call_a_result(
    name: str, history: list[Said], strategy: TrimStrategy, keep: int
) -> None:
    """Each result stays or goes with the latest call of its id before it, in parallel calls and repeated ids too."""
    elements, every = ways(name, history, strategy, keep=keep)
    for at, element in enumerate(elements):
        for answered in ids_of(element)[1]:
            callers = [before for before in range(at) if answered in ids_of(elements[before])[0]]
            if callers:
                assert all((at in gone) == (callers[-1] in gone) for gone in every)


def speaker(element: dict[str, Any]) -> str:
    calls, answers = ids_of(element)
    if answers or element.get("role") == "tool":
        return "result"
    if calls:
        return "call"
    return str(element.get("role") or element.get("type"))


EXPECTED = {
    ("user", "assistant"), ("user", "call"), ("result", "assistant"), ("result", "call"), ("result", "user"),
    ("assistant", "user"), ("assistant", "call"), ("call", "call"), ("call", "assistant"), ("call", "user"),
    ("user", "reasoning"), ("result", "reasoning"), ("call", "reasoning"), ("assistant", "reasoning"),
}  # fmt: skip
"""Who may come to stand beside whom."""


@given(dialects, histories, strategies, keeps)
def test_neighbours_are_such_as_templates_expect(
    name: str, history: list[Said], strategy: TrimStrategy, keep: int
) -> None:
    """No two users and no two answers in a row that were not before; what is left begins as it did or with a user.

    Where a turn went whole, the next user message follows what the one that went had followed.
    """
    elements, every = ways(name, history, strategy, keep=keep)
    spoken = [at for at, one in enumerate(elements) if speaker(one) not in {"system", "developer"}]
    for gone in every:
        left = [at for at in spoken if at not in gone]
        assert left[0] == spoken[0] or speaker(elements[left[0]]) == "user"
        for one, other in pairwise(left):
            after = spoken[spoken.index(one) + 1]
            pair = (speaker(elements[one]), speaker(elements[other]))
            whole_turns = pair[1] == "user" == speaker(elements[after])
            assert other == after or whole_turns or pair in EXPECTED, (pair, gone)


def strict(listed: list[dict[str, Any]]) -> bool:
    """Whether a template that insists on user, assistant, user, ... renders it (Mistral's rule)."""
    listed = listed[1:] if listed and listed[0]["role"] == "system" else listed
    turn = 0
    for one in listed:
        if one["role"] == "tool" or one.get("tool_calls"):
            continue
        if one["role"] not in {"user", "assistant"} or (one["role"] == "user") != (turn % 2 == 0):
            return False
        turn += 1
    return not listed or listed[0]["role"] == "user"


@given(well_formed(), strategies, keeps)
def test_every_way_alternates_as_a_strict_template_wants(
    history: list[Said], strategy: TrimStrategy, keep: int
) -> None:
    """Not only the one that fits."""
    elements, every = ways("openai_chat", history, strategy, keep=keep)
    assert strict(elements)
    assert all(strict([one for at, one in enumerate(elements) if at not in gone]) for gone in every)


@given(well_formed(), strategies, slots)
def test_what_a_strict_template_renders_it_renders_trimmed(
    history: list[Said], strategy: TrimStrategy, slot: int
) -> None:
    """Alternation is never broken: what the engine would have accepted untrimmed, it accepts."""
    engine = Counter(refuses=lambda listed: not strict(listed))
    sent = body("openai_chat", history, max_tokens=10)
    assert strict(json.loads(sent)["messages"])
    decision, _ = judge(CHATS["openai_chat"], sent, trimming(trim_strategy=strategy), slot, engine)
    assert all(strict(json.loads(one)["messages"]) for one in engine.bodies)
    assert strict(kept("openai_chat", decision))


@given(dialects, histories, strategies, keeps, st.sets(st.integers(0, 60), max_size=2).map(frozenset))
def test_the_protected_stays(
    name: str, history: list[Said], strategy: TrimStrategy, keep: int, pinned: frozenset[int]
) -> None:
    """System messages, the last user message and what follows it, and what is pinned.

    Only `tool-output-first` goes into the last turn: older calls there, never the latest.
    """
    elements, every = ways(name, history, strategy, pinned, keep)
    said = [speaker(one) for one in elements]
    users = [at for at, who in enumerate(said) if who == "user"]
    calls = [at for at, who in enumerate(said) if who == "call"]
    for gone in every:
        assert not gone & pinned
        assert all(said[at] not in {"system", "developer"} for at in gone)
        after = {at for at in gone if users and at >= users[-1]}
        if strategy is TrimStrategy.TOOL_OUTPUT_FIRST:
            assert {said[at] for at in after} <= {"call", "result", "reasoning", "web_search_call"}
            assert not after or name == "openai_responses" or calls[-1] not in after
        else:
            assert not after


@given(dialects, histories, strategies, slots)
def test_trimming_again_changes_nothing(name: str, history: list[Said], strategy: TrimStrategy, slot: int) -> None:
    """Idempotent: what came out has its room, and is admitted as it is."""
    found = case(name, history, strategy, slot)
    assume(isinstance(found.decision.verdict, Trim))
    again, _ = judge(
        CHATS[name], found.decision.request.document.text.encode(), trimming(trim_strategy=strategy), slot
    )
    assert isinstance(again.verdict, Admit | Clamp)
    assert again.request.document.text == found.decision.request.document.text
    assert again.verdict.size == found.decision.verdict.size  # type: ignore[union-attr]  # it is a Trim


@given(dialects, histories, strategies, slots, slots)
def test_a_larger_limit_keeps_all_that_a_smaller_one_keeps(
    name: str, history: list[Said], strategy: TrimStrategy, one: int, other: int
) -> None:
    """More context never loses more."""
    small, large = (case(name, history, strategy, slot) for slot in sorted((one, other)))
    if not isinstance(small.decision.verdict, Reject):
        assert not isinstance(large.decision.verdict, Reject)
        assert large.gone <= small.gone


def spelled(document: JsonObject, name: str) -> dict[str, str]:
    """Each member but one as it is spelled."""
    return {
        key: document.text[member.key_start : member.value_end]
        for key, member in document.members.items()
        if key != name
    }


@given(dialects, histories, strategies, slots)
def test_every_other_byte_survives(name: str, history: list[Said], strategy: TrimStrategy, slot: int) -> None:
    """Kept elements and all other members are byte for byte as they came, unknown fields and spacing included."""
    found = case(name, history, strategy, slot)
    before, after, member = read_object(found.sent), found.decision.request.document, LIST_FIELD[name]
    assert spelled(after, member) == spelled(before, member)
    were, are = ([doc.text[s:e] for s, e in json_list.elements(doc, member)] for doc in (before, after))
    assert are == [one for at, one in enumerate(were) if at not in found.gone]
    if not found.gone:
        assert after.text == before.text


@given(dialects, histories, strategies, slots)
def test_nothing_is_trimmed_that_has_its_room(
    name: str, history: list[Said], strategy: TrimStrategy, slot: int
) -> None:
    """A request whose answer fits is admitted untouched, and costs no further count."""
    found = case(name, history, strategy, slot)
    whole = FRAME + sum(one["t"] for one in found.elements)
    if whole + 10 <= slot:
        assert isinstance(found.decision.verdict, Admit)
        assert found.counts == 0


@given(dialects, histories, strategies, slots, st.integers(0, 2**24))
def test_nothing_that_a_template_refuses_is_let_through(
    name: str, history: list[Said], strategy: TrimStrategy, slot: int, seed: int
) -> None:
    """A template with rules that nobody foresaw: a shorter form that it refuses is never sent.

    What would have been accepted untrimmed, at least clamped, still is.
    """
    whole = len(written(name, history).elements)
    engine = Counter(refuses=lambda listed: len(listed) < whole and hash((seed, len(listed))) % 3 == 0)
    sent = body(name, history, max_tokens=10)
    decision, _ = judge(CHATS[name], sent, trimming(trim_strategy=strategy), slot, engine)
    if not isinstance(decision.verdict, Reject):
        assert not engine.refuses(kept(name, decision))
    clamping = Tenant("t", Limits(on_overflow=OnOverflow.CLAMP))
    request = CHATS[name].read(sent)
    tokens = FRAME + sum(one["t"] for one in written(name, history).elements)
    if not isinstance(decide(request.ask, (tokens,), KvPool(slot * 2, 2, slot), clamping), Reject):
        assert not isinstance(decision.verdict, Reject)


@pytest.mark.parametrize("name", sorted(CHATS))
def test_an_agent_goes_on_within_one_turn(name: str) -> None:
    """One question and forty calls, in every API: the older calls go, the question and the latest ones stay."""
    history = [Said("user", tokens=20)]
    for at in range(40):
        history += [Said("call", (at % 4,), 10), Said("result", (at % 4,), 20)]
    sent = body(name, history, max_tokens=10)
    decision, _ = judge(CHATS[name], sent, trimming(trim_strategy=TrimStrategy.TOOL_OUTPUT_FIRST), 200)
    gone = dropped(decision)
    assert min(gone) == 1
    assert 2 * 33 < len(gone) <= 2 * 36
    rejected, _ = judge(CHATS[name], sent, trimming(), 200)
    assert isinstance(rejected.verdict, Reject)


# -- what cannot be trimmed


def plain(*roles_tokens: tuple[str, int], **fields: Any) -> bytes:
    messages = [{"role": role, "content": "x", "t": tokens} for role, tokens in roles_tokens]
    return json.dumps({"messages": messages, "max_tokens": 10, **fields}).encode()


def refused(sent: bytes, tenant: Tenant, slot: int = 100, engine: Counter | None = None) -> Reject:
    decision, _ = judge(CHATS["openai_chat"], sent, tenant, slot, engine)
    assert isinstance(decision.verdict, Reject)
    return decision.verdict


def test_a_giant_last_message_is_a_refusal_that_says_so() -> None:
    """One count more, no loop: what stays, how much it is, and what to shorten."""
    sent = plain(("system", 5), ("user", 30), ("assistant", 30), ("user", 200))
    found = refused(sent, trimming())
    assert found.refusal.reason is Reason.UNTRIMMABLE
    figures = dict(found.refusal.figures)
    assert (figures["n_prompt_tokens"], figures["n_protected_tokens"], figures["n_ctx"]) == (270, 210, 100)
    assert "your prompt has 270 tokens" in found.refusal.message
    assert "210 of them are what it never takes" in found.refusal.message


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ({"system": "x" * 900}, "shorten the system messages"),
        ({"user": "x" * 900}, "shorten the last user message"),
        ({"tools": "x" * 900}, "shorten the tools"),
        ({"pinned": "x" * 900}, "shorten pinned messages"),
    ],
)
def test_the_refusal_names_the_largest_of_what_stays(content: dict[str, str], advice: str) -> None:
    """System, last message, tools or pins: whichever is the most."""
    messages = [
        {"role": "system", "content": content.get("system", ""), "t": 100},
        {"role": "user", "content": content.get("pinned", ""), "t": 50},
        {"role": "user", "content": content.get("user", ""), "t": 50},
    ]
    sent = {"messages": messages, "max_tokens": 10, "kvgate_pinned": [1], "tools": [content.get("tools", "")]}
    assert advice in refused(json.dumps(sent).encode(), trimming()).refusal.message


def test_a_template_that_refuses_every_shorter_form_is_named() -> None:
    """Then nobody knows how many tokens would stay, and the sentence says why."""
    engine = Counter(refuses=lambda listed: len(listed) < 3)
    found = refused(plain(("user", 50), ("assistant", 50), ("user", 50)), trimming(), engine=engine)
    assert found.refusal.reason is Reason.UNTRIMMABLE
    assert "template refuses" in found.refusal.message


def test_what_asks_in_vain_is_told() -> None:
    """A tenant that does not allow it: the refusal says that it was heard."""
    sent = plain(("user", 90), ("assistant", 90), ("user", 9), transforms=["middle-out"])
    assert refused(sent, Tenant("t")).refusal.message.endswith(NOT_ALLOWED)
    assert not refused(plain(("user", 900)), Tenant("t")).refusal.message.endswith(NOT_ALLOWED)


def test_too_many_answers_are_no_matter_of_length() -> None:
    """Trimming is not tried where it cannot help."""
    sent = plain(("user", 90), ("user", 9), n=9)
    decision, engine = judge(CHATS["openai_chat"], sent, trimming(), 100)
    assert isinstance(decision.verdict, Reject)
    assert decision.verdict.refusal.reason is Reason.TOO_MANY_SEQUENCES
    assert len(engine.bodies) == 1


@given(dialects, histories, strategies, slots)
def test_a_trim_is_foreseen_without_a_count(
    name: str, history: list[Said], strategy: TrimStrategy, slot: int
) -> None:
    """Only where there is one to come, and of the same parts: what `kvgate explain` shows beforehand."""
    sent, tenant = body(name, history, max_tokens=10), trimming(trim_strategy=strategy)
    pool, request = KvPool(slot * 2, 2, slot), CHATS[name].read(sent)
    whole = FRAME + sum(one["t"] for one in written(name, history).elements)
    foreseen = foreseen_trim(CHATS[name], request, whole, pool=pool, tenant=tenant)
    assert foreseen_trim(CHATS[name], request, whole, pool=pool, tenant=Tenant("t")) is None
    decision, _ = judge(CHATS[name], sent, tenant, slot)
    if foreseen is not None:
        assert foreseen.counts == 0
        assert not isinstance(decision.verdict, Admit)
    if foreseen is not None and isinstance(decision.verdict, Trim):
        one = {at for run in foreseen.dropped for at in range(run.first, run.last + 1)}
        other = dropped(decision)
        assert one <= other or other <= one


# -- how much room


@pytest.mark.parametrize(
    ("asked", "room", "least"),
    [(10, 16, 10), (900, 16, 16), (None, 16, 16), (900, 5000, 45)],
    ids=["as asked", "the setting", "no ask", "half of the window"],
)
def test_history_goes_until_the_room_is_free_and_the_answer_is_clamped(
    asked: int | None, room: int, least: int
) -> None:
    """min(ask, trim_room_tokens), never more than half of the window; the answer gets what fits of its ask."""
    sent = plain(*[("user", 3), ("assistant", 3)] * 16, ("user", 3), max_tokens=asked)
    decision, _ = judge(CHATS["openai_chat"], sent, trimming(trim_room_tokens=room), 100)
    verdict = decision.verdict
    assert isinstance(verdict, Trim)
    assert verdict.room.usable_generation >= least
    # The next turn, which is six tokens, would not have fitted beside it.
    assert verdict.room.usable_generation < least + 6
    wanted = 1024 if asked is None else asked
    assert verdict.size.output_tokens == min(wanted, verdict.room.usable_generation)


def test_where_the_room_cannot_be_had_all_that_may_goes_and_the_rest_is_clamped() -> None:
    """Less room than wanted is still an answer."""
    sent = plain(("user", 30), ("assistant", 30), ("user", 80), max_tokens=50)
    decision, _ = judge(CHATS["openai_chat"], sent, trimming(trim_room_tokens=50), 100)
    assert isinstance(decision.verdict, Trim)
    assert (decision.verdict.size.prompt_tokens, decision.verdict.size.output_tokens) == (85, 15)


def test_a_request_that_declines_is_clamped_whole() -> None:
    """`transforms: []` wants every message, and gets a shorter answer."""
    sent = plain(("user", 40), ("assistant", 40), ("user", 5), max_tokens=50, transforms=[])
    decision, _ = judge(CHATS["openai_chat"], sent, trimming(), 100)
    assert isinstance(decision.verdict, Clamp)


def test_a_prompt_is_kept_below_what_the_client_wants_at_most() -> None:
    """`truncate_prompt_tokens`: also where all of it would fit."""
    sent = plain(*[("user", 5), ("assistant", 5)] * 5, ("user", 5), truncate_prompt_tokens=30)
    decision, _ = judge(CHATS["openai_chat"], sent, trimming(), 1000)
    assert isinstance(decision.verdict, Trim)
    assert decision.verdict.size.prompt_tokens == 30


def test_another_engine_in_between_is_not_believed() -> None:
    """A count by an engine that was not judged for begins the judgement anew."""
    engine = Counter()

    class Changing(Counter):
        async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
            found = await super().count(dialect, request, body)
            return found if len(self.bodies) == 1 else replace(found, profile=profile(instance="<two>"))

    engine = Changing()
    with pytest.raises(Refused, match="engine_changed"):
        judge(CHATS["openai_chat"], plain(("user", 90), ("user", 9)), trimming(), 100, engine)


def test_a_failing_counter_is_no_template() -> None:
    """Only a body that the engine refuses is passed over; an engine that is gone is told."""

    class Failing(Counter):
        async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
            if self.bodies:
                raise Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))
            return await super().count(dialect, request, body)

    with pytest.raises(Refused, match="engine_unreachable"):
        judge(CHATS["openai_chat"], plain(("user", 90), ("user", 9)), trimming(), 100, Failing())


# -- texts

TEXTS: tuple[Dialect, ...] = (OpenAiCompletions(), LlamaCppCompletion())
some_words = st.lists(st.sampled_from(["a", "émigré", "東京", "🦜🦜", "<|im_end|>"]), min_size=1, max_size=60)


@pytest.mark.parametrize("dialect", TEXTS, ids=lambda one: one.name)
@pytest.mark.parametrize("side", list(TrimSide))
@settings(max_examples=40)
@given(
    texts=st.lists(some_words.map(" ".join) | st.just(""), min_size=1, max_size=3),
    slot=st.integers(6, 60),
    listed=st.booleans(),
)
def test_texts_are_cut_at_one_end_and_fit(
    dialect: Dialect, side: TrimSide, texts: list[str], slot: int, *, listed: bool
) -> None:
    """What is left of each is its end, or its beginning, in whole characters; short ones stay as they are."""
    given = texts if listed else texts[0]
    sent = json.dumps({"prompt": given, "max_tokens": 2, "n_predict": 2, "odd": 1.5}).encode()
    decision, engine = judge(dialect, sent, trimming(trim_side=side, trim_room_tokens=2), slot, slots=4)
    assert len(engine.bodies) <= 5
    assert not isinstance(decision.verdict, Reject)
    assert decision.verdict.size.prompt_tokens + 2 <= slot
    left = decision.request.document.get("prompt")
    assert decision.request.document.get("odd") == 1.5
    for before, after in zip(texts if listed else texts[:1], left if listed else [left], strict=True):
        assert before.endswith(after) if side is TrimSide.LEFT else before.startswith(after)
        assert after == before or words(before) + 1 + 2 > slot
    if isinstance(decision.verdict, Trim):
        assert decision.verdict.trimmed.tokens > 0
        assert (decision.verdict.trimmed.how, decision.verdict.trimmed.messages) == (side.value, 0)


@pytest.mark.parametrize(("side", "expected"), [("left", [92, 93]), ("right", [0, 1])])
def test_token_ids_are_cut_by_number(side: str, expected: list[int]) -> None:
    """No tokenizer is needed for them."""
    sent = json.dumps({"prompt": list(range(94)), "max_tokens": 2}).encode()
    decision, _ = judge(TEXTS[0], sent, trimming(trim_side=TrimSide(side), trim_room_tokens=2), 50)
    left = decision.request.document.get("prompt")
    assert len(left) == 48
    assert (left[-2:] if side == "left" else left[:2]) == expected


@pytest.mark.parametrize("sent", [{"prompt": [1] * 90 + ["a"]}, {"prompt": "a " * 90, "truncate_prompt_tokens": 1}])
def test_what_cannot_be_cut_is_refused(sent: dict[str, Any]) -> None:
    """A list of both tokens and texts, and a text of which nothing would be left."""
    decision, _ = judge(TEXTS[0], json.dumps({"max_tokens": 2, **sent}).encode(), trimming(), 50)
    assert isinstance(decision.verdict, Reject)
    assert decision.verdict.refusal.reason is Reason.UNTRIMMABLE
    assert "shorten the prompt" in decision.verdict.refusal.message


def test_a_tokenizer_that_joins_pieces_anew_is_counted_again() -> None:
    """A cut text may have more tokens than it had within the whole: it is cut again by as many."""

    class Joining(Counter):
        async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
            found = await super().count(dialect, request, body)
            extra = 3 if len(self.bodies) > 1 else 0
            return replace(found, prompts=tuple(tokens + extra for tokens in found.prompts))

    sent = json.dumps({"prompt": " ".join("a" * 90), "max_tokens": 2}).encode()
    decision, engine = judge(TEXTS[0], sent, trimming(trim_room_tokens=2), 50, Joining())
    assert isinstance(decision.verdict, Trim)
    assert decision.verdict.size.prompt_tokens == 48
    assert len(engine.bodies) == 3


def test_the_tenants_share_of_the_pool_bounds_a_list_of_texts() -> None:
    """Two prompts side by side are cut to what both may hold together."""
    tenant = replace(trimming(trim_room_tokens=2), quota=Quota(kv_tokens_max=40))
    sent = json.dumps({"prompt": ["a " * 40 + "b", "c"], "max_tokens": 2}).encode()
    decision, _ = judge(TEXTS[0], sent, tenant, 100)
    assert isinstance(decision.verdict, Trim)
    assert decision.verdict.size.prompts == (34, 2)
