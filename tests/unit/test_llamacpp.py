"""What is known of a llama-server is what it says itself, on this connection; and its counter's word is exact."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.ask import Ask, Prompt
from kvgate.core.drain import BusySlot
from kvgate.core.json_object import read_object
from kvgate.core.profile import EngineProfile, Fact, KvSettings, Source, Topology
from kvgate.core.reason import Reason
from kvgate.core.reuse import Reuse
from kvgate.core.startup_log import StartupLog
from kvgate.engines.llamacpp import COUNTERS, COUNTS_AT_ONCE, REUSE_FIELDS, SAFE_PROBLEMS, LlamaCpp, LlamaCppSettings
from kvgate.engines.llamacpp import calls as module
from kvgate.engines.llamacpp.discovery import BoundFacts
from kvgate.engines.llamacpp.errors import explain
from kvgate.engines.llamacpp.reuse_fields import SWITCHLESS
from kvgate.ports import PROBE_SIZE, LineFailed, LineStalled, ReadRequest, Refused
from tests import fake_engine as fault
from tests.fake_engine import CHAT, COUNTER, MESSAGES, MESSAGES_COUNTER, TOKENIZE, FakeEngine, raw, whole
from tests.unit.doubles import ManualClock, chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.fake_engine import Reply

STARTED = (
    "0.00.005.508 I srv    load_model: loading model 'x.gguf'",
    "0.00.700.000 I llama_kv_cache: size = 11 MiB (512 cells, 30 layers), K (q8_0): 4 MiB, V (f16): 7 MiB",
    "0.00.821.955 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 512, kv_unified = 'false'",
)
UNIFIED = tuple(line.replace("'false'", "'true'") for line in STARTED)
SECRET = "the launch code is 0000"
UNPROMPTED = ReadRequest(Ask("m", 1, 1, stream=False), read_object(b"{}"), usage_shown=False)
"""What a dialect reads whose prompt only the engine's own counter can size."""


@dataclass
class Log:
    """A startup log that a test writes on."""

    is_childs: bool = False
    log: StartupLog = field(default_factory=StartupLog)

    def write(self, *lines: str) -> None:
        self.log.feed(lines)

    def read(self) -> StartupLog:
        return self.log


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as found:
        yield found


@pytest.fixture
async def opened() -> AsyncIterator[list[LlamaCpp]]:
    found: list[LlamaCpp] = []
    yield found
    for one in found:
        await one.close()
        assert one.upstream.open_connections == 0


@pytest.fixture
def gate_to(engine: FakeEngine, opened: list[LlamaCpp]) -> Any:
    def make(**options: Any) -> LlamaCpp:
        settings = options.pop("settings", LlamaCppSettings(KvSettings()))
        clock = options.pop("clock", ManualClock())
        opened.append(LlamaCpp(engine.url, settings, clock, **options))
        return opened[-1]

    return make


async def refusal_of(doing: Awaitable[object]) -> Refused:
    with pytest.raises(Refused) as caught:
        await doing
    return caught.value


async def reason_of(doing: Awaitable[object]) -> Reason:
    return (await refusal_of(doing)).refusal.reason


async def until_gone(llama: LlamaCpp) -> None:
    await until(lambda: not llama.upstream.open_connections)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the other side of a socket tells of no event
            await asyncio.sleep(0.005)


# -- discovery


async def test_a_profile_is_read_and_each_fact_has_its_source(engine: FakeEngine, gate_to: Any) -> None:
    found = await gate_to().discover()
    assert found.n_ctx_slot == Fact(512, Source.PROPS)
    assert found.total_slots == Fact(2, Source.PROPS)
    assert found.topology == Fact(Topology.UNIFIED, Source.ASSUMED)
    assert found.pool_tokens == Fact(512, Source.ASSUMED)
    assert (found.kind, found.build, found.models) == ("llamacpp", "b0-unknown", ("small",))
    assert (found.model_bytes, found.n_params, found.n_vocab, found.n_ctx_train) == (96576768, 134515008, 49152, 8192)
    assert found.chat_template_sha256 == hashlib.sha256(engine.props()["chat_template"].encode()).hexdigest()
    assert (found.instance, found.slots_visible, found.kv_type) == (engine.media_marker, True, "unknown")


@pytest.mark.parametrize(
    ("props", "slots", "models", "expected"),
    [
        (512, 512, 512, Fact(512, Source.PROPS)),
        (512, 256, 512, Fact(256, Source.SLOTS)),
        (512, 512, 300, Fact(300, Source.MODELS)),
        (512, 400, 300, Fact(300, Source.MODELS)),
        (300, 512, 512, Fact(300, Source.PROPS)),
    ],
)
async def test_the_least_context_that_is_told_counts(
    engine: FakeEngine, gate_to: Any, *, props: int, slots: int, models: int, expected: Fact[int]
) -> None:
    """A proxy in front may list the trained window; the smallest word is the safe one."""
    engine.n_ctx, engine.slots_n_ctx, engine.models_n_ctx = props, slots, models
    assert (await gate_to().discover()).n_ctx_slot == expected


@pytest.mark.parametrize("n_ctx", [None, 0, -1, "512", True, 512.0, [512]])
async def test_a_context_of_another_shape_is_none(engine: FakeEngine, gate_to: Any, n_ctx: Any) -> None:
    engine.script("/props", whole("200 OK", {**engine.props(), "default_generation_settings": {"n_ctx": n_ctx}}))
    assert (await gate_to().discover()).n_ctx_slot == Fact(512, Source.SLOTS)


async def test_an_engine_that_tells_no_context_is_not_served(engine: FakeEngine, gate_to: Any) -> None:
    engine.script("/props", whole("200 OK", {"total_slots": 2}))
    engine.script("/slots", whole("200 OK", [{"id": 0}]))
    engine.script("/v1/models", whole("200 OK", {"data": []}))
    problem = await refusal_of(gate_to().discover())
    assert problem.refusal.reason is Reason.ENGINE_UNKNOWN
    assert "/props, /slots nor /v1/models" in problem.refusal.message


