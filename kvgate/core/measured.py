"""Two measurements side by side: what differs between what was measured, and whether that proves anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_VERSION: Final = 1
"""Of the format; reports of another are not compared."""

VARIABLES: Final = (
    ("engine", "build"),
    ("engine", "model"),
    ("engine", "model_ftype"),
    ("engine", "n_params"),
    ("engine", "kv_type"),
    ("engine", "n_ctx_slot"),
    ("engine", "total_slots"),
    ("engine", "topology"),
    ("engine", "is_speculating"),
    ("workload", "short_prompt_tokens"),
    ("workload", "short_output_tokens"),
    ("workload", "long_prompt_tokens"),
    ("workload", "long_output_tokens"),
    ("machine", "cpus"),
    ("machine", "kind"),
)
"""What may differ between two reports, by section and member; the figures themselves are what is compared."""

_OF_DESKS: Final = frozenset(
    {"engine.total_slots", "engine.n_ctx_slot", "engine.topology"}
    | {f"{section}.{member}" for section, member in VARIABLES if section == "workload"}
)
"""What differs because the slots do: equal desks make it equal."""

FIGURES: Final = (
    ("short", "ttft_s", "s", "lower"),
    ("short", "tokens_per_second", "tokens/s", "higher"),
    ("long_prefill", "ttft_s", "s", "lower"),
    ("long_prefill", "prefill_tokens_per_second", "tokens/s", "higher"),
    ("long_generation", "tokens_per_second", "tokens/s", "higher"),
    ("long_generation", "memory_change_mib", "MiB", "lower"),
)
"""What is compared: section, member, unit, and which way is better."""


class NotAReport(ValueError):
    """A file is no report of `kvgate measure`; the message says why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One variable, or one figure, in both reports."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports side by side.

    Args:
        same_fingerprint: both engines say that they compute alike.
        variables: what differs between what was measured.
        figures: what was measured in both, units in the name.
        refused: why the figures must not be compared; empty where they may be.
        to_do: which runs would prove something.
    """

    same_fingerprint: bool
    variables: tuple[Difference, ...]
    figures: tuple[Difference, ...]
    refused: str
    to_do: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether it proves anything: at most one variable differs."""
        return not self.refused


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> Comparison:
    """Compare two reports: the fingerprint first, then what differs, and the figures if they may be compared.

    Raises:
        NotAReport: one of them is none.
    """
    for report in (first, second):
        if not isinstance(report.get("engine"), dict) or not isinstance(report.get("workload"), dict):
            raise NotAReport("it has no engine and no workload; give two files of `kvgate measure run --output`")
        if (version := report.get("report")) != REPORT_VERSION:
            raise NotAReport(
                f"a report has the format {version!r}, not {REPORT_VERSION}; measure again with this kvgate"
            )
    variables = tuple(
        Difference(f"{section}.{member}", of(first, section, member), of(second, section, member))
        for section, member in VARIABLES
        if of(first, section, member) != of(second, section, member)
    )
    refused, to_do = _verdict({one.name: one for one in variables})
    return Comparison(
        same_fingerprint=of(first, "engine", "fingerprint") == of(second, "engine", "fingerprint"),
        variables=variables,
        figures=() if refused else _figures(first, second),
        refused=refused,
        to_do=to_do,
    )


def _verdict(variables: Mapping[str, Difference]) -> tuple[str, tuple[str, ...]]:
    slots, context = variables.get("engine.total_slots"), variables.get("engine.n_ctx_slot")
    if slots is not None and context is not None:
        desk = max(context.first, context.second)
        sentence = (
            f"unequal desks: {slots.first} slots of {context.first} tokens against {slots.second} of "
            f"{context.second}; parallel compares only where each slot has the same context"
        )
        others = [one for name, one in variables.items() if name not in _OF_DESKS]
        if others:
            sentence += f"; and {', '.join(one.name for one in others)} changed too"
        same = ", all else as in the first report" if others else ""
        return sentence, (
            *(
                f"start with -c {desk * count} -np {count} --no-kv-unified{same}"
                for count in (slots.first, slots.second)
            ),
            *map(_alone, others),
        )
    if len(variables) <= 1:
        return "", ()
    names = ", ".join(variables)
    return (
        f"{len(variables)} variables changed ({names}): the comparison proves nothing about any of them",
        tuple(map(_alone, variables.values())),
    )


def _alone(one: Difference) -> str:
    return f"as the first report, and only {one.name} = {one.second!r} instead of {one.first!r}"


def _figures(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Difference, ...]:
    found = [
        Difference(
            f"{section}.{member}, {unit}, {way} is better", of(first, section, member), of(second, section, member)
        )
        for section, member, unit, way in FIGURES
    ]
    return tuple(one for one in found if one.first is not None and one.second is not None)


def of(report: Mapping[str, Any], section: str, member: str) -> Any:
    """A report's member, None where it has none."""
    found = report.get(section)
    return found.get(member) if isinstance(found, dict) else None


def desks(topology: str | None, n_ctx_slot: int, slots: int, pool_tokens: int | None) -> tuple[int, int]:
    """The context that a request has alone, and that each has where all slots are taken.

    Raises:
        ValueError: it is not known whether slots share the cache, so nobody knows what a desk is.
    """
    if topology is None:
        raise ValueError(
            "it is not known whether slots share the KV cache: give --log, or --topology with what "
            "`kvgate probe --topology` says"
        )
    shared = (pool_tokens or n_ctx_slot) // slots
    return n_ctx_slot, n_ctx_slot if topology == "divided" else min(n_ctx_slot, shared)
