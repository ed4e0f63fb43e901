"""What `kvgate check` found, in the forms that people, programs and CI systems read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from kvgate.core.deploy import Level, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgate.core.deploy import Checked, Finding


def as_fields(found: Checked, context_tokens_min: int) -> dict[str, Any]:
    """The members of the JSON object."""
    return {
        "ok": found.ok,
        "n_ctx_slot": found.n_ctx_slot,
        "context_tokens_min": context_tokens_min,
        "total_slots": found.slots,
        "source": found.source,
        "topology": found.topology,
        "pool_tokens": found.pool_tokens,
        "findings": [
            {
                "rule": finding.rule.label,
                "level": finding.level,
                "sentence": finding.sentence,
                "fix": finding.fix,
                "acknowledged": finding.is_acknowledged,
            }
            for finding in found.findings
        ],
        "not_judged": [{"rule": rule.label, "why": why} for rule, why in found.not_judged],
    }


def as_lines(found: Checked, context_tokens_min: int) -> Iterator[str]:
    """Sentences: the slot's context first, then what is broken with its fix, then what nothing told."""
    if Rule.SLOT_CONTEXT not in {finding.rule for finding in found.findings} and found.n_ctx_slot is not None:
        yield (
            f"ok: n_ctx_slot = {found.n_ctx_slot} tokens ({found.source}), {found.slots} slots; "
            f"at least {context_tokens_min} are asked for"
        )
    for finding in found.findings:
        yield f"{_word(finding)} {finding.rule.label}: {finding.sentence}"
        if not finding.is_acknowledged:
            yield f"  to do: {finding.fix}"
    reasons: dict[str, list[str]] = {}
    for rule, why in found.not_judged:
        reasons.setdefault(why, []).append(rule.label)
    for why, labels in reasons.items():
        yield f"not judged: {', '.join(labels)}: {why}"


def as_junit(found: Checked) -> str:
    """A JUnit file with a test case for each rule, as CI systems show them."""
    broken: dict[Rule, list[Finding]] = {}
    for finding in found.findings:
        broken.setdefault(finding.rule, []).append(finding)
    unjudged = dict(found.not_judged)
    cases = [_case(rule, broken.get(rule, []), unjudged.get(rule)) for rule in Rule]
    failures = sum("<failure" in case for case in cases)
    skipped = sum("<skipped" in case for case in cases)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuite name="kvgate check" tests="{len(cases)}" failures="{failures}" errors="0" skipped="{skipped}">\n'
        + "".join(cases)
        + "</testsuite>\n"
    )


def _case(rule: Rule, findings: list[Finding], why_not: str | None) -> str:
    head = f"  <testcase classname={quoteattr('kvgate.check')} name={quoteattr(rule.label)}"
    inside = ""
    for finding in findings:
        text = f"{finding.sentence}\nto do: {finding.fix}"
        if finding.is_acknowledged:
            inside += f"    <skipped message={quoteattr('acknowledged: ' + finding.sentence)}/>\n"
        elif finding.level is Level.ERROR:
            inside += f"    <failure message={quoteattr(finding.sentence)}>{escape(text)}</failure>\n"
        else:
            inside += f"    <system-out>{escape('warning: ' + text)}</system-out>\n"
    if not findings and why_not is not None:
        inside = f"    <skipped message={quoteattr('not judged: ' + why_not)}/>\n"
    return f"{head}>\n{inside}  </testcase>\n" if inside else f"{head}/>\n"


def as_github(found: Checked) -> Iterator[str]:
    """Workflow commands that GitHub shows as annotations."""
    for finding in found.findings:
        kind = "notice" if finding.is_acknowledged else str(finding.level)
        title = _property(f"kvgate check: {finding.rule.label}")
        yield f"::{kind} title={title}::{_data(f'{finding.sentence}. To do: {finding.fix}')}"


def _word(finding: Finding) -> str:
    return "acknowledged" if finding.is_acknowledged else str(finding.level)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
