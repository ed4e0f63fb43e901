"""The conformance suite: what every dialect promises, shown on its sample (`tests/samples.py`)."""

from __future__ import annotations

import contextlib
import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvgate.dialects
from kvgate.core.admission import Reject, decide
from kvgate.core.ask import Size, Usage
from kvgate.core.pool import KvPool
from kvgate.core.reason import Reason, Refusal, refusal
from kvgate.core.sse import EventSplitter
from kvgate.core.tenant import Limits, Quota, Tenant
from kvgate.engines.llamacpp.errors import explain
from kvgate.ports import Refused
from kvgate.web import served_routes
from kvgate.web.routes import Inference
from kvgate.wire import fields
from tests.samples import SAMPLES, Sample, Stream, Whole

if TYPE_CHECKING:
    from kvgate.core.ask import Prompt
    from kvgate.ports import Dialect, ReadRequest, StreamTap

DIALECTS: Final[dict[str, Dialect]] = {
    route.dialect.name: route.dialect for route in served_routes().values() if isinstance(route, Inference)
}

INT32_MAX: Final = 2**31 - 1

MISSING: Final = object()


def sample_of(name: str) -> Sample:
    if name not in SAMPLES:
        pytest.fail(f"the dialect {name} has no sample in tests/samples.py")
    return SAMPLES[name]


@pytest.fixture(params=sorted(DIALECTS))
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


@pytest.fixture
def sample(dialect: Dialect) -> Sample:
    return sample_of(dialect.name)


def size_of(read: ReadRequest, output_tokens: int) -> Size:
    sequences = max(len(read.ask.prompts), 1) * read.ask.sequences
    return Size(10, output_tokens if read.ask.generates else 0, sequences)


def capped(dialect: Dialect, body: bytes, output_tokens: int = 5) -> bytes:
    read = dialect.read(body)
    return read.document.edited(dialect.cap(read, size_of(read, output_tokens)))


def refused(dialect: Dialect, body: bytes) -> Refusal:
    with pytest.raises(Refused) as caught:
        dialect.read(body)
    return caught.value.refusal


# -- each has a sample


def test_every_dialect_is_served_and_has_a_sample() -> None:
    """A file in `kvgate/dialects` without a route, and a dialect without a sample, are mistakes."""
    files = {path.stem for path in Path(kvgate.dialects.__path__[0]).glob("*.py")} - {"__init__"}
    assert files == set(DIALECTS) == set(SAMPLES)


def test_every_other_route_speaks_the_words_of_a_dialect() -> None:
    """Utilities and the gate's own paths answer errors in the shape of one of the dialects."""
    assert {route.dialect.name for route in served_routes().values()} <= set(DIALECTS)


# -- the output limit


def short(value: Any) -> str:
    return "missing" if value is MISSING else repr(value)[:12]


def limit_cases() -> list[tuple[str, str]]:
    return [(name, field) for name in sorted(DIALECTS) for field in sample_of(name).limits]


@pytest.mark.parametrize(("name", "field"), limit_cases())
@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (MISSING, None),
        (None, None),
        (-1, None),
        (0, 1),
        (1, 1),
        (7, 7),
        (1_000_000, 1_000_000),
        (10**12, INT32_MAX),
        (10**300, INT32_MAX),
        (1e308, INT32_MAX),
        (3.7, 3),
        (True, 1),
        (False, 1),
    ],
    ids=short,
)
def test_every_value_of_every_name_of_the_output_limit_has_its_meaning(
    name: str, field: str, value: Any, meaning: int | None
) -> None:
    """The engine's own, under each name it reads on this path; and one positive limit is what it gets."""
    dialect, sample = DIALECTS[name], SAMPLES[name]
    body = sample.request(**({} if value is MISSING else {field: value}))
    assert dialect.read(body).ask.output_tokens == meaning
    sent = json.loads(capped(dialect, body, 5))
    assert [sent[limit] for limit in sample.limits if limit in sent] == [5]


@pytest.mark.parametrize(("name", "field"), limit_cases())
@pytest.mark.parametrize("value", [-2, -1.5, -(10**300), "3", "", [], [4], {}], ids=short)
def test_what_is_no_limit_is_refused_under_its_name(name: str, field: str, value: Any) -> None:
    found = refused(DIALECTS[name], SAMPLES[name].request(**{field: value}))
    assert (found.reason, found.param) == (Reason.MALFORMED, field)
    assert f"'{field}'" in found.message


