"""Evaluation of a model on images, without augmentation or masking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.images import ImageSet
from vitfleet.data.preprocess import Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.samples import mask_other_tasks
from vitfleet.training.stacking.stack import stack

MAX_STACKED_MODELS = 8  # in one forward pass: their weights are copied
STACKED_BATCHES = 4  # a forward pass of stacked models has at most this many times ``batch_size`` images


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on the device.

    Attributes
    ----------
    class_to_task
        The task of each class, ``[classes]``, where the task of an image is known: only the classes of its task are
        then possible. ``None``: all classes are.
    """

    net: Net
    preprocess: Preprocess
    machine: ExecutionSettings
    batch_size: int
    class_to_task: Tensor | None = None

    @property
    def models_at_once(self) -> int:
        """How many models to evaluate at once; 1 where stacking is not possible or gains nothing.

        Models are stacked where clients are (``machine.stack_size``).
        """
        wanted = min(self.machine.stack_size, MAX_STACKED_MODELS)
        return wanted if wanted > 1 and self.net.stackable else 1

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
    def evaluate_models(self, models: Sequence[Tensors], images: ImageSet) -> tuple[Tensor, Tensor]:
        """Evaluate several models on all images, see :meth:`evaluate`; the results are ``[models, images]``.

        Models are stacked, ``models_at_once`` in one forward pass: a batch is preprocessed once, and a weight that is
        the same tensor in all models is used once for the tokens of all. A forward pass has at most
        ``STACKED_BATCHES · batch_size`` images, counted once per model, so memory does not grow with the models.
        """
        size = self.models_at_once
        groups = [models[start : start + size] for start in range(0, len(models), size)]
        results = [self._evaluate_stacked(group, images) for group in groups]
        return torch.cat([correct for correct, _ in results]), torch.cat([losses for _, losses in results])

    def _evaluate_stacked(self, models: Sequence[Tensors], images: ImageSet) -> tuple[Tensor, Tensor]:
        """Evaluate models in the same forward passes."""
        if len(models) == 1:
            correct, losses = self.evaluate(models[0], images)
            return correct.unsqueeze(0), losses.unsqueeze(0)
        names = self.net.parts.shapes  # a client's weights may be more than its model's
        weights = stack([{name: model[name] for name in names} for model in models])
        if not weights.stacked_names:  # the same model several times
            correct, losses = self._evaluate_stacked(models[:1], images)
            return correct.expand(len(models), -1), losses.expand(len(models), -1)
        all_correct, all_losses = [], []
        for logits, labels in self._logits(weights.tensors, images, None, len(models)):
            all_correct.append(logits.argmax(dim=-1) == labels)
            targets = labels.expand(len(models), -1)
            all_losses.append(F.cross_entropy(logits.float().mT, targets, reduction="none"))
        return torch.cat(all_correct, dim=1).float(), torch.cat(all_losses, dim=1)

    @torch.inference_mode()
    def predict(self, weights: Tensors, images: ImageSet) -> Tensor:
        """Return the predicted class of each image."""
        return torch.cat([logits.argmax(dim=1) for logits, _ in self._logits(weights, images, None)])

    def _logits(
        self, weights: Tensors, images: ImageSet, index: Tensor | None, num_models: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits and labels of each batch.

        Parameters
        ----------
        num_models
            Number of stacked models; the logits have a leading axis of models. ``None``: weights of one model.
        """
        indices = torch.arange(len(images), device=self.machine.device) if index is None else index
        stacked_size = STACKED_BATCHES * self.batch_size // (num_models or STACKED_BATCHES)
        for batch in torch.split(indices, max(1, stacked_size)):
            pixels = self.preprocess(images.images[batch])
            labels = images.labels[batch]
            if num_models is not None:
                pixels = pixels.expand(num_models, *pixels.shape)
            with self.machine.autocast():
                logits = mask_other_tasks(self.net(weights, pixels), labels, self.class_to_task)
            yield logits, labels
