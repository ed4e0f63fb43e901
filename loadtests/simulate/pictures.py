"""PNG pictures of a workload: service over time by tenant and policy, and the largest gap against the bound."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadtests.simulate.results import Result
    from loadtests.simulate.workloads import Workload

TENANTS_SHOWN: Final = 8
DPI: Final = 72


class PlotsMissing(Exception):
    """There is nothing to draw with; the message says how to get it."""


def need_plots() -> Any:
    """What draws.

    Raises:
        PlotsMissing: the extra is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - heavy, and an extra
    except ImportError:
        raise PlotsMissing(
            "pictures need matplotlib, which is not installed: pip install 'kvgate[plots]' (in a checkout: "
            "pip install -c constraints.txt -e '.[plots]'), or leave --png out; the terminal shows lines too"
        ) from None
    return Figure


def save(workload: Workload, results: Sequence[Result], directory: Path) -> list[Path]:
    """Draw both pictures; their names begin with the workload's.

    Raises:
        PlotsMissing: the extra is not installed.
    """
    figure = need_plots()
    directory.mkdir(parents=True, exist_ok=True)
    return [
        _service(figure, workload, results, directory / f"{workload.name}-service.png"),
        _gaps(figure, workload, results, directory / f"{workload.name}-gap.png"),
    ]


def _service(figure: Any, workload: Workload, results: Sequence[Result], path: Path) -> Path:
    drawn = figure(figsize=(3.2 * len(results) + 0.8, 3.4), layout="constrained")
    axes = drawn.subplots(1, len(results), sharey=True, squeeze=False)[0]
    senders = workload.senders[:TENANTS_SHOWN]
    for axis, found in zip(axes, results, strict=True):
        minutes = [sample.at_s / 60 for sample in found.samples]
        for sender in senders:
            service = [sample.service[sender.name] / sender.weight for sample in found.samples]
            axis.plot(minutes, service, label=sender.name, linewidth=1.3)
        axis.set_title(f"{found.policy} (Jain {found.jain:.3f})", fontsize=10)
        axis.set_xlabel("minutes")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("service / weight")
    axes[-1].legend(fontsize=8)
    drawn.suptitle(f"{workload.name}: what each tenant got for its weight", fontsize=11)
    drawn.savefig(path, dpi=DPI)
    return path


def _gaps(figure: Any, workload: Workload, results: Sequence[Result], path: Path) -> Path:
    drawn = figure(figsize=(7, 3.4), layout="constrained")
    axis = drawn.subplots()
    for found in results:
        largest = list(accumulate((sample.gap for sample in found.samples), max))
        axis.plot([sample.at_s / 60 for sample in found.samples], largest, label=found.policy, linewidth=1.3)
    bounds = {found.ruling.bound for found in results if found.ruling.bound is not None}
    for bound in bounds:
        axis.axhline(bound, color="black", linestyle="--", linewidth=1, label="the bound")
    axis.set_yscale("symlog", linthresh=100)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("minutes")
    axis.set_ylabel("largest gap in service / weight")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(f"{workload.name}: between tenants that both wait", fontsize=11)
    drawn.savefig(path, dpi=DPI)
    return path
