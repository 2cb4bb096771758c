"""The mean of the features that enter a model's head, measured by one pass over a client's images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.models.parts import ModelParts
from vitfleet.training.objective import Fit, FitResult, Objective, Step


def true_class_logit(step: Step) -> Tensor:
    """Return the mean logit of the true class.

    A logit is linear in the features f: its gradient with respect to the true class's row of the head is f. Summed over
    the rows, the gradient of this mean is the mean of the batch's features, whatever the head's weights are.
    """
    logits = step.logits.float().gather(-1, step.labels.unsqueeze(-1)).squeeze(-1)
    return torch.dot(logits, step.sample_weight)


@dataclass(frozen=True)
class FeatureSum:
    """Observer that sums the features of all samples, if the loss is :func:`true_class_logit`.

    Attributes
    ----------
    head_weights
        Names of the head's matrices. A distilled model has two, each with half of the gradient: then a sample's
        features are the mean over its two tokens.
    """

    head_weights: tuple[str, ...]

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Add the features of one batch."""
        count = (step.sample_weight > 0).sum()
        batch_mean = torch.stack([gradients[name].float().sum(dim=0) for name in self.head_weights]).sum(dim=0)
        return {
            "feature_sum": observer_state["feature_sum"] + batch_mean * count,
            "feature_count": observer_state["feature_count"] + count,
        }


def feature_mean_fit(
    weights: Tensors, parts: ModelParts, embed_dim: int, depth: int | None, device: torch.device
) -> Fit:
    """Return the pass over a client's images that measures the mean; the weights of its result are of no use.

    Parameters
    ----------
    depth
        Number of blocks of the model; ``None``: all blocks.
    """
    matrices = tuple(name for name in parts.head if len(parts.shapes[name]) == 2)
    objective = Objective(parts.head, true_class_logit, observer=FeatureSum(matrices), depth=depth)
    zeros = {
        "feature_sum": torch.zeros(embed_dim, device=device),
        "feature_count": torch.zeros((), device=device),
    }
    return Fit(weights, objective, epochs=1, observer_state=zeros)


def feature_mean(result: FitResult) -> Tensor:
    """Return the mean feature from the result of :func:`feature_mean_fit`; zero for a client without images."""
    return result.observed["feature_sum"] / result.observed["feature_count"].clamp(min=1)