@pytest.mark.parametrize(("name", "field"), limit_cases())
def test_a_number_that_the_engine_cannot_read_is_refused(name: str, field: str) -> None:
    """llama.cpp's parser gives up beyond a double; a limit that large is malformed, not unlimited."""
    for value in (10**400, -(10**400)):
        assert refused(DIALECTS[name], SAMPLES[name].request(**{field: value})).reason is Reason.MALFORMED


def test_of_several_limits_the_engines_winner_wins(dialect: Dialect, sample: Sample) -> None:
    """Whatever the key order; one without a limit beats nothing, and all but one are gone afterwards."""
    for at, winner in enumerate(sample.limits):
        limits = {field: 40 + rank if rank >= at else -1 for rank, field in enumerate(sample.limits)}
        for order in (list(limits), list(reversed(limits))):
            body = sample.request(**{field: limits[field] for field in order})
            assert dialect.read(body).ask.output_tokens == 40 + at, winner
            sent = json.loads(capped(dialect, body, 3))
            assert [sent[field] for field in sample.limits if field in sent] == [3]


def test_without_output_there_is_no_limit_to_set(dialect: Dialect, sample: Sample) -> None:
    """A dialect names the limits that the engine reads, or generates nothing at all."""
    assert dialect.read(sample.request()).ask.generates == bool(sample.limits)


@pytest.mark.parametrize(
    ("asked", "sequences"),
    [
        ({}, 1),
        ({"n": None}, 1),
        ({"n": 2}, 2),
        ({"n_cmpl": 3}, 3),
        ({"n": 2.0, "n_cmpl": 2}, 2),
        ({"n": 10**300}, 10**300),
    ],
    ids=short,
)
def test_the_number_of_answers_is_one_number(
    dialect: Dialect, sample: Sample, asked: dict[str, Any], sequences: int
) -> None:
    """Two names for it; what is sent has at most one of them, with the number that was judged."""
    body = sample.request(**asked)
    read = dialect.read(body)
    assert read.ask.sequences == (sequences if sample.sequences else 1)
    if sample.sequences:
        sent = json.loads(read.document.edited(dialect.cap(read, replace(size_of(read, 5), sequences=4))))
        assert {field: sent[field] for field in ("n", "n_cmpl") if field in sent} == (
            {"n": read.ask.sequences} if asked else {}
        )


@pytest.mark.parametrize("asked", [{"n": 0}, {"n": -1}, {"n": 1.5}, {"n": True}, {"n": "2"}, {"n": 2, "n_cmpl": 3}])
def test_what_is_no_number_of_answers_is_refused(dialect: Dialect, sample: Sample, asked: dict[str, Any]) -> None:
    """Where a dialect knows several answers; the others ignore the field."""
    body = sample.request(**asked)
    if sample.sequences:
        assert refused(dialect, body).reason is Reason.MALFORMED
    else:
        assert dialect.read(body).ask.sequences == 1


# -- what it reads and what it sends


def test_it_reads_back_what_it_capped(dialect: Dialect, sample: Sample) -> None:
    """Reading what was sent gives the very same Ask with the judged limit, and capping it again changes nothing."""
    requests: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 2, "model": "m"}]
    for asked in [*requests, *({field: 9} for field in sample.limits)]:
        body = sample.request(**asked)
        before = dialect.read(body)
        sent = before.document.edited(dialect.cap(before, size_of(before, 5)))
        after = dialect.read(sent)
        assert after.ask == replace(before.ask, output_tokens=5 if before.ask.generates else 0)
        assert capped(dialect, sent, 5) == sent


def test_all_else_survives(dialect: Dialect, sample: Sample) -> None:
    """Unknown fields, number spellings, escapes, spacing and key order reach the engine as they came."""
    unknown = [
        '"x_first" : {"b": 1.0, "a": 1E+2, "b2": [1e0, -0.0]}',
        '"x_big":123456789012345678901234567890',
        '"x_\\u00e9":"\\ud83e\\udd9c \\u0000 \\/ 🦜"',
        '"temperature" :  0.10',
    ]
    limits = [f'"{field}": 9' for field in sample.limits]
    own = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sample.body.items()]
    members = [unknown[0], *limits[:1], unknown[1], *own, *limits[1:], unknown[2], '"stream":false', unknown[3]]
    raw = ("\n{ " + " ,\n ".join(members) + " }\n").encode()
    sent = capped(dialect, raw)
    for member in (*unknown, *own):
        assert member.encode() in sent
    before, after = json.loads(raw), json.loads(sent)
    assert [key for key in after if key in before] == [key for key in before if key in after]
    assert {key: after[key] for key in after if key not in sample.limits} == {
        key: before[key] for key in before if key not in sample.limits
    }


