"""An epoch of one client or of several stacked: its random draws on the host, and its batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.subsets import round_half_up
from vitfleet.randomness import Address, Purpose

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class EpochDraws:
    """All random numbers of one client's epoch, one row per sample, on the host.

    Attributes
    ----------
    order
        Positions in the shard, in the order in which the samples are visited.
    shift
        Rows and columns by which each visited image is shifted, ``[samples, 2]``.
    flip, brightness
        Whether each image is mirrored, and the factor of its brightness.
    mask_noise
        One number per patch, ``[samples, patches]``: the patches with the smallest numbers are kept.
    replay
        The stored samples that are replayed with each visited sample, ``[samples, replays, …]``: ``order`` holds their
        positions in the client's buffer. ``None``: nothing is replayed.
    """

    order: Array
    shift: Array | None = None
    flip: Array | None = None
    brightness: Array | None = None
    mask_noise: Array | None = None
    replay: EpochDraws | None = None


def draw_epoch(
    seed: int,
    round: int,
    client: int,
    epoch: int,
    samples: int,
    image_size: int,
    augment: AugmentConfig,
    num_patches: int,
    num_kept: int,
    num_stored: int = 0,
    replays: int = 0,
) -> EpochDraws:
    """Draw one client's epoch from its random addresses.

    Parameters
    ----------
    samples, image_size
        Number of the client's images, and their height and width in pixels.
    num_patches, num_kept
        Patches per image, and how many of them are kept. They are equal if nothing is masked.
    num_stored, replays
        Number of the client's stored samples, and how many of them are replayed with each image: uniformly, with
        replacement, with an augmentation and a mask of their own.
    """

    def generator(purpose: Purpose) -> np.random.Generator:
        return Address(seed, purpose, round, client, epoch).generator()

    def draw(order: Array, augment_by: Purpose, mask_by: Purpose, replay: EpochDraws | None = None) -> EpochDraws:
        """Draw the augmentation and the mask of every sample of an order."""
        shift = flip = brightness = mask_noise = None
        if augment.active:
            rng = generator(augment_by)
            # All three are always drawn, the shift last (an empty range consumes nothing), so that switching one of
            # them on does not change the numbers of the others.
            max_shift = round_half_up(augment.crop * image_size)
            drawn_flip = rng.random(order.shape, dtype=np.float32) < 0.5
            drawn_brightness = 1 + augment.brightness * (2 * rng.random(order.shape, dtype=np.float32) - 1)
            drawn_shift = rng.integers(-max_shift, max_shift + 1, size=(*order.shape, 2))
            shift = drawn_shift if max_shift else None
            flip = drawn_flip if augment.flip else None
            brightness = drawn_brightness if augment.brightness else None
        if num_kept < num_patches:
            mask_noise = generator(mask_by).random((*order.shape, num_patches), dtype=np.float32)
        return EpochDraws(order, shift, flip, brightness, mask_noise, replay)

    replay = None
    if replays:
        positions = generator(Purpose.REPLAY).integers(num_stored, size=(samples, replays))
        replay = draw(positions, Purpose.REPLAY_AUGMENT, Purpose.REPLAY_MASK)
    return draw(generator(Purpose.ORDER).permutation(samples), Purpose.AUGMENT, Purpose.MASK, replay)


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
        Augmentation of each sample: see :class:`~vitfleet.data.batches.EpochDraws`.
    keep
        Positions of the patches that are kept, ``[…, batch, kept]``.
    features, scales, labels
        In a training on features instead of images: the tokens of each sample as they are stored, their quantisation
        scales if they have any, and the samples' labels.
    replay
        The stored samples that are replayed with the batch, ``[…, batch, replays]`` in all tables. Their indices are
        positions in the client's buffer.
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
    replay: Batch | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function applied to every tensor."""
        replay = None if self.replay is None else self.replay.map(function)
        return Batch(**{name: function(tensor) for name, tensor in self._own_tensors()}, replay=replay)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are set, in the order of the fields."""
        return [tensor for _, tensor in self.named_tensors()]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that are set, with the names of their fields."""
        replayed = [] if self.replay is None else self.replay.named_tensors()
        return [*self._own_tensors(), *((f"replay.{name}", tensor) for name, tensor in replayed)]

    def _own_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of the batch without those of its replayed samples."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "replay"]
        return [(name, tensor) for name, tensor in values if tensor is not None]

    def flat_replay(self, axis: int) -> Batch | None:
        """Return the replayed samples on one axis, ``[…, batch × replays]``; ``None`` if there are none.

        Parameters
        ----------
        axis
            The axis of the batch.
        """
        if self.replay is None:
            return None
        return self.replay.map(lambda table: table.flatten(axis, axis + 1) if table.dim() > axis else table)

    def append(self, other: Batch, axis: int) -> Batch:
        """Return the samples of this batch, then those of another one, which sets the same tensors."""
        both = {
            name: tensor if name == "active" else torch.cat([tensor, getattr(other, name)], dim=axis)
            for name, tensor in self._own_tensors()
        }
        return Batch(**both, replay=None)


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

    counts = np.array([[min(width, max(0, size - step * width)) for size in sizes] for step in range(steps)])
    is_sample = np.arange(width) < counts[..., None]
    sample_weight = (is_sample / np.maximum(counts, 1)[..., None]).astype(np.float32)
    active = counts > 0
    layout = _Layout(steps, width, num_kept, stacked, device)
    weights, active_table = layout.to_device(sample_weight), layout.to_device(active.astype(np.float32))
    batch = layout.make_batch(draws, weights, active_table)
    replayed = [draw.replay for draw in draws if draw.replay is not None]
    if replayed:
        replays = replayed[0].order.shape[1]
        replay_weights = (weights / replays).unsqueeze(-1).expand(*weights.shape, replays).contiguous()
        batch = replace(batch, replay=layout.make_batch(replayed, replay_weights, active_table))
    return EpochBatches(batch, counts.max(axis=1).tolist(), active.sum(axis=1).tolist())


@dataclass(frozen=True)
class _Layout:
    """How the samples of an epoch are arranged: so many steps of so many samples, with or without clients' axis."""

    steps: int
    width: int
    num_kept: int
    stacked: bool
    device: torch.device

    def make_batch(self, draws: Sequence[EpochDraws], sample_weight: Tensor, active: Tensor) -> Batch:
        """Return the tables of all steps."""
        mask_noise = self._tabulate([draw.mask_noise for draw in draws])
        positions = self._tabulate([draw.order for draw in draws])
        assert positions is not None
        keep = None if mask_noise is None else mask_noise.argsort(dim=-1, stable=True)[..., : self.num_kept]
        return Batch(
            image_indices=positions,
            shard_positions=positions,
            sample_weight=sample_weight,
            active=active,
            shift=self._tabulate([draw.shift for draw in draws]),
            flip=self._tabulate([draw.flip for draw in draws]),
            brightness=self._tabulate([draw.brightness for draw in draws]),
            keep=None if keep is None else keep.contiguous(),
        )

    def to_device(self, table: Array) -> Tensor:
        """Copy a table ``[steps, clients, …]`` to the device."""
        return _to_device(np.ascontiguousarray(table if self.stacked else table[:, 0]), self.device)

    def _tabulate(self, rows: Sequence[Array | None]) -> Tensor | None:
        drawn = [row for row in rows if row is not None]
        return self.to_device(_pad_and_split(drawn, self.steps, self.width)) if drawn else None


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
