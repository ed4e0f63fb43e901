"""The chat dialect reads a body as the engine would, caps it in one field, and tells a stream's end from its cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvgate.core.ask import Ask, Size, Usage
from kvgate.core.reason import Reason, refusal
from kvgate.core.sse import EventSplitter
from kvgate.dialects.openai_chat import OUTPUT_FIELDS, ChatTap, OpenAiChat
from kvgate.ports import ReadRequest, Refused, Told
from kvgate.wire.fields import SEQUENCE_FIELDS

DIALECT = OpenAiChat()
MESSAGES = [{"role": "user", "content": "hi"}]
INT32_MAX = 2**31 - 1


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def ask(**fields: Any) -> Ask:
    return DIALECT.read(body(**fields)).ask


def refused(sent: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        DIALECT.read(sent)
    assert caught.value.refusal.reason is Reason.MALFORMED
    return caught.value


def read_or_refused(sent: bytes) -> ReadRequest | None:
    try:
        return DIALECT.read(sent)
    except Refused as problem:
        reason = problem.refusal.reason
    assert reason is Reason.MALFORMED
    return None


def capped(sent: bytes, size: Size) -> dict[str, Any]:
    request = DIALECT.read(sent)
    edited: dict[str, Any] = json.loads(request.document.edited(DIALECT.cap(request, size)))
    return edited


# -- reading


@pytest.mark.parametrize("field", OUTPUT_FIELDS)
@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (None, None),
        (-1, None),
        (-1.0, None),
        (0, 1),
        (False, 1),
        (0.4, 1),
        (-0.9, 1),
        (1, 1),
        (True, 1),
        (3.7, 3),
        (4096, 4096),
        (1e3, 1000),
        (10**12, INT32_MAX),
        (1e300, INT32_MAX),
    ],
)
def test_what_an_output_limit_means(field: str, value: Any, meaning: int | None) -> None:
    """Each value of each of its three names has one meaning, llama.cpp's own; beyond its range it saturates."""
    assert ask(**{field: value}).output_tokens == meaning


@pytest.mark.parametrize("field", OUTPUT_FIELDS)
@pytest.mark.parametrize("value", [-1.5, -2, -2.0, -100, "3", "", [], [4], {}, {"a": 1}])
def test_an_output_limit_that_is_none_is_refused(field: str, value: Any) -> None:
    """Under the name the client used, so that it can be found."""
    found = refused(body(**{field: value}))
    assert found.refusal.param == field
    assert field in found.refusal.message


@pytest.mark.parametrize(
    ("fields", "meaning"),
    [
        ({"max_tokens": 4, "max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 4, "n_predict": 6}, 6),
        ({"n_predict": 6, "max_tokens": 4}, 6),
        ({"max_tokens": 4, "n_predict": -1}, 4),
        ({"n_predict": None, "max_completion_tokens": -1, "max_tokens": 4}, 4),
        ({"n_predict": -1, "max_completion_tokens": 0, "max_tokens": 4}, 1),
        ({"n_predict": -1, "max_completion_tokens": None, "max_tokens": -1}, None),
        ({"max_new_tokens": 4}, None),
        ({"max_output_tokens": 4}, None),
        ({"Max_Tokens": 4}, None),
        ({}, None),
    ],
)
def test_of_several_output_limits_the_engines_own_order_decides(fields: dict[str, Any], meaning: int | None) -> None:
    """Whatever the key order; and a name that sets no limit cannot undo one that does (llama.cpp issue 19831)."""
    assert ask(**fields).output_tokens == meaning
    assert ask(**dict(reversed(fields.items()))).output_tokens == meaning


def test_a_beaten_output_limit_must_be_a_number_too() -> None:
    refused(body(n_predict=5, max_tokens="many"))


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [({}, 1), ({"n": None}, 1), ({"n": 3}, 3), ({"n": 3.0}, 3), ({"n_cmpl": 2}, 2), ({"n": 2, "n_cmpl": 2.0}, 2)],
)
def test_how_many_answers_are_asked_for(fields: dict[str, Any], sequences: int) -> None:
    assert ask(**fields).sequences == sequences


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 2.5}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"n": []}, "n"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"n": 1, "n_cmpl": 2}, "n"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"model": 5}, "model"),
        ({"model": []}, "model"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{}]}, "messages"),
        ({"messages": [{"role": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages"),
    ],
)
def test_a_judged_field_of_another_shape_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(json.dumps({"messages": MESSAGES, **fields}).encode()).refusal.param == param


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"null",
        b"[]",
        b'"messages"',
        b"{",
        b'{"messages": [}',
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": Infinity}',
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1e999}',
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "max_tokens": 5}',
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "max_\\u0074okens": 5}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        '{"messages": [{"role": "user", "content": "hi"}]}'.encode("utf-16"),
        b'{"messages": ' + b"[" * 100_000,
    ],
)
def test_a_body_that_servers_read_differently_is_refused(sent: bytes) -> None:
    refused(sent)


