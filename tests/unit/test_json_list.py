"""A list loses elements and keeps every other byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.json_list import elements, without
from kvgate.core.json_object import read_object

TEXT = '{"a": 1e0, "l" : [ {"x": [1, "]"]} ,\n\t"s,", 1.50 , [] ] , "z":"\u00e9"}'


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        (set(), TEXT),
        ({0}, '{"a": 1e0, "l" : ["s,", 1.50 , [] ] , "z":"\u00e9"}'),
        ({1, 2}, '{"a": 1e0, "l" : [ {"x": [1, "]"]} , [] ] , "z":"\u00e9"}'),
        ({3}, '{"a": 1e0, "l" : [ {"x": [1, "]"]} ,\n\t"s,", 1.50 ] , "z":"\u00e9"}'),
        ({0, 1, 2, 3}, '{"a": 1e0, "l" : [ ] , "z":"\u00e9"}'),
    ],
)
def test_every_other_byte_stays(dropped: set[int], expected: str) -> None:
    """Spacing and spellings of what is kept are those that came."""
    document = read_object(TEXT.encode())
    assert without(document, "l", elements(document, "l"), dropped) == expected


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(values, max_size=8), st.sets(st.integers(0, 7)), st.sampled_from([None, 1]), st.booleans())
def test_whatever_the_elements_are_the_rest_is_left(
    listed: list[Any], dropped: set[int], indent: int | None, ascii_only: bool
) -> None:
    """As a parser reads it, and each element in its own spelling."""
    text = json.dumps({"l": listed, "n": 1}, indent=indent, ensure_ascii=ascii_only)
    try:
        document = read_object(text.encode())
    except (ValueError, UnicodeEncodeError):
        return  # half a surrogate pair
    spans = elements(document, "l")
    assert [json.loads(document.text[start:end]) for start, end in spans] == listed
    shorter = without(document, "l", spans, dropped)
    assert json.loads(shorter) == {"l": [one for at, one in enumerate(listed) if at not in dropped], "n": 1}
    assert all(document.text[start:end] in shorter for at, (start, end) in enumerate(spans) if at not in dropped)
