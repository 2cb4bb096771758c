"""A fixture that checks every projected gradient: none has an obtuse angle with a reference gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.methods.continual import projection, restorer
from vitfleet.methods.continual.projection import as_row, to_chunks

MIN_COSINE = -1e-6  # of an angle that passes as not obtuse

Project: TypeAlias = Callable[..., tuple[Tensors, Tensors]]


def counting_obtuse_angles(project: Project) -> Project:
    """Return a projection that counts a step with an obtuse angle as unsolved."""

    def checked(rows: Tensor, like: Tensors, present: Tensor, margin: float | Tensor = 0.0) -> tuple[Tensors, Tensors]:
        projected, counts = project(rows, like, present, margin)
        references, applied = rows[:, :-1], to_chunks(as_row(projected))
        products = (references * applied).sum((0, 2))
        lengths = (references.square().sum((0, 2)) * applied.square().sum()).sqrt()
        obtuse = (present & (products < MIN_COSINE * lengths)).any().float()
        return projected, {**counts, "unsolved": torch.maximum(counts["unsolved"], obtuse)}

    return checked


@pytest.fixture
def checked_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every step with an obtuse angle to a reference among those that clients report as unsolved."""
    checked = counting_obtuse_angles(projection.project_last_row)
    for module in (projection, restorer):
        monkeypatch.setattr(module, "project_last_row", checked)
