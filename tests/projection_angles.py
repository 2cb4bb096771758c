"""A fixture that checks every projected gradient: none has an obtuse angle with a reference gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.methods.continual.gradients import gem, restorer
from vitfleet.methods.continual.gradients.projection import References, as_row, project, to_chunks

MIN_COSINE = -1e-6  # of an angle that passes as not obtuse

Project: TypeAlias = Callable[..., tuple[Tensors, Tensors]]


def counting_obtuse_angles(project: Project) -> Project:
    """Return a projection that counts a step with an obtuse angle as unsolved."""

    def checked(gradients: Tensors, *references: References, margin: float | Tensor = 0.0) -> tuple[Tensors, Tensors]:
        projected, counts = project(gradients, *references, margin=margin)
        rows = to_chunks(*(group.gradients for group in references), as_row(projected))
        rows, applied = rows[:, :-1], rows[:, -1:]
        present = torch.cat([group.present for group in references])
        products = (rows * applied).sum((0, 2))
        lengths = (rows.square().sum((0, 2)) * applied.square().sum()).sqrt()
        obtuse = (present & (products < MIN_COSINE * lengths)).any().float()
        return projected, {**counts, "unsolved": torch.maximum(counts["unsolved"], obtuse)}

    return checked


@pytest.fixture
def checked_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every step with an obtuse angle to a reference among those that clients report as unsolved."""
    for module in (gem, restorer):
        monkeypatch.setattr(module, "project", counting_obtuse_angles(project))
