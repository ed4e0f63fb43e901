"""The text that is found without parsing is the text that parsing finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.core.loops import Loop
from kvgate.wire import generated
from kvgate.wire.generated import StreamWatch, loop_in, members, text_of

CONTENT = members("content", "reasoning_content")

TRICKY = st.text(alphabet=st.sampled_from('ab"\\\n:{},é🦜 ')) | st.text()


def event(name: str, text: str, index: int = 0, **how: Any) -> bytes:
    document = {"choices": [{"finish_reason": None, "index": index, "delta": {name: text}}], "id": 'x"content":"no'}
    return b"data: " + json.dumps(document, **how).encode("utf-8", "surrogatepass") + b"\n\n"


@given(st.lists(TRICKY, min_size=1), st.booleans(), st.booleans())
def test_every_text_is_read_as_json_reads_it(texts: list[str], escaped: bool, spaced: bool) -> None:
    """Quotes, backslashes, and what looks like a member within a text, escaped or not."""
    how: Any = {"ensure_ascii": escaped, "separators": (", ", ": ") if spaced else (",", ":")}
    data = b"".join(event("content", text, **how) for text in texts)
    assert text_of(CONTENT[0].findall(data)) == "".join(texts)


def looping(name: str = "content", index: int = 0, count: int = 600, **how: Any) -> list[bytes]:
    return [event(name, ("on ", "and ", '"on" ')[at % 3], index, **how) for at in range(count)]


@pytest.mark.parametrize("name", ["content", "reasoning_content"])
@pytest.mark.parametrize("size", [1, 37, 1000, 10**6])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_loop_is_found_wherever_the_bytes_are_cut(name: str, size: int, line_end: bytes) -> None:
    data = b"".join(looping(name)).replace(b"\n", line_end)
    watch = StreamWatch(CONTENT, 1)
    for at in range(0, len(data), size):
        watch.take(data[at : at + size])
    assert watch.look() is Loop.TEXT


def test_a_loop_behind_another_member_is_found() -> None:
    """A model thinks first; then its answer goes round."""
    watch = StreamWatch(CONTENT, 1)
    for at in range(300):
        watch.take(event("reasoning_content", f"step {at * at}, "))
    assert watch.look() is None
    assert any(watch.take(one) for one in looping(count=2000))


def test_answers_side_by_side_are_told_apart() -> None:
    """Two that go well are no loop together; one that goes round is found beside one that does not."""
    two = StreamWatch(CONTENT, 2)
    for at in range(600):
        two.take(event("content", f"{at * at} apples ", 0))
        two.take(event("content", f"{at * at} apples ", 1))
    assert two.look() is None
    for one in looping(index=1):
        two.take(event("content", "", 0))
        two.take(one)
    assert two.look() is Loop.TEXT


def test_memory_is_bounded_where_events_never_end() -> None:
    watch = StreamWatch(CONTENT, 1)
    most = 0
    for _ in range(200):
        watch.take(b'data: {"content":"' + b"x" * 10_000)
        most = max(most, sum(map(len, watch._pieces)))
    assert most < generated.EVENT_BYTES_MAX + 2 * generated.LOOK_BYTES


def test_one_long_read_costs_no_more_than_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast engine's read holds hundreds of events; of text that is new, a part is read all the same."""
    read_bytes: list[int] = []
    text = StreamWatch._text

    def counted(watch: StreamWatch, data: bytes) -> str:
        read_bytes.append(len(data))
        return text(watch, data)

    monkeypatch.setattr(StreamWatch, "_text", counted)
    events = [event("content", f"{at * 7919:x} ") for at in range(4000)]
    watch = StreamWatch(CONTENT, 1)
    for at in range(0, len(events), 800):
        watch.take(b"".join(events[at : at + 800]))
    assert watch.look() is None
    assert 0 < sum(read_bytes) < sum(map(len, events)) * 2 * generated.LOOK_BYTES / generated.PERIOD_BYTES


def test_a_loop_within_one_long_read_is_found() -> None:
    """Though its end is new again."""
    fine = [event("content", f"{at * 7919:x} ") for at in range(500)]
    watch = StreamWatch(CONTENT, 1)
    assert watch.take(b"".join([*fine, *looping(), *fine])) is Loop.TEXT


def test_a_stream_without_text_is_no_loop() -> None:
    watch = StreamWatch((), 1)
    for one in looping():
        watch.take(one)
    assert watch.look() is None


@given(st.binary(max_size=3000))
def test_any_bytes_are_read_without_a_fault(data: bytes) -> None:
    watch = StreamWatch(CONTENT, 2)
    watch.take(data)
    watch.look()
    loop_in(data, CONTENT)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_loop_in_a_whole_answer_is_found(indent: int | None) -> None:
    choices = [{"message": {"content": text}} for text in ("fine", 'I "am" sorry. ' * 100)]
    body = json.dumps({"choices": choices}, indent=indent).encode()
    assert loop_in(body, CONTENT) is Loop.TEXT
    assert loop_in(body[:700], CONTENT) is None


@given(st.text(alphabet="abcdefghij klmno\n", min_size=9, max_size=500), st.integers(0, 700), st.integers(100, 400))
@settings(max_examples=60, deadline=None)
def test_a_loop_that_begins_anywhere_is_found_between_the_glances(unit: str, before: int, padding: int) -> None:
    """Whatever goes round, and however much else is in an event: within some two thousand tokens."""
    text = "".join(f"{at * at:x} " for at in range(before)) + unit * (1 + 9000 // len(unit))
    watch = StreamWatch(CONTENT, 1)
    found = any(
        watch.take(event("content", text[at : at + 4])[:-3] + b',"pad":"' + b"-" * padding + b'"}\n\n')
        for at in range(0, len(text), 4)
    )
    assert found
