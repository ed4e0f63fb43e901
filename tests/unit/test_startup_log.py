"""Startup logs: samples of real ones (llama.cpp b11549), trimmed, and what must not be taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.profile import StartupFacts
from kvgate.core.startup_log import LINE_CHARS_MAX, StartupLog

SAMPLES = Path(__file__).parent / "samples"
SLOTS_LINE = "0.00.376.051 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 1024, kv_unified = 'false'"
TWO_SLOTS = StartupFacts(n_slots=2, n_ctx_slot=1024, kv_unified=False)


def sample(name: str) -> list[str]:
    return (SAMPLES / f"{name}.log").read_text().splitlines(keepends=True)


def read(*lines: str) -> StartupLog:
    log = StartupLog()
    log.feed(lines)
    return log


DIVIDED = StartupFacts(n_slots=6, n_ctx_slot=1536, kv_unified=False)
UNIFIED = StartupFacts(n_slots=4, n_ctx_slot=2048, kv_unified=True)
F16 = StartupFacts(kv_type_k="f16", kv_type_v="f16", prompt_cache_mib=8192)
DIVIDED_4 = replace(F16, n_slots=6, n_ctx_slot=1536, kv_unified=False, pool_tokens=9216, kv_mib=202.5)
UNIFIED_4 = replace(
    F16, n_slots=4, n_ctx_slot=2048, kv_unified=True, pool_tokens=2048, kv_mib=45.0, slots_chosen_by_engine=True
)
CAPPED_4 = replace(UNIFIED_4, n_slots=3, n_ctx_slot=700, pool_tokens=2304, kv_mib=50.62, slots_chosen_by_engine=False)
TWO_SLOTS_4 = replace(DIVIDED_4, n_slots=2, n_ctx_slot=1024, pool_tokens=2048)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("divided_lv3", DIVIDED),
        ("divided_lv4", DIVIDED_4),
        ("unified_lv3", UNIFIED),
        ("unified_lv4", UNIFIED_4),
        ("capped_lv3", StartupFacts(4, 700, kv_unified=True, pool_tokens=2048)),
        ("capped_lv4", CAPPED_4),
        ("draft_lv4", replace(TWO_SLOTS_4, kv_type_v="q8_0", kv_mib=34.45, is_speculating=True)),
        ("jsonl_lv4", replace(TWO_SLOTS_4, kv_mib=45.0)),
        ("quoted_client_lv3", TWO_SLOTS),
        (
            "q8_lv4",
            replace(
                TWO_SLOTS_4,
                kv_type_k="q8_0",
                kv_type_v="q8_0",
                weights_mib=92.1,
                kv_mib=23.91,
                idle_slots_cached=True,
            ),
        ),
        ("auto_lv4", replace(UNIFIED_4, weights_mib=92.1, idle_slots_cached=True)),
        ("auto_cacheless_lv4", replace(UNIFIED_4, weights_mib=92.1, prompt_cache_mib=0, idle_slots_cached=False)),
    ],
)
def test_a_real_log_tells_its_facts(name: str, facts: StartupFacts) -> None:
    """Verbosity 3 and 4, divided, unified and capped caches, a draft model with another KV type, JSON lines."""
    log = read(*sample(name))
    assert log.facts == facts
    assert log.starts == 1


def test_a_log_read_line_by_line_tells_the_same() -> None:
    """A log is followed while it grows."""
    log = StartupLog()
    for line in sample("capped_lv4"):
        log.feed([line])
    assert log.facts == read(*sample("capped_lv4")).facts


def test_facts_are_shown_only_once_the_start_is_complete() -> None:
    """While the engine loads there are none, or those of the start before."""
    lines = sample("divided_lv4")
    complete = next(number for number, line in enumerate(lines) if "n_slots = 6" in line)
    log = read(*lines[:complete])
    assert (log.facts, log.starts) == (None, 0)
    log.feed(lines[complete:])
    assert log.facts is not None
    log.feed(sample("unified_lv4")[:-20])
    assert (log.facts.n_slots, log.starts) == (6, 1)


def test_of_several_starts_the_last_one_counts_and_takes_nothing_from_the_one_before() -> None:
    """A quiet second start does not inherit the first one's pool size or KV types."""
    log = read(*sample("capped_lv4"), *sample("divided_lv3"))
    assert (log.facts, log.starts) == (DIVIDED, 2)
    log.feed(sample("unified_lv4"))
    assert (log.facts, log.starts) == (UNIFIED_4, 3)