def test_what_is_no_request_is_refused_and_names_its_field(dialect: Dialect, sample: Sample) -> None:
    for changes in sample.malformed:
        found = refused(dialect, sample.request(**changes))
        assert found.reason is Reason.MALFORMED
        assert found.param in changes
    for missing in sample.body:
        left = {key: value for key, value in sample.body.items() if key != missing}
        if dialect.name != "llamacpp_infill":  # each of its parts may be missing
            assert refused(dialect, json.dumps(left).encode()).param == missing.replace("content", "input")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b"5", b'"x"', b"{", b"{}{}", b"\xff", b"{\x00}", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"x": NaN}', b'{"x": -Infinity}', b'{"x": 1e999}', b'{"x": "\\ud800"}', b'{"\\udfff": 1}', b'{"x": "\x01"}',
        b'{"model": "a", "mod\\u0065l": "b"}', b"{'a': 1}", b'{"a": 1,}', b'{"a": 01}',
        b'{"x": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_what_parsers_could_read_differently_is_refused(dialect: Dialect, sample: Sample, body: bytes) -> None:
    assert refused(dialect, body).reason is Reason.MALFORMED
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        assert refused(dialect, sample.request().decode().encode(encoding)).reason is Reason.MALFORMED


WORDS = st.sampled_from(
    ["type", "role", "content", "text", "filename", "image", "include_usage", "user", "tool_result", ""]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS | st.text()
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(), inner, max_size=4)
)
BLOCKS = st.fixed_dictionaries({}, optional={"type": JSON, "content": JSON, "text": JSON})
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user")}, optional={"content": st.lists(BLOCKS, min_size=1, max_size=2)}),
    min_size=1,
    max_size=2,
)
LISTS = st.lists(
    st.text(max_size=3) | st.integers(-1, 70_000) | st.lists(SCALARS, max_size=3), min_size=1, max_size=3
)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@given(data=st.data())
def test_whatever_json_a_field_holds_it_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """Never another exception; what is read can be capped, and what was capped is read again as the same."""
    dialect, sample = DIALECTS[name], sample_of(name)
    values = data.draw(st.sampled_from([JSON, MESSAGES, LISTS]))
    changed = data.draw(st.dictionaries(st.sampled_from(sample.fields), values, min_size=1, max_size=2))
    found: Refusal | None = None
    try:
        read = dialect.read(sample.request(**changed))
    except Refused as problem:
        found = problem.refusal
    else:
        sent = read.document.edited(dialect.cap(read, size_of(read, 2)))
        assert dialect.read(sent).ask == replace(read.ask, output_tokens=2 if read.ask.generates else 0)
    assert found is None or (found.reason in {Reason.MALFORMED, Reason.UNCOUNTED} and found.message)


@given(body=st.binary() | st.text().map(str.encode))
def test_whatever_bytes_come_they_are_read_or_refused(body: bytes) -> None:
    for dialect in DIALECTS.values():
        with pytest.raises(Refused):
            dialect.read(body)


# -- prompts


def naive_prompts(value: Any) -> list[Any] | None:
    """llama.cpp's `tokenize_input_prompts` (server-common.cpp), told again: each prompt, or None for an error."""
    if isinstance(value, list) and not any(_is_integer(element) for element in value):
        each = [_naive_prompt(element) for element in value]
        return None if not each or any(prompt is None for prompt in each) else each
    one = _naive_prompt(value)
    return None if one is None else [one]


