"""Reads a model's vocabulary out of its GGUF file, in the form that tokenizer libraries load."""

from __future__ import annotations

import json
import mmap
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ENTRIES_MAX: Final = 4096
ITEMS_MAX: Final = 2_000_000
TEXT_BYTES_MAX: Final = 1_000_000

_NUMBERS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of llama.cpp that are cut out of a text before anything else."""

_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_GPT2: Final = _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

PRE_TOKENIZERS: Final[dict[str, list[dict[str, Any]]]] = {
    "gpt-2": [_GPT2, _BYTES],
    "smollm": [_DIGITS, _GPT2, _BYTES],
    "starcoder": [_DIGITS, _GPT2, _BYTES],
    "llama-bpe": [_split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"), _BYTES],
    "qwen2": [_split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"), _BYTES],
}
"""By llama.cpp's name (`tokenizer.ggml.pre`), how a text is cut into words before they are tokenized.

Each is only taken for true once it agreed with the engine on the probe texts.
"""


def spelled_out(pre_tokenizer: Any) -> Any:
    """The same with GPT-2's pattern written out, where a ByteLevel implies it.

    The library's own version of it cuts a contraction behind a line end otherwise (measured on 0.11.1).
    """
    if isinstance(pre_tokenizer, list):
        return [spelled_out(one) for one in pre_tokenizer]
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    if pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True):
        return {"type": "Sequence", "pretokenizers": [_GPT2, {**pre_tokenizer, "use_regex": False}]}
    return {name: spelled_out(value) for name, value in pre_tokenizer.items()}


WHOLE_WORDS: Final = frozenset({"llama-bpe"})
"""Those that take a word that is a token as that token, without merging."""


class NoVocabulary(ValueError):
    """There is no vocabulary to be had from this file; the message says why."""


def tokenizer_json_of(path: Path) -> bytes:
    """The vocabulary of a GGUF file as the `tokenizer.json` that it was made from.

    Raises:
        NoVocabulary: the file is none, or its kind of tokenizer is not known here.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _Reader(data).vocabulary()
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, NoVocabulary):
            raise
        raise NoVocabulary(f"{path.name} is no GGUF file that can be read ({type(error).__name__})") from None
    kind, pre = found.get("tokenizer.ggml.model"), found.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise NoVocabulary(f"the vocabulary is of a kind that is not read from GGUF files here ({kind}, {pre})")
    return _tokenizer_json(found, str(pre))


def _tokenizer_json(found: dict[str, Any], pre: str) -> bytes:
    tokens, merges, types = (found.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(types, list):
        raise NoVocabulary("the file holds no tokens, merges or types")
    if len(tokens) != len(types):
        raise NoVocabulary("the file has not one type for each token")
    added = [
        {"id": at, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for at, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in {_CONTROL, _USER_DEFINED}
    ]
    model = {
        "type": "BPE",
        "vocab": {token: at for at, token in enumerate(tokens)},
        "merges": merges,
        "ignore_merges": pre in WHOLE_WORDS,
        "byte_fallback": False,
    }
    document = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _BYTES,
        "model": model,
    }
    return json.dumps(document).encode()


class _Reader:
    """Walks a GGUF file's metadata; whatever is there is bounded before it is believed."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def vocabulary(self) -> dict[str, Any]:
        """The entries whose names begin with `tokenizer.ggml`."""
        if self._data[:4] != MAGIC:
            raise NoVocabulary("the file is no GGUF file")
        self._at = 4
        if self._number("<I") not in VERSIONS:
            raise NoVocabulary("the file is of a version of GGUF that is not known here")
        self._number("<Q")
        entries = self._bounded(ENTRIES_MAX)
        found: dict[str, Any] = {}
        for _ in range(entries):
            name = self._text()
            value = self._value(self._number("<I"))
            if name.startswith("tokenizer.ggml."):
                found[name] = value
        return found

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            of = self._number("<I")
            items = self._bounded(ITEMS_MAX)
            if of == _LIST:
                raise NoVocabulary("the file has lists of lists")
            return [self._value(of) for _ in range(items)]
        if kind not in _NUMBERS:
            raise NoVocabulary("the file has values of a kind that is not known here")
        return self._number(_NUMBERS[kind])

    def _number(self, form: str) -> Any:
        value = struct.unpack_from(form, self._data, self._at)[0]
        self._at += struct.calcsize(form)
        return value

    def _bounded(self, most: int) -> int:
        number: int = self._number("<Q")
        if number > most:
            raise NoVocabulary("the file's figures are beyond all bounds")
        return number

    def _text(self) -> str:
        size = self._bounded(TEXT_BYTES_MAX)
        text = self._data[self._at : self._at + size]
        if len(text) != size:
            raise NoVocabulary("the file breaks off")
        self._at += size
        return text.decode("utf-8", "replace")
