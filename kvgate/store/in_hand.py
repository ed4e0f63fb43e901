"""What one gate has in hand of the shared ledger: from before it asks until the store has heard that it is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvgate.ports import nothing_yet
from kvgate.store.ledger_scripts import reservation_json, usage_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.ask import Usage
    from kvgate.core.ledger import Lease, Reservation
    from kvgate.core.reason import Reason


@dataclass(slots=True)
class Hand:
    """One request: what it asked for, what it was granted, and how far it has come, on the gate's clock.

    Args:
        lease: None while it waits.
        good_until_s: when the lease runs out at the store unless it is renewed.
        at_store: whether anything may stand at the store under its id.
        asking: a step under way; it is never cancelled, since then nobody would know whether it was taken.
        waited: whether it had to.
        woken: something was told of it while it waits; `refused` is the reason where it was sent away.
        streamed: how much output has come, whenever it is asked; `told_tokens` of it the store has heard of.
    """

    reservation: Reservation
    lease: Lease | None = None
    handed_s: float | None = None
    answered_s: float | None = None
    good_until_s: float = 0.0
    at_store: bool = False
    asking: asyncio.Task[dict[str, Any]] | None = None
    waited: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    refused: Reason | None = None
    streamed: Callable[[], int] = nothing_yet
    told_tokens: int = 0

    def ages(self, now_s: float) -> dict[str, int]:
        """How long ago what happened, in milliseconds; said when it is sent, so that what is late looks later."""
        moments = {"handed_age": self.handed_s, "answered_age": self.answered_s}
        return {name: int((now_s - at_s) * 1000) for name, at_s in moments.items() if at_s is not None}

    def told(self, now_s: float) -> dict[str, Any]:
        """What a renewal says of it."""
        output = self.streamed()
        return {"id": self.reservation.lease_id, **self.ages(now_s), **({"output": output} if output else {})}

    def whole(self, now_s: float) -> dict[str, Any]:
        """All that is needed to count it anew."""
        cells = 0 if self.lease is None else self.lease.cells
        return {**reservation_json(self.reservation), "cells": cells, **self.ages(now_s)}


@dataclass(slots=True)
class Settled:
    """A lease that is over for this gate, until the store has heard of it."""

    hand: Hand
    ended: bool
    used: Usage | None

    @property
    def drains(self) -> bool:
        """Whether only the engine can tell that it is over."""
        return not self.ended and self.hand.lease is not None and self.hand.handed_s is not None

    def told(self, now_s: float) -> dict[str, Any]:
        """What the store is told."""
        used = {} if self.used is None else {"used": usage_json(self.used)}
        return {**self.hand.told(now_s), "ended": self.ended, **used}
