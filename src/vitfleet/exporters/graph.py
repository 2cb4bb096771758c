"""The module that is exported: from pixels in 0…1 to logits, with resizing and normalisation inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.config.schema import ModelConfig
from vitfleet.inference.classifier import Classifier
from vitfleet.models.adapters import merged_weights
from vitfleet.models.zoo import build_model


@dataclass(frozen=True)
class ExportInfo:
    """What is written into an exported model beside its weights.

    Attributes
    ----------
    classes
        Names of the classes, in the order of the outputs.
    channels, input_size
        Form of the exported graph's input ``[batch, channels, input_size, input_size]``: pixels in 0…1. An image is
        cropped to a square at its centre and resized to it.
    mean, std
        The normalisation, which is part of the graph.
    model_size
        Height and width of the input of the network itself; a smaller image is resized inside the graph.
    """

    classes: tuple[str, ...]
    channels: int
    input_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    model_size: int


class ExportGraph(nn.Module):
    """A trained model as the graph that is exported.

    Low-rank factors are merged into the weights. Images smaller than the network's input are resized inside the graph,
    as in training; larger ones are expected to be resized before.

    Parameters
    ----------
    model
        A model on the CPU.

    Attributes
    ----------
    network
        From normalised images to logits.
    is_plain
        Whether the network is timm's own module, or the plain ViT, which is the same.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        info = model.info
        self.info = ExportInfo(
            classes=info.data.classes,
            channels=info.data.channels,
            input_size=min(info.data.image_size, info.input_size),
            mean=info.mean,
            std=info.std,
            model_size=info.input_size,
        )
        plain = plain_timm_model(model)
        self.is_plain = plain is not None
        self.network: nn.Module = AdaptedNetwork(model) if plain is None else plain
        self.register_buffer("mean", model.mean.detach().clone()[:, None, None])
        self.register_buffer("std", model.std.detach().clone()[:, None, None])
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images in 0…1."""
        return self.with_network(self.network, images)

    def with_network(self, network: nn.Module, images: Tensor) -> Tensor:
        """Return the logits that another network computes instead of its own."""
        if self.info.input_size != self.info.model_size:
            size = (self.info.model_size, self.info.model_size)
            images = F.interpolate(images, size, mode="bilinear", antialias=False)
        logits: Tensor = network((images - self.mean) / self.std)
        return logits

    def prepare(self, pixels: Tensor) -> Tensor:
        """Return uint8 images ``[batch, channels, height, width]`` as the graph takes them."""
        images = pixels.float().div(255)
        size = self.info.input_size
        if images.shape[-1] == size:
            return images
        return F.interpolate(images, (size, size), mode="bilinear", antialias=images.shape[-1] > size)

    def example(self, batch: int = 2) -> Tensor:
        """Return images of the right form, the same every time."""
        size = self.info.input_size
        generator = torch.Generator().manual_seed(0)
        return torch.rand(batch, self.info.channels, size, size, generator=generator)


class AdaptedNetwork(nn.Module):
    """A ViT with parts that timm's own forward pass would ignore, such as prompts."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits."""
        return self.model.logits(pixels)


def plain_timm_model(model: Classifier) -> nn.Module | None:
    """Return timm's module with the trained weights, low-rank factors merged; ``None`` if they have no place in it."""
    data = model.info.data
    config = ModelConfig.model_validate(model.info.model)
    net = build_model(config, len(data.classes), data.channels, data.image_size, 0)
    vit, weights = net.module.vit, merged_weights(model.vit)
    if vit.state_dict().keys() != weights.keys():
        return None
    vit.load_state_dict(weights)
    return vit.eval().requires_grad_(False)