def test_message_parts_and_tool_calls_are_the_engines_to_judge() -> None:
    """The gate reads what it must and no more; a message without content (a tool call) is as good as any."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"anything": 1}]},
        {"role": "tool", "tool_call_id": "a"},
    ]
    DIALECT.read(json.dumps({"messages": messages, "tools": 5, "response_format": []}).encode())


@pytest.mark.parametrize(
    ("fields", "stream", "shown"),
    [
        ({}, False, False),
        ({"stream": None}, False, False),
        ({"stream": True}, True, False),
        ({"stream": True, "stream_options": None}, True, False),
        ({"stream": True, "stream_options": {}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": None}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, True),
    ],
)
def test_whether_a_stream_shows_its_usage(fields: dict[str, Any], *, stream: bool, shown: bool) -> None:
    request = DIALECT.read(body(**fields))
    assert (request.ask.stream, request.usage_shown) == (stream, shown)


# -- capping

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)
KNOWN = (*OUTPUT_FIELDS, *SEQUENCE_FIELDS, "stream", "stream_options", "model", "messages")
LIMITS = st.none() | st.integers(-1, 10**6) | st.floats(-1, 1e6) | st.booleans()
UNKNOWN = st.dictionaries(st.text(max_size=8).filter(lambda key: key not in KNOWN), JSON, max_size=4)
SIZES = st.builds(Size, st.integers(0, 9999), st.integers(1, 9999), st.integers(1, 8))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Every good chat body, its fields in any order."""
    fields: dict[str, Any] = dict(draw(UNKNOWN))
    fields["messages"] = MESSAGES
    for name in draw(st.sets(st.sampled_from(OUTPUT_FIELDS))):
        fields[name] = draw(LIMITS)
    sequences = draw(st.integers(1, 8))
    for name in draw(st.sets(st.sampled_from(SEQUENCE_FIELDS))):
        fields[name] = draw(st.sampled_from([None, sequences, float(sequences)]))
    if draw(st.booleans()):
        fields["stream"] = draw(st.none() | st.booleans())
    if draw(st.booleans()):
        options = draw(st.dictionaries(st.text(max_size=5), JSON, max_size=2))
        fields["stream_options"] = draw(st.none() | st.just({**options, "include_usage": draw(st.booleans())}))
    order = draw(st.permutations(list(fields)))
    return {name: fields[name] for name in order}


