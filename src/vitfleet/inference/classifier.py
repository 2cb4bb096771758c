"""A trained model for inference, and what it predicts of one image or of many files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitfleet.data.decode import UNREADABLE, decode_image, fit_image
from vitfleet.data.preprocess import Preprocess
from vitfleet.errors import UserError
from vitfleet.inference.image_files import decode_file
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.output.model_file import ModelInfo

DECODING_THREADS = 4


@dataclass(frozen=True)
class Prediction:
    """The predicted class of an image.

    Attributes
    ----------
    label
        The class's name.
    probability
        Its softmax probability.
    probabilities
        The probabilities of all classes, by name; with a known task, of the task's classes.
    """

    label: str
    probability: float
    probabilities: dict[str, float]

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the most probable classes with their probabilities, the most probable first."""
        return sorted(self.probabilities.items(), key=lambda item: -item[1])[:count]


@dataclass(frozen=True)
class ImagePrediction:
    """The prediction of one image file.

    Attributes
    ----------
    prediction
        ``None`` if the file cannot be read.
    note
        Why it cannot be read, or that its colours were converted; ``None``: nothing to say.
    """

    path: Path
    prediction: Prediction | None
    note: str | None = None


class Classifier(nn.Module):
    """A trained ViT with its preprocessing: images in, logits out.

    Attributes
    ----------
    info
        The model's architecture, method, classes and input.
    vit
        timm's module with the trained weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: Net, weights: Tensors, info: ModelInfo) -> None:
        super().__init__()
        self.info = info
        self.vit = net.module.vit
        self.vit.load_state_dict({name: weights[name] for name in net.parts.shapes}, strict=False)
        self.vit.requires_grad_(False)
        self.net = net
        self.register_buffer("mean", torch.tensor(net.mean))
        self.register_buffer("std", torch.tensor(net.std))
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits."""
        return self.info.data.classes

    @property
    def channels(self) -> int:
        """Colour channels of the images."""
        return self.info.data.channels

    @property
    def image_size(self) -> int:
        """Height and width in pixels at which images were stored for training; others are resized to it first."""
        return self.info.data.image_size

    @property
    def tasks(self) -> list[list[int]]:
        """The classes of each task, as indices; empty for a model that was not trained on tasks."""
        of_class = self.info.class_to_task or ()
        return [[i for i, own in enumerate(of_class) if own == task] for task in range(max(of_class, default=-1) + 1)]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits ``[batch, classes]`` of images.

        Parameters
        ----------
        images
            ``[batch, channels, height, width]``: uint8, or floating point in 0…1.
        """
        if images.dim() != 4 or images.shape[1] != self.channels:
            raise ValueError(f"images are of shape {tuple(images.shape)}, not [batch, {self.channels}, height, width]")
        if images.is_floating_point():
            images = (images.clamp(0, 1) * 255).round().to(torch.uint8)
        return self.logits(self.preprocess(images.to(self.mean.device)))

    @property
    def preprocess(self) -> Preprocess:
        """Turns uint8 images into the model's input."""
        return Preprocess(self.net.image_size, self.mean, self.std)

    def logits(self, pixels: Tensor) -> Tensor:
        """Return the logits of preprocessed images, computed as in training: timm's module ignores added parts."""
        if self.net.functional is None:
            logits: Tensor = self.vit(pixels)
            return logits
        weights = {**dict(self.vit.named_parameters()), **dict(self.vit.named_buffers())}
        return self.net(weights, pixels)

    @property
    def class_to_task(self) -> Tensor:
        """The task of each class, ``[classes]``, on the CPU."""
        if self.info.class_to_task is None:
            raise UserError("the model was not trained on tasks; leave the task out")
        return torch.tensor(self.info.class_to_task)

    def classes_of_task(self, task: int) -> list[int]:
        """Return the classes of a task, as indices."""
        last = int(self.class_to_task.max())
        if not 0 <= task <= last:
            raise UserError(f"task = {task}: must be between 0 and {last}")
        return self.tasks[task]

    @torch.inference_mode()
    def probabilities(self, images: Tensor, task: int | None = None) -> Tensor:
        """Return the softmax probabilities ``[batch, classes]`` of images; 0 for classes of other tasks.

        Parameters
        ----------
        images
            As for :meth:`forward`.
        task
            The task of the images, where it is known; ``None``: all classes are candidates.
        """
        logits = self(images).float()
        if task is not None:
            logits = logits.masked_fill(self.class_to_task.to(logits.device) != task, float("-inf"))
        probabilities: Tensor = logits.softmax(dim=-1)
        return probabilities

    def predict(self, image: Any, task: int | None = None) -> Prediction:
        """Return the class of one image.

        Parameters
        ----------
        image
            A file's path, a PIL image, or an array or tensor ``[channels, height, width]`` or ``[height, width]``.
        task
            The image's task, where it is known: only the classes of that task are candidates.
        """
        return self.prediction(self.probabilities(self._as_batch(image), task)[0].tolist(), task)

    def prediction(self, probabilities: Sequence[float], task: int | None = None) -> Prediction:
        """Return the prediction that the probabilities of all classes mean."""
        candidates = range(len(self.classes)) if task is None else self.classes_of_task(task)
        named = {self.classes[index]: probabilities[index] for index in candidates}
        best = max(named, key=lambda name: named[name])
        return Prediction(best, named[best], named)

    def _as_batch(self, image: Any) -> Tensor:
        if isinstance(image, str | Path):
            try:
                image = decode_image(Path(image), self.image_size, self.channels)
            except UNREADABLE as error:
                raise UserError(f"{image}: is not a readable image ({error})") from None
        elif isinstance(image, Image.Image):
            image = fit_image(image, self.image_size, self.channels)
        tensor = torch.as_tensor(np.array(image) if isinstance(image, np.ndarray) else image)
        return (tensor[None] if tensor.dim() == 2 else tensor)[None]


def predict_files(
    model: Classifier,
    paths: Sequence[Path],
    task: int | None = None,
    batch_size: int = 64,
    progress: Progress = NO_PROGRESS,
) -> Iterator[ImagePrediction]:
    """Yield the prediction of each file, in order. A file that cannot be read does not stop the others."""
    if task is not None:
        model.classes_of_task(task)  # a wrong number is an error before the first image is read
    decode = partial(decode_file, image_size=model.image_size, channels=model.channels)
    with ThreadPoolExecutor(DECODING_THREADS) as pool, progress.task("predicting", len(paths)) as advance:
        for start in range(0, len(paths), batch_size):
            batch = paths[start : start + batch_size]
            decoded = list(pool.map(decode, batch))
            readable = [pixels for pixels, _ in decoded if pixels is not None]
            rows: Iterator[list[float]] = iter(())
            if readable:
                rows = iter(model.probabilities(torch.from_numpy(np.stack(readable)), task).tolist())
            for path, (pixels, note) in zip(batch, decoded, strict=True):
                prediction = None if pixels is None else model.prediction(next(rows), task)
                yield ImagePrediction(path, prediction, note)
            advance(len(batch))