async def test_slots_are_counted_where_props_does_not_number_them(engine: FakeEngine, gate_to: Any) -> None:
    props = engine.props()
    del props["total_slots"]
    engine.script("/props", whole("200 OK", props))
    assert (await gate_to().discover()).total_slots == Fact(2, Source.SLOTS)


async def test_an_engine_without_slots_is_found_at_the_first_look(engine: FakeEngine, gate_to: Any) -> None:
    """`--no-slots` answers 501 and closes the connection: what was learnt until then stands."""
    engine.slots_shown = False
    llama = gate_to()
    found = await llama.discover()
    assert (found.slots_visible, found.n_ctx_slot) == (False, Fact(512, Source.PROPS))
    assert await llama.look() is None
    assert (await llama.count("openai_chat", UNPROMPTED, chat())).prompts == (31,)


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ({"/props": whole("404 Not Found", {})}, Reason.ENGINE_UNKNOWN),
        ({"/props": whole("401 Unauthorized", {})}, Reason.ENGINE_UNKNOWN),
        ({"/props": whole("200 OK", [])}, Reason.ENGINE_UNKNOWN),
        ({"/props": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")}, Reason.ENGINE_UNKNOWN),
        ({"/props": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"[" * 1000)}, Reason.ENGINE_UNKNOWN),
        ({"/props": whole("503 Service Unavailable", {})}, Reason.ENGINE_LOADING),
        ({"/health": whole("503 Service Unavailable", {})}, Reason.ENGINE_LOADING),
        ({"/health": fault.reset_before_head}, Reason.ENGINE_UNREACHABLE),
        ({"/v1/models": fault.cut_whole}, Reason.ENGINE_UNREACHABLE),
        ({"/slots": fault.not_http}, Reason.ENGINE_UNREACHABLE),
    ],
)
async def test_an_engine_that_does_not_say_who_it_is_is_refused(
    engine: FakeEngine, gate_to: Any, replies: dict[str, Reply], reason: Reason
) -> None:
    for path, reply in replies.items():
        engine.script(path, reply)
    llama = gate_to()
    found = await refusal_of(llama.discover())
    assert found.refusal.reason is reason
    assert found.refusal.retry_after_s is not None
    await until_gone(llama)


@pytest.mark.parametrize(
    "odd",
    [
        {"aliases": 5},
        {"aliases": "abc"},
        {"aliases": {"a": 1}},
        {"aliases": [None, 7, "small"]},
        {"meta": 5},
        {"meta": {"size": "big", "n_params": -1, "n_vocab": None}},
    ],
)
async def test_a_model_entry_of_another_shape_costs_no_more_than_itself(
    engine: FakeEngine, gate_to: Any, odd: dict[str, Any]
) -> None:
    entry = {**engine.models()["data"][0], **odd}
    engine.script("/v1/models", whole("200 OK", {"data": [entry]}))
    found = await gate_to().discover()
    assert (found.models, found.n_ctx_slot.value) == (("small",), 512)


@pytest.mark.parametrize("models", [None, [], {"data": 5}, {"data": [5]}, {"data": [{}]}])
async def test_a_model_list_of_another_shape_names_nothing(engine: FakeEngine, gate_to: Any, models: Any) -> None:
    engine.script("/v1/models", whole("200 OK", models))
    assert (await gate_to().discover()).models == ()


@pytest.mark.parametrize("slots", [None, {}, "x", [5, None], [{"n_ctx": "512"}]])
async def test_slots_of_another_shape_tell_nothing(engine: FakeEngine, gate_to: Any, slots: Any) -> None:
    engine.script("/slots", whole("200 OK", slots))
    found = await gate_to().discover()
    assert found.n_ctx_slot == Fact(512, Source.PROPS)
    assert found.slots_visible is isinstance(slots, list)


async def test_a_template_of_half_characters_is_hashed_all_the_same(engine: FakeEngine, gate_to: Any) -> None:
    engine.script("/props", whole("200 OK", {**engine.props(), "chat_template": "\ud800"}))
    assert (await gate_to().discover()).chat_template_sha256 is not None


@pytest.mark.parametrize(
    ("kv", "topology", "pool_tokens"),
    [
        (KvSettings(Topology.DIVIDED), Fact(Topology.DIVIDED, Source.SETTING), Fact(1024, Source.SETTING)),
        (KvSettings(Topology.UNIFIED, 700), Fact(Topology.UNIFIED, Source.SETTING), Fact(700, Source.SETTING)),
    ],
)
async def test_the_operators_word_on_the_cache_counts(
    gate_to: Any, kv: KvSettings, topology: Fact[Topology], pool_tokens: Fact[int]
) -> None:
    llama = gate_to(settings=LlamaCppSettings(kv, margin_tokens=3, headroom_ratio=0.5))
    found = await llama.discover()
    assert (found.topology, found.pool_tokens) == (topology, pool_tokens)
    pool = llama.pool(found)
    assert (pool.tokens, pool.slots, pool.margin_tokens) == (pool_tokens.value, 2, 3)
    assert pool.headroom_tokens == pool_tokens.value // 2


async def test_a_setting_that_contradicts_the_engine_is_told(gate_to: Any) -> None:
    llama = gate_to(settings=LlamaCppSettings(KvSettings(Topology.UNIFIED, 100)))
    problem = await refusal_of(llama.discover())
    assert problem.refusal.reason is Reason.ENGINE_UNKNOWN
    assert "pool_tokens = 100" in problem.refusal.message


