"""A report of `kvgate measure` as one HTML file that needs nothing beside it: tables, and plots as inline SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH: Final = 640
_HEIGHT: Final = 220
_LEFT: Final = 64
_BOTTOM: Final = 40

_TITLES: Final = {
    "engine": "The engine",
    "allocation": "What it took at its start",
    "short": "A short prompt, alone",
    "long_prefill": "The first token at the target context",
    "long_generation": "A long answer",
    "parallel_control": "Parallel, on equal desks",
    "production": "Mixed traffic (not for comparing engines)",
    "workload": "What was asked",
    "machine": "Asked from",
}

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1rem } td { padding: .1rem 1.2rem .1rem 0; vertical-align: top }
td + td { font-variant-numeric: tabular-nums } h2 { margin-top: 2rem; font-size: 1.1rem } svg { max-width: 100% }
.axis { stroke: #999 } .line { fill: none; stroke: #1565c0; stroke-width: 2 } .bar { fill: #1565c0 }
text { font: 12px system-ui, sans-serif; fill: #444 }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } text { fill: #bbb } }
"""


def page_of(report: Mapping[str, Any]) -> str:
    """The whole page."""
    name = str(report["engine"].get("model") or "engine")
    parts = [f"<h1>kvgate measure: {escape(name)}</h1>"]
    for section, title in _TITLES.items():
        if isinstance(found := report.get(section), dict):
            parts += [f"<h2>{escape(title)}</h2>", _table(found), *_plots(section, found)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _table(section: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(_shown(value))}</td></tr>"
        for name, value in section.items()
        if not isinstance(value, list | dict)
    ]
    return f"<table>{''.join(rows)}</table>"


def _shown(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _plots(section: str, found: Mapping[str, Any]) -> list[str]:
    if section == "long_generation":
        plots = [
            ("tokens of the answer", "tokens a second", found["parts"]),
            ("seconds", "memory, MiB", found["memory"]),
        ]
        return [curve(points, across, up) for across, up, points in plots if len(points) > 1]
    if section == "parallel_control" and "runs" in found:
        return [
            bars([(f"{run['at_once']} at once", run[member]) for run in found["runs"]], title)
            for member, title in (
                ("ttft_s", "seconds to the first token"),
                ("tokens_per_second_each", "tokens a second, each"),
                ("output_tokens_per_second_together", "tokens a second, together"),
            )
        ]
    if section == "short":
        times = [(str(at + 1), value) for at, value in enumerate(found["ttft_all_s"])]
        return [bars(times, "seconds to the first token, time after time")]
    return []


def curve(points: Sequence[Sequence[float]], across: str, up: str) -> str:
    """A line through points; the vertical axis begins at 0."""
    right, top = max(x for x, _ in points), max(y for _, y in points) or 1.0
    drawn = " ".join(f"{_x(x / right if right else 0):.1f},{_y(y / top):.1f}" for x, y in points)
    return _svg(f'<polyline class="line" points="{drawn}"/>' + _ticks(right, top, across), up)


def bars(values: Sequence[tuple[str, float | None]], up: str) -> str:
    """A bar for each value; those not known have none."""
    top = max((value for _, value in values if value is not None), default=0.0) or 1.0
    step = 1 / max(len(values), 1)
    drawn = []
    for at, (label, value) in enumerate(values):
        left, height = _x((at + 0.2) * step), (value or 0.0) / top
        width = _x((at + 0.8) * step) - left
        shown = _shown(None if value is None else round(value, 3))
        drawn.append(
            f'<rect class="bar" x="{left:.1f}" y="{_y(height):.1f}" width="{width:.1f}" '
            f'height="{_y(0) - _y(height):.1f}"/>'
            f'<text x="{left:.1f}" y="{_y(0) + 16:.1f}">{escape(label)}</text>'
            f'<text x="{left:.1f}" y="{_y(height) - 4:.1f}">{shown}</text>'
        )
    return _svg("".join(drawn), up)


def _ticks(right: float, top: float, across: str) -> str:
    return (
        f'<text x="{_LEFT - 8}" y="{_y(1) + 4:.0f}" text-anchor="end">{top:,.5g}</text>'
        f'<text x="{_LEFT - 8}" y="{_y(0):.0f}" text-anchor="end">0</text>'
        f'<text x="{_x(1):.0f}" y="{_y(0) + 16:.0f}" text-anchor="end">{right:,.5g} {escape(across)}</text>'
    )


def _svg(inside: str, title: str) -> str:
    axes = (
        f'<path class="axis" d="M{_LEFT} {_y(1):.0f}V{_y(0):.0f}H{_WIDTH - 8}" fill="none"/>'
        f'<text x="{_LEFT}" y="14">{escape(title)}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{axes}{inside}</svg>'


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - 8)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - 36)
