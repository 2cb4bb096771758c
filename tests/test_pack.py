"""Tensors in one piece are the tensors they were, and lie one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfleet.pack import in_one_piece


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
    packed = in_one_piece(tensors)
    assert list(packed) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(packed[name], tensor)
        assert packed[name].dtype == tensor.dtype
    pieces = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in packed.values()}
    assert sorted(pieces.values()) == [256, 3 * 256], "one for whole numbers, one for the others"
    assert all(one.storage_offset() * one.element_size() % 256 == 0 for one in packed.values())
    packed["row"].zero_()
    assert float(tensors["row"].sum()) > 0


def test_a_piece_is_moved_as_it_is() -> None:
    packed = in_one_piece(some())
    moved: list[Tensor] = []

    def move(row: Tensor) -> Tensor:
        moved.append(row)
        return row.clone()

    again = in_one_piece(packed, move)
    assert all(torch.equal(again[name], packed[name]) for name in packed)
    assert {row.data_ptr() for row in moved} == {one.untyped_storage().data_ptr() for one in packed.values()}
    moved.clear()
    part = {name: packed[name] for name in ("turned", "scalar")}  # there is something before them
    assert all(torch.equal(one, part[name]) for name, one in in_one_piece(part, move).items())
    assert moved[0].data_ptr() != packed["row"].data_ptr()


def test_nothing_is_nothing() -> None:
    assert in_one_piece({}) == {}