async def test_two_looks_at_one_engine_give_one_profile(engine: FakeEngine, gate_to: Any) -> None:
    """Later connections ask /props alone; the profile is the same object, and nobody is told of a change."""
    told: list[tuple[EngineProfile | None, EngineProfile]] = []
    llama = gate_to(on_profile=lambda before, now: told.append((before, now)))
    first = await llama.open()
    second = await llama.open()
    assert first.profile is second.profile is llama.profile
    assert told == [(None, first.profile)]
    assert [len(engine.asked(path)) for path in ("/props", "/v1/models", "/slots")] == [2, 1, 1]
    first.release()
    second.release()


async def test_first_looks_side_by_side_give_equal_profiles(gate_to: Any) -> None:
    """A request counted on one connection and opened on another is not taken for a changed engine's."""
    told: list[EngineProfile] = []
    llama = gate_to(on_profile=lambda _, now: told.append(now))
    lines = await asyncio.gather(*(llama.open() for _ in range(6)))
    assert all(line.profile == lines[0].profile for line in lines)
    assert len(told) == 1
    for line in lines:
        line.release()


async def test_a_successor_is_known_before_anything_is_sent_to_it(engine: FakeEngine, gate_to: Any) -> None:
    """The next connection's profile is the new engine's, and the change is told once."""
    told: list[tuple[int | None, int]] = []
    llama = gate_to(
        on_profile=lambda before, now: told.append((before and before.n_ctx_slot.value, now.n_ctx_slot.value))
    )
    await llama.discover()
    await engine.replace(n_ctx=256)
    await until_gone(llama)
    line = await llama.open()
    assert line.profile.n_ctx_slot.value == 256
    assert llama.profile == line.profile
    assert told == [(None, 512), (512, 256)]
    line.release()


async def test_a_successor_with_equal_figures_is_another_engine(engine: FakeEngine, gate_to: Any) -> None:
    llama = gate_to()
    before = await llama.discover()
    await engine.replace()
    await until_gone(llama)
    after = await llama.discover()
    assert after != before
    assert after.fingerprint == before.fingerprint


async def test_a_stalled_engine_is_given_up(
    engine: FakeEngine, gate_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONTROL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.1)
    llama = gate_to()
    await llama.discover()
    engine.script("/health", fault.stall)
    assert await reason_of(llama.discover()) is Reason.ENGINE_UNREACHABLE
    engine.script("/slots", fault.stall)
    with pytest.raises(LineFailed, match="no answer to GET /slots"):
        await llama.look()
    await until_gone(llama)


