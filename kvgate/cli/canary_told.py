"""How a run of the suite is told: a table, one JSON object, JUnit XML, an exit status."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from kvgate.cli.answers import table
from kvgate.core.reuse_suite import Outcome, Verdict

if TYPE_CHECKING:
    from kvgate.core.reuse_suite import CaseResult, SuiteResult

_STATUS: Final = {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.CANNOT_TELL: 2}


def exit_status(result: SuiteResult) -> int:
    """0: every case passed. 1: reuse corrupts. 2: neither can be said."""
    return _STATUS[result.verdict]


def lines(result: SuiteResult) -> list[str]:
    """For people: the cases, what is wrong with them, and what it comes to."""
    head = ("CASE", "RESULT", "DIFFERENCE", "CONTROL", "REUSED", "PREFILL", "TIME")
    told = table([head, *(_row(case) for case in result.cases)])
    told += [f"{case.name}: {case.why}" for case in result.cases if case.why and case.outcome is not Outcome.UNASKED]
    told += ["", *_summary(result)]
    return told


def _row(case: CaseResult) -> tuple[str, ...]:
    if not case.prompt_tokens:
        return (case.name, case.outcome.value, "-", "-", "-", "-", "-")
    return (
        case.name,
        case.outcome.value,
        f"{case.difference_nats:.2f}",
        f"{case.control_nats:.2f}",
        f"{case.cached_tokens / case.prompt_tokens:.0%}",
        _ratio(case.prefill_s, case.cold_prefill_s),
        _ratio(case.duration_s, case.cold_s),
    )


def _ratio(warm_s: float, cold_s: float) -> str:
    return f"{warm_s / cold_s:.2f}" if cold_s else "-"


def _summary(result: SuiteResult) -> list[str]:
    figures = result.figures
    told = [
        f"engine {result.fingerprint} ({result.build or 'of unknown build'}), suite version {result.version}",
        f"beginnings of up to {result.depth_tokens} tokens, in slots of {result.n_ctx_slot}",
        f"noise {result.noise_nats:.2f} nats, cold against cold; over {result.threshold_nats:.2f} is a difference",
    ]
    if any(case.prompt_tokens for case in result.cases):
        told.append(
            f"with reuse {figures.prefill_saved_ratio:.0%} of the prompts was not computed again: prefill took "
            f"{result.prefill_time_ratio:.2f} of its cold time, whole answers {figures.latency_ratio:.2f}"
        )
    told.append(f"{result.verdict.value}: {_verdict(result)}")
    return told


def _verdict(result: SuiteResult) -> str:
    if result.verdict is Verdict.PASSED:
        return "every case ran, could have seen corruption, and saw none"
    if result.verdict is Verdict.FAILED:
        names = ", ".join(case.name for case in result.cases if case.outcome is Outcome.FAILED)
        return f"reuse gives other answers on this engine ({names}): leave it off"
    if result.why:
        return result.why
    names = ", ".join(f"{case.name} ({case.outcome.value})" for case in result.cases if _is_open(case))
    return f"some cases show neither that reuse is right nor that it is wrong: {names}"


def _is_open(case: CaseResult) -> bool:
    return case.outcome is not Outcome.PASSED


def as_json(result: SuiteResult, *, recorded: bool) -> str:
    """For programs: all of it, with the figures over all cases; `recorded`: whether a pin may rest on it."""
    told = {
        "ok": None if result.verdict is Verdict.CANNOT_TELL else result.verdict is Verdict.PASSED,
        "verdict": result.verdict.value,
        "recorded": recorded,
        **asdict(result),
        "figures": {**asdict(result.figures), "prefill_time_ratio": result.prefill_time_ratio},
    }
    return json.dumps(told)


def junit(result: SuiteResult) -> str:
    """For CI: a case that is blind, saw no reuse or was not asked is an error, corruption a failure."""
    failed = sum(case.outcome is Outcome.FAILED for case in result.cases)
    errors = sum(_is_open(case) for case in result.cases) - failed
    counts = {"tests": str(len(result.cases)), "failures": str(failed), "errors": str(errors)}
    root = ElementTree.Element("testsuite", {"name": "kvgate reuse suite", **counts})
    for case in result.cases:
        seconds = f"{case.cold_s + case.duration_s:.3f}"
        element = ElementTree.SubElement(
            root, "testcase", {"classname": "kvgate.reuse", "name": case.name, "time": seconds}
        )
        if case.outcome is not Outcome.PASSED:
            kind = "failure" if case.outcome is Outcome.FAILED else "error"
            ElementTree.SubElement(
                element, kind, {"type": case.outcome.value, "message": case.why or result.why or case.outcome.value}
            )
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