@given(documents(), SIZES, st.sampled_from([None, 2]), st.booleans())
def test_a_capped_body_has_one_output_limit_the_judged_one(
    document: dict[str, Any],
    size: Size,
    indent: int | None,
    ascii_only: bool,
) -> None:
    """For every body: one limit, `n` under its one name, and all else with its values in its order."""
    sent = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    found = capped(sent, size)
    assert [name for name in found if name in OUTPUT_FIELDS] == ["max_tokens"]
    assert found["max_tokens"] == size.output_tokens
    assert "n_cmpl" not in found
    sequences = DIALECT.read(sent).ask.sequences  # of a list of prompts, `size` holds those of several
    assert found.get("n", sequences) == sequences
    assert ("n" in found) is any(name in document for name in SEQUENCE_FIELDS)
    if document.get("stream"):
        assert found["stream_options"] == {**(document.get("stream_options") or {}), "include_usage": True}
        added = {"stream_options"}
    else:
        assert found.get("stream_options") == document.get("stream_options")
        added = set()
    judged = {*OUTPUT_FIELDS, *SEQUENCE_FIELDS, *added}
    assert [item for item in found.items() if item[0] not in judged] == [
        item for item in document.items() if item[0] not in judged
    ]
    again = DIALECT.read(json.dumps(found).encode()).ask
    assert (again.output_tokens, again.stream) == (size.output_tokens, bool(document.get("stream")))


def test_spelling_of_the_rest_survives_the_cap() -> None:
    """Numbers, escapes, spaces: what the engine gets is what the client wrote, but for the limit."""
    sent = (
        b'{ "temperature":1.50,\t"big": 12345678901234567890123, "max_tokens" : 9, '
        b'"messages":[{"role":"user","content":"\\u00e9"}]}'
    )
    request = DIALECT.read(sent)
    edited = request.document.edited(DIALECT.cap(request, Size(1, 7)))
    assert edited == sent.replace(b'"max_tokens" : 9', b'"max_tokens" : 7')


@given(st.sampled_from(KNOWN), JSON)
@example("max_tokens", 10**4299)
@example("n", 10**4299)
@example("messages", [[]])
@example("stream_options", {"include_usage": []})
def test_a_known_field_of_any_shape_is_read_or_refused(field: str, value: Any) -> None:
    """Never another exception: that would be our failure, and is the client's."""
    if (request := read_or_refused(json.dumps({"messages": MESSAGES, field: value}).encode())) is not None:
        assert request.ask.output_tokens is None or 1 <= request.ask.output_tokens <= INT32_MAX
        DIALECT.cap(request, Size(1, 1, 1))


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(sent: bytes) -> None:
    read_or_refused(sent)


# -- what it cost


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}', Usage(3, 2)),
        (
            b'{"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}',
            Usage(3, 2, 1),
        ),
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":null}}', Usage(3, 2)),
        (b'{"usage":null}', None),
        (b'{"usage":{}}', None),
        (b'{"usage":{"prompt_tokens":"3","completion_tokens":2}}', None),
        (b'{"error":{}}', None),
        (b"[]", None),
        (b"", None),
        (b"<html>", None),
        (b"[" * 100_000, None),
    ],
)
def test_the_usage_of_a_whole_answer(answer: bytes, usage: Usage | None) -> None:
    assert DIALECT.told(DIALECT.read(body()), answer) == (None if usage is None else Told(usage))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "three more words"}, "three more words"),
        ({"reasoning_content": "hm. ", "content": "yes"}, "hm. yes"),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": ["odd"]}, "['odd']"),
        (None, ""),
    ],
)
def test_answers_after_the_first_are_in_no_figure(message: Any, text: str) -> None:
    """llama.cpp tells the first one's output alone; the others' words are given out to be counted."""
    choices = [{"message": {"content": "told"}}, {"message": message}]
    answer = {"choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    found = DIALECT.told(DIALECT.read(body(n=2)), json.dumps(answer).encode())
    assert found == Told(Usage(3, 2), untold=(text,))


@pytest.mark.parametrize("choices", [None, {}, [], [5], [5, 6], "ab"])
def test_choices_of_another_shape_have_no_words(choices: Any) -> None:
    answer = {"choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    assert DIALECT.told(DIALECT.read(body()), json.dumps(answer).encode()) == Told(Usage(3, 2))


# -- watching a stream


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(content: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}}], "object": "chat.completion.chunk"})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
        "timings": {"cache_n": 4},
    }
)
DONE = b"data: [DONE]\n\n"