async def test_an_engine_that_answers_nobody_ends_what_waits_for_it(
    engine: FakeEngine, gate_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `idle_timeout_s` without an answer from /health, and not before: one that answers it is in a prefill."""
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.1)
    clock = ManualClock()
    llama = gate_to(clock=clock, settings=LlamaCppSettings(KvSettings(), idle_timeout_s=30))
    line = await llama.open()
    engine.script(fault.CHAT, fault.stall)
    waiting = asyncio.create_task(line.send("POST", fault.CHAT, {}, b"{}"))

    async def unheard() -> None:
        engine.script("/health", fault.stall)
        assert await reason_of(llama.discover()) is Reason.ENGINE_UNREACHABLE

    await unheard()
    clock.advance(60)
    await llama.discover()  # it answers: all is as it was
    await unheard()
    clock.advance(29)
    await unheard()
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(1)
    await unheard()
    with pytest.raises(LineStalled, match="/health for 30 s"):
        await waiting
    line.release()


async def test_other_settings_make_another_profile(engine: FakeEngine, gate_to: Any) -> None:
    """From the next request on, also over a connection that was open already."""
    llama = gate_to()
    line = await llama.open()
    before = line.profile
    line.release()
    llama.configure(LlamaCppSettings(KvSettings(Topology.DIVIDED), margin_tokens=8, idle_timeout_s=9))
    line = await llama.open()
    assert (before.topology.value, line.profile.topology.value) == (Topology.UNIFIED, Topology.DIVIDED)
    assert llama.pool(line.profile).margin_tokens == 8
    assert llama.upstream.idle_timeout_s == 9
    line.release()


# -- facts of a log


async def test_a_log_tells_what_http_does_not(gate_to: Any) -> None:
    log = Log()
    log.write(*STARTED)
    found = await gate_to(startup_log=log).discover()
    assert found.topology == Fact(Topology.DIVIDED, Source.LOG)
    assert found.pool_tokens == Fact(1024, Source.LOG)
    assert (found.kv_type_k, found.kv_type_v) == (Fact("q8_0", Source.LOG), Fact("f16", Source.LOG))
    assert found.kv_type == "q8_0/f16"


async def test_a_log_of_another_engine_is_not_believed_on_the_cache(engine: FakeEngine, gate_to: Any) -> None:
    """Its slots and context are not this engine's."""
    engine.n_ctx = 256
    log = Log()
    log.write(*STARTED)
    found = await gate_to(startup_log=log).discover()
    assert found.topology == Fact(Topology.UNIFIED, Source.ASSUMED)


async def test_what_a_log_says_dies_with_the_process_that_wrote_it(engine: FakeEngine, gate_to: Any) -> None:
    """A successor that logs elsewhere is not described by its predecessor's log, however often it is asked."""
    log = Log()
    log.write(*STARTED)
    llama = gate_to(startup_log=log)
    assert (await llama.discover()).topology.source is Source.LOG
    await engine.replace()
    for _ in range(3):
        await until_gone(llama)
        found = await llama.discover()
        assert (found.topology.source, found.kv_type) == (Source.ASSUMED, "unknown")
        await llama.close()


async def test_a_successor_with_a_start_of_its_own_in_the_log_is_described_by_it(
    engine: FakeEngine, gate_to: Any
) -> None:
    log = Log()
    log.write(*STARTED)
    llama = gate_to(startup_log=log)
    await llama.discover()
    await engine.replace()
    await until_gone(llama)
    log.write(*UNIFIED)
    assert (await llama.discover()).topology == Fact(Topology.UNIFIED, Source.LOG)


async def test_a_log_that_comes_late_is_read_all_the_same(engine: FakeEngine, gate_to: Any) -> None:
    """The successor's start shows in the log a moment after it answers; the next connection learns it."""
    log = Log()
    log.write(*STARTED)
    llama = gate_to(startup_log=log)
    await llama.discover()
    await engine.replace()
    await until_gone(llama)
    assert (await llama.discover()).topology.source is Source.ASSUMED
    log.write(*STARTED)
    await llama.close()
    assert (await llama.discover()).topology.source is Source.LOG


async def test_a_third_process_does_not_inherit_the_seconds_start(engine: FakeEngine, gate_to: Any) -> None:
    log = Log()
    log.write(*STARTED)
    llama = gate_to(startup_log=log)
    await llama.discover()
    for sources in (Source.LOG, Source.ASSUMED):
        await engine.replace()
        await until_gone(llama)
        if sources is Source.LOG:
            log.write(*STARTED)
        assert (await llama.discover()).topology.source is sources


@pytest.mark.parametrize(("is_childs", "source"), [(False, Source.ASSUMED), (True, Source.LOG)])
async def test_an_engine_without_a_mark_of_its_own(
    engine: FakeEngine, gate_to: Any, *, is_childs: bool, source: Source
) -> None:
    """Old builds draw no media_marker: only a child's log is certainly its own, since its end would be noticed."""
    engine.media_marker = None
    log = Log(is_childs=is_childs)
    log.write(*STARTED)
    assert (await gate_to(startup_log=log).discover()).topology.source is source


# -- counting


async def test_the_count_is_the_engines_and_of_the_very_body(engine: FakeEngine, gate_to: Any) -> None:
    sent = b'{ "messages" : [{"role":"user","content":"one two three"}], "max_tokens": 1 }'
    counted = await gate_to().count("openai_chat", UNPROMPTED, sent)
    assert (counted.prompts, counted.exact) == ((33,), True)
    assert counted.profile.n_ctx_slot.value == 512
    (request,) = engine.asked(COUNTER)
    assert (request.body, request.headers["content-type"]) == (sent, "application/json")
    assert COUNTERS["openai_chat"] == COUNTER


async def test_each_dialect_has_its_own_counter(engine: FakeEngine, gate_to: Any) -> None:
    """An Anthropic body at OpenAI's counter would be sized wrongly (vllm issue 20778)."""
    engine.script(MESSAGES_COUNTER, whole("200 OK", {"input_tokens": 7}))
    counted = await gate_to().count("anthropic_messages", UNPROMPTED, chat("one two three"))
    assert (counted.prompts, engine.asked(COUNTER)) == ((7,), [])
    assert COUNTERS["openai_responses"] == "/v1/responses/input_tokens"


def _error(message: Any) -> dict[str, Any]:
    return {"error": {"code": 500, "message": message, "type": "server_error"}}


@pytest.mark.parametrize("status", ["400 Bad Request", "500 Internal Server Error", "413 Payload Too Large"])
@pytest.mark.parametrize(
    "answer",
    [
        _error(f"Failed to parse messages: Missing 'role' in message: {SECRET}"),
        _error(f"template error near {SECRET}"),
        _error([SECRET]),
        {"error": SECRET},
        {"detail": SECRET},
        [SECRET],
        SECRET,
    ],
)
async def test_a_body_that_the_engine_cannot_count_is_refused_without_a_word_of_it(
    engine: FakeEngine, gate_to: Any, status: str, answer: Any
) -> None:
    """The engine quotes the prompt in its errors; kvgate says only what it knows to be safe."""
    engine.script(COUNTER, whole(status, answer))
    problem = (await refusal_of(gate_to().count("openai_chat", UNPROMPTED, chat(SECRET)))).refusal
    assert problem.reason is Reason.UNCOUNTED
    assert SECRET not in problem.message
    assert "launch" not in problem.message


@pytest.mark.parametrize("phrase", SAFE_PROBLEMS)
async def test_what_can_be_said_safely_is_said(engine: FakeEngine, gate_to: Any, phrase: str) -> None:
    engine.script(COUNTER, whole("500 Internal Server Error", _error(f"{phrase} - {SECRET}")))
    problem = (await refusal_of(gate_to().count("openai_chat", UNPROMPTED, chat()))).refusal
    assert problem.message.endswith(f"{phrase}.")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (whole("503 Service Unavailable", {}), Reason.ENGINE_LOADING),
        (whole("404 Not Found", {}), Reason.ENGINE_UNKNOWN),
        (whole("405 Method Not Allowed", {}), Reason.ENGINE_UNKNOWN),
        (whole("501 Not Implemented", {}), Reason.ENGINE_UNKNOWN),
        (whole("200 OK", {}), Reason.ENGINE_UNKNOWN),
        (whole("200 OK", {"input_tokens": "5"}), Reason.ENGINE_UNKNOWN),
        (whole("200 OK", {"input_tokens": -1}), Reason.ENGINE_UNKNOWN),
        (whole("200 OK", [5]), Reason.ENGINE_UNKNOWN),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"), Reason.ENGINE_UNKNOWN),
        (fault.reset_before_head, Reason.ENGINE_UNREACHABLE),
        (fault.cut_whole, Reason.ENGINE_UNREACHABLE),
        (fault.not_http, Reason.ENGINE_UNREACHABLE),
    ],
)
async def test_a_counter_that_does_not_count_is_the_engines_fault(
    engine: FakeEngine, gate_to: Any, reply: Reply, reason: Reason
) -> None:
    """503, not 400: the client's body may be as good as any."""
    engine.script(COUNTER, reply)
    problem = (await refusal_of(gate_to().count("openai_chat", UNPROMPTED, chat()))).refusal
    assert (problem.reason, problem.reason.status) == (reason, 503)
    assert problem.retry_after_s is not None


