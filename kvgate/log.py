"""One JSON line an event on standard error; no prompt and no key has a field here."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from kvgate.ports import RequestRecord

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_log = logging.getLogger("kvgate.request")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, event, and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start_logging(level: int = logging.INFO, to: TextIO | None = None) -> None:
    """Log from here on, to standard error unless another stream is given."""
    handler = logging.StreamHandler(to or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvgate").setLevel(level)
    # aiohttp logs heads that it cannot parse, and a head holds the key.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)


class RequestLog:
    """One line a request; implements `ports.Observer`."""

    def request(self, record: RequestRecord) -> None:
        """Log one request; what must never happen is logged as an error beside it."""
        usage = record.usage
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "tenant": record.tenant,
            "dialect": record.dialect,
            "path": record.path,
            "status": record.status,
            "verdict": record.verdict,
            "reason": record.reason,
            "duration_ms": round(record.duration_s * 1000, 1),
            "queued_ms": None if record.queued_s is None else round(record.queued_s * 1000, 1),
            "stream": record.stream,
            "sequences": record.sequences,
            "count": record.proof or None,
            "prompt_tokens": record.prompt_tokens,
            "output_limit": record.output_limit,
            "usable_generation": record.usable_generation,
            "trimmed_messages": None if record.trimmed is None else record.trimmed.messages,
            "trimmed_tokens": None if record.trimmed is None else record.trimmed.tokens,
            "trim_how": None if record.trimmed is None else record.trimmed.how,
            "trim_counts": None if record.trimmed is None else record.trimmed.counts,
            "n_ctx_slot": record.n_ctx_slot,
            "used_prompt_tokens": None if usage is None else usage.prompt_tokens,
            "used_output_tokens": None if usage is None else usage.output_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "finish": record.finish or None,
            "ended_by_context": record.ended_by_context or None,
            "loop": None if record.loop is None else record.loop.value,
            "hung_up": record.hung_up or None,
            "detail": record.detail or None,
        }
        _log.info("request", extra={name: value for name, value in fields.items() if value is not None})
        if record.reuse_violation:
            _log.error("reused tokens although reuse was off", extra={"request_id": record.request_id})
        if record.reason == Reason.ENGINE_OVERFLOW.label:
            _log.error(
                "the engine ran out of KV although the ledger had room", extra={"request_id": record.request_id}
            )
        if record.count_drift_tokens:
            drift = {"request_id": record.request_id, "drift_tokens": record.count_drift_tokens}
            _log.error("usage differs from the count", extra=drift)
