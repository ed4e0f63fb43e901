"""Simulations of the serving ledger: no token is lost, and what is promised of fairness is seen."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.core.pool import KvPool
from loadtests.simulate.__main__ import main
from loadtests.simulate.compare import compare
from loadtests.simulate.lengths import Lengths
from loadtests.simulate.policies import DRAIN, POLICIES, policy
from loadtests.simulate.results import result
from loadtests.simulate.scenarios import SCENARIOS, crowd
from loadtests.simulate.simulation import Simulation
from loadtests.simulate.speed import SMALL, Engine
from loadtests.simulate.workloads import Phase, Sender, Workload

if TYPE_CHECKING:
    from loadtests.simulate.results import Result

ROOT = Path(__file__).parents[2]
BRIEF_S = 90.0


def brief(name: str) -> Workload:
    return (crowd(1, 40) if name == "crowd" else SCENARIOS[name](1)).lasting(BRIEF_S)


@pytest.mark.parametrize(("name", "rule"), list(itertools.product(sorted(SCENARIOS), POLICIES)))
def test_no_request_and_no_token_is_lost_or_made_up(name: str, rule: str) -> None:
    """What was sent is finished, runs, waits or was refused; service is what the engine read and gave."""
    workload = brief(name)
    simulation = Simulation(workload, policy(rule, workload))
    measures = simulation.run()
    engine = simulation.engine
    running = sum(tally.running for tally in measures.tallies.values())
    assert running == engine.running
    for tally in measures.tallies.values():
        assert tally.sent == tally.finished + tally.running + len(tally.queue) + tally.refused.total()
        assert tally.service == pytest.approx(tally.input_tokens + 2 * tally.output_tokens)
        assert len(tally.waits_s) == tally.finished + tally.running
    read = sum(tally.input_tokens for tally in measures.tallies.values())
    assert read - engine.prompt_tokens_unread == engine.prompt_tokens_read
    assert measures.busy_slot_s <= workload.engine.pool.slots * BRIEF_S + 1e-6
    assert sum(tally.finished for tally in measures.tallies.values()) > 0


def figures(found: list[Result]) -> str:
    return json.dumps([{k: v for k, v in each.as_json().items() if k != "took_s"} for each in found])


def test_a_simulation_is_the_same_for_the_same_seed() -> None:
    once, again = (figures(compare(brief("poisson"), POLICIES)) for _ in range(2))
    assert once == again
    assert once != figures(compare(SCENARIOS["poisson"](2).lasting(BRIEF_S), POLICIES))


def test_eight_tenants_get_service_by_weights_of_1_to_128() -> None:
    """Within 2% of weight each, Jain's index at least 0.99, and the gap inside the bound at every event."""
    (vtc,) = compare(SCENARIOS["weights"](1), ["vtc"])
    for tenant in vtc.tenants:
        assert tenant.of_fair == pytest.approx(1, abs=0.02), tenant.name
    assert vtc.jain >= 0.99
    assert vtc.ruling.bound is not None
    assert vtc.gap <= vtc.ruling.bound
    assert vtc.ruling.voids == ()
    assert vtc.idle_for_nothing_s == 0


def test_the_papers_ordering_under_constant_overload_with_unequal_senders() -> None:
    """In order of arrival the loudest takes most; limits of requests waste the engine or are unfair; VTC is neither.

    After arXiv 2401.00588, section 5.
    """
    workload = SCENARIOS["overload"](1).lasting(300)
    even = workload.even_requests_per_minute
    rules = ("fcfs", f"rpm:{even // 2}", f"rpm:{even * 4}", "vtc")
    fcfs, low, high, vtc = compare(workload, rules)
    quiet, loud = fcfs.tenants[0], fcfs.tenants[-1]
    assert loud.service > 5 * quiet.service
    assert fcfs.jain < 0.75
    assert low.tokens_per_s < 0.7 * vtc.tokens_per_s
    assert low.slots_busy < 0.7
    assert high.jain < 0.9
    assert vtc.jain > 0.99
    assert vtc.tokens_per_s > 0.95 * fcfs.tokens_per_s
    assert vtc.idle_for_nothing_s == 0
    assert vtc.slots_busy > 0.99
    assert vtc.ruling.bound is not None
    assert vtc.gap < vtc.ruling.bound < fcfs.gap
    assert vtc.gap < min(low.gap, high.gap)