def prompted(*prompts: Prompt) -> ReadRequest:
    """What a dialect reads that knows its prompts."""
    return replace(UNPROMPTED, ask=replace(UNPROMPTED.ask, prompts=prompts))


async def test_prompts_are_counted_by_the_tokenizer_each_for_itself(engine: FakeEngine, gate_to: Any) -> None:
    """In the request's own order, with BOS as for a real prompt, and special tokens for what they are."""
    request = prompted(Prompt(("one two three",)), Prompt((1, "four five", 2)), Prompt(("six",)))
    counted = await gate_to().count("openai_completions", request, b"unread")
    assert (counted.prompts, counted.exact) == ((4, 4, 2), True)
    assert counted.profile.n_ctx_slot.value == 512
    assert sorted((asked.json for asked in engine.asked(TOKENIZE)), key=str) == sorted(
        [
            {"content": content, "add_special": True, "parse_special": True}
            for content in ("one two three", [1, "four five", 2], "six")
        ],
        key=str,
    )


async def test_token_ids_are_counted_without_asking(engine: FakeEngine, gate_to: Any) -> None:
    """They are what the engine runs, with no BOS in front; who the engine is, is known all the same."""
    counted = await gate_to().count("openai_completions", prompted(Prompt((5, 6, 7)), Prompt((8,))), b"")
    assert (counted.prompts, counted.exact, counted.profile.n_ctx_slot.value) == ((3, 1), True, 512)
    assert engine.asked(TOKENIZE) == []


async def test_what_the_engine_adds_is_bounded_and_said_to_be(gate_to: Any) -> None:
    """An infill's frame has no counter: the bound is added, and the figure is not called exact."""
    counted = await gate_to().count("llamacpp_infill", prompted(Prompt(("a b", "c"), 16)), b"")
    assert (counted.prompts, counted.exact) == ((20,), False)


async def test_a_bare_text_is_counted_without_bos(engine: FakeEngine, gate_to: Any) -> None:
    """Output that the engine told nothing of."""
    assert await gate_to().count_text("three more words") == 3
    assert engine.asked(TOKENIZE)[0].json == {"content": "three more words"}


async def test_the_pieces_of_a_text_are_its_bytes(engine: FakeEngine, gate_to: Any) -> None:
    """A piece that is no whole character comes as a list of bytes (seen on b11549); what is no piece has none."""
    pieces = [" w", "ör", [32, 230], [157], [177], "<|im_end|>", None]
    engine.script(TOKENIZE, whole("200 OK", {"tokens": [{"id": 7, "piece": piece} for piece in pieces] + [5]}))
    assert await gate_to().text_pieces(" wör 東<|im_end|>") == (2, 3, 2, 1, 1, 10, 0, 0)
    asked = {"content": " wör 東<|im_end|>", "parse_special": True, "with_pieces": True}
    assert engine.asked(TOKENIZE)[0].json == asked


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (whole("200 OK", {}), Reason.ENGINE_UNKNOWN),
        (whole("200 OK", {"tokens": 3}), Reason.ENGINE_UNKNOWN),
        (whole("404 Not Found", {}), Reason.ENGINE_UNKNOWN),
        (whole("503 Service Unavailable", {}), Reason.ENGINE_LOADING),
        (whole("500 Internal Server Error", {"error": {"message": SECRET}}), Reason.UNCOUNTED),
        (fault.reset_before_head, Reason.ENGINE_UNREACHABLE),
    ],
)
async def test_a_tokenizer_that_does_not_count_refuses_them_all(
    engine: FakeEngine, gate_to: Any, reply: Reply, reason: Reason
) -> None:
    """Nothing unsized is waved through: one prompt of a list that cannot be counted is enough."""
    engine.script(TOKENIZE, fault.usual, reply)
    request = prompted(*[Prompt(("a",))] * 3)
    problem = (await refusal_of(gate_to().count("openai_completions", request, b""))).refusal
    assert problem.reason is reason
    assert SECRET not in problem.message


async def test_a_list_that_cannot_be_counted_is_not_counted_on(engine: FakeEngine, gate_to: Any) -> None:
    """A refusal leaves nothing behind: of 200 prompts, those that wait for their turn are not asked for."""
    engine.script(TOKENIZE, whole("500 Internal Server Error", {}))
    llama = gate_to()
    request = prompted(*[Prompt(("a",))] * 200)
    assert await reason_of(llama.count("openai_completions", request, b"")) is Reason.UNCOUNTED
    asked = len(engine.asked(TOKENIZE))
    await asyncio.sleep(0.05)
    assert asked <= len(engine.asked(TOKENIZE)) <= 2 * COUNTS_AT_ONCE
    assert (await llama.count("openai_chat", UNPROMPTED, chat())).prompts == (31,)


async def test_a_list_counted_by_two_engines_is_counted_by_none(engine: FakeEngine, gate_to: Any) -> None:
    """One connection is to the old process still, one to the new: the sizes do not belong together."""
    llama = gate_to()
    (await llama.open()).release()
    engine.media_marker = "<__media_another__>"
    found = await refusal_of(llama.count("openai_completions", prompted(Prompt(("a",)), Prompt(("b",))), b""))
    assert found.refusal.reason is Reason.ENGINE_CHANGED
    assert found.refusal.retry_after_s == 1


