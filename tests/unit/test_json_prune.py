"""What is taken out of a body's depths takes no other byte along."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.json_object import read_object
from kvgate.core.json_prune import EACH, Pruner

PATHS = (("m", EACH, "x"), ("m", EACH, "c", EACH, "x"), ("s", "x"))
PRUNER = Pruner(PATHS)


def pruned(text: str) -> str:
    return PRUNER.pruned(read_object(text.encode())).text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"m":[{"x":1}]}', '{"m":[{}]}'),
        ('{"m":[ {"x":1, "a": 1.50} ]}', '{"m":[ {"a": 1.50} ]}'),
        ('{"m":[{"a":1 , "x":{"y":[1,2]} , "b":2}]}', '{"m":[{"a":1 , "b":2}]}'),
        ('{"m":[{"a":1, "x":2}, {"x":1, "x":2, "b":3}]}', '{"m":[{"a":1}, {"b":3}]}'),
        ('{"m":[{"c":[{"x":1,"t":"\\u00e9"},7,"x",{"x":0}],"x":1}]}', '{"m":[{"c":[{"t":"\\u00e9"},7,"x",{}]}]}'),
        ('{"m":[{"\\u0078":1,"a":2}]}', '{"m":[{"a":2}]}'),
        ('{"s":{"x":1},"x":3}', '{"s":{},"x":3}'),
    ],
)
def test_the_members_of_the_paths_go_and_every_other_byte_stays(before: str, after: str) -> None:
    """Spacing, number spellings, escapes and order, whatever stands around what goes."""
    assert pruned(before) == after


@pytest.mark.parametrize(
    "text",
    [
        '{"x":1}',
        '{"m":{"x":1}}',
        '{"m":[[{"x":1}]]}',
        '{"m":[{"a":{"x":1}}]}',
        '{"m":[{"c":{"x":1}}]}',
        '{"m":"x"}',
        '{"m":[{"t":"\\"x\\":1"}]}',
        '{"q":[{"x":1}]}',
        '{"m":[]}',
        '{"m":[{"c":[{"i":{"x":1}}]}]}',
    ],
)
def test_the_same_name_elsewhere_stays(text: str) -> None:
    """A tool's argument may be called anything; a text may hold anything."""
    assert pruned(text) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "c", "m", "a", "é"]), inner, max_size=4)
    ),
    max_leaves=20,
)


def without(value: Any, paths: list[tuple[str, ...]]) -> Any:
    """The same by the plain meaning of the paths."""
    if isinstance(value, list):
        inner = [path[1:] for path in paths if path[0] == EACH and len(path) > 1]
        return [without(one, inner) for one in value]
    if isinstance(value, dict):
        gone = {path[0] for path in paths if len(path) == 1}
        return {
            key: without(one, [path[1:] for path in paths if path[0] == key and len(path) > 1])
            for key, one in value.items()
            if key not in gone
        }
    return value


@given(st.dictionaries(st.sampled_from(["m", "s", "x", "z"]), JSON), st.sampled_from([None, 1, 3]), st.booleans())
def test_what_is_left_means_what_was_left(body: dict[str, Any], indent: int | None, escaped: bool) -> None:
    """Also pretty-printed, and pruning again changes nothing."""
    text = json.dumps(body, indent=indent, ensure_ascii=escaped)
    left = pruned(text)
    assert json.loads(left) == without(body, list(PATHS))
    assert pruned(left) == left