def watch(
    stream: bytes, *, usage_shown: bool, cuts: list[int] | None = None, sequences: int = 1
) -> tuple[bytes, ChatTap]:
    """What a client sees of a stream that arrives in pieces."""
    options = {"include_usage": usage_shown}
    tap = OpenAiChat().tap(DIALECT.read(body(stream=True, stream_options=options, n=sequences)))
    splitter, out, at = EventSplitter(), b"", 0
    for cut in [*sorted(cuts or []), len(stream)]:
        out += b"".join(tap.take(one) for one in splitter.feed(stream[at:cut]))
        at = cut
    return out, tap


STREAM = delta("H\u00e9") + b": ping\n\n" + delta("llo \U0001f600") + USAGE + DONE


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.booleans())
def test_the_usage_chunk_is_hidden_only_from_those_who_did_not_ask(cuts: list[int], shown: bool) -> None:
    """Wherever the bytes are cut, also inside a character; the gate sees it either way."""
    out, tap = watch(STREAM, usage_shown=shown, cuts=cuts)
    assert out == (STREAM if shown else STREAM.replace(USAGE, b""))
    assert tap.told == Told(Usage(9, 2, 4))
    assert (tap.ended, tap.failure) == (True, None)


def test_every_cut_of_a_stream_gives_the_same() -> None:
    for cut in range(len(STREAM)):
        assert watch(STREAM, usage_shown=False, cuts=[cut])[0] == STREAM.replace(USAGE, b"")


