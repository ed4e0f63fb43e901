"""Foreign traffic: seen within two looks where it is, and never where it is not."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.foreign import APART_S, QUIET_S, ForeignWatch, Tally, surplus

TIMES = st.floats(0, 30, allow_nan=False)
SHORT = st.floats(0, 3, allow_nan=False)


@dataclass(frozen=True)
class Stay:
    """Sequences in slots of a simulated engine, and the lease around them; a foreigner's has none."""

    granted_s: float
    busy_from_s: float
    busy_to_s: float
    freed_s: float
    sequences: int

    def holds(self, at_s: float) -> int:
        return self.sequences * (self.granted_s <= at_s < self.freed_s)

    def is_busy(self, at_s: float) -> int:
        return self.sequences * (self.busy_from_s <= at_s < self.busy_to_s)


@dataclass(frozen=True)
class Glance:
    """When a look was asked for, when the engine looked, and when its answer was read."""

    asked_s: float
    seen_s: float
    answered_s: float


@st.composite
def stays(draw: st.DrawFn) -> Stay:
    granted = draw(TIMES)
    busy_from = granted + draw(SHORT)
    busy_to = busy_from + draw(SHORT)
    return Stay(granted, busy_from, busy_to, busy_to + draw(SHORT), draw(st.integers(1, 3)))


@st.composite
def glances(draw: st.DrawFn) -> list[Glance]:
    """Looks one after the other, each of which may take seconds, as during a long prefill."""
    now, found = 0.0, []
    for _ in range(draw(st.integers(1, 20))):
        asked = now + draw(SHORT)
        seen = asked + draw(SHORT)
        now = seen + draw(SHORT)
        found.append(Glance(asked, seen, now))
    return found


def tally(own: list[Stay], at_s: float) -> Tally:
    return Tally(sum(one.holds(at_s) for one in own), sum(one.sequences for one in own if one.granted_s <= at_s))


def found_by(glance: Glance, own: list[Stay], foreign: list[Stay]) -> int:
    busy = sum(one.is_busy(glance.seen_s) for one in [*own, *foreign])
    return surplus(busy, tally(own, glance.asked_s), tally(own, glance.answered_s))


@given(st.lists(stays(), max_size=30), glances())
def test_the_gates_own_traffic_is_never_foreign(own: list[Stay], looks: list[Glance]) -> None:
    """Whenever the looks fall, and however late they are answered: nothing of one's own is taken for another's."""
    watch = ForeignWatch()
    for glance in looks:
        assert found_by(glance, own, []) == 0
        watch = watch.looked(found_by(glance, own, []), glance.asked_s, glance.answered_s)
    assert watch.sightings == 0


@given(st.lists(stays(), max_size=20), st.lists(stays(), max_size=5), glances())
def test_no_more_is_called_foreign_than_there_was(own: list[Stay], foreign: list[Stay], looks: list[Glance]) -> None:
    watch = ForeignWatch()
    for glance in looks:
        found = found_by(glance, own, foreign)
        assert found <= sum(one.is_busy(glance.seen_s) for one in foreign)
        watch = watch.looked(found, glance.asked_s, glance.answered_s)
        assert watch.slots <= found


@given(st.lists(stays(), max_size=20), glances(), st.integers(1, 4))
def test_who_stays_while_the_gate_is_idle_is_seen(own: list[Stay], looks: list[Glance], slots: int) -> None:
    """Two looks after the gate's own traffic, a second apart, see all of a foreigner that stays."""
    own = [one for one in own if one.freed_s < 20]
    foreign = [Stay(0, 0, 10_000, 10_000, slots)]
    watch = ForeignWatch()
    for glance in looks:
        watch = watch.looked(found_by(glance, own, foreign), glance.asked_s, glance.answered_s)
    for at in range(2):
        asked = 1000.0 + at * (APART_S + 1)
        glance = Glance(asked, asked, asked + 0.01)
        watch = watch.looked(found_by(glance, own, foreign), glance.asked_s, glance.answered_s)
    assert watch.is_on
    assert watch.slots == slots


def test_one_look_is_no_proof() -> None:
    """Nor are many within a second: a slot that is freed a moment late is nobody else's."""
    watch = ForeignWatch().looked(1, 10, 10.01)
    for at in range(9):
        watch = watch.looked(1, 10.1 + at / 10, 10.11 + at / 10)
        assert not watch.is_on
        assert watch.wants_look
    assert watch.looked(1, 11.02, 11.03).is_on


def test_a_look_without_surplus_or_without_answer_breaks_the_run() -> None:
    suspicious = ForeignWatch().looked(1, 10, 10.01)
    assert not suspicious.looked(0, 11, 11.01).looked(1, 13, 13.01).is_on
    assert not suspicious.unseen(12).looked(1, 13, 13.01).is_on
    assert not suspicious.looked(0, 11, 11.01).wants_look


def test_a_look_that_comes_too_soon_to_prove_more_can_prove_less() -> None:
    """Slots that are idle are nobody's, whenever that is seen."""
    on = ForeignWatch().looked(2, 0, 0).looked(2, 2, 2)
    assert on.slots == 2
    assert on.looked(1, 2.1, 2.1).slots == 1
    assert on.looked(3, 2.1, 2.1).slots == 2


def test_a_surplus_that_flickers_is_one_episode() -> None:
    """A granted lease that is not in its slot yet hides a foreigner for a look or two."""
    watch = ForeignWatch()
    for at, found in enumerate((1, 1, 0, 0, 2, 2, 0, 1, 1)):
        watch = watch.looked(found, at * 2, at * 2 + 0.01)
    assert (watch.sightings, watch.most, watch.slots) == (1, 2, 1)


def test_an_episode_ends_when_nothing_was_seen_for_a_while() -> None:
    """Also where the engine is gone and no look has an answer; the next one counts as another."""
    on = ForeignWatch().looked(1, 0, 0).looked(2, 2, 2)
    assert (on.slots, on.seen_at_s) == (1, 2)
    for ended in (on.looked(0, 2 + QUIET_S, 2 + QUIET_S), on.unseen(2 + QUIET_S)):
        assert not ended.is_on
        assert (ended.slots, ended.most, ended.wants_look) == (0, 0, False)
        assert ended.warning(100) is None
        assert ended.looked(1, 100, 100).looked(1, 102, 102).sightings == 2
    assert on.looked(0, 3, 3).is_on


def test_the_warning_says_how_much_when_and_what_to_do() -> None:
    one, three = (ForeignWatch().looked(n, 0, 0).looked(n, 2, 2) for n in (1, 3))
    words = one.warning(14) or ""
    assert "1 busy slot more than leases (seen 12 s ago)" in words
    assert "Close the engine's port" in words
    assert "drain" not in words
    assert "3 busy slots more" in (three.warning(14) or "")


def test_what_a_drain_left_behind_is_named_as_a_possible_cause() -> None:
    """A drain that ended by time leaves a slot at work with no lease: it looks the same and is kvgate's own."""
    words = ForeignWatch().looked(1, 0, 0).looked(1, 2, 2).warning(3, overdue=2) or ""
    assert "2 drains have ended by drain_max_s" in words
