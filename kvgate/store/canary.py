"""Pins, the widened allowlist and the suite's reports in the store; every gate sees a change within a second."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.canary import CanaryState, Figures, Pin, SuiteReport
from kvgate.store.errors import StoreUnavailable, store_errors
from kvgate.store.records import PREFIX, script_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgate.store.client import StoreClient

_log = logging.getLogger(__name__)

REPORTS_MAX: Final = 100
"""The history keeps so many reports."""

EVENTS_MAX: Final = 200
"""And so many pins and unpins, with their reasons."""

PINS_MAX: Final = 64
"""Processes that are gone leave their pins behind; beyond so many the oldest are dropped."""


SERVED_TTL_S: Final = 30 * 24 * 3600
"""An engine process of which no gate was heard for so long is forgotten."""


_NOT_PINNED: Final = {
    "doubted": "this engine reused prefixes although it was told not to, since its suite last passed: correct its "
    "flags (docs/reuse.md), then `kvgate canary run`",
    "unpinned": "it was unpinned while the suite ran, and stays so",
}


class NotPinned(ValueError):
    """The pin was not set; the message says why."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changed who may reuse: what, on which engine, when (Unix time), by whom and why."""

    what: str
    subject: str
    at_s: float
    by: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class CanaryView:
    """All that the store has of it: what is in force, and the history, the latest first."""

    state: CanaryState
    reports: tuple[SuiteReport, ...]
    events: tuple[Event, ...]


