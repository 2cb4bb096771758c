"""Evaluation of models on images, without augmentation or masking: the loop over batches, and what it measures.

Runs evaluate weights (:class:`Evaluator`); ``inference`` evaluates trained models by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Scores(NamedTuple):
    """How well each image is predicted, ``[images]``; by several models, ``[models, images]``."""

    correct: Tensor  # 1 where the predicted class is the true one, else 0
    losses: Tensor  # the cross-entropy

    def means(self) -> list[tuple[float, float]]:
        """Return the accuracy and the mean loss of each model. The device is waited for once."""
        correct, losses = (values.reshape(-1, values.shape[-1]) for values in self)
        means = torch.stack([model.mean() for model in (*correct, *losses)]).tolist()
        return list(zip(means[: len(correct)], means[len(correct) :], strict=True))


def score(batches: Iterable[tuple[Tensor, Tensor]]) -> Scores:
    """Return how well the images of all batches are predicted.

    A batch is its logits, ``[batch, classes]`` or ``[models, batch, classes]``, and its labels ``[batch]``.
    """
    all_correct, all_losses = [], []
    for logits, labels in batches:
        targets = labels.expand(logits.shape[:-1])
        all_correct.append(logits.argmax(dim=-1) == targets)
        all_losses.append(F.cross_entropy(logits.float().movedim(-1, 1), targets, reduction="none"))
    return Scores(torch.cat(all_correct, dim=-1).float(), torch.cat(all_losses, dim=-1))


def logits_by_batch(
    forward: Callable[[Tensor], Tensor],
    images: ImageSet,
    batch_size: int,
    index: Tensor | None = None,
    class_to_task: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits and labels of each batch of the images at ``index``; ``None``: all of them.

    ``forward`` returns the logits of images as they are stored. With ``class_to_task``, ``[classes]``, the task of an
    image is known, and the classes of other tasks are not possible.
    """
    indices = torch.arange(len(images), device=images.labels.device) if index is None else index
    for batch in torch.split(indices, max(1, batch_size)):
        labels = images.labels[batch]
        yield mask_other_tasks(forward(images.images[batch]), labels, class_to_task), labels


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on the device."""

    net: Net
    preprocess: Preprocess
    machine: ExecutionSettings
    batch_size: int
    class_to_task: Tensor | None = None  # [classes], where the task of an image is known: only its classes are possible

    @property
    def models_at_once(self) -> int:
        """How many models to evaluate at once; 1 where stacking is not possible or gains nothing.

        Models are stacked where clients are (``machine.stack_size``).
        """
        wanted = min(self.machine.stack_size, MAX_STACKED_MODELS)
        return wanted if wanted > 1 and self.net.stackable else 1

    @torch.inference_mode()
    def evaluate(self, weights: Tensors, images: ImageSet, index: Tensor | None = None) -> Scores:
        """Evaluate a model on the images at ``index``; ``None``: on all."""
        return score(self._logits(weights, images, index))

    @torch.inference_mode()
    def evaluate_models(self, models: Sequence[Tensors], images: ImageSet) -> Scores:
        """Evaluate several models on all images.

        Models are stacked, ``models_at_once`` in one forward pass: a batch is preprocessed once, and a weight that is
        the same tensor in all models is used once for the tokens of all. A forward pass has at most
        ``STACKED_BATCHES · batch_size`` images, counted once per model, so memory does not grow with the models.
        """
        size = self.models_at_once
        groups = [models[start : start + size] for start in range(0, len(models), size)]
        results = [self._evaluate_stacked(group, images) for group in groups]
        return Scores(*(torch.cat(parts) for parts in zip(*results, strict=True)))

    def _evaluate_stacked(self, models: Sequence[Tensors], images: ImageSet) -> Scores:
        """Evaluate models in the same forward passes."""
        if len(models) == 1:
            return Scores(*(values.unsqueeze(0) for values in self.evaluate(models[0], images)))
        names = self.net.parts.shapes  # a client's weights may be more than its model's
        weights = stack([{name: model[name] for name in names} for model in models])
        if not weights.stacked_names:  # the same model several times
            return Scores(*(values.expand(len(models), -1) for values in self._evaluate_stacked(models[:1], images)))
        return score(self._logits(weights.tensors, images, None, len(models)))

    @torch.inference_mode()
    def logits(self, weights: Tensors, images: ImageSet, index: Tensor | None = None) -> Tensor:
        """Return the logits of each image at ``index``, ``[images, classes]``; ``None``: of all."""
        return torch.cat([logits for logits, _ in self._logits(weights, images, index)])

    def _logits(
        self, weights: Tensors, images: ImageSet, index: Tensor | None, num_models: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits and labels of each batch; of stacked models, logits have a leading axis of models."""

        def forward(batch: Tensor) -> Tensor:
            pixels = self.preprocess(batch)
            if num_models is not None:
                pixels = pixels.expand(num_models, *pixels.shape)
            with self.machine.autocast():
                return self.net(weights, pixels)

        size = self.batch_size if num_models is None else STACKED_BATCHES * self.batch_size // num_models
        yield from logits_by_batch(forward, images, size, index, self.class_to_task)
