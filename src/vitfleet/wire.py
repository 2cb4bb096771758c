"""Serialisation of messages and states: the safetensors format, with the numbers as JSON in its header. Never pickle.

Bytes are written and read in chunks, so that a large message is never in memory twice: chunks are cut from one tensor
after the other, and received chunks are freed as they are copied into one tensor after the other.
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

from vitfleet.errors import UserError, printable, shown
from vitfleet.files import Data, write_atomically
from vitfleet.message import Numbers, Payload, Tensors

NUMBERS = "numbers"
METADATA = "__metadata__"
ALIGNMENT = 8
LENGTH_FIELD = 8  # bytes of the header's length, before the header
MAX_HEADER = 10**8  # bytes; the limit of the format
# The header of a message from elsewhere: once parsed, its JSON takes up to 30 times its bytes. Messages of large models
# have headers of some 50 kB, below a thousandth of their bytes.
MIN_RECEIVED_HEADER = 2**18  # bytes; a header up to this is never too long
RECEIVED_HEADER_SHARE = 1 / 16  # of a message's bytes
MAX_DIMENSIONS = 32
SHOWN_NAME = 80  # characters of a tensor's name in a message
MAX_CACHED_NAMES = 10**5  # characters
CHUNK = 2**20  # bytes; a slow connection has to send a chunk within Flower's timeout of 30 seconds

# The names of data types in the format, in the order of the tensors in a file (widest type first, then by name).
_DTYPE_NAMES: Mapping[torch.dtype, str] = {
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
_DTYPE_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPE_NAMES)}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

PayloadType = TypeVar("PayloadType", bound=Payload)


def encode(payload: Payload) -> bytes:
    """Serialise a payload."""
    return b"".join(_buffers(payload))


def encode_chunks(payload: Payload) -> Iterator[bytes]:
    """Yield what :func:`encode` returns, in chunks of one size; the last one can be shorter."""
    chunk = bytearray()
    for buffer in _buffers(payload):
        rest = memoryview(buffer)
        while len(rest) >= (missing := CHUNK - len(chunk)):
            chunk += rest[:missing]
            yield bytes(chunk)
            chunk, rest = bytearray(), rest[missing:]
        chunk += rest
    if chunk:
        yield bytes(chunk)


def write_payload(path: Path, payload: Payload, write_file: Callable[[Path, Data], None] = write_atomically) -> None:
    """Write what :func:`encode` returns into a file; by default it is complete or does not exist."""
    write_file(path, _buffers(payload))


def decode(payload_type: type[PayloadType], data: bytes) -> PayloadType:
    """Deserialise what :func:`encode` returned; damaged bytes are a :class:`UserError`."""
    return decode_chunks(payload_type, [data], len(data))


def read_payload(payload_type: type[PayloadType], path: Path) -> PayloadType:
    """Read a file that :func:`write_payload` wrote; raises as :func:`decode` does."""
    with path.open("rb") as file:
        return decode_chunks(payload_type, iter(lambda: file.read(CHUNK), b""), path.stat().st_size)


def decode_received(payload_type: type[PayloadType], chunks: Iterable[bytes], size: int) -> PayloadType:
    """Deserialise what another machine sent, as :func:`decode_chunks` does, within memory that its size bounds."""
    max_header = max(MIN_RECEIVED_HEADER, int(size * RECEIVED_HEADER_SHARE))
    return decode_chunks(payload_type, chunks, size, max_header)


def decode_chunks(
    payload_type: type[PayloadType], chunks: Iterable[bytes], size: int, max_header: int = MAX_HEADER
) -> PayloadType:
    """Deserialise what :func:`encode_chunks` yielded, ``size`` bytes in total; raises as :func:`decode` does."""
    reader = _ChunkReader(iter(chunks))
    try:
        length = int.from_bytes(reader.read(LENGTH_FIELD), "little")
        if length > (limit := min(max_header, size - LENGTH_FIELD)):
            raise ValueError(f"its header is too long ({length} bytes; at most {limit})")
        header = json.loads(reader.read(length))
        numbers = parse_numbers(header.pop(METADATA))
        tensors = {}
        for name, dtype, shape in _parse_tensor_entries(header, size - LENGTH_FIELD - length):
            tensors[name] = torch.empty(shape, dtype=dtype)
            reader.read_into(_memory(tensors[name]))
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise UserError(
            f"a {payload_type.__name__.lower()} of {size} bytes cannot be read: {printable(str(error))}"
        ) from error
    return payload_type(tensors=tensors, numbers=numbers)


def parse_numbers(metadata: Mapping[str, str]) -> Numbers:
    """Return the numbers from the metadata of a header."""
    numbers = json.loads(metadata[NUMBERS])
    if not isinstance(numbers, dict) or not all(map(_is_number, numbers.values())):
        raise ValueError("its metadata has values that are not numbers")
    return numbers


def encoded_size(payload: Payload) -> int:
    """Return ``len(encode(payload))`` without reading a tensor: a simulation counts the bytes of every message."""
    return safetensors_size(payload.tensors, _metadata(payload))


def safetensors_size(tensors: Tensors, metadata: Mapping[str, str]) -> int:
    """Return how many bytes :func:`safetensors_chunks` yields, without reading a tensor."""
    return len(_header(tensors, metadata)) + Payload(tensors).num_bytes


def safetensors_chunks(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: the header, then the bytes of one tensor after the other.

    The metadata has a single key: the format does not keep the order of keys, and equal payloads must have equal bytes.
    """
    yield _header(tensors, metadata)
    for _, tensor in _in_file_order(tensors):
        yield _memory(tensor.detach().cpu().contiguous())


