"""Messages and states as bytes: the safetensors format, numbers as JSON in its header. Never pickle.

Bytes are made and read in pieces, so that nobody holds a large message twice: what is sent is cut from one tensor after
the other, and what came is filled into one tensor after the other while its pieces are let go.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitfleet.errors import UserError
from vitfleet.files import Data, write_atomically
from vitfleet.message import Numbers, Payload, Tensors

NUMBERS = "numbers"
METADATA = "__metadata__"
ALIGNMENT = 8
LENGTH_FIELD = 8  # bytes of the header's length, before the header
LONGEST_HEADER = 10**8  # the format's own bound
KEPT_NAMES = 10**5  # characters
PIECE = 2**20  # bytes: a slow line must get one through before Flower loses its patience, after 30 seconds

# How the format names dtypes, in the order in which it lays tensors out (widest first, then by name).
_LAYOUT: Mapping[torch.dtype, str] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANK = {dtype: rank for rank, dtype in enumerate(_LAYOUT)}
_DTYPE = {name: dtype for dtype, name in _LAYOUT.items()}

PayloadType = TypeVar("PayloadType", bound=Payload)


def encode(named: Payload) -> bytes:
    """Serialize tensors and numbers."""
    return b"".join(_parts(named))


def encode_chunks(named: Payload) -> Iterator[bytes]:
    """Yield what :func:`encode` returns, in pieces of one size, the last one shorter."""
    piece = bytearray()
    for part in _parts(named):
        rest = memoryview(part)
        while len(rest) >= (room := PIECE - len(piece)):
            piece += rest[:room]
            yield bytes(piece)
            piece, rest = bytearray(), rest[room:]
        piece += rest
    if piece:
        yield bytes(piece)


def write_payload(path: Path, named: Payload, put: Callable[[Path, Data], None] = write_atomically) -> None:
    """Write what :func:`encode` returns into a file: whole or not at all, unless ``put`` does it otherwise."""
    put(path, _parts(named))


def decode(kind: type[PayloadType], data: bytes) -> PayloadType:
    """Read back what :func:`encode` wrote.

    Raises
    ------
    UserError
        If the bytes are not such a message, or are damaged.
    """
    return decode_chunks(kind, [data], len(data))


def read_payload(kind: type[PayloadType], path: Path) -> PayloadType:
    """Read back what :func:`write` wrote; raises as :func:`decode` does."""
    with path.open("rb") as file:
        return decode_chunks(kind, iter(lambda: file.read(PIECE), b""), path.stat().st_size)


def decode_chunks(kind: type[PayloadType], pieces: Iterable[bytes], size: int) -> PayloadType:
    """Read back what :func:`cut` yielded, ``size`` bytes in all; raises as :func:`decode` does."""
    source = _Source(iter(pieces))
    try:
        length = int.from_bytes(source.take(LENGTH_FIELD), "little")
        if length > min(LONGEST_HEADER, size - LENGTH_FIELD):
            raise ValueError("its header is longer than it may be")
        header = json.loads(source.take(length))
        numbers = parse_numbers(header.pop(METADATA))
        tensors = {}
        for name, dtype, shape in _places(header, size - LENGTH_FIELD - length):
            tensors[name] = torch.empty(shape, dtype=dtype)
            source.fill(_raw(tensors[name]))
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise UserError(f"a {kind.__name__.lower()} of {size} bytes cannot be read: {error}") from error
    return kind(tensors=tensors, numbers=numbers)


def parse_numbers(metadata: Mapping[str, str]) -> Numbers:
    """Read the numbers out of a header's metadata."""
    numbers = json.loads(metadata[NUMBERS])
    if not isinstance(numbers, dict) or not all(map(_is_number, numbers.values())):
        raise ValueError("its numbers are not numbers")
    return numbers


def encoded_size(named: Payload) -> int:
    """Return ``len(encode(named))`` without touching a tensor: a simulation counts every message's bytes."""
    return len(_header(named.tensors, _metadata(named))) + tensors_size(named)


def tensors_size(named: Payload) -> int:
    """Return the bytes of the tensors alone, without framing."""
    return sum(_bytes(tensor) for tensor in named.tensors.values())


def safetensors_chunks(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield a file of this format: its header, then the bytes of one tensor after the other.

    Parameters
    ----------
    metadata
        One key only: the format does not keep the order of several, and equal things shall be equal bytes.
    """
    yield _header(tensors, metadata)
    for _, tensor in _in_layout(tensors):
        yield _raw(tensor.detach().cpu().contiguous())


def _parts(named: Payload) -> Iterator[bytes | memoryview]:
    return safetensors_chunks(named.tensors, _metadata(named))


def _metadata(named: Payload) -> dict[str, str]:
    return {NUMBERS: json.dumps(dict(named.numbers), separators=(",", ":"))}


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    form = tuple((name, tensor.dtype, tensor.shape) for name, tensor in _in_layout(tensors))
    # A simulation sends the same forms again and again; what a stranger sends may be of any length.
    table = _kept_table if sum(len(name) for name, _, _ in form) < KEPT_NAMES else _table
    text = (_json({METADATA: dict(metadata)})[:-1] + table(form) + "}").encode()
    padded = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
    return len(padded).to_bytes(LENGTH_FIELD, "little") + padded


def _table(form: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> str:
    """Return the part of a header that says where each tensor lies, as it follows on the metadata."""
    rows, offset = [], 0
    for name, dtype, shape in form:
        end = offset + math.prod(shape) * dtype.itemsize
        about = {"dtype": _LAYOUT[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        rows.append(f",{_json(name)}:{_json(about)}")
        offset = end
    return "".join(rows)


_kept_table = lru_cache(maxsize=256)(_table)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _in_layout(tensors: Tensors) -> list[tuple[str, Tensor]]:
    return sorted(tensors.items(), key=lambda item: (_RANK[item[1].dtype], item[0]))


def _places(header: dict[str, Any], size: int) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """Yield the tensors that a header tells of, in the order of their bytes, which must be the ``size`` that there are.

    A header comes from anybody: all of it is checked before the first tensor is made.
    """
    found, end = [], 0
    for name, about in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape, offsets = _DTYPE[about["dtype"]], about["shape"], about["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, *offsets)):
            raise ValueError(f"{name!r} has no such shape or place")
        start, end_before, end = offsets[0], end, offsets[1]
        if start != end_before or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} does not lie where it must")
        found.append((name, dtype, shape))
    if end != size:
        raise ValueError(f"its tensors take {end} bytes, and there are {size}")
    yield from found


def _raw(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor that lies in one piece on the host."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_number(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, int | float) for one in value)
    return isinstance(value, int | float)


class _Source:
    """Pieces of bytes as one row of them; a piece that was read is let go."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces = pieces
        self.rest = memoryview(b"")

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        taken = bytearray()
        while len(taken) < length:
            taken += self._next(length - len(taken))
        return bytes(taken)

    def fill(self, target: memoryview) -> None:
        """Read the next bytes into memory."""
        done = 0
        while done < len(target):
            part = self._next(len(target) - done)
            target[done : done + len(part)] = part
            done += len(part)

    def _next(self, most: int) -> memoryview:
        while not self.rest:
            piece = next(self.pieces, None)
            if piece is None:
                raise ValueError("it ends too early")
            self.rest = memoryview(piece)
        part, self.rest = self.rest[:most], self.rest[most:]
        return part
