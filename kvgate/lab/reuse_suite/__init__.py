"""The suite that decides whether an engine's prefix reuse can be trusted (docs/reuse-suite.md)."""

from kvgate.lab.reuse_suite.access import EngineAccess
from kvgate.lab.reuse_suite.asking import Stopped, SuiteEngine, Unasked
from kvgate.lab.reuse_suite.runner import PLANNED, Notes, Progress, SuiteSettings, run_suite

__all__ = [
    "PLANNED",
    "EngineAccess",
    "Notes",
    "Progress",
    "Stopped",
    "SuiteEngine",
    "SuiteSettings",
    "Unasked",
    "run_suite",
]