def _buffers(payload: Payload) -> Iterator[bytes | memoryview]:
    return safetensors_chunks(payload.tensors, _metadata(payload))


def _metadata(payload: Payload) -> dict[str, str]:
    return {NUMBERS: json.dumps(dict(payload.numbers), separators=(",", ":"))}


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    specs = tuple((name, tensor.dtype, tensor.shape) for name, tensor in _in_file_order(tensors))
    # A simulation sends the same names and shapes again and again. Very long names are not cached, to bound the memory.
    cacheable = sum(len(name) for name, _, _ in specs) < MAX_CACHED_NAMES
    entries = _cached_tensor_entries(specs) if cacheable else _tensor_entries(specs)
    text = (_json({METADATA: dict(metadata)})[:-1] + entries + "}").encode()
    padded = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
    return len(padded).to_bytes(LENGTH_FIELD, "little") + padded


def _tensor_entries(specs: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> str:
    """Return the entries of the tensors in a header, which follow the metadata."""
    entries, offset = [], 0
    for name, dtype, shape in specs:
        end = offset + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        entries.append(f",{_json(name)}:{_json(entry)}")
        offset = end
    return "".join(entries)


_cached_tensor_entries = lru_cache(maxsize=256)(_tensor_entries)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _in_file_order(tensors: Tensors) -> list[tuple[str, Tensor]]:
    return sorted(tensors.items(), key=lambda item: (_DTYPE_RANKS[item[1].dtype], item[0]))


def _parse_tensor_entries(header: dict[str, Any], size: int) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """Yield the name, type and shape of each tensor of a header, in the order of their bytes, ``size`` in total.

    A header is not trusted: all of it is checked before the first tensor is allocated.
    """
    specs, end = [], 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape, offsets = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if len(shape) > MAX_DIMENSIONS or not all(type(number) is int and number >= 0 for number in (*shape, *offsets)):
            raise ValueError(f"the shape or the offsets of {shown(name, SHOWN_NAME)} are not valid")
        start, previous_end, end = offsets[0], end, offsets[1]
        if start != previous_end or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the offsets of {shown(name, SHOWN_NAME)} do not match its shape and the other tensors")
        specs.append((name, dtype, shape))
    if end != size:
        raise ValueError(f"its tensors take {end} bytes, but it has {size}")
    yield from specs


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _is_number(value: object) -> bool:
    """Whether a value is a number or a list of numbers. JSON's true and false are Python's integers too."""
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, int | float) and not isinstance(item, bool) for item in items)


class _ChunkReader:
    """Reads from chunks as from one sequence of bytes. A chunk is freed once it has been read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.rest = memoryview(b"")

    def read(self, length: int) -> bytes:
        """Return the next bytes."""
        data = bytearray()
        while len(data) < length:
            data += self._next(length - len(data))
        return bytes(data)

    def read_into(self, target: memoryview) -> None:
        """Copy the next bytes into memory."""
        done = 0
        while done < len(target):
            part = self._next(len(target) - done)
            target[done : done + len(part)] = part
            done += len(part)

    def _next(self, max_length: int) -> memoryview:
        """Return the next bytes of the current chunk, at least one and at most ``max_length``."""
        while not self.rest:
            chunk = next(self.chunks, None)
            if chunk is None:
                raise ValueError("it ends too early")
            self.rest = memoryview(chunk)
        part, self.rest = self.rest[:max_length], self.rest[max_length:]
        return part
