"""A data set of drawn shapes: discs, squares and stripes, with noise. It needs no download."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vitfleet.config.base import Table
from vitfleet.config.registry import register_dataset
from vitfleet.data.from_objects import from_tensors
from vitfleet.data.images import DataSet
from vitfleet.data.sources import DataRequest

CLASSES = ("disc", "square", "stripes")


class ShapesParams(Table):
    """Drawn shapes on a noisy background."""

    images: int = Field(600, ge=30, description="training images; a fifth of it is drawn for testing")
    side: int = Field(16, ge=8, description="image side in pixels")
    noise: float = Field(0.2, ge=0, le=1, description="amplitude of the background noise")


@register_dataset("shapes", ShapesParams)
def shapes(params: ShapesParams, request: DataRequest) -> DataSet:
    """Draw training and test images."""
    train, test = (_draw(params, count, seed) for count, seed in ((params.images, 0), (params.images // 5, 1)))
    return from_tensors(*train, test=test, class_names=CLASSES, name="shapes")


def _draw(params: ShapesParams, count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % len(CLASSES)
    y, x = np.mgrid[: params.side, : params.side]
    images = np.empty((count, 1, params.side, params.side), dtype=np.uint8)
    for i, label in enumerate(labels):
        center, size = rng.uniform(0.35, 0.65, 2) * params.side, rng.uniform(0.2, 0.35) * params.side
        disc = np.hypot(y - center[0], x - center[1]) < size
        square = np.maximum(abs(y - center[0]), abs(x - center[1])) < size
        stripes = ((y + x) // 3) % 2 == 0
        drawn = (disc, square, stripes)[label] * (1 - params.noise) + rng.random(y.shape) * params.noise
        images[i, 0] = np.round(255 * drawn)
    return images, labels