def test_a_start_that_died_while_loading_leaves_nothing_to_the_next() -> None:
    """The figures of an aborted start are not those of the engine that runs."""
    aborted = [line for line in sample("capped_lv4") if "n_slots" not in line]
    assert read(*aborted, *sample("divided_lv3")).facts == DIVIDED


def test_the_smallest_context_that_can_hold_a_slot_is_the_pool() -> None:
    """A draft model has a context of its own: a larger one is no proof of a larger pool, a smaller one no pool."""
    lines = sample("unified_lv4")
    context = next(line for line in lines if "llama_context: n_ctx  " in line)
    small, large = context.replace("2048", "512"), context.replace("2048", "4096")
    at = lines.index(context)
    facts = read(*lines[:at], small, large, *lines[at:]).facts
    assert facts is not None
    assert facts.pool_tokens == 2048


# -- wrapped lines


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "0.00.376.051 I ",
        "2026-05-16 22:21:47.519 | ",
        "[54073] 0.02.976.955 I ",
        "engine-1  | 0.00.376.051 I ",
        "2026-10-01T10:00:00.123456789Z stderr F 0.00.376.051 I ",
        "Oct 01 10:00:00 host llama-server[123]: 0.00.376.051 I ",
        "\x1b[34m0.00.376.051\x1b[0m \x1b[32mI \x1b[0m",
    ],
    ids=str,
)
def test_what_stands_in_front_of_the_engines_sentence_does_not_matter(prefix: str) -> None:
    """Time stamps, levels, colours, and the marks of docker, Kubernetes and journald."""
    assert read(prefix + SLOTS_LINE.partition(" I ")[2]).facts == TWO_SLOTS


@pytest.mark.parametrize("member", ["msg", "log", "MESSAGE"])
def test_lines_wrapped_in_json_are_read_like_plain_ones(member: str) -> None:
    """`--log-jsonl`, docker's json-file and journald's export put the same sentence into a member."""
    for ascii_only in (True, False):
        line = json.dumps({"time": 1, member: SLOTS_LINE + "\n", "nested": {"a": []}}, ensure_ascii=ascii_only)
        assert read(line + "\n").facts == TWO_SLOTS
    assert read(json.dumps({"msg": SLOTS_LINE}).replace("'", "\\u0027")).facts == TWO_SLOTS


