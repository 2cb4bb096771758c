"""The batches of an epoch, for one client or for several clients stacked, as tensors on the training device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from vitfleet.data.epoch_draws import Array, EpochDraws


@dataclass(frozen=True)
class Batch:
    """The samples of one step, of one client or of several clients stacked on a leading axis.

    Attributes
    ----------
    image_indices
        Indices into the image set, ``[…, batch]``.
    shard_positions
        Positions in the client's shard, ``[…, batch]``.
    sample_weight
        Weight of each sample in the batch's mean; 0 for padding.
    active
        1 if the client has this step, else 0, ``[…]``.
    shift, flip, brightness
        Augmentation of each sample: see :class:`~vitfleet.data.epoch_draws.EpochDraws`.
    keep
        Positions of the patches that are kept, ``[…, batch, kept]``.
    features, scales, labels
        In a training on features instead of images: the tokens of each sample as they are stored, their quantisation
        scales if they have any, and the samples' labels.
    """

    image_indices: Tensor
    shard_positions: Tensor
    sample_weight: Tensor
    active: Tensor
    shift: Tensor | None = None
    flip: Tensor | None = None
    brightness: Tensor | None = None
    keep: Tensor | None = None
    features: Tensor | None = None
    scales: Tensor | None = None
    labels: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function applied to every tensor."""
        return Batch(**{name: function(tensor) for name, tensor in self.named_tensors()})

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are set, in the order of the fields."""
        return [tensor for _, tensor in self.named_tensors()]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that are set, with the names of their fields."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, tensor) for name, tensor in values if tensor is not None]


@dataclass(frozen=True)
class EpochBatches:
    """An epoch of one client or of several clients together.

    Attributes
    ----------
    stacked
        The batches of all steps, stacked on a new first axis: ``[steps, (clients,) batch, …]``.
    batch_sizes
        The largest batch size that any client has at each step.
    active_clients
        How many clients have each step, known on the host. They are always the first ones.
    complete
        Adds to a batch what is too large to be prepared for a whole epoch: its features.
    """

    stacked: Batch
    batch_sizes: list[int]
    active_clients: list[int]
    complete: Callable[[Batch], Batch] | None = None

    def __len__(self) -> int:
        return len(self.batch_sizes)

    def batch(self, step: int, num_clients: int | None) -> Batch:
        """Return the batch of one step, without columns that are padding for every client.

        Parameters
        ----------
        num_clients
            Return the batches of this many clients, the first ones; ``None`` if there is no axis of clients.
        """
        batch_size, axis = self.batch_sizes[step], 0 if num_clients is None else 1

        def narrow(table: Tensor) -> Tensor:
            row = table[step] if num_clients is None else table[step, :num_clients]
            return row.narrow(axis, 0, batch_size) if row.dim() > axis else row

        batch = self.stacked.map(narrow)
        return batch if self.complete is None else self.complete(batch)

    def chunk(self, start: int, stop: int) -> Batch:
        """Return the batches of consecutive steps, stacked on a first axis."""
        batches = self.stacked.map(lambda table: table[start:stop])
        return batches if self.complete is None else self.complete(batches)


def make_epoch_batches(
    draws: Sequence[EpochDraws],
    batch_size: int,
    num_kept: int,
    device: torch.device,
    stacked: bool,
    width_multiple: int = 1,
) -> EpochBatches:
    """Arrange the epochs of several clients in steps of one size; clients with fewer samples are padded.

    ``image_indices`` of the result are still positions in the shard: the caller maps them to the image set.

    Parameters
    ----------
    draws
        One entry per client, sorted by falling number of samples, so that the clients that have a step are always
        the first ones.
    num_kept
        How many patches of an image are kept, if the draws have a ``mask_noise``.
    stacked
        Whether the result has an axis of clients; without it there must be one client.
    width_multiple
        Round the batch width up to a multiple of this, but not beyond ``batch_size``.
    """
    sizes = [len(draw.order) for draw in draws]
    width = min(batch_size, -(-max(sizes) // width_multiple) * width_multiple)
    steps = -(-max(sizes) // width)

    def to_device(table: Array) -> Tensor:
        return _to_device(np.ascontiguousarray(table if stacked else table[:, 0]), device)

    def tabulate(rows: Sequence[Array]) -> Tensor:
        return to_device(_pad_and_split(rows, steps, width))

    def tabulate_optional(rows: Sequence[Array | None]) -> Tensor | None:
        drawn = [row for row in rows if row is not None]
        return tabulate(drawn) if drawn else None

    counts = np.array([[min(width, max(0, size - step * width)) for size in sizes] for step in range(steps)])
    is_sample = np.arange(width) < counts[..., None]
    sample_weight = (is_sample / np.maximum(counts, 1)[..., None]).astype(np.float32)
    active = counts > 0
    mask_noise = tabulate_optional([draw.mask_noise for draw in draws])
    positions = tabulate([draw.order for draw in draws])
    batch = Batch(
        image_indices=positions,
        shard_positions=positions,
        sample_weight=to_device(sample_weight),
        active=to_device(active.astype(np.float32)),
        shift=tabulate_optional([draw.shift for draw in draws]),
        flip=tabulate_optional([draw.flip for draw in draws]),
        brightness=tabulate_optional([draw.brightness for draw in draws]),
        keep=None if mask_noise is None else mask_noise.argsort(dim=-1, stable=True)[..., :num_kept].contiguous(),
    )
    return EpochBatches(batch, counts.max(axis=1).tolist(), active.sum(axis=1).tolist())


def _pad_and_split(rows: Sequence[Array], steps: int, width: int) -> Array:
    """Return ``[clients][samples, …]`` as ``[steps, clients, width, …]``, padded with zeros."""
    padded = np.zeros((len(rows), steps * width, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for client, row in enumerate(rows):
        padded[client, : len(row)] = row
    return padded.reshape(len(rows), steps, width, *rows[0].shape[1:]).swapaxes(0, 1)


def _to_device(array: Array, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