def test_a_usage_beside_a_choice_is_read_and_left() -> None:
    """Some engines tell the usage with the last words; those are not ours to keep."""
    chunk = event({"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    out, tap = watch(chunk + DONE, usage_shown=False)
    assert (out, tap.told) == (chunk + DONE, Told(Usage(1, 2)))


def test_an_empty_usage_field_on_every_chunk_hides_nothing() -> None:
    chunk = event({"choices": [{"delta": {"content": "x"}}], "usage": None})
    assert watch(chunk + DONE, usage_shown=False)[0] == chunk + DONE


@pytest.mark.parametrize(
    "said",
    ['"usage"', '{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}', '"error"', '{"error": {}}', "[DONE]"],
)
def test_what_the_model_says_is_not_mistaken_for_the_protocol(said: str) -> None:
    """Content passes untouched, whatever it talks about."""
    stream = delta(said) + delta(f"data: {said}\n\n") + DONE
    out, tap = watch(stream, usage_shown=False)
    assert out == stream
    assert (tap.told, tap.failure, tap.ended) == (None, None, True)


def test_fields_named_like_the_protocols_inside_a_chunk_pass() -> None:
    chunk = event({"choices": [{"delta": {"usage": 1, "error": "no"}}]})
    out, tap = watch(chunk, usage_shown=False)
    assert (out, tap.told, tap.failure) == (chunk, None, None)


@pytest.mark.parametrize("error", [{"code": 500, "message": "Context size has been exceeded."}, {}, "odd"])
def test_an_error_event_is_kept_back_and_told(error: Any) -> None:
    """Its data goes to the relay, which says it in the dialect's words; what came before it stands."""
    out, tap = watch(delta("x") + event({"error": error}), usage_shown=True)
    assert out == delta("x")
    assert (json.loads(tap.failure or b""), tap.ended) == ({"error": error}, False)


def test_nothing_passes_behind_an_error_event() -> None:
    """Least of all an end marker: the client would take half an answer for a whole one."""
    error = event({"error": {"message": "x"}})
    out, tap = watch(delta("a") + error + delta("b") + DONE, usage_shown=True)
    assert out == delta("a")
    assert (tap.failure, tap.ended, tap.events) == (b'{"error": {"message": "x"}}', False, 1)


def test_an_empty_error_field_is_no_error() -> None:
    chunk = event({"choices": [{"delta": {}}], "error": None})
    out, tap = watch(chunk + DONE, usage_shown=True)
    assert (out, tap.failure) == (chunk + DONE, None)


def usage_chunk(output: int, **details: int) -> bytes:
    usage = {"prompt_tokens": 9, "completion_tokens": output, "total_tokens": 9 + output}
    return event({"choices": [], "id": "a", "usage": {**usage, "prompt_tokens_details": details}, "timings": {}})


@pytest.mark.parametrize("shown", [True, False])
def test_the_usage_of_several_answers_is_one_chunk_with_their_sum(*, shown: bool) -> None:
    """llama.cpp sends one an answer, which clients add up wrongly or stumble over; the prompt counts once."""
    stream = delta("a") + usage_chunk(2, cached_tokens=0) + delta("b") + usage_chunk(5, cached_tokens=0)
    out, tap = watch(stream + DONE, usage_shown=shown, sequences=2)
    assert tap.told == Told(Usage(9, 7))
    assert (tap.ended, tap.events) == (True, 2)
    events = out.removeprefix(delta("a") + delta("b")).removesuffix(DONE)
    if not shown:
        assert events == b""
        return
    chunk = json.loads(events.removeprefix(b"data: "))
    assert (chunk["choices"], chunk["id"]) == ([], "a")
    assert {**chunk["usage"], "prompt_tokens_details": 0} == {
        "prompt_tokens": 9,
        "completion_tokens": 7,
        "total_tokens": 16,
        "prompt_tokens_details": 0,
    }


def test_one_usage_chunk_is_shown_as_it_came() -> None:
    odd = b'data: {"choices": [], "usage": {"prompt_tokens": 9,"completion_tokens":2, "new": 1.50}}\n\n'
    assert watch(delta("x") + odd + DONE, usage_shown=True)[0] == delta("x") + odd + DONE


def test_one_answers_usage_is_not_that_of_all() -> None:
    """Cut in between, the pieces of output that passed are what is known; at the end, what was told is all."""
    stream = delta("a") + usage_chunk(2) + delta("b") + delta("c")
    _, tap = watch(stream, usage_shown=False, sequences=2)
    assert (tap.told, tap.events, tap.ended) == (None, 3, False)
    _, tap = watch(stream + DONE, usage_shown=False, sequences=2)
    assert (tap.told, tap.ended) == (Told(Usage(9, 2)), True)


@given(st.binary(max_size=200))
def test_any_bytes_pass_a_tap_without_an_exception(data: bytes) -> None:
    watch(data + b'\n\ndata: {"usage" \xff\n\ndata: {"error"\n\n' + data, usage_shown=False)


# -- refusing


@pytest.mark.parametrize("reason", [Reason.ENGINE_FAILED, Reason.ENGINE_OVERFLOW])
def test_a_refusal_in_a_stream_is_an_error_and_then_the_end(reason: Reason) -> None:
    error, done, rest = DIALECT.refuse_in_stream(refusal(reason)).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    found = json.loads(error.removeprefix(b"data: "))["error"]
    assert (found["reason"], found["code"]) == (reason.label, reason.value.code)


def test_an_overflow_carries_its_figures() -> None:
    """OpenAI's envelope, with the code that clients look for."""
    found = json.loads(
        DIALECT.refuse(
            refusal(
                Reason.GENERATION_OVERFLOW,
                param="max_tokens",
                figures=(("n_prompt_tokens", 9), ("n_ctx", 16)),
                limit_tokens=16,
                limited_by_clause="",
                requested_tokens=19,
                prompt_tokens=9,
                asked_tokens=10,
                sequences_clause="",
                beside="this prompt",
                advice="shorten it",
                usable_generation=7,
            )
        )
    )["error"]
    assert found["type"] == "invalid_request_error"
    assert found["code"] == "context_length_exceeded"
    assert (found["param"], found["n_prompt_tokens"], found["n_ctx"]) == ("max_tokens", 9, 16)
    assert "maximum context length is 16 tokens" in found["message"]


def test_chunks_that_begin_and_end_a_choice_are_no_output() -> None:
    """On a cut stream the pieces of output are what is charged; words about such chunks are output."""
    tap = ChatTap(usage_shown=False)
    for data in (
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"index": 0, "delta": {"content": '"delta":{} "content":null'}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ):
        tap.take(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")
    assert tap.events == 1
