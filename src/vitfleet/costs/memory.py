"""Peak memory of a client's training, without training: every allocation of a training step is tracked.

The trainer's own step runs on fake tensors, which have shapes, types and lifetimes, but no values. The peak is what a
device needs: the weights, a copy of the trainable ones, their gradients, the optimiser's state, the activations saved
for the backward pass, and intermediate results. Frozen layers and masked images save fewer activations. Every stored
task that needs a reference gradient adds one gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.costs.cost_model import num_trained_models
from vitfleet.costs.dry_run import DryRun
from vitfleet.data.batches import Batch
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.cohort import Cohort
from vitfleet.training.cohort_inputs import ClientFit, RngContext, stack_inputs
from vitfleet.training.machine import Machine
from vitfleet.training.objective import Fit
from vitfleet.training.trainer import Trainer, preprocess_for


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes at the peak of a training step.

    Attributes
    ----------
    weights
        The received model, the state kept from earlier rounds, stored samples, and a copy of the trainable weights.
    gradients
        Gradients of the trainable weights.
    optimizer
        Optimiser state: two values per trainable weight for AdamW, one for SGD with momentum.
    activations
        Everything else at the peak: saved activations, reference gradients, and intermediate results.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


#: Steps of an optimiser in place: they allocate nothing, but torch runs them on real zeros of all weights' sizes.
_IN_PLACE_OPTIMIZERS = (torch.ops.aten._fused_adamw_, torch.ops.aten._fused_sgd_)


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every tensor storage from its allocation until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record the storages of its results."""
        if func.overloadpacket in _IN_PLACE_OPTIMIZERS:
            return None
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._record_storage(leaf.untyped_storage())
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that are counted elsewhere, and all of their views."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)

    def _record_storage(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, self._make_release_callback(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _make_release_callback(self, key: int, size: int) -> Callable[[Any], None]:
        def release(_: Any) -> None:
            self._storages.pop(key, None)
            self.live -= size

        return release


@dataclass(frozen=True)
class TrackedStep:
    """What the allocations of a training step depend on, and the tracked bytes.

    Attributes
    ----------
    conditions
        The model's and the fit's shapes, the objective and the settings. Compared by value, because the functions of
        an objective need not have a hash.
    copied, ready, peak
        Bytes after the inputs were copied, before the first step, and at the peak.
    """

    conditions: tuple[object, ...]
    copied: int
    ready: int
    peak: int


def round_memory(
    net: Net,
    dry_run_result: DryRun,
    train: TrainConfig,
    bf16: bool = False,
    parts_at_once: int = 1,
    known_steps: list[TrackedStep] | None = None,
) -> MemoryUsage:
    """Return the memory of the largest training in a client's round; see :func:`training_memory`."""
    usages = [
        training_memory(net, fit, train, bf16, dry_run_result.held_tensors, parts_at_once, known_steps)
        for fit in dry_run_result.fits
    ]
    return max(usages, key=lambda usage: usage.total)


def training_memory(
    net: Net,
    fit: Fit,
    train: TrainConfig,
    bf16: bool = False,
    held_tensors: Iterable[Tensor] = (),
    parts_at_once: int = 1,
    known_steps: list[TrackedStep] | None = None,
) -> MemoryUsage:
    """Return the bytes at the peak of a training.

    Parameters
    ----------
    net
        The architecture; the values of its weights are not used.
    held_tensors
        Tensors that the client holds in addition: received tensors, and state kept from earlier rounds.
    parts_at_once
        Number of stored tasks whose gradients are computed together; 1 needs the least memory.
    known_steps
        Steps that were tracked before; one of the same conditions is not tracked again, a new one is added.
    """
    train = fit.train or train
    trainable = net.parts.trainable(fit.objective.trainable)
    received = _total_bytes([*held_tensors, *_fit_tensors(fit)])
    trained = num_trained_models(fit) * _total_bytes([fit.weights[name] for name in trainable])
    known = [] if known_steps is None else known_steps
    conditions = (net.part_paths, _shapes(fit), fit.objective, train, bf16, parts_at_once)
    step = next((step for step in known if step.conditions == conditions), None)
    if step is None:
        step = TrackedStep(conditions, *_track_step(net, fit, train, bf16, parts_at_once))
        known.append(step)
    return MemoryUsage(
        received + step.copied, trained, step.ready - step.copied, max(0, step.peak - step.ready - trained)
    )


def _track_step(net: Net, fit: Fit, train: TrainConfig, bf16: bool, parts_at_once: int) -> tuple[int, int, int]:
    """Track a step of the trainer; with a memory two, because gradients of the memory are kept from step to step.

    Return the bytes after the inputs were copied, before the first step, and at the peak.
    """
    cpu_net = net.with_constants_on("cpu")
    machine = Machine(torch.device("cpu"), bf16)
    preprocess = preprocess_for(cpu_net, machine.device)
    trainer = Trainer(cpu_net, preprocess, train, AugmentConfig(), 1, machine, parts_at_once=parts_at_once)
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(train.batch_size, len(net.mean), net.image_size, net.image_size, dtype=torch.uint8)
        indices = torch.empty(train.batch_size, dtype=torch.long)
        shard = Shard(ImageSet(images, indices), indices)
        fit = _with_empty_tensors(fit)
        batch = _empty_batch(net, train, 0 if fit.replay is None else fit.replay.replays)
        tracker = AllocationTracker()
        tracker.ignore([*_fit_tensors(fit), images, *batch.tensors()])
        with tracker:
            group = [ClientFit(fit, shard, RngContext(0, 1, 0))]
            inputs = stack_inputs(group, cpu_net, train.mask_ratio)
            copied = tracker.live
            cohort = Cohort(trainer.engine, group, inputs)
            cohort.restart(None, train.lr)
            ready = tracker.live
            for _ in range(1 if fit.memory is None else 2):
                cohort.take_step(batch, torch.empty((), dtype=torch.long), refresh=True, restore=True, all_active=True)
    return copied, ready, tracker.peak


def _shapes(fit: Fit) -> tuple[object, ...]:
    """Return the shapes and types of a training's tensors, by group and name."""
    groups: list[Tensors] = [
        fit.weights,
        fit.constants,
        fit.observer_state,
        fit.reference_weights or {},
        fit.companion_weights or {},
        {} if fit.memory is None else fit.memory.tensors(),
        {} if fit.replay is None else fit.replay.tensors(),
    ]
    replays = None if fit.replay is None else fit.replay.replays
    return replays, *({name: (tensor.shape, tensor.dtype) for name, tensor in group.items()} for group in groups)


def _fit_tensors(fit: Fit) -> list[Tensor]:
    memory = () if fit.memory is None else fit.memory.tensors().values()
    replay = () if fit.replay is None else fit.replay.tensors().values()
    return [
        *fit.weights.values(),
        *fit.constants.values(),
        *fit.observer_state.values(),
        *(fit.reference_weights or {}).values(),
        *(fit.companion_weights or {}).values(),
        *memory,
        *replay,
    ]


def _with_empty_tensors(fit: Fit) -> Fit:
    """Return the same training on new empty tensors; a tensor that is used twice stays one tensor."""
    replacements: dict[int, Tensor] = {}

    def empty_like(tensors: Tensors) -> dict[str, Tensor]:
        return {
            name: replacements.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
            for name, tensor in tensors.items()
        }

    stored, replay = fit.memory, fit.replay
    return replace(
        fit,
        weights=empty_like(fit.weights),
        constants=empty_like(fit.constants),
        observer_state=empty_like(fit.observer_state),
        reference_weights=None if fit.reference_weights is None else empty_like(fit.reference_weights),
        companion_weights=None if fit.companion_weights is None else empty_like(fit.companion_weights),
        memory=None if stored is None else stored.with_tensors(empty_like(stored.tensors())),
        replay=None if replay is None else replay.with_tensors(empty_like(replay.tensors())),
    )


def _empty_batch(net: Net, train: TrainConfig, replays: int) -> Batch:
    kept = net.num_kept_patches(train.mask_ratio)

    def empty(*shape: int) -> Batch:
        indices = torch.empty(shape, dtype=torch.long)
        return Batch(
            image_indices=indices,
            shard_positions=indices,
            sample_weight=torch.empty(shape),
            active=torch.empty(()),
            keep=torch.empty(*shape, kept, dtype=torch.long) if train.mask_ratio else None,
        )

    batch = empty(train.batch_size)
    return replace(batch, replay=empty(train.batch_size, replays)) if replays else batch


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors; each tensor counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct)
