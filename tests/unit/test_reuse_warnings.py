"""What of an engine's own caches its operator is warned of."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.app.health import profile_warnings
from kvgate.core.profile import UNLIMITED, Fact, Source
from tests.unit.doubles import profile


def log(value: Any) -> Fact[Any]:
    return Fact(value, Source.LOG)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"cache_ram_mib": log(8192)}, ["RAM prompt cache", "--cache-ram 0 --no-cache-idle-slots"]),
        ({"cache_ram_mib": log(UNLIMITED)}, ["RAM prompt cache"]),
        ({"cache_ram_mib": log(8192), "cache_idle_slots": log(True)}, ["idle slots are saved there"]),
        ({"context_shift": log(True)}, ["shifts its context", "without that flag"]),
    ],
)
def test_each_cache_of_the_engines_own_is_warned_of_with_the_flag(told: dict[str, Any], words: list[str]) -> None:
    """`cache_prompt: false` stops none of them."""
    (warning,) = profile_warnings(profile(**told))
    assert [word in warning for word in words] == [True] * len(words)


@pytest.mark.parametrize(
    "told",
    [{}, {"cache_ram_mib": log(0), "cache_idle_slots": log(False)}, {"context_shift": log(False)}],
)
def test_what_is_off_or_unknown_is_no_warning(told: dict[str, Any]) -> None:
    """A quiet log is no accusation."""
    assert profile_warnings(profile(**told)) == []
