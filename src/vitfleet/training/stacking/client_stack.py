"""One or several clients in training: their tensors, and one step.

A step is a sequence of operations on tensors that keep their addresses, and the host never reads their values. It can
therefore run eagerly, or be captured once in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy

import torch
from torch import Tensor

from vitfleet.data.batches import Batch
from vitfleet.message import Tensors
from vitfleet.training.engine import StepEngine
from vitfleet.training.optimizers.optimizer import Optimizer
from vitfleet.training.passes import ClientModels
from vitfleet.training.stacking.inputs import ClientTraining, StackInputs, trained_tensors
from vitfleet.training.step import StepView

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class ClientStack:
    """Clients that take their steps together: one, or several with trainings that stack.

    With several, tensors have a leading axis of clients. The weights among the inputs are trained in place.
    """

    def __init__(self, engine: StepEngine, group: Sequence[ClientTraining], inputs: StackInputs) -> None:
        self.engine = engine
        self.num_clients = len(group)
        self.stacked = self.num_clients > 1
        self.training = group[0].training
        self.images = group[0].shard.images
        self.batch_norms = engine.net.trained_batch_norms(self.training.trainable)
        self._bind(inputs)
        num_stacked = self.num_clients if self.stacked else None
        self.optimizer = Optimizer(engine.config, self.leaves, num_stacked, engine.machine.kernels)
        shape = (self.num_clients,) if self.stacked else ()
        self.loss_sum = torch.zeros(shape, device=engine.machine.device)
        self.finite_steps = torch.zeros(shape, device=engine.machine.device)

    def _bind(self, inputs: StackInputs) -> None:
        self.inputs = inputs
        trained = trained_tensors(self.engine.net, self.training.trainable)
        self.leaves: Tensors = {name: inputs.weights.tensors[name].requires_grad_() for name in trained}

    @property
    def weights(self) -> Tensors:
        """All weights of the trainings, those that train and those that do not."""
        return self.inputs.weights.tensors

    @property
    def num_bytes(self) -> int:
        """The memory of the clients' tensors: inputs and moments of the optimiser."""
        moments = (tensor for moment in self.optimizer.moments for tensor in moment.values())
        return sum(tensor.nbytes for tensor in (*self.inputs.tensors(), *moments))

    def first(self, count: int) -> ClientStack:
        """Return the stack of the first ``count`` clients; it works on the same memory."""
        if count == self.num_clients:
            return self
        part = copy(self)
        part.num_clients = count
        part._bind(self.inputs.first(count))
        part.optimizer = self.optimizer.first(count)
        part.loss_sum = self.loss_sum[:count]
        part.finite_steps = self.finite_steps[:count]
        return part

    def restart(self, inputs: StackInputs | None, learning_rate: float) -> None:
        """Prepare a training; with new inputs, they are copied into the memory of the old ones."""
        if inputs is not None:
            self.inputs.copy_from(inputs)
        self.optimizer.restart(learning_rate)
        torch._foreach_zero_([self.loss_sum, self.finite_steps])

    def models(self, epoch: Tensor) -> ClientModels:
        """Return the clients' models, as steps see them."""
        inputs = self.inputs
        return ClientModels(
            self.engine, inputs.weights, self.leaves, inputs.constants, epoch, self.stacked, self.batch_norms
        )

    @torch.no_grad()
    def take_step(self, batch: Batch, epoch: Tensor, kind: Hashable, all_active: bool) -> None:
        """Take one step of this kind; unless ``all_active``, the batch says on the device which clients have it.

        The number of the epoch, from 0, is a scalar on the device.
        """
        view = StepView(self, self.models(epoch), batch, kind, all_active)
        gradients = self.training.step(view, view.batch)
        if gradients:
            self.optimizer.step(self._clip(gradients), None if all_active else batch.active)
        if view.loss_sum is not None:
            self.loss_sum += view.loss_sum if all_active else torch.where(batch.active > 0, view.loss_sum, 0)
        # A sum that is not finite stays so: what is counted are the steps before the first such loss.
        self.finite_steps += batch.active * self.loss_sum.isfinite()

    def _clip(self, gradients: Tensors) -> Tensors:
        """Clip the gradient of each model: of the client's own, and of one beside it, whose names have a prefix."""
        max_norm = self.engine.config.max_grad_norm
        if max_norm is None:
            return gradients
        models: dict[str, dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            models.setdefault(name.rpartition("/")[0], {})[name] = gradient
        clipped = [clip_gradients(of_model, max_norm, self.stacked) for of_model in models.values()]
        return {name: gradient for of_model in clipped for name, gradient in of_model.items()}


def clip_gradients(gradients: Tensors, max_norm: float, stacked: bool) -> dict[str, Tensor]:
    """Scale each client's gradient down to a norm, as ``torch.nn.utils.clip_grad_norm_`` does for one model."""

    def clip(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
        factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + CLIP_EPSILON)).clamp(max=1.0)
        return {name: gradient * factor for name, gradient in gradients.items()}

    clip_all: Callable[[dict[str, Tensor]], dict[str, Tensor]] = torch.vmap(clip) if stacked else clip
    return clip_all(dict(gradients))
