"""What is known of a llama-server is what it says itself, on this connection; and its counter's word is exact."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.json_object import read_object
from kvgate.core.ledger import BusySlot
from kvgate.core.profile import EngineProfile, Fact, KvSettings, Source, Topology
from kvgate.core.reason import Reason
from kvgate.core.reuse import Reuse
from kvgate.core.startup_log import StartupLog
from kvgate.engines import llamacpp as module
from kvgate.engines.llamacpp import COUNTERS, COUNTS_AT_ONCE, REUSE_FIELDS, SAFE_PROBLEMS, LlamaCpp, LlamaCppSettings
from kvgate.ports import LineFailed, Refused
from tests import fake_engine as fault
from tests.fake_engine import CHAT, COUNTER, FakeEngine, raw, whole
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
        opened.append(LlamaCpp(engine.url, settings, ManualClock(), **options))
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
    assert (await llama.count("openai_chat", chat())).prompt_tokens == 31


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
    llama = gate_to()
    await llama.discover()
    engine.script("/health", fault.stall)
    assert await reason_of(llama.discover()) is Reason.ENGINE_UNREACHABLE
    engine.script("/slots", fault.stall)
    with pytest.raises(LineFailed, match="no answer to GET /slots"):
        await llama.look()
    await until_gone(llama)


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
    counted = await gate_to().count("openai_chat", sent)
    assert counted.prompt_tokens == 33
    assert counted.profile.n_ctx_slot.value == 512
    (request,) = engine.asked(COUNTER)
    assert (request.body, request.headers["content-type"]) == (sent, "application/json")
    assert COUNTERS == {"openai_chat": COUNTER}


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
    problem = (await refusal_of(gate_to().count("openai_chat", chat(SECRET)))).refusal
    assert problem.reason is Reason.UNCOUNTED
    assert SECRET not in problem.message
    assert "launch" not in problem.message


@pytest.mark.parametrize("phrase", SAFE_PROBLEMS)
async def test_what_can_be_said_safely_is_said(engine: FakeEngine, gate_to: Any, phrase: str) -> None:
    engine.script(COUNTER, whole("500 Internal Server Error", _error(f"{phrase} - {SECRET}")))
    problem = (await refusal_of(gate_to().count("openai_chat", chat()))).refusal
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
    problem = (await refusal_of(gate_to().count("openai_chat", chat()))).refusal
    assert (problem.reason, problem.reason.status) == (reason, 503)
    assert problem.retry_after_s is not None


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
    counts = [asyncio.create_task(llama.count("openai_chat", chat())) for _ in range(20)]
    await until(lambda: busy == COUNTS_AT_ONCE)
    await asyncio.sleep(0.05)
    go.set()
    assert {counted.prompt_tokens for counted in await asyncio.gather(*counts)} == {31}
    assert most == COUNTS_AT_ONCE


async def test_a_cancelled_count_gives_its_place_and_connection_back(engine: FakeEngine, gate_to: Any) -> None:
    llama = gate_to()
    engine.script(COUNTER, *[fault.stall] * COUNTS_AT_ONCE)
    counts = [asyncio.create_task(llama.count("openai_chat", chat())) for _ in range(COUNTS_AT_ONCE)]
    await until(lambda: len(engine.asked(COUNTER)) == COUNTS_AT_ONCE)
    for count in counts:
        count.cancel()
    await asyncio.gather(*counts, return_exceptions=True)
    await until_gone(llama)
    assert (await llama.count("openai_chat", chat())).prompt_tokens == 31


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
    for doing in (llama.open(), llama.count("openai_chat", chat())):
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
    assert await reason_of(llama.count("openai_chat", chat())) is Reason.ENGINE_UNDERSIZED
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
    await llama.count("openai_chat", chat())
    line = await llama.open()
    await line.send("POST", CHAT, {}, chat())
    line.release()
    assert {request.headers["authorization"] for request in engine.requests} == {"Bearer sk-engine"}
