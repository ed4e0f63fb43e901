"""JSON bodies: read as every parser reads them or refused, and edited without touching the rest."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvgate.core.json_object import DEPTH_MAX, Edit, MalformedJson, read_object

NOTHING = frozenset[str]()


def put(**members: Any) -> Edit:
    return Edit(members, NOTHING)


def drop(*keys: str) -> Edit:
    return Edit({}, frozenset(keys))


# -- edits keep every other byte

RAW = (
    b' {"model" : "m\\u00e9\\/x", "temperature":1.0,"seed": 123456789012345678901234567890 ,\n'
    b'\t"top_p":1e5,"stop":[ "\\n" , "\xc3\xa9\xf0\x9f\x98\x80"], "max_tokens" :  512 , "x":{"b":1,"a":-0.0}}\r\n'
)


def test_replacing_a_value_changes_that_value_only() -> None:
    """Number spellings, escapes, spacing and unknown fields go to the engine as they came."""
    assert read_object(RAW).edited(put(max_tokens=7)) == RAW.replace(b"512", b"7")


def test_an_edit_of_nothing_is_the_same_bytes() -> None:
    """What is not edited is not touched."""
    assert read_object(RAW).edited(Edit({}, NOTHING)) == RAW
    assert read_object(RAW).edited(drop("no such member")) == RAW


def test_members_that_stay_keep_their_bytes_when_others_go_or_come() -> None:
    """A member that goes takes the comma before it along; all other spacing stays."""
    edited = read_object(RAW).edited(Edit({"cache_prompt": False}, frozenset({"seed", "x"})))
    assert edited == (
        b' {"model" : "m\\u00e9\\/x", "temperature":1.0 ,\n'
        b'\t"top_p":1e5,"stop":[ "\\n" , "\xc3\xa9\xf0\x9f\x98\x80"], "max_tokens" :  512,"cache_prompt":false}\r\n'
    )


@pytest.mark.parametrize(
    ("body", "edit", "expected"),
    [
        (b"{}", put(a=1), b'{"a":1}'),
        (b" { } ", put(a=1), b' {"a":1 } '),
        (b'{"a":1}', drop("a"), b"{}"),
        (b'{ "a":1 }', Edit({"b": 2}, frozenset({"a"})), b'{"b":2 }'),
        (b'{"a":1,"b":2}', Edit({"a": 3}, frozenset({"a"})), b'{"a":3,"b":2}'),
        (b'{"a":1}', put(b="\xe9\ud800"), b'{"a":1,"b":"\\u00e9\\ud800"}'),
        (b'{"\\u0061":1}', put(a=2), b'{"\\u0061":2}'),
        (b'{"\\u0061":1,"b":2}', drop("a"), b'{"b":2}'),
    ],
    ids=str,
)
def test_small_edits(body: bytes, edit: Edit, expected: bytes) -> None:
    """Empty objects, the last member, put over drop, and keys that the client spelled with escapes."""
    assert read_object(body).edited(edit) == expected


def test_of_two_edits_the_later_one_wins() -> None:
    """Edits of the dialect and of the engine kind are one edit of the body."""
    both = Edit({"a": 1, "b": 1}, frozenset({"x"})) | Edit({"b": 2, "c": 2}, frozenset({"y"}))
    assert both == Edit({"a": 1, "b": 2, "c": 2}, frozenset({"x", "y"}))


def test_members_are_looked_up_by_their_decoded_names() -> None:
    """`get` and `in` see what the engine sees; a null is a member."""
    found = read_object(b'{"max\\u005ftokens":3,"n":null}')
    assert found.get("max_tokens") == 3
    assert "n" in found
    assert found.get("n", 1) is None
    assert "top_p" not in found
    assert found.get("top_p", 0.5) == 0.5


keys = st.sampled_from(["model", "max_tokens", "n", "stream", "é", "a b", '"', "\\", ""]) | st.text(max_size=4)
characters = st.characters(exclude_categories=["Cs"])
numbers = (
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([2**64, -(10**40), 1e-300, -0.0])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(characters, max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(keys, values, max_size=6)
edits = st.builds(Edit, st.dictionaries(keys, values, max_size=3), st.frozensets(keys, max_size=4))
spellings = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n\t", " :\r\n ")])


def spelled(document: dict[str, Any], separators: tuple[str, str], *, ascii_only: bool) -> bytes:
    return json.dumps(document, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def same(one: Any, other: Any) -> bool:
    """Equal also in what Python's `==` does not see: 1 and 1.0 and True, 0.0 and -0.0, the order of members."""
    return json.dumps(one) == json.dumps(other)


