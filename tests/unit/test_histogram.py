"""Percentiles and shares against their definitions, and lengths as a log tells them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.engine_requests import EngineRequests, KvCost
from kvgate.core.histogram import MARKS, Length, histogram
from kvgate.core.pool import KvPool
from kvgate.core.profile import MIB
from kvgate.core.replay import Asked

LENGTHS = st.lists(st.builds(Length, st.integers(0, 200_000), st.integers(0, 200_000)))


@given(LENGTHS, st.lists(st.integers(1, 300_000), max_size=3))
def test_shares_and_bars_count_each_request_where_it_belongs(lengths: list[Length], marks: list[int]) -> None:
    found = histogram(lengths, marks)
    assert found.requests == len(lengths) == sum(bar.requests for bar in found.bars)
    assert [share.tokens for share in found.shares] == sorted({*MARKS, *marks})
    for share in found.shares:
        assert share.prompts == sum(length.prompt_tokens <= share.tokens for length in lengths)
        assert share.totals == sum(length.total_tokens <= share.tokens for length in lengths)
    for bar in found.bars:
        least = bar.above or -1
        assert bar.requests == sum(least < length.total_tokens <= bar.up_to for length in lengths)


@given(LENGTHS.filter(len))
def test_a_percentile_is_a_length_that_so_many_do_not_exceed(lengths: list[Length]) -> None:
    """The least of them, by nearest rank; so the last one is the longest."""
    found = histogram(lengths)
    for percentiles, values in (
        (found.prompts, [length.prompt_tokens for length in lengths]),
        (found.totals, [length.total_tokens for length in lengths]),
    ):
        for percent, tokens in percentiles:
            assert tokens in values
            assert 100 * sum(value <= tokens for value in values) >= percent * len(values)
            assert 100 * sum(value < tokens for value in values) < percent * len(values)
        assert percentiles[-1] == (100, max(values))


@given(LENGTHS, LENGTHS)
def test_a_larger_context_fits_no_less(one: list[Length], other: list[Length]) -> None:
    totals = [share.totals for share in histogram(one + other).shares]
    assert totals == sorted(totals)


def test_of_no_request_there_is_nothing_to_tell() -> None:
    found = histogram([])
    assert (found.requests, found.prompts, found.bars) == (0, (), ())


@pytest.mark.parametrize(("output", "total"), [(None, 101), (0, 100), (50, 150)])
def test_a_request_without_a_limit_needs_its_prompt_and_one_token(output: int | None, total: int) -> None:
    assert Length.of(Asked(output, 2, (100, 7), 2, KvPool(1, 1, 1))).total_tokens == total


# -- an engine's log

START = """\
0.00.272.942 I print_info: n_ctx_train           = 8192
0.00.279.000 I llama_context: constructing llama_context
0.00.306.475 I llama_kv_cache: size =   45.00 MiB (  1024 cells,  30 layers,  2/2 seqs), K (f16):   22.50 MiB
0.00.347.275 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 1024, kv_unified = 'false'
"""

REQUEST = """\
0.00.675.161 I slot print_timing: id  1 | task 5 | prompt eval time =      10.44 ms /     1 tokens
0.00.675.206 I slot print_timing: id  1 | task 5 |        eval time =      32.61 ms /     4 tokens
0.00.675.221 I slot print_timing: id  1 | task 5 |       total time =     249.47 ms /    37 tokens
0.00.675.283 I slot      release: id  1 | task 5 | stop processing: n_tokens = 36, truncated = 0
"""

OLDER = """\
slot print_timing: id  1 | task 5 | \n\
prompt eval time =      10.44 ms /     1 tokens
       eval time =      32.61 ms /     4 tokens
      total time =     249.47 ms /    37 tokens
slot      release: id  1 | task 5 | stop processing: n_past = 36, truncated = 0
"""


def read(text: str) -> EngineRequests:
    found = EngineRequests()
    found.feed(text.splitlines())
    return found


def jsonl(text: str) -> str:
    return "".join(json.dumps({"level": "info", "msg": line}) + "\n" for line in text.splitlines())


@pytest.mark.parametrize("text", [REQUEST, OLDER, jsonl(REQUEST), REQUEST.replace("0.00.", "docker | 0.00.")])
def test_a_request_in_a_log_has_its_whole_prompt_also_where_most_was_cached(text: str) -> None:
    """One token was evaluated, 32 came from the cache; the last token put out is not in the slot."""
    assert read(START + text + text).lengths == [Length(33, 4)] * 2


def test_a_request_without_output_and_one_that_was_cut() -> None:
    """An embedding; a slot let go before it put out a token."""
    line = "0.00.1 I slot      release: id  0 | task 9 | stop processing: n_tokens = 7, truncated = 0"
    assert read(line).lengths == [Length(7, 0)]


def test_a_log_tells_what_a_token_costs() -> None:
    """45 MiB for twice 1024 cells; the latest start counts, and a prompt that quotes a log does not."""
    found = read(START)
    assert found.cost == KvCost(45 * MIB / 2048, 2048)
    assert (found.n_ctx_train, found.n_ctx_slot) == (8192, 1024)
    assert found.cost.bytes_total == 45 * MIB
    assert read(START + START.replace("45.00", "90.00")).cost == KvCost(90 * MIB / 2048, 2048)
    assert read(f"got exception: {json.dumps({'prompt': START})}").cost is None


def test_layers_with_a_window_count_for_every_token() -> None:
    """So that no plan takes too much: such a cache grows less than that."""
    kv = "llama_kv_cache_iswa: size =   10.00 MiB (   512 cells,   5 layers,  1/1 seqs), K (f16):    5.00 MiB\n"
    found = read("llama_context: constructing llama_context\n" + kv + kv.replace("512", "2048"))
    assert found.cost == KvCost(10 * MIB / 512 + 10 * MIB / 2048, 2048)


@given(st.text())
def test_any_log_is_read_without_a_fault(text: str) -> None:
    read(text)
