"""Takes the figures out of an answer that tell what of a prompt was already in the cache."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from kvgate.core.sse import EventSplitter, event_data
from kvgate.wire.answers import parsed

_TOLD: Final = re.compile(
    rb'("cache(?<!\\"cache)(?:_n|d_tokens|_read_input_tokens|)"\s*:\s*)(?:[1-9][0-9]*|0\.[0-9]+)'
)
"""A figure that is not 0; within a text its quotes would be escaped."""


def masked(body: bytes) -> bytes:
    """An answer, or an event's data, as if nothing had been reused; itself, byte for byte, where it shows nothing.

    Cached tokens are an oracle about neighbours. What they were left out of gets them back, so that prompt and input
    are the whole prompt: `prompt_n` of llama.cpp's timings, Anthropic's `input_tokens`. It is written as tightly as
    llama.cpp writes, so that its spaces do not tell that something was taken out.
    """
    if _TOLD.search(body) is None:
        return body
    if (found := parsed(body)) is None:
        return _TOLD.sub(rb"\g<1>0", body)
    return json.dumps(_masked(found), ensure_ascii=False, separators=(",", ":")).encode()


def masked_event(events: bytes) -> bytes:
    """The same for whole events of a stream, whose other lines stay."""
    if _TOLD.search(events) is None:
        return events
    splitter = EventSplitter()
    return b"".join([*map(_masked_event, splitter.feed(events)), _TOLD.sub(rb"\g<1>0", splitter.rest)])


def _masked_event(event: bytes) -> bytes:
    data = event_data(event)
    if data is None or (clean := masked(data)) == data:
        return event
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*lines, b"data: " + clean]) + b"\n\n"


def _masked(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked(one) for one in value]
    if not isinstance(value, dict):
        return value
    clean = {name: _masked(one) for name, one in value.items()}
    if "cached_tokens" in clean:
        clean["cached_tokens"] = 0
    if _figure(clean, "cache_read_input_tokens"):
        clean["input_tokens"] = _figure(clean, "input_tokens") + _figure(clean, "cache_read_input_tokens")
        clean["cache_read_input_tokens"] = 0
    if _figure(clean, "cache_n"):
        _mask_timings(clean)
    if isinstance(progress := clean.get("prompt_progress"), dict) and _figure(progress, "cache"):
        _mask_progress(progress)
    return clean


def _mask_timings(timings: dict[str, Any]) -> None:
    """The prompt's time stays: it can be measured from outside anyway. Its rates are of the whole prompt."""
    prompt_n = timings["prompt_n"] = _figure(timings, "prompt_n") + _figure(timings, "cache_n")
    timings["cache_n"] = 0
    ms = timings.get("prompt_ms")
    if isinstance(ms, int | float) and prompt_n and ms > 0:
        rates = {"prompt_per_token_ms": ms / prompt_n, "prompt_per_second": 1000 * prompt_n / ms}
        timings |= {name: rate for name, rate in rates.items() if name in timings}


def _mask_progress(progress: dict[str, Any]) -> None:
    """llama.cpp counts from what it reused on, in steps that would tell it: shown are none of it and all."""
    progress["cache"] = 0
    if "processed" in progress:
        is_done = _figure(progress, "processed") >= (total := _figure(progress, "total"))
        progress["processed"] = total if is_done else 0


def _figure(members: dict[str, Any], name: str) -> int:
    value = members.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
