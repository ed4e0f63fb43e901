"""A text that repeats itself without end is found, and soon; what people, tables and programs repeat never is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.core import loops
from kvgate.core.loops import Loop, LoopWatch, repeats

if TYPE_CHECKING:
    from collections.abc import Iterator

CORPORA = sorted((Path(__file__).parent.parent / "corpora").iterdir())

PROSE = (Path(__file__).parent.parent / "corpora" / "prose.txt").read_text()


def pieces(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def found_after(text: str, size: int = 5) -> tuple[Loop | None, int]:
    """What is found, and after how many characters."""
    watch, after = LoopWatch(), 0
    for piece in pieces(text, size):
        after += len(piece)
        if watch.feed(piece) is not None:
            break
    return watch.found, after


def test_the_corpora_are_there() -> None:
    assert len(CORPORA) >= 30
    assert sum(path.stat().st_size for path in CORPORA) > 150_000


@pytest.mark.parametrize("path", CORPORA, ids=lambda path: path.name)
@pytest.mark.parametrize("size", [1, 4, 61, 100_000])
def test_what_only_looks_like_a_loop_is_none(path: Path, size: int) -> None:
    assert found_after(path.read_text(), size)[0] is None


@pytest.mark.parametrize("size", [3, 700])
def test_all_of_it_together_is_none(size: int) -> None:
    assert found_after("\n\n".join(path.read_text() for path in CORPORA), size)[0] is None


@given(st.text(min_size=1, max_size=900), st.integers(1, 700))
@settings(max_examples=150)
def test_a_piece_over_and_over_is_found(unit: str, size: int) -> None:
    """Whatever it is, wherever it is cut: within a few repetitions, or the length that short pieces need."""
    least = max(loops.SHORT_REPEATED_CHARS_MIN, loops.REPEATS_MIN * len(unit))
    text = PROSE + unit * (1 + (least + len(unit) + 2 * loops.STEP_CHARS) // len(unit))
    found, _ = found_after(text, size)
    assert found is not None


@given(st.text(alphabet="abc \n", max_size=6000), st.integers(1, 50), st.integers(51, 3000))
def test_it_is_found_alike_however_the_text_is_cut(text: str, one: int, other: int) -> None:
    """Up to where a look falls: a look in another place sees a little more or less."""
    repeated = text + "never mind, never mind; " * 200
    assert found_after(repeated, one)[0] is not None
    assert found_after(repeated, other)[0] is not None


@given(st.text(alphabet="ab", min_size=1, max_size=4096))
def test_repeats_means_that_the_end_equals_itself_further_on(text: str) -> None:
    """Against the definition, period by period."""
    if not repeats(text):
        return
    assert any(
        length <= len(text) and text[len(text) - length : -unit] == text[len(text) - length + unit :]
        for unit in range(1, len(text))
        for length in [
            max(
                loops.SHORT_REPEATED_CHARS_MIN if unit <= loops.SHORT_UNIT_CHARS else loops.REPEATED_CHARS_MIN,
                unit * loops.REPEATS_MIN,
            )
        ]
    )


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("I'm sorry, but I can't do that. " * 60, Loop.TEXT),
        ("A" * 3000, Loop.TEXT),
        ("the same paragraph, which is a little longer than most are, and then\n\n" * 40, Loop.TEXT),
        ("".join(f"{at}. Check that the valve is closed.\n" for at in range(1, 80)), Loop.LINE),
        ("".join(f"{'- ' * (at % 3)}Call the office\n({at}) Send a letter to them\n" for at in range(60)), Loop.LINE),
        (
            " ".join(
                f"{'really ' * (at * 7919 % 101 % 5)}and then the man went to the house of the man"
                for at in range(150)
            ),
            Loop.WORDS,
        ),
    ],
)
def test_loops_as_models_make_them(text: str, loop: Loop) -> None:
    """After an answer that went well for a while."""
    found, after = found_after(PROSE + text)
    assert found is loop
    assert after < len(PROSE) + 2 * loops.WORDS_STEP_CHARS + loops.STEP_CHARS


def test_what_was_found_stays_found() -> None:
    watch = LoopWatch()
    watch.feed("so be it, so be it; " * 200)
    assert watch.feed(PROSE) is watch.found is Loop.TEXT


def test_memory_is_bounded_without_a_single_line_end() -> None:
    watch = LoopWatch()
    for at in range(3000):
        watch.feed(f"{at * at} is a square number, and {at * at + 1} is none")
    assert len(watch._window) <= loops.WINDOW_CHARS + loops.STEP_CHARS
    assert len(watch._line) <= loops.LINE_CHARS_MAX
    assert sum(map(len, watch._lines)) <= loops.LINES_KEPT * loops.LINE_CHARS_MAX
