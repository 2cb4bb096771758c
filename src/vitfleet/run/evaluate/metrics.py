"""Built-in metrics: local accuracy and its distribution, per class, confusion, AUROC, calibration, top k.

A metric is a function ``(params, context) -> values``, registered with its parameter table::

    @register_metric("mean_update_size", MetricParams)
    def mean_update_size(params: MetricParams, context: MetricContext) -> MetricValues:
        return {"bytes": statistics.mean(client.up_bytes for client in context.record.clients)}

Its values go into the round's record, the summary, the trackers, the report and comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vitfleet.config.base import MetricParams
from vitfleet.config.registry import register_metric
from vitfleet.errors import ConfigError
from vitfleet.fleet.base import EvalResult
from vitfleet.run.evaluate.metric_context import MetricContext, MetricUnavailableError
from vitfleet.run.evaluate.predictions import area_under_roc, calibration_bins, calibration_error, confusion_matrix
from vitfleet.run.records import MetricValues

if TYPE_CHECKING:
    from vitfleet.config.schema import Config

WORST_SHARE = 0.1
PERCENTILES = (0, 10, 25, 50, 75, 90, 100)
MOST_CONFUSED = 3  # pairs of classes


class _DistributionParams(MetricParams):
    """Parameters of a metric whose values are those of :func:`accuracy_distribution`."""

    shown = ("mean", "std", "worst_10_percent")
    fractions = ("mean", "std", "worst_10_percent", *(f"p{level}" for level in PERCENTILES))


class LocalAccuracyParams(_DistributionParams):
    """Distribution over clients of each client's accuracy on its own test images."""

    share: float = Field(1.0, gt=0, le=1, description="share of the training clients that are evaluated")


@register_metric("local_accuracy", LocalAccuracyParams)
def local_accuracy(params: LocalAccuracyParams, context: MetricContext) -> MetricValues:
    """Evaluate each client's current model on its own test images."""
    return accuracy_distribution(context.evaluate_clients(context.sample_clients(params.share)).values())


class HeldOutClientsParams(_DistributionParams):
    """Local accuracy of the clients that never train (``fleet.held_out``), with the global model."""

    def check_config(self, config: Config) -> None:
        """Check that clients are held out."""
        if not config.fleet.held_out:
            remedy = "metrics.held_out_clients needs a share, such as 0.1"
            raise ConfigError("fleet.held_out", config.fleet.held_out, remedy)


@register_metric("held_out_clients", HeldOutClientsParams)
def held_out_client_accuracy(params: HeldOutClientsParams, context: MetricContext) -> MetricValues:
    """Evaluate the global model on the test images of each held-out client."""
    return accuracy_distribution(context.evaluate_clients(context.held_out_clients).values())


class PerClassParams(MetricParams):
    """Accuracy of the global model for each class of the common test set."""

    shown = ("mean", "worst")
    fractions = ("mean", "worst", "accuracy")
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"accuracy": ("class",)}


@register_metric("per_class", PerClassParams)
def per_class_accuracy(params: PerClassParams, context: MetricContext) -> MetricValues:
    """Return the accuracy of each class, their mean (balanced accuracy) and the worst of them."""
    matrix = confusion_matrix(context.predictions)
    accuracy = class_accuracies(matrix)
    measured = [value for value in accuracy if value is not None]
    return {
        "mean": float(np.mean(measured)) if measured else None,
        "worst": min(measured, default=None),
        "accuracy": accuracy,
    }


class ConfusionParams(MetricParams):
    """Confusion matrix of the global model on the common test set."""

    shown = ("most_confused",)
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"matrix": ("true class", "predicted class")}


@register_metric("confusion", ConfusionParams)
def confusion(params: ConfusionParams, context: MetricContext) -> MetricValues:
    """Return ``matrix[true class][predicted class]``, in images, and the most frequent mistakes."""
    matrix = confusion_matrix(context.predictions)
    return {"matrix": matrix.tolist(), "most_confused": most_confused(matrix, context.class_names)}


class AurocParams(MetricParams):
    """Area under the ROC curve of each class against the others: the global model, the common test set."""

    shown = ("mean", "worst")
    fractions = ("mean", "worst", "by_class")
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"by_class": ("class",)}