def _naive_prompt(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return None
    numbers, strings = [_is_integer(one) for one in value], [isinstance(one, str) for one in value]
    if all(numbers):
        return list(value)
    if any(numbers) and any(strings):
        return list(value) if all(a or b for a, b in zip(numbers, strings, strict=True)) else None
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TOKENS = st.integers(-2, 70_000)
PIECES = st.lists(st.text(max_size=3) | TOKENS | st.none() | st.booleans() | st.floats(0, 2), max_size=4)


@given(value=st.text() | TOKENS | PIECES | st.lists(st.text(max_size=3) | PIECES, max_size=5) | JSON)
def test_prompts_are_taken_apart_as_the_engine_does(value: Any) -> None:
    """What kvgate reads, llama.cpp reads as the same prompts; what llama.cpp refuses is refused."""
    expected = naive_prompts(value)
    found: tuple[Prompt, ...] | None = None
    with contextlib.suppress(Refused):
        found = fields.prompts_of("prompt", value)
    if found is None:
        # Stricter than the engine in two points: no empty prompt, and no negative token, which it refuses itself.
        pieces = [piece for prompt in expected or [] for piece in prompt]
        assert expected is None or [] in expected or any(_is_integer(piece) and piece < 0 for piece in pieces)
        return
    # A nested list of strings alone is an error to the engine; kvgate counts it and lets the engine say so.
    if expected is None:
        assert any(isinstance(prompt, list) and all(isinstance(p, str) for p in prompt) for prompt in value)
        return
    assert [list(prompt.pieces) for prompt in found] == expected


def test_a_list_of_prompts_is_bounded() -> None:
    assert len(fields.prompts_of("prompt", ["a"] * fields.PROMPTS_MAX)) == fields.PROMPTS_MAX
    with pytest.raises(Refused, match="malformed"):
        fields.prompts_of("prompt", ["a"] * (fields.PROMPTS_MAX + 1))
    assert len(fields.prompts_of("prompt", [1] * 5000)[0].pieces) == 5000


# -- errors

_FIELDS: Final[dict[str, Any]] = {
    "limit_tokens": 1024, "limited_by_clause": "", "prompt_tokens": 900, "usable_generation": 124,
    "output_tokens_min": 1, "requested_tokens": 1412, "asked_tokens": 512, "sequences_clause": "the answer",
    "sequences": 3, "sequences_max": 2, "problem": "it is wrong", "served": "POST /x", "models": "m",
    "timeout_s": 3.0, "waiting": 4, "queue_timeout_s": 5.0, "n_ctx_slot": 512, "context_tokens_min": 1024,
    "allowed": "POST", "body_bytes_max": 9, "advice": "shorten it", "beside": "this prompt",
    "prompt_clause": "your prompt has 900 tokens", "leaves_clause": ", which leaves 124",
    "protected_clause": "800 of them stay",
}  # fmt: skip


def refusal_of(reason: Reason) -> Refusal:
    names = {name for _, name, _, _ in string.Formatter().parse(reason.value.sentence) if name}
    given = {name: _FIELDS[name] for name in names - {"retry_after_s"}}
    figures = (
        ("n_prompt_tokens", 900),
        ("n_ctx", 1024),
        ("usable_generation", 124),
        ("requested_output_tokens", 512),
    )
    overflow = reason.value.code == "context_length_exceeded"
    return refusal(reason, retry_after_s=2, param="messages", figures=figures if overflow else (), **given)


def check_error(family: str, error: dict[str, Any], refused: Refusal) -> None:
    """The error object as the dialect's clients act on it."""
    row = refused.reason.value
    overflow = row.code == "context_length_exceeded"
    assert error["message"]
    assert error["reason"] == row.label
    for figure, value in refused.figures:
        assert error[figure] == value
    match family:
        case "openai":
            assert (error["code"], error["type"], error["param"]) == (row.code, row.error_type, refused.param)
            assert error["message"] == refused.message
        case "llamacpp":
            assert error["code"] == row.status
            assert (error["type"] == "exceed_context_size_error") == overflow
            if overflow:
                assert {"n_prompt_tokens", "n_ctx"} <= set(error)
        case "anthropic":
            types = {401: "authentication_error", 403: "permission_error", 413: "request_too_large"}
            types |= {404: "not_found_error"}
            types |= {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}
            other = "api_error" if row.status >= 500 else "invalid_request_error"
            assert error["type"] == types.get(row.status, other)


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.label)
def test_every_reason_has_a_body_and_an_event(dialect: Dialect, sample: Sample, reason: Reason) -> None:
    """In the dialect's own shape, before a stream and inside one; overflows never speak of rates or quotas."""
    refused = refusal_of(reason)
    body = dialect.refuse(refused)
    found = json.loads(body)
    assert set(found) == ({"type", "error"} if sample.family == "anthropic" else {"error"})
    assert found.get("type", "error") == "error"
    check_error(sample.family, found["error"], refused)
    events = EventSplitter().feed(inside := dialect.refuse_in_stream(refused))
    assert b"".join(events) == inside
    for text in (body, inside):
        if reason.value.code == "context_length_exceeded":
            assert b"rate limit" not in text.lower()
            assert b"rate_limit" not in text.lower()
            assert b"quota" not in text.lower()
    lines = dict(line.split(": ", 1) for line in events[0].decode().splitlines() if line)
    told = json.loads(lines["data"])
    assert lines.get("event", "error") == "error"
    if dialect.name == "openai_responses":
        assert lines["event"] == told["type"] == "error"
        assert (told["code"], told["param"], told["message"]) == (reason.value.code, "messages", refused.message)
    else:
        check_error(sample.family, told["error"], refused)
        assert ("event" in lines) == (sample.family == "anthropic")
    ends = [b"data: [DONE]\n\n"] if sample.family == "openai" and dialect.name != "openai_responses" else []
    assert events[1:] == ends