async def test_counts_are_bounded_side_by_side(engine: FakeEngine, gate_to: Any) -> None:
    """A flood of bodies waits here, and does not take all of the engine's threads; all are counted in the end."""
    busy, most, go = 0, 0, asyncio.Event()

    async def slow(exchange: fault.Exchange) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await go.wait()
        busy -= 1
        await fault.usual(exchange)

    engine.script(COUNTER, *[slow] * 20)
    llama = gate_to()
    counts = [asyncio.create_task(llama.count("openai_chat", UNPROMPTED, chat())) for _ in range(20)]
    await until(lambda: busy == COUNTS_AT_ONCE)
    await asyncio.sleep(0.05)
    go.set()
    assert {counted.prompts for counted in await asyncio.gather(*counts)} == {(31,)}
    assert most == COUNTS_AT_ONCE


async def test_an_answer_without_end_is_not_held_for_ever(
    engine: FakeEngine, gate_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 1000)
    engine.script(COUNTER, fault.until_close(b"x" * 5000))
    llama = gate_to()
    assert await reason_of(llama.count("openai_chat", UNPROMPTED, chat())) is Reason.ENGINE_UNREACHABLE
    await until_gone(llama)


async def test_a_cancelled_count_gives_its_place_and_connection_back(engine: FakeEngine, gate_to: Any) -> None:
    llama = gate_to()
    engine.script(COUNTER, *[fault.stall] * COUNTS_AT_ONCE)
    counts = [asyncio.create_task(llama.count("openai_chat", UNPROMPTED, chat())) for _ in range(COUNTS_AT_ONCE)]
    await until(lambda: len(engine.asked(COUNTER)) == COUNTS_AT_ONCE)
    for count in counts:
        count.cancel()
    await asyncio.gather(*counts, return_exceptions=True)
    await until_gone(llama)
    assert (await llama.count("openai_chat", UNPROMPTED, chat())).prompts == (31,)


# -- too small


@pytest.mark.parametrize("refused", [True, False])
async def test_an_undersized_engine_serves_nobody_unless_the_operator_says_so(gate_to: Any, *, refused: bool) -> None:
    kv = KvSettings()
    llama = gate_to(settings=LlamaCppSettings(kv, context_tokens_min=513, undersized_refused=refused))
    assert llama.refusal_now() is None
    await llama.discover()
    if not refused:
        assert llama.refusal_now() is None
        (await llama.open()).release()
        return
    for doing in (llama.open(), llama.count("openai_chat", UNPROMPTED, chat())):
        problem = (await refusal_of(doing)).refusal
        assert problem.reason is Reason.ENGINE_UNDERSIZED
        assert dict(problem.figures) == {"n_ctx_slot": 512, "context_tokens_min": 513}
    assert await llama.look() is not None


async def test_the_product_minimum_itself_is_enough(gate_to: Any) -> None:
    llama = gate_to(settings=LlamaCppSettings(KvSettings(), context_tokens_min=512))
    (await llama.open()).release()


async def test_the_very_first_request_is_refused_by_an_undersized_engine(engine: FakeEngine, gate_to: Any) -> None:
    """Nothing was known before it came; the connection's own hello tells."""
    llama = gate_to(settings=LlamaCppSettings(KvSettings(), context_tokens_min=513))
    assert await reason_of(llama.count("openai_chat", UNPROMPTED, chat())) is Reason.ENGINE_UNDERSIZED
    assert engine.asked(COUNTER) == []


# -- a look at the slots, and reuse


async def test_busy_slots_are_seen_with_task_and_limit(engine: FakeEngine, gate_to: Any) -> None:
    engine.busy = [
        {"is_processing": True, "id_task": 7, "params": {"n_predict": 30}},
        {"is_processing": True, "id_task": "x", "params": []},
    ]
    seen = await gate_to().look()
    assert seen is not None
    assert seen.busy == (BusySlot(0, 7, 30), BusySlot(1, None, None))
    assert seen.asked_at_s == 1000


async def test_idle_slots_are_seen_as_none(gate_to: Any) -> None:
    seen = await gate_to().look()
    assert seen is not None
    assert seen.busy == ()


@pytest.mark.parametrize("field", sorted(REUSE_FIELDS))
def test_reuse_off_is_said_and_nothing_of_the_clients_own_stays(gate_to: Any, field: str) -> None:
    """`cache_prompt: false`, whatever the client sent under any name."""
    document = read_object(json.dumps({"messages": [], field: True}).encode())
    assert json.loads(document.edited(gate_to().reuse_edit(Reuse.OFF))) == {"messages": [], "cache_prompt": False}


async def test_the_engines_key_goes_with_every_request(engine: FakeEngine, gate_to: Any) -> None:
    llama = gate_to(api_key="sk-engine")
    await llama.count("openai_chat", UNPROMPTED, chat())
    line = await llama.open()
    await line.send("POST", CHAT, {}, chat())
    line.release()
    assert {request.headers["authorization"] for request in engine.requests} == {"Bearer sk-engine"}


# -- whether reuse can be off at all


async def probe(llama: LlamaCpp) -> None:
    line = await llama.open(fresh=True)
    try:
        await llama.probe_reuse(line)
    finally:
        line.release()


def said(cached: int | None) -> Reply:
    usage = {} if cached is None else {"usage": {"input_tokens": 30, "cache_read_input_tokens": cached}}
    return whole("200 OK", {"type": "message", **usage})


async def test_what_carries_the_switch_needs_no_proof(gate_to: Any) -> None:
    llama = gate_to()
    found = await llama.discover()
    assert {llama.reuse_is_off(dialect, found) for dialect in ("openai_chat", "llamacpp_completion")} == {True}
    assert {llama.reuse_is_off(dialect, found) for dialect in SWITCHLESS} == {None}


