"""Keeps what an interrupted run of the suite has found in a file, for the same engine process alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.reuse_suite import SUITE_VERSION, CaseResult, Outcome
from kvgate.lab.reuse_suite.runner import Notes

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.core.profile import EngineProfile


_FINAL: Final = frozenset({Outcome.PASSED, Outcome.FAILED})
"""What a case is not asked again after: the others may end otherwise the next time."""


class NotesFile:
    """The file of one engine process.

    Args:
        path: where it is; written beside and moved there, so that it is never half.
        profile: the process; one that shows no instance cannot be told from its successor, so nothing is kept of it.
    """

    def __init__(self, path: Path, profile: EngineProfile) -> None:
        self._path = path
        self._of = {
            "fingerprint": profile.fingerprint,
            "instance": profile.instance,
            "suite_version": SUITE_VERSION,
        }

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._of["instance"] is not None

    def read(self) -> Notes:
        """What an earlier run on this process left; empty where there is none, or it was of another."""
        try:
            known = json.loads(self._path.read_bytes())
            if not self.keeps or known["of"] != self._of:
                return Notes()
            cases = {str(name): _case(found) for name, found in known["cases"].items()}
            return Notes(
                depth_tokens=int(known["depth_tokens"]),
                noise=[float(nats) for nats in known["noise"]],
                cases={name: case for name, case in cases.items() if case.outcome in _FINAL},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Notes()

    def keep(self, notes: Notes) -> None:
        """Write it down.

        Raises:
            OSError: it cannot be written.
        """
        if not self.keeps:
            return
        known = {"of": self._of, **asdict(notes)}
        beside = self._path.with_name(f".{self._path.name}.new")
        beside.write_text(json.dumps(known, indent=1) + "\n")
        beside.replace(self._path)

    def forget(self) -> None:
        """The run came to its end: the next begins anew."""
        self._path.unlink(missing_ok=True)


def _case(known: dict[str, Any]) -> CaseResult:
    return CaseResult(**{**known, "outcome": Outcome(known["outcome"])})
