"""Gradients in chunks: every number is in its place for tensors of any size, alone and lifted over clients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.methods.continual.projection import (
    CHUNK,
    GradientIntegrator,
    GradientRotation,
    as_row,
    cosines,
    from_chunks,
    inner_products,
    project_gradient,
    to_chunks,
)
from vitfleet.training.step import ReferenceGradients, Step

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


def empty_step() -> Step:
    empty = torch.empty(0)
    return Step(empty, empty, empty, {}, {}, empty, torch.tensor(0))


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
    gram, slack, squared_norm = inner_products(to_chunks(references, as_row(gradients)))
    torch.testing.assert_close(gram, matrix @ matrix.T, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(slack, matrix @ vector, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(squared_norm, vector @ vector, rtol=1e-12, atol=1e-9)
    expected = slack / gram.diagonal().sqrt() / squared_norm.sqrt()
    torch.testing.assert_close(cosines(gradients, references), expected, rtol=1e-12, atol=1e-14)


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
    projected = project_gradient(gradients, references, present)
    vector = torch.cat([tensor.flatten() for tensor in gradients.values()])
    whole = project_gradient({"w": vector}, {"w": as_matrix(references)}, present)
    assert bool(projected.rotated)
    torch.testing.assert_close(torch.cat([t.flatten() for t in projected.gradients.values()]), whole.gradients["w"])
    for name, tensor in projected.gradients.items():
        assert (tensor.shape, tensor.dtype) == (gradients[name].shape, torch.float32)
    lowest = (as_matrix(references) @ as_matrix(as_row(projected.gradients))[0]).min()
    assert float(lowest) >= -1e-6 * float(vector.norm()) ** 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_projections_are_the_same_lifted_over_clients(dtype: torch.dtype) -> None:
    gradients, references = problem(SHAPES["mixed"], 4, k=3, dtype=dtype)
    present = torch.tensor([[True] * 3, [True, False, True], [False] * 3, [True] * 3])

    def chunks_and_projection(gradients: Tensors, references: Tensors, present: Tensor) -> tuple[Tensor, Tensors]:
        projected, _ = GradientIntegrator(check=True)(gradients, ReferenceGradients(references, present), empty_step())
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
def test_rotation_is_the_projection_of_the_last_reference_lifted_over_clients(stored: int) -> None:
    after, references = problem(SHAPES["mixed"], 3, k=stored + 1, dtype=torch.float32)
    present = torch.ones(3, stored + 1, dtype=torch.bool)

    def rotate(after: Tensors, references: Tensors, present: Tensor) -> tuple[Tensors, Tensors]:
        return GradientRotation(check=True)(after, ReferenceGradients(references, present), empty_step())

    rotated, counts = torch.vmap(rotate)(after, references, present)
    assert counts["rotated"].tolist() == [1, 1, 1]
    assert not counts["obtuse"].any()
    for client in range(3):
        before = {name: rows[client, -1] for name, rows in references.items()}
        constraints = {
            name: torch.cat([rows[client, :-1], after[name][client, None]]) for name, rows in references.items()
        }
        expected = project_gradient(before, constraints, present[client]).gradients
        for name, tensor in expected.items():
            torch.testing.assert_close(rotated[name][client], tensor)
