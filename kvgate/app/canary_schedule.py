"""Runs the reuse suite again from time to time on a pinned engine, and at once on its successor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, Protocol

from kvgate.store.canary import NotPinned
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.canary import CanaryState, SuiteReport
    from kvgate.core.profile import EngineProfile
    from kvgate.store.canary import CanaryStore, CanaryWatch

log = logging.getLogger("kvgate.reuse")

LOOK_S: Final = 10.0
"""How often it is looked whether a run is due."""

RETRY_S: Final = 600.0
"""After a run that came to no result: how soon the next one may begin on this process, of all gates."""

CLAIM_S: Final = 60.0
"""How soon another gate may take over from one that died in mid-run; who runs it claims anew, more often."""

RECORD_AGAIN_S: Final = 1.0

BY: Final = "kvgate canary schedule"


class NoResult(Exception):
    """The suite came to no result; the message says why, and quotes no prompt."""


class SuiteRunner(Protocol):
    """Whoever runs the suite, through a gate; see `lab`."""

    async def __call__(self, url: str) -> SuiteReport:
        """Run it against the gate at this URL, and come back with what it found.

        Raises:
            NoResult: why it came to none.
            Exception: the same, by any other cause, whose words are not logged.
        """


class CanarySchedule:
    """Keeps pins true by repeating their evidence.

    A run that fails unpins by itself (`CanaryStore.report`). One that passes on the successor of a pinned process, an
    engine of the same fingerprint, pins it; an engine that nobody ever pinned is left alone.

    Args:
        run: runs the suite.
        store: where reports and pins are, and who of several gates runs it.
        watch: what is pinned now.
        profile: the engine as it was last seen.
        every_s: seconds between the end of one run and the beginning of the next.
        now: Unix time, as the reports have it.
    """

    def __init__(
        self,
        run: SuiteRunner,
        store: CanaryStore,
        watch: CanaryWatch,
        *,
        profile: Callable[[], EngineProfile | None],
        every_s: float,
        now: Callable[[], float],
    ) -> None:
        self._run = run
        self._store = store
        self._watch = watch
        self._profile = profile
        self._every_s = every_s
        self._now = now

    async def watch(self, url: str) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(url)

    async def look(self, url: str) -> SuiteReport | None:
        """Run the suite if that is due and no other gate does; what it found.

        An outage of the store, and a run without a result, are logged: the next look comes by itself.
        """
        profile, state = self._profile(), self._watch.state
        if profile is None or state is None or not _concerns(profile, state):
            return None
        try:
            if not await self._is_due(profile) or not await self._store.claim(str(profile.instance), CLAIM_S):
                return None
            report = await self._claimed(url, str(profile.instance))
            await self._record(report)
            if report.passed:
                await self._store.pin(report, BY, renew=True)
            await self._watch.refresh()
        except (StoreUnavailable, NotPinned) as problem:
            log.warning("the schedule of the reuse suite pinned nothing", extra={"problem": str(problem)})
            return None
        except Exception as problem:  # noqa: BLE001 - a suite that breaks must not stop the gate
            why = {"problem": str(problem)} if isinstance(problem, NoResult) else {"error": type(problem).__name__}
            log.warning("the reuse suite came to no result", extra=why)
            return None
        level = logging.INFO if report.passed else logging.ERROR
        told = {"passed": report.passed, "cases_run": report.cases_run, "cases_failed": report.cases_failed}
        log.log(level, "the reuse suite has run", extra={"fingerprint": report.fingerprint, **told})
        return report

    async def _claimed(self, url: str, instance: str) -> SuiteReport:
        """Run it; of all gates nobody else does meanwhile, nor soon after where it came to no result.

        A gate that is stopped in mid-run leaves its claim to run out: another goes on soon.
        """
        holding = asyncio.create_task(self._hold(instance))
        try:
            return await self._run(url)
        except Exception:
            await self._try_to_hold(instance, RETRY_S)
            raise
        finally:
            holding.cancel()

    async def _hold(self, instance: str) -> None:
        while True:
            await asyncio.sleep(CLAIM_S / 3)
            await self._try_to_hold(instance, CLAIM_S)

    async def _try_to_hold(self, instance: str, seconds: float) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self._store.hold(instance, seconds)

    async def _record(self, report: SuiteReport) -> None:
        """Put it on record, however long the store is out: a pin must not outlive a run that failed."""
        while True:
            try:
                await self._store.report(report)
            except StoreUnavailable as problem:
                log.warning("a run of the reuse suite is not recorded yet", extra={"problem": str(problem)})
                await asyncio.sleep(RECORD_AGAIN_S)
            else:
                return

    async def _is_due(self, profile: EngineProfile) -> bool:
        """Whether the latest run on this very process is too long ago, or there was none."""
        reports = (await self._store.view()).reports
        own = [one for one in reports if (one.fingerprint, one.instance) == (profile.fingerprint, profile.instance)]
        return not own or self._now() - own[0].finished_at_s >= self._every_s


def _concerns(profile: EngineProfile, state: CanaryState) -> bool:
    """Whether this engine, or one that it takes the place of, is pinned."""
    return profile.instance is not None and any(pin.fingerprint == profile.fingerprint for pin in state.pins)
