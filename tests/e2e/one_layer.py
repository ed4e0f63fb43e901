"""Cuts a GGUF model down to its first layer: the same tokenizer and template, thirty times the speed, no sense."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type in GGUF; 8 is a string, 9 an array."""

_ALIGNMENT: Final = 32


class _Tensor(NamedTuple):
    name: str
    head: bytes
    offset: int


def one_layer(model: Path, to: Path) -> Path:
    """Write `model` with the first of its layers alone. A GGUF file is: counts, metadata, tensor heads, tensors."""
    with model.open("rb") as file:
        magic, version, tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
        metadata = b"".join(_pair(file) for _ in range(pairs))
        heads = [_tensor(file) for _ in range(tensors)]
        start = _aligned(file.tell())
        file.seek(0, 2)
        ends = sorted({*(tensor.offset for tensor in heads), file.tell() - start})
        kept = [one for one in heads if not one.name.startswith("blk.") or one.name.startswith("blk.0.")]
        offset, listed, data = 0, b"", []
        for tensor in kept:
            file.seek(start + tensor.offset)
            content = file.read(ends[ends.index(tensor.offset) + 1] - tensor.offset)
            data.append(content + bytes(_aligned(len(content)) - len(content)))
            listed += tensor.head + struct.pack("<Q", offset)
            offset += len(data[-1])
    head = struct.pack("<4sIQQ", magic, version, len(kept), pairs) + metadata + listed
    to.write_bytes(head + bytes(_aligned(len(head)) - len(head)) + b"".join(data))
    return to


def _pair(file: BinaryIO) -> bytes:
    start = file.tell()
    key = _string(file)
    kind = struct.unpack("<I", file.read(4))[0]
    if key.endswith(b".block_count"):
        head = file.tell() - start
        file.seek(start)
        found = file.read(head) + struct.pack("<I", 1)
        file.seek(4, 1)
        return found
    _skip(file, kind)
    end = file.tell()
    file.seek(start)
    return file.read(end - start)


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == 8:
        _string(file)
    elif kind == 9:
        inner, number = struct.unpack("<IQ", file.read(12))
        for _ in range(number):
            _skip(file, inner)
    else:
        file.seek(_SIZES[kind], 1)


def _tensor(file: BinaryIO) -> _Tensor:
    start = file.tell()
    name = _string(file).decode()
    (dimensions,) = struct.unpack("<I", file.read(4))
    file.seek(8 * dimensions + 4, 1)
    end = file.tell()
    file.seek(start)
    return _Tensor(name, file.read(end - start), struct.unpack("<Q", file.read(8))[0])


def _string(file: BinaryIO) -> bytes:
    return file.read(struct.unpack("<Q", file.read(8))[0])


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT
