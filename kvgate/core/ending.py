"""Why an answer ended, in one set of words for all engines and APIs; and whether the context ended it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvgate.core.admission import Room

LENGTH: Final = "length"

_WORDS: Final = {
    "length": LENGTH,
    "limit": LENGTH,
    "max_tokens": LENGTH,
    "max_output_tokens": LENGTH,
    "stop": "stop",
    "eos": "stop",
    "word": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}

FINISHES: Final = frozenset(_WORDS.values()) | {"other"}
"""What `finish_of` says, beside nothing at all."""


def finish_of(word: object) -> str:
    """An API's word for why an answer ended, as one of `FINISHES`; empty where it says nothing."""
    if not isinstance(word, str) or word in {"", "none"}:
        return ""
    return _WORDS.get(word, "other")


def of_several(first: str, second: str) -> str:
    """What to say of two answers to one request: that one was cut short matters most."""
    return LENGTH if LENGTH in {first, second} else first or second


def ended_by_context(
    finish: str, output_tokens: int | None, limit_tokens: int, asked_tokens: int | None, room: Room
) -> str:
    """Which bound of the context cut the answer short, in the words of `Room.limited_by`; empty where none did.

    1. It must have ended for its length. Some APIs do not tell (llama.cpp's responses); there the figures do.
    2. Fewer tokens than the engine was told to stop at: its slot was full.
    3. Just as many: then whoever set that limit ended it, and that was the context where the client asked for more,
       or for no limit at all, and the room beside its prompt became the limit.

    Args:
        finish: one of `FINISHES`, or empty.
        output_tokens: of one answer, None where that is not known, as of several together.
        limit_tokens: what the engine was told to stop at.
        asked_tokens: what the client asked for, None where it named no limit.
        room: what fitted beside the prompt.
    """
    is_short = output_tokens is not None and output_tokens < limit_tokens
    if finish != LENGTH and (finish or output_tokens is None or is_short):  # 1
        return ""
    if is_short:  # 2
        return "slot"
    is_clamped = asked_tokens is None or asked_tokens > limit_tokens  # 3
    return room.limited_by if is_clamped and limit_tokens >= room.usable_generation else ""
