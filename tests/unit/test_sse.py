"""Event streams: the same events, wherever the bytes happen to be cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvgate.core import sse
from kvgate.core.sse import EventSplitter, EventTooLarge, event_data


def split_all(*pieces: bytes) -> tuple[list[bytes], bytes]:
    """The events of a stream that arrives in these pieces, and what is left over."""
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return events, splitter.rest


OPENAI = (
    b': ping\n\ndata: {"choices":[{"delta":{"content":"gr\xc3\xbc\xc3\x9fe \xf0\x9f\x98\x80"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\ndata: [DONE]\n\n'
)
ANTHROPIC = (
    b'event: message_start\r\ndata: {"type":"message_start"}\r\n\r\n'
    b'event: message_stop\r\ndata: {"type":"message_stop"}\r\n\r\n'
)


def test_a_stream_falls_into_its_events_each_with_its_blank_line() -> None:
    """Comments and `event:` lines are kept: put together again, the events are the stream."""
    events, rest = split_all(OPENAI)
    assert [event_data(event) for event in events] == [
        None,
        '{"choices":[{"delta":{"content":"grüße 😀"}}]}'.encode(),
        b'{"choices":[],"usage":{"prompt_tokens":3}}',
        b"[DONE]",
    ]
    assert b"".join(events) == OPENAI
    assert rest == b""


def test_lines_may_end_with_carriage_returns() -> None:
    """CRLF is a line end of the standard."""
    events, rest = split_all(ANTHROPIC)
    assert [event_data(event) for event in events] == [b'{"type":"message_start"}', b'{"type":"message_stop"}']
    assert (b"".join(events), rest) == (ANTHROPIC, b"")


@pytest.mark.parametrize("stream", [OPENAI, ANTHROPIC], ids=["lf", "crlf"])
def test_a_cut_at_any_byte_changes_nothing(stream: bytes) -> None:
    """Also inside a UTF-8 character, between CR and LF, and in the middle of the blank line."""
    whole = split_all(stream)
    for at in range(len(stream) + 1):
        assert split_all(stream[:at], stream[at:]) == whole
    assert split_all(*(stream[at : at + 1] for at in range(len(stream)))) == whole


def test_an_event_that_has_not_ended_is_kept_and_told() -> None:
    """An engine that dies in the middle of an event leaves a rest: it is no clean end."""
    events, rest = split_all(b'data: 1\n\ndata: {"cho')
    assert (events, rest) == ([b"data: 1\n\n"], b'data: {"cho')


lines = st.sampled_from([b"data: x", b"data:", b"data: \xf0\x9f\x98\x80", b": ping", b"event: e", b"", b" ", b"\r"])
streams = st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\n\n", b"\r\n", b"\r\n\r\n"])), max_size=8).map(
    lambda parts: b"".join(line + end for line, end in parts)
)


@given(st.data(), streams)
def test_any_cuts_of_any_stream_give_the_same_events(data: st.DataObject, stream: bytes) -> None:
    """However many pieces, empty ones too; nothing is lost, doubled or moved."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    events, rest = split_all(*pieces)
    assert (events, rest) == split_all(stream)
    assert b"".join(events) + rest == stream
    assert all(len(re.findall(rb"\n\r?\n", event)) == 1 and re.search(rb"\n\r?\n\Z", event) for event in events)
    assert not re.search(rb"\n\r?\n", rest)


@given(streams)
@example(b"data: x\n\n\n")
def test_one_piece_with_blank_lines_to_spare_is_cut_like_any_other(stream: bytes) -> None:
    """The short way for one whole event takes nothing else."""
    assert split_all(stream) == split_all(*(stream[at : at + 1] for at in range(len(stream))))


# -- the data of an event


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: [DONE]\n\n", b"[DONE]"),
        (b"data:[DONE]\n\n", b"[DONE]"),
        (b"data:  two\n\n", b" two"),
        (b"data: \n\n", b""),
        (b"data:\r\n\r\n", b""),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\r\ndata: b\r\n\r\n", b"a\nb"),
        (b"data: a\nid: 7\n\n", b"a"),
        (b"event: ping\ndata: {}\n\n", b"{}"),
        (b": data: no\n\n", None),
        (b"event: ping\n\n", None),
        (b"database: x\n\n", None),
        (b"\n", None),
        (b"", None),
    ],
    ids=str,
)
def test_the_data_of_an_event(event: bytes, data: bytes | None) -> None:
    """One space after the colon is no data, several lines are joined, comments have none."""
    assert event_data(event) == data


# -- bounds


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 32)
    return 32


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
def test_an_event_may_be_as_long_as_the_limit_and_no_longer(small_limit: int, end: bytes, piece: int) -> None:
    """What one stream may hold is bounded, whether the event ends or not, and wherever it is cut."""
    longest = b"data: ".ljust(small_limit - len(end), b"x") + end
    assert split_all(*(longest[at : at + piece] for at in range(0, len(longest), piece))) == ([longest], b"")
    for longer in (b"data: x" + longest[6:], longest[: -len(end)] + b"xxxxx"):
        pieces = [longer[at : at + piece] for at in range(0, len(longer), piece)]
        with pytest.raises(EventTooLarge, match="over 32 bytes"):
            split_all(*pieces)


def test_many_events_in_one_piece_are_not_one_large_event(small_limit: int) -> None:
    """The limit is on an event, not on a read."""
    assert len(split_all(b"data: x\n\n" * 100)[0]) == 100


def test_a_large_event_in_many_pieces_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB in pieces of 16 KB: bytes looked at grow with the stream, not with its square."""
    looked_at = 0

    class CountingEnd:
        def search(self, buffer: bytearray, start: int) -> re.Match[bytes] | None:
            nonlocal looked_at
            looked_at += len(buffer) - start
            return end.search(buffer, start)

    end = sse._END
    monkeypatch.setattr(sse, "_END", CountingEnd())
    event = b"data: ".ljust(4_000_000, b"x") + b"\n\n"
    pieces = [event[at : at + 16_384] for at in range(0, len(event), 16_384)]
    assert split_all(*pieces) == ([event], b"")
    assert len(event) <= looked_at <= len(event) + 4 * len(pieces)
