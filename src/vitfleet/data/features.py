"""Patch features that clients send instead of images, kept in the precision in which they were sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127
CHUNK_SAMPLES = 256  # samples converted to float32 at a time


@dataclass(frozen=True)
class Features:
    """The patch features of one client with their labels.

    Attributes
    ----------
    values
        ``[samples, tokens, width]`` in float32, bfloat16, float16 or int8.
    labels
        ``[samples]``.
    scales
        For int8: the quantisation scale of each token, ``[samples, tokens]``.
    """

    values: Tensor
    labels: Tensor
    scales: Tensor | None = None

    def __len__(self) -> int:
        return self.values.shape[0]

    def take(self, rows: Tensor) -> Features:
        """Return the features of these samples; ``rows`` may have any shape."""
        return Features(self.values[rows], self.labels[rows], None if self.scales is None else self.scales[rows])

    def reshape(self, shape: torch.Size) -> Features:
        """Arrange the samples in another shape."""

        def arrange(tensor: Tensor) -> Tensor:
            return tensor.reshape(*shape, *tensor.shape[1:])

        scales = None if self.scales is None else arrange(self.scales)
        return Features(arrange(self.values), arrange(self.labels), scales)

    def rms(self) -> float:
        """Return the root mean square of all values; not finite if any of them is not."""
        if self.scales is None:
            norm = float(torch.linalg.vector_norm(self.values, dtype=torch.float32))
            return norm / math.sqrt(max(1, self.values.numel()))
        chunks = torch.split(torch.arange(len(self), device=self.values.device), CHUNK_SAMPLES)
        parts = [self.take(chunk) for chunk in chunks]
        squares = sum(dequantize(part.values, part.scales).double().square().sum().item() for part in parts)
        return math.sqrt(squares / max(1, self.values.numel()))

    def to(self, device: torch.device) -> Features:
        """Move to a device."""
        scales = None if self.scales is None else self.scales.to(device)
        return Features(self.values.to(device), self.labels.to(device), scales)


@dataclass(frozen=True)
class FeatureSet:
    """The features of several clients as one training set.

    Attributes
    ----------
    parts
        One entry per client.
    on_device
        Whether all parts are on the training device. If not, they are on the host or memory-mapped from a disk.
    equal_clients
        Whether every client has the same total weight, whatever its number of samples; otherwise every sample has
        the same weight.
    token_dropout
        The fraction of a sample's patch tokens that is dropped at every step.
    """

    parts: Sequence[Features]
    on_device: bool = False
    equal_clients: bool = False
    token_dropout: float = 0.0

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def num_tokens(self) -> int:
        """Tokens per sample, prefix tokens included."""
        return self.parts[0].values.shape[1]

    def sizes(self) -> Tensor:
        """Return the number of samples of each part."""
        return torch.tensor([len(part) for part in self.parts], dtype=torch.long)

    def sample_weights(self) -> Tensor:
        """Return the weight of each sample, relative to the others."""
        sizes = self.sizes()
        weights = 1 / sizes.clamp(min=1) if self.equal_clients else torch.ones(len(sizes))
        return weights.repeat_interleave(sizes)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as int8 and the scale of each token: its largest magnitude / 127."""
    scales = values.abs().amax(dim=-1).float() / INT8_MAX
    # For a token of zeros any scale is right.
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (values / safe.unsqueeze(-1)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), safe


def dequantize(values: Tensor, scales: Tensor | None) -> Tensor:
    """Return stored features as float32."""
    floats = values.float()
    return floats if scales is None else floats * scales.float().unsqueeze(-1)
