"""kvgate canary pin, unpin, status, widen: which engines reuse is allowed on, and for which tenants."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import Told, plural, table, utc
from kvgate.cli.store_access import add_options, nearest, run, run_prepared
from kvgate.cli.top import look
from kvgate.core.canary import EVERYBODY
from kvgate.store.canary import NotPinned
from kvgate.store.errors import StoreUnavailable
from kvgate.store.registry import NotDone

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    from kvgate.cli.store_access import Desk
    from kvgate.core.canary import Figures, Pin, SuiteReport

EVENTS_SHOWN = 10
REPORTS_SHOWN = 5

_AGAIN = "Whether it was done is unknown; doing it again is safe"


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the actions to the command's parser."""
    pin = actions.add_parser(
        "pin",
        help="allow reuse on the engine whose suite passed",
        description="Allow prefix reuse, for tenants on the allowlist, on the engine process whose latest run of the "
        "suite passed. Gates follow within a second. A process that takes its place is not pinned.",
        allow_abbrev=False,
    )
    pin.add_argument(
        "fingerprint", nargs="?", metavar="FINGERPRINT", help="of the engine; default: of the latest run of the suite"
    )
    pin.set_defaults(run=_pin)
    unpin = actions.add_parser(
        "unpin",
        help="switch reuse off on an engine",
        description="Switch prefix reuse off on an engine, for everybody, within a second.",
        allow_abbrev=False,
    )
    unpin.add_argument("fingerprint", nargs="?", metavar="FINGERPRINT", help="of the engine; default: every engine")
    unpin.add_argument("--why", default="", metavar="TEXT", help="the reason, for the history")
    unpin.set_defaults(run=_unpin)
    status = actions.add_parser(
        "status",
        help="show pins, the allowlist and the latest runs",
        description="Show the pins, the allowlist, the latest runs of the suite and what changed.",
        allow_abbrev=False,
    )
    status.set_defaults(run=_status)
    widen = actions.add_parser(
        "widen",
        help="put further tenants on the allowlist",
        description='Put tenants on the allowlist, beside those whose own setting is reuse = "canary".',
        allow_abbrev=False,
    )
    widen.add_argument("tenants", nargs="+", metavar="TENANT", help="who")
    widen.add_argument("--remove", action="store_true", help="take them off it instead")
    widen.set_defaults(run=_widen)
    for each in (pin, unpin, status, widen):
        add_options(each)


def _pin(options: argparse.Namespace, _: list[str]) -> int:
    return run_prepared(options, lambda settings: _pinning(options, f"http://{settings.admin_listen}"))


def _pinning(options: argparse.Namespace, admin: str) -> Callable[[Desk], Awaitable[Told]]:
    async def work(desk: Desk) -> Told:
        report = _chosen((await desk.canary.view()).reports, options.fingerprint)
        try:
            pin = await desk.canary.pin(report, by=who())
        except NotPinned as error:
            raise NotDone(str(error)) from None
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error}. {_AGAIN}") from None
        line = (
            f"pinned: engine {pin.fingerprint}, by version {pin.suite_version} of the suite, which finished "
            f"{utc(int(report.finished_at_s))}: {_figures(pin.figures)}"
        )
        strangers = sorted(await desk.canary.strangers(pin.instance))
        note = "reuse is on within a second for tenants on the allowlist to whom the engine is dedicated"
        if await asyncio.to_thread(_is_gone, pin, admin):
            note = (
                f"reuse stays off at the gate at {admin}: it is in front of another engine process than the one that "
                "passed. `kvgate canary run` asks that one"
            )
        elif strangers:
            note = (
                f"reuse stays off: this engine process has served {_names(strangers)} off the allowlist. Dedicate "
                "the engine (engine.dedicated_to), restart it, then `kvgate canary run` and `pin` again, which "
                "`[canary] every_h` does by itself"
            )
        return Told({"pin": asdict(pin), "strangers": strangers}, [line], [note])

    return work


def _unpin(options: argparse.Namespace, _: list[str]) -> int:
    async def work(desk: Desk) -> Told:
        pins = (await desk.canary.state()).pins
        wanted = sorted({pin.fingerprint for pin in pins})
        if options.fingerprint is not None:
            if options.fingerprint not in wanted:
                raise NotDone(f"engine {options.fingerprint} is not pinned (`kvgate canary status` shows what is)")
            wanted = [options.fingerprint]
        try:
            gone = sum([await desk.canary.unpin(one, by=who(), why=options.why) for one in wanted])
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error}. {_AGAIN}") from None
        if not gone:
            return Told({"unpinned": []}, ["nothing was pinned"])
        line = (
            f"unpinned: {', '.join(wanted)}. Reuse is off there within a second on every gate that reaches the store"
        )
        return Told({"unpinned": wanted}, [line], ["a gate that does not reach the store has reuse off by itself"])

    return run(options, work)


