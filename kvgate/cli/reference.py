"""Writes docs/reference.md from the code: settings, reasons, headers, metrics, output limits, commands."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgate.cli import parsers
from kvgate.core.ask import Size
from kvgate.core.engine_state import Change, EngineState
from kvgate.core.foreign import ForeignWatch
from kvgate.core.ledger import Ledger, Reservation
from kvgate.core.profile import EngineProfile, Fact, Source, Topology
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota
from kvgate.engines.llamacpp import FIELDS
from kvgate.engines.llamacpp import HEADERS as REUSE_HEADERS
from kvgate.metrics import Metrics
from kvgate.settings import RELOADABLE, described
from kvgate.web import HEADERS, served_routes
from kvgate.web.routes import Control, Inference, Own
from kvgate.wire import fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvgate.core.fairness import FairView
    from kvgate.core.pool import KvPool


def reference() -> str:
    """The whole document."""
    parts = [
        "# Reference\n\nMade from the code by `make docs`; a test fails where the two differ.",
        _section("Settings", _settings("")),
        _section("Tenants file", _settings("tenant.NAME.")),
        _section("Reasons", _reasons()),
        _section("States of the engine", _states()),
        _section("Headers", _headers()),
        _section("Metrics", _metrics()),
        _section("Paths", _paths()),
        _section("Output limits", _output_limits()),
        _section("Prefix reuse", _reuse()),
        _section("Commands", _commands()),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}\n", *lines])


def _settings(prefix: str) -> Iterator[str]:
    if prefix:
        yield "`tenants.toml`, one section a tenant. Limits bound ONE request, Quota what is held at once.\n"
    else:
        yield (
            "`kvgate.toml`, overridden by `KVGATE_*` variables (`engine.url` is `KVGATE_ENGINE__URL`), overridden by "
            "flags.\nUnknown keys are errors. SIGHUP reads them anew: those with a \u21bb come into force,\nfor the "
            "others the gate says that it needs a restart. A file that cannot be used leaves the last one in force.\n"
        )
    yield "| key | default | meaning |\n|---|---|---|"
    for name, _, default, meaning in described():
        if name.startswith("tenant.NAME.") == bool(prefix):
            shown = "none" if default is None or default == () else f"`{getattr(default, 'value', default)}`"
            mark = " \u21bb" if name in RELOADABLE else ""
            yield f"| `{name.removeprefix(prefix)}` | {shown} | {meaning}{mark} |"


def _reasons() -> Iterator[str]:
    yield "The label is the `x-kvgate-reason` header and the metric label; the code is what clients act on.\n"
    yield "| label | status | code | when, and what to do |\n|---|---|---|---|"
    for reason in Reason:
        row = reason.value
        yield f"| `{row.label}` | {row.status} | `{row.code}` | {row.meaning} |"


def _states() -> Iterator[str]:
    yield "`engine.state` in `/readyz`, and the label of `kvgate_engine_state`.\n"
    yield "| state | what requests get | what to do |\n|---|---|---|"
    for state in EngineState:
        row = state.value
        got = "served" if row.reason is None else f"{row.reason.status} `{row.reason.label}`, with `retry-after`"
        yield f"| `{row.label}` | {got} | {row.to_do} |"
    yield "\n| change (`engine.changed`, `kvgate_engine_changes_total`) | the engine was |\n|---|---|"
    for change in Change:
        yield f"| `{change.label}` | {change.value[1]} |"


def _headers() -> Iterator[str]:
    yield "| header | meaning |\n|---|---|"
    for name, meaning in HEADERS.items():
        yield f"| `{name}` | {meaning} |"


def _metrics() -> Iterator[str]:
    yield "On the operator's listener, `/metrics`. Labels hold declared tenants and the tables' own words alone.\n"
    yield "| metric | type | labels | meaning |\n|---|---|---|---|"
    metrics = Metrics()
    profile = _sample_profile()
    view = Ledger(profile.pool()).view()
    metrics.watch(lambda: profile, lambda: view, lambda: True, lambda: 0)
    pool = profile.pool()
    metrics.watch_fairness(lambda: _sample_fairness(pool), lambda: pool)
    metrics.watch_life(lambda: EngineState.SERVING, ForeignWatch)
    for name, kind, labels, meaning in metrics.described():
        yield f"| `{name}` | {kind} | {', '.join(labels)} | {meaning} |"


def _sample_fairness(pool: KvPool) -> FairView:
    ledger = Ledger(replace(pool, tokens=2, tokens_per_slot=2))
    ledger.reserve(Reservation("a", "t", Quota(), Size(1, 1)), 0.0)
    view = ledger.fair_view(0.0)
    # Some figures are there only once somebody was served.
    return replace(view, tenants=tuple(replace(one, service_milli=1) for one in view.tenants))


_WHAT = {
    Inference: "counted, judged, run under a lease",
    Control: "passed on; runs no inference",
    Own: "answered by kvgate, with the tenant's own window",
}


def _paths() -> Iterator[str]:
    yield (
        "The allow-list. A path is served only as it is spelled here; all others are refused, whatever the engine "
        "would make\nof them. `OPTIONS` answers preflights (`http.cors_origins`).\n"
    )
    yield "`GET /v1/models/ID` answers for one model.\n"
    yield "| path | dialect | what happens |\n|---|---|---|"
    for path, route in sorted(served_routes().items()):
        what = _WHAT[type(route)]
        yield f"| `{route.method} {path}` | `{route.dialect.name}` | {what} |"


def _output_limits() -> Iterator[str]:
    yield "Of the names that a dialect knows, the first that sets a limit wins, whatever the order of the fields.\n"
    yield "| dialect | names, the winner first | sent to the engine as |\n|---|---|---|"
    dialects = {
        route.dialect.name: route.dialect for route in served_routes().values() if isinstance(route, Inference)
    }
    for name, dialect in sorted(dialects.items()):
        names = ", ".join(f"`{field}`" for field in dialect.output_fields)
        sent = f"`{dialect.canonical_field}`" if dialect.canonical_field else ""
        yield f"| `{name}` | {names or 'generates nothing'} | {sent} |"
    yield "\n| value | meaning |\n|---|---|"
    yield "| missing, `null`, `-1` | no limit of its own: the tenant's `output_tokens_default`, or what fits of it |"
    yield "| `0` | one token, as llama.cpp does |"
    yield "| `true`, `false` | 1 and 0 |"
    yield "| `3.7` | 3 |"
    most = fields.OUTPUT_TOKENS_MAX
    yield f"| above {most} | {most}: refused or clamped like any that does not fit |"
    yield "| below -1, or not a number | refused, `malformed` |"
    yield (
        "\nThe engine always gets one positive limit; the other names are removed. llama.cpp alone would let "
        "`n_predict: -1` beat\n`max_tokens: 4` and answer without limit; here a name without a limit beats nothing."
    )


def _reuse() -> Iterator[str]:
    yield (
        "What asks for, pins or keys prefix reuse. None of it is taken from a client, on any API; the same name "
        "anywhere\nelse, as in a tool's arguments, stays (docs/reuse.md).\n"
    )
    yield "| field | where | what it does |\n|---|---|---|"
    for row in FIELDS:
        places = (".".join(place).replace(".*", "[]") for place in row.inside)
        where = ", ".join(f"`{place}`" for place in places) or "the body"
        yield f"| `{row.name}` | {where} | {row.does} |"
    yield "\nNo header of a client's reaches the engine, so none of these does:\n"
    yield "| header | elsewhere it would |\n|---|---|"
    for name, does in REUSE_HEADERS.items():
        yield f"| `{name}` | {does} |"


def _commands() -> Iterator[str]:
    yield (
        "Exit status 0: done; 1: the answer is no; 2: it could not be asked. With `--json` one object: the answer on "
        "standard\noutput, or `ok` (`false` for 1, `null` for 2) and `problem` on standard error."
    )
    _, commands = parsers()
    yield from _commands_of(commands)


def _commands_of(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> Iterator[str]:
    for parser in commands.choices.values():
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
        if inner:
            yield from _commands_of(inner[0])
            continue
        yield f"\n### `{parser.prog}`\n\n{parser.description}\n"
        yield "| argument | meaning |\n|---|---|"
        for action in parser._actions:  # noqa: SLF001 - argparse shows them nowhere else
            if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:  # noqa: SLF001
                meaning = (action.help or "") % {"default": action.default}
                yield f"| `{_spelled(action)}` | {meaning} |"


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        name = str(action.metavar or action.dest)
        return f"[{name}]" if action.nargs == "?" else name
    flag = action.option_strings[0]
    word = flag if action.nargs == 0 else f"{flag} {action.metavar or action.dest.upper()}"
    return word if action.required else f"[{word}]"


def _sample_profile() -> EngineProfile:
    one = Fact(1, Source.ASSUMED)
    return EngineProfile("llamacpp", one, one, Fact(Topology.DIVIDED, Source.ASSUMED), one)


if __name__ == "__main__":
    print(reference(), end="")
