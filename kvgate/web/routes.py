"""The allow-list: every path that is served, exactly as it must be spelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvgate.dialects import all_dialects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgate.ports import Dialect


@dataclass(frozen=True, slots=True)
class Inference:
    """A path whose requests are counted, judged and run under a lease; aliases share the engine's path."""

    dialect: Dialect
    engine_path: str
    method: Literal["POST"] = "POST"


@dataclass(frozen=True, slots=True)
class Control:
    """A path that runs no inference (tokenizer, template, counters): passed on, errors in the dialect's words."""

    dialect: Dialect
    engine_path: str
    method: Literal["POST"] = "POST"


@dataclass(frozen=True, slots=True)
class Own:
    """A path that the gate answers itself, from what it knows of the engine and the tenant."""

    dialect: Dialect
    what: Literal["models", "props"]
    method: Literal["GET"] = "GET"


Route = Inference | Control | Own


def served_routes() -> Mapping[str, Route]:
    """Every served path. What is not here is refused, whatever the engine would make of it."""
    dialects = all_dialects()
    routes: dict[str, Route] = {}
    for dialect in dialects:
        routes.update(dict.fromkeys(dialect.paths, Inference(dialect, dialect.paths[0])))
        routes.update({path: Control(dialect, path) for path in dialect.controls})
    by_name = {dialect.name: dialect for dialect in dialects}
    for path in ("/v1/models", "/models"):
        routes[path] = Own(by_name["openai_chat"], "models")
    routes["/props"] = Own(by_name["llamacpp_completion"], "props")
    return routes
