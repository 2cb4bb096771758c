"""Tensors in one piece are the tensors they were, and lie one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfleet.packing import pack_tensors


def some() -> dict[str, Tensor]:
    rows = torch.arange(24.0).view(4, 6)
    return {
        "row": rows[1],
        "turned": rows[:2].T,
        "count": torch.tensor([3, 4]),
        "scalar": torch.tensor(7.0),
        "none": torch.empty(0, 4),
    }


def test_the_same_tensors_in_memory_of_their_own() -> None:
    tensors = some()
    packed = pack_tensors(tensors)
    assert list(packed) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(packed[name], tensor)
        assert packed[name].dtype == tensor.dtype
    pieces = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in packed.values()}
    assert sorted(pieces.values()) == [256, 3 * 256], "one for whole numbers, one for the others"
    assert all(one.storage_offset() * one.element_size() % 256 == 0 for one in packed.values())
    packed["row"].zero_()
    assert float(tensors["row"].sum()) > 0


def reference_weights(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), 99, dtype=dtype)


def test_they_are_copied_elsewhere_one_by_one_or_as_the_piece_that_they_are() -> None:
    scattered, packed = some(), pack_tensors(some())
    part = {name: packed[name] for name in ("turned", "scalar")}  # there is something before them
    for tensors in (scattered, packed, part):
        copied = pack_tensors(tensors, reference_weights)
        assert list(copied) == list(tensors)
        assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())
    gaps = pack_tensors(packed, reference_weights)["row"].untyped_storage().nbytes() // 4
    whole = pack_tensors(packed, reference_weights)["row"].as_strided((gaps,), (1,), 0)
    assert not (whole == 99).any(), "one copy, with what lies between them"


def test_nothing_is_nothing() -> None:
    assert pack_tensors({}) == {}
