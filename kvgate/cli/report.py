"""kvgate report: what is known of one request, by its id, for whoever looks into a bad answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvgate.cli.answers import Told, plural, redacted
from kvgate.cli.store_access import add_options, run
from kvgate.store.registry import NotDone

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from kvgate.cli.store_access import Desk

ID_SHOWN_CHARS: Final = 80

TOKENS: Final = "not known: the request did not come so far"


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="show what is known of one request",
        description="Show what is known of one request by its id (x-request-id of its answer): engine, context, KV "
        "precision, reuse, verdict, counts, timings and how it ended; no text of it. Kept for [report] keep_s.",
        allow_abbrev=False,
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the answer's x-request-id")
    parser.add_argument("--markdown", action="store_true", help="as a table to paste into an issue")
    add_options(parser)
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace, _: list[str]) -> int:
    async def work(desk: Desk) -> Told:
        found = await desk.reports.of(options.request_id)
        if not found:
            raise NotDone(unknown(redacted(options.request_id), desk.where))
        lines: list[str] = []
        for report in found:
            lines += [*(markdown(report) if options.markdown else sentences(report)), ""]
        notes = [f"{plural(len(found), 'request')} came with this id, the last one first"] if len(found) > 1 else []
        return Told({"reports": list(found)}, lines[:-1], notes)

    return run(options, work)


def unknown(request_id: str, where: str) -> str:
    """What to say of an id that nothing is kept of."""
    return (
        f"nothing is kept of a request {request_id[:ID_SHOWN_CHARS]!r} in {where}: the id is the x-request-id of the "
        "answer; a report is there half a second after its request ended, for [report] keep_s seconds, unless more "
        "than [report] kept_max came after it; requests with an unknown key, and paths without inference, have none"
    )


def sentences(report: Mapping[str, Any]) -> list[str]:
    """A report for a terminal."""
    rows = list(rows_of(report))
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def markdown(report: Mapping[str, Any]) -> list[str]:
    """A report as a table of GitHub's Markdown."""
    rows = [(name, text.replace("|", "\\|").replace("`", "'")) for name, text in rows_of(report)]
    return ["| kvgate report | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]


def rows_of(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A report's lines: what it is about, and what is to know."""
    yield "request", f"{report['request_id']}, ended {report['ended_at']}, tenant {report['tenant']}"
    how = "streamed" if report["stream"] else "whole"
    several = f", {report['sequences']} answers" if (report["sequences"] or 1) > 1 else ""
    yield "asked at", f"{report['path']} ({report['dialect']}, {how}{several})"
    why = f" ({report['reason']})" if report["reason"] else ""
    detail = f"; {report['detail']}" if report["detail"] else ""
    yield "verdict", f"{report['verdict'] or 'none: it was not judged'}{why}, status {report['status']}{detail}"
    yield from _engine_rows(report)
    yield from _token_rows(report)
    yield "ended by", _ending(report)
    times = ((report[f"{name}_ms"], name) for name in ("queued", "answered", "duration"))
    said = {"queued": "waited {} ms", "answered": "answer began after {} ms", "duration": "{} ms in all"}
    yield "timings", ", ".join(said[name].format(ms) for ms, name in times if ms is not None)
    yield "kvgate", report["kvgate_version"]


def _engine_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    engine = report["engine"]
    if engine is None:
        yield "engine", TOKENS
        return
    models = ", ".join(engine["models"]) or "a model without a name"
    yield "engine", f"{engine['kind']} build {engine['build'] or 'unknown'}, fingerprint {engine['fingerprint']}"
    yield "model", f"{models}, {engine['model_ftype'] or 'unknown quantization'}"
    slot = f"{engine['n_ctx_slot']} tokens a slot (n_ctx_slot, from {engine['n_ctx_slot_source']})"
    topology = f"{engine['topology']} ({engine['topology_source']})"
    yield "context", f"{slot}, {engine['slots']} slots, {topology}, pool of {engine['pool_tokens']} tokens"
    yield "KV precision", str(engine["kv_type"])
    usage = report["usage"]
    cached = "" if usage is None else f"; {usage['cached_tokens']} tokens of the prompt came from a cache"
    seen = ", although it was off" if report["reuse_violation"] else ""
    yield "prefix reuse", f"{report['reuse'] or 'not decided'}{cached}{seen}"


def _token_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if report["prompt_tokens"] is None:
        yield "prompt", TOKENS
    else:
        yield "prompt", f"{report['prompt_tokens']} tokens, counted by {report['counted_by']}"
    if (trimmed := report["trimmed"]) is not None:
        yield "trimmed", f"{trimmed['tokens']} tokens, {trimmed['messages']} messages ({trimmed['how']})"
    asked = report["asked_output_tokens"]
    if report["usable_generation"] is not None:
        limit = "" if report["output_limit"] is None else f", limit {report['output_limit']}"
        asked_for = "no limit asked" if asked is None else f"{asked} asked"
        yield "output", f"{asked_for}, room for {report['usable_generation']}{limit}"
    if (usage := report["usage"]) is not None:
        drift = report["count_drift_tokens"]
        differs = f"; {drift:+} against the count" if drift else ""
        yield "usage", f"{usage['prompt_tokens']} prompt, {usage['output_tokens']} output tokens{differs}"


def _ending(report: Mapping[str, Any]) -> str:
    said = [report["finish"]] if report["finish"] else []
    if report["ended_by_context"]:
        said.append(f"cut short by the context ({report['ended_by_context']}), not by the client's own limit")
    if report["loop"] and not report["loop_stopped"]:
        said.append(f"repeats itself ({report['loop']})")
    if report["loop_stopped"]:
        said.append(f"stopped by the loop guard ({report['loop']})")
    if report["hung_up"]:
        said.append("the client left")
    return "; ".join(said) or ("not known" if report["status"] == 200 else "refused")
