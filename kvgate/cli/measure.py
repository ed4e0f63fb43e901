"""kvgate measure: what an engine takes and gives; and whether two such reports prove anything side by side."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import refuse
from kvgate.cli.check import facts_of, key_of, tokens
from kvgate.cli.probe import say
from kvgate.core.measured import NotAReport, compare
from kvgate.core.profile import Topology
from kvgate.lab.asking import CannotAsk
from kvgate.lab.measure import measure
from kvgate.lab.measure_page import page_of
from kvgate.lab.process_memory import pid_of

if TYPE_CHECKING:
    import argparse

    from kvgate.core.measured import Comparison


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser(
        "measure",
        help="measure an idle engine, and compare two measurements",
        description="Measure an idle engine, and compare two measurements.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    running = actions.add_parser(
        "run",
        help="measure an idle engine",
        description="Measure an idle engine: what it took at its start, a short prompt alone, the first token at the "
        "target context, speed and memory over a long answer, parallel on equal desks, mixed traffic. Exit 0 when "
        "done, 2 where it cannot be done.",
        allow_abbrev=False,
    )
    running.add_argument("--upstream", required=True, metavar="URL", help="the engine, http://host:port")
    running.add_argument("--upstream-key-env", metavar="NAME", help="the variable with the engine's own key")
    running.add_argument(
        "--log",
        metavar="FILE",
        help="its startup log at -lv 4, - for standard input: the KV cache's size and precision",
    )
    running.add_argument(
        "--topology", choices=[str(one) for one in Topology], metavar="WORD", help="divided or unified, without a log"
    )
    running.add_argument("--context-tokens", type=tokens, metavar="N", help="the target context (default: a slot's)")
    running.add_argument(
        "--pid", type=tokens, metavar="N", help="its process, for its memory (default: found by its port)"
    )
    running.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON, for compare")
    running.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    running.add_argument("--json", action="store_true", help="the report as one JSON object instead of sentences")
    running.set_defaults(run=_run)
    comparing = actions.add_parser(
        "compare",
        help="compare two reports",
        description="Compare two reports: the fingerprints first. Exit 0 where at most one variable differs, 1 where "
        "the comparison would prove nothing, with the runs that would; 2 where a file is no report.",
        allow_abbrev=False,
    )
    comparing.add_argument("first", type=Path, metavar="A.json", help="a report of measure run --output")
    comparing.add_argument("second", type=Path, metavar="B.json", help="another")
    comparing.add_argument("--json", action="store_true", help="one JSON object instead of sentences")
    comparing.set_defaults(run=_compare)


def _run(options: argparse.Namespace, _: list[str]) -> int:
    try:
        for path in filter(None, (options.output, options.html)):
            _must_be_writable(path)
        report = asyncio.run(
            measure(
                options.upstream,
                key=key_of(options.upstream_key_env, None),
                facts=None if options.log is None else facts_of(options.log),
                topology=None if options.topology is None else Topology(options.topology),
                context_tokens=options.context_tokens,
                pid=options.pid or pid_of(options.upstream),
                say=say,
            )
        )
        if options.output is not None:
            options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if options.html is not None:
            options.html.write_text(page_of(report), encoding="utf-8")
    except (CannotAsk, ValueError) as error:
        return refuse("measure run", str(error), 2, as_json=options.json)
    except OSError as error:
        return refuse("measure run", f"{error.filename}: {error.strerror}", 2, as_json=options.json)
    print(json.dumps({"ok": True, **report}) if options.json else "\n".join(_lines(report)))
    return 0


def _must_be_writable(path: Path) -> None:
    """Measuring takes minutes, and ends in this file.

    Raises:
        OSError: it cannot be written.
    """
    was_there = path.exists()
    path.open("ab").close()
    if not was_there:
        path.unlink()


def _lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for section, found in report.items():
        if isinstance(found, dict):
            lines.append(section.replace("_", " "))
            plain = {name: value for name, value in found.items() if not isinstance(value, list | dict)}
            lines += [f"  {name}: {'not known' if value is None else value}" for name, value in plain.items()]
            lines += [f"  {run}" for run in found.get("runs", ())]
    return lines


def _compare(options: argparse.Namespace, _: list[str]) -> int:
    try:
        found = compare(*(_report(path) for path in (options.first, options.second)))
    except (NotAReport, ValueError) as error:
        return refuse("measure compare", str(error), 2, as_json=options.json)
    print(json.dumps(_fields(found)) if options.json else "\n".join(_sentences(found)))
    return 0 if found.ok else 1


def _report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotAReport(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise NotAReport(f"{path} is no JSON") from None
    if not isinstance(report, dict):
        raise NotAReport(f"{path} is no report of kvgate measure run")
    return report


def _fields(found: Comparison) -> dict[str, Any]:
    def pairs(differences: Any) -> list[dict[str, Any]]:
        return [{"name": one.name, "first": one.first, "second": one.second} for one in differences]

    return {
        "ok": found.ok,
        "same_fingerprint": found.same_fingerprint,
        "variables": pairs(found.variables),
        "figures": pairs(found.figures),
        "refused": found.refused or None,
        "to_do": list(found.to_do),
    }


def _sentences(found: Comparison) -> list[str]:
    lines = [f"fingerprints: {'the same' if found.same_fingerprint else 'different'}"]
    lines += [f"changed: {one.name}: {one.first} -> {one.second}" for one in found.variables] or ["nothing changed"]
    if found.refused:
        return [*lines, found.refused, "runs that would prove something:", *(f"  {run}" for run in found.to_do)]
    return lines + [
        f"{one.name}: {one.first} -> {one.second}{_change(one.first, one.second)}" for one in found.figures
    ]


def _change(first: Any, second: Any) -> str:
    if not isinstance(first, int | float) or not isinstance(second, int | float) or not first:
        return ""
    return f" ({(second - first) / first:+.0%})"
