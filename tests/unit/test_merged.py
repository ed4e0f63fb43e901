"""Several workers answer the operator as one gate would."""

from __future__ import annotations

from typing import Any

from kvgate.admin.merged import merged_readiness, merged_status


def readiness(*problems: str, warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    engine = {"state": "serving", "sentence": "the engine serves"}
    return {"ready": not problems, "problems": list(problems), "warnings": list(warnings), "engine": engine}


def gone(sentence: str, *others: str) -> dict[str, Any]:
    """A worker that has lost its engine, and says so."""
    return {**readiness(sentence, *others), "engine": {"state": "unreachable", "sentence": sentence}}


def test_all_are_ready_or_none_is() -> None:
    """A problem of one is a problem: the kernel sends it its share of the requests."""
    assert merged_readiness({1: readiness(), 2: readiness()})["ready"] is True
    found = merged_readiness({1: readiness(), 2: readiness("the store is out")})
    assert (found["ready"], found["problems"]) == (False, ["the store is out"])


def test_what_several_say_is_said_once() -> None:
    found = merged_readiness({1: readiness("a", warnings=("b", "c")), 2: readiness("a", warnings=("c", "d"))})
    assert (found["problems"], found["warnings"]) == (["a"], ["b", "c", "d"])


def test_an_engine_that_is_gone_is_one_problem() -> None:
    """Each worker has its own clock, and may have met its end in other words."""
    found = merged_readiness(
        {1: gone("gone, it served until 4 s ago: no"), 2: gone("gone, it served until 2 min ago: no")}
    )
    assert found["problems"] == ["gone, it served until 4 s ago: no"]
    found = merged_readiness(
        {1: gone("gone: refused"), 2: gone("gone: cut", "the store is out"), 3: gone("gone: cut")}
    )
    assert found["problems"] == ["gone: refused", "the store is out"]
    status = {**gone("gone: cut"), "engine": None, "engine_life": {"state": "unreachable", "sentence": "gone: cut"}}
    assert merged_status({1: {**status, "problems": ["gone: cut"]}, 2: status})["problems"] == ["gone: cut"]


def test_what_differs_in_more_than_a_time_is_said_of_each() -> None:
    found = merged_readiness(
        {1: readiness(warnings=("seen 3 s ago: 1 slot",)), 2: readiness(warnings=("seen 4 s ago: 2 slots",))}
    )
    assert found["warnings"] == ["seen 3 s ago: 1 slot", "seen 4 s ago: 2 slots"]


def test_a_worker_that_is_down_is_a_warning_while_another_serves() -> None:
    found = merged_readiness({1: None, 2: readiness()})
    assert (found["ready"], found["workers"]) == (True, 1)
    assert found["warnings"] == ["worker 1 of 2 does not answer; it is being started again"]
    found = merged_readiness({1: None, 2: None})
    assert (found["ready"], found["problems"], found["workers"]) == (False, ["no worker answers"], 0)


def test_the_status_adds_what_each_has_for_itself() -> None:
    one = {
        **readiness(),
        "pid": 7,
        "in_flight": 2,
        "upstream_connections": 3,
        "tasks": 9,
        "ledger": {"running": 5},
        "engine": 1,
        "engine_life": {"state": "serving", "sentence": "the engine serves"},
    }
    found = merged_status({1: one, 2: {**one, "in_flight": 3}, 3: None})
    assert (found["in_flight"], found["upstream_connections"], found["tasks"]) == (5, 6, 18)
    assert (found["ledger"], found["engine"]) == ({"running": 5}, 1)
    assert found["workers"] == {
        1: {"pid": 7, "in_flight": 2, "upstream_connections": 3, "tasks": 9},
        2: {"pid": 7, "in_flight": 3, "upstream_connections": 3, "tasks": 9},
        3: None,
    }
    assert found["warnings"] == ["worker 3 of 3 does not answer; it is being started again"]
