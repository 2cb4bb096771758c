"""Figures that a method declares in its class attribute ``figures``, by name.

A builder takes a run and returns a figure whose id is the builder's name, or ``None`` if the run has no data for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.registry import METHODS
from vitfleet.message import Numbers
from vitfleet.methods.split.median_sampling import class_threshold
from vitfleet.report.figures.types import BarChart, Figure, HeatMap
from vitfleet.report.runs import RunData

Builder: TypeAlias = Callable[[RunData], Figure | None]
AnyBuilder = TypeVar("AnyBuilder", bound=Builder)
BUILDERS: dict[str, Builder] = {}


def register_figure(name: str) -> Callable[[AnyBuilder], AnyBuilder]:
    """Return a decorator that makes a builder available to methods under a name."""

    def register(builder: AnyBuilder) -> AnyBuilder:
        BUILDERS[name] = builder
        return builder

    return register


def method_figures(run: RunData) -> list[Figure]:
    """Return the figures that the run's method declares, as far as the run has data for them."""
    entry = METHODS.get(run.config["method"]["name"])
    declared = entry.target.figures if entry else ()  # a method of a plug-in that is not loaded is unknown
    figures = [BUILDERS[name](run) for name in declared]
    return [figure for figure in figures if figure is not None]


@register_figure("sent-layers")
def sent_layers(run: RunData) -> HeatMap | None:
    """Return how often each layer was sent in each round, from the numbers ``layers`` and ``gradients``."""
    rounds, columns = [], []
    for record in run.records:
        reports = [client.numbers for client in record.clients if "gradients" in client.numbers]
        if not reports:
            continue
        counts = np.zeros(len(np.atleast_1d(reports[0]["gradients"])))
        for numbers in reports:
            counts[np.asarray(numbers["layers"], dtype=int)] += 1
        rounds.append(record.round)
        columns.append(counts / len(reports))
    if not rounds:
        return None
    return HeatMap(
        id="sent-layers",
        title="Fraction of the round's clients that sent a layer",
        values=np.stack(columns, axis=1).tolist(),
        row_label="layer",
        column_label="round",
        rows=_numbered(len(columns[0])),
        columns=[str(round) for round in rounds],
        percent=True,
    )


@register_figure("head-gradients")
def head_gradients(run: RunData) -> HeatMap | None:
    """Return each attention head's mean absolute gradient over rounds and clients, from ``head_gradients``."""
    clients = [client for record in run.records for client in record.clients]
    matrices = [_by_layer(client.numbers) for client in clients if "head_gradients" in client.numbers]
    if not matrices:
        return None
    mean = np.mean(matrices, axis=0)
    return HeatMap(
        id="head-gradients",
        title="Mean |gradient| of each attention head, relative to the largest",
        values=(mean / mean.max()).tolist(),
        row_label="layer",
        column_label="head",
        rows=_numbered(mean.shape[0]),
        columns=_numbered(mean.shape[1]),
        palette="oranges",
    )


@register_figure("balanced-labels")
def balanced_labels(run: RunData) -> BarChart | None:
    """Return one client's class counts, and those of the class-balanced sample that it sends (``method.threshold``)."""
    if run.partition is None:
        return None
    counts = np.asarray(run.partition["counts"], dtype=np.int64)
    # The client with most images shows most: with strong heterogeneity many clients have one or two classes.
    client = int(counts.sum(axis=1).argmax())
    available = counts[client]
    quantile = run.config["method"]["threshold"]
    target = class_threshold(available[available > 0], quantile)
    return BarChart(
        id="balanced-labels",
        title=f"Class balance of client {client}: its images, and the features it sends",
        label="samples",
        category_label="class",
        categories=run.partition["classes"],
        series=[("images", available.tolist()), ("features sent", np.where(available > 0, target, 0).tolist())],
        note=f"{target} samples of each class that the client has: the {quantile:.0%} quantile of its class counts.",
    )


def _by_layer(numbers: Numbers) -> NDArray[np.float64]:
    """Return a client's head gradients as ``[layers, heads]``."""
    depth = len(np.atleast_1d(numbers["gradients"]))
    return np.asarray(numbers["head_gradients"], dtype=float).reshape(depth, -1)


def _numbered(count: int) -> list[str]:
    return [str(index + 1) for index in range(count)]
