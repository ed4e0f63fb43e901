"""Prefix reuse: what a tenant may have, and whether an answer shows more than that."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgate.core.ask import Usage


class Reuse(StrEnum):
    """Whether a request may read a KV prefix that an earlier one left behind."""

    OFF = "off"
    KEEP = "on"


def is_violation(reuse: Reuse, usage: Usage) -> bool:
    """Whether the engine reused tokens that it was told not to.

    Believed only when seen: `cache_prompt: false` is dropped by some endpoints (llama.cpp's /v1/messages
    reused 142 of 143 tokens with it), so every answer's cached tokens are looked at.
    """
    return reuse is Reuse.OFF and usage.cached_tokens > 0
