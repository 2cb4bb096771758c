"""Evaluation of a model on images, without augmentation or masking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.images import ImageSet
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.machine import Machine
from vitfleet.training.objective import mask_other_tasks


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on the device.

    Attributes
    ----------
    class_tasks
        The task of each class, ``[classes]``, where the task of an image is known: only the classes of its task are
        then possible. ``None``: all classes are.
    """

    net: Net
    preprocess: Preprocess
    machine: Machine
    batch_size: int
    class_tasks: Tensor | None = None

    @torch.inference_mode()
    def evaluate(self, weights: Tensors, images: ImageSet, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return for each image whether it is predicted correctly (0 or 1), and its cross-entropy.

        Parameters
        ----------
        index
            Indices of the images to evaluate; ``None``: all.
        """
        correct, losses = [], []
        for logits, labels in self._logits(weights, images, index):
            correct.append(logits.argmax(dim=1) == labels)
            losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
        return torch.cat(correct).float(), torch.cat(losses)

    @torch.inference_mode()
    def predict(self, weights: Tensors, images: ImageSet) -> Tensor:
        """Return the predicted class of each image."""
        return torch.cat([logits.argmax(dim=1) for logits, _ in self._logits(weights, images, None)])

    def _logits(self, weights: Tensors, images: ImageSet, index: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits and labels of each batch."""
        self.net.module.eval()
        indices = torch.arange(len(images), device=self.machine.device) if index is None else index
        for batch in torch.split(indices, self.batch_size):
            pixels = self.preprocess(images.images[batch])
            labels = images.labels[batch]
            with self.machine.autocast():
                logits = mask_other_tasks(self.net(weights, pixels), labels, self.class_tasks)
            yield logits, labels
