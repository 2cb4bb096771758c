"""One or several clients in training: their tensors, and one step.

A step is a sequence of tensor operations on tensors that stay where they are, without a look at their values. So it can
be run as it is, or captured once in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from vitfleet.data.batches import Batch
from vitfleet.data.features import FeatureSet
from vitfleet.message import Tensors
from vitfleet.packing import pack_tensors
from vitfleet.train.cohort_inputs import ClientFit, CohortInputs
from vitfleet.train.engine import StepEngine
from vitfleet.train.objective import FitResult, ReferenceGradients, Step, mask_other_tasks
from vitfleet.train.optim import Optimizer
from vitfleet.train.stack import lift, unpad

SCORED_AT_ONCE = 256  # images of a client whose loss is measured in one batch


class Cohort:
    """Clients that take their steps together.

    Parameters
    ----------
    group
        One or several clients with the same objective; with several, every tensor of theirs has a leading axis.
    """

    def __init__(self, engine: StepEngine, group: Sequence[ClientFit], given: CohortInputs) -> None:
        self.engine = engine
        self.clients = len(group)
        self.many = self.clients > 1
        self.objective = group[0].fit.objective
        self.images = group[0].shard.images
        self.features: FeatureSet | None = group[0].fit.features
        self.trainable = engine.net.anatomy.trainable(self.objective.trainable)
        self._take(given)
        self.optimizer = Optimizer(
            engine.config, self.leaves, self.clients if self.many else None, engine.machine.kernels
        )
        device = engine.machine.device
        shape = (self.clients,) if self.many else ()
        transform = self.objective.transform
        self.counted = {name: torch.zeros(shape, device=device) for name in (transform.counts if transform else ())}
        self.loss = torch.zeros(shape, device=device)
        # Where a chooser has a choice: the parts it chose, until it chooses anew.
        selector, axis = self.objective.selector, 1 if self.many else 0
        k = selector.k if selector is not None and len(given.widths) > selector.k else 0
        self.chosen = {name: one.narrow(axis, 0, k).clone() for name, one in given.memory.tensors.items() if k}

    def _take(self, given: CohortInputs) -> None:
        self.given = given
        self.weights: Tensors = given.weights.tensors
        self.leaves = {name: given.weights.tensors[name].requires_grad_() for name in self.trainable}
        self.reference_weights = {name: one.requires_grad_() for name, one in given.reference_weights.tensors.items()}

    def first(self, count: int) -> Cohort:
        """Return the first so many of the clients as a cohort that works on the same tensors."""
        if count == self.clients:
            return self
        some = copy(self)
        some.clients = count
        some._take(self.given.first(count))
        some.optimizer = self.optimizer.first(count)
        some.counted = {name: one[:count] for name, one in self.counted.items()}
        some.loss = self.loss[:count]
        some.chosen = {name: one[:count] for name, one in self.chosen.items()}
        return some

    def restart(self, given: CohortInputs | None, rate: float) -> None:
        """Make ready for a training; with new tensors, in the places of the old ones."""
        if given is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.given.all(), given.all())
        self.optimizer.restart(rate)
        torch._foreach_zero_([self.loss, *self.counted.values()])

    def take_step(self, batch: Batch, epoch: Tensor, refresh: bool, all_active: bool) -> None:
        """Take one step.

        Parameters
        ----------
        refresh
            Whether to choose anew among the memory's parts.
        all_active
            Whether all of the clients have this step; else, who has it is looked up on the device.
        """
        objective, constants = self.objective, self.given.constants
        step = self._look(self.weights, self.leaves, batch, epoch)
        losses = lift(objective.loss, self.many, constants)(step)
        gradients = _gradients(losses, self.leaves)
        references = self._references(gradients, batch, epoch, refresh)
        with torch.no_grad():
            if objective.observer:
                see = lift(objective.observer, self.many, constants, 0, 0)
                observer_state = self.given.observer_state.tensors
                for name, seen in see(observer_state, gradients, step).items():
                    if (
                        seen.untyped_storage()._cdata != observer_state[name].untyped_storage()._cdata
                    ):  # not changed in place
                        observer_state[name].copy_(seen)
            applied: Tensors = gradients
            if objective.transform:
                turn = lift(self._turn, self.many, constants, 0, *((0, 0) if references else (None, None)))
                rows = (references.gradients, references.present) if references else (None, None)
                applied, counts = turn(gradients, *rows, step)
                for name, count in counts.items():
                    self.counted[name] += count * batch.active
            if self.engine.config.clip is not None:
                applied = _clipped(applied, self.engine.config.clip, self.many)
            self.optimizer.step(applied, None if all_active else batch.active)
            self.loss += losses.detach() * (batch.sample_weight > 0).sum(dim=-1)

    def results(self, group: Sequence[ClientFit], steps: Sequence[int], again: bool) -> list[FitResult]:
        """Return what came of it for each client; the tensors are the caller's own.

        Parameters
        ----------
        again
            Whether others will train in the same tensors.
        """
        losses = self._scores(group) if group[0].fit.score_samples else None

        def out(tensors: Tensors) -> list[dict[str, Tensor]]:
            """Give each client what is its own; in one piece, which can be kept and moved as it is."""
            tensors = {name: one.detach() for name, one in tensors.items()}
            if not self.many:
                return [pack_tensors(tensors) if again else tensors]
            rows = {name: one.unbind() for name, one in tensors.items()}
            return [pack_tensors({name: row[place] for name, row in rows.items()}) for place in range(self.clients)]

        after = out({name: self.weights[name] for name in self.objective.trainable})
        observer_state, counted = out(self.given.observer_state.tensors), out(self.counted)
        total = self.loss.clone().reshape(self.clients)
        found: list[FitResult] = []
        for place, one in enumerate(group):
            samples = len(one)
            observed = {name: unpad(observer_state[place][name], like) for name, like in one.fit.observer_state.items()}
            loss = total[place] / max(1, samples * one.fit.epochs)
            scored = loss.new_empty(0) if losses is None else losses[place]
            found.append(FitResult(after[place], loss, samples, steps[place], observed | counted[place], scored))
        return found

    def _look(self, weights: Tensors, leaves: Tensors, batch: Batch, epoch: Tensor) -> Step:
        """Run the model on a step's batch."""
        share = batch.sample_weight
        features: Tensor | None = None
        split, depth = self.objective.split, self.objective.depth
        if self.features is not None:
            assert split is not None
            features, labels = self.features.take(batch.image_indices)
            share = self.features.sample_weights(batch.image_indices, batch.sample_weight)
            logits = self.engine.forward_features(weights, features, split)
        else:
            images, labels = self.images.images[batch.image_indices], self.images.labels[batch.image_indices]
            logits, features = self.engine.forward(weights, images, batch, split, depth)
        logits = mask_other_tasks(logits, labels, self.engine.class_tasks)
        constants = self.given.constants.tensors
        return Step(logits, labels, share, leaves, constants, batch.shard_positions, epoch, features)

    def _turn(self, gradients: Tensors, rows: Tensors | None, present: Tensor | None, step: Step) -> Any:
        assert self.objective.transform is not None
        references = None if rows is None or present is None else ReferenceGradients(rows, present)
        return self.objective.transform(gradients, references, step)

    def _references(self, gradients: Tensors, batch: Batch, epoch: Tensor, refresh: bool) -> ReferenceGradients | None:
        found: list[ReferenceGradients] = []
        memory = self.given.memory.tensors
        if memory and memory["sample_weight"].shape[-2]:
            found.append(self._recall(gradients, refresh))
        if self.reference_weights:
            step = self._look({**self.weights, **self.reference_weights}, self.reference_weights, batch, epoch)
            losses = lift(self.objective.loss, self.many, self.given.constants)(step)
            axis = 1 if self.many else 0
            rows = {name: one.unsqueeze(axis) for name, one in _gradients(losses, self.reference_weights).items()}
            found.append(ReferenceGradients(rows, torch.ones_like(self.loss, dtype=torch.bool).unsqueeze(-1)))
        if len(found) < 2:
            return found[0] if found else None
        axis = 1 if self.many else 0
        together = _put_together([one.gradients for one in found], axis)
        return ReferenceGradients(together, torch.cat([one.present for one in found], dim=-1))

    def _recall(self, gradients: Tensors, refresh: bool) -> ReferenceGradients:
        """Return the gradients of the memory's parts, or of the chosen ones, at the current weights."""
        selector, memory = self.objective.selector, self.given.memory.tensors
        widths = self.given.widths
        if selector is None or len(widths) <= selector.k:
            return self._remember(memory, widths)
        if not refresh:
            return self._remember(self.chosen, (widths[0],) * selector.k)  # any of them may be the widest
        everything = self._remember(memory, widths)

        def choose(own: Tensors, rows: Tensors, present: Tensor) -> Tensor:
            return selector(own, ReferenceGradients(rows, present))

        choice = torch.vmap(choose) if self.many else choose
        with torch.no_grad():
            places = choice(gradients, everything.gradients, everything.present)
            take = torch.vmap(torch.index_select, in_dims=(0, None, 0)) if self.many else torch.index_select
            chosen = {name: take(one, 0, places) for name, one in memory.items()}
            torch._foreach_copy_(list(self.chosen.values()), list(chosen.values()))
            rows = {name: take(one, 0, places) for name, one in everything.gradients.items()}
            return ReferenceGradients(rows, take(everything.present, 0, places))

    def _remember(self, memory: Tensors, widths: tuple[int, ...]) -> ReferenceGradients:
        """Return the gradient of each part of a memory; several parts of a width at once, on the axis of clients."""
        axis = 1 if self.many else 0
        most = self.engine.parts_at_once if self.engine.net.stackable else 1
        rows: list[dict[str, Tensor]] = []
        start = 0
        while start < len(widths):
            width = widths[start]
            alike = next((at for at in range(start, len(widths)) if widths[at] != width), len(widths))
            count = min(most, alike - start)
            some = {name: one.narrow(axis, start, count).narrow(axis + 1, 0, width) for name, one in memory.items()}
            rows.append(self._gradients_of_parts(some, axis))
            start += count
        # Of one piece, there is nothing to put together: they are hundreds of megabytes.
        together = rows[0] if len(rows) == 1 else _put_together(rows, axis)
        return ReferenceGradients(together, memory["sample_weight"].sum(dim=-1) > 0)

    def _gradients_of_parts(self, memory: Tensors, axis: int) -> dict[str, Tensor]:
        parts = memory["sample_weight"].shape[axis]
        if parts == 1:
            one = {name: tensor.select(axis, 0) for name, tensor in memory.items()}
            return {name: row.unsqueeze(axis) for name, row in self._part(self.weights, self.leaves, one).items()}

        def repeat(name: str, tensor: Tensor) -> Tensor:
            """Give every part the weights of its client; what all clients share, all parts share."""
            if self.many and name not in self.given.weights.stacked:
                return tensor
            spread = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], parts, *tensor.shape[axis:])
            return spread.flatten(0, 1) if self.many else spread

        leaves = {name: repeat(name, leaf.detach()).contiguous().requires_grad_() for name, leaf in self.leaves.items()}
        frozen = {
            name: repeat(name, one) if self.many else one for name, one in self.weights.items() if name not in leaves
        }
        flat = {name: tensor.flatten(0, 1) if self.many else tensor for name, tensor in memory.items()}
        found = self._part({**frozen, **leaves}, leaves, flat)
        return {
            name: row.reshape(*self.leaves[name].shape[:axis], parts, *row.shape[1:]) for name, row in found.items()
        }

    def _part(self, weights: Tensors, leaves: dict[str, Tensor], memory: Tensors) -> dict[str, Tensor]:
        logits, _ = self.engine.forward(weights, memory["images"], None, None, self.objective.depth)
        losses = self.engine.sample_losses(logits, memory["labels"])
        return _gradients((losses * memory["sample_weight"]).sum(dim=-1), leaves)

    @torch.no_grad()
    def _scores(self, group: Sequence[ClientFit]) -> list[Tensor]:
        """Return every sample's loss under the trained weights, for each client."""
        self.engine.net.module.eval()
        index = torch.nn.utils.rnn.pad_sequence([one.shard.index for one in group], batch_first=True)
        index = index if self.many else index[0]
        parts = []
        for some in torch.split(index, SCORED_AT_ONCE, dim=-1):
            logits, _ = self.engine.forward(self.weights, self.images.images[some], None, None, self.objective.depth)
            parts.append(self.engine.sample_losses(logits, self.images.labels[some]))
        losses = torch.cat(parts, dim=-1) if parts else self.loss.new_empty(index.shape)
        rows = losses if self.many else losses[None]
        return [row[: len(one.shard)].clone() for row, one in zip(rows, group, strict=True)]


def _gradients(losses: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of each client's own loss: no client's loss depends on another's weights."""
    found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    # A fused optimiser goes through memory as it lies, and batched products leave theirs transposed.
    return {name: one.contiguous() for name, one in zip(leaves, found, strict=True)}


def _put_together(rows: Sequence[Tensors], axis: int) -> dict[str, Tensor]:
    return {name: torch.cat([row[name] for row in rows], dim=axis) for name in rows[0]}


def _clipped(gradients: Tensors, limit: float, many: bool) -> dict[str, Tensor]:
    """Scale each client's gradient down to a norm, as `torch.nn.utils.clip_grad_norm_` does for one."""

    def clip(own: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in own.values()]))
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        return {name: one * factor for name, one in own.items()}

    lifted: Callable[[dict[str, Tensor]], dict[str, Tensor]] = torch.vmap(clip) if many else clip
    return lifted(dict(gradients))
