"""Messages and states as bytes: the safetensors format, numbers as JSON in its header. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vitfleet.errors import UserError
from vitfleet.message import Named, Numbers

NUMBERS = "numbers"
ALIGNMENT = 8
LENGTH_FIELD = 8  # bytes of the header's length, before the header

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

Kind = TypeVar("Kind", bound=Named)


def encode(named: Named) -> bytes:
    """Serialize tensors and numbers."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in named.tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        if storage in storages:  # the format has no aliases: what shares memory is written twice
            plain = plain.clone()
        storages.add(storage)
        tensors[name] = plain
    # One key only: the format does not keep the order of several, and equal messages shall be equal bytes.
    return save(tensors, {NUMBERS: _numbers(named)})


def decode(kind: type[Kind], data: bytes) -> Kind:
    """Read back what :func:`encode` wrote.

    Raises
    ------
    UserError
        If the bytes are not such a message, or are damaged.
    """
    try:
        tensors = load(data)
        length = int.from_bytes(data[:LENGTH_FIELD], "little")
        header = json.loads(data[LENGTH_FIELD : LENGTH_FIELD + length])
        numbers = numbers_of(header["__metadata__"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"a {kind.__name__.lower()} of {len(data)} bytes cannot be read: {error}") from error
    return kind(tensors=tensors, numbers=numbers)


def numbers_of(metadata: Mapping[str, str]) -> Numbers:
    """Read the numbers out of a header's metadata."""
    numbers = json.loads(metadata[NUMBERS])
    if not isinstance(numbers, dict) or not all(map(_is_number, numbers.values())):
        raise ValueError("its numbers are not numbers")
    return numbers


def _is_number(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, int | float) for one in value)
    return isinstance(value, int | float)


def encoded_size(named: Named) -> int:
    """Return ``len(encode(named))`` without copying a tensor.

    A simulation counts every message's bytes; serializing gigabytes only to measure them would cost more
    than the training of a small model. The tests hold this to the real encoder's output.
    """
    header: dict[str, object] = {"__metadata__": {NUMBERS: _numbers(named)}}
    offset = 0
    for name, tensor in sorted(named.tensors.items(), key=lambda item: (_RANK[item[1].dtype], item[0])):
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _LAYOUT[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    padded = -(-length // ALIGNMENT) * ALIGNMENT
    return LENGTH_FIELD + padded + offset


def payload_size(named: Named) -> int:
    """Return the bytes of the tensors alone, without framing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in named.tensors.values())


def _numbers(named: Named) -> str:
    return json.dumps(dict(named.numbers), separators=(",", ":"))
