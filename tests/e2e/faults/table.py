"""The fault matrix as it must be: each fault, the client's view of it and the ledger's state after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.e2e.faults import acts
from tests.e2e.faults.acts import counting, hanging_health, leaves_while, replying, saying
from tests.e2e.faults.asking import PATHS, Ask
from tests.e2e.faults.lane import IDLE_TIMEOUT_S
from tests.fake_engine import (
    close_before_head,
    huge_head,
    informational,
    not_http,
    reset_before_head,
    stall,
    whole,
)
from tests.fake_engine import family_faults as fault

if TYPE_CHECKING:
    from tests.e2e.faults.acts import Act

KEPT: Final = "never held"
FREE: Final = "free at once"
DRAINED: Final = "drained"


class Seen(NamedTuple):
    """What the client sees, and what the ledger does."""

    client: str
    ledger: str


@dataclass(frozen=True)
class Row:
    """One fault, the same in every dialect; None where it cannot be in a stream, or not in a whole answer."""

    name: str
    act: Act
    stream: Seen | None
    whole: Seen | None

    def expected(self, ask: Ask) -> Seen | None:
        return self.stream if ask.stream else self.whole


def _both(name: str, act: Act, client: str, ledger: str) -> Row:
    return Row(name, act, Seen(client, ledger), Seen(client, ledger))


def _error(status: str, message: str, kind: str = "server_error", **more: object) -> Act:
    return replying(whole(status, {"error": {"code": int(status[:3]), "message": message, "type": kind, **more}}))


_LONG_S: Final = 1.8 * IDLE_TIMEOUT_S
_EXCEEDED: Final = {"n_prompt_tokens": 600, "n_ctx": 512}

GROUPS: Final[dict[str, tuple[Row, ...]]] = {
    "The engine cannot be reached": (
        _both("nobody listens", acts.engine_gone, "503 engine_unreachable", KEPT),
        _both("connections are closed at once", acts.engine_turns_away, "503 engine_unreachable", KEPT),
        _both("it hangs from the start", acts.engine_hangs, "503 engine_unreachable", KEPT),
        _both("it vanishes between count and send", acts.gone_after_the_count, "503 engine_unreachable", KEPT),
        _both("it resets the counting", counting(reset_before_head), "503 engine_unreachable", KEPT),
        _both("its idle connections are closed", acts.idle_connections_gone, "200", FREE),
        _both("replaced by a smaller one between count and send", acts.becoming(16), "400 prompt_overflow", KEPT),
        _both("replaced by an equal one between count and send", acts.becoming(512), "200", FREE),
    ),
    "Before the answer": (
        _both("reset before the head", replying(reset_before_head), "502 engine_failed", DRAINED),
        _both("closed before the head", replying(close_before_head), "502 engine_failed", DRAINED),
        _both("closed within the head", replying(fault.half_a_head), "502 engine_failed", DRAINED),
        _both("not HTTP", replying(not_http), "502 engine_failed", DRAINED),
        _both("a head without end", replying(huge_head), "502 engine_failed", DRAINED),
        _both("500, its own failure", _error("500 X", "segmentation fault"), "502 engine_failed", FREE),
        _both("500, the client's mistake", _error("500 X", "Failed to parse grammar"), "400 engine_refused", FREE),
        _both(
            "400 exceed_context_size",
            _error("400 X", "too long", "exceed_context_size_error", **_EXCEEDED),
            "400 prompt_overflow",
            FREE,
        ),
        _both("503, loading", _error("503 X", "Loading model", "unavailable_error"), "503 engine_loading", FREE),
        _both("404", _error("404 X", "File Not Found", "not_found_error"), "501 engine_cannot", FREE),
        _both("501", _error("501 X", "not supported", "not_supported_error"), "501 engine_cannot", FREE),
        Row(
            "its pool is full",
            replying(fault.overflown_at_once),
            Seen("502 engine_overflow", DRAINED),
            Seen("502 engine_overflow", FREE),
        ),
        Row(
            "an error inside a 200, first",
            replying(fault.failing("no", first=True)),
            Seen("502 engine_failed", DRAINED),
            Seen("502 engine_failed", FREE),
        ),
        Row(
            "a 200 with nothing in it",
            replying(fault.nothing),
            Seen("502 engine_failed", DRAINED),
            Seen("502 engine_failed", FREE),
        ),
        Row(
            "a 200 that is no JSON",
            replying(fault.no_json),
            None,
            Seen("502 engine_failed", FREE),
        ),
    ),
    "In mid-answer": (
        Row(
            "an error event behind the first words",
            replying(fault.failing("no", first=False)),
            Seen("200, then engine_failed", DRAINED),
            None,
        ),
        Row(
            "its pool is full behind the first words",
            replying(fault.failing("Context size has been exceeded.", first=False)),
            Seen("200, then engine_overflow", DRAINED),
            None,
        ),
        Row(
            "a comment, then an error event",
            replying(fault.comment_then_failure),
            Seen("200, then engine_failed", DRAINED),
            None,
        ),
        Row(
            "cut within an event, or within the body",
            replying(fault.cut("event")),
            Seen("200, then engine_failed", DRAINED),
            Seen("502 engine_failed", DRAINED),
        ),
        Row(
            "cut within a character",
            replying(fault.cut("character")),
            Seen("200, then engine_failed", DRAINED),
            Seen("502 engine_failed", DRAINED),
        ),
        Row(
            "an orderly end without the end marker",
            replying(fault.no_end_marker),
            Seen("200, then engine_failed", DRAINED),
            None,
        ),
        Row(
            "HTTP chunks that are none",
            replying(fault.broken_chunks),
            Seen("200, then engine_failed", DRAINED),
            Seen("502 engine_failed", DRAINED),
        ),
        Row(
            "an event of 9 MiB",
            replying(fault.endless_event(9 * 1024 * 1024)),
            Seen("200, then engine_failed", DRAINED),
            None,
        ),
    ),
    "Odd, and right": (
        _both("two answers to one request", replying(fault.two_answers), "200", FREE),
        _both("every byte in a packet of its own", replying(fault.byte_by_byte), "200", FREE),
        Row("all events in one chunk", replying(fault.all_at_once), Seen("200", FREE), None),
        _both("an event of 1 MB", saying("Hi", "x" * 1_000_000, "."), "200", FREE),
        _both("an answer without a length", replying(fault.without_length), "200", FREE),
        _both(
            "informational heads before it", replying(informational(b"HTTP/1.1 103 X\r\nA: b\r\n\r\n")), "200", FREE
        ),
        _both('`"error": null` in it', replying(fault.rewritten(fault.with_a_null_error)), "200", FREE),
        _both("no usage", replying(fault.rewritten(fault.without_usage)), "200", FREE),
        Row("the usage twice", replying(fault.rewritten(fault.with_usage_twice)), Seen("200", FREE), None),
        Row("events without choices", replying(fault.rewritten(fault.with_a_stranger)), Seen("200", FREE), None),
    ),
    f"Silence, with idle_timeout_s = {IDLE_TIMEOUT_S:g}": (
        _both("slow, and never silent for so long", replying(fault.slowly(_LONG_S)), "200", FREE),
        Row(
            "silent in mid-answer",
            replying(fault.silent_in_mid_answer),
            Seen("200, then engine_stalled", DRAINED),
            Seen("504 engine_stalled", DRAINED),
        ),
        Row(
            "silent in mid-answer, /health hangs",
            hanging_health(fault.silent_in_mid_answer),
            Seen("200, then engine_stalled", DRAINED),
            Seen("504 engine_stalled", DRAINED),
        ),
        _both("silent before the answer, /health answers", replying(fault.late(_LONG_S)), "200", FREE),
        _both("silent before the answer, /health hangs", hanging_health(stall), "504 engine_stalled", DRAINED),
    ),
    "The client": (
        _both("reads late", acts.reads_late, "200", FREE),
        Row("never reads", acts.never_reads, Seen("cut", DRAINED), None),
        Row("never reads, unstreamed", acts.never_reads_the_whole, None, Seen("cut", FREE)),
        _both("leaves while it is counted", leaves_while(stall, counted=True), acts.LEFT, KEPT),
        Row(
            "leaves the queue",
            acts.leaves_the_queue,
            Seen(acts.LEFT, KEPT),
            Seen(acts.LEFT, KEPT),
        ),
        _both("leaves before the first byte", leaves_while(stall), acts.LEFT, DRAINED),
        Row(
            "leaves in mid-answer",
            leaves_while(fault.silent_in_mid_answer, after_bytes=True),
            Seen(acts.LEFT, DRAINED),
            None,
        ),
        Row(
            "leaves in mid-answer, unstreamed",
            leaves_while(fault.silent_in_mid_answer),
            None,
            Seen(acts.LEFT, DRAINED),
        ),
    ),
}

ROWS: Final = {row.name: row for rows in GROUPS.values() for row in rows}


class Cell(NamedTuple):
    """One fault under one request."""

    row: Row
    ask: Ask

    def __repr__(self) -> str:
        return f"{self.row.name}-{self.ask.dialect}-{'stream' if self.ask.stream else 'whole'}"


CELLS: Final = [
    Cell(row, ask)
    for row in ROWS.values()
    for ask in (Ask(dialect, stream) for stream in (True, False) for dialect in PATHS)
    if row.expected(ask) is not None
]
