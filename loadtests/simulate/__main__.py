"""Policies side by side on simulated workloads: who gets what, who waits, and what stands idle.

    python -m loadtests.simulate                                  all workloads but the crowd, all policies
    python -m loadtests.simulate crowd --policies vtc --tenants 1000
    python -m loadtests.simulate overload --engine FILE --png DIR
    python -m loadtests.simulate calibrate URL --save FILE        measure a running llama-server

The policies vtc and vtc-tiers are the ledger that serves (kvgate.core.ledger), in simulated time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvgate.core.fairness import FairRule
from kvgate.core.profile import KvSettings, Topology
from loadtests.simulate import pictures
from loadtests.simulate.calibrate import Calibration, CalibrationError, calibrate
from loadtests.simulate.compare import compare
from loadtests.simulate.policies import POLICIES, policy
from loadtests.simulate.progress import Progress
from loadtests.simulate.report import report
from loadtests.simulate.scenarios import SCENARIOS, crowd
from loadtests.simulate.speed import Engine, EngineFileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtests.simulate.workloads import Workload


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all ran (or was measured), 2 where something is missing that the message names."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _calibrate(given[1:]) if given[:1] == ["calibrate"] else _simulate(given)
    except (EngineFileError, CalibrationError, pictures.PlotsMissing) as problem:
        print(problem, file=sys.stderr)
        return 2


def _simulate(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.png is not None:
        pictures.need_plots()  # before an hour's run, not after it
    workloads = [_workload(name, options) for name in options.workloads or [n for n in SCENARIOS if n != "crowd"]]
    rule = FairRule(prefill_tokens_max=options.prefill_tokens_max, bypass_max=options.bypass_max)
    progress = Progress(sum(w.duration_s * len(_worth(options.policies, w)) for w in workloads))
    told = []
    for workload in workloads:
        policies = _worth(options.policies, workload)
        results = compare(workload, policies, progress, patience_s=options.patience_s, rule=rule)
        if options.json:
            told.append({"workload": workload.name, "results": [found.as_json() for found in results]})
        else:
            print(report(workload, results, options.tenants_shown), flush=True)
            print()
        if options.png is not None:
            for path in pictures.save(workload, results, options.png):
                print(f"drawn: {path}", file=sys.stderr)
    if options.json:
        print(json.dumps(told, indent=2))
    return 0


def _worth(policies: list[str], workload: Workload) -> list[str]:
    """Those that were asked for, or all; without tiers in the workload, vtc-tiers only where it is asked for."""
    return policies or [name for name in POLICIES if name != "vtc-tiers" or workload.has_tiers]


def _workload(name: str, options: argparse.Namespace) -> Workload:
    workload = crowd(options.seed, options.tenants) if name == "crowd" else SCENARIOS[name](options.seed)
    if options.engine is not None:
        workload = workload.fitted(Engine.read(options.engine))
    return workload.lasting(options.duration_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # `choices` would refuse the empty list that nargs="*" begins with.
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", type=_scenario, help=", ".join(SCENARIOS))
    parser.add_argument(
        "--policies",
        nargs="+",
        type=_policy,
        default=[],
        metavar="POLICY",
        help="fcfs, rpm (what an even share could be served), rpm:N, vtc, vtc-tiers; all, where none is named",
    )
    parser.add_argument("--engine", type=Path, metavar="FILE", help="an engine as `calibrate --save` wrote it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duration-s", type=_positive, metavar="S", help="simulated seconds, instead of its own")
    parser.add_argument("--tenants", type=int, default=1000, metavar="N", help="of the crowd (1000)")
    parser.add_argument(
        "--patience-s", type=_positive, default=math.inf, metavar="S", help="who waits longer hangs up"
    )
    parser.add_argument(
        "--prefill-tokens-max", type=int, metavar="N", help="prompt tokens in flight, of vtc; no limit"
    )
    parser.add_argument(
        "--bypass-max", type=int, default=FairRule().bypass_max, metavar="N", help="of vtc (%(default)s)"
    )
    parser.add_argument("--tenants-shown", type=int, default=8, metavar="N", help="rows of each tenants' table (8)")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of tables")
    parser.add_argument(
        "--png", type=Path, metavar="DIR", help="draw pictures into this folder (needs kvgate[plots])"
    )
    return parser


def _scenario(name: str) -> str:
    if name not in SCENARIOS:
        raise argparse.ArgumentTypeError(f"there is no workload {name!r}; there are {', '.join(SCENARIOS)}")
    return name


def _policy(name: str) -> str:
    try:
        policy(name, SCENARIOS["overload"](1))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _positive(text: str) -> float:
    if (value := float(text)) <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _calibrate(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.simulate calibrate",
        description="Measure a running, idle llama-server, for --engine.",
    )
    parser.add_argument("url")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the engine there; else it is printed")
    parser.add_argument("--kv", choices=[str(t) for t in Topology], help="the KV cache's topology, which HTTP hides")
    parser.add_argument("--pool-tokens", type=int, metavar="N", help="of a shared KV cache (--kv unified)")
    parser.add_argument("--batch-tokens", type=int, default=2048, metavar="N", help="the engine's -b (2048)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts (3)")
    options = parser.parse_args(arguments)
    kv = KvSettings(None if options.kv is None else Topology(options.kv), options.pool_tokens)
    found = calibrate(
        options.url,
        kv,
        batch_tokens=options.batch_tokens,
        rounds=options.rounds,
        say=lambda s: print(s, file=sys.stderr),
    )
    print(_checked(found), file=sys.stderr)
    text = json.dumps(found.engine.as_json(), indent=2)
    if options.save is None:
        print(text)
    else:
        options.save.write_text(text + "\n")
        print(f"saved; now: python -m loadtests.simulate --engine {options.save}", file=sys.stderr)
    return 0


def _checked(found: Calibration) -> str:
    """What was measured and simulated besides."""
    said = (
        f"{found.burst_requests} requests of many sizes took {found.burst_s:.2f} s; the simulation says "
        f"{found.burst_told_s:.2f} s"
    )
    if found.stall_s is None or found.stall_told_s is None:
        return said
    return (
        f"a prompt of {found.stall_tokens} tokens held up a running answer for {found.stall_s:.2f} s; "
        f"the simulation says {found.stall_told_s:.2f} s\n{said}"
    )


if __name__ == "__main__":
    sys.exit(main())
