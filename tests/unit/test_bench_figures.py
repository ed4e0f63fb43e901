"""The benchmark's arithmetic: medians over rounds, ratios within a round, and a table that says what is missing."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from loadtests.bench import bodies
from loadtests.bench.client import COUNTER, quantile, requests_of
from loadtests.bench.figures import (
    MARKS,
    Book,
    Column,
    footnotes,
    markdown_table,
    rows,
    text_table,
    write_between_marks,
)

COLUMNS = [Column("rps", "requests/s", "more"), Column("errors", "errors", "less", ratio=False)]
VALUES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=7)


def book(**proxies: list[float]) -> Book:
    found = Book(COLUMNS, list(proxies))
    for name, values in proxies.items():
        for number, value in enumerate(values):
            found.add(name, "rps", number, value)
    return found


@given(VALUES, st.floats(0.01, 100))
def test_a_ratio_is_taken_within_its_round(base: list[float], factor: float) -> None:
    """However much the rounds differ: who is always twice as fast is twice as fast."""
    found = book(nginx=base, kvgate=[value * factor for value in base])
    ratio = found.ratio("kvgate", "rps")
    assert ratio is not None
    assert abs(ratio / factor - 1) < 1e-9
    assert found.median("nginx", "rps") == median(base)


def test_what_was_not_measured_is_empty_and_has_no_ratio() -> None:
    found = book(nginx=[10.0, 20.0], kvgate=[5.0], LiteLLM=[])
    found.missing["LiteLLM"] = "not installed"
    found.add("kvgate", "errors", 0, 3)
    table = rows(found)
    assert table[0] == ["", "nginx", "kvgate"]
    assert table[1] == ["requests/s (more is better)", "15", "5 (0.50x)"]
    assert table[2] == ["errors (less is better)", "", "3"]
    assert "LiteLLM: not installed" in footnotes(found)
    assert found.ratio("LiteLLM", "rps") is None
    assert markdown_table(table).splitlines()[1] == "|---|---:|---:|"
    assert len({len(line) for line in text_table(table).splitlines()}) == 1


def test_tables_are_written_between_the_marks_and_nowhere_else(tmp_path: Path) -> None:
    """Again and again, with the same result; a file without marks is written whole."""
    path = tmp_path / "performance.md"
    path.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    for text in ("first", "second"):
        write_between_marks(path, text)
    assert path.read_text() == f"before\n{MARKS[0]}\n\nsecond\n{MARKS[1]}\nafter\n"
    write_between_marks(tmp_path / "new.md", "tables")
    assert (tmp_path / "new.md").read_text() == "tables"


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 1))
def test_a_quantile_is_one_of_the_values(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value < found for value in values) <= share * len(values)


def test_every_request_has_a_number_of_its_own_and_the_same_length() -> None:
    """So that the count of its tokens, which the upstream tells, is the same for all."""
    body = bodies.chat("2k", 2048, stream=False)
    assert COUNTER in body
    assert 1500 < len(body) < 3000
    requests = requests_of("http://127.0.0.1:1", body, "sk-x")
    first, second = next(requests), next(requests)
    assert first != second
    assert len(first) == len(second)
    assert int(first.split(b"Content-Length: ")[1].split(b"\r\n")[0]) == len(body)


def test_the_document_has_a_place_for_the_tables() -> None:
    text = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    assert [text.count(mark) for mark in MARKS] == [1, 1]
    assert text.index(MARKS[0]) < text.index(MARKS[1])
