"""Each rule of the deploy check: what breaks it, what does not, and that its fix is one."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.cli.check_reports import as_fields, as_github, as_junit, as_lines
from kvgate.core.command_line import CommandLine, read_line
from kvgate.core.deploy import Checked, Level, Rule, Seen, Wanted
from kvgate.core.deploy_check import check
from kvgate.core.profile import EngineProfile, Fact, Source, StartupFacts, Topology

GOOD = (
    "llama-server -m x.gguf -c 8192 -np 4 --no-kv-unified -ctk f16 -ctv f16 "
    "--no-cache-prompt --cache-ram 0 --no-cache-idle-slots"
)
CACHES = {"ram-cache", "idle-slots-cache"}
LOG = StartupFacts(4, 2048, kv_unified=False, kv_type_k="f16", kv_type_v="f16", prompt_cache_mib=0)
LOG = replace(LOG, idle_slots_cached=False)


def engine(n_ctx_slot: int = 2048, slots: int = 4, **more: Any) -> EngineProfile:
    fact = Fact(n_ctx_slot, Source.PROPS)
    topology = Fact(Topology.UNIFIED, Source.ASSUMED)
    return EngineProfile("llamacpp", fact, Fact(slots, Source.PROPS), topology, fact, **more)


def of_line(line: str, **wanted: Any) -> Checked:
    return check(Seen(command=read_line(line)), Wanted(**{"context_tokens_min": 2048, **wanted}))


def broken(found: Checked) -> set[str]:
    return {finding.rule.label for finding in found.findings}


def test_a_deployment_that_says_everything_breaks_nothing() -> None:
    """Engine, log and command line that agree: every rule is judged, none is broken."""
    found = check(Seen(engine(), LOG, read_line(GOOD)), Wanted(2048, tenants=3))
    assert (found.ok, found.findings, found.not_judged) == (True, (), ())


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        (GOOD, set()),
        (GOOD.replace("-c 8192 ", ""), {"context"}),
        (GOOD.replace("-c 8192", "-c 0"), {"context"}),
        (GOOD.replace("-c 8192", "-c 8191"), {"slot-context"}),
        (GOOD.replace("-np 4 ", "").replace("--no-kv-unified ", ""), {"parallel", "pool"}),
        (GOOD.replace("-np 4", "-np -1"), {"parallel"}),
        (GOOD.replace("--no-kv-unified", "--kv-unified"), {"pool"}),
        (GOOD.replace("--no-kv-unified", "--kv-unified --kv-unified-per-slot 2048"), set()),
        (GOOD.replace("--no-kv-unified", "--kv-unified --kv-unified-per-slot 2049"), {"pool"}),
        (GOOD.replace("-np 4 --no-kv-unified", "-np 1 --kv-unified"), set()),
        (GOOD.replace("-ctk f16", ""), {"kv-precision"}),
        (GOOD.replace("-ctv f16", ""), {"kv-precision"}),
        (GOOD.replace("--no-cache-prompt", ""), {"reuse"}),
        (GOOD.replace("--no-cache-prompt", "--cache-prompt"), set()),
        (GOOD + " --context-shift", {"context-shift"}),
        (GOOD.replace("--cache-ram 0", ""), {"ram-cache"}),
        (GOOD.replace("--cache-ram 0 --no-cache-idle-slots", "--cache-ram -1"), CACHES),
        (GOOD + " -md draft.gguf", {"speculation-margin"}),
        (GOOD + " --spec-type ngram-mod --spec-draft-n-max 3", {"speculation-margin"}),
        ("llama-server -m x.gguf -c 8192", CACHES | {"parallel", "pool", "kv-precision", "reuse"}),
    ],
)
def test_what_a_command_line_breaks(line: str, rules: set[str]) -> None:
    found = of_line(line, tenants=2)
    assert broken(found) == rules
    assert found.ok == (not rules)


@pytest.mark.parametrize(
    ("log", "rules"),
    [
        (LOG, set()),
        (replace(LOG, n_ctx_slot=1365), {"slot-context"}),
        (replace(LOG, kv_unified=True, pool_tokens=2048), {"pool"}),
        (replace(LOG, kv_unified=True, pool_tokens=8191), {"pool"}),
        (replace(LOG, kv_unified=True, pool_tokens=8192), set()),
        (replace(LOG, kv_unified=True), {"pool"}),
        (replace(LOG, kv_unified=True, n_slots=1), set()),
        (replace(LOG, kv_type_k=None), {"kv-precision"}),
        (replace(LOG, slots_chosen_by_engine=True), {"parallel"}),
        (replace(LOG, prompt_cache_mib=8192), {"ram-cache"}),
        (replace(LOG, prompt_cache_mib=-1, idle_slots_cached=True), {"ram-cache", "idle-slots-cache"}),
        (replace(LOG, is_speculating=True), {"speculation-margin"}),
    ],
)
def test_what_a_log_breaks(log: StartupFacts, rules: set[str]) -> None:
    found = check(Seen(log=log), Wanted(2048, tenants=2))
    assert broken(found) == rules


def test_an_engine_alone_tells_of_its_slots_and_of_nothing_else() -> None:
    """What HTTP does not tell is not judged, and that is said of each rule."""
    found = check(Seen(engine()), Wanted(2048))
    assert (found.ok, found.findings) == (True, ())
    assert {rule for rule, _ in found.not_judged} == set(Rule) - {Rule.SOURCES, Rule.SLOT_CONTEXT}
    assert broken(check(Seen(engine(2047)), Wanted(2048))) == {"slot-context"}


@pytest.mark.parametrize(
    "seen",
    [
        Seen(engine(1024), LOG),
        Seen(engine(slots=6), LOG),
        Seen(engine(slots=6), command=read_line(GOOD)),
        Seen(log=replace(LOG, n_slots=6), command=read_line(GOOD)),
        Seen(engine(4096), command=read_line(GOOD)),
        Seen(engine(1024, n_ctx_train=4096), command=read_line(GOOD)),
        Seen(log=replace(LOG, pool_tokens=4096), command=read_line(GOOD)),
        Seen(log=replace(LOG, n_ctx_slot=2304), command=read_line(GOOD)),
    ],
)
def test_sources_of_different_starts_are_told(seen: Seen) -> None:
    """By the slots, by the whole cache, by what a slot has."""
    assert "sources-disagree" in broken(check(seen, Wanted(1)))


@pytest.mark.parametrize(
    "seen",
    [
        Seen(engine(2048, n_ctx_train=2048), command=read_line(GOOD.replace("8192", "16384"))),
        Seen(engine(512), command=read_line(GOOD.replace("-c 8192", "-c 1500"))),
        Seen(log=replace(LOG, n_ctx_slot=512, pool_tokens=2048), command=read_line(GOOD.replace("8192", "1500"))),
        Seen(log=replace(LOG, n_slots=1), command=read_line(GOOD.replace("-np 4", ""))),
        Seen(log=replace(LOG, pool_tokens=2048, is_speculating=True), command=read_line(GOOD + " -md draft.gguf")),
        Seen(engine(2048), command=read_line(GOOD.replace("--no-kv-unified", "--kv-unified"))),
    ],
)
def test_what_one_command_line_makes_of_itself_is_one_start(seen: Seen) -> None:
    """A slot that the model's training caps, or the build rounds up; one slot by default; a draft model's cache."""
    assert "sources-disagree" not in broken(check(seen, Wanted(1)))


@pytest.mark.parametrize(("flag", "given"), [("-np -1", "-np -1 is given"), ("", "-np is not given")])
def test_the_number_of_slots_is_told_as_it_stands(flag: str, given: str) -> None:
    line = GOOD.replace("-np 4", flag)
    found = next(one for one in of_line(line).findings if one.rule is Rule.PARALLEL)
    assert found.sentence.startswith(given)


def test_a_model_that_was_trained_for_less_is_no_matter_of_flags() -> None:
    found = check(Seen(engine(n_ctx_train=2048)), Wanted(4096))
    assert "another model" in found.findings[0].fix


def test_caches_are_a_warning_until_somebody_says_how_many_share_them() -> None:
    """One tenant may keep them; several are told; of an unknown number the operator is reminded."""
    line = GOOD.replace("--cache-ram 0 --no-cache-idle-slots", "")
    assert not of_line(line, tenants=1).findings
    assert {finding.level for finding in of_line(line).findings} == {Level.WARNING}
    assert of_line(line).ok
    assert not of_line(line, tenants=2).ok


def test_what_is_acknowledged_is_told_and_does_not_fail() -> None:
    found = of_line(GOOD + " --context-shift", acknowledged=frozenset({"context-shift"}))
    assert found.ok
    assert [finding.is_acknowledged for finding in found.findings] == [True]


@pytest.mark.parametrize(("margin", "ok"), [(0, False), (7, False), (8, True)])
def test_a_margin_as_long_as_the_draft_is_enough(margin: int, *, ok: bool) -> None:
    assert of_line(GOOD + " -md d.gguf --draft-max 8", margin_tokens=margin).ok == ok


@given(slots=st.integers(1, 64), least=st.integers(1, 2**17), context=st.integers(1, 2**20), unified=st.booleans())
def test_the_command_line_that_the_check_tells_to_use_passes_it(
    slots: int, least: int, context: int, *, unified: bool
) -> None:
    """CTX = PAR x per-slot need, whatever was found: what the fix says, taken word for word, is fine."""
    given = CommandLine(context_tokens=context, slots=slots, kv_unified=unified)
    found = check(Seen(command=given), Wanted(least))
    for finding in found.findings:
        if finding.rule in {Rule.SLOT_CONTEXT, Rule.POOL}:
            flags = re.findall(r"-c \d+ -np \d+|--no-kv-unified", finding.fix)
            told = read_line(" ".join(["llama-server", *flags]))
            after = broken(check(Seen(command=told), Wanted(least)))
            assert finding.rule.label not in after
            assert told.slots == slots


# -- how it is told

WORST = "llama-server -m x.gguf --context-shift -md d.gguf"


def test_a_junit_file_has_a_case_for_each_rule() -> None:
    """Failures are the errors that nobody acknowledged; what was not judged, or is wanted, is skipped."""
    found = of_line(WORST, tenants=2, acknowledged=frozenset({"context-shift"}))
    suite = ET.fromstring(as_junit(found))
    cases = {case.get("name"): case for case in suite}
    assert set(cases) == {rule.label for rule in Rule}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failed == {finding.rule.label for finding in found.findings} - {"context-shift"}
    assert {name for name, case in cases.items() if case.find("skipped") is not None} >= {"context-shift"}
    assert (suite.get("failures"), suite.get("tests")) == (str(len(failed)), str(len(Rule)))


def test_github_gets_one_annotation_a_finding_on_one_line() -> None:
    found = of_line(WORST, acknowledged=frozenset({"context-shift"}))
    lines = list(as_github(found))
    assert len(lines) == len(found.findings)
    kinds = {line.split(" ", 1)[0] for line in lines}
    assert kinds == {"::error", "::warning", "::notice"}
    assert all(re.match(r"::\w+ title=kvgate check%3A [a-z-]+::[^\n]+$", line) for line in lines)


def test_every_finding_is_told_with_what_to_do_in_every_form() -> None:
    found = of_line(WORST, tenants=2)
    lines, fields = "\n".join(as_lines(found, 2048)), as_fields(found, 2048)
    assert fields["ok"] is False
    for finding, told in zip(found.findings, fields["findings"], strict=True):
        assert f"error {finding.rule.label}: {finding.sentence}\n  to do: {finding.fix}" in lines
        assert (told["rule"], told["fix"]) == (finding.rule.label, finding.fix)


def test_every_rule_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    for rule in Rule:
        assert f"| `{rule.label}` | {rule.meaning.replace('-c ', '`-c` ').replace('-np ', '`-np` ')} |" in manual