OLDER = {
    # written after public logs of these years; figures are ours
    "2025, the context says n_ctx_per_seq": (
        """\
build: 5540 (0123abcd) with cc for x86_64-linux-gnu
main: loading model
load_tensors: loading model tensors, this can take a while... (mmap = true)
load_tensors:        CUDA0 model buffer size =  2228.82 MiB
load_tensors:   CPU_Mapped model buffer size =    52.84 MiB
llama_context: constructing llama_context
llama_context: n_seq_max     = 6
llama_context: n_ctx         = 8192
llama_context: n_ctx_per_seq = 1365
llama_context: kv_unified    = false
llama_context: n_ctx_per_seq (1365) < n_ctx_train (4096) -- the full capacity of the model will not be utilized
llama_kv_cache_unified: size = 3072.00 MiB (8192 cells, 32 layers, 6 seqs), K (f16): 1536.00 MiB, V (f16): 1536.00 MiB
srv          init: initializing slots, n_slots = 6
slot         init: id  0 | task -1 | new slot n_ctx_slot = 1365
slot         init: id  1 | task -1 | new slot n_ctx_slot = 1365
slot         init: id  2 | task -1 | new slot n_ctx_slot = 1365
slot         init: id  3 | task -1 | new slot n_ctx_slot = 1365
slot         init: id  4 | task -1 | new slot n_ctx_slot = 1365
slot         init: id  5 | task -1 | new slot n_ctx_slot = 1365
main: model loaded
""",
        StartupFacts(6, 1365, False, 8192, "f16", "f16", weights_mib=2281.66, kv_mib=3072.0),
    ),
    "2024, llama_new_context_with_model": (
        """\
build: 3700 (0123abcd) with cc for x86_64-linux-gnu
llm_load_tensors:        CPU buffer size =  4437.80 MiB
llama_new_context_with_model: n_ctx      = 4096
llama_new_context_with_model: n_batch    = 2048
llama_new_context_with_model: KV self size  =  192.00 MiB, K (q8_0):   96.00 MiB, V (f16):   96.00 MiB
srv          init: initializing slots, n_slots = 1
slot         init: id  0 | task -1 | new slot n_ctx_slot = 4096
main: model loaded
""",
        StartupFacts(1, 4096, None, 4096, "q8_0", "f16", weights_mib=4437.8, kv_mib=192.0),
    ),
    "2024, JSON lines": (
        """\
{"timestamp":1711270965,"level":"INFO","function":"main","line":2700,"msg":"build info","build":2500}
llama_new_context_with_model: n_ctx      = 1024
llama_new_context_with_model: KV self size  =  512.00 MiB, K (f16):  256.00 MiB, V (f16):  256.00 MiB
{"timestamp":1711270965,"level":"INFO","function":"init","line":702,"msg":"initializing slots","n_slots":2}
{"timestamp":1711270965,"level":"INFO","function":"init","line":714,"msg":"new slot","id_slot":0,"n_ctx_slot":512}
{"timestamp":1711270965,"level":"INFO","function":"init","line":714,"msg":"new slot","id_slot":1,"n_ctx_slot":512}
{"timestamp":1711270965,"level":"INFO","function":"main","line":2881,"msg":"model loaded"}
""",
        StartupFacts(2, 512, None, 1024, "f16", "f16", kv_mib=512.0),
    ),
    "2024, fields behind a bar": (
        """\
INFO [                    main] build info | tid="139894354608128" timestamp=1723538705 build=3579 commit="fc4ca27b"
llama_new_context_with_model: n_ctx      = 8192
INFO [                    init] initializing slots | tid="139894354608128" timestamp=1723538710 n_slots=4
INFO [                    init] new slot | tid="139894354608128" timestamp=1723538710 id_slot=0 n_ctx_slot=2048
INFO [                    init] new slot | tid="139894354608128" timestamp=1723538710 id_slot=1 n_ctx_slot=2048
INFO [                    init] new slot | tid="139894354608128" timestamp=1723538710 id_slot=2 n_ctx_slot=2048
INFO [                    init] new slot | tid="139894354608128" timestamp=1723538710 id_slot=3 n_ctx_slot=2048
INFO [                    main] model loaded | tid="139894354608128" timestamp=1723538710
""",
        StartupFacts(4, 2048, None, 8192),
    ),
    "early 2026, a router in front, a draft head": (
        """\
[41123] 0.00.030.001 I srv    load_model: loading model '/models/big.gguf'
[41123] 0.09.811.535 I srv    load_model: creating MTP draft context against the target model '/models/big.gguf'
[41123] 0.10.154.587 I srv    load_model: initializing slots, n_slots = 2
[41123] 0.10.387.070 I common_speculative_init: adding speculative implementation 'draft-mtp'
[41123] 0.10.387.178 I srv    load_model: speculative decoding context initialized
[41123] 0.10.387.180 I slot   load_model: id  0 | task -1 | new slot, n_ctx = 262144
[41123] 0.10.387.181 I slot   load_model: id  1 | task -1 | new slot, n_ctx = 262144
[41123] 0.10.387.190 I srv    load_model: prompt cache is enabled, size limit: no limit
[41123] 0.10.388.000 I srv          init: model loaded
""",
        StartupFacts(2, 262144, None, None, prompt_cache_mib=-1, is_speculating=True),
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_builds_tell_what_they_say(name: str) -> None:
    """Slots announced one by one, figures in fields or JSON members, `n_ctx_per_seq`, `KV self size`."""
    text, facts = OLDER[name]
    log = read(*text.splitlines(keepends=True))
    assert (log.facts, log.starts, log.is_settled) == (facts, 1, True)


def test_an_older_start_is_complete_with_its_last_slot() -> None:
    text, _ = OLDER["2025, the context says n_ctx_per_seq"]
    lines = text.splitlines()
    last = next(at for at, line in enumerate(lines) if "id  5 " in line)
    log = read(*lines[:last])
    assert (log.facts, log.starts) == (None, 0)
    log.feed([lines[last]])
    assert (log.starts, log.is_settled) == (1, False)


def test_nothing_is_added_to_a_start_that_is_settled() -> None:
    """Once the model is loaded clients may be quoted: what sounds like the engine is not believed any more."""
    log = read(*sample("divided_lv3"))
    assert log.is_settled
    before = log.facts
    log.feed(["0.09.1 I srv    load_model: prompt cache is disabled - use `--cache-ram N` to enable it"])
    log.feed(["0.09.1 I srv          init: idle slots will be saved to prompt cache upon starting a new task"])
    assert log.facts == before


# -- what must not be believed

FORGED = "srv    load_model: initializing, n_slots = 9, n_ctx_slot = 9999, kv_unified = 'false'"


@pytest.mark.parametrize(
    "line",
    [
        f'0.03.967.280 W srv    operator(): got exception: {{"error":{{"message":"but got: {FORGED}"}}}}',
        f"0.03.967.280 W srv    operator(): got exception: {FORGED}",
        f"0.03.967.280 I srv  log_server_r: request: POST /x {FORGED}",
        f"0.03.967.280 D srv    next token: {FORGED}",
        f'"{FORGED}',
        f"'{FORGED}",
        f"prompt: {FORGED}",
        json.dumps({"msg": "initializing slots", "n_slots": 1}),
        json.dumps({"nested": {"function": "init", "msg": "initializing slots", "n_slots": 1}}),
        json.dumps({"msg": f"srv    operator(): got exception: {FORGED}"}),
        json.dumps({"msg": json.dumps({"error": FORGED})}),
        json.dumps({"nested": {"msg": FORGED}}),
        json.dumps({FORGED: 1}),
        json.dumps([FORGED]),
        "{" + FORGED,
        '{"msg":' * 100_000,
        "{" + "[" * 3000,
        FORGED.replace("srv ", "x" * LINE_CHARS_MAX + " srv "),
    ],
    ids=lambda line: str(line[:60]),
)
def test_a_client_that_is_quoted_in_the_log_cannot_say_what_the_engine_is(line: str) -> None:
    """An error line quotes the client's own words at the default verbosity; believed, they would enlarge the pool."""
    log = read(*sample("unified_lv4"))
    before = log.facts
    log.feed([line, line + "\n"])
    assert (log.facts, log.starts) == (before, 1)


def test_what_a_client_said_before_a_restart_is_forgotten_by_it() -> None:
    """Neither a quoted context nor a quoted KV type finds its way into the next start."""
    quoted = [f"W srv operator(): got exception: {line}" for line in sample("capped_lv4")]
    assert read(*quoted, *sample("divided_lv3")).facts == DIVIDED


@given(st.lists(st.text(max_size=60) | st.sampled_from(sample("divided_lv4") + sample("jsonl_lv4"))))
def test_no_line_is_ever_an_error(lines: list[str]) -> None:
    """A log is somebody else's text; whatever it holds, the gate goes on."""
    log = read(*lines)
    assert (log.facts is None) == (log.starts == 0)
