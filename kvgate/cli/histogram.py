"""kvgate histogram: how long contexts are, by tenant, and how an engine would best be started for them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvgate.cli.answers import Told, refuse, tell
from kvgate.cli.check import tokens
from kvgate.cli.histogram_page import page
from kvgate.cli.histogram_told import histogram_lines, plan_fields, plan_lines
from kvgate.cli.store_access import add_options, nearest, run_prepared
from kvgate.core.engine_requests import EngineRequests
from kvgate.core.histogram import Histogram, Length, histogram
from kvgate.core.plan import SLOTS, plan
from kvgate.core.pool import KvPool
from kvgate.core.profile import MIB
from kvgate.core.replay import Asked
from kvgate.core.tenant import Tenant
from kvgate.settings import BadSettings
from kvgate.store.registry import NotDone

if TYPE_CHECKING:
    from kvgate.cli.histogram_told import Histograms
    from kvgate.cli.store_access import Desk, Work
    from kvgate.core.plan import Planned, Requests
    from kvgate.settings import Settings

SLOTS_MAX: Final = 16
"""Of a proposed line, unless more are asked for."""

LOGGED: Final = "engine log"
"""In whose name the requests of a log are told, which knows no tenants."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a plan goes by."""

    budget_bytes: int
    bytes_per_token: float
    n_ctx_train: int | None


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "histogram",
        help="show how long contexts are, and plan an engine for them",
        description="Show how long the contexts of recent requests are, by tenant: percentiles, and how many fit 2k, "
        "4k, ... 128k. From the gates' own records (sizes of each tenant's last 4,000 requests), or an engine's log. "
        "With --plan: which lines of llama-server fit a memory budget, what each would reject, and what it costs.",
        allow_abbrev=False,
    )
    parser.add_argument("--tenant", metavar="NAME", help="this tenant alone")
    parser.add_argument(
        "--log",
        metavar="FILE",
        help="read requests from a llama-server log instead of the records; - is standard input",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")
    parser.add_argument("--plan", action="store_true", help="propose lines for llama-server")
    parser.add_argument(
        "--memory-mib",
        type=_positive,
        metavar="MIB",
        help="of the KV cache (default: what the engine's log says it has)",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=_positive,
        metavar="BYTES",
        help="of the KV cache, all layers (default: from the engine's log, written with -lv 4)",
    )
    parser.add_argument(
        "--kv-log", type=Path, metavar="FILE", help="the log that tells it (default: --log, or [engine] log)"
    )
    parser.add_argument(
        "--n-ctx-train", type=tokens, metavar="N", help="what the model was trained for (default: from the log)"
    )
    parser.add_argument(
        "--slots-max", type=_slots, metavar="N", help=f"propose no more slots than that (default {SLOTS_MAX})"
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Count, and plan where that is asked."""
    for name in ("memory_mib", "kv_bytes_per_token", "kv_log", "n_ctx_train", "slots_max"):
        if getattr(options, name) is not None and not options.plan:
            flag = "--" + name.replace("_", "-")
            return refuse(options.command, f"{flag} is for --plan: give that, too", 2, as_json=options.json)
    if options.log is not None:
        try:
            return tell(_from_log(options), as_json=options.json)
        except (BadSettings, NotDone) as problem:
            status = 1 if isinstance(problem, NotDone) else 2
            return refuse(options.command, str(problem), status, as_json=options.json)

    def prepare(settings: Settings) -> Work:
        cost = _cost(options, None, settings.engine.log) if options.plan else None
        return lambda desk: _from_records(options, desk, cost)

    return run_prepared(options, prepare)


def _from_log(options: argparse.Namespace) -> Told:
    if options.tenant is not None:
        raise BadSettings("an engine's log knows no tenants: leave --tenant out")
    found = _read(options.log)
    cost = _cost(options, found, None) if options.plan else None
    if not found.lengths:
        raise NotDone(
            f"no finished request stands in {_name(options.log)}: it must be a llama-server log, at its usual "
            "verbosity or more, that goes on after its start"
        )
    n_ctx_slot = found.n_ctx_slot or 1
    asked = [_as_asked(length, KvPool(n_ctx_slot, 1, n_ctx_slot)) for length in found.lengths]
    return _told(options, [(Tenant(LOGGED), asked)], [found.n_ctx_slot], cost, source=_name(options.log))


async def _from_records(options: argparse.Namespace, desk: Desk, cost: _Cost | None) -> Told:
    declared = (await desk.registry.read()).tenants
    if options.tenant is not None and options.tenant not in declared:
        raise NotDone(f"there is no tenant {options.tenant!r}{nearest(options.tenant, declared)}")
    requests: Requests = []
    for name in [options.tenant] if options.tenant else sorted(declared):
        if (tenant := declared[name].tenant) is not None:
            requests.append((tenant, await desk.sizes.of(name)))
    if not any(some for _, some in requests):
        raise NotDone(
            f"no request is recorded in {desk.where}: a gate on it records each tenant's requests as they come"
        )
    marks = [next((asked.pool.tokens_per_slot for asked in some), None) for _, some in requests]
    return _told(options, requests, marks, cost, source=desk.where)


def _told(
    options: argparse.Namespace, requests: Requests, marks: list[int | None], cost: _Cost | None, *, source: str
) -> Told:
    found: Histograms = [
        (tenant.name, mark, histogram(map(Length.of, some), [mark] if mark else []))
        for (tenant, some), mark in zip(requests, marks, strict=True)
        if some
    ]
    answer: dict[str, Any] = {"source": source, "tenants": {name: _fields(one, mark) for name, mark, one in found}}
    lines = [line for name, mark, one in found for line in [*histogram_lines(name, mark, one), ""]]
    planned: tuple[Planned, ...] = ()
    notes = []
    if cost is not None:
        planned = plan(
            requests,
            cost.budget_bytes,
            cost.bytes_per_token,
            cost.n_ctx_train,
            slots_max=options.slots_max or SLOTS_MAX,
        )
        if not planned:
            least = cost.bytes_per_token * 256 / MIB
            raise NotDone(
                f"{cost.budget_bytes / MIB:.1f} MiB hold no slot: 256 tokens of KV cache take {least:.1f} MiB"
            )
        answer["plan"] = {**asdict(cost), "proposals": [plan_fields(one) for one in planned]}
        lines += [*plan_lines(planned, cost.budget_bytes / MIB, cost.bytes_per_token), ""]
        if cost.n_ctx_train is None:
            notes.append(
                "what the model was trained for is not known, so a slot may come out smaller: --n-ctx-train N"
            )
    if options.html is not None:
        _write(options.html, page(found, planned, source))
        notes.append(f"written: {options.html}")
    return Told(answer, lines[:-1], notes)


def _cost(options: argparse.Namespace, logged: EngineRequests | None, engine_log: Path | None) -> _Cost:
    """What a plan goes by: flags first, then a log."""
    path = options.kv_log or engine_log
    known = logged if options.kv_log is None and logged is not None else None if path is None else _read(str(path))
    per_token, budget = options.kv_bytes_per_token, options.memory_mib
    if per_token is None and (known is None or known.cost is None):
        raise BadSettings(
            "what a token of the KV cache takes is not known: give --kv-bytes-per-token BYTES, or a log that "
            "llama-server wrote with -lv 4 (--kv-log FILE): it has a line 'llama_kv_cache: size = ...'"
        )
    if budget is None and (known is None or known.cost is None):
        raise BadSettings(
            "how much memory the KV cache may take is not known: give --memory-mib MIB, or --kv-log FILE"
        )
    cost = known.cost if known is not None else None
    trained = options.n_ctx_train or (known.n_ctx_train if known is not None else None)
    return _Cost(
        int(budget * MIB) if budget is not None else round(cost.bytes_total) if cost else 0,
        per_token if per_token is not None else cost.bytes_per_token if cost else 1.0,
        trained,
    )


def _read(path: str) -> EngineRequests:
    """What a log says; it may be long, so it is read line by line."""
    found = EngineRequests()
    try:
        if path == "-":
            found.feed(sys.stdin)
        else:
            with Path(path).open(encoding="utf-8", errors="replace") as log:
                found.feed(log)
    except OSError as error:
        raise BadSettings(f"{path} cannot be read: {error.strerror}") from None
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadSettings(f"{path} cannot be written: {error.strerror}") from None


def _name(path: str) -> str:
    return "standard input" if path == "-" else path


def _as_asked(length: Length, pool: KvPool) -> Asked:
    """A request of a log as the arithmetic sees one: taken to have asked for what it got."""
    return Asked(length.output_tokens, 1, (length.prompt_tokens,), 1, pool)


def _fields(found: Histogram, n_ctx_slot: int | None) -> dict[str, Any]:
    return {**asdict(found), "n_ctx_slot": n_ctx_slot}


def _slots(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= SLOTS[-1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {SLOTS[-1]}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
