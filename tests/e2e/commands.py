"""Runs a kvgate command in this process, as a shell would see it; starting Python for each would cost a second."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any

from kvgate.cli import main


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def kvgate(*arguments: str, stdin: str = "") -> Done:
    """Run `kvgate ARGUMENTS` to its end."""
    out, err = io.StringIO(), io.StringIO()
    given, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as ended:
                code = int(ended.code or 0)
    finally:
        sys.stdin = given
    return Done(code, out.getvalue(), err.getvalue())
