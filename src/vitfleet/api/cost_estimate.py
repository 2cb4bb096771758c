"""What a configuration would cost a client, without data and without training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vitfleet.api.configuration import ConfigSource, MethodSource, make_config
from vitfleet.config.load import Overrides
from vitfleet.costs.report import CostReport, cost_reports
from vitfleet.progress import NO_PROGRESS, Progress


def cost(
    config: ConfigSource,
    *,
    method: MethodSource | None = None,
    data: Any = None,
    methods: Sequence[str] = (),
    overrides: Overrides = (),
    plugins: Iterable[str | Path] = (),
    progress: Progress = NO_PROGRESS,
) -> list[CostReport]:
    """Return operations, memory and bytes per client of a configuration, under its own method and others.

    Parameters
    ----------
    methods
        The methods to compare; by default all that the model can be used with.

    Examples
    --------
    >>> reports = vitfleet.cost("eftvit-cifar100", methods=["eftvit", "fedavg"])
    >>> [(report.method, report.train_gflops) for report in reports]
    """
    resolved, _ = make_config(config, method=method, data=data, overrides=overrides, plugins=plugins)
    return list(cost_reports(resolved, methods, progress))
