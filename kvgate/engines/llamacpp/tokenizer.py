"""A model's vocabulary in this process, by a library that leaves the interpreter to others while it counts."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, Final

from kvgate.engines.llamacpp.vocabulary import MAGIC, NoVocabulary, spelled_out, tokenizer_json_of

try:
    import kitoken
except ImportError:
    kitoken = None  # type: ignore[assignment]  # the extra is not installed

if TYPE_CHECKING:
    from pathlib import Path

MISSING: Final = "the tokenizer library is not installed: pip install 'kvgate[tokenizer]'"

_SYMBOLS: Final = range(0x1F000, 0x1FB00)
"""Blocks of emoji and other pictures, which grow with each version."""

IDS_MAX: Final = 300_000
SAMPLE_STEP: Final = 37
"""Of the vocabulary, every 37th token is tokenized again by both: another model's has other merges for some."""

FILE_BYTES_MAX: Final = 128 * 1024 * 1024


class Tokenizer:
    """Counts tokens as the engine's vocabulary does, special tokens' own texts read as those tokens."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._unsure = re.compile(_unsure_characters())

    def knows(self, text: str) -> bool:
        """Whether the engine certainly cuts this text into the same words.

        Where words end depends on which characters are letters or numbers, and programs know different versions of
        Unicode: U+105C7 is a letter to one and nothing to another. What Unicode 3.2 knew, all know alike.
        """
        return text.isascii() or self._unsure.search(text) is None

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        return list(self._library.encode(text, True))

    def count(self, text: str) -> int:
        """Their number."""
        return len(self._library.encode(text, True))

    def sample(self) -> list[str]:
        """Texts of tokens from all over the vocabulary, the rare ones at its end too."""
        found = []
        for token in range(0, IDS_MAX, SAMPLE_STEP):
            try:
                text = self._library.decode([token]).decode()
            except UnicodeDecodeError:  # a part of a character
                continue
            except Exception:  # behind the last token; the library has no error of its own  # noqa: BLE001
                break
            found.append(text)
        groups = [found[at : at + 40] for at in range(0, len(found), 40)]
        return [text for group in groups for text in ("".join(group), " ".join(group))]


@functools.cache
def _unsure_characters() -> str:
    """A character class of what came after Unicode 3.2, symbols excepted, which are no letters to anybody."""
    category, ranges, begun = unicodedata.ucd_3_2_0.category, [], None
    for code in range(0x80, sys.maxunicode + 2):
        unsure = code <= sys.maxunicode and code not in _SYMBOLS and category(chr(code)) == "Cn"
        if unsure and begun is None:
            begun = code
        elif not unsure and begun is not None:
            ranges.append(f"\\U{begun:08x}-\\U{code - 1:08x}")
            begun = None
    return f"[{''.join(ranges)}]"


def load(path: Path) -> Tokenizer:
    """The vocabulary of a `tokenizer.json` or a GGUF file; takes up to a second, so not on the event loop.

    Raises:
        NoVocabulary: there is none to be had, with the reason.
    """
    if kitoken is None:
        raise NoVocabulary(MISSING)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == MAGIC
            if not is_gguf and path.stat().st_size > FILE_BYTES_MAX:
                raise NoVocabulary(f"{path.name} is larger than any vocabulary")
        data = tokenizer_json_of(path) if is_gguf else _spelled_out(path.read_bytes())
    except OSError as error:
        raise NoVocabulary(f"{path.name} cannot be read here: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, NoVocabulary):
            raise
        raise NoVocabulary(f"{path.name} is no vocabulary that can be loaded ({type(error).__name__})") from None
    try:
        return Tokenizer(kitoken.Kitoken.from_tokenizers(data))
    except Exception as error:  # the library has no error of its own  # noqa: BLE001
        raise NoVocabulary(f"{path.name} is no vocabulary that can be loaded ({type(error).__name__})") from None


def _spelled_out(data: bytes) -> bytes:
    document = json.loads(data)
    return json.dumps(document | {"pre_tokenizer": spelled_out(document["pre_tokenizer"])}).encode()


_TEXTS: Final = (
    "Hello world, how are you today?",
    " leading, trailing \n\n and\ttabs\r\n  \n   x  ",
    "\n'dK\n'll\n's x\r\n're\t've 'm't's",
    "don't can't I'LL we've they'd O'Neill 'quoted'",
    "1 12 123 1234 12345 3.14159 1,000,000 ٣٤٥ ½ ² Ⅻ",
    "émigré naïve Straße ÅÉÎÕÜ ŁódźÃ¿",
    "e\u0301 n\u0303 A\u030a \u1100\u1161\u11a8 \u0958\u0959 \ufb01 \u212b \u00c5",
    "東京都 中文字符测试 한국어 ภาษาไทย हिन्दी עברית العربية Ελληνικά",
    "🎉👩‍👩‍👧‍👦🇮🇹🦜🏳️‍🌈👍🏽 ✅❤️",
    "\u00a0\u2003\u200b\u200d\ufeff\u2028\u3000\ufffd",
    "\x01\x02\x1b[0m\x7f\u0080\u009f",
    "\U0001d518\U0001d52b\U0001d526 \U00012000 \U00010348 \U0010fffd \ue000",
    "for (int i = 0; i < 10; ++i) { sum += a[i]; } // x\n#include <a.h>",
    '{"json": ["inside", {"text": null}]} <a href="x">y</a> $E=mc^2$',
    "https://example.org/path?x=1&y=%20#frag user@example.org",
    "a" * 70 + " " * 40 + "-" * 33 + "\n" * 9 + "=" * 17,
    "<|im_start", "<|im_start|>x<|im_end|>", "<s></s>[INST] [/INST] <|endoftext|><|eot_id|><|end|><unk>",
    "",
)  # fmt: skip


def probe_texts(specials: list[str]) -> list[str]:
    """What a vocabulary must read as the engine does before it is believed.

    Words, spaces, digits, contractions; scripts and emoji; texts that some vocabularies normalise; bytes that few
    have a token for; the special tokens, bare, joined, broken and between words; and a drawn mixture.
    """
    own = [
        piece for text in specials for piece in (text, f"a{text}b", f" {text} \n{text}{text}", text[:-1], text[1:])
    ]
    draw = random.Random(20)  # noqa: S311 - a fixed choice of texts, not a secret
    ranges = ((0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x600), (0x900, 0x1200), (0x2000, 0x3100), (0x4E00, 0x9FFF))
    scraps = ("'s", "'ll", "'d", " ", "  ", "\n", "\r\n", "\t", "'", "7", "12")
    drawn = [
        "".join(draw.choice((chr(draw.randrange(*draw.choice(ranges))), draw.choice(scraps))) for _ in range(60))
        for _ in range(20)
    ]
    mixed = ["".join(draw.sample([*_TEXTS, *own], 5)) for _ in range(12)]
    return [*_TEXTS, *own, *drawn, *mixed]
