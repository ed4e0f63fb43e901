"""What simulations are judged by: fair splits, gaps over all intervals, ranks; and how they are drawn."""

from __future__ import annotations

import io
import itertools
import math
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.simulate import pictures
from loadtests.simulate.gaps import GapWatch
from loadtests.simulate.progress import Progress
from loadtests.simulate.results import Spread
from loadtests.simulate.shares import fairness, jain, max_min
from loadtests.simulate.terminal import bar, line, number, percent, table

AMOUNTS = st.one_of(st.floats(0, 1e6), st.just(math.inf))
TENANTS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.tuples(AMOUNTS, st.sampled_from([0.5, 1, 2, 64])), min_size=1
)


@given(tenants=TENANTS, total=st.floats(0, 1e6))
def test_a_fair_split_gives_all_it_has_and_nobody_more_than_wanted(
    tenants: dict[str, tuple[float, float]], total: float
) -> None:
    """Who wants more than it has has as much for its weight as anybody, and nobody more than those."""
    wanted, weights = ({name: pair[at] for name, pair in tenants.items()} for at in (0, 1))
    fair = max_min(total, wanted, weights)
    assert sum(fair.values()) == pytest.approx(min(total, sum(wanted.values())), abs=1e-6)
    for name, amount in fair.items():
        assert 0 <= amount <= wanted[name]
        if amount < wanted[name] - 1e-6:
            most = max(fair[other] / weights[other] for other in fair)
            assert amount / weights[name] == pytest.approx(most, abs=1e-6)


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_jains_index_is_between_one_nth_and_one(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9


def test_fairness_is_one_where_each_got_its_share_of_what_it_wanted() -> None:
    wanted = {"little": 10.0, "much": 1000.0, "more": math.inf, "silent": 0.0}
    weights = {"little": 1.0, "much": 1.0, "more": 3.0, "silent": 5.0}
    assert fairness({"little": 10, "much": 100, "more": 300, "silent": 0}, wanted, weights) == pytest.approx(1)
    assert fairness({"little": 10, "much": 400, "more": 0, "silent": 0}, wanted, weights) < 0.6
    assert fairness(dict.fromkeys(wanted, 0.0), wanted, weights) == 1


@dataclass
class Brute:
    """All intervals of all stretches, compared one by one."""

    service: dict[str, float]
    waiting: set[str] = field(default_factory=set)
    stretches: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    largest: float = 0.0

    def moment(self, changed: str = "") -> float:
        """The largest gap that ends now, of those whose service changed."""
        now = 0.0
        for pair in itertools.combinations(sorted(self.service), 2):
            if self.waiting.issuperset(pair):
                apart = self.service[pair[0]] - self.service[pair[1]]
                self.stretches.setdefault(pair, []).append(apart)
                gap = max(abs(apart - then) for then in self.stretches[pair])
                self.largest = max(self.largest, gap)
                now = max(now, gap if set(pair) & set(changed) else 0.0)
            else:
                self.stretches.pop(pair, None)
        return now


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("waits"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("leaves"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("served"), st.sampled_from(["a", "b", "c", "ab", "bc", "abc"]), st.integers(1, 9)),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_the_gap_is_the_largest_of_all_intervals_in_which_both_waited(steps: list[tuple[str, str, int]]) -> None:
    brute, watch = Brute(dict.fromkeys("abc", 0.0)), GapWatch(frozenset("abc"))
    for what, who, amount in steps:
        if what == "waits":
            watch.waits(who)
            brute.waiting.add(who)
        elif what == "leaves":
            watch.waits_no_more(who)
            brute.waiting.discard(who)
        else:
            for at, tenant in enumerate(who):
                brute.service[tenant] += amount + at
            now = watch.moment((tenant, brute.service[tenant]) for tenant in who)
            assert now == brute.moment(who)
        brute.moment()
    assert watch.largest == brute.largest


def test_ranks_are_of_what_was_seen() -> None:
    assert Spread.of([]) == Spread(0, 0, 0)
    assert Spread.of([3.0]) == Spread(3, 3, 3)
    assert Spread.of([float(n) for n in range(100, 0, -1)]) == Spread(50, 95, 100)


# -- drawing


def test_tables_line_up_and_lines_are_as_long_as_they_may_be() -> None:
    assert table(("a", "bb"), [["xyz", "1"], ["u", "222"]]) == "a     bb\n---  ---\nxyz    1\nu    222"
    assert line([], 5) == ""
    assert line([0, 1, 4, 8, 100], 8) == " ▁▄██"
    assert len(line([float(n) for n in range(1000)], 999, width=60)) == 60
    assert line([0.0] * 59 + [8.0] + [0.0] * 60, 8, width=10).count("█") == 1
    assert [number(v) for v in (0, 0.123, 12.34, 1234.5)] == ["0", "0.12", "12.3", "1,234"]
    assert percent(0.1234) == "12.3%"


@given(value=st.floats(0, 10), width=st.integers(2, 40))
def test_bars_have_their_width(value: float, width: int) -> None:
    assert len(bar(value, 5, width)) == width
    assert (bar(value, 5, width)[-1] == "▶") == (round(value / 5 * width * 8) > width * 8)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_tells_rate_and_remaining_time_on_a_terminal() -> None:
    now = [100.0]
    screen = Screen()
    progress = Progress(1000, screen, lambda: now[0])
    progress.begin("overload / vtc")
    now[0] += 10
    progress.told(250, 5000)
    assert "overload / vtc" in screen.getvalue()
    assert "25% 500 events/s, 0:30 left" in screen.getvalue()
    progress.end(500, 9000)
    now[0] += 10
    progress.begin("overload / fcfs")
    progress.told(0, 0)
    assert screen.getvalue().rstrip().endswith("50% 450 events/s, 0:20 left")


def test_progress_in_a_log_is_a_line_a_run() -> None:
    log = io.StringIO()
    progress = Progress(1000, log, lambda: 7.0)
    progress.begin("a")
    progress.told(100, 5)
    progress.end(500, 1234)
    assert log.getvalue() == "a: 1,234 events, 50% of all after 0:00\n"


def test_without_matplotlib_the_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(pictures.PlotsMissing, match=r"pip install 'kvgate\[plots\]'"):
        pictures.need_plots()
