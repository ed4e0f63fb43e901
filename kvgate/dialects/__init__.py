"""The API shapes that kvgate serves, one file each; none knows of another."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgate.ports import Dialect


def all_dialects() -> tuple[Dialect, ...]:
    """Every dialect of this folder, sorted by name: a new one is a new file, and is served at its `paths`."""
    found: list[Dialect] = []
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
        found += [value() for value in own if isinstance(value, type) and hasattr(value, "paths")]
    return tuple(sorted(found, key=lambda dialect: dialect.name))
