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

    def dequantize(self, indices: Tensor) -> Tensor:
        """Return the features of these samples as float32."""
        rows = self.values[indices].float()
        return rows if self.scales is None else rows * self.scales[indices].float().unsqueeze(-1)

    def rms(self) -> float:
        """Return the root mean square of all values."""
        chunks = torch.split(torch.arange(len(self), device=self.values.device), CHUNK_SAMPLES)
        squares = sum(self.dequantize(chunk).double().square().sum().item() for chunk in chunks)
        return math.sqrt(squares / max(1, self.values.numel()))

    def to(self, device: torch.device) -> Features:
        """Move to a device."""
        scales = None if self.scales is None else self.scales.to(device)
        return Features(self.values.to(device), self.labels.to(device), scales)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as int8 and the scale of each token: its largest magnitude / 127."""
    scales = values.abs().amax(dim=-1).float() / INT8_MAX
    # For a token of zeros any scale is right.
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (values / safe.unsqueeze(-1)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), safe


class FeatureSet:
    """The features of several clients as one training set, from which batches are moved to the training device.

    Parameters
    ----------
    parts
        One entry per client, on the training device or on the host.
    equal_clients
        Whether every client has the same total weight, whatever its number of samples; otherwise every sample has
        the same weight.
    """

    def __init__(self, parts: Sequence[Features], device: torch.device, equal_clients: bool = False) -> None:
        self.device = device
        self.parts = parts
        self.sizes = [len(part) for part in parts]
        # On the training device, one gather per batch is worth the copy.
        self.merged = _merge(parts) if parts and parts[0].values.device == device else None
        self.offsets = torch.tensor([0, *self.sizes]).cumsum(0)
        weights = torch.tensor([1 / size if equal_clients and size else 1.0 for size in self.sizes])
        self.weights = weights.repeat_interleave(torch.tensor(self.sizes, dtype=torch.long)).to(device)

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def on_device(self) -> bool:
        """Whether all features are on the training device."""
        return self.merged is not None

    def sample_weights(self, indices: Tensor, sample_weight: Tensor) -> Tensor:
        """Return the weights of these samples in a batch's mean; they sum to one.

        Parameters
        ----------
        sample_weight
            The weights if all samples counted the same; 0 for padding.
        """
        weights = self.weights[indices] * (sample_weight > 0)
        return weights / weights.sum()

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and labels of these samples, on the training device."""
        if self.merged is not None:
            return self.merged.dequantize(indices), self.merged.labels[indices].long()
        host_indices = indices.cpu()
        owners = torch.searchsorted(self.offsets, host_indices, right=True) - 1
        rows, labels = [], []
        for index, owner in zip(host_indices.tolist(), owners.tolist(), strict=True):
            part, row = self.parts[owner], torch.tensor([index - int(self.offsets[owner])])
            rows.append(part.dequantize(row))
            labels.append(part.labels[row])
        return torch.cat(rows).to(self.device), torch.cat(labels).long().to(self.device)


def _merge(parts: Sequence[Features]) -> Features:
    scales = [part.scales for part in parts if part.scales is not None]
    return Features(
        torch.cat([part.values for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat(scales) if scales else None,
    )
