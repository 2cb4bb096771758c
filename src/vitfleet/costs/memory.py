"""How much memory a client's training needs, without training: every allocation of one step is followed.

The trainer's own step is played on tensors that have shapes, types and lifetimes, but no numbers. What lives at its
worst moment is what a device must have: weights, those that train once more, their gradients, the optimiser's state,
and what the forward pass saves for the backward pass with the intermediate results of the moment. A frozen layer saves
less, a masked image makes less to save; every stored task whose gradient is wanted has one of its own.
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
from vitfleet.costs.flops import DryRun, with_constants_on
from vitfleet.data.batches import Batch
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.cohort import Cohort
from vitfleet.training.cohort_inputs import ClientFit, RngContext, stack_inputs
from vitfleet.training.machine import Machine
from vitfleet.training.objective import EpisodicMemory, Fit
from vitfleet.training.trainer import Trainer, preprocess_for


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes at the worst moment of a training step.

    Attributes
    ----------
    weights
        The model as it was received (and kept from earlier rounds), stored samples, and a copy of what trains.
    gradients
        Of what trains.
    optimizer
        Its state: two numbers a trained weight for AdamW, one for SGD with momentum.
    activations
        All else that lives then: what the backward pass needs, reference gradients, and intermediate results.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every tensor that comes into being, until it is let go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        made = func(*args, **(kwargs or {}))
        for one in tree_iter(made):
            if isinstance(one, torch.Tensor):
                self._note(one.untyped_storage())
        return made

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out what is counted elsewhere, and with it every view of it."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, self._forget(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self._known.pop(key, None)
            self.live -= size

        return forget


def round_memory(
    net: Net, dry_run_result: DryRun, train: TrainConfig, bf16: bool = False, at_once: int = 1
) -> MemoryUsage:
    """Return the memory that the largest of a client's trainings in a round needs; see :func:`training_memory`."""
    found = [training_memory(net, fit, train, bf16, dry_run_result.held, at_once) for fit in dry_run_result.fits]
    return max(found, key=lambda one: one.total)


def training_memory(
    net: Net, fit: Fit, train: TrainConfig, bf16: bool = False, held: Iterable[Tensor] = (), at_once: int = 1
) -> MemoryUsage:
    """Follow two steps of a training, as the trainer takes them: in the second, the gradients of the first are there.

    Parameters
    ----------
    net
        The architecture; its own weights are not looked at.
    held
        What the client has in its hands besides: what it was sent, and what it had kept.
    at_once
        Parts of a memory whose gradients are computed together; one takes the least memory.
    """
    trains = net.anatomy.trainable(fit.objective.trainable)
    received = _bytes([*held, *_given(fit)])
    trained = _bytes([fit.weights[name] for name in trains])
    bare = with_constants_on(net, "cpu")
    bare.module.train()
    machine = Machine(torch.device("cpu"), bf16)
    trainer = Trainer(
        bare, preprocess_for(bare, machine.device), train, AugmentConfig(), 1, machine, parts_at_once=at_once
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(train.batch_size, len(net.mean), net.image_size, net.image_size, dtype=torch.uint8)
        places = torch.empty(train.batch_size, dtype=torch.long)
        shard = Shard(ImageSet(images, places), places)
        fit = _without_numbers(fit)
        batch = _batch(net, train)
        ledger = AllocationTracker()
        ledger.ignore([*_given(fit), images, *batch.tensors()])
        with ledger:
            group = [ClientFit(fit, shard, RngContext(0, 1, 0))]
            given = stack_inputs(group, bare)
            copied = ledger.live
            cohort = Cohort(trainer.engine, group, given)
            cohort.restart(None, train.lr)
            ready = ledger.live
            for _ in range(2):
                cohort.take_step(batch, torch.empty((), dtype=torch.long), refresh=True, all_active=True)
    return MemoryUsage(received + copied, trained, ready - copied, max(0, ledger.peak - ready - trained))


def _given(fit: Fit) -> list[Tensor]:
    memory = () if fit.memory is None else fit.memory.tensors().values()
    return [
        *fit.weights.values(),
        *fit.constants.values(),
        *fit.observer_state.values(),
        *(fit.reference_weights or {}).values(),
        *memory,
    ]


def _without_numbers(fit: Fit) -> Fit:
    """Return the same training of tensors that have no numbers; what is one tensor stays one."""
    made: dict[int, Tensor] = {}

    def blank(tensors: Tensors) -> dict[str, Tensor]:
        return {
            name: made.setdefault(id(one), torch.empty(one.shape, dtype=one.dtype)) for name, one in tensors.items()
        }

    stored = fit.memory
    return replace(
        fit,
        weights=blank(fit.weights),
        constants=blank(fit.constants),
        observer_state=blank(fit.observer_state),
        reference_weights=None if fit.reference_weights is None else blank(fit.reference_weights),
        memory=None if stored is None else EpisodicMemory(**blank(stored.tensors()), sizes=stored.sizes),
    )


def _batch(net: Net, train: TrainConfig) -> Batch:
    places = torch.empty(train.batch_size, dtype=torch.long)
    keep = (
        torch.empty(train.batch_size, net.num_kept_patches(train.mask_ratio), dtype=torch.long)
        if train.mask_ratio
        else None
    )
    return Batch(
        image_indices=places,
        shard_positions=places,
        sample_weight=torch.empty(train.batch_size),
        active=torch.empty(()),
        shift=None,
        flip=None,
        brightness=None,
        keep=keep,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum(one.numel() * one.element_size() for one in {id(one): one for one in tensors}.values())
