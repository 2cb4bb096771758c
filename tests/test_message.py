"""Payloads: the check for finite numbers, and the copy to a device."""

from __future__ import annotations

import pytest
import torch

from vitfleet.message import State, _merge_by_storage, all_finite, to_device
from vitfleet.packing import pack_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("invalid", [float("nan"), float("inf"), float("-inf")])
def test_all_finite_finds_a_single_number_that_is_not_finite(dtype: torch.dtype, invalid: float) -> None:
    clean, other = torch.ones(1000, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    assert all_finite([clean, other])
    clean[777] = invalid
    assert not all_finite([clean, other])
    assert not all_finite([other, clean])


def test_all_finite_finds_infinities_that_cancel_out() -> None:
    assert not all_finite([torch.tensor([float("inf"), float("-inf")])])


def test_all_finite_accepts_large_numbers_whose_sum_overflows() -> None:
    assert all_finite([torch.full((1000,), 3e38)])
    assert all_finite([torch.full((1000,), 6e4, dtype=torch.float16)])


def test_all_finite_accepts_integers_and_empty_input() -> None:
    assert all_finite([])
    assert all_finite([torch.arange(3), torch.empty(0)])


def test_merge_by_storage_merges_packed_tensors() -> None:
    packed = pack_tensors({"weight": torch.ones(64, 8), "bias": torch.full((8,), 2.0)})
    (merged,) = _merge_by_storage(list(packed.values()))
    assert float(merged.sum()) == 64 * 8 + 16
    packed["bias"][3] = float("nan")
    assert not merged.isfinite().all()


def test_merge_by_storage_keeps_tensors_that_cover_little_of_their_storage() -> None:
    rows = torch.rand(100, 3)
    tensors = [rows[1], rows[2], torch.rand(4), torch.rand(2, dtype=torch.float64)]
    merged = _merge_by_storage(tensors)
    assert all(tensor is original for tensor, original in zip(merged, tensors, strict=True))


def test_to_device_moves_every_tensor_and_copies_none_that_is_there() -> None:
    tensors = {"weight": torch.ones(2, 3), "count": torch.arange(4)}
    moved = to_device(tensors, torch.device("meta"))
    assert {name: tensor.device.type for name, tensor in moved.items()} == {"weight": "meta", "count": "meta"}
    stayed = to_device(tensors, torch.device("cpu"))
    assert all(stayed[name] is tensor for name, tensor in tensors.items())


def test_state_to_device_keeps_numbers_and_parts() -> None:
    part = State({"features": torch.ones(2)})
    state = State({"weight": torch.ones(3)}, {"round": 4}, {"client": part})
    moved = state.to(torch.device("meta"))
    assert moved.tensors["weight"].device.type == "meta"
    assert moved.numbers == {"round": 4}
    assert moved.parts["client"] is part
