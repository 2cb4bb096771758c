"""Evaluating a model on labelled images: accuracy, per class, confusion, calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.data.images import ImageSet
from vitfleet.inference.classifier import Classifier
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.evaluate.metric_context import Predictions
from vitfleet.run.evaluate.metrics import class_accuracies, confusion_matrix
from vitfleet.training.evaluator import logits_by_batch, score

CPU = torch.device("cpu")
CALIBRATION_BINS = 15  # as in Guo et al., "On Calibration of Modern Neural Networks", 2017


@dataclass(frozen=True)
class CalibrationBin:
    """Images whose predicted class has a probability within an interval: their number, mean probability, accuracy."""

    low: float
    high: float
    images: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on labelled images. Fractions are 0…1.

    Attributes
    ----------
    model
        ``server``, or ``client 7``.
    class_accuracy
        Accuracy by class; ``None`` for a class without images.
    confusion
        Number of images by true class (rows) and predicted class (columns).
    calibration_error
        Expected calibration error: the distance of accuracy and mean probability in each bin of the predicted
        probability, averaged with the bin's images as weights.
    loss
        Mean cross-entropy; ``None`` if it is not finite.
    """

    model: str
    images: int
    accuracy: float
    loss: float | None
    calibration_error: float
    class_accuracy: dict[str, float | None]
    confusion: list[list[int]]
    calibration: list[CalibrationBin]

    def as_json(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self)


def evaluate_images(
    model: Classifier,
    images: ImageSet,
    known_task: bool = False,
    batch_size: int = 64,
    progress: Progress = NO_PROGRESS,
) -> Evaluation:
    """Evaluate a model on images; with ``known_task`` only the classes of an image's task are candidates."""
    of_client = model.info.client
    name = "server" if of_client is None else f"client {of_client}"
    tasks = model.class_to_task if known_task else None
    batches = logits_by_batch(lambda pixels: model(pixels).cpu(), images.to(CPU), batch_size, None, tasks)
    all_logits = []
    with torch.inference_mode(), progress.task(f"evaluating {name}", len(images)) as advance:
        for logits, labels in batches:
            all_logits.append(logits)
            advance(len(labels))
    return summarise(name, torch.cat(all_logits), images.labels.to(CPU), model.classes)


def summarise(model: str, logits: Tensor, labels: Tensor, class_names: Sequence[str]) -> Evaluation:
    """Return the evaluation of logits ``[images, classes]`` against the true classes ``[images]``."""
    scores = score([(logits, labels)])
    ((accuracy, loss),) = scores.means()
    confusion = confusion_matrix(Predictions(labels.numpy(), logits.argmax(dim=1).numpy()), len(class_names))
    confidence = logits.double().softmax(dim=1).amax(dim=1).numpy()
    bins = calibration_bins(confidence, scores.correct.bool().numpy())
    gaps = [bin.images * abs((bin.accuracy or 0.0) - (bin.confidence or 0.0)) for bin in bins]
    return Evaluation(
        model=model,
        images=len(labels),
        accuracy=accuracy,
        loss=loss if math.isfinite(loss) else None,
        calibration_error=sum(gaps) / len(labels),
        class_accuracy=dict(zip(class_names, class_accuracies(confusion), strict=True)),
        confusion=confusion.tolist(),
        calibration=bins,
    )


def calibration_bins(confidence: NDArray[np.float64], correct: NDArray[np.bool_]) -> list[CalibrationBin]:
    """Sort predictions into intervals of equal width by the probability of the predicted class."""
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    # Intervals are open below and closed above: a probability of exactly 1 belongs to the last one.
    which = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
    bins = []
    for index in range(CALIBRATION_BINS):
        inside = which == index
        count = int(inside.sum())
        mean = (float(confidence[inside].mean()), float(correct[inside].mean())) if count else (None, None)
        bins.append(CalibrationBin(float(edges[index]), float(edges[index + 1]), count, *mean))
    return bins
