"""kvgate canary: turn prefix reuse on with evidence, tenant by tenant, and off again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgate.cli import canary_pins, canary_run

if TYPE_CHECKING:
    import argparse

PARTS = (canary_run, canary_pins)
"""The modules whose actions the command has, in the order of its help."""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser(
        "canary",
        help="prefix reuse: run the suite, pin an engine, widen the allowlist",
        description="Turn prefix reuse on with evidence, tenant by tenant, and off again (docs/reuse.md).",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for part in PARTS:
        part.add(actions)
