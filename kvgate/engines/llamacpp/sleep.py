"""Whether a llama-server has put its model away for want of requests (`--sleep-idle-seconds`)."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Sleep:
    """What `/props` last said of it.

    /props, /health and /v1/models neither wake the engine nor keep it from sleeping; /slots, the counters, the
    tokenizer and the template do both (seen on b11549). `waking` is from the first sight of its sleep until it has
    answered a call that wakes: it says at once that it sleeps no more, and answers when the model is loaded.
    """

    def __init__(self) -> None:
        self.is_told = False
        self.asleep = False
        self.waking = False

    def note(self, props: Mapping[str, Any]) -> None:
        """`/props` has been read."""
        self.is_told = "is_sleeping" in props
        self.asleep = props.get("is_sleeping") is True
        self.waking = self.waking or self.asleep

    def answered(self) -> None:
        """A call that wakes has been answered."""
        self.waking = False


def digest_awake(props: Mapping[str, Any]) -> str:
    """Of all that `/props` says but for its sleep: one process, one digest."""
    lasting = {name: value for name, value in props.items() if name != "is_sleeping"}
    return hashlib.sha256(json.dumps(lasting).encode()).hexdigest()
