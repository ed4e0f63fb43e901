"""The reuse suite as a gate runs it by schedule: in its own process, through its own ledger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvgate.app.canary_schedule import NoResult
from kvgate.core.reuse_suite import Verdict
from kvgate.lab.reuse_suite import EngineAccess, run_suite
from kvgate.ports import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvgate.core.canary import SuiteReport
    from kvgate.engines.llamacpp import LlamaCpp
    from kvgate.ports import Clock
    from kvgate.store.shared_ledger import SharedLedger


class GateSuite:
    """Implements `SuiteRunner` for this gate's engine."""

    def __init__(self, engine: LlamaCpp, ledger: SharedLedger, clock: Clock) -> None:
        self._engine = engine
        self._ledger = ledger
        self._clock = clock

    async def __call__(self, url: str) -> SuiteReport:  # noqa: ARG002 - the protocol's: it asks the engine itself
        """Run it.

        Raises:
            NoResult: it cannot tell, or the engine is not to be had.
        """
        try:
            profile = await self._engine.discover()
        except Refused as refused:
            raise NoResult(refused.refusal.message) from None
        access = EngineAccess(self._engine, profile, self._ledger, waiting_in(self._ledger), self._clock)
        result = await run_suite(access, clock=self._clock)
        if result.verdict is Verdict.CANNOT_TELL:
            open_cases = (f"{case.name}: {case.outcome}, {case.why}" for case in result.cases if case.why)
            raise NoResult(result.why or "; ".join(open_cases))
        return result.report(time.time())


def waiting_in(ledger: SharedLedger) -> Callable[[], Awaitable[int]]:
    """Tells how many requests of all gates wait for room."""

    async def waiting() -> int:
        await ledger.refresh()
        view = ledger.view()
        return 0 if view is None else view.waiting

    return waiting