def _widen(options: argparse.Namespace, _: list[str]) -> int:
    async def work(desk: Desk) -> Told:
        known = (await desk.registry.read()).tenants
        if not options.remove and (unknown := [name for name in options.tenants if name not in known]):
            raise NotDone(f"there is no tenant {unknown[0]!r}{nearest(unknown[0], known)}")
        try:
            changed = await desk.canary.widen(options.tenants, by=who(), narrow=options.remove)
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error}. {_AGAIN}") from None
        widened = sorted((await desk.canary.state()).widened)
        done = "taken off the allowlist" if options.remove else "put on the allowlist"
        line = f"{plural(changed, 'tenant')} {done}; widened to: {', '.join(widened) or 'nobody'}"
        notes = []
        if options.remove and (own := [name for name in options.tenants if _is_canary(known.get(name))]):
            notes.append(f'on it by their own setting reuse = "canary" still: {", ".join(own)}')
        return Told({"changed": changed, "widened": widened}, [line], notes)

    return run(options, work)


def _status(options: argparse.Namespace, _: list[str]) -> int:
    async def work(desk: Desk) -> Told:
        view, known = await desk.canary.view(), (await desk.registry.read()).tenants
        canaries = sorted(name for name, record in known.items() if _is_canary(record))
        state = view.state
        answer = {
            "pins": [asdict(pin) for pin in state.pins],
            "canaries": canaries,
            "widened": sorted(state.widened),
            "reports": [asdict(report) for report in view.reports],
            "events": [asdict(event) for event in view.events],
        }
        lines = ["no engine is pinned: reuse is off for everybody"]
        if state.pins:
            rows = [("ENGINE", "PINNED", "BY", "SUITE", "FIGURES")]
            for pin in state.pins:
                when = utc(int(pin.pinned_at_s)) or "-"
                rows.append((pin.fingerprint, when, pin.by, str(pin.suite_version), _figures(pin.figures)))
            lines = table(rows)
        lines += ["", f'allowlist: {", ".join(canaries) or "nobody"} (reuse = "canary")']
        lines.append(f"widened:   {', '.join(sorted(state.widened)) or 'nobody'}")
        if view.reports:
            rows = [("ENGINE", "FINISHED", "SUITE", "RESULT", "FIGURES")]
            for report in view.reports[:REPORTS_SHOWN]:
                failed = f"{report.cases_failed} of {report.cases_run} failed"
                result = "passed" if report.passed else failed
                when = utc(int(report.finished_at_s)) or "-"
                rows.append((report.fingerprint, when, str(report.suite_version), result, _figures(report.figures)))
            lines += ["", *table(rows)]
        if view.events:
            rows = [("WHEN", "WHAT", "WHICH", "BY", "WHY")]
            for event in view.events[:EVENTS_SHOWN]:
                rows.append((utc(int(event.at_s)) or "-", event.what, event.subject, event.by, event.why or "-"))
            lines += ["", *table(rows)]
        notes = [] if view.reports else ["no run of the suite is on record: kvgate canary run"]
        return Told(answer, lines, notes)

    return run(options, work)


def _is_gone(pin: Pin, admin: str) -> bool:
    """Whether a gate there is in front of another process of this very fingerprint; False where none answers."""
    try:
        engine = look(admin)["engine"]
    except ValueError:
        return False
    return bool(engine) and engine["fingerprint"] == pin.fingerprint and engine["profile"]["instance"] != pin.instance


def _names(strangers: list[str]) -> str:
    return "everybody" if EVERYBODY in strangers else ", ".join(strangers)


def who() -> str:
    """Who does it, for whoever wonders later."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _chosen(reports: tuple[SuiteReport, ...], fingerprint: str | None) -> SuiteReport:
    """The latest report, of all or of one engine."""
    if not reports:
        raise NotDone("no run of the suite is on record, so there is nothing to pin: kvgate canary run")
    if fingerprint is None:
        return reports[0]
    found = next((report for report in reports if report.fingerprint == fingerprint), None)
    if found is None:
        known = nearest(fingerprint, {report.fingerprint for report in reports})
        raise NotDone(f"the suite never ran on engine {fingerprint}{known}")
    return found


def _is_canary(record: Any) -> bool:
    return record is not None and record.tenant is not None and record.tenant.reuse.value == "canary"


def _figures(figures: Figures) -> str:
    return (
        f"prefill saved {figures.prefill_saved_ratio:.0%}, time {figures.latency_ratio:.0%} of cold, "
        f"difference {figures.difference_nats:.2g} nats at a noise of {figures.noise_nats:.2g}"
    )