@register_metric("auroc", AurocParams)
def auroc(params: AurocParams, context: MetricContext) -> MetricValues:
    """Return the area of each class, their mean (macro average) and the worst of them."""
    labels, probabilities = context.predictions.labels, context.predictions.probabilities
    areas = [area_under_roc(probabilities[:, label], labels == label) for label in range(probabilities.shape[1])]
    measured = [area for area in areas if area is not None]
    mean = float(np.mean(measured)) if measured else None
    return {"mean": mean, "worst": min(measured, default=None), "by_class": areas}


class CalibrationParams(MetricParams):
    """How well probabilities match accuracies (expected calibration error): the global model, the common test set."""

    shown = ("error",)
    fractions = ("error", "confidence", "accuracy")
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"accuracy_by_confidence": ("interval of the probability",)}


@register_metric("calibration", CalibrationParams)
def calibration(params: CalibrationParams, context: MetricContext) -> MetricValues:
    """Return the error, mean probability of the predicted class, accuracy, and the accuracy in intervals of it."""
    predictions = context.predictions
    bins = calibration_bins(predictions)
    return {
        "error": calibration_error(bins),
        "confidence": float(predictions.probabilities.max(axis=1).mean()),
        "accuracy": float((predictions.predicted == predictions.labels).mean()),
        "accuracy_by_confidence": [bin.accuracy for bin in bins],
    }


class TopKParams(MetricParams):
    """Share of the common test set whose class is among the k most probable ones of the global model."""

    fractions = ("accuracy",)

    k: int = Field(5, ge=1, description="classes that count as the prediction")


@register_metric("top_k", TopKParams)
def top_k(params: TopKParams, context: MetricContext) -> MetricValues:
    """Return the share; a class counts where fewer than k others are more probable."""
    labels, logits = context.predictions.labels, context.predictions.logits
    if params.k >= logits.shape[1]:
        raise MetricUnavailableError(f"k = {params.k}: must be below the {logits.shape[1]} classes")
    others = (logits > logits[np.arange(len(labels)), labels][:, None]).sum(axis=1)
    return {"accuracy": float((others < params.k).mean())}


def accuracy_distribution(results: Iterable[EvalResult]) -> MetricValues:
    """Return the distribution of clients' accuracies. Every client counts the same, whatever its number of images.

    ``std`` is the population's standard deviation, ``worst_10_percent`` the mean over the worst 10 % of the clients,
    rounded up; ``p0`` to ``p100`` are percentiles with linear interpolation.
    """
    accuracies = np.sort([result.correct / result.tested for result in results])
    names = _DistributionParams.fractions
    if not len(accuracies):
        return {**dict.fromkeys(names), "clients": 0}
    worst = accuracies[: math.ceil(WORST_SHARE * len(accuracies))]
    figures = (accuracies.mean(), accuracies.std(), worst.mean(), *np.percentile(accuracies, PERCENTILES))
    return {**{name: float(figure) for name, figure in zip(names, figures, strict=True)}, "clients": len(accuracies)}


def class_accuracies(matrix: NDArray[np.int64]) -> list[float | None]:
    """Return the accuracy of each class of a confusion matrix; ``None`` for a class without images."""
    pairs = zip(matrix.diagonal().tolist(), matrix.sum(axis=1).tolist(), strict=True)
    return [correct / images if images else None for correct, images in pairs]


def most_confused(matrix: NDArray[np.int64], class_names: Sequence[str]) -> list[str]:
    """Return the most frequent mistakes as text, most frequent first: ``cat → dog: 12 of 100``."""
    mistakes = matrix.copy()
    np.fill_diagonal(mistakes, 0)
    frequent = np.argsort(-mistakes, axis=None, kind="stable")[:MOST_CONFUSED]
    pairs = [divmod(int(cell), len(class_names)) for cell in frequent]
    return [
        f"{class_names[true]} → {class_names[predicted]}: {matrix[true, predicted]} of {matrix[true].sum()}"
        for true, predicted in pairs
        if mistakes[true, predicted]
    ]
