"""TransFL's pictures: which layers were sent in which round, and the gradient of every head (its figure 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitfleet.run.records import RoundRecord

_INK = "#334155"


@dataclass(frozen=True)
class LayerMaps:
    """What a run's records say of its layers.

    Attributes
    ----------
    rounds
        The rounds, in order.
    chosen
        Share of a round's clients that sent each layer, ``[layers, rounds]``.
    heads
        Mean absolute gradient of each head over all rounds and clients, ``[layers, heads]``, if it was recorded.
    """

    rounds: list[int]
    chosen: NDArray[np.float64]
    heads: NDArray[np.float64] | None


def layer_maps(records: Iterable[RoundRecord]) -> LayerMaps | None:
    """Sum up the layers that clients sent; ``None`` for a method that does not choose any."""
    rounds, columns = [], []
    heads: list[NDArray[np.float64]] = []
    for record in records:
        told = [entry.numbers for entry in record.clients if "gradients" in entry.numbers]
        if not told:
            continue
        depth = len(np.atleast_1d(told[0]["gradients"]))
        sent = np.zeros(depth)
        for numbers in told:
            sent[np.asarray(numbers["layers"], dtype=int)] += 1
            if "head_gradients" in numbers:
                heads.append(np.asarray(numbers["head_gradients"], dtype=float).reshape(depth, -1))
        rounds.append(record.round)
        columns.append(sent / len(told))
    if not rounds:
        return None
    return LayerMaps(rounds, np.stack(columns, axis=1), np.mean(heads, axis=0) if heads else None)


def draw_layers(maps: LayerMaps, path: Path) -> None:
    """Draw the maps to a PNG file, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    depth = maps.chosen.shape[0]
    figure = Figure(figsize=(11, 1.9 + 0.3 * depth), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(1, 2, width_ratios=(5, 2)) if maps.heads is not None else [figure.subplots()]
    edges = (maps.rounds[0] - 0.5, maps.rounds[-1] + 0.5, depth - 0.5, -0.5)
    image = axes[0].imshow(
        maps.chosen, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=edges, interpolation="nearest"
    )
    axes[0].set(title="Share of the round's clients that sent a layer", xlabel="round", ylabel="layer")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes[0])
    if maps.heads is not None:
        # Relative: what matters is where the gradient is, not its unit.
        image = axes[1].imshow(maps.heads / maps.heads.max(), aspect="auto", cmap="Oranges", vmin=0, vmax=1)
        axes[1].set(title="Mean |gradient|, largest = 1", xlabel="head", ylabel="layer")
        axes[1].set_xticks(range(maps.heads.shape[1]), [str(head + 1) for head in range(maps.heads.shape[1])])
        figure.colorbar(image, ax=axes[1])
    for axis in axes:
        axis.set_yticks(range(depth), [str(layer + 1) for layer in range(depth)])
        axis.title.set_color(_INK)
        axis.title.set_fontsize(10)
    figure.savefig(path)