def test_who_asks_for_less_than_its_share_hardly_waits_beside_a_flood() -> None:
    """Least service first lets the modest in at once; in order of arrival it waits behind all that the loud sent."""
    fcfs, vtc = compare(SCENARIOS["on-off"](1).lasting(300), ["fcfs", "vtc"])
    modest = {found.policy: next(t for t in found.tenants if t.name == "modest") for found in (fcfs, vtc)}
    assert modest["vtc"].wait_s.p95 < 5 < modest["fcfs"].wait_s.p95
    assert modest["vtc"].of_fair > 0.99
    assert modest["vtc"].starved_s < 5 < modest["fcfs"].starved_s


def test_a_guarantee_holds_against_a_flood_of_long_prompts() -> None:
    """The victim's first token comes no later with its guarantee, and far earlier than in order of arrival."""
    fcfs, vtc, tiers = compare(SCENARIOS["flood"](1).lasting(450), ["fcfs", "vtc", "vtc-tiers"])
    late = [found.tenants[0].first_token_s.p95 for found in (fcfs, vtc, tiers)]
    assert late[2] <= late[1] < late[0] / 10
    assert tiers.idle_for_nothing_s == vtc.idle_for_nothing_s == 0
    assert "tiers" in tiers.ruling.voids
    assert (vtc.idle_slot_s.get(DRAIN, 0) > 0) == (vtc.ruling.drain_idle_s > 0)
    assert vtc.ruling.bypasses > 0


def test_one_that_fits_is_found_behind_forty_that_do_not() -> None:
    """Work conservation however many stand before it; what idles is drained for, and the ledger counts it."""
    (vtc,) = compare(SCENARIOS["blocked"](1).lasting(200), ["vtc"])
    assert vtc.idle_for_nothing_s == 0
    assert vtc.ruling.bypasses > 0
    assert vtc.slots_busy > 0.7


def test_who_was_away_has_saved_up_nothing() -> None:
    """Two send without a pause, one of them from half-time on: from then on each gets half."""
    kind = SCENARIOS["overload"](1).senders[-1]
    always, late = (replace(kind, name=name, phases=kind.phases) for name in ("always", "late"))
    late = replace(late, phases=(Phase(0, 0), Phase(200, kind.phases[0].requests_per_s)))
    (vtc,) = compare(Workload("late", "", SMALL, (always, late), 400), ["vtc"])
    half = max(sample.service["always"] for sample in vtc.samples if sample.at_s <= 200)
    first, second = (tenant.service for tenant in vtc.tenants)
    assert second == pytest.approx(first - half, rel=0.05)
    assert vtc.gap < 5000


