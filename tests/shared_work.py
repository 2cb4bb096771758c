"""What many runs of the tests would compute again with the same result, and figures that few tests look at."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import pytest

from vitfleet.config.schema import TrainConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.memory import TrackedStep, round_memory
from vitfleet.methods import Method
from vitfleet.models.net import Net


@pytest.fixture(scope="session", autouse=True)
def _shared_costs() -> Iterator[None]:
    """Let the runs of a process share what a run computes about its costs, as the rows of a cost report do.

    Each run would track the memory of a step and count its operations again, which takes longer than a tiny round.
    """
    known_steps: list[TrackedStep] = []
    counted: dict[Hashable, Any] = {}

    def make_cost_model(method: Method[Any], net: Net, train: TrainConfig, image_size: int) -> CostModel:
        # The shapes of other families do not tell the size of the images.
        is_plain = net.part_paths.functional is not None
        return CostModel(method, net, train, image_size, counted if is_plain else None)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("vitfleet.run.setup", "vitfleet.run.context"):
            patch.setattr(f"{module}.round_memory", partial(round_memory, known_steps=known_steps))
        patch.setattr("vitfleet.run.setup.CostModel", make_cost_model)
        yield


@pytest.fixture
def without_figure_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no figure files, as without matplotlib: they take most of the time of a short run and its report."""
    for module in ("vitfleet.report.html.page", "vitfleet.report.figures.folder"):
        monkeypatch.setattr(f"{module}.can_draw", lambda: False)
