"""kvgate top: who holds the slots and the KV cache now, and who waits, in a terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from kvgate.cli.answers import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S: Final = 5.0
BAR: Final = 24
CLEAR: Final = "\x1b[H\x1b[2J"
ROWS_BESIDE_TENANTS: Final = 13


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "top",
        help="show slots, KV cache, tenants and queue",
        description="Show who holds the engine's slots and KV cache, and who waits; Ctrl-C ends it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--admin", default="http://127.0.0.1:8601", metavar="URL", help="the gate's operator side (admin_listen)"
    )
    parser.add_argument("--interval-s", type=_seconds, default=1.0, metavar="S", help="between two looks (default 1)")
    parser.add_argument("--once", action="store_true", help="one look; what happens where the output is no terminal")
    parser.add_argument("--json", action="store_true", help="one look: ok, and the JSON of /status")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Look until told to end."""
    live = not options.once and not options.json and sys.stdout.isatty()
    while True:
        try:
            status = look(options.admin)
        except ValueError as error:
            return refuse("top", str(error), 2, as_json=options.json)
        if options.json:
            print(json.dumps({"ok": True, **status}))
        else:
            size = shutil.get_terminal_size() if live else os.terminal_size((10_000, 0))
            tenants = size.lines - ROWS_BESIDE_TENANTS if live else len(_tenants(status))
            print((CLEAR if live else "") + frame(status, size.columns, max(tenants, 1)), flush=True)
        if not live:
            return 0
        time.sleep(options.interval_s)


def look(admin: str) -> dict[str, Any]:
    """A gate's `/status`.

    Raises:
        ValueError: it cannot be had; the message says what to do.
    """
    url = f"{admin.rstrip('/')}/status"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--admin must look like http://host:port, not {admin!r}")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http alone, as checked
            status = json.load(answer)
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise ValueError(f"{url} cannot be read: {cause}. Is a gate running, and is this its admin_listen?") from None
    if not isinstance(status, dict) or "ledger" not in status:
        raise ValueError(f"{url} is no gate's: give the operator's address (admin_listen), not the tenants'")
    return status


def frame(status: Mapping[str, Any], columns: int, tenants_max: int) -> str:
    """One look as text: engine, slots, KV cache, tenants (those that hold or wait most first), what is the matter."""
    lines = [_engine(status), ""]
    if (ledger := status["ledger"]) is None:
        lines.append("nothing was asked yet")
    else:
        lines += [*_pool(ledger), *_fairness(status), "", *_table(status, tenants_max)]
    lines += [""] + [f"! {text}" for text in (*status["problems"], *status["warnings"])]
    return "\n".join(line[:columns] for line in lines).rstrip()


def _engine(status: Mapping[str, Any]) -> str:
    if status["engine"] is None:
        return "engine: not reached yet"
    profile = status["engine"]["profile"]
    topology = f"{profile['topology']['value']} ({profile['topology']['source']})"
    return (
        f"engine: {', '.join(profile['models'][:1]) or 'unnamed'}, n_ctx_slot {profile['n_ctx_slot']['value']}, "
        f"KV {status['engine']['kv_type']}, {topology}, build {profile['build'] or 'unknown'}"
    )


def _pool(ledger: Mapping[str, Any]) -> list[str]:
    pool, busy, held = ledger["pool"], ledger["running"] + ledger["draining"], ledger["held_tokens"]
    drained = f", {ledger['draining']} of them draining" if ledger["draining"] else ""
    return [
        f"slots    {_bar(busy, pool['slots'])} {busy} of {pool['slots']}{drained}",
        f"KV cache {_bar(held, pool['tokens'])} {held:,} of {pool['tokens']:,} tokens",
        f"queue    {ledger['waiting']} waiting",
    ]


def _fairness(status: Mapping[str, Any]) -> list[str]:
    """The gap among those in line against its bound, while there is anybody to be fair to."""
    fair = status.get("fairness")
    if not fair or len(fair["tenants"]) < 2:
        return []
    void = f" (not promised since: {', '.join(fair['void'])})" if fair["void"] else ""
    bound = "?" if fair["gap_bound"] is None else f"{fair['gap_bound']:,.0f}"
    gap = f"gap {fair['gap']:,.0f}, largest {fair['gap_max']:,.0f} of {bound} tokens{void}"
    return [f"fairness {gap}; oldest waits {fair['oldest_wait_s']:.1f} s"]


def _share(status: Mapping[str, Any], name: str) -> str:
    """A tenant's share of the last minute's service against its share of the weights."""
    one = ((status.get("fairness") or {}).get("tenants") or {}).get(name)
    return "" if one is None else f"{one['service_share']:.0%} of {one['weight_share']:.0%}"


def _bar(part: int, whole: int) -> str:
    filled = min(BAR, -(-part * BAR // whole)) if whole else 0
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"


def _tenants(status: Mapping[str, Any]) -> list[tuple[str, int, int, int]]:
    """Name, sequences, tokens and requests waiting of each tenant that has any, the heaviest first."""
    ledger = status["ledger"] or {}
    columns = [dict(ledger.get(f"{what}_by_tenant", ())) for what in ("running", "held_tokens", "waiting")]
    running, tokens, waiting = columns
    names = running.keys() | tokens.keys() | waiting.keys()
    rows = [(name, running.get(name, 0), tokens.get(name, 0), waiting.get(name, 0)) for name in names]
    return sorted(rows, key=lambda row: (-row[2], -row[3], row[0]))


def _table(status: Mapping[str, Any], tenants_max: int) -> list[str]:
    rows = _tenants(status)
    if not rows:
        return ["nobody holds anything"]
    width = max(len("tenant"), *(len(name) for name, *_ in rows))
    lines = [f"{'tenant':<{width}} {'running':>8} {'KV tokens':>12} {'waiting':>8} {'service':>12}"]
    lines += [
        f"{name:<{width}} {runs:>8} {held:>12,} {waits:>8} {_share(status, name):>12}".rstrip()
        for name, runs, held, waits in rows[:tenants_max]
    ]
    if len(rows) > tenants_max:
        lines.append(f"and {len(rows) - tenants_max} more")
    return lines


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds
