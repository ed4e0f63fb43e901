"""What of an engine's own caches its operator is warned of."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.app.health import profile_warnings
from kvgate.core.profile import Fact, Source
from tests.unit.doubles import profile


def log(value: Any) -> Fact[Any]:
    return Fact(value, Source.LOG)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"prompt_cache_mib": log(8192)}, ["RAM prompt cache", "--cache-ram 0 --no-cache-idle-slots"]),
        ({"prompt_cache_mib": log(-1)}, ["RAM prompt cache"]),
        ({"prompt_cache_mib": log(8192), "idle_slots_cached": log(True)}, ["idle slots are saved there"]),
        ({"context_shift": log(True)}, ["shifts its context", "without that flag"]),
    ],
)
def test_each_cache_of_the_engines_own_is_warned_of_with_the_flag(told: dict[str, Any], words: list[str]) -> None:
    """`cache_prompt: false` stops none of them."""
    (warning,) = profile_warnings(profile(**told))
    assert [word in warning for word in words] == [True] * len(words)


@pytest.mark.parametrize(
    "told",
    [{}, {"prompt_cache_mib": log(0), "idle_slots_cached": log(False)}, {"context_shift": log(False)}],
)
def test_what_is_off_or_unknown_is_no_warning(told: dict[str, Any]) -> None:
    """A quiet log is no accusation."""
    assert profile_warnings(profile(**told)) == []
