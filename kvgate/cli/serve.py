"""kvgate serve: the gate itself."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvgate.app import App, CannotStart, Workers
from kvgate.log import start_logging
from kvgate.settings import BadSettings, load


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="stand in front of an engine",
        description="Stand in front of an engine. What follows -- is run as the engine, and its log is read.",
        usage="kvgate serve [options] [-- llama-server ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="kvgate.toml")
    parser.add_argument("--tenants", type=Path, metavar="FILE", help="tenants.toml")
    parser.add_argument("--listen", metavar="HOST:PORT", help="for tenants (default 127.0.0.1:8600)")
    parser.add_argument("--admin-listen", metavar="HOST:PORT", help="for the operator (default 127.0.0.1:8601)")
    parser.add_argument("--upstream", metavar="URL", help="the engine, http://host:port")
    parser.add_argument("--engine-log", type=Path, metavar="FILE", help="the engine's startup log")
    parser.add_argument("--workers", type=int, metavar="N", help="processes side by side on one address (default 1)")
    parser.add_argument("--worker", type=Path, metavar="SOCKET", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, command: list[str]) -> int:
    """Serve until stopped."""
    if command and options.engine_log is not None:
        return _say("--engine-log is for an engine that runs elsewhere; a child's log is read by itself")
    if command and options.upstream is not None:
        return _say(
            "--upstream is for an engine that runs elsewhere; after -- one is run as a child: give one of them"
        )
    names = ("tenants", "listen", "admin_listen", "workers")
    flags: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    start_logging()
    try:
        engine = {"url": options.upstream or _child_url(command), "log": options.engine_log}
        if given := {name: value for name, value in engine.items() if value is not None}:
            flags["engine"] = given
        settings = load(options.config, flags)
        if settings.workers > 1 and options.worker is None:
            return asyncio.run(Workers(settings, _for_workers(options), command).run())
        app = App(settings, command, reread=lambda: load(options.config, flags), worker=options.worker)
        return asyncio.run(app.run())
    except (BadSettings, CannotStart) as error:
        return _say(str(error))


def _say(problem: str) -> int:
    print(f"kvgate: {problem}", file=sys.stderr)
    return 2


def _for_workers(options: argparse.Namespace) -> list[str]:
    """The arguments that each worker gets of those given; the address and its socket it gets besides."""
    shared = {
        "--config": options.config,
        "--tenants": options.tenants,
        "--upstream": options.upstream,
        "--engine-log": options.engine_log,
    }
    return [word for flag, value in shared.items() if value is not None for word in (flag, str(value))]


def _child_url(command: list[str]) -> str | None:
    """Where a child llama-server will listen, by its own flags and defaults."""
    if not command:
        return None
    flags = dict(pairwise(command))
    host = flags.get("--host", "127.0.0.1")
    host = "127.0.0.1" if host in {"0.0.0.0", "::"} else host
    if host.startswith("/"):
        raise BadSettings(
            f"the engine would listen on a unix socket ({shlex.quote(host)}); give it --host and --port"
        )
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{flags.get('--port', '8080')}"
