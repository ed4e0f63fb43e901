"""The composition root."""

from kvgate.app.gate_app import App, CannotStart
from kvgate.app.workers import Workers

__all__ = ["App", "CannotStart", "Workers"]
