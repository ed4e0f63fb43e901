"""A vocabulary is read from a GGUF file as it stands there; whatever else the file is, it is refused in words."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.engines.llamacpp import tokenizer
from kvgate.engines.llamacpp.vocabulary import NoVocabulary, tokenizer_json_of

TOKENS = ["<|im_start|>", "<|im_end|>", "a", "b", "ab", "\u0120", "\u010a"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def texts(values: list[str]) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


def gguf(pre: str = "smollm", model: str = "gpt2", **changes: bytes) -> bytes:
    entries = {
        "general.name": entry("general.name", 8, text("small")),
        "general.file_type": entry("general.file_type", 4, struct.pack("<I", 3)),
        "model": entry("tokenizer.ggml.model", 8, text(model)),
        "pre": entry("tokenizer.ggml.pre", 8, text(pre)),
        "tokens": entry("tokenizer.ggml.tokens", 9, texts(TOKENS)),
        "types": entry("tokenizer.ggml.token_type", 9, struct.pack("<IQ7i", 5, 7, 3, 3, 1, 1, 1, 1, 1)),
        "merges": entry("tokenizer.ggml.merges", 9, texts(["a b"])),
        "flag": entry("tokenizer.ggml.add_bos_token", 7, b"\x00"),
    } | changes
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.gguf"


def test_tokens_merges_and_special_tokens_come_as_they_stand_there(path: Path) -> None:
    path.write_bytes(gguf())
    found = json.loads(tokenizer_json_of(path))
    assert found["model"]["vocab"] == {token: at for at, token in enumerate(TOKENS)}
    assert found["model"]["merges"] == ["a b"]
    assert [token["content"] for token in found["added_tokens"]] == TOKENS[:2]


def test_the_library_reads_it(path: Path) -> None:
    path.write_bytes(gguf())
    loaded = tokenizer.load(path)
    assert loaded.tokens("<|im_start|>ab a\n<|im_end|>") == [0, 4, 5, 2, 6, 1]
    assert loaded.count("abab") == 2


def test_what_unicode_versions_differ_on_is_not_certain(path: Path) -> None:
    """A letter of Unicode 16 is none to a program that knows 15; text and emoji of every day are known to all."""
    path.write_bytes(gguf())
    loaded = tokenizer.load(path)
    assert loaded.knows("Straße 東京 עברית हिन्दी 🎉👩‍👩‍👧‍👦🫠 \u00a0\ufffd\U0010fffd \x01")
    for text in ("x\U000105c7", "\ua7cc's", "\u0378", "\U0001e5f2"):
        assert not loaded.knows(text)


def test_the_probe_draws_on_the_vocabulary_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two vocabularies of one family differ in rare merges, which no fixed text would meet."""
    path.write_bytes(gguf())
    monkeypatch.setattr(tokenizer, "SAMPLE_STEP", 2)
    assert tokenizer.load(path).sample() == ["aab\n", " a ab \n"]


def test_a_tokenizer_json_has_its_implied_pattern_written_out(tmp_path: Path, path: Path) -> None:
    """The library's own cuts a contraction behind a line end otherwise than the pattern that it stands for."""
    path.write_bytes(gguf(pre="gpt-2"))
    document = json.loads(tokenizer_json_of(path))
    implied = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    other = tmp_path / "tokenizer.json"
    for pre_tokenizer in (implied, {"type": "Sequence", "pretokenizers": [implied]}):
        other.write_text(json.dumps(document | {"pre_tokenizer": pre_tokenizer}))
        for sample in ("\nab", "a\n'd ab", "ab ab"):
            assert tokenizer.load(other).tokens(sample) == tokenizer.load(path).tokens(sample)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"GGML" + gguf()[4:],
        gguf()[:200],
        gguf(model="llama"),
        gguf(pre="something-new"),
        gguf(tokens=b"", merges=b""),
        gguf(types=entry("tokenizer.ggml.token_type", 9, struct.pack("<IQ1i", 5, 1, 3))),
        gguf(tokens=entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2**60))),
        gguf(tokens=entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 9, 1))),
        gguf(flag=entry("x", 99, b"")),
        gguf(flag=struct.pack("<Q", 2**40)),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**50),
    ],
)
def test_whatever_is_no_vocabulary_is_refused_in_words(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(NoVocabulary, match=r"\w"):
        tokenizer_json_of(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(gguf()) - 1), st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_read_or_refused_and_never_more(path: Path, at: int, noise: bytes) -> None:
    data = gguf()
    path.write_bytes(data[:at] + noise + data[at + len(noise) :])
    try:
        tokenizer_json_of(path)
    except NoVocabulary:
        return


@pytest.mark.parametrize("content", [None, b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_none_is_said_to_be_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NoVocabulary, match=r"tokenizer\.json"):
        tokenizer.load(path)


def test_without_the_library_it_is_said_which_extra_has_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "kitoken", None)
    with pytest.raises(NoVocabulary, match=r"kvgate\[tokenizer\]"):
        tokenizer.load(path)


def test_the_probe_texts_hold_every_special_token_bare_and_broken() -> None:
    """The set on which a vocabulary is believed: also emoji, both normal forms, rare bytes."""
    found: list[Any] = tokenizer.probe_texts(["<|odd|>"])
    assert {"<|odd|>", "<|odd|", "|odd|>"} <= set(found)
    everything = "".join(found)
    assert all(text in everything for text in ("🎉", "e\u0301", "é", "\u0958", "\x01", "\U0010fffd", "\u00a0"))
