"""An epoch of one client or of several stacked: its random draws on the host, and its batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.subsets import round_half_up
from vitfleet.randomness import Address, Purpose, own_purpose

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class EpochDraws:
    """All random numbers of one client's epoch, one row per sample, on the host."""

    order: Array  # positions in the shard, in the order in which the samples are visited
    shift: Array | None = None  # rows and columns by which each visited image is shifted, `[samples, 2]`
    flip: Array | None = None  # whether it is mirrored
    brightness: Array | None = None  # the factor of its brightness
    mask_noise: Array | None = None  # `[samples, patches]`: the patches with the smallest numbers are kept
    # The stored samples that are drawn with each visited sample, by the name of their set, `[samples, draws, …]`:
    # their order holds positions in the client's set.
    drawn: Mapping[str, EpochDraws] = field(default_factory=dict)
    rows: Array | None = None  # of each visited image's cached view, where the client trains on these
    # Of random numbers that steps compute themselves: more keys than there are steps, by name, `[samples]`.
    keys: Mapping[str, Array] = field(default_factory=dict)


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
    drawn: Mapping[str, tuple[int, int]] | None = None,
    random: Sequence[str] = (),
    cached_views: int = 0,
) -> EpochDraws:
    """Draw one client's epoch from its random addresses; nothing is masked if as many patches are kept as there are.

    ``drawn`` has for each set of stored samples how many samples it has, and how many are drawn with each image:
    uniformly, with replacement, with an augmentation and a mask of their own. The names of the sets, and those in
    ``random`` (numbers that steps compute themselves), are each a purpose of their own. Of ``cached_views`` of every
    image one is drawn: see :func:`draw_views`.
    """

    def generator(purpose: str) -> np.random.Generator:
        return Address(seed, purpose, round, client, epoch).generator()

    def draw(order: Array, augment_by: str, mask_by: str) -> EpochDraws:
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
        return EpochDraws(order, shift, flip, brightness, mask_noise)

    drawn_sets = {
        name: draw(
            generator(own_purpose(name)).integers(stored, size=(samples, draws)), f"{name}-augment", f"{name}-mask"
        )
        for name, (stored, draws) in (drawn or {}).items()
    }
    keys = {name: generator(own_purpose(name)).integers(2**63 - 1, size=samples) for name in random}
    batches = draw(generator(Purpose.ORDER).permutation(samples), Purpose.AUGMENT, Purpose.MASK)
    if cached_views:
        views = draw_views(seed, round, client, epoch, samples, cached_views)
        batches = replace(batches, rows=views[batches.order] * samples + batches.order)
    return replace(batches, drawn=drawn_sets, keys=keys)


def draw_views(seed: int, round: int, client: int, epoch: int, samples: int, cached_views: int) -> Array:
    """Draw which of its cached views each of a client's images has in an epoch.

    In as many consecutive epochs of a round as there are views, every image has each of its views once.
    """
    turns, turn = divmod(epoch, cached_views)
    rng = Address(seed, Purpose.CACHED_VIEWS, round, client, turns).generator()
    views: Array = rng.random((samples, cached_views)).argsort(axis=1, kind="stable")[:, turn]
    return views