class CanaryStore:
    """Reads and changes it; each change is one atomic step.

    Args:
        client: made by `store.client.connect`; its owner closes it.
        prefix: of the keys; a hash tag, so that on a cluster they live on one node.
        timeout_s: for one step at the store.
    """

    def __init__(self, client: StoreClient, *, prefix: str = PREFIX, timeout_s: float = 2.0) -> None:
        self._client: Any = client  # redis-py types every answer as "awaitable or not"
        self._keys = [f"{prefix}:canary:{name}" for name in ("pins", "widened", "reports", "events")]
        self._served = f"{prefix}:canary:served:"
        self._named = f"{prefix}:canary:dedicated:"
        self._doubted = f"{prefix}:canary:doubted"
        self._running = f"{prefix}:canary:running:"
        self._timeout_s = timeout_s
        self._change = script_of(client, "canary.lua")

    async def report(self, report: SuiteReport) -> None:
        """Put a run of the suite on record; one that failed takes away every pin of its engine's fingerprint.

        Two processes of one fingerprint compute alike: what fails on one is not to be trusted on the other.

        Raises:
            StoreUnavailable: the store failed; whether it was written is unknown.
        """
        await self._step("report", json.dumps(asdict(report)), str(REPORTS_MAX), str(EVENTS_MAX))

    async def pin(self, report: SuiteReport, by: str, *, renew: bool = False) -> Pin:
        """Pin the engine process of a report that passed, by the store's clock.

        `renew`: only while its fingerprint is pinned, so that who unpins during a run has the last word.

        Raises:
            NotPinned: it did not pass, its engine cannot be told from its successor or has reused since although it
                was told not to; or there is no pin to renew.
            StoreUnavailable: the store failed; whether it was pinned is unknown.
        """
        if not report.passed:
            raise NotPinned(
                f"the suite did not pass on this engine: {report.cases_failed} of {report.cases_run} failed"
            )
        if report.instance is None:
            raise NotPinned("the engine shows nothing that tells its process from the next, so it cannot be pinned")
        pin = Pin(report.fingerprint, report.instance, report.suite_version, report.figures, 0.0, by)
        at_s = await self._step("pin", json.dumps(asdict(pin)), str(PINS_MAX), str(EVENTS_MAX), "1" if renew else "")
        if at_s in _NOT_PINNED:
            raise NotPinned(_NOT_PINNED[at_s])
        return replace(pin, pinned_at_s=float(at_s))

    async def unpin(
        self, fingerprint: str, *, by: str, why: str, instance: str | None = None, doubt: bool = False
    ) -> int:
        """Take pins of an engine away, of one process or of all; how many there were.

        `doubt`: because it reused although it was told not to. No report from before can be pinned again.

        Raises:
            StoreUnavailable: the store failed; whether they are gone is unknown.
        """
        return int(
            await self._step("unpin", fingerprint, instance or "", by, why, str(EVENTS_MAX), "1" if doubt else "")
        )

    async def widen(self, tenants: Sequence[str], *, by: str, narrow: bool = False) -> int:
        """Put tenants on the allowlist, or take them off it; how many were not as asked before.

        Raises:
            StoreUnavailable: the store failed; whether it was written is unknown.
        """
        what = "narrow" if narrow else "widen"
        return int(await self._step(what, json.dumps(list(tenants)), by, str(EVENTS_MAX)))

    async def claim(self, instance: str, seconds: float) -> bool:
        """Be the only one, of all gates, who runs the suite by schedule on this engine process for so long.

        Raises:
            StoreUnavailable: the store failed.
        """
        with store_errors("claiming the run of the suite"):
            async with asyncio.timeout(self._timeout_s):
                found = await self._client.set(self._running + _short(instance), "1", nx=True, px=int(seconds * 1000))
        return bool(found)

    async def hold(self, instance: str, seconds: float) -> None:
        """Whoever claimed it goes on, or lets nobody try for so long.

        Raises:
            StoreUnavailable: the store failed.
        """
        with store_errors("holding the run of the suite"):
            async with asyncio.timeout(self._timeout_s):
                await self._client.set(self._running + _short(instance), "1", px=int(seconds * 1000))

    async def strangers(self, instance: str) -> frozenset[str]:
        """Whom an engine process ever served off the allowlist, by any gate.

        Raises:
            StoreUnavailable: the store failed.
        """
        with store_errors("reading whom the engine served"):
            async with asyncio.timeout(self._timeout_s):
                return frozenset(map(text_of, await self._client.smembers(self._served + _short(instance))))

    async def note_served(
        self, instance: str, strangers: frozenset[str], named: frozenset[str] = frozenset()
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Write down whom an engine process serves off the allowlist, and whom it is dedicated to.

        All that any gate ever wrote down of it.

        Raises:
            StoreUnavailable: the store failed.
        """
        keys = self._served + _short(instance), self._named + _short(instance)
        with store_errors("noting whom the engine serves"):
            async with asyncio.timeout(self._timeout_s), self._client.pipeline(transaction=True) as pipe:
                for key, names in zip(keys, (strangers, named), strict=True):
                    if names:
                        pipe.sadd(key, *names)
                    pipe.expire(key, SERVED_TTL_S)
                pipe.smembers(keys[0]).smembers(keys[1])
                *_, noted, dedicated = await pipe.execute()
        return frozenset(map(text_of, noted)), frozenset(map(text_of, dedicated))

    async def state(self) -> CanaryState:
        """What is in force.

        Raises:
            StoreUnavailable: the store failed.
        """
        pins_key, widened_key, _, _ = self._keys
        with store_errors("reading the pins"):
            async with asyncio.timeout(self._timeout_s), self._client.pipeline(transaction=True) as pipe:
                pipe.hgetall(pins_key).smembers(widened_key)
                pins, widened = await pipe.execute()
        return _state(pins, widened)

    async def view(self) -> CanaryView:
        """All of it.

        Raises:
            StoreUnavailable: the store failed.
        """
        pins_key, widened_key, reports_key, events_key = self._keys
        with store_errors("reading the pins and reports"):
            async with asyncio.timeout(self._timeout_s), self._client.pipeline(transaction=True) as pipe:
                pipe.hgetall(pins_key).smembers(widened_key)
                pipe.lrange(reports_key, 0, REPORTS_MAX - 1).lrange(events_key, 0, EVENTS_MAX - 1)
                pins, widened, reports, events = await pipe.execute()
        found = tuple(report for report in map(_report, reports) if report is not None)
        told = tuple(event for event in map(_event, events) if event is not None)
        return CanaryView(_state(pins, widened), found, told)

    async def _step(self, *arguments: str) -> str:
        with store_errors("changing the pins"):
            async with asyncio.timeout(self._timeout_s):
                return text_of(await self._change(keys=[*self._keys, self._doubted], args=arguments))


class CanaryWatch:
    """What a gate knows of it: a moment old, and nothing at all while the store is out."""

    def __init__(self, store: CanaryStore) -> None:
        self._store = store
        self.state: CanaryState | None = None
        """None while nobody knows what is pinned: then nobody reuses."""
        self.serving: Callable[[CanaryState], tuple[str | None, frozenset[str], frozenset[str]]] = lambda _: (
            None,
            frozenset(),
            frozenset(),
        )
        """The engine process that this gate serves with, whom off the allowlist, and whom it is dedicated to."""

    async def refresh(self) -> None:
        """Look once, and tell the store of strangers, so that no gate lets anybody read what they leave."""
        before = self.state
        try:
            state = await self._store.state()
            instance, strangers, named = self.serving(state)
            if instance is not None:
                noted, dedicated = await self._store.note_served(instance, strangers, named)
                state = replace(state, instance=instance, strangers=noted, dedicated_to=dedicated)
        except StoreUnavailable as problem:
            if before is not None:
                _log.warning("store out, prefix reuse is off for everybody", extra={"problem": str(problem)})
            self.state = None
            return
        self.state = state
        if before is None or (before.pins, before.widened) != (state.pins, state.widened):
            pinned = sorted({pin.fingerprint for pin in state.pins})
            _log.info("prefix reuse", extra={"pinned": pinned, "widened": sorted(state.widened)})

    async def watch(self, interval_s: float = 0.5) -> None:
        """Look every `interval_s` seconds until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(interval_s)


def _short(instance: str) -> str:
    return hashlib.sha256(instance.encode()).hexdigest()[:32]


def _state(pins: dict[object, object], widened: set[object]) -> CanaryState:
    found = [pin for pin in map(_pin, pins.values()) if pin is not None]
    found.sort(key=lambda pin: -pin.pinned_at_s)
    return CanaryState(tuple(found), frozenset(map(text_of, widened)))


def _pin(text: object) -> Pin | None:
    """What `pin` wrote; what another version wrote and this one cannot read is no pin."""
    try:
        known = json.loads(text_of(text))
        return Pin(
            str(known["fingerprint"]),
            str(known["instance"]),
            int(known["suite_version"]),
            _figures(known["figures"]),
            float(known["pinned_at_s"]),
            str(known["by"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _report(text: object) -> SuiteReport | None:
    try:
        known = json.loads(text_of(text))
        return SuiteReport(
            str(known["fingerprint"]),
            None if known["instance"] is None else str(known["instance"]),
            int(known["suite_version"]),
            known["passed"] is True,
            int(known["cases_run"]),
            int(known["cases_failed"]),
            _figures(known["figures"]),
            float(known["finished_at_s"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _figures(known: dict[str, Any]) -> Figures:
    return Figures(
        float(known["noise_nats"]),
        float(known["difference_nats"]),
        float(known["prefill_saved_ratio"]),
        float(known["latency_ratio"]),
    )


def _event(text: object) -> Event | None:
    try:
        known = json.loads(text_of(text))
        return Event(
            str(known["what"]), str(known["subject"]), float(known["at_s"]), str(known["by"]), str(known["why"])
        )
    except (ValueError, KeyError, TypeError):
        return None