@given(objects, edits, spellings, st.booleans())
def test_any_edit_gives_the_edited_document_in_the_old_order(
    document: dict[str, Any], edit: Edit, separators: tuple[str, str], ascii_only: bool
) -> None:
    """Set members are set, dropped ones gone, the others as they were, new ones at the end."""
    found = read_object(spelled(document, separators, ascii_only=ascii_only))
    assert same({key: member.value for key, member in found.members.items()}, document)
    kept = {key: value for key, value in document.items() if key in edit.put or key not in edit.drop}
    assert same(json.loads(found.edited(edit)), {**kept, **edit.put})


@given(objects, edits, spellings, st.booleans())
def test_the_bytes_of_members_that_no_edit_names_survive(
    document: dict[str, Any], edit: Edit, separators: tuple[str, str], ascii_only: bool
) -> None:
    """Each stands in the edited body as it stood in the client's, key, colon, value and all."""
    found = read_object(spelled(document, separators, ascii_only=ascii_only))
    edited = read_object(found.edited(edit))
    for key, member in found.members.items():
        if key not in edit.put and key not in edit.drop:
            new = edited.members[key]
            assert edited.text[new.key_start : new.value_end] == found.text[member.key_start : member.value_end]


# -- what is refused

SECRET = "hunter2-my-prompt"
DEEP_LIST = b'{"a":' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"}"
DEEP_OBJECT = b'{"a":' * (DEPTH_MAX + 1) + b"1" + b"}" * (DEPTH_MAX + 1)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"max_tokens":4,"max_tokens":9}', "twice"),
        (b'{"max_tokens":4,"max\\u005ftokens":9}', "twice"),
        (b'{"\\u006d\\u0061x_tokens":4,"n":1,"max_tokens":4}', "twice"),
        (b'{"a":NaN}', "NaN is not"),
        (b'{"a":[Infinity]}', "Infinity is not"),
        (b'{"a":{"b":-Infinity}}', "-Infinity is not"),
        (b'{"a":1e999}', "too large"),
        (b'{"a":[-1E+400]}', "too large"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":["\\udc00\\ud800"]}', "surrogate"),
        (b'{"a":{"\\uDBFFx":1}}', "surrogate"),
        (b'{"\\udfff":1}', "surrogate"),
        (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":"\xc3"}', "UTF-8"),
        (b'{"a":"\xc0\xaf"}', "UTF-8"),
        ('{"a":1}'.encode("utf-16"), "UTF-8"),
        ('{"a":1}'.encode("utf-16-le"), "not JSON"),
        ('{"a":1}'.encode("utf-32-le"), "not JSON"),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "must be a JSON object"),
        (b"", "must be a JSON object"),
        (b"  ", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"{}"', "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b"{", "not JSON"),
        (b'{"a', "not JSON"),
        (b'{"a"', "not JSON"),
        (b'{"a":', "not JSON"),
        (b'{"a":1', "not JSON"),
        (b'{"a":1,', "not JSON"),
        (b'{"a":1,}', "not JSON"),
        (b'{,"a":1}', "not JSON"),
        (b'{"a":[1,2', "not JSON"),
        (b'{"a":"b', "not JSON"),
        (b'{"a":"\\', "not JSON"),
        (b'{"a":"\\u12', "not JSON"),
        (b'{"a":"\\x41"}', "not JSON"),
        (b'{"a":"line\nbreak"}', "not JSON"),
        (b'{"a":"nul\x00"}', "not JSON"),
        (b'{"a\tb":1}', "not JSON"),
        (b"{'a':1}", "not JSON"),
        (b"{a:1}", "not JSON"),
        (b'{"a":01}', "not JSON"),
        (b'{"a":+1}', "not JSON"),
        (b'{"a":.5}', "not JSON"),
        (b'{"a":1.}', "not JSON"),
        (b'{"a":0x10}', "not JSON"),
        (b'{"a":-}', "not JSON"),
        (b'{"a":True}', "not JSON"),
        (b'{"a":1 /* one */}', "not JSON"),
        (b'{"a":1}\xc2\xa0', "not JSON"),
        (b'{"a":1}{"a":2}', "not JSON"),
        (b'{"a":1}]', "not JSON"),
        (b'{"a":1}\x00', "not JSON"),
        (b'{"a":' + b"9" * 309 + b"}", "number is too large"),
        (b'{"a":[-' + b"9" * 309 + b"]}", "number is too large"),
        (b'{"a":' + b"9" * 5000 + b"}", "number is too large"),
        (b'{"a":[-' + b"9" * 5000 + b"]}", "number is too large"),
        (DEEP_LIST, "nested more than 200 deep"),
        (DEEP_OBJECT, "nested more than 200 deep"),
        (b'{"b":"\\\\",' + DEEP_LIST[1:], "nested more than 200 deep"),
        (b'{"a":' * 100_000, "nested more than 200 deep"),
        (b'{"a":' + b"[" * 5000, "nested more than 200 deep"),
    ],
    ids=lambda value: str(value[:40]) if isinstance(value, bytes) else None,
)
def test_what_parsers_read_differently_is_refused_with_the_reason(body: bytes, problem: str) -> None:
    """Duplicates however they are spelled, numbers and text that one side accepts only, anything cut short."""
    with pytest.raises(MalformedJson, match=problem):
        read_object(body)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"{SECRET}":1,"{SECRET}":2}}',
        f'{{"a":"{SECRET}\\ud800"}}',
        f'{{"a":"{SECRET}',
        f'{{"a":{SECRET}}}',
        f'{{"{SECRET}"}}',
        f"{{}}{SECRET}",
        f'["{SECRET}"]',
        f'{{"a":"{SECRET}\n"}}',
        f'{{"a":"{SECRET}\\x"}}',
        f'{{"{SECRET}":1e999}}',
        f'{{"{SECRET}":NaN}}',
        f'{{"{SECRET}":{"9" * 5000}}}',
    ],
)
def test_a_refusal_never_quotes_the_body(body: str) -> None:
    """Bodies are prompts: they belong into no log and no error."""
    with pytest.raises(MalformedJson) as caught:
        read_object(body.encode())
    for word in (SECRET, "hunter", "999"):
        assert word not in str(caught.value)
    assert caught.value.__cause__ is None


