"""A llama-server command line is read as llama-server would read it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.command_line import BadCommandLine, CommandLine, read_line, read_words

REUSE_OFF = CommandLine(cache_prompt=False, prompt_cache_mib=0, idle_slots_cached=False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("llama-server -m x.gguf", CommandLine()),
        ("llama-server -c 8192 -np 6", CommandLine(context_tokens=8192, slots=6)),
        ("llama-server --ctx-size 8192 --parallel 6", CommandLine(context_tokens=8192, slots=6)),
        ("llama-server --ctx_size=8192 --parallel=-1", CommandLine(context_tokens=8192, slots=-1)),
        ("llama-server -c 1 -c 2 --ctx-size 3", CommandLine(context_tokens=3)),
        ("llama-server -ctk q8_0 --cache-type-v f16", CommandLine(kv_type_k="q8_0", kv_type_v="f16")),
        ("llama-server -kvu --kv-unified-per-slot 700", CommandLine(kv_unified=True, per_slot_tokens=700)),
        ("llama-server --kv-unified --no-kv-unified", CommandLine(kv_unified=False)),
        ("llama-server --no-cache-prompt --cache-ram 0 --no-cache-idle-slots", REUSE_OFF),
        ("llama-server --cache-prompt --cache-reuse 256", CommandLine(cache_prompt=True, cache_reuse_tokens=256)),
        ("llama-server --context-shift", CommandLine(context_shift=True)),
        ("llama-server -md d.gguf --draft-max 8", CommandLine(is_speculating=True, draft_tokens_max=8)),
        ("llama-server --spec-type none", CommandLine()),
        ("llama-server --spec-type ngram-mod", CommandLine(is_speculating=True)),
        ("llama-server --spec-default", CommandLine(is_speculating=True)),
        ("LLAMA_ARG_CTX_SIZE=4096 LLAMA_ARG_N_PARALLEL=2 llama-server", CommandLine(context_tokens=4096, slots=2)),
        ("LLAMA_ARG_CTX_SIZE=4096 llama-server -c 512", CommandLine(context_tokens=512)),
        ("llama-server -c 512 LLAMA_ARG_CTX_SIZE=4096", CommandLine(context_tokens=512)),
        ("env LLAMA_ARG_CACHE_PROMPT=off llama-server", CommandLine(cache_prompt=False)),
        ("LLAMA_ARG_NO_CONTEXT_SHIFT=1 llama-server", CommandLine(context_shift=False)),
        ("LLAMA_ARG_MODEL_DRAFT=/d.gguf llama-server", CommandLine(is_speculating=True)),
        ("LLAMA_ARG_THREADS=4 llama-server", CommandLine()),
        (
            "docker run -c 512 -e LLAMA_ARG_KV_UNIFIED=1 --env=LLAMA_ARG_CACHE_RAM=0 x llama-server -np 2",
            CommandLine(slots=2, kv_unified=True, prompt_cache_mib=0),
        ),
        ("ExecStart=/usr/local/bin/llama-server -c 2048 \\\n  -np 2", CommandLine(context_tokens=2048, slots=2)),
        ("bash -c 'llama-server -c 2048 -np 2'", CommandLine(context_tokens=2048, slots=2)),
        ("numactl -c 1 llama-server-cuda -c 2048", CommandLine(context_tokens=2048)),
        ("-c 2048 -np 2", CommandLine(context_tokens=2048, slots=2)),
        ("llama-server --chat-template '-c 9' -c 7", CommandLine(context_tokens=7)),
    ],
    ids=str,
)
def test_what_a_command_line_says(line: str, said: CommandLine) -> None:
    """Both spellings of flags, `=` forms, the last wins, variables before flags, wrappers around the program."""
    assert read_line(line) == said


@pytest.mark.parametrize(
    "line",
    [
        "llama-server -c",
        "llama-server -c many",
        "llama-server -c -4096",
        "llama-server -np 2.5",
        "LLAMA_ARG_KV_UNIFIED=maybe",
        "llama-server 'x",
    ],
)
def test_what_llama_server_would_refuse_is_refused(line: str) -> None:
    with pytest.raises(BadCommandLine):
        read_line(line)


@pytest.mark.parametrize(
    ("line", "slots", "unified", "pool", "n_ctx_slot"),
    [
        ("-c 8192 -np 6", 6, False, 8192, 1365),
        ("-c 2048", 4, True, 2048, 2048),
        ("-c 2048 -np -1", 4, True, 2048, 2048),
        ("-c 2048 --no-kv-unified", 4, False, 2048, 512),
        ("-c 2048 -np 4 -kvu --kv-unified-per-slot 700", 4, True, 2048, 700),
        ("-np 3 -kvu --kv-unified-per-slot 700", 3, True, 2100, 700),
        ("-np 2", 2, False, None, None),
        ("-c 0 -np 2", 2, False, None, None),
    ],
)
def test_what_a_command_line_starts(
    line: str, slots: int, unified: bool, pool: int | None, n_ctx_slot: int | None
) -> None:
    """As ENGINE_FACTS has it of b11434 and b11549, less what they pad, since older builds do not."""
    found = read_line(line)
    assert (found.slots_started, found.is_unified) == (slots, unified)
    assert (found.pool_tokens, found.n_ctx_slot_least) == (pool, n_ctx_slot)


@given(st.integers(1, 2**20), st.integers(1, 64))
def test_slots_of_a_divided_cache_never_hold_more_than_it(context: int, slots: int) -> None:
    found = read_words(["-c", str(context), "-np", str(slots)])
    assert found.n_ctx_slot_least is not None
    assert found.n_ctx_slot_least * slots <= context


@given(st.lists(st.text(max_size=12) | st.sampled_from(["-c", "-np", "--kv-unified", "LLAMA_ARG_CTX_SIZE=5", "7"])))
def test_words_are_read_or_refused_and_nothing_else_happens(words: list[str]) -> None:
    with contextlib.suppress(BadCommandLine):
        read_words(words)
