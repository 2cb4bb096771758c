"""Patch features: what leaves a client instead of images, stored as they travelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_INT8 = 127
SIZE_CHUNK = 256  # samples unpacked at a time


@dataclass(frozen=True)
class Features:
    """One client's patch features, ``[samples, tokens, width]``, with their labels.

    Attributes
    ----------
    values
        In float32, bfloat16, float16, or int8.
    scales
        For int8: what one unit of each token is worth, ``[samples, tokens]``.
    """

    values: Tensor
    labels: Tensor
    scales: Tensor | None = None

    def __len__(self) -> int:
        return self.values.shape[0]

    def rows(self, index: Tensor) -> Tensor:
        """Return some samples' features as float32."""
        rows = self.values[index].float()
        return rows if self.scales is None else rows * self.scales[index].float().unsqueeze(-1)

    def size(self) -> float:
        """Return the root mean square of all values."""
        chunks = torch.split(torch.arange(len(self), device=self.values.device), SIZE_CHUNK)
        squares = sum(self.rows(chunk).double().square().sum().item() for chunk in chunks)
        return math.sqrt(squares / max(1, self.values.numel()))

    def to(self, device: torch.device) -> Features:
        """Move to a device."""
        scales = None if self.scales is None else self.scales.to(device)
        return Features(self.values.to(device), self.labels.to(device), scales)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token as int8 and what a unit of it is worth: its largest magnitude over 127."""
    scales = values.abs().amax(dim=-1).float() / LARGEST_INT8
    # A token of zeros has no scale of its own; any will do.
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (values / safe.unsqueeze(-1)).round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), safe


class FeatureSet:
    """Several clients' features as one set, wherever each of them lies; batches come to the training device.

    Parameters
    ----------
    equal_parts
        Whether each client counts the same, however many samples it sent; otherwise each sample does.
    """

    def __init__(self, parts: Sequence[Features], device: torch.device, equal_parts: bool = False) -> None:
        self.device = device
        self.sizes = [len(part) for part in parts]
        home = parts[0].values.device if parts else device
        self.together: Features | None = None
        if parts and home == device:
            # On the device itself one gather is worth the copy.
            scales = [part.scales for part in parts if part.scales is not None]
            self.together = Features(
                torch.cat([part.values for part in parts]),
                torch.cat([part.labels for part in parts]),
                torch.cat(scales) if scales else None,
            )
        self.parts = parts
        self.offsets = torch.tensor([0, *self.sizes]).cumsum(0)
        each = torch.tensor([1 / size if equal_parts and size else 1.0 for size in self.sizes])
        self.importance = each.repeat_interleave(torch.tensor(self.sizes, dtype=torch.long)).to(device)

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def resident(self) -> bool:
        """Whether all of it lies on the training device."""
        return self.together is not None

    def shares(self, order: Tensor, share: Tensor) -> Tensor:
        """Return each of these samples' share of a batch's mean; they sum to one.

        Parameters
        ----------
        share
            What would be each one's if all counted the same: padding has none.
        """
        importance = self.importance[order] * (share > 0)
        return importance / importance.sum()

    def take(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and labels at these positions, on the training device."""
        if self.together is not None:
            return self.together.rows(order), self.together.labels[order].long()
        places = order.cpu()
        owners = torch.searchsorted(self.offsets, places, right=True) - 1
        rows, labels = [], []
        for place, owner in zip(places.tolist(), owners.tolist(), strict=True):
            part, row = self.parts[owner], torch.tensor([place - int(self.offsets[owner])])
            rows.append(part.rows(row))
            labels.append(part.labels[row])
        return torch.cat(rows).to(self.device), torch.cat(labels).long().to(self.device)