def test_one_byte_order_mark_is_accepted_and_not_passed_on() -> None:
    """The engine accepts it; the edited body does without."""
    found = read_object(b'\xef\xbb\xbf{"a":1}')
    assert found.get("a") == 1
    assert found.edited(put(a=2)) == b'{"a":2}'


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a":"\\ud83d\\ude00"}', "😀"),
        (b'{"a":"\\\\ud800"}', "\\ud800"),
        (b'{"a":"\\u0000"}', "\0"),
        (b'{"a":"\x7f"}', "\x7f"),
        (b'{"a":' + b"9" * 308 + b"}", 10**308 - 1),
        (b'{"a":-1' + b"7" * 308 + b"}", int("-1" + "7" * 308)),
        (b'{"a":"' + b"9" * 5000 + b'"}', "9" * 5000),
        (b'{"a":1e-999}', 0.0),
        (b'{"a":{"b":1,"b":2}}', {"b": 2}),
        (b'{"a":"' + b"[{" * 500 + b'"}', "[{" * 500),
        (b'{"b":"\\\\","a":"' + b"[{" * 500 + b'"}', "[{" * 500),
        (b'{"a":"\\"' + b"[{" * 500 + b'\\\\"}', '"' + "[{" * 500 + "\\"),
    ],
    ids=lambda value: str(value[:40]) if isinstance(value, bytes) else None,
)
def test_what_every_parser_reads_alike_is_accepted(body: bytes, value: Any) -> None:
    """Surrogate pairs, escaped backslashes, long numbers, brackets in strings, duplicates far below the top."""
    assert read_object(body).get("a") == value


