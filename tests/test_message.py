"""What travels is looked at before it is used."""

from __future__ import annotations

import pytest
import torch

from vitfleet.message import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, poison: float) -> None:
    clean, other = torch.ones(1000, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    assert all_finite([clean, other])
    clean[777] = poison
    assert not all_finite([clean, other])
    assert not all_finite([other, clean])


def test_infinities_do_not_cancel_out() -> None:
    assert not all_finite([torch.tensor([float("inf"), float("-inf")])])


def test_large_numbers_are_finite_though_their_sum_is_not() -> None:
    assert all_finite([torch.full((1000,), 3e38)])
    assert all_finite([torch.full((1000,), 6e4, dtype=torch.float16)])


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.arange(3), torch.empty(0)])
