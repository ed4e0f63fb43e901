"""A llama-server double on a real socket: the real one's shapes on the wire, and faults where a script asks for one.

Measured on llama.cpp b11549. `tests/e2e/test_fake_engine.py` runs the same assertions on this and on the real engine.
"""

from __future__ import annotations

from tests.fake_engine.engine import WORDS, FakeEngine
from tests.fake_engine.families import (
    CHAT,
    COMPLETION,
    COMPLETIONS,
    COUNTER,
    EMBEDDINGS,
    FAMILIES,
    MESSAGES,
    MESSAGES_COUNTER,
    OVERFLOWN,
    RESPONSES,
    RESPONSES_COUNTER,
    TOKENIZE,
)
from tests.fake_engine.faults import (
    DELTA,
    close_before_head,
    connection_close,
    cut_in_chunk,
    cut_whole,
    end_without_done,
    error_event,
    flood,
    huge_head,
    informational,
    not_http,
    raw,
    reset_after_head,
    reset_before_head,
    stall,
    stall_in_stream,
    until_close,
    whole,
)
from tests.fake_engine.usual import usual
from tests.fake_engine.wire import REQUESTS_PER_CONNECTION, Exchange, Recorded, Reply

__all__ = [
    "CHAT",
    "COMPLETION",
    "COMPLETIONS",
    "COUNTER",
    "DELTA",
    "EMBEDDINGS",
    "FAMILIES",
    "MESSAGES",
    "MESSAGES_COUNTER",
    "OVERFLOWN",
    "REQUESTS_PER_CONNECTION",
    "RESPONSES",
    "RESPONSES_COUNTER",
    "TOKENIZE",
    "WORDS",
    "Exchange",
    "FakeEngine",
    "Recorded",
    "Reply",
    "close_before_head",
    "connection_close",
    "cut_in_chunk",
    "cut_whole",
    "end_without_done",
    "error_event",
    "flood",
    "huge_head",
    "informational",
    "not_http",
    "raw",
    "reset_after_head",
    "reset_before_head",
    "stall",
    "stall_in_stream",
    "until_close",
    "usual",
    "whole",
]
