"""A gradient and reference gradients, some of which it has an obtuse angle with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def problem(seed: int, k: int, size: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return a gradient and k references, correlated with each other, with some of which it has an obtuse angle."""
    random = np.random.default_rng(seed)
    width = size or int(random.integers(k, 60))
    rows = random.normal(size=(k, width)) + random.uniform(0, 2) * random.normal(size=width)
    gradient = random.normal(size=width) - random.uniform(0, 3) * rows.mean(axis=0)
    return torch.tensor(gradient, dtype=dtype), torch.tensor(rows, dtype=dtype)


def all_present(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.bool)
