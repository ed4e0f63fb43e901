"""The kvgate command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kvgate import __version__
from kvgate.cli import canary, check, explain, histogram, keys, measure, probe, report, serve, tenants, top
from kvgate.cli.answers import Parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. 0: done, 1: the answer is no, 2: it could not be asked."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in given:
        at = given.index("--")
        given, command = given[:at], given[at + 1 :]
    parser, _ = parsers()
    options = parser.parse_args(given)
    if command and options.command not in {"serve", "check"}:
        parser.error(f"only serve and check take a command line after --, not {options.command}")
    try:
        status = int(options.run(options, command))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough; what is left must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def parsers() -> tuple[Parser, argparse._SubParsersAction[Any]]:
    """The command line's parser, and the commands in it."""
    parser = Parser(
        prog="kvgate", description="Guards the context budget of an LLM inference server.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvgate {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (serve, check, probe, measure, explain, top, tenants, keys, histogram, report, canary):
        command.add(commands)
    return parser, commands