@dataclass(frozen=True)
class Batch:
    """The samples of one step, of one client or of several clients stacked on a leading axis."""

    image_indices: Tensor  # into the image set, `[…, batch]`
    shard_positions: Tensor  # positions in the client's shard, `[…, batch]`
    sample_weight: Tensor  # in the batch's mean; 0 for padding
    active: Tensor  # 1 if the client has this step, else 0, `[…]`
    shift: Tensor | None = None  # with flip and brightness: see EpochDraws
    flip: Tensor | None = None
    brightness: Tensor | None = None
    keep: Tensor | None = None  # positions of the patches that are kept, `[…, batch, kept]`
    rows: Tensor | None = None  # of the samples' cached views, in a training on these instead of images
    # In a training on features instead of images: the tokens of each sample as they are stored
    features: Tensor | None = None
    scales: Tensor | None = None  # their quantisation scales, if they have any
    labels: Tensor | None = None
    # The stored samples that are drawn for the batch, by the name of their set: `[…, batch, draws]` in all tables.
    # Their indices are positions in the client's set.
    drawn: Mapping[str, Batch] = field(default_factory=dict)
    # One per step, `[…]`, by the name of the random numbers that the step computes from it
    keys: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function applied to every tensor."""
        return Batch(
            **{name: function(tensor) for name, tensor in self._own_tensors()},
            drawn={name: tables.map(function) for name, tables in self.drawn.items()},
            keys={name: function(key) for name, key in self.keys.items()},
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are set."""
        return [tensor for _, tensor in self.named_tensors()]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that are set, in the order of their fields, with the fields' names."""
        drawn = [
            (f"drawn.{set_name}.{name}", tensor)
            for set_name, tables in self.drawn.items()
            for name, tensor in tables.named_tensors()
        ]
        return [*self._own_tensors(), *drawn, *((f"keys.{name}", key) for name, key in self.keys.items())]

    def _own_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of the batch itself."""
        own = [field.name for field in fields(self) if field.name not in ("drawn", "keys")]
        return [(name, tensor) for name in own if (tensor := getattr(self, name)) is not None]


@dataclass(frozen=True)
class EpochBatches:
    """An epoch of one client or of several clients together."""

    stacked: Batch  # the batches of all steps, on a new first axis: `[steps, (clients,) batch, …]`
    batch_sizes: list[int]  # the largest of any client at each step
    active_clients: list[int]  # how many clients have each step, known on the host: always the first ones
    # Adds to a batch what is too large to be prepared for a whole epoch: its features
    complete: Callable[[Batch], Batch] | None = None

    def __len__(self) -> int:
        return len(self.batch_sizes)

    def batch(self, step: int, num_clients: int | None) -> Batch:
        """Return the batch of one step, without columns that are padding for every client.

        Of several clients, only the first ``num_clients``; it is ``None`` if there is no axis of clients.
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
    Clients are sorted by falling number of samples, so that those that have a step are always the first ones. Without
    an axis of clients (``stacked``) there must be one. The width of a batch is rounded up to a multiple of
    ``width_multiple``, but not beyond ``batch_size``.
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
    drawn: dict[str, Batch] = {}
    for name, first in draws[0].drawn.items():
        per_sample = first.order.shape[1]
        drawn_weights = (weights / per_sample).unsqueeze(-1).expand(*weights.shape, per_sample).contiguous()
        drawn[name] = layout.make_batch([draw.drawn[name] for draw in draws], drawn_weights, active_table)
    keys = {name: layout.keys([draw.keys[name] for draw in draws]) for name in draws[0].keys}
    batch = replace(batch, drawn=drawn, keys=keys)
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
            rows=self._tabulate([draw.rows for draw in draws]),
        )

    def keys(self, rows: Sequence[Array]) -> Tensor:
        """Return a key per step and client; a client has at least as many as steps."""
        padded = np.zeros((self.steps, len(rows)), dtype=np.int64)
        for client, row in enumerate(rows):
            padded[: len(row), client] = row[: self.steps]
        return self.to_device(padded)

    def to_device(self, table: Array) -> Tensor:
        """Copy a table ``[steps, clients, …]`` to the device without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(table if self.stacked else table[:, 0]))
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _tabulate(self, rows: Sequence[Array | None]) -> Tensor | None:
        """Return ``[clients][samples, …]`` as ``[steps, clients, width, …]``, padded with zeros."""
        drawn = [row for row in rows if row is not None]
        if not drawn:
            return None
        shape = drawn[0].shape[1:]
        padded = np.zeros((len(drawn), self.steps * self.width, *shape), dtype=drawn[0].dtype)
        for client, row in enumerate(drawn):
            padded[client, : len(row)] = row
        return self.to_device(padded.reshape(len(drawn), self.steps, self.width, *shape).swapaxes(0, 1))
