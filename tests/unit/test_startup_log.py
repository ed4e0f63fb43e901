"""Startup logs: samples of real ones (llama.cpp b11549), trimmed, and what must not be taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.profile import UNLIMITED, StartupFacts
from kvgate.core.startup_log import LATE_LINES_MAX, LINE_CHARS_MAX, StartupLog

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


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("divided_lv3", DIVIDED),
        ("divided_lv4", replace(DIVIDED, pool_tokens=9216, kv_type_k="f16", kv_type_v="f16", cache_ram_mib=8192)),
        ("unified_lv3", UNIFIED),
        ("unified_lv4", replace(UNIFIED, pool_tokens=2048, kv_type_k="f16", kv_type_v="f16", cache_ram_mib=8192)),
        ("capped_lv3", StartupFacts(4, 700, kv_unified=True, pool_tokens=2048)),
        (
            "capped_lv4",
            StartupFacts(
                3, 700, kv_unified=True, pool_tokens=2304, kv_type_k="f16", kv_type_v="f16", cache_ram_mib=8192
            ),
        ),
        ("draft_lv4", replace(TWO_SLOTS, pool_tokens=2048, kv_type_k="f16", kv_type_v="q8_0", cache_ram_mib=8192)),
        ("jsonl_lv4", replace(TWO_SLOTS, pool_tokens=2048, kv_type_k="f16", kv_type_v="f16", cache_ram_mib=8192)),
        ("quoted_client_lv3", TWO_SLOTS),
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
    assert (log.facts, log.starts) == (
        replace(UNIFIED, pool_tokens=2048, kv_type_k="f16", kv_type_v="f16", cache_ram_mib=8192),
        3,
    )


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


def test_older_builds_that_never_say_the_sentence_tell_nothing() -> None:
    """They speak of `n_ctx_per_seq` and `new slot` only; then the profile's safe guess stands."""
    log = read(
        "main: loading model",
        "llama_context: n_seq_max     = 6",
        "llama_context: n_ctx         = 8192",
        "llama_context: n_ctx_per_seq = 1365",
        "llama_context: kv_unified    = false",
        "srv    load_model: initializing slots, n_slots = 6",
        "slot   load_model: id  0 | task -1 | new slot, n_ctx = 1365",
    )
    assert (log.facts, log.starts) == (None, 0)


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


RAM_CACHE = "0.00.436.713 I srv    load_model: prompt cache is enabled, size limit: 8192 MiB"
IDLE = "0.00.436.774 I srv          init: idle slots will be saved to prompt cache upon starting a new task"
NO_RAM_CACHE = "0.00.852.366 I srv    load_model: prompt cache is disabled - use `--cache-ram N` to enable it"
LOADED = "0.00.438.660 I srv          init: model loaded"


@pytest.mark.parametrize(
    ("lines", "mib", "idle"),
    [
        ([RAM_CACHE, IDLE], 8192, True),
        ([RAM_CACHE], 8192, None),
        ([RAM_CACHE.replace("8192 MiB", "no limit")], UNLIMITED, None),
        ([NO_RAM_CACHE, IDLE], 0, False),
        ([IDLE], None, None),
        ([], None, None),
        ([LOADED, RAM_CACHE], None, None),
        (["a line"] * LATE_LINES_MAX + [RAM_CACHE], None, None),
        ([f"W srv operator(): got exception: {RAM_CACHE}"], None, None),
    ],
)
def test_the_ram_prompt_cache_is_told_behind_the_slots(lines: list[str], mib: int | None, idle: bool | None) -> None:
    """Until the model is loaded and no later, since clients are served then."""
    log = read(SLOTS_LINE, *lines, LOADED)
    assert log.facts == replace(TWO_SLOTS, cache_ram_mib=mib, cache_idle_slots=idle)
    assert log.is_settled


def test_a_start_settles_when_the_model_is_loaded() -> None:
    """Until then it may say more."""
    assert [read(*lines).is_settled for lines in ([], [SLOTS_LINE], [SLOTS_LINE, RAM_CACHE])] == [False] * 3


@given(st.lists(st.text(max_size=60) | st.sampled_from(sample("divided_lv4") + sample("jsonl_lv4"))))
def test_no_line_is_ever_an_error(lines: list[str]) -> None:
    """A log is somebody else's text; whatever it holds, the gate goes on."""
    log = read(*lines)
    assert (log.facts is None) == (log.starts == 0)
