"""Gradients in chunks: every number is in its place for tensors of any size, alone and lifted over clients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.methods.continual.gradients.projection import (
    CHUNK,
    References,
    as_row,
    from_chunks,
    project,
    to_chunks,
)
from vitfleet.methods.continual.gradients.restorer import angles, rotate

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "below": {"a": (5, 7), "b": (CHUNK - 1,)},
    "equal": {"a": (CHUNK,), "b": (64, CHUNK // 64)},
    "above": {"a": (CHUNK + 1,), "b": (3, CHUNK)},
    "mixed": {"a": (3,), "b": (192, 192), "c": (2 * CHUNK + 5,), "d": (1, 1, 10), "e": (CHUNK,), "f": (CHUNK - 3,)},
}
DTYPES = [torch.float32, torch.bfloat16]


def random_gradients(
    shapes: dict[str, tuple[int, ...]], *leading: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*leading, *shape, generator=random).to(dtype) for name, shape in shapes.items()}


def problem(shapes: dict[str, tuple[int, ...]], *leading: int, k: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Return gradients that have an obtuse angle with references, and these references."""
    references = random_gradients(shapes, *leading, k, dtype=dtype)
    noise = random_gradients(shapes, *leading, seed=1)
    return {name: noise[name] - rows.float().sum(len(leading)) for name, rows in references.items()}, references


def as_matrix(references: Tensors) -> Tensor:
    return torch.cat([rows.flatten(1) for rows in references.values()], dim=1).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_every_row_of_the_chunks_is_a_gradient_and_zeros(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    gradients, references = problem(shapes, k=3, dtype=dtype)
    chunks = to_chunks(references, as_row(gradients))
    size = sum(tensor.numel() for tensor in gradients.values())
    assert chunks.dtype == torch.float64
    assert chunks.shape == (-(-size // CHUNK), 4, CHUNK), "only the last chunk is padded"
    assert chunks.is_contiguous()
    assert not chunks.transpose(0, 1).flatten(1)[:, size:].any()
    rows = [*({name: rows[index] for name, rows in references.items()} for index in range(3)), gradients]
    for index, row in enumerate(rows):
        restored = from_chunks(chunks[:, index : index + 1], row)
        assert list(restored) == list(row)
        for name, tensor in row.items():
            assert restored[name].dtype == tensor.dtype
            assert torch.equal(restored[name], tensor), (name, index)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_inner_products_are_those_of_the_whole_gradients(shapes: dict[str, tuple[int, ...]]) -> None:
    gradients, references = problem(shapes, k=3, dtype=torch.float32)
    matrix, vector = as_matrix(references), as_matrix(as_row(gradients))[0]
    chunks = to_chunks(references, as_row(gradients))
    products = (chunks @ chunks.mT).sum(0)
    gram, slack, squared_norm = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    torch.testing.assert_close(gram, matrix @ matrix.T, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(slack, matrix @ vector, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(squared_norm, vector @ vector, rtol=1e-12, atol=1e-9)
    expected = slack / gram.diagonal().sqrt() / squared_norm.sqrt()
    torch.testing.assert_close(angles(gradients, references), -expected, rtol=1e-12, atol=1e-14)


def test_the_order_of_tensors_is_that_of_the_last_group() -> None:
    gradients, references = problem(SHAPES["mixed"], k=3, dtype=torch.float32)
    other_order = {"more": torch.ones(3, 2), **{name: references[name] for name in sorted(references, reverse=True)}}
    assert torch.equal(to_chunks(other_order, as_row(gradients)), to_chunks(references, as_row(gradients)))


def test_gradients_that_are_not_contiguous_give_the_same_chunks() -> None:
    gradients, references = problem({"w": (96, 192)}, k=3, dtype=torch.float32)
    strided = {"w": references["w"].mT.contiguous().mT}
    assert not strided["w"].is_contiguous()
    assert torch.equal(to_chunks(strided, as_row(gradients)), to_chunks(references, as_row(gradients)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_projection_of_parts_is_that_of_one_vector(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    gradients, references = problem(shapes, k=3, dtype=dtype)
    present = torch.ones(3, dtype=torch.bool)
    projected, counts = project(gradients, References(references, present))
    vector = torch.cat([tensor.flatten() for tensor in gradients.values()])
    whole, _ = project({"w": vector}, References({"w": as_matrix(references)}, present))
    assert bool(counts["rotated"])
    torch.testing.assert_close(torch.cat([tensor.flatten() for tensor in projected.values()]), whole["w"])
    for name, tensor in projected.items():
        assert (tensor.shape, tensor.dtype) == (gradients[name].shape, torch.float32)
    lowest = (as_matrix(references) @ as_matrix(as_row(projected))[0]).min()
    assert float(lowest) >= -1e-6 * float(vector.norm()) ** 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_projections_are_the_same_lifted_over_clients(dtype: torch.dtype) -> None:
    gradients, references = problem(SHAPES["mixed"], 4, k=3, dtype=dtype)
    present = torch.tensor([[True] * 3, [True, False, True], [False] * 3, [True] * 3])

    def chunks_and_projection(gradients: Tensors, references: Tensors, present: Tensor) -> tuple[Tensor, Tensors]:
        projected, _ = project(gradients, References(references, present))
        return to_chunks(references, as_row(gradients)), projected

    chunks, projected = torch.vmap(chunks_and_projection)(gradients, references, present)
    for client in range(4):
        one = {name: tensor[client] for name, tensor in gradients.items()}
        rows = {name: tensor[client] for name, tensor in references.items()}
        expected_chunks, expected = chunks_and_projection(one, rows, present[client])
        assert torch.equal(chunks[client], expected_chunks)
        for name, tensor in expected.items():
            torch.testing.assert_close(projected[name][client], tensor)


@pytest.mark.parametrize("stored", [0, 2])
def test_rotation_is_a_projection_of_the_gradient_before_lifted_over_clients(stored: int) -> None:
    after, references = problem(SHAPES["mixed"], 3, k=stored + 1, dtype=torch.float32)
    before = {name: rows[:, -1] for name, rows in references.items()}
    tasks = {name: rows[:, :-1] for name, rows in references.items()}
    present = torch.ones(3, stored, dtype=torch.bool)
    if stored:
        rotated, counts = torch.vmap(rotate)(before, after, References(tasks, present))
    else:
        rotated, counts = torch.vmap(rotate)(before, after)
    assert counts["rotated"].tolist() == [1, 1, 1]
    for client in range(3):
        own = {name: tensor[client] for name, tensor in before.items()}
        constraints = {name: torch.cat([rows[client], after[name][client, None]]) for name, rows in tasks.items()}
        expected, _ = project(own, References(constraints, torch.ones(stored + 1, dtype=torch.bool)))
        for name, tensor in expected.items():
            torch.testing.assert_close(rotated[name][client], tensor)
        lowest = (as_matrix(constraints) @ as_matrix(as_row(expected))[0]).min()
        assert float(lowest) >= -1e-6 * float(as_matrix(as_row(own)).norm()) ** 2
