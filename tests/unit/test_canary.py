"""Who may reuse: an allowlist, a dedicated engine, and a pin on this very process, all at once."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.canary import (
    EVERYBODY,
    VIOLATIONS_MAX,
    CanaryState,
    Figures,
    Pin,
    Sharers,
    Violations,
    is_listed,
    reuse_of,
    why_off,
)
from kvgate.core.reuse import Reuse
from kvgate.core.tenant import ReusePolicy, Tenant
from tests.unit.doubles import profile

ENGINE = profile()
PIN = Pin(ENGINE.fingerprint, "<one>", 1, Figures(0.0, 0.0, 0.5, 0.5), 1.0, "ann")
PINNED = CanaryState((PIN,), instance="<one>")
ACME = Tenant("acme", reuse=ReusePolicy.CANARY)
ALONE = Sharers(frozenset({"acme"}))


def test_a_listed_tenant_of_a_dedicated_pinned_engine_reuses() -> None:
    """The one way in."""
    assert why_off(ACME, PINNED, ENGINE, ALONE) is None
    assert reuse_of(ACME, PINNED, ENGINE, ALONE) is Reuse.KEEP


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tenant": Tenant("acme")}, "allowlist"),
        ({"state": None}, "store is out"),
        ({"state": CanaryState(instance="<one>")}, "not pinned"),
        ({"state": CanaryState((PIN,))}, "just been replaced"),
        ({"state": replace(PINNED, strangers=frozenset({"beta"}))}, "has served beta off the allowlist.*restart it"),
        ({"state": replace(PINNED, strangers=frozenset({"beta", EVERYBODY}))}, "has served everybody"),
        ({"state": replace(PINNED, dedicated_to=frozenset({"acme", "beta"}))}, "another gate's .*beta.*restart"),
        ({"sharers": Sharers()}, "not dedicated"),
        ({"sharers": Sharers(frozenset({"beta"}))}, "not dedicated"),
        ({"sharers": Sharers(frozenset({"acme", "beta"}), frozenset({"beta"}))}, "also serves .*beta"),
        ({"profile": replace(ENGINE, instance="<two>")}, "just been replaced"),
        ({"profile": replace(ENGINE, instance=None)}, "cannot be pinned"),
        ({"profile": replace(ENGINE, build="b2")}, "not pinned"),
    ],
)
def test_each_missing_condition_alone_is_off_and_says_so(changed: dict[str, object], why: str) -> None:
    """In doubt, drop and prefill again; the operator reads what is missing."""
    given_: dict[str, object] = {"tenant": ACME, "state": PINNED, "profile": ENGINE, "sharers": ALONE, **changed}
    arguments = [given_[name] for name in ("tenant", "state", "profile", "sharers")]
    said = why_off(*arguments)  # type: ignore[arg-type]
    assert said is not None
    assert re.search(why, said)
    assert reuse_of(*arguments) is Reuse.OFF  # type: ignore[arg-type]


def test_widening_is_as_good_as_the_tenants_own_setting() -> None:
    """And an unknown state widens nobody."""
    beta = Tenant("beta")
    assert is_listed(beta, CanaryState(widened=frozenset({"beta"})))
    assert not is_listed(beta, CanaryState())
    assert not is_listed(beta, None)


@given(st.booleans(), st.sampled_from([None, PINNED, CanaryState()]))
def test_the_suite_has_what_it_asks_for(asked: bool, state: CanaryState | None) -> None:
    """It measures before there is a pin, and both ways."""
    suite = Tenant("kvgate-suite", reuse=ReusePolicy.SUITE)
    assert (reuse_of(suite, state, ENGINE, Sharers(), asked=asked) is Reuse.KEEP) == asked


def test_nobody_else_gets_reuse_by_asking() -> None:
    """`cache_prompt: true` of a client is no permission."""
    assert reuse_of(Tenant("acme"), PINNED, ENGINE, ALONE, asked=True) is Reuse.OFF


@given(st.lists(st.booleans(), max_size=20))
def test_violations_count_only_in_a_row(answers: list[bool]) -> None:
    """A good answer begins anew."""
    counted = Violations()
    for violated in answers:
        counted = counted.after(violated=violated)
    trailing = len(answers) - next((i + 1 for i in range(len(answers) - 1, -1, -1) if not answers[i]), 0)
    assert counted.in_a_row == trailing
    assert counted.unpins == (trailing >= VIOLATIONS_MAX)


def test_strangers_are_those_off_the_list_or_everybody() -> None:
    """An engine that is not dedicated is there for whoever has a key."""
    assert Sharers().strangers == {EVERYBODY}
    assert ALONE.strangers == frozenset()
    assert Sharers(frozenset({"acme", "beta"}), frozenset({"beta"})).strangers == {"beta"}
