"""Predicting many image files in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vitfleet.inference.classifier import Classifier, Prediction
from vitfleet.inference.image_files import decode_file
from vitfleet.progress import NO_PROGRESS, Progress

DECODING_THREADS = 4


@dataclass(frozen=True)
class ImagePrediction:
    """The prediction of one image file.

    Attributes
    ----------
    prediction
        ``None`` if the file cannot be read.
    note
        Why it cannot be read, or that its colours were converted; ``None``: nothing to say.
    """

    path: Path
    prediction: Prediction | None
    note: str | None = None


def predict_files(
    model: Classifier,
    paths: Sequence[Path],
    task: int | None = None,
    batch_size: int = 64,
    progress: Progress = NO_PROGRESS,
) -> Iterator[ImagePrediction]:
    """Yield the prediction of each file, in order. A file that cannot be read does not stop the others.

    Parameters
    ----------
    task
        The task of the images, where it is known: only its classes are candidates.
    """
    if task is not None:
        model.classes_of_task(task)  # a wrong number is an error before the first image is read
    decode = partial(decode_file, image_size=model.image_size, channels=model.channels)
    with ThreadPoolExecutor(DECODING_THREADS) as pool, progress.task("predicting", len(paths)) as advance:
        for start in range(0, len(paths), batch_size):
            decoded = list(pool.map(decode, paths[start : start + batch_size]))
            readable = [image.pixels for image in decoded if image.pixels is not None]
            rows: Iterator[list[float]] = iter(())
            if readable:
                rows = iter(model.probabilities(torch.from_numpy(np.stack(readable)), task).tolist())
            for image in decoded:
                prediction = None if image.pixels is None else model.prediction(next(rows), task)
                yield ImagePrediction(image.path, prediction, image.note)
            advance(len(decoded))
