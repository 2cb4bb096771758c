"""A trained model for inference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitfleet.config.schema import Config
from vitfleet.data.preprocess import Preprocess
from vitfleet.data.tasks import assign_classes_to_tasks
from vitfleet.errors import UserError
from vitfleet.fleet.build import build_components, build_net
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.run.checkpoint import read_checkpoint
from vitfleet.run.data_info import DataInfo, read_data_info
from vitfleet.training.machine import Machine


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
        The probabilities of all classes, by name.
    """

    label: str
    probability: float
    probabilities: dict[str, float]


class Classifier(nn.Module):
    """A trained ViT with its preprocessing: images in, logits out.

    Attributes
    ----------
    classes
        Names of the classes, in the order of the logits.
    channels, image_size
        Colour channels and side in pixels of the images it was trained on. Other sizes are resized.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: Net, weights: Tensors, info: DataInfo) -> None:
        super().__init__()
        self.vit = net.module.vit
        self.vit.load_state_dict(dict(weights), strict=False)
        self.vit.requires_grad_(False)
        self.classes = info.classes
        self.channels = info.channels
        self.image_size = info.image_size
        self.input_size = net.image_size
        self.register_buffer("mean", torch.tensor(net.mean))
        self.register_buffer("std", torch.tensor(net.std))
        self.eval()

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
        device = self.mean.device
        preprocess = Preprocess(self.input_size, self.mean, self.std)
        pixels = preprocess(images.to(device))
        logits: Tensor = self.vit(pixels)
        return logits

    @torch.inference_mode()
    def predict(self, image: Any) -> Prediction:
        """Return the class of one image.

        Parameters
        ----------
        image
            A file's path, a PIL image, or an array or tensor ``[channels, height, width]`` or ``[height, width]``.
        """
        probabilities = self(self._as_batch(image)).float().softmax(dim=-1)[0].tolist()
        best = int(np.argmax(probabilities))
        return Prediction(self.classes[best], probabilities[best], dict(zip(self.classes, probabilities, strict=True)))

    def _as_batch(self, image: Any) -> Tensor:
        if isinstance(image, str | Path):
            try:
                image = Image.open(image)
            except OSError as error:
                raise UserError(f"{image}: is not a readable image ({error})") from None
        if isinstance(image, Image.Image):
            side = (self.image_size, self.image_size)
            image = image.convert("L" if self.channels == 1 else "RGB").resize(side, Image.Resampling.BILINEAR)
            pixels = torch.from_numpy(np.asarray(image).copy())
            return (pixels[None] if self.channels == 1 else pixels.permute(2, 0, 1))[None]
        tensor = torch.as_tensor(image)
        return (tensor[None] if tensor.dim() == 2 else tensor)[None]


def load_classifier(folder: Path, config: Config, client: int | None) -> Classifier:
    """Return the model of a run, from its last checkpoint."""
    info = read_data_info(folder)
    if client is not None and not 0 <= client < config.fleet.clients:
        raise UserError(f"client = {client}: must be between 0 and {config.fleet.clients - 1}, fleet.clients − 1")
    net = build_net(config, len(info.classes), info.channels, info.image_size)
    cpu = torch.device("cpu")
    class_tasks = None
    if config.data.tasks is not None and config.task_known:
        class_tasks = torch.from_numpy(assign_classes_to_tasks(config.data.tasks, config.seed, len(info.classes)))
    components = build_components(config, net, len(info.classes), Machine(cpu, False), config.num_tasks, class_tasks)
    method = components.method
    server, client_state = read_checkpoint(folder, client)
    base = method.base_message(net.initial_weights()).tensors
    return Classifier(components.net, method.model_weights(server, base, client_state), info)


__all__ = ["Classifier", "Prediction", "load_classifier"]
