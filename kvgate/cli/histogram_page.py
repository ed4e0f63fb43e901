"""The page of `kvgate histogram --html`: one file, its plots drawn in it, nothing loaded from anywhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from kvgate.cli.histogram_told import percent_name, percentage, size_name
from kvgate.core.profile import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgate.cli.histogram_told import Histograms
    from kvgate.core.histogram import Histogram
    from kvgate.core.plan import Planned

STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right}"
    "td,th{border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "svg{max-width:100%;height:auto}"
    "svg text{font:12px system-ui,sans-serif;fill:#444}tr.best td{font-weight:600}"
)

WIDTH: Final = 720
HEIGHT: Final = 220
FOOT: Final = 34
HEAD: Final = 18


def page(histograms: Histograms, planned: Sequence[Planned], source: str) -> str:
    """The whole page."""
    body = [f"<h1>Context lengths</h1><p>From {escape(source)}.</p>"]
    for name, n_ctx_slot, found in histograms:
        slot = "" if n_ctx_slot is None else f"; n_ctx_slot {n_ctx_slot:,}"
        body.append(f"<h2>{escape(name)}</h2><p>{found.requests:,} requests{slot}.</p>")
        body.append(_plot(found, n_ctx_slot))
        rows = [
            (percent_name(percent), f"{prompt:,}", f"{total:,}")
            for (percent, prompt), (_, total) in zip(found.prompts, found.totals, strict=True)
        ]
        body.append(_table(("tokens", "prompt", "with output"), rows))
        rows = [
            (size_name(one.tokens), percentage(one.prompts, found.requests), percentage(one.totals, found.requests))
            for one in found.shares
        ]
        body.append(_table(("fit", "prompt", "with output"), rows))
    if planned:
        body.append("<h2>Plan</h2>")
        head = ("line", "n_ctx_slot", "rejects", "at once", "KV MiB")
        body.append(_table(head, list(_plan_rows(planned)), best=True))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Context lengths</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _plan_rows(planned: Sequence[Planned]) -> Iterator[tuple[str, ...]]:
    for one in planned:
        share = percentage(one.rejections, one.requests)
        mib = f"{one.kv_bytes / MIB:.1f}"
        yield one.line.flags, f"{one.line.n_ctx_slot:,}", share, str(one.side_by_side), mib


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, best: bool = False) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = []
    for at, row in enumerate(rows):
        mark = ' class="best"' if best and at == 0 else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return f"<table><tr>{first}</tr>{''.join(lines)}</table>"


def _plot(found: Histogram, n_ctx_slot: int | None) -> str:
    """Requests by length, each bar twice as long contexts as the one before; a line where the slot ends."""
    step = WIDTH / max(len(found.bars), 1)
    most = max((bar.requests for bar in found.bars), default=1)
    parts = []
    for at, bar in enumerate(found.bars):
        height = (HEIGHT - HEAD - FOOT) * bar.requests / most
        left, top = at * step, HEIGHT - FOOT - height
        middle, below, mark = left + step / 2, HEIGHT - FOOT + 16, f"\u2264{size_name(bar.up_to)}"
        parts.append(
            f'<rect x="{left + 2:.1f}" y="{top:.1f}" width="{step - 4:.1f}" height="{height:.1f}" fill="#4a7ebb"/>'
            f'<text x="{middle:.1f}" y="{top - 4:.1f}" text-anchor="middle">{bar.requests:,}</text>'
            f'<text x="{middle:.1f}" y="{below}" text-anchor="middle">{mark}</text>'
        )
        if n_ctx_slot is not None and bar.above < n_ctx_slot <= bar.up_to:
            at_x = left + step * (n_ctx_slot - bar.above) / (bar.up_to - bar.above)
            parts.append(
                f'<path d="M{at_x:.1f} 0V{HEIGHT - FOOT}" stroke="#c33" stroke-dasharray="4"/>'
                f'<text x="{max(at_x - 4, 80):.1f}" y="10" text-anchor="end">n_ctx_slot {n_ctx_slot:,}</text>'
            )
    label = "Requests by tokens of prompt and output together"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
