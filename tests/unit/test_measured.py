"""Two measurements compare where at most one variable differs; all else proves nothing, and the report says so."""

from __future__ import annotations

import copy
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.measured import VARIABLES, NotAReport, compare, desks
from kvgate.core.trend import SAMPLES_MIN, trend_of
from kvgate.lab.measure_page import bars, curve, page_of
from kvgate.lab.measure_runs import workload_for

REPORT: dict[str, Any] = {
    "report": 1,
    "engine": {
        "fingerprint": "abc",
        "build": "b1",
        "model": "small.gguf",
        "model_ftype": "Q4_1",
        "n_params": 135,
        "kv_type": "f16",
        "n_ctx_slot": 2048,
        "total_slots": 1,
        "topology": "divided",
        "is_speculating": False,
    },
    "machine": {"cpus": 2, "kind": "x86_64"},
    "workload": {"short_prompt_tokens": 64, "long_prompt_tokens": 2032},
    "allocation": {"weights_mib": 92.1, "kv_mib": None},
    "short": {"ttft_s": 0.5, "ttft_all_s": [0.5, 0.6], "tokens_per_second": 20.0},
    "long_prefill": {"ttft_s": 4.0},
    "long_generation": {"tokens_per_second": 18.0, "parts": [[10, 20.0], [20, 18.0]], "memory": [[0, 90], [1, 91]]},
    "parallel_control": {
        "desk_tokens": 2048,
        "runs": [
            {"at_once": at, "ttft_s": 1.0, "tokens_per_second_each": None, "output_tokens_per_second_together": 3.0}
            for at in (1, 4)
        ],
    },
    "production": {"clients": 2},
}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    report = copy.deepcopy(REPORT)
    for section, members in sections.items():
        report[section] |= members
    return report


def test_one_variable_is_compared_with_its_figures() -> None:
    other = changed(engine={"kv_type": "q8_0", "fingerprint": "def"}, short={"tokens_per_second": 30.0})
    found = compare(REPORT, other)
    assert (found.ok, found.same_fingerprint) == (True, False)
    assert [one.name for one in found.variables] == ["engine.kv_type"]
    speed = next(one for one in found.figures if one.name.startswith("short.tokens_per_second"))
    assert (speed.first, speed.second) == (20.0, 30.0)


def test_more_than_one_variable_proves_nothing_and_the_runs_that_would_are_named() -> None:
    """One run for each variable, changed alone."""
    found = compare(REPORT, changed(engine={"kv_type": "q8_0", "build": "b2"}))
    assert (found.ok, found.figures) == (False, ())
    assert "proves nothing" in found.refused
    assert found.to_do == (
        "as the first report, and only engine.build = 'b2' instead of 'b1'",
        "as the first report, and only engine.kv_type = 'q8_0' instead of 'f16'",
    )


def test_parallel_compares_on_equal_desks_alone() -> None:
    """1 slot of 2048 against 4 of 2048 is one variable; against 4 of 512 it is a smaller desk as well."""
    assert compare(REPORT, changed(engine={"total_slots": 4})).ok
    unequal = compare(REPORT, changed(engine={"total_slots": 4, "n_ctx_slot": 512}))
    assert not unequal.ok
    assert unequal.refused.startswith("unequal desks: 1 slots of 2048 tokens against 4 of 512")
    assert unequal.to_do == (
        "start with -c 2048 -np 1 --no-kv-unified",
        "start with -c 8192 -np 4 --no-kv-unified",
    )


def test_unequal_desks_hide_no_other_variable() -> None:
    """Whoever starts what is proposed must know that the precision differed as well; a workload follows the desk."""
    other = changed(
        engine={"total_slots": 4, "n_ctx_slot": 512, "kv_type": "q8_0"}, workload={"long_prompt_tokens": 496}
    )
    found = compare(REPORT, other)
    assert found.refused.endswith("; and engine.kv_type changed too")
    assert found.to_do == (
        "start with -c 2048 -np 1 --no-kv-unified, all else as in the first report",
        "start with -c 8192 -np 4 --no-kv-unified, all else as in the first report",
        "as the first report, and only engine.kv_type = 'q8_0' instead of 'f16'",
    )