SENDERS = st.lists(
    st.builds(
        lambda prompts, outputs, from_s, rate, weight, standing: (prompts, outputs, (from_s, rate), weight, standing),
        st.integers(1, 400),
        st.integers(1, 60),
        st.sampled_from([0, 20]),
        st.sampled_from([0.2, 2, 12]),
        st.sampled_from([1, 2, 5]),
        st.sampled_from([0, 0, 4]),
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(senders=SENDERS, slots=st.integers(1, 5), unified=st.booleans(), seed=st.integers(0, 99))
def test_whatever_is_asked_the_bound_holds_and_nothing_stands_idle(
    senders: list[tuple[int, int, tuple[float, float], float, int]], slots: int, unified: bool, seed: int
) -> None:
    """Any tenants on any pool: the engine never overflows, and no slot is free beside a request that fits.

    Drains excepted; and where nothing voids the bound, no two tenants that wait are farther apart.
    """
    pool = KvPool(tokens=700 if unified else 500 * slots, slots=slots, tokens_per_slot=500, prompt_shared=unified)
    made = tuple(
        Sender(
            f"t{at}",
            () if standing else (Phase(0, 0), Phase(*load)),
            Lengths.between(max(prompts // 2, 1), prompts),
            Lengths.between(1, outputs),
            weight,
            poisson=bool(seed % 2),
            standing=standing,
        )
        for at, (prompts, outputs, load, weight, standing) in enumerate(senders)
    )
    workload = Workload("any", "", Engine(pool, SMALL.speed), made, 40, seed)
    (vtc,) = compare(workload, ["vtc"])
    assert vtc.idle_for_nothing_s == 0
    assert vtc.ruling.bound is not None
    if not vtc.ruling.voids:
        assert vtc.gap <= vtc.ruling.bound


def test_who_loses_patience_leaves_the_queue() -> None:
    workload = brief("overload")
    (patient,), (hasty,) = compare(workload, ["vtc"]), compare(workload, ["vtc"], patience_s=10)
    assert hasty.wait_s.most <= 10 + 1e-9 < patient.wait_s.most
    assert hasty.refused == {"gave up waiting": hasty.sent - hasty.finished - hasty.waiting - 8}
    assert patient.refused == {}


def test_there_is_no_policy_of_another_name() -> None:
    workload = brief("overload")
    assert policy("rpm:7", workload).ledger is not policy("rpm:7", workload).ledger
    for name in ("fifo", "rpm:0", "rpm:x", "vtc:3", ""):
        with pytest.raises(ValueError, match="there is no policy"):
            policy(name, workload)


# -- the command


def test_the_command_prints_tables_lines_and_what_voids_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flood", "--duration-s", "120"]) == 0
    said = capsys.readouterr()
    for rule in POLICIES:
        assert f"-- flood, {rule}: tenants" in said.out
    assert "the bound does not cover what happened: bypass, tiers" in said.out
    assert "█" in said.out
    assert "flood / vtc: " in said.err


def test_the_command_tells_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overload", "--duration-s", "60", "--policies", "vtc", "rpm:9", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    vtc, rpm = found["results"]
    assert (found["workload"], vtc["policy"], rpm["policy"]) == ("overload", "vtc", "rpm:9")
    assert vtc["gap"] <= vtc["ruling"]["bound"]
    assert rpm["refused"] == {"requests_per_minute": sum(t["refused"] for t in rpm["tenants"])}
    assert all(len(rpm[key]) == 3 for key in ("wait_s", "first_token_s"))


def test_json_has_no_infinite_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Who would send for ever wants no number of tokens."""
    assert main(["weights", "--duration-s", "20", "--policies", "vtc", "--json"]) == 0
    text = capsys.readouterr().out
    assert "Infinity" not in text
    assert "NaN" not in text


def test_an_engines_file_makes_the_same_load_for_that_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.json"
    slow = replace(SMALL, pool=KvPool(2048, 2, 1024), speed=replace(SMALL.speed, prefill_tokens_per_s=200))
    path.write_text(json.dumps(slow.as_json()))
    assert main(["overload", "--duration-s", "120", "--policies", "vtc", "--engine", str(path)]) == 0
    assert "engine: 2 slots, 2,048 cells, prefill 200 tokens/s" in capsys.readouterr().out


def test_what_is_wrong_is_said_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overload", "--engine", str(tmp_path / "none.json")]) == 2
    assert "calibrate URL --save FILE" in capsys.readouterr().err
    assert main(["calibrate", "http://127.0.0.1:9"]) == 2
    assert "is llama-server running there?" in capsys.readouterr().err
    for wrong, said in (("overlord", "there are overload, on-off"), ("--duration-s=-1", "must be above 0")):
        with pytest.raises(SystemExit):
            main([wrong])
        assert said in capsys.readouterr().err


def test_pictures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["overload", "--duration-s", "60", "--policies", "fcfs", "vtc", "--png", str(tmp_path)]) == 0
    assert "drawn: " in capsys.readouterr().err
    for name in ("overload-service.png", "overload-gap.png"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 100_000


def test_a_run_without_events_has_figures_all_the_same() -> None:
    silent = replace(SCENARIOS["overload"](1).senders[0], phases=(Phase(0, 0.0),))
    workload = Workload("silent", "", SMALL, (silent,), 10)
    simulation = Simulation(workload, policy("vtc", workload))
    found = result(simulation.run(), "vtc", simulation.policy.ruling(10), 0.0)
    assert (found.tokens_per_s, found.slots_busy, found.jain, found.gap) == (0, 0, 1, 0)


# -- its page


def test_the_page_names_every_workload_policy_and_option_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    """What can be typed is explained, and what is shown can be typed."""
    page = (ROOT / "docs/fairness-simulator.md").read_text()
    tables = set(re.findall(r"^\| `([a-z-]+)`", page, re.MULTILINE))
    assert tables >= {*SCENARIOS, *POLICIES}
    options = ""
    for command in (["--help"], ["calibrate", "--help"]):
        with pytest.raises(SystemExit):
            main(command)
        options += capsys.readouterr().out
    shown = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page) if flag != "--no-kv-unified"}
    assert shown <= set(re.findall(r"--[a-z-]+", options))


def test_the_pages_pictures_are_there_and_small() -> None:
    page = (ROOT / "docs/fairness-simulator.md").read_text()
    linked = re.findall(r"\]\(([^)]+)\)", page)
    assert linked
    for name in linked:
        assert 0 < (ROOT / "docs" / name).stat().st_size < 100_000
