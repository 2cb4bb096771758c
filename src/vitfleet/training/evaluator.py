"""How a model does on images: whole, never masked, in large batches."""

from __future__ import annotations

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
    """Tries models out, on the device.

    Attributes
    ----------
    tasks
        The task of each class, ``[classes]``, where an image's task is known; ``None``: any class can win.
    """

    net: Net
    preprocess: Preprocess
    machine: Machine
    batch_size: int
    class_tasks: Tensor | None = None

    @torch.inference_mode()
    def evaluate(self, weights: Tensors, images: ImageSet, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return, for each image (of these positions), whether it is named rightly (0 or 1) and its cross-entropy."""
        self.net.module.eval()
        chosen = torch.arange(len(images), device=self.machine.device) if index is None else index
        correct, losses = [], []
        for part in torch.split(chosen, self.batch_size):
            pixels = self.preprocess(images.images[part])
            labels = images.labels[part]
            with self.machine.autocast():
                logits = mask_other_tasks(self.net(weights, pixels), labels, self.class_tasks)
            correct.append(logits.argmax(dim=1) == labels)
            losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
        return torch.cat(correct).float(), torch.cat(losses)
