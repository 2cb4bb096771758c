"""How important each weight is for a client's task: the mean over its samples of a function of per-sample gradients.

A gradient of a batch's mean does not tell the gradients of its samples, so this is a pass over the client's images that
computes a gradient per image. It goes through the trainer as any training does: clients are stacked, steps are
captured. Images are whole and not augmented. It costs as many floating-point operations as one epoch of training, in
steps of one image on a CPU and of several on a GPU, which one image would leave idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from vitfleet.config.schema import TrainConfig
from vitfleet.message import Tensors
from vitfleet.models.anatomy import Selection
from vitfleet.training.objective import Fit, FitResult, Loss, Objective, SampleObserver, Step

Statistic: TypeAlias = Literal["square", "absolute"]

MAX_IMAGES = 16  # per step and client
MAX_NUMBERS = 2**26  # of the gradients of a step and client: 256 MiB


@dataclass(frozen=True)
class GradientSum(SampleObserver):
    """Observer that sums the squares or the absolute values of the gradients of all samples.

    Padding needs no care: its gradient is zero.
    """

    statistic: Statistic

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Add the gradients of one step, a row per sample."""
        function = torch.square if self.statistic == "square" else torch.abs
        return {name: total.add_(function(gradients[name]).sum(dim=0)) for name, total in observer_state.items()}


def importance_fit(
    weights: Tensors,
    trainable: Selection,
    loss: Loss,
    statistic: Statistic,
    train: TrainConfig,
    constants: Tensors | None = None,
) -> Fit:
    """Return the pass over a client's images that measures the importance of each weight.

    Parameters
    ----------
    weights
        All weights of the model; they stay as they are.
    trainable
        The weights whose importance is measured.
    loss
        The function of a sample's outputs whose gradient is taken.
    statistic
        What is averaged over the samples: squared or absolute gradients.
    train
        The table ``[train]``.
    constants
        Tensors that the loss uses.
    """
    objective = Objective(trainable, loss, observer=GradientSum(statistic), augment=False)
    zeros = {name: torch.zeros_like(weights[name]) for name in trainable}
    settings = whole_images(train, images_per_step(zeros))
    return Fit(weights, objective, 1, constants or {}, observer_state=zeros, train=settings)


def images_per_step(gradients: Tensors) -> int:
    """Return how many images' gradients, of these shapes and on this device, are computed at once."""
    if next(iter(gradients.values())).device.type != "cuda":
        return 1
    return min(MAX_IMAGES, max(1, MAX_NUMBERS // sum(gradient.numel() for gradient in gradients.values())))


def whole_images(train: TrainConfig, batch_size: int) -> TrainConfig:
    """Return settings under which steps have whole images and change no weight."""
    changes = {
        "batch_size": batch_size,
        "optimizer": "sgd",
        "lr": 0.0,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "max_grad_norm": None,
        "mask_ratio": 0.0,
    }
    return train.model_copy(update=changes)


def measured_importance(result: FitResult, device: torch.device) -> dict[str, Tensor]:
    """Return the mean over the samples from the result of :func:`importance_fit`; zeros without samples."""
    return {name: (total / max(1, result.samples)).to(device) for name, total in result.observed.items()}
