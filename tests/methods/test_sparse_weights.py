"""Sparse vectors of weights: which values they hold, and that they become dense again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vitfleet.message import Message
from vitfleet.methods.continual.sparse_weights import densify, sparsify


@given(st.integers(0, 10**6), st.integers(0, 9))
def test_sparse_weights_are_the_values_above_the_threshold(seed: int, count: int) -> None:
    random = torch.Generator().manual_seed(seed)
    shapes = {"a": torch.Size([3, 4]), "b": torch.Size([2, 2, 2])}
    models = [{name: torch.randn(shape, generator=random) for name, shape in shapes.items()} for _ in range(count)]
    dense = densify([sparsify(model, 0.5) for model in models], shapes)
    assert (not dense) == (count == 0)
    for name, rows in dense.items():
        assert rows.shape[0] % 4 == 0
        assert rows.shape[0] - count < 4
        assert not rows[count:].any()
        for row, model in zip(rows, models, strict=False):
            assert torch.equal(row, torch.where(model[name].abs() > 0.5, model[name], 0))


def test_a_value_at_the_threshold_is_not_sent() -> None:
    vector = sparsify({"w": torch.tensor([[0.5, -0.5], [0.75, -0.625]])}, 0.5)
    assert vector.values.tolist() == [0.75, -0.625]
    assert vector.indices.tolist() == [2, 3]
    assert Message(vector.tensors()).num_bytes == 2 * 8