def test_a_report_of_another_format_is_not_compared() -> None:
    with pytest.raises(NotAReport, match="has the format 2"):
        compare(REPORT, {**REPORT, "report": 2})


@given(st.sets(st.sampled_from(VARIABLES)))
def test_the_figures_are_shown_exactly_where_at_most_one_variable_differs(names: set[tuple[str, str]]) -> None:
    sections: dict[str, dict[str, Any]] = {}
    for section, member in names:
        sections.setdefault(section, {})[member] = 7777
    found = compare(REPORT, changed(**sections))
    assert {tuple(one.name.split(".")) for one in found.variables} == names
    assert found.ok == (len(names) <= 1) == bool(found.figures) == (not found.to_do)


@pytest.mark.parametrize("report", [{}, {"engine": 5, "workload": {}}, {"engine": {}}])
def test_what_is_no_report_is_refused(report: dict[str, Any]) -> None:
    with pytest.raises(NotAReport):
        compare(REPORT, report)


@pytest.mark.parametrize(
    ("topology", "slots", "pool", "found"),
    [
        ("divided", 4, 8192, (2048, 2048)),
        ("unified", 4, 2048, (2048, 512)),
        ("unified", 4, None, (2048, 512)),
        ("unified", 4, 8192, (2048, 2048)),
    ],
)
def test_a_desk_is_what_a_request_may_use(
    topology: str, slots: int, pool: int | None, found: tuple[int, int]
) -> None:
    assert desks(topology, 2048, slots, pool) == found


def test_nobody_knows_the_desks_of_an_unknown_topology() -> None:
    with pytest.raises(ValueError, match="kvgate probe --topology"):
        desks(None, 2048, 4, None)


@given(st.integers(64, 2**20), st.integers(64, 2**20))
def test_a_workload_fits_its_slot(n_ctx_slot: int, target: int) -> None:
    if target > n_ctx_slot:
        with pytest.raises(ValueError, match="more than a slot has"):
            workload_for(n_ctx_slot, target)
        return
    load = workload_for(n_ctx_slot, target)
    assert load.short_prompt_tokens + load.short_output_tokens <= n_ctx_slot
    assert load.long_prompt_tokens + 1 <= n_ctx_slot
    assert load.short_prompt_tokens + load.long_output_tokens <= n_ctx_slot


def test_a_trend_is_the_last_third_against_the_first() -> None:
    assert trend_of([1.0] * (SAMPLES_MIN - 1)) is None
    found = trend_of([100, 100, 900, 5, 5, 110, 110, 110, 110])
    assert found is not None
    assert (found.change, found.ratio) == (10, 0.1)


# -- the page


def test_the_page_is_well_formed_and_needs_nothing_beside_it() -> None:
    """No script, no link, no address: it opens years later on a machine without a network."""
    hostile = changed(engine={"model": '<script>"x"</script>&.gguf'})
    page = page_of(hostile)
    root = ET.fromstring(page.partition("\n")[2].replace('<meta charset="utf-8">', ""))
    assert {element.tag for element in root.iter()} <= {
        *("html", "head", "title", "style", "body", "h1", "h2", "table", "tr", "td"),
        *("svg", "path", "polyline", "text", "rect"),
    }
    assert "<script" not in page
    assert re.search(r"https?://|@import|url\(", page) is None
    assert page.count("<svg") == 6
    assert "not known" in page


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1))
def test_a_curve_stays_inside_its_plot(points: list[tuple[float, float]]) -> None:
    drawn = ET.fromstring(curve(points, "x", "y"))
    line = drawn.find("polyline")
    assert line is not None
    for pair in str(line.get("points")).split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 640
        assert 0 <= y <= 220


def test_a_bar_of_nothing_known_is_no_bar() -> None:
    drawn = ET.fromstring(bars([("a", None), ("b", 2.0)], "up"))
    assert [float(str(bar.get("height"))) > 0 for bar in drawn.iter("rect")] == [False, True]
