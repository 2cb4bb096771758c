"""Packed tensors equal the originals and share one block of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfleet.packing import pack_tensors


def make_tensors() -> dict[str, Tensor]:
    rows = torch.arange(24.0).view(4, 6)
    return {
        "row": rows[1],
        "transposed": rows[:2].T,
        "count": torch.tensor([3, 4]),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 4),
    }


def test_pack_tensors_copies_into_one_aligned_block_per_dtype() -> None:
    tensors = make_tensors()
    packed = pack_tensors(tensors)
    assert list(packed) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(packed[name], tensor)
        assert packed[name].dtype == tensor.dtype
    storages = [tensor.untyped_storage() for tensor in packed.values()]
    blocks = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sorted(blocks.values()) == [256, 3 * 256], "one block of integers, one of floats"
    assert all(tensor.storage_offset() * tensor.element_size() % 256 == 0 for tensor in packed.values())
    packed["row"].zero_()
    assert float(tensors["row"].sum()) > 0


def allocate(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), 99, dtype=dtype)


def test_pack_tensors_copies_scattered_and_packed_tensors_into_an_allocated_block() -> None:
    scattered, packed = make_tensors(), pack_tensors(make_tensors())
    part = {name: packed[name] for name in ("transposed", "scalar")}  # not at the start of their block
    for tensors in (scattered, packed, part):
        copied = pack_tensors(tensors, allocate)
        assert list(copied) == list(tensors)
        assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())
    row = pack_tensors(packed, allocate)["row"]
    block = row.as_strided((row.untyped_storage().nbytes() // 4,), (1,), 0)
    assert not (block == 99).any(), "a packed block is copied at once, with its padding"


def test_pack_tensors_of_nothing() -> None:
    assert pack_tensors({}) == {}
