"""Remembers which engine process last kept a conversation's KV, without remembering the conversation."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvgate.core.reuse import Reuse

if TYPE_CHECKING:
    from kvgate.core.profile import EngineProfile

KEPT_MAX: Final = 10_000
"""Conversations that are remembered; beyond it the longest unheard-of go. About 1 MB."""


class Warmth:
    """Conversations that had reuse, each as a keyed hash of how it begins.

    Two conversations that begin alike are one here: then at most one answer too many, or too few, is called cold.

    Args:
        secret: of this process alone, so that a hash tells nothing to whoever has no text to try and no secret.
        kept_max: how many are remembered.
    """

    def __init__(self, secret: bytes, kept_max: int = KEPT_MAX) -> None:
        self._secret = secret
        self._kept_max = kept_max
        self._kept: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def is_cold(self, tenant: str, beginning: str, profile: EngineProfile, reuse: Reuse) -> bool:
        """Whether this conversation had reuse on a process that is gone: said once, at its first request since."""
        if reuse is Reuse.OFF and not self._kept:
            return False
        process = profile.instance or profile.fingerprint
        name = hashlib.blake2b(f"{tenant}\n{beginning}".encode(), key=self._secret, digest_size=16).digest()
        before = self._kept.pop(name, None)
        if reuse is Reuse.KEEP:
            self._kept[name] = process
            if len(self._kept) > self._kept_max:
                self._kept.popitem(last=False)
        elif before == process:
            self._kept[name] = before
        return before is not None and before != process