def overflow(error: dict[str, Any]) -> None:
    """Anthropic's two sentences, which its clients read the figures from, say something true."""
    if found := re.fullmatch(r"prompt is too long: (\d+) tokens > (-?\d+) maximum", error["message"]):
        assert int(found[1]) > int(found[2]), error
        assert int(found[1]) == error["n_prompt_tokens"]
        return
    pattern = (
        r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (-?\d+), decrease input length .*"
    )
    found = re.fullmatch(pattern, error["message"])
    assert found, error
    assert int(found[1]) + int(found[2]) > int(found[3]), error
    assert (int(found[1]), int(found[2])) == (error["n_prompt_tokens"], error["requested_output_tokens"])


@given(
    prompt=st.integers(0, 5000),
    asked=st.none() | st.integers(1, 5000),
    least=st.integers(1, 300),
    slot=st.integers(256, 2048),
    margin=st.integers(0, 64),
    held=st.none() | st.integers(256, 2048),
)
def test_overflow_sentences_are_true_whatever_bound_binds(
    *, prompt: int, asked: int | None, least: int, slot: int, margin: int, held: int | None
) -> None:
    """In every dialect: what did not fit is more than the maximum that the sentence names."""
    tenant = Tenant("acme", Limits(output_tokens_min=least), Quota(kv_tokens_max=held))
    pool = KvPool(tokens=2 * slot, slots=2, tokens_per_slot=slot, margin_tokens=margin)
    for name, dialect in DIALECTS.items():
        sample = sample_of(name)
        limits = {sample.limits[0]: asked} if sample.limits else {}
        verdict = decide(dialect.read(sample.request(**limits)).ask, (prompt,), pool, tenant)
        if isinstance(verdict, Reject):
            error = json.loads(dialect.refuse(verdict.refusal))["error"]
            check_error(sample.family, error, verdict.refusal)
            if sample.family == "anthropic":
                overflow(error)


def test_the_engines_own_overflow_is_told_truly(dialect: Dialect, sample: Sample) -> None:
    """Should the count ever fail, the engine's own figures stand in the dialect's sentence, and it is true."""
    error = {"type": "exceed_context_size_error", "n_prompt_tokens": 256, "n_ctx": 256}
    refused = explain(400, json.dumps({"error": error}).encode())
    assert refused.reason is Reason.PROMPT_OVERFLOW
    found = json.loads(dialect.refuse(refused))["error"]
    check_error(sample.family, found, refused)
    assert (found["n_prompt_tokens"], found["n_ctx"]) == (256, 256)
    if sample.family == "anthropic":
        overflow(found)


# -- whole answers


@pytest.mark.parametrize("name", [name for name in sorted(DIALECTS) if "response_fields" in sample_of(name).fields])
def test_an_answer_cannot_be_asked_for_without_its_figures(name: str) -> None:
    """llama.cpp's `response_fields` would leave out what tells the end and the cost; the last path of a name wins."""
    dialect, sample = DIALECTS[name], sample_of(name)
    for paths in (["content"], ["stop"], ["timings/stop", "tokens_predicted"], [*fields.FIGURES, "x/stop"]):
        sent = json.loads(capped(dialect, sample.request(response_fields=paths)))["response_fields"]
        assert sent == [*paths, *fields.FIGURES]
    for ignored in (None, [], 5, "content", [5], [*fields.FIGURES]):
        assert json.loads(capped(dialect, sample.request(response_fields=ignored)))["response_fields"] == ignored


