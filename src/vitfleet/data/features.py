"""Patch features that clients send instead of images, and the batches of a training on them.

They are kept in the precision in which they were sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitfleet.data.batches import Batch

INT8_MAX = 127
CHUNK_SAMPLES = 256  # samples converted to float32 at a time
GROWTH = 1.25  # capacity of a new block of features over what it has to hold


@dataclass(frozen=True)
class Features:
    """The patch features of one client with their labels."""

    values: Tensor  # `[samples, tokens, width]` in float32, bfloat16, float16 or int8
    labels: Tensor  # `[samples]`
    scales: Tensor | None = None  # for int8: the quantisation scale of each token, `[samples, tokens]`

    def __len__(self) -> int:
        return self.values.shape[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> Features:
        """Return the features with a function applied to every tensor."""
        scales = None if self.scales is None else function(self.scales)
        return Features(function(self.values), function(self.labels), scales)

    def take(self, rows: Tensor) -> Features:
        """Return the features of these samples; ``rows`` may have any shape."""
        return self.map(lambda tensor: tensor[rows])

    def empty(self, count: int) -> Features:
        """Return features without values, of as many samples."""
        return self.map(lambda tensor: tensor.new_empty(count, *tensor.shape[1:]))

    def write(self, rows: Tensor | slice, part: Features) -> None:
        """Overwrite the samples in these rows."""
        self.values[rows], self.labels[rows] = part.values, part.labels
        if self.scales is not None and part.scales is not None:
            self.scales[rows] = part.scales

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
        return self.map(lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class FeatureSet:
    """The features of several clients as one training set."""

    parts: Sequence[Features]  # one per client
    on_device: bool = False  # all parts are on the training device; if not, on the host or memory-mapped from a disk
    equal_clients: bool = False  # every client has the same total weight, not every sample
    token_dropout: float = 0.0  # the fraction of a sample's patch tokens that is dropped at every step

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


@dataclass(frozen=True, eq=False)
class _Slot:
    """The rows of the block that hold a copy of a part."""

    part: Features
    start: int
    capacity: int


class FeatureBlock:
    """Copies of the parts of a feature set in one block of memory, from which a batch is read with one gather.

    A load copies only the parts that are new since the last one. A new part takes the rows of a part that is gone, or
    rows at the end; only when the block is full is everything copied to a larger one.
    """

    def __init__(self) -> None:
        self._block: Features | None = None
        self._slots: list[_Slot] = []

    def load(self, parts: Sequence[Features]) -> tuple[Features, Tensor]:
        """Return the block, and the row of each sample in the order of the parts (on the host)."""
        held = {id(slot.part.values): slot for slot in self._slots}
        wanted = {id(part.values): part for part in parts}
        free = [slot for key, slot in held.items() if key not in wanted]
        used = max((slot.start + slot.capacity for slot in self._slots), default=0)
        new: dict[int, _Slot] = {}
        for key, part in wanted.items():
            if key in held:
                continue
            fitting = [slot for slot in free if slot.capacity >= len(part)]
            if fitting:
                taken = min(fitting, key=lambda slot: slot.capacity)
                free.remove(taken)
                new[key] = _Slot(part, taken.start, taken.capacity)
            else:
                new[key] = _Slot(part, used, len(part))
                used += len(part)
        if self._block is None or used > len(self._block) or not _same_form(self._block, parts[0]):
            self._block = parts[0].empty(int(GROWTH * sum(map(len, parts))) + 1)
            starts = torch.tensor([0, *map(len, wanted.values())]).cumsum(0).tolist()
            new = {key: _Slot(part, starts[i], len(part)) for i, (key, part) in enumerate(wanted.items())}
        for slot in new.values():
            self._block.write(slice(slot.start, slot.start + len(slot.part)), slot.part)
        slots = held | new
        self._slots = [slots[key] for key in wanted]
        ranges = (slots[id(part.values)] for part in parts)
        return self._block, torch.cat([torch.arange(slot.start, slot.start + len(slot.part)) for slot in ranges])


def _same_form(block: Features, part: Features) -> bool:
    return block.values.shape[1:] == part.values.shape[1:] and block.values.dtype == part.values.dtype


class FeatureLoader:
    """Completes batches with the features, labels and weights of their samples.

    The block keeps copies of features that are on the training device, from one training to the next.
    """

    def __init__(self, features: FeatureSet, device: torch.device, block: FeatureBlock) -> None:
        self.features = features
        self.device = device
        self.weights = features.sample_weights().to(device)
        self._block: Features | None = None
        self._rows = torch.empty(0, dtype=torch.long)
        if features.on_device and features.parts:
            self._block, rows = block.load(features.parts)
            self._rows = rows.to(device)

    def complete(self, batch: Batch) -> Batch:
        """Return the batch with its features, labels and weights, on the training device."""
        indices = batch.image_indices
        weights = self.weights[indices] * (batch.sample_weight > 0)
        sample_weight = weights / weights.sum(dim=-1, keepdim=True)
        taken = self._block.take(self._rows[indices]) if self._block is not None else self._gather(indices.cpu())
        return replace(
            batch, sample_weight=sample_weight, features=taken.values, labels=taken.labels, scales=taken.scales
        )

    def _gather(self, indices: Tensor) -> Features:
        """Copy samples from their parts, part by part."""
        flat = indices.flatten()
        ends = self.features.sizes().cumsum(0)
        owners = torch.searchsorted(ends, flat, right=True)
        gathered = self.features.parts[0].empty(len(flat))
        for owner in torch.unique(owners).tolist():
            part, positions = self.features.parts[owner], (owners == owner).nonzero().squeeze(1)
            gathered.write(positions, part.take(flat[positions] - (ends[owner] - len(part))))
        return gathered.map(lambda tensor: tensor.reshape(*indices.shape, *tensor.shape[1:])).to(self.device)
