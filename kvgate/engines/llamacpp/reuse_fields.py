"""Every field and header that asks for, pins or keys prefix reuse, and what a request carries instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.core.json_object import Edit
from kvgate.core.json_prune import EACH, Pruner
from kvgate.core.reuse import Reuse

if TYPE_CHECKING:
    from kvgate.core.json_object import JsonObject

SWITCHLESS: Final = frozenset({"anthropic_messages"})
"""Dialects whose requests llama.cpp strips of `cache_prompt` (142 of 143 tokens were reused with false)."""


@dataclass(frozen=True, slots=True)
class ReuseField:
    """One row of the table.

    Args:
        name: the member's name.
        does: what it does where it is read, and by whom.
        inside: where it stands below the top; a field without is a member of the body itself, on every API.
    """

    name: str
    does: str
    inside: tuple[tuple[str, ...], ...] = ()


_BLOCKS: Final = ("content", EACH)

FIELDS: Final = (
    ReuseField("cache_prompt", "llama.cpp: reads the prefix that the slot holds; kvgate sets it, on or off."),
    ReuseField(
        "n_cache_reuse",
        "llama.cpp: shifts later pieces together too, though they were computed behind another text; kvgate sets 0.",
    ),
    ReuseField("id_slot", "llama.cpp: pins a slot, and with it a neighbour's KV."),
    ReuseField("slot_id", "llama.cpp, older builds: the same."),
    ReuseField("prompt_cache_key", "OpenAI: keys the cache, routes to the machine that has it."),
    ReuseField("prompt_cache_retention", "OpenAI: how long a prefix is kept."),
    ReuseField(
        "cache_salt", "vLLM, SGLang: who shares a cache; chosen by a client it defeats isolation (vLLM 53347)."
    ),
    ReuseField("kv_transfer_params", "vLLM: names KV blocks of another instance to load."),
    ReuseField("session_params", "SGLang: continues a session's KV."),
    ReuseField("cache_control", "Anthropic: caches automatically where it stands at the top."),
    ReuseField(
        "cache_control",
        "Anthropic, and OpenAI's forms through routers: marks where a cached prefix ends.",
        (
            ("system", EACH),
            ("tools", EACH),
            ("tools", EACH, "function"),
            ("messages", EACH),
            ("messages", EACH, *_BLOCKS),
            ("messages", EACH, *_BLOCKS, *_BLOCKS),
            ("messages", EACH, "tool_calls", EACH),
            ("input", EACH),
            ("input", EACH, *_BLOCKS),
            ("input", EACH, "output", EACH),
        ),
    ),
)
"""What is never taken from a client. A name that stands anywhere else, as in a tool's arguments, stays."""

HEADERS: Final = {
    "x-session-affinity, x-session-id, session_id, conversation_id": "route a session to the KV that it left",
    "x-grok-conv-id": "routes a conversation to its cache",
    "routing-strategy: prefix-cache": "routes by prefix (AIBrix)",
    "anthropic-beta: prompt-caching-*, extended-cache-ttl-*": "switch caching on, keep it longer",
    "cookie": "sticky sessions of load balancers",
}
"""Headers that do so elsewhere. None reaches the engine: no header of a client's does."""

REUSE_FIELDS: Final = frozenset(row.name for row in FIELDS if not row.inside)

_pruner = Pruner((*place, row.name) for row in FIELDS for place in row.inside)


def reuse_edit(reuse: Reuse) -> Edit:
    """Said explicitly either way, since llama.cpp's default is on; nothing of the client's own stays.

    Kept is the common prefix alone: `n_cache_reuse` would shift later pieces together, whose KV was computed behind
    another text.
    """
    match reuse:
        case Reuse.OFF:
            return Edit({"cache_prompt": False}, REUSE_FIELDS)
        case Reuse.KEEP:
            return Edit({"cache_prompt": True, "n_cache_reuse": 0}, REUSE_FIELDS)


def unmarked(document: JsonObject) -> JsonObject:
    """The body without the marks inside its messages, tools and system; every other byte as it came."""
    return _pruner.pruned(document)
