"""One or several clients in training: their tensors, and one optimisation step.

A step is a sequence of operations on tensors that keep their addresses, and the host never reads their values. It can
therefore run eagerly, or be captured once in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from vitfleet.data.batches import Batch
from vitfleet.data.features import dequantize
from vitfleet.message import Tensors
from vitfleet.models.batch_norm import statistics_names
from vitfleet.training.cohort_inputs import ClientFit, CohortInputs
from vitfleet.training.composition import composition_of
from vitfleet.training.engine import StepEngine
from vitfleet.training.game import SequentialGame, game_gradients
from vitfleet.training.gradients import client_gradients, clip_gradients
from vitfleet.training.memory_gradients import MemoryGradients, concatenate
from vitfleet.training.objective import ReferenceGradients, ReplayedSamples, SampleObserver, Step, mask_other_tasks
from vitfleet.training.optim import Optimizer
from vitfleet.training.sample_gradients import SampleGradients, sample_gradients
from vitfleet.training.stack import lift


class Cohort:
    """Clients that take their steps together.

    Parameters
    ----------
    group
        One or several clients with the same objective. With several clients, tensors have a leading axis of clients.
    inputs
        The tensors of the group. The weights among them are trained in place.
    """

    def __init__(self, engine: StepEngine, group: Sequence[ClientFit], inputs: CohortInputs) -> None:
        self.engine = engine
        self.num_clients = len(group)
        self.stacked = self.num_clients > 1
        self.objective = group[0].fit.objective
        self.images = group[0].shard.images
        self.batch_norms = engine.net.trained_batch_norms(self.objective.trainable)
        self._bind(inputs)
        self.memory_gradients = MemoryGradients.create(engine, self.objective, inputs, self.leaves, self.stacked)
        num_stacked = self.num_clients if self.stacked else None
        self.optimizer = Optimizer(engine.config, self.leaves, num_stacked, engine.machine.kernels)
        self.companion_optimizer = (
            Optimizer(engine.config, self.companion, num_stacked, engine.machine.kernels) if self.companion else None
        )
        shape = (self.num_clients,) if self.stacked else ()
        device = engine.machine.device
        counting = [rule for rule in (self.objective.transform, self.objective.companion) if rule is not None]
        self.counts = {name: torch.zeros(shape, device=device) for rule in counting for name in rule.counts}
        self.loss_sum = torch.zeros(shape, device=device)
        self.finite_steps = torch.zeros(shape, device=device)

    def _bind(self, inputs: CohortInputs) -> None:
        self.inputs = inputs
        trainable = self.engine.net.anatomy.trainable(self.objective.trainable)
        self.leaves = {name: inputs.weights.tensors[name].requires_grad_() for name in trainable}
        for tensor in inputs.reference_weights.tensors.values():
            tensor.requires_grad_()
        companion = inputs.companion_weights.tensors
        self.companion = {name: companion[name] for name in trainable} if companion else {}

    @property
    def weights(self) -> Tensors:
        """All weights of the fits, those that train and those that do not."""
        return self.inputs.weights.tensors

    def model_weights(self, weights: Tensors, trained: Tensors) -> Tensors:
        """Return the weights of the model; where the objective composes them, those composed of what trains."""
        composition = composition_of(self.objective.trainable)
        if composition is None:
            return weights
        constants = self.inputs.constants
        in_dims = dict.fromkeys(trained, 0), constants.in_dims
        compose = torch.vmap(composition, in_dims=in_dims) if self.stacked else composition
        composed: Tensors = compose(dict(trained), constants.tensors)
        of_model = {name: weights[name] for name in self.engine.net.anatomy.shapes if name in weights}
        return {**of_model, **composed}

    @property
    def num_bytes(self) -> int:
        """The memory of the clients' tensors: inputs, moments of the optimisers, and kept references."""
        optimizers = [self.optimizer] + ([] if self.companion_optimizer is None else [self.companion_optimizer])
        tensors = [
            *self.inputs.tensors(),
            *self.memory_gradients.selected.values(),
            *self.memory_gradients.restored.values(),
            *(tensor for optimizer in optimizers for moment in optimizer.moments for tensor in moment.values()),
        ]
        return sum(tensor.nbytes for tensor in tensors)

    def first(self, count: int) -> Cohort:
        """Return a cohort of the first ``count`` clients that works on the same memory."""
        if count == self.num_clients:
            return self
        part = copy(self)
        part.num_clients = count
        part._bind(self.inputs.first(count))
        part.memory_gradients = self.memory_gradients.first(count, part.inputs, part.leaves)
        part.optimizer = self.optimizer.first(count)
        part.companion_optimizer = None if self.companion_optimizer is None else self.companion_optimizer.first(count)
        part.counts = {name: tensor[:count] for name, tensor in self.counts.items()}
        part.loss_sum = self.loss_sum[:count]
        part.finite_steps = self.finite_steps[:count]
        return part

    def restart(self, inputs: CohortInputs | None, learning_rate: float) -> None:
        """Prepare a training; with new inputs, they are copied into the memory of the old ones."""
        if inputs is not None:
            self.inputs.copy_from(inputs)
        self.optimizer.restart(learning_rate)
        if self.companion_optimizer is not None:
            self.companion_optimizer.restart(learning_rate)
        torch._foreach_zero_([self.loss_sum, self.finite_steps, *self.counts.values()])

    def take_step(self, batch: Batch, epoch: Tensor, refresh: bool, restore: bool, all_active: bool) -> None:
        """Take one optimisation step.

        Parameters
        ----------
        epoch
            The number of the epoch, from 0, a scalar on the device.
        refresh
            Whether to select again among the memory's parts.
        restore
            Whether to compute the gradients of the memory again.
        all_active
            Whether all clients are known to have this step. If not, the batch says which have it, on the device.
        """
        if self.objective.features_only:
            self._observe_features(batch, epoch)
            return
        if isinstance(self.objective.observer, SampleObserver):
            self._observe_samples(batch, epoch)
            return
        step, losses, gradients = self._step_gradients(batch, epoch)
        of_memory = self.memory_gradients.compute(gradients, refresh, restore, self.images, batch)
        references = self._reference_gradients(of_memory, batch, epoch)
        # Before the step: the companion's loss may depend on the weights that train.
        companion_gradients = self._companion_gradients(step, batch, epoch)
        with torch.no_grad():
            self._observe(gradients, step)
            active = None if all_active else batch.active
            self.optimizer.step(self._clip(self._transform(gradients, references, step, batch)), active)
            if self.companion_optimizer is not None:
                self.companion_optimizer.step(self._clip(companion_gradients), active)
            self.loss_sum += losses.detach() * (batch.sample_weight > 0).sum(dim=-1)
            # A sum that is not finite stays so: what is counted are the steps before the first such loss.
            self.finite_steps += batch.active * self.loss_sum.isfinite()

    @torch.no_grad()
    def _observe_features(self, batch: Batch, epoch: Tensor) -> None:
        """Show the features at the split to the observer: there are no logits, no loss and no gradients."""
        split, indices = self.objective.split, batch.image_indices
        assert split is not None
        images, labels = self.images.images[indices], self.images.labels[indices]
        features = self.engine.features(self.weights, images, batch, split)
        logits = features.new_empty(*labels.shape, 0)
        constants, positions = self.inputs.constants.tensors, batch.shard_positions
        self._observe({}, Step(logits, labels, batch.sample_weight, {}, constants, positions, epoch, features))
        self.finite_steps += batch.active

    def _observe_samples(self, batch: Batch, epoch: Tensor) -> None:
        """Show the gradient of each sample to the observer; the weights stay as they are."""
        inputs, axis = self.inputs, 1 if self.stacked else 0
        if batch.sample_weight.shape[-1] > 1:
            of_samples = sample_gradients(
                self.engine, self.objective, inputs, self.leaves, self.stacked, self.images, batch, epoch
            )
        else:  # nothing to repeat
            step, losses, gradients = self._step_gradients(batch, epoch)
            rows = {name: gradient.unsqueeze(axis) for name, gradient in gradients.items()}
            of_samples = SampleGradients(step, losses.detach().unsqueeze(-1), rows)
        with torch.no_grad():
            self._observe(of_samples.gradients, of_samples.step)
            self.loss_sum += (of_samples.losses * (batch.sample_weight > 0)).sum(dim=-1)
            self.finite_steps += batch.active * self.loss_sum.isfinite()

    def _step_gradients(self, batch: Batch, epoch: Tensor) -> tuple[Step, Tensor, dict[str, Tensor]]:
        """Return the forward pass of the step, the loss of each client, and its gradient."""
        game = self.objective.loss
        if isinstance(game, SequentialGame) and batch.replay is not None:
            return self._play(game, batch, epoch)
        step = self._forward(self.weights, self.leaves, batch, epoch)
        losses = lift(self.objective.loss, self.stacked, self.inputs.constants)(step)
        return step, losses, client_gradients(losses, self.leaves)

    def _play(self, game: SequentialGame, batch: Batch, epoch: Tensor) -> tuple[Step, Tensor, dict[str, Tensor]]:
        """Return the same where the loss is a game on the replayed samples."""
        replay = batch.flat_replay(1 if self.stacked else 0)
        assert replay is not None
        stored = self._stored_samples(replay)
        engine, images = self.engine, stored["images"]

        def memory_loss(leaves: Tensors, perturbation: Tensor) -> Tensor:
            weights = self.model_weights({**self.weights, **leaves}, leaves)
            depth = self.objective.depth
            outputs, _ = engine.forward(weights, images, replay, None, depth, perturbation=perturbation)
            logits, auxiliary = engine.net.split_outputs(outputs)
            labels, weight, positions = stored["labels"], replay.sample_weight, replay.shard_positions
            logits = mask_other_tasks(logits, labels, engine.class_tasks)
            constants = self.inputs.constants
            step = Step(logits, labels, weight, leaves, constants.tensors, positions, epoch, auxiliary=auxiliary)
            losses: Tensor = lift(game.loss, self.stacked, constants)(step)
            return losses

        step = self._forward(self.weights, self.leaves, replace(batch, replay=None), epoch)
        new = lift(game.loss, self.stacked, self.inputs.constants)(step)
        size, dtype = engine.preprocess.image_size, engine.preprocess.mean.dtype
        origin = torch.zeros(*images.shape[:-2], size, size, dtype=dtype, device=images.device)
        return step, *game_gradients(game, new, memory_loss, self.leaves, origin)

    def _stored_samples(self, replay: Batch) -> dict[str, Tensor]:
        """Return the tensors of the stored samples that are replayed, one row per sample."""
        buffer = self.inputs.replay.tensors
        return {name: _rows(tensor, replay.image_indices, self.stacked) for name, tensor in buffer.items()}

    def _clip(self, gradients: Tensors) -> Tensors:
        max_norm = self.engine.config.max_grad_norm
        return gradients if max_norm is None else clip_gradients(gradients, max_norm, self.stacked)

    def _forward(self, weights: Tensors, leaves: Tensors, batch: Batch, epoch: Tensor) -> Step:
        """Run the model on the batch of a step."""
        weights = self.model_weights(weights, leaves)
        sample_weight, indices = batch.sample_weight, batch.image_indices
        features: Tensor | None = None
        split, depth = self.objective.split, self.objective.depth
        if batch.features is not None:
            assert split is not None
            assert batch.labels is not None
            features, labels = dequantize(batch.features, batch.scales), batch.labels.long()
            outputs = self.engine.forward_features(weights, features, batch.keep, split)
        elif batch.replay is not None:
            return self._forward_with_replay(weights, leaves, batch, epoch)
        else:
            images, labels = self.images.images[indices], self.images.labels[indices]
            outputs, features = self.engine.forward(weights, images, batch, split, depth, batch_norms=self.batch_norms)
        logits, auxiliary = self.engine.net.split_outputs(outputs)
        logits = mask_other_tasks(logits, labels, self.engine.class_tasks)
        constants, positions = self.inputs.constants.tensors, batch.shard_positions
        return Step(logits, labels, sample_weight, leaves, constants, positions, epoch, features, auxiliary=auxiliary)

    def _forward_with_replay(self, weights: Tensors, leaves: Tensors, batch: Batch, epoch: Tensor) -> Step:
        """Run the model on the batch of a step and on the stored samples that it replays, in one forward pass."""
        axis, objective, indices = 1 if self.stacked else 0, self.objective, batch.image_indices
        replay = batch.flat_replay(axis)
        assert replay is not None
        stored = self._stored_samples(replay)
        images = torch.cat([self.images.images[indices], stored.pop("images")], dim=axis)
        labels = torch.cat([self.images.labels[indices], stored.pop("labels")], dim=axis)
        both = batch.append(replay, axis)
        outputs, features = self.engine.forward(
            weights, images, both, objective.split, objective.depth, batch_norms=self.batch_norms
        )
        logits, auxiliary = self.engine.net.split_outputs(outputs)
        logits = mask_other_tasks(logits, labels, self.engine.class_tasks)
        own, replays = indices.shape[axis], replay.image_indices.shape[axis]
        replayed = ReplayedSamples(
            logits.narrow(axis, own, replays), labels.narrow(axis, own, replays), replay.sample_weight, stored
        )
        return Step(
            logits.narrow(axis, 0, own),
            labels.narrow(axis, 0, own),
            batch.sample_weight,
            leaves,
            self.inputs.constants.tensors,
            batch.shard_positions,
            epoch,
            None if features is None else features.narrow(axis, 0, own),
            replayed,
            auxiliary,
        )

    def _reference_gradients(
        self, of_memory: ReferenceGradients | None, batch: Batch, epoch: Tensor
    ) -> ReferenceGradients | None:
        """Return the gradients of the memory, then the gradient at the reference weights; ``None`` without either."""
        at_reference = self._gradients_at_reference_weights(batch, epoch)
        if of_memory is None or at_reference is None:
            return of_memory or at_reference
        rows = concatenate([of_memory.gradients, at_reference.gradients], 1 if self.stacked else 0)
        return ReferenceGradients(rows, torch.cat([of_memory.present, at_reference.present], dim=-1))

    def _gradients_at_reference_weights(self, batch: Batch, epoch: Tensor) -> ReferenceGradients | None:
        leaves = self.inputs.reference_weights.tensors
        if not leaves:
            return None
        # Only the step's own forward pass updates the client's running statistics; here they are copies.
        statistics = {name: self.weights[name].clone() for path in self.batch_norms for name in statistics_names(path)}
        step = self._forward({**self.weights, **statistics, **leaves}, leaves, batch, epoch)
        losses = lift(self.objective.loss, self.stacked, self.inputs.constants)(step)
        axis = 1 if self.stacked else 0
        rows = {name: gradient.unsqueeze(axis) for name, gradient in client_gradients(losses, leaves).items()}
        return ReferenceGradients(rows, torch.ones_like(self.loss_sum, dtype=torch.bool).unsqueeze(-1))

    def _companion_gradients(self, step: Step, batch: Batch, epoch: Tensor) -> Tensors:
        """Return the gradients to apply to the companion, and add up what its rule counts; empty without one."""
        rule = self.objective.companion
        if rule is None:
            return {}
        constants = self.inputs.constants
        with torch.no_grad():
            evaluated: Tensors = lift(rule.evaluated_weights, self.stacked, constants, 0)(self.companion, step)
        leaves = {name: evaluated[name].detach().requires_grad_() for name in self.leaves}
        # The companion's own buffers: the forward pass writes running statistics in place.
        weights = {**self.weights, **self.inputs.companion_weights.tensors, **leaves}
        at_evaluated = self._forward(weights, leaves, batch, epoch)
        losses = lift(self.objective.loss, self.stacked, constants)(at_evaluated)
        gradients = client_gradients(losses, leaves)
        with torch.no_grad():
            companion_gradients = lift(rule.companion_gradients, self.stacked, constants, 0, 0)
            applied: Tensors
            applied, counts = companion_gradients(gradients, self.companion, step)
            self._add_counts(counts, batch)
        return applied

    def _add_counts(self, counts: Tensors, batch: Batch) -> None:
        for name, count in counts.items():
            self.counts[name] += count * batch.active

    def _observe(self, gradients: Tensors, step: Step) -> None:
        """Add the step to the state of the objective's observer."""
        if self.objective.observer is None:
            return
        observe = lift(self.objective.observer, self.stacked, self.inputs.constants, 0, 0)
        state = self.inputs.observer_state.tensors
        for name, updated in observe(state, gradients, step).items():
            in_place = updated.untyped_storage()._cdata == state[name].untyped_storage()._cdata
            if not in_place:
                state[name].copy_(updated)

    def _transform(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step, batch: Batch
    ) -> Mapping[str, Tensor]:
        """Apply the objective's gradient transform, and add up what it counts."""
        transform = self.objective.transform
        if transform is None:
            return gradients

        def transform_one(
            gradients: Tensors, rows: Tensors | None, present: Tensor | None, step: Step
        ) -> tuple[Tensors, Tensors]:
            references = None if rows is None or present is None else ReferenceGradients(rows, present)
            return transform(gradients, references, step)

        in_dims = (0, None, None) if references is None else (0, 0, 0)
        rows, present = (None, None) if references is None else (references.gradients, references.present)
        transform_all = lift(transform_one, self.stacked, self.inputs.constants, *in_dims)
        applied: Tensors
        applied, counts = transform_all(gradients, rows, present, step)
        self._add_counts(counts, batch)
        return applied


def _rows(tensor: Tensor, positions: Tensor, stacked: bool) -> Tensor:
    """Return the rows at these positions; where clients are stacked, each client's own."""
    if not stacked:
        return tensor[positions]
    clients = torch.arange(positions.shape[0], device=positions.device).unsqueeze(-1)
    return tensor[clients, positions]