def test_whole_answers_tell_what_they_cost(dialect: Dialect, sample: Sample) -> None:
    """Cached tokens are part of the prompt, sums go over all answers, and what is in no figure is named."""
    assert sample.wholes
    for whole in sample.wholes:
        read = dialect.read(sample.request(**whole.asked))
        assert dialect.told(read, json.dumps(whole.answer).encode()) == whole.told


BROKEN: Final = (
    b"", b"null", b"5", b"[]", b"{}", b"[5]", b"<html>", b"\xff", b'{"usage": 5}',
    b'{"usage": {"prompt_tokens": "3"}}',
    b'{"usage": {"input_tokens": null}}', b'{"usage": {"prompt_tokens": -1}}', b'{"choices": 5}', b"[" * 100_000,
    b'{"usage": {"input_tokens": 3, "output_tokens": "1"}}', b'{"tokens_evaluated": []}',
)  # fmt: skip


def test_an_answer_that_tells_nothing_is_none(dialect: Dialect, sample: Sample) -> None:
    """Whatever an engine says: no exception, no invented figure."""
    read = dialect.read(sample.request())
    assert [answer for answer in BROKEN if dialect.told(read, answer) is not None] == []


FIGURES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 3) | st.text(max_size=2) | st.just([])
)
NAMES = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens")
USAGES = st.fixed_dictionaries({}, optional=dict.fromkeys((*NAMES, "cache_creation_input_tokens"), FIGURES)) | JSON
KEYS = ("usage", "choices", "timings", "tokens_evaluated", "message", "response", "error", "type")


@pytest.mark.parametrize("name", sorted(DIALECTS))
@given(answer=st.dictionaries(st.sampled_from(KEYS), USAGES | st.fixed_dictionaries({"usage": USAGES})))
def test_whatever_an_answer_is_it_tells_or_does_not(name: str, answer: Any) -> None:
    """An engine's mistake is never an exception, and never a negative cost."""
    dialect = DIALECTS[name]
    read = dialect.read(sample_of(name).request())
    body = json.dumps(answer).encode()
    told = dialect.told(read, body)
    assert told is None or min(told.usage.prompt_tokens, told.usage.output_tokens, told.usage.cached_tokens) >= 0
    tap = dialect.tap(read)
    for prefix in (b"", b"event: message_start\n", b"event: message_delta\n", b"event: response.completed\n"):
        tap.take(prefix + b"data: " + body + b"\n\n")
    tap.take(b"data: [DONE]\n\n")
    assert tap.told is None or min(tap.told.usage.prompt_tokens, tap.told.usage.output_tokens) >= 0


# -- streams


@pytest.fixture(params=[name for name in sorted(DIALECTS) if sample_of(name).stream is not None])
def streaming(request: pytest.FixtureRequest) -> tuple[Dialect, Sample, Stream]:
    dialect, sample = DIALECTS[request.param], sample_of(request.param)
    assert sample.stream is not None
    return dialect, sample, sample.stream


def tap_of(dialect: Dialect, sample: Sample, stream: Stream) -> StreamTap:
    return dialect.tap(dialect.read(sample.request(stream=True, **stream.asked)))


def through(tap: StreamTap, *pieces: bytes) -> bytes:
    splitter = EventSplitter()
    return b"".join(tap.take(event) for piece in pieces for event in splitter.feed(piece))


def test_a_stream_is_the_same_wherever_it_is_cut_in_two(streaming: tuple[Dialect, Sample, Stream]) -> None:
    """At every byte, also inside a character: the same events for the client, the same figures, the same end."""
    dialect, sample, stream = streaming
    passed = "".join(text for at, text in enumerate(stream.events) if at not in stream.kept).encode()
    for cut in range(len(stream.raw) + 1):
        tap = tap_of(dialect, sample, stream)
        assert through(tap, stream.raw[:cut], stream.raw[cut:]) == passed
        assert (tap.told, tap.ended, tap.failure) == (stream.told, True, None)
        assert tap.events > 0


def test_a_stream_that_breaks_off_has_not_ended(streaming: tuple[Dialect, Sample, Stream]) -> None:
    """Cut before its last byte, at every byte, it never looks complete; what passed of it is whole events."""
    dialect, sample, stream = streaming
    seen = 0
    for cut in range(len(stream.raw)):
        tap = tap_of(dialect, sample, stream)
        out = through(tap, stream.raw[:cut])
        assert not tap.ended, stream.raw[:cut][-80:]
        assert tap.failure is None
        assert out == b"" or out.endswith(b"\n\n")
        assert tap.events >= seen
        seen = tap.events


