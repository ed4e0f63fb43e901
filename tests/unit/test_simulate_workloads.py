"""Workloads: lengths fit their percentages, the same seed asks the same, and rates are what they say."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.simulate.lengths import HEAVY_TAILED, Lengths
from loadtests.simulate.scenarios import CHAT_OUTPUTS, CHAT_PROMPTS, LONG_OUTPUTS, SCENARIOS
from loadtests.simulate.speed import SMALL
from loadtests.simulate.workloads import Phase, Sender, Workload, mean_capacity

DRAWS = 20_000
CHATS = Sender("t", (Phase(0, 1.0),), CHAT_PROMPTS, CHAT_OUTPUTS)


def drawn(lengths: Lengths, count: int = DRAWS) -> list[int]:
    random = Random(7)
    return [lengths.draw(random) for _ in range(count)]


def test_the_heavy_tail_is_80_percent_under_2k_and_92_under_8k_up_to_128k() -> None:
    """20,000 draws: five standard errors are 1.4 and 1 percent."""
    found = drawn(HEAVY_TAILED)
    assert sum(n < 2_048 for n in found) / DRAWS == pytest.approx(0.80, abs=0.014)
    assert sum(n < 8_192 for n in found) / DRAWS == pytest.approx(0.92, abs=0.010)
    assert 100_000 < max(found) <= 131_072
    assert min(found) >= 32


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_every_tenants_lengths_fit_their_quantiles(name: str) -> None:
    lengths = {of for sender in SCENARIOS[name](1).senders for of in (sender.prompts, sender.outputs)}
    for of in lengths:
        found = drawn(of, 5_000)
        for share, tokens in of.quantiles:
            below, up_to = (sum(n < most for n in found) / len(found) for most in (tokens, tokens + 1))
            assert below - 0.03 <= share <= up_to + 0.03
            if of.quantiles[0][1] < of.longest:
                assert below == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("lengths", [CHAT_PROMPTS, CHAT_OUTPUTS, LONG_OUTPUTS, HEAVY_TAILED, Lengths.always(9)])
def test_the_mean_is_the_mean_of_draws(lengths: Lengths) -> None:
    found = drawn(lengths, 200_000)
    assert sum(found) / len(found) == pytest.approx(lengths.mean(), rel=0.03, abs=0.6)


@pytest.mark.parametrize(
    "quantiles",
    [((0.0, 5), (0.5, 9)), ((0.0, 0), (1.0, 9)), ((0.0, 9), (1.0, 5)), ((0.0, 1), (0.5, 2), (0.5, 3), (1.0, 4))],
)
def test_what_is_no_distribution_is_refused(quantiles: tuple[tuple[float, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"quantiles go|longer share"):
        Lengths(quantiles)


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {"crowd"}))
def test_a_workload_is_the_same_for_the_same_seed(name: str) -> None:
    once, again, other = (list(SCENARIOS[name](seed).requests()) for seed in (3, 3, 4))
    standing = [[next(s.sized(seed)) for s in SCENARIOS[name](1).senders] for seed in (3, 3, 4)]
    assert (once, standing[0]) == (again, standing[1])
    assert (once, standing[0]) != (other, standing[2])
    assert [r.at_s for r in once] == sorted(r.at_s for r in once)
    assert len({r.lease_id for r in once}) == len(once)


@given(rate=st.floats(0.5, 5), poisson=st.booleans(), seed=st.integers(0, 99))
def test_requests_come_at_their_rate_in_their_phase(rate: float, poisson: bool, seed: int) -> None:
    sender = replace(CHATS, phases=(Phase(0, 0), Phase(100, rate), Phase(500, 0)), poisson=poisson)
    found = list(sender.requests(seed, 1000))
    assert all(100 <= r.at_s < 500 for r in found)
    tolerated = 6 * (400 * rate) ** 0.5 if poisson else 1
    assert abs(len(found) - 400 * rate) <= tolerated


def test_even_senders_do_not_send_in_step() -> None:
    first = {next(replace(CHATS, name=f"t{at}").requests(1, 100)).at_s for at in range(5)}
    assert len(first) == 5


def test_on_a_slower_engine_the_load_is_as_heavy_for_it() -> None:
    """Rates shrink with the engine's speed, lengths with its slot, so an overload stays one."""
    speed = replace(SMALL.speed, prefill_tokens_per_s=400, step_s=((0, 0.04), (1, 0.2), (8, 0.34)))
    slow = replace(SMALL, speed=speed, pool=replace(SMALL.pool, tokens=4096, tokens_per_slot=640))
    workload = SCENARIOS["overload"](1)
    fitted = workload.fitted(slow)
    for sender in fitted.senders:
        assert sender.prompts.longest + sender.outputs.longest <= 640
    load = [
        sum(s.phases[0].requests_per_s for s in w.senders) / mean_capacity(w.engine, w.senders)
        for w in (workload, fitted)
    ]
    assert load[1] == pytest.approx(load[0])
    assert fitted.fitted(slow).senders == fitted.senders


def test_two_tenants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        Workload("w", "", SMALL, (CHATS, CHATS), 10)
