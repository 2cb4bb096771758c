"""Sparse weights: the values of a selection of weights that are kept, and their positions, as they are sent and stored.

All weights of the selection are one vector, in the selection's order. A sparse vector is two tensors: float values, and
their positions as int32. Every number that is kept thus takes eight bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from vitfleet.message import Tensors, all_finite
from vitfleet.methods.reported import RejectedUpdateError

OTHERS_MULTIPLE = 4  # the number of stacked vectors is rounded up, so that shapes recur and captured steps are reused


@dataclass(frozen=True)
class SparseVector:
    """The values of a vector that are not zero, and their positions, which are rising."""

    values: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return self.values.shape[0]

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {f"{prefix}values": self.values, f"{prefix}indices": self.indices}


def sparsify(weights: Tensors, threshold: float, assumed: int | None = None) -> SparseVector:
    """Return the values whose magnitude is greater than a threshold.

    Of tensors without values (a dry run) it is ``assumed`` how many these are; ``None``: all.
    """
    vector = torch.cat([weight.flatten() for weight in weights.values()])
    if vector.is_meta:
        kept = len(vector) if assumed is None else assumed
        return SparseVector(vector.new_empty(kept), vector.new_empty(kept, dtype=torch.int32))
    indices = (vector.abs() > threshold).nonzero().squeeze(1)
    return SparseVector(vector[indices], indices.int())


def expand_weights(values: Tensor, indices: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the weights of a sparse vector, given the shape of each in their order; those that were not kept are 0."""
    sizes = [prod(shape) for shape in shapes.values()]
    flat = values.new_zeros(sum(sizes)).scatter(-1, indices.long(), values)
    parts = torch.split(flat, sizes)
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def densify(vectors: Sequence[SparseVector], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the weights of several sparse vectors, stacked on a leading axis: ``[vectors, …]`` of each weight.

    Rows of zeros follow, up to the next multiple of ``OTHERS_MULTIPLE``. Without vectors the result is empty.
    """
    if not vectors:
        return {}
    empty = SparseVector(vectors[0].values[:0], vectors[0].indices[:0])
    padded = [*vectors, *[empty] * (-len(vectors) % OTHERS_MULTIPLE)]
    expanded = [expand_weights(vector.values, vector.indices, shapes) for vector in padded]
    return {name: torch.stack([weights[name] for weights in expanded]) for name in shapes}


def check_sparse(tensors: Tensors, length: int, max_change: float | None = None) -> SparseVector:
    """Return the sparse vector that a client sent, or reject it: ``max_change`` is ``aggregate.max_change``."""
    if tensors.keys() != {"values", "indices"}:
        raise RejectedUpdateError("its message has no adaptive weights, or not values and indices alone")
    vector = SparseVector(**tensors)
    values, indices = vector.values, vector.indices
    if values.dtype != torch.float32 or indices.dtype != torch.int32 or values.dim() != 1:
        raise RejectedUpdateError("its adaptive weights are not a vector of float32 with indices of int32")
    if values.shape != indices.shape:
        raise RejectedUpdateError(
            f"its adaptive weights have {tuple(values.shape)} values and {tuple(indices.shape)} indices"
        )
    if not all_finite([values]):
        raise RejectedUpdateError("its adaptive weights are not finite")
    rms = float(values.square().mean().sqrt()) if len(vector) else 0.0
    if max_change is not None and not rms <= max_change:
        raise RejectedUpdateError(
            f"its adaptive weights have the size {rms:.3g}; aggregate.max_change = {max_change:g}"
        )
    # Compared, not subtracted: a difference of two indices may leave int32.
    rises = bool((indices[1:] > indices[:-1]).all())
    if len(vector) and not (rises and int(indices[0]) >= 0 and int(indices[-1]) < length):
        raise RejectedUpdateError(f"the indices of its adaptive weights do not rise within 0 … {length - 1}")
    return vector
