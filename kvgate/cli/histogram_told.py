"""The words and the terminal plot of `kvgate histogram`, and of its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvgate.cli.answers import plural, table
from kvgate.core.profile import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgate.core.histogram import Histogram
    from kvgate.core.plan import Planned

    Histograms = list[tuple[str, int | None, Histogram]]
    """Name, n_ctx_slot of its last request where known, and what its requests were."""

BAR: Final = 40


def histogram_lines(name: str, n_ctx_slot: int | None, found: Histogram) -> list[str]:
    """One tenant's contexts for a terminal."""
    slot = "" if n_ctx_slot is None else f"; n_ctx_slot {n_ctx_slot:,}"
    lines = [f"{name}: {plural(found.requests, 'request')}{slot}", ""]
    rows = [("tokens", "prompt", "with output")]
    for (percent, prompt), (_, total) in zip(found.prompts, found.totals, strict=True):
        rows.append((percent_name(percent), f"{prompt:,}", f"{total:,}"))
    lines += table(rows)
    rows = [("fit", "prompt", "with output")]
    for share in found.shares:
        mark = "  <- n_ctx_slot" if share.tokens == n_ctx_slot else ""
        whole = [percentage(part, found.requests) for part in (share.prompts, share.totals)]
        rows.append((size_name(share.tokens), whole[0], whole[1] + mark))
    return [*lines, "", *table(rows), "", *_bars(found)]


def _bars(found: Histogram) -> list[str]:
    most = max((bar.requests for bar in found.bars), default=1)
    rows = []
    for bar in found.bars:
        # A bar of few is never drawn as none.
        filled = -(-bar.requests * BAR // most)
        rows.append((f"{bar.above + 1:,}-{bar.up_to:,}", f"|{'#' * filled:{BAR}}", f"{bar.requests:,}"))
    return table([("prompt and output", "", "requests"), *rows])


def plan_lines(planned: Iterable[Planned], budget_mib: float, bytes_per_token: float) -> list[str]:
    """The proposals, the best first."""
    every = list(planned)
    rows = [("", "LINE", "N_CTX_SLOT", "REJECTS", "AT ONCE", "KV MIB")]
    for at, one in enumerate(every):
        share = f"{percentage(one.rejections, one.requests)}{_why(one)}"
        cells = ("*" if at == 0 else "", one.line.flags, f"{one.line.n_ctx_slot:,}", share)
        rows.append((*cells, str(one.side_by_side), f"{one.kv_bytes / MIB:.1f}"))
    lines = [
        f"lines whose KV cache fits {budget_mib:,.1f} MiB, at {bytes_per_token:,.0f} bytes a token:",
        *table(rows),
    ]
    if every and every[0].line.unified:
        pool = every[0].line.cells
        lines.append(f'with that line, write under [engine]: kv_topology = "unified", pool_tokens = {pool}')
    elif every:
        lines.append('with that line, write under [engine]: kv_topology = "divided"')
    return lines


def plan_fields(one: Planned) -> dict[str, Any]:
    """A proposal for programs."""
    return {
        "flags": one.line.flags,
        "context_tokens": one.line.context_tokens,
        "slots": one.line.slots,
        "kv_unified": one.line.unified,
        "n_ctx_slot": one.line.n_ctx_slot,
        "pool_tokens": one.line.cells,
        "kv_mib": round(one.kv_bytes / MIB, 2),
        "requests": one.requests,
        "rejected": one.rejections,
        "rejected_by_reason": dict(one.rejected),
        "rejected_by_tenant": dict(one.rejected_of),
        "side_by_side": one.side_by_side,
    }


def percent_name(percent: int) -> str:
    """p50, p99, the longest."""
    return "longest" if percent == 100 else f"p{percent}"


def size_name(tokens: int) -> str:
    """4096 as 4k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def percentage(part: int, whole: int) -> str:
    """A share; never rounded to all or to none where it is not."""
    if not whole or part in {0, whole}:
        return "0%" if not part else "100%"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f}%"


def _why(one: Planned) -> str:
    return f" ({one.rejected[0][0]})" if one.rejected else ""