def test_a_failure_in_mid_stream_is_kept_back_with_all_behind_it(streaming: tuple[Dialect, Sample, Stream]) -> None:
    """Wherever it comes: the relay says it in the dialect's words, so nothing after it may reach the client."""
    dialect, sample, stream = streaming
    for at in range(len(stream.events)):
        before, behind = "".join(stream.events[:at]).encode(), "".join(stream.events[at:]).encode()
        alone, tap = tap_of(dialect, sample, stream), tap_of(dialect, sample, stream)
        expected = through(alone, before)
        assert through(tap, before, sample.failure.encode(), behind) == expected
        assert not tap.ended
        assert tap.failure is not None
        assert explain(500, tap.failure).reason is Reason.ENGINE_OVERFLOW
        assert tap.told == alone.told


def test_crlf_and_comments_are_events_like_others(streaming: tuple[Dialect, Sample, Stream]) -> None:
    """A comment before every event, as engines send in long prefills, changes no figure and no end."""
    dialect, sample, stream = streaming
    tap = tap_of(dialect, sample, stream)
    out = through(tap, b"".join(b": ping\n\n" + event.encode() for event in stream.events))
    assert (tap.told, tap.ended, tap.failure) == (stream.told, True, None)
    assert out.count(b": ping\n\n") >= len(stream.events)


def test_what_does_not_stream_has_no_proper_end(dialect: Dialect, sample: Sample) -> None:
    """Should the engine stream where it never does, the relay must not take it for a whole answer."""
    tap = dialect.tap(dialect.read(sample.request()))
    data = b'data: 1\n\ndata: {"usage": {"prompt_tokens": 1}}\n\n'
    assert through(tap, data) == data
    assert through(tap, b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert (tap.ended, tap.failure) == (sample.stream is not None and b"[DONE]" in sample.stream.raw, None)
    assert tap.told is None or sample.stream is not None


def test_samples_are_not_empty_shells(dialect: Dialect, sample: Sample) -> None:
    """Each sample shows at least one answer and one mistake, and a stream where there is output."""
    assert all(isinstance(whole, Whole) for whole in sample.wholes)
    assert sample.wholes
    assert sample.malformed
    assert (sample.stream is not None) == bool(sample.limits)


STOPPED: Final = {"kvgate": {"finish_reason": "loop"}}


def test_a_stream_can_be_stopped_behind_any_piece_of_output(streaming: tuple[Dialect, Sample, Stream]) -> None:
    """As a stream that reached its limit: its own tap finds it whole, with these figures, cut for its length."""
    dialect, sample, stream = streaming
    asked = {name: value for name, value in stream.asked.items() if name != "n"}
    asked |= {"prompt": "Once"} if "prompt" in sample.body else {}
    read = dialect.read(sample.request(stream=True, stream_options={"include_usage": True}, **asked))
    tap, ended = dialect.tap(read), 0
    assert tap.text
    for at, event in enumerate(stream.events):
        before = tap.events
        tap.take(event.encode())
        if tap.ended or tap.finish:  # one of several answers has ended, and several are never stopped
            break
        ending = tap.stop([event.encode()], Usage(7, 5))
        if tap.events == before:
            continue
        ended += 1
        assert json.dumps(STOPPED)[1:-1].replace(" ", "").encode() in ending
        client = dialect.tap(read)
        through(client, *(text.encode() for text in stream.events[: at + 1]))
        passed = through(client, ending)
        assert client.ended
        assert client.failure is None
        assert client.told is not None
        assert (client.told.finish, client.told.usage.output_tokens) == ("length", 5)
        assert b"loop" in passed
    assert ended


def test_a_stream_is_not_stopped_where_that_would_leave_it_torn(streaming: tuple[Dialect, Sample, Stream]) -> None:
    """Nothing but a comment, or a broken event: it goes on until one that can be the last."""
    dialect, sample, stream = streaming
    for events in ([], [b": ping\n\n"], [b"data: {\n\n"], [b"data: [DONE]\n\n"], [b"data: 5\n\n"]):
        assert tap_of(dialect, sample, stream).stop(events, Usage(7, 5)) == b""
