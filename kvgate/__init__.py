"""kvgate: a reverse proxy that guards the context budget of an LLM inference server."""

__version__ = "0.1.0"
