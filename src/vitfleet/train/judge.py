"""How a model does on images: whole, never masked, in large batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.batches import Preprocess
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.train.machine import Machine
from vitfleet.train.objective import within_task


@dataclass(frozen=True)
class Judge:
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
    tasks: Tensor | None = None

    @torch.inference_mode()
    def answer(self, weights: Tensors, images: ImageSet, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return, for each image (of these positions), whether it is named rightly (0 or 1) and its cross-entropy."""
        self.net.module.eval()
        chosen = torch.arange(len(images), device=self.machine.device) if index is None else index
        right, losses = [], []
        for part in torch.split(chosen, self.batch_size):
            pixels = self.preprocess(images.images[part])
            labels = images.labels[part]
            with self.machine.autocast():
                logits = within_task(self.net(weights, pixels), labels, self.tasks)
            right.append(logits.argmax(dim=1) == labels)
            losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
        return torch.cat(right).float(), torch.cat(losses)
