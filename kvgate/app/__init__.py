"""The composition root."""

from kvgate.app.gate_app import App, CannotStart

__all__ = ["App", "CannotStart"]
