"""The words for what applying a tenants file did, or would do, and for what recent requests would have met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import plural
from kvgate.cli.keys import key_fields

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvgate.core.replay import Replayed
    from kvgate.store.registry import Applied, Change

    Trials = list[tuple[Change, int, Replayed | None, Replayed | None]]
    """A tenant's change, how many of its requests are recorded, what they meet now, and what they would meet."""


def applied_fields(applied: Applied) -> dict[str, Any]:
    """For programs."""
    return {
        "version": applied.version,
        "added": [change.name for change in applied.added],
        "changed": {change.name: _difference_fields(change) for change in applied.changed},
        "removed": [change.name for change in applied.removed],
        "keys_revoked": [key_fields(key) for change in applied.changes for key in change.revoked],
        "keys_added": [key_fields(key) for change in applied.changes for key in change.granted],
    }


def applied_lines(applied: Applied, unchanged: int, path: Path, *, would: bool) -> list[str]:
    """For people: a line a change, and one that sums up."""
    if not applied.changes:
        return [
            f"nothing to change: {plural(unchanged, 'tenant')} as {path} declares" + ("" if unchanged else " none")
        ]
    lines = [line for change in applied.changes for line in _change_lines(change, would="would be " if would else "")]
    if unchanged:
        lines.append(f"unchanged: {plural(unchanged, 'tenant')}")
    lines.append("nothing was written" if would else "every gate on this store follows within a second")
    return lines


def trial_fields(trials: Trials) -> dict[str, Any]:
    """For programs: by tenant, null where there is nothing to replay it under."""
    return {
        change.name: {"requests": requests, "now": _replayed_fields(now), "then": _replayed_fields(then)}
        for change, requests, now, then in trials
    }


def replay_lines(trials: Trials) -> list[str]:
    """For people: what the declared limits would have made of each tenant's recent requests."""
    lines = [_replay_line(*trial) for trial in trials if trial[1]]
    without = [change.name for change, requests, _, _ in trials if not requests]
    if without:
        lines.append(
            f"no recent requests are recorded of {', '.join(without)}, so nothing is known of what they meet"
        )
    return ["", *lines] if lines else []


def shown(value: object) -> str:
    """A setting's value as people read it."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _difference_fields(change: Change) -> dict[str, Any]:
    return {name: {"before": before, "after": after} for name, (before, after) in _differences(change)}


def _differences(change: Change) -> Iterator[tuple[str, tuple[Any, Any]]]:
    yield from change.differences.items()
    before, after = change.before, change.after
    if before is not None and after is not None and before.keys_declared != after.keys_declared:
        made = {True: "its file", False: "kvgate keys"}
        yield "keys_made_by", (made[before.keys_declared], made[after.keys_declared])


def _change_lines(change: Change, would: str) -> Iterator[str]:
    if change.after is None:
        keys = plural(len(change.revoked), "key")
        yield f"{would}removed: {change.name}, and {keys} of it {would}revoked"
    elif change.before is None:
        has = "keys" if change.after.keys_declared else "no key yet (kvgate keys create makes one)"
        keys = plural(len(change.granted), "key") if change.granted else has
        yield f"{would}added: {change.name}, {keys}"
    else:
        said = [f"{name} {shown(before)} -> {shown(after)}" for name, (before, after) in _differences(change)]
        said += [f"key {key.key_id} added" for key in change.granted]
        yield f"{would}changed: {change.name}: {', '.join(said)}" if said else f"{would}changed: {change.name}"
    for key in change.revoked:
        origin = f"made by {key.created_by}, {key.label or 'no label'}" if key.minted else "declared in the file"
        yield f"  key {key.key_id} {would}revoked ({origin})"


def _replayed_fields(found: Replayed | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "would_reject": found.rejections,
        "reasons": dict(found.rejected),
        "would_clamp": found.clamped,
        "would_trim": found.trimmed,
        "prompt_tokens_max": found.prompt_tokens_max,
    }


def _replay_line(change: Change, requests: int, now: Replayed | None, then: Replayed | None) -> str:
    if then is None:
        return f"{change.name}: would refuse all of its last {plural(requests, 'request')}: unknown key"
    rejected_now = "" if now is None else f" (now {now.rejections:,})"
    clamped_now = "" if now is None else f" (now {now.clamped:,})"
    reasons = ", ".join(f"{label} {count:,}" for label, count in then.rejected)
    parts = [
        f"would reject {then.rejections:,} of {requests:,} recent requests{rejected_now}"
        + (f": {reasons}" if reasons else "")
    ]
    if then.clamped or (now and now.clamped):
        parts.append(f"would clamp {then.clamped:,}{clamped_now}")
    if then.trimmed or (now and now.trimmed):
        trimmed_now = "" if now is None else f" (now {now.trimmed:,})"
        parts.append(f"would trim {then.trimmed:,}{trimmed_now}, as far as their text allows")
    return f"{change.name}: {'; '.join(parts)}; largest prompt {then.prompt_tokens_max:,} tokens"
