"""Peak memory of a client's training, without training: every allocation of a training step is tracked.

The trainer's own step runs on fake tensors, which have shapes, types and lifetimes, but no values. The peak is what a
device needs: the weights, a copy of the trainable ones, their gradients, the optimiser's state, the activations saved
for the backward pass, and intermediate results. Frozen layers and masked images save fewer activations. Every stored
task that needs a reference gradient adds one gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.costs.cost_model import DryRun
from vitfleet.costs.flops import empty_batch, stored_side
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.client_stack import ClientStack
from vitfleet.training.stacking.inputs import ClientTraining, RngContext, stack_inputs, trained_tensors
from vitfleet.training.step import kind_of_step
from vitfleet.training.trainer import Trainer, preprocess_for


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes at the peak of a training step."""

    # The received model, the state kept from earlier rounds, stored samples, and a copy of the trainable weights
    weights: int
    gradients: int  # of the trainable weights
    optimizer: int  # two values per trainable weight for AdamW, one for SGD with momentum
    activations: int  # everything else at the peak: saved activations, reference gradients, and intermediate results

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
        self._storages[key] = weakref.ref(storage, partial(self._release, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int, _: Any) -> None:
        self._storages.pop(key, None)
        self.live -= size


@dataclass(frozen=True)
class TrackedStep:
    """What the allocations of a training step depend on, and the tracked bytes."""

    # The model's and the training's shapes, the step and the settings, compared by value
    conditions: tuple[object, ...]
    # Bytes after the inputs were copied, before the first step, and at the peak
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
        training_memory(net, training, train, bf16, dry_run_result.held_tensors, parts_at_once, known_steps)
        for training in (*dry_run_result.trainings, *dry_run_result.recordings)
    ]
    return max(usages, key=lambda usage: usage.total)


def training_memory(
    net: Net,
    training: LocalTraining,
    train: TrainConfig,
    bf16: bool = False,
    held_tensors: Iterable[Tensor] = (),
    parts_at_once: int = 1,
    known_steps: list[TrackedStep] | None = None,
) -> MemoryUsage:
    """Return the bytes at the peak of a training; the values of the model's weights are not used.

    The client holds ``held_tensors`` in addition: received tensors, and state kept from earlier rounds. The gradients
    of ``parts_at_once`` parts of a set are computed together; 1 needs the least memory. A step of the same conditions
    as one of ``known_steps`` is not tracked again; a new one is added.
    """
    train = training.train or train
    given = {id(tensor): tensor for tensor in [*held_tensors, *_tensors(training)]}  # each tensor counts once
    received = sum(tensor.nbytes for tensor in given.values())
    # Weights of two models may be the same tensor before the training. Their gradients are not.
    trained = sum(training.weights[name].nbytes for name in trained_tensors(net, training.trainable))
    known = [] if known_steps is None else known_steps
    conditions = (net.part_paths, _shapes(training), training.trainable, training.step, train, bf16, parts_at_once)
    step = next((step for step in known if step.conditions == conditions), None)
    if step is None:
        step = TrackedStep(conditions, *_track_step(net, training, train, bf16, parts_at_once))
        known.append(step)
    return MemoryUsage(
        received + step.copied, trained, step.ready - step.copied, max(0, step.peak - step.ready - trained)
    )


def _track_step(
    net: Net, training: LocalTraining, train: TrainConfig, bf16: bool, parts_at_once: int
) -> tuple[int, int, int]:
    """Track a step of the trainer; return the bytes after the inputs were copied, before the step, and at the peak."""
    cpu_net = net.with_constants_on("cpu")
    machine = ExecutionSettings(torch.device("cpu"), bf16)
    preprocess = preprocess_for(cpu_net, machine.device)
    trainer = Trainer(cpu_net, preprocess, train, AugmentConfig(), 1, machine, parts_at_once=parts_at_once)
    assert cpu_net.stacking  # a module is tried here: below it could not be copied
    with FakeTensorMode(allow_non_fake_inputs=True):
        side = stored_side(net, training)
        images = torch.empty(train.batch_size, len(net.mean), side, side, dtype=torch.uint8)
        indices = torch.empty(train.batch_size, dtype=torch.long)
        shard = Shard(ImageSet(images, indices), indices)
        training = _with_empty_tensors(training)
        batch = empty_batch(net, training, train, train.batch_size, "cpu")
        tracker = AllocationTracker()
        tracker.ignore([*_tensors(training), images, *batch.tensors()])
        with tracker:
            group = [ClientTraining(training, shard, RngContext(0, 1, 0))]
            inputs = stack_inputs(group, machine.device)
            copied = tracker.live
            stack = ClientStack(trainer.engine_for(training), group, inputs)
            stack.restart(None, train.lr)
            ready = tracker.live
            kind, epoch = kind_of_step(training.step, 0), torch.empty((), dtype=torch.long)
            stack.take_step(batch, epoch, kind, all_active=True)
    return copied, ready, tracker.peak


def _shapes(training: LocalTraining) -> tuple[object, ...]:
    """Return the shapes and types of a training's tensors, by group and name."""
    draws = {name: (samples.draws, samples.sizes) for name, samples in training.sets.items()}
    groups = training.tensor_groups().items()
    part = None if training.views is None else training.views.part
    return (
        draws,
        part,
        *(
            (group, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
            for group, tensors in groups
        ),
    )


def _tensors(training: LocalTraining) -> list[Tensor]:
    """Return the tensors that a training is given; of scratch tensors only the shapes are."""
    groups = training.tensor_groups()
    return [tensor for name, tensors in groups.items() if name != "scratch" for tensor in tensors.values()]


def _with_empty_tensors(training: LocalTraining) -> LocalTraining:
    """Return the same training on new empty tensors; a tensor that is used twice stays one tensor."""
    replacements: dict[int, Tensor] = {}

    def empty_like(tensors: Tensors) -> dict[str, Tensor]:
        return {
            name: replacements.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
            for name, tensor in tensors.items()
        }

    groups = training.tensor_groups()
    empty = {name: tensors if name == "scratch" else empty_like(tensors) for name, tensors in groups.items()}
    return training.with_tensor_groups(empty)
