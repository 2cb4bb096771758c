"""Cohen's kappa: the agreement of predictions and labels beyond what chance would give."""

import numpy as np

from vitfleet.config.base import MetricParams
from vitfleet.config.registry import register_metric
from vitfleet.run.evaluate.metric_context import MetricContext


@register_metric("kappa", MetricParams)
def kappa(params: MetricParams, context: MetricContext) -> dict[str, float]:
    """Return κ = (observed − expected) / (1 − expected) agreement of the global model on the common test set."""
    labels, predicted = context.predictions.labels, context.predictions.predicted
    classes = len(context.class_names)
    shares = [np.bincount(values, minlength=classes) / len(labels) for values in (labels, predicted)]
    observed, expected = float(np.mean(labels == predicted)), float(shares[0] @ shares[1])
    return {"value": (observed - expected) / (1 - expected) if expected < 1 else 0.0}