@pytest.mark.parametrize(
    ("cached", "is_off"),
    [((0, 0, 0), True), ((0, 29, 29), False), ((0, 0, 29), False), ((5, 0, 0), False)],
)
async def test_a_probe_asks_the_same_and_looks_for_reuse(
    engine: FakeEngine, gate_to: Any, cached: tuple[int, ...], is_off: bool
) -> None:
    """Words of its own, one token of output, and any reuse at all is a no."""
    engine.script(MESSAGES, *map(said, cached))
    llama = gate_to()
    await probe(llama)
    assert llama.profile is not None
    assert llama.reuse_is_off("anthropic_messages", llama.profile) is is_off
    asked = engine.asked(MESSAGES)
    assert len({request.body for request in asked}) == 1
    assert asked[0].json["max_tokens"] == 1
    engine.script(MESSAGES, *map(said, cached))
    await probe(llama)
    assert engine.asked(MESSAGES)[-1].body != asked[0].body


async def test_what_a_probe_asks_is_no_more_than_its_lease(engine: FakeEngine, gate_to: Any) -> None:
    """Sized by the worst: every byte of the words a token, and a template around them."""
    engine.script(MESSAGES, *[said(0)] * 3)
    await probe(gate_to())
    sent = engine.asked(MESSAGES)[0].json
    assert len(sent["messages"][0]["content"]) + 30 <= PROBE_SIZE.prompt_tokens
    assert sent["max_tokens"] <= PROBE_SIZE.output_tokens


@pytest.mark.parametrize(
    "replies",
    [
        [whole("500 Internal Server Error", {})],
        [said(0), whole("503 Service Unavailable", {})],
        [said(0), said(None), said(0)],
        [said(0), said(0), whole("200 OK", [])],
    ],
)
async def test_a_probe_that_is_not_answered_proves_nothing(
    engine: FakeEngine, gate_to: Any, replies: list[Reply]
) -> None:
    engine.script(MESSAGES, *replies)
    llama = gate_to()
    await probe(llama)
    assert llama.profile is not None
    assert llama.reuse_is_off("anthropic_messages", llama.profile) is None


async def test_a_probe_whose_line_breaks_proves_nothing(engine: FakeEngine, gate_to: Any) -> None:
    engine.script(MESSAGES, said(0), fault.cut_whole)
    llama = gate_to()
    with pytest.raises(LineFailed):
        await probe(llama)
    assert llama.profile is not None
    assert llama.reuse_is_off("anthropic_messages", llama.profile) is None


async def test_a_new_process_is_probed_anew(engine: FakeEngine, gate_to: Any) -> None:
    """Its flags may be others, although all that it tells is the same."""
    engine.script(MESSAGES, *[said(0)] * 3)
    llama = gate_to()
    await probe(llama)
    await engine.replace()
    await until_gone(llama)
    after = await llama.discover()
    assert llama.reuse_is_off("anthropic_messages", after) is None


async def test_reuse_that_is_seen_closes_what_the_probe_let_in(engine: FakeEngine, gate_to: Any) -> None:
    engine.script(MESSAGES, *[said(0)] * 3)
    llama = gate_to()
    await probe(llama)
    found = llama.profile
    assert found is not None
    llama.reuse_seen(found)
    assert llama.reuse_is_off("anthropic_messages", found) is False
    assert llama.reuse_is_off("openai_chat", found) is True


# -- calls for tenants, and errors in other words


