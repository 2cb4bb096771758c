"""Computes cached views, and keeps them from round to round.

The K views of an image are what the frozen part makes of it in the K epochs of a training of "round 0": their
augmentations and masks have the addresses of that round, so they are the same whenever and wherever they are computed.
Which of its views an image has in an epoch is drawn by the address of that epoch: see :mod:`vitfleet.data.batches`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.images import Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Outputs, Samples
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import StepView
from vitfleet.training.views.frozen import VIEWS, CachedViews, FrozenPart

VIEWS_ROUND = 0  # in the random addresses of the views: no client trains in this round
ROWS_MULTIPLE = 32  # rows of recorded views are rounded up to a multiple, so that shapes recur from client to client

#: Runs the trainings of a group.
Train: TypeAlias = Callable[[Sequence[ClientTraining]], list[LocalResult]]


@dataclass(frozen=True)
class ViewPlan:
    """How the views of a training's images are made; nothing else decides what they are but weights and images."""

    part: FrozenPart
    count: int  # views of each image
    mask_ratio: float
    augment: AugmentConfig
    bf16: bool  # whether they are computed in bfloat16

    @classmethod
    def of(
        cls, training: LocalTraining, part: FrozenPart | None, train: TrainConfig, augment: AugmentConfig, bf16: bool
    ) -> ViewPlan | None:
        """Return how a training's views are made; ``None`` where it has to see the images themselves.

        Images that are neither augmented nor masked have one view.
        """
        if part is None or not train.cached_views or training.features is not None or training.sets:
            return None
        if set(part.names) & set(training.trainable) or not training.weights.keys() >= set(part.names):
            return None
        augment = augment if training.augment else AugmentConfig()
        count = train.cached_views if augment.active or train.mask_ratio else 1
        return cls(part, count, train.mask_ratio, augment, bf16)

    def recording(self, training: LocalTraining, net: Net, samples: int, device: torch.device) -> LocalTraining:
        """Return the training that computes the views of so many images; it trains nothing."""
        rows = samples + 1  # the last one takes padding
        rows += -rows % ROWS_MULTIPLE
        weights = {name: training.weights[name] for name in self.part.names}
        shape, dtype = self.part.shape(net, self.mask_ratio), weights[self.part.names[0]].dtype
        return LocalTraining(
            weights,
            Selection(()),
            self.count,
            RecordViews(self.part.split),
            kept={VIEWS: torch.zeros(self.count, rows, *shape, dtype=dtype, device=device)},
            train=training.train,
            augment=training.augment,
        )

    def on_views(self, training: LocalTraining, values: Tensor) -> LocalTraining:
        """Return the training on these views instead of images."""
        return replace(training, views=CachedViews(values, self.count, self.part))


@dataclass(frozen=True)
class RecordViews:
    """The step that records what the frozen part makes of a batch."""

    split: int | None

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return no gradients."""
        view.keep(view.map(record, view.kept, view.features(batch, self.split)))
        return {}


def record(kept: Tensors, outputs: Outputs) -> Tensors:
    """Write what is computed of a batch to the rows of its images, in place; padding goes to the last row."""
    assert outputs.features is not None
    views = kept[VIEWS]
    rows = torch.where(outputs.sample_weight > 0, outputs.positions, views.shape[1] - 1)
    views.index_put_((outputs.epoch.expand_as(rows), rows), outputs.features.to(views.dtype))
    return kept


class ViewStore:
    """Clients' views in the memory of the training device, those used last. Several threads may use it.

    They are found by a version, a hash of all that they depend on: views of other weights are never returned.
    """

    def __init__(self, max_bytes: float = math.inf) -> None:
        self.max_bytes = max_bytes
        self._used_bytes = 0
        self._held: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self._lock = Lock()

    def images_version(self, shard: Shard) -> str:
        """Return what distinguishes a client's images from all others: here, from those of this process."""
        return f"{id(shard.images.images)} {digest(shard.index)}"

    def load(self, version: str) -> Tensor | None:
        """Return the views of a version, if they are kept."""
        with self._lock:
            if version not in self._held:
                return None
            self._held.move_to_end(version)
            return self._held[version][1]

    def save(self, version: str, shard: Shard, values: Tensor) -> None:
        """Keep views; those used least recently are dropped beyond the limit. They can be computed again."""
        if values.nbytes > self.max_bytes:
            return
        with self._lock:
            self._held[version] = shard.images.images, values  # as long as the images are held, no others have their id
            self._used_bytes += values.nbytes
            while self._used_bytes > self.max_bytes:
                _, (_, dropped) = self._held.popitem(last=False)
                self._used_bytes -= dropped.nbytes


def views_version(plan: ViewPlan, client: ClientTraining, store: ViewStore) -> str:
    """Return a hash of all that a client's views depend on."""
    weights = [(name, _weight_digest(client.training.weights[name])) for name in plan.part.names]
    settings = plan.part.split, plan.count, plan.mask_ratio, plan.augment.model_dump_json(), plan.bf16
    address = client.rng.seed, client.rng.client, store.images_version(client.shard)
    return blake2b(repr((weights, settings, address)).encode(), digest_size=16).hexdigest()


def load_or_compute(
    plan: ViewPlan, group: Sequence[ClientTraining], store: ViewStore, net: Net, device: torch.device, train: Train
) -> list[Tensor]:
    """Return the views of each client of a group; those that are not kept are computed together, and kept."""
    versions = [views_version(plan, client, store) for client in group]
    loaded = {version: store.load(version) for version in versions}
    views = {version: values for version, values in loaded.items() if values is not None}
    new = [(version, client) for version, client in zip(versions, group, strict=True) if version not in views]
    recordings = [
        ClientTraining(
            plan.recording(client.training, net, len(client), device),
            client.shard,
            RngContext(client.rng.seed, VIEWS_ROUND, client.rng.client),
        )
        for _, client in new
    ]
    for (version, client), result in zip(new, train(recordings) if new else (), strict=True):
        views[version] = result.kept[VIEWS][:, : len(client)].flatten(0, 1).contiguous()
        store.save(version, client.shard, views[version])
    return [views[version] for version in versions]


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's values."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(values.numpy().data, digest_size=16).hexdigest()


# A frozen weight is the same tensor in every round of a simulation, and is never changed in place.
_known_digests = WeakTensorKeyDictionary()
_digests_lock = Lock()


def _weight_digest(weight: Tensor) -> str:
    with _digests_lock:
        if weight not in _known_digests:
            _known_digests[weight] = digest(weight)
        known: str = _known_digests[weight]
        return known
