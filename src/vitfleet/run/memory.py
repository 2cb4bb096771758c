"""How much memory a client's training needs, without training: every allocation of one step is followed.

One step is played on tensors that have shapes, types and lifetimes, but no numbers. What lives at its worst moment is
what a device must have: weights, those that train once more, their gradients, the optimiser's state, and what the
forward pass saves for the backward pass with the intermediate results of the moment. A frozen layer saves less, a
masked image makes less to save.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vitfleet.config.schema import TrainConfig
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.run.costs import forward, with_constants_on
from vitfleet.train.objective import Fit, Step


@dataclass(frozen=True)
class Memory:
    """Bytes at the worst moment of a training step.

    Attributes
    ----------
    weights
        The model as it was received, and a copy of what trains of it.
    gradients
        Of what trains.
    optimizer
        Its state: two numbers a trained weight for AdamW, one for SGD with momentum.
    activations
        All else that lives then: what the backward pass needs, and intermediate results.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
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

    def ignore(self, tensors: Tensors) -> None:
        """Leave out what is counted elsewhere, and with it every view of it."""
        for tensor in tensors.values():
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


def training_memory(net: Net, fit: Fit, train: TrainConfig, bf16: bool = False, samples: int | None = None) -> Memory:
    """Follow one step of a training.

    Parameters
    ----------
    net
        The architecture; its own weights are not looked at.
    samples
        The client's: a step has no more, even where a batch would.
    """
    batch = train.batch_size if samples is None else max(1, min(train.batch_size, samples))
    objective = fit.objective
    trains = net.anatomy.trainable(objective.trains)
    received = sum(_size(tensor) for tensor in fit.weights.values())
    trained = sum(_size(fit.weights[name]) for name in trains)
    bare = with_constants_on(net, "cpu")
    bare.module.train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in fit.weights.items()}
        leaves = {name: torch.empty(fit.weights[name].shape, requires_grad=True) for name in trains}
        # An anchor is often the received weights themselves: then it costs nothing.
        constants = {
            name: weights[name] if fit.weights.get(name) is one else torch.empty(one.shape, dtype=one.dtype)
            for name, one in fit.constants.items()
        }
        extra = sum(_size(one) for name, one in fit.constants.items() if fit.weights.get(name) is not one)
        fit = replace(fit, constants=constants)
        ledger = Ledger()
        for given in (weights, leaves, constants):
            ledger.ignore(given)
        with ledger:
            held = [torch.empty(one.shape, dtype=one.dtype) for one in fit.sums.values()]  # the observer's
            # Twice: in the second step the gradients of the first are still there.
            gradients: list[torch.Tensor] = []
            for _ in range(2):
                gradients = _step(bare, fit, {**weights, **leaves}, leaves, train, batch, bf16)
            del gradients, held
    state = 2 if train.optimizer == "adamw" else 1
    return Memory(received + extra + trained, trained, state * trained, max(0, ledger.peak - trained))


def _step(
    net: Net, fit: Fit, weights: Tensors, leaves: Tensors, train: TrainConfig, batch: int, bf16: bool
) -> list[torch.Tensor]:
    """Play forward and backward pass; return the gradients."""
    images = torch.empty(batch, len(net.mean), net.side, net.side)
    kept = net.kept(train.mask_ratio)
    keep = torch.empty(batch, kept, dtype=torch.long) if train.mask_ratio else None
    labels = torch.empty(batch, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = forward(net, fit.objective, weights, images, keep)
    step = Step(logits, labels, torch.empty(batch), leaves, fit.constants, torch.empty(batch), torch.empty(()))
    loss = fit.objective.loss(step)
    return list(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