async def test_a_control_call_is_passed_on_as_it_is(engine: FakeEngine, gate_to: Any) -> None:
    """Status and bytes; errors are for the front to say in other words."""
    engine.script("/apply-template", raw(b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"a": 1 }'))
    llama = gate_to()
    assert await llama.control("/apply-template", b'{ "x": 1}') == (200, b'{"a": 1 }')
    assert engine.asked("/apply-template")[0].body == b'{ "x": 1}'
    engine.script("/apply-template", whole("400 Bad Request", {"error": {}}))
    assert await llama.control("/apply-template", b"{}") == (400, b'{"error":{}}')
    engine.script("/apply-template", fault.cut_whole)
    assert await reason_of(llama.control("/apply-template", b"{}")) is Reason.ENGINE_UNREACHABLE


async def test_a_call_survives_that_its_kept_connection_ends(engine: FakeEngine, gate_to: Any) -> None:
    """It runs no inference: once more, on a new connection; what fails there too is told."""
    llama = gate_to()
    await llama.control("/tokenize", b'{"content": ""}')
    for reply in (fault.close_before_head, fault.reset_before_head, fault.cut_whole):
        engine.script("/apply-template", reply, whole("200 OK", {"a": 1}))
        assert await llama.control("/apply-template", b"{}") == (200, b'{"a":1}')
    engine.script("/apply-template", fault.close_before_head, fault.close_before_head)
    assert await reason_of(llama.control("/apply-template", b"{}")) is Reason.ENGINE_UNREACHABLE
    assert engine.asked("/apply-template") == engine.asked("/apply-template")[:8]


async def test_the_engines_end_of_a_connection_fails_nothing(engine: FakeEngine, gate_to: Any) -> None:
    """llama-server has a hundred exchanges on one: a probe of three and a look of two find room for theirs."""
    llama = gate_to()
    for _ in range(fault.REQUESTS_PER_CONNECTION // 2):
        await llama.control("/apply-template", b"{}")
        await probe(llama)
        await llama.control("/apply-template", b"{}")
        assert await llama.look() is not None


async def test_props_are_told_whole(engine: FakeEngine, gate_to: Any) -> None:
    llama = gate_to()
    assert await llama.props() == engine.props()
    engine.script("/props", whole("503 Service Unavailable", {}))
    assert await reason_of(llama.props()) is Reason.ENGINE_LOADING
    engine.script("/props", fault.reset_before_head)
    assert await reason_of(llama.props()) is Reason.ENGINE_UNREACHABLE


OVERFLOW = {"type": "exceed_context_size_error", "n_prompt_tokens": 600, "n_ctx": 512, "message": SECRET}


@pytest.mark.parametrize(
    ("status", "error", "reason", "says"),
    [
        (400, OVERFLOW, Reason.PROMPT_OVERFLOW, "maximum context length is 512 tokens"),
        (500, {"message": "Context size has been exceeded."}, Reason.ENGINE_OVERFLOW, "ran out of KV cache"),
        (400, {"message": "Context size has been exceeded."}, Reason.ENGINE_OVERFLOW, "ran out of KV cache"),
        (503, {"message": "Loading model"}, Reason.ENGINE_LOADING, "loading"),
        (501, {"message": f"This server does not support embeddings. {SECRET}"}, Reason.ENGINE_CANNOT, "embeddings."),
        (501, {"message": SECRET}, Reason.ENGINE_CANNOT, "not started for it."),
        (400, {"message": f"Failed to parse grammar: {SECRET}"}, Reason.ENGINE_REFUSED, "Failed to parse grammar."),
        (400, {"message": SECRET}, Reason.ENGINE_REFUSED, "a field has a value that it does not take."),
        (404, {"message": SECRET}, Reason.ENGINE_CANNOT, "does not support"),
        (405, None, Reason.ENGINE_CANNOT, "does not support"),
        (401, {"message": f"Invalid API Key {SECRET}"}, Reason.ENGINE_FAILED, ""),
        (403, None, Reason.ENGINE_FAILED, ""),
        (500, {"message": f"Failed to parse messages: {SECRET}"}, Reason.ENGINE_REFUSED, "Failed to parse messages."),
        (500, {"message": SECRET}, Reason.ENGINE_FAILED, "ended this answer"),
        (502, SECRET, Reason.ENGINE_FAILED, ""),
        (500, None, Reason.ENGINE_FAILED, ""),
        (400, {**OVERFLOW, "n_prompt_tokens": SECRET, "n_ctx": None}, Reason.PROMPT_OVERFLOW, "0 tokens"),
    ],
)
def test_an_error_is_said_in_other_words(status: int, error: Any, reason: Reason, says: str) -> None:
    """By kind, with what is known to be safe; never a word of the prompt that the engine quotes."""
    found = explain(status, json.dumps({"error": error, "prompt": SECRET}).encode())
    assert found.reason is reason
    assert says in found.message
    assert "launch" not in repr(found)
    assert (found.retry_after_s is not None) == (reason is Reason.ENGINE_LOADING)


def test_an_overflow_that_the_engine_finds_has_its_true_figures() -> None:
    figures = dict(explain(400, json.dumps({"error": OVERFLOW}).encode()).figures)
    assert (figures["n_prompt_tokens"], figures["n_ctx"], figures["limited_by"]) == (600, 512, "engine")
    assert figures["usable_generation"] == -88


@pytest.mark.parametrize("body", [b"", b"<html>" + SECRET.encode(), b"[" * 100_000, b"[1]", b"\xff", b'"x"'])
@pytest.mark.parametrize(("status", "reason"), [(400, Reason.ENGINE_REFUSED), (500, Reason.ENGINE_FAILED)])
def test_an_error_of_any_bytes_is_said_in_other_words(status: int, body: bytes, reason: Reason) -> None:
    found = explain(status, body)
    assert found.reason is reason
    assert "launch" not in repr(found)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            "Field 'n_predict': type must be number, but is string",
            "field 'n_predict': type must be number, but is string.",
        ),
        (
            "Field 'max_tokens': Value must be between -1 <= value <= 2147483647, but got -5",
            "field 'max_tokens': Value must be between -1 <= value <= 2147483647, but got -5.",
        ),
        (f"Field 'stop': type must be array, but is {SECRET}", "a field has a value that it does not take."),
        (f"Field '{SECRET}': type must be array, but is null", "a field has a value that it does not take."),
        (f"{SECRET} Field 'a': type must be array, but is null", "a field has a value that it does not take."),
    ],
)
def test_a_field_of_another_type_is_named(message: str, says: str) -> None:
    """llama.cpp's own check quotes names, types and figures; the whole message must be of that form."""
    found = explain(400, json.dumps({"error": {"message": message}}).encode())
    assert found.message == f"The inference server refused this request: {says}"


# -- whose facts a log tells


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (["start", "a"], [True]),
        (["a", "start", "a"], [False, True]),
        (["start", "a", "b"], [True, False]),
        (["start", "a", "b", "start", "b"], [True, False, True]),
        (["start", "a", "start", "b"], [True, True]),
        (["start", "a", "b", "start", "b", "c"], [True, False, True, False]),
        (["start", "a", "start", "a"], [True, True]),
        (["start", "a", "start", "a", "b"], [True, True, True]),
        (["start", None], [False]),
        (["child", "start", None], [True]),
        (["child", "start", None, None], [True, True]),
        (["start", "a", None], [True, False]),
        ([None, "start", None], [False, False]),
    ],
    ids=str,
)
def test_a_logs_facts_are_given_out_for_the_process_whose_own_they_are(
    steps: list[str | None], told: list[bool]
) -> None:
    """A start in the log, and a connection to an instance: each start describes one process, the one that had it."""
    log = Log()
    facts, found = BoundFacts(log), []
    for step in steps:
        if step == "start":
            log.write(*STARTED)
        elif step == "child":
            log.is_childs = True
        else:
            found.append(facts.of(step) is not None)
    assert found == told


def test_facts_that_are_known_are_not_read_again() -> None:
    """A verbose log quotes clients, who could write a start of their own."""
    log = Log()
    log.write(*STARTED)
    facts = BoundFacts(log)
    before = facts.of("a")
    log.write(*UNIFIED)
    assert facts.of("a") == before
    assert before is not None
    assert before.kv_unified is False


def test_without_a_log_there_are_no_facts() -> None:
    assert BoundFacts(None).of("a") is None
