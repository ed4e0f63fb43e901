"""When a generated text repeats itself: fed as it comes, in bounded memory, mostly by searches of the C library.

Models get stuck: the same words, sentences or lines again and again, until the slot is full. Three signs are
looked for, every `STEP_CHARS` characters, in the last few thousand of them:

- `text`: the end is one piece over and over, character by character;
- `line`: of the last lines almost none is new, list marks (`17.`, `-`) left aside;
- `words`: of the last runs of `RUN_WORDS` words almost none is new.

People, tables and programs repeat themselves too. So each sign needs much more than they do: `tests/corpora` holds
what must not be taken for a loop. A loop has no end, so it is found a little later.
"""

from __future__ import annotations

import re
from collections import deque
from enum import StrEnum
from typing import Final

STEP_CHARS: Final = 128
"""So much text is new at every look for repeated text and lines."""

WORDS_STEP_CHARS: Final = 4096
"""The same for words, which cost more to look at."""

WINDOW_CHARS: Final = 4096
"""What is looked at for repeated text and words."""

NEEDLE_CHARS: Final = 24

REPEATS_MIN: Final = 4
REPEATED_CHARS_MIN: Final = 640
"""A piece counts as repeated over and over where it stands so often, and fills so much, at the very end."""

SHORT_UNIT_CHARS: Final = 8
UNIT_LETTERS_MIN: Final = 4
SHORT_REPEATED_CHARS_MIN: Final = 2048
"""Rules, fills and zeros are long runs of short pieces, pictures and encoded zeros of pieces with hardly a letter in
them; they need more."""

LINES_KEPT: Final = 40
LINES_NEW_MAX: Final = 4
LINE_LETTERS_MIN: Final = 12
LINE_CHARS_MAX: Final = 400
"""Of the last so many lines with so many letters at most this many differ, in a loop."""

RUN_WORDS: Final = 8
WORDS_NEW_RATIO_MAX: Final = 0.3
WORDS_MIN: Final = 320
RUNS_NEW_RATIO_MAX: Final = 0.15
LETTERS_RATIO_MIN: Final = 0.6
"""Of the words in the window, and of their runs, at most these shares differ, in a loop; figures are no words, and
too many of them make a table."""

_WORDS: Final = re.compile(r"\w+")
_MARK: Final = re.compile(r"^[\s>#|*+\-\u2022]*(?:\(?\d{1,6}[.):]|[a-zA-Z][.)])?\s*")
_LETTERS: Final = re.compile(r"[^\W\d_]")


class Loop(StrEnum):
    """What repeats itself."""

    TEXT = "text"
    LINE = "line"
    WORDS = "words"


GLANCES: Final = 6
GLANCE_CHARS: Final = 24
GLANCED_CHARS_MAX: Final = 2048
"""A glance compares so many places, each of so many characters, with so much text of earlier glances."""


class Glances:
    """Takes a glance at pieces of a text that are far apart, to tell whether it is worth a closer look."""

    def __init__(self) -> None:
        self._before = ""

    def is_new(self, text: str) -> bool:
        """Whether none of a few places in this piece stood anywhere before, in it or in the pieces before it."""
        known = self._before = (self._before + "\n" + text)[-GLANCED_CHARS_MAX:]
        step = max(len(text) // GLANCES, GLANCE_CHARS)
        places = (text[at : at + GLANCE_CHARS] for at in range(0, len(text) - GLANCE_CHARS + 1, step))
        return all(known.find(place, known.find(place) + 1) < 0 for place in places)


class LoopWatch:
    """Watches one generated text; `found` is the first sign of a loop, or None."""

    def __init__(self) -> None:
        self.found: Loop | None = None
        self._window = ""
        self._unseen = self._unseen_words = 0
        self._line = ""
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    def feed(self, text: str) -> Loop | None:
        """Further text; what was found until now."""
        if self.found is not None:
            return self.found
        for start in range(0, len(text), STEP_CHARS):
            piece = text[start : start + STEP_CHARS]
            self._window += piece
            self._unseen += len(piece)
            self._take_lines(piece)
            if self._unseen >= STEP_CHARS:
                self._unseen_words += self._unseen
                self._unseen = 0
                self._window = self._window[-WINDOW_CHARS:]
                if (found := self._look()) is not None:
                    self.found = found
                    break
        return self.found

    def _take_lines(self, piece: str) -> None:
        first, *others = piece.split("\n")
        self._line = (self._line + first)[:LINE_CHARS_MAX]
        for line in others:
            if len(self._line) >= LINE_LETTERS_MIN:
                self._lines.append(_MARK.sub("", self._line, count=1))
            self._line = line[:LINE_CHARS_MAX]

    def _look(self) -> Loop | None:
        if repeats(self._window):
            return Loop.TEXT
        if len(self._lines) == LINES_KEPT and few_new_lines(set(self._lines)):
            return Loop.LINE
        if self._unseen_words >= WORDS_STEP_CHARS:
            self._unseen_words = 0
            return Loop.WORDS if few_new_words(self._window) else None
        return None


def few_new_lines(different: set[str]) -> bool:
    """Whether so few different lines are those of a loop: each has enough letters to be no rule and no bracket."""
    return len(different) <= LINES_NEW_MAX and all(
        len(_LETTERS.findall(line)) >= LINE_LETTERS_MIN for line in different
    )


def repeats(text: str) -> bool:
    """Whether the text ends in one piece over and over.

    The last characters are looked for before; where they stood last begins the piece, if there is one.
    """
    needle = text[-NEEDLE_CHARS:]
    before = text.rfind(needle, 0, len(text) - 1)
    if before < 0 or len(needle) < NEEDLE_CHARS:
        return False
    unit = len(text) - NEEDLE_CHARS - before
    is_plain = unit <= SHORT_UNIT_CHARS or len(set(_LETTERS.findall(text[-unit:]))) < UNIT_LETTERS_MIN
    least = SHORT_REPEATED_CHARS_MIN if is_plain else REPEATED_CHARS_MIN
    length = max(least, unit * REPEATS_MIN)
    # A text repeats itself every `unit` characters where it equals itself, so many characters further on.
    return length <= len(text) and text[-length:-unit] == text[-length + unit :]


def few_new_words(text: str) -> bool:
    """Whether hardly any run of words in the text is new."""
    words = _WORDS.findall(text)
    if len(words) < WORDS_MIN or len(set(words)) > WORDS_NEW_RATIO_MAX * len(words):
        return False
    if sum(map(str.isalpha, words)) < LETTERS_RATIO_MIN * len(words):
        return False
    runs = set(zip(*(words[at:] for at in range(RUN_WORDS)), strict=False))
    return len(runs) <= RUNS_NEW_RATIO_MAX * (len(words) - RUN_WORDS + 1)
