"""llama.cpp's llama-server: how to recognise, discover, count on and watch it, and how to switch reuse off."""

from kvgate.engines.llamacpp.counting import CountingSettings
from kvgate.engines.llamacpp.engine import COUNTERS, COUNTS_AT_ONCE, LlamaCpp, LlamaCppSettings
from kvgate.engines.llamacpp.errors import SAFE_PROBLEMS
from kvgate.engines.llamacpp.reuse_fields import FIELDS, HEADERS, REUSE_FIELDS

__all__ = [
    "COUNTERS",
    "COUNTS_AT_ONCE",
    "FIELDS",
    "HEADERS",
    "REUSE_FIELDS",
    "SAFE_PROBLEMS",
    "CountingSettings",
    "LlamaCpp",
    "LlamaCppSettings",
]