def test_two_hundred_levels_are_accepted_and_can_be_edited() -> None:
    """The limit itself is inside."""
    body = b'{"a":' + b"[" * (DEPTH_MAX - 1) + b"]" * (DEPTH_MAX - 1) + b"}"
    assert read_object(body).edited(put(b=1)) == body[:-1] + b',"b":1}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"{}," * 201 + b'"' + b'\\"' * 1_000_000,
        b'{"a":[' + b"{}," * 201 + b'"' + b"\\" * 2_000_001,
        b'{"a":' + b'"[' * 1_000_000,
        b'{"a":"' + b"\\u12" * 500_000,
        b'{"a":[' + b"[]," * 700_000,
        b'{"a":' + b" " * 2_000_000,
        b'{"a":' + b"-" * 2_000_000,
    ],
    ids=lambda body: str(body[-10:]),
)
def test_a_hostile_body_costs_no_more_than_its_length(body: bytes) -> None:
    """Work that grew with the square of 2 MB would take hours and end by the suite's timeout."""
    with pytest.raises(MalformedJson):
        read_object(body)


# -- differential fuzz

VALID = st.builds(
    lambda document, separators, ascii_only: spelled(document, separators, ascii_only=ascii_only),
    objects,
    spellings,
    st.booleans(),
)
TOKENS = st.sampled_from(
    rb"""{ } [ ] , : " \ \u \ud800 \" e999 NaN -Infinity true 0 - . ' /**/ "a":1, "n":1""".split(b" ")
) | st.sampled_from([b"\xef\xbb\xbf", b"\xff", b"\x00", b"\n", b" ", b"\xc2\xa0"])


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A valid body with a few of its bytes cut out, replaced, doubled or let in."""
    body = draw(VALID)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, min(start + 6, len(body))))
        middle = draw(TOKENS | st.binary(max_size=3) | st.just(body[start:end] * 2))
        body = body[:start] + middle + body[end:]
    return body


def strict(body: bytes) -> dict[str, Any] | None:
    """The standard library's reading, made as strict as `read_object` says it is; None where that refuses."""

    def constant(name: str) -> Any:
        raise ValueError(name)

    def finite(digits: str) -> float:
        if math.isinf(float(digits)):
            raise ValueError(digits)
        return float(digits)

    tops: list[list[tuple[str, Any]]] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        tops.append(found)
        return dict(found)

    try:
        text = body.decode().removeprefix("\ufeff")
        document = json.loads(text, parse_constant=constant, parse_float=finite, object_pairs_hook=pairs)
        json.dumps(document, ensure_ascii=False).encode()
    except ValueError:
        return None
    return document if isinstance(document, dict) and len(tops[-1]) == len(document) else None


def agree(body: bytes) -> None:
    expected = strict(body)
    try:
        found = read_object(body)
    except MalformedJson:
        assert expected is None
    else:
        assert expected is not None
        assert same({key: member.value for key, member in found.members.items()}, expected)
        assert same(json.loads(found.edited(put(kvgate=1))), {**expected, "kvgate": 1})


@given(mutations())
@example(b'{"a":1}\n\x0b')
@example(b'{"a":1,"a":1}')
@example(b'\xef\xbb\xbf{"a":"\\ud83d"}')
def test_every_mutated_body_is_read_as_strict_json_or_refused(body: bytes) -> None:
    """Never anything but the strict reading or `MalformedJson`, and nothing is refused that strict JSON allows."""
    agree(body)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_strict_json_or_refused(body: bytes) -> None:
    """No other exception escapes, whatever the bytes."""
    agree(body)
    agree(b'{"a":' + body + b"}")


@pytest.mark.parametrize("at", range(0, 210, 7))
def test_a_number_that_is_too_large_is_found_wherever_it_stands(at: int) -> None:
    """Looked for in every hundredth character first."""
    padding = b" " * at
    with pytest.raises(MalformedJson, match="number is too large"):
        read_object(b'{"a":' + padding + b"7" * 309 + padding + b"}")
    assert read_object(b'{"a":"' + padding + b"7" * 309 + b'"}').get("a") == at * " " + "7" * 309
