"""Prefix reuse: believed only when seen."""

from __future__ import annotations

from kvgate.core.ask import Usage
from kvgate.core.reuse import Reuse, is_violation


def test_one_reused_token_is_a_violation_where_reuse_is_off() -> None:
    """The engine was told not to; whatever it reused may be a neighbour's."""
    assert is_violation(Reuse.OFF, Usage(prompt_tokens=143, output_tokens=5, cached_tokens=1))


def test_an_answer_without_reused_tokens_is_none() -> None:
    """Nothing reused, nothing to tell."""
    assert not is_violation(Reuse.OFF, Usage(prompt_tokens=143, output_tokens=5))
