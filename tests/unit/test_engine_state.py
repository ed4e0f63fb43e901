"""The engine's life: each state has its sentence, each change its figures, and both end by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgate.core.engine_state import (
    CHANGE_WARNED_S,
    Change,
    Changed,
    EngineLife,
    EngineState,
    Look,
    Trouble,
    change_between,
    lasting,
    look_refused,
)
from kvgate.core.profile import Fact, Source, Topology
from kvgate.core.reason import Reason
from tests.unit.doubles import profile

SERVING = Look(EngineState.SERVING)
GONE = look_refused(Reason.ENGINE_UNREACHABLE, "http://host:1: Connect call failed", Trouble.REFUSED)


def life(*looks: tuple[float, Look]) -> EngineLife:
    found = EngineLife(0)
    for at_s, look in looks:
        found = found.looked(look, at_s)
    return found


# -- states


def test_every_state_is_a_row_of_its_own() -> None:
    """Labels do not repeat, each row tells what to do, and what is not served has a reason that says 503."""
    assert len({state.label for state in EngineState}) == len(EngineState)
    for state in EngineState:
        assert state.value.to_do
        assert state.is_served is (state in {EngineState.SERVING, EngineState.ASLEEP})
        assert state.value.reason is None or state.value.reason.status == 503


@pytest.mark.parametrize(
    ("reason", "trouble", "state"),
    [
        (Reason.ENGINE_LOADING, None, EngineState.LOADING),
        (Reason.ENGINE_UNDERSIZED, None, EngineState.UNDERSIZED),
        (Reason.ENGINE_UNKNOWN, None, EngineState.UNKNOWN),
        (Reason.ENGINE_UNREACHABLE, Trouble.SILENT, EngineState.HUNG),
        *((Reason.ENGINE_UNREACHABLE, one, EngineState.UNREACHABLE) for one in Trouble if one is not Trouble.SILENT),
    ],
)
def test_a_refused_look_is_a_state(reason: Reason, trouble: Trouble | None, state: EngineState) -> None:
    assert look_refused(reason, "", trouble).state is state


@pytest.mark.parametrize("trouble", [None, *Trouble])
@pytest.mark.parametrize("state", list(EngineState))
@pytest.mark.parametrize("begun", [[], [(1.0, SERVING)]])
def test_every_state_has_a_whole_sentence(
    state: EngineState, trouble: Trouble | None, begun: list[tuple[float, Look]]
) -> None:
    sentence = life(*begun, (9, Look(state, "that", trouble))).sentence(10)
    assert len(sentence) > 10
    assert not set("{}") & set(sentence)
    assert "  " not in sentence


def test_an_engine_that_was_never_reached_is_told_from_one_that_is_gone() -> None:
    """The first is a mistake in the address or not started yet; the second has crashed."""
    never = life((1, GONE)).sentence(5)
    assert "never been reached" in never
    assert "Start the engine, or correct the port in engine.url" in never
    gone = life((1, SERVING), (10, SERVING), (11, GONE)).sentence(22)
    assert "it was serving until 12 s ago and is gone" in gone
    assert "nothing listens there (http://host:1: Connect call failed)" in gone
    assert "crashed" in gone
    loading = Look(EngineState.LOADING)
    assert "it was loading its model until 3 s ago and is gone" in life((1, loading), (2, GONE)).sentence(4)


@pytest.mark.parametrize("trouble", list(Trouble))
def test_each_trouble_says_what_to_check(trouble: Trouble) -> None:
    """No route, no name and nobody there are mended in different places."""
    sentence = life((1, look_refused(Reason.ENGINE_UNREACHABLE, "x", trouble))).sentence(2)
    assert trouble.value.what in sentence
    assert (trouble.value.check in sentence) is (trouble is not Trouble.SILENT)


def test_a_state_has_lasted_since_it_began() -> None:
    found = life((1, SERVING), (5, GONE), (6, GONE), (7, GONE))
    assert found.told(9)["since_s"] == 4
    assert found.looked(SERVING, 10).told(12) == {
        "state": "serving",
        "sentence": "the engine serves",
        "since_s": 2,
        "changed": None,
    }


def test_sleep_is_a_warning_and_no_problem() -> None:
    asleep = life((1, Look(EngineState.ASLEEP)))
    assert asleep.state.is_served
    assert asleep.warnings(2) == [
        "the engine is asleep: the next request wakes it and waits until the model is loaded"
    ]
    assert life((1, SERVING)).warnings(2) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h")],
)
def test_a_stretch_of_time_is_one_figure(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


# -- changes

BEFORE = profile(1024, 2, model_path="/m/a.gguf", n_params=7)


def successor(**changes: Any) -> Any:
    return replace(BEFORE, instance="<two>", **changes)


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (successor(), Change.RESTARTED),
        (successor(n_ctx_slot=Fact(512, Source.PROPS)), Change.SMALLER),
        (successor(n_ctx_slot=Fact(2048, Source.PROPS)), Change.LARGER),
        (successor(pool_tokens=Fact(1024, Source.LOG)), Change.SMALLER),
        (successor(total_slots=Fact(1, Source.PROPS)), Change.SMALLER),
        (successor(n_ctx_slot=Fact(2048, Source.PROPS), total_slots=Fact(1, Source.PROPS)), Change.LARGER),
        (successor(model_path="/m/b.gguf"), Change.OTHER_MODEL),
        (successor(n_params=8, n_ctx_slot=Fact(512, Source.PROPS)), Change.OTHER_MODEL),
        (successor(build="b2"), Change.OTHER_SETUP),
        (successor(models=("other",)), Change.OTHER_SETUP),
        (successor(chat_template_sha256="0" * 64), Change.OTHER_SETUP),
        (successor(kv_type_k=Fact("q8_0", Source.LOG), kv_type_v=Fact("f16", Source.LOG)), Change.OTHER_SETUP),
        (successor(topology=Fact(Topology.UNIFIED, Source.LOG)), Change.OTHER_SETUP),
        # Facts by another proof are the same facts.
        (successor(topology=Fact(Topology.DIVIDED, Source.LOG)), Change.RESTARTED),
    ],
)
def test_a_successor_is_told_by_what_differs(now: Any, what: Change) -> None:
    found = change_between(BEFORE, now)
    assert found is not None
    assert found.what is what


def test_more_that_is_known_of_one_process_is_no_change() -> None:
    """A log that is found late tells the topology of the engine that was there all the time."""
    assert change_between(BEFORE, replace(BEFORE, topology=Fact(Topology.UNIFIED, Source.LOG))) is None
    assert change_between(BEFORE, BEFORE) is None


def test_without_a_mark_of_its_own_a_successor_is_told_by_its_facts() -> None:
    before = replace(BEFORE, instance=None)
    found = change_between(before, replace(before, n_ctx_slot=Fact(512, Source.PROPS)))
    assert found == Changed(Change.SMALLER, (("n_ctx_slot", 1024, 512),))


def test_a_replacement_is_a_warning_with_its_figures_for_an_hour() -> None:
    smaller = successor(n_ctx_slot=Fact(512, Source.PROPS), pool_tokens=Fact(1024, Source.PROPS))
    found = life((1, SERVING)).replaced(BEFORE, smaller, 100)
    (warning,) = found.warnings(280)
    assert warning.startswith(
        "the engine was replaced by a smaller one 3 min ago: n_ctx_slot 1024 -> 512, pool_tokens 2048 -> 1024; "
        "requests that fitted before are refused now"
    )
    assert found.told(280)["changed"] == {
        "what": "smaller",
        "sentence": warning.partition(". This")[0],
        "ago_s": 180,
        "figures": {"n_ctx_slot": [1024, 512], "pool_tokens": [2048, 1024]},
    }
    assert found.warnings(100 + CHANGE_WARNED_S) == []
    assert found.told(100 + CHANGE_WARNED_S)["changed"] is None


def test_a_restart_is_told_and_not_warned_of() -> None:
    found = life((1, SERVING)).replaced(BEFORE, successor(), 100)
    assert found.warnings(101) == []
    assert found.told(101)["changed"]["what"] == "restarted"


def test_the_warning_ends_when_the_old_figures_are_back() -> None:
    """And a restart of the smaller one does not hide that it is smaller."""
    smaller = successor(n_ctx_slot=Fact(512, Source.PROPS))
    again = replace(smaller, instance="<three>")
    back = replace(BEFORE, instance="<four>")
    found = life((1, SERVING)).replaced(BEFORE, smaller, 100).replaced(smaller, again, 200)
    assert "n_ctx_slot 1024 -> 512" in found.warnings(201)[0]
    assert found.replaced(again, back, 300).warnings(301) == []


def test_a_change_after_the_hour_is_compared_with_what_was_there_last() -> None:
    smaller = successor(n_ctx_slot=Fact(512, Source.PROPS))
    larger = replace(BEFORE, instance="<three>")
    found = life((1, SERVING)).replaced(BEFORE, smaller, 0).replaced(smaller, larger, CHANGE_WARNED_S + 1)
    assert "larger one 5 s ago: n_ctx_slot 512 -> 1024" in found.warnings(CHANGE_WARNED_S + 6)[0]
