"""The gradient of each sample of a batch: every sample is a client of its own, with the weights of its client."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitfleet.data.batches import Batch
from vitfleet.data.images import ImageSet
from vitfleet.training.cohort_inputs import CohortInputs
from vitfleet.training.engine import StepEngine
from vitfleet.training.gradients import client_gradients
from vitfleet.training.objective import Objective, Step, mask_other_tasks
from vitfleet.training.repeated_weights import by_part, repeat_weights
from vitfleet.training.stack import Stack, lift


@dataclass(frozen=True)
class SampleGradients:
    """Losses and gradients of single samples.

    Attributes
    ----------
    step
        The forward pass of the batch.
    losses
        ``[…, samples]``.
    gradients
        ``[…, samples, …]`` of each weight that trains. Those of padding are zero.
    """

    step: Step
    losses: Tensor
    gradients: dict[str, Tensor]


def sample_gradients(
    engine: StepEngine,
    objective: Objective,
    inputs: CohortInputs,
    leaves: dict[str, Tensor],
    stacked: bool,
    images: ImageSet,
    batch: Batch,
    epoch: Tensor,
) -> SampleGradients:
    """Return the gradient of the loss of each sample of a batch, of whole images without augmentation.

    The loss may not depend on the weights themselves.
    """
    samples = batch.sample_weight.shape[-1]

    def per_sample(tensor: Tensor) -> Tensor:
        """Return ``[clients · samples, 1, …]``."""
        return (tensor.flatten(0, 1) if stacked else tensor).unsqueeze(1)

    weights, repeated = repeat_weights(engine, inputs.weights, leaves, samples, stacked)
    indices = per_sample(batch.image_indices)
    labels = images.labels[indices]
    outputs, _ = engine.forward(weights, images.images[indices], None, None, objective.depth)
    logits = mask_other_tasks(engine.net.split_outputs(outputs)[0], labels, engine.class_tasks)
    constants = _repeat_constants(inputs.constants, samples)
    present = per_sample(batch.sample_weight > 0).to(batch.sample_weight.dtype)
    step = Step(logits, labels, present, {}, constants.tensors, per_sample(batch.shard_positions), epoch)
    losses = lift(objective.loss, True, constants)(step)
    gradients = by_part(client_gradients(losses, repeated), leaves, samples, stacked)
    shape = batch.sample_weight.shape
    of_clients = Step(
        logits.detach().reshape(*shape, -1),
        labels.reshape(shape),
        batch.sample_weight,
        leaves,
        inputs.constants.tensors,
        batch.shard_positions,
        epoch,
    )
    return SampleGradients(of_clients, losses.detach().reshape(shape), gradients)


def _repeat_constants(constants: Stack, samples: int) -> Stack:
    """Give every sample the constants of its client."""
    tensors = {
        name: tensor.repeat_interleave(samples, dim=0) if name in constants.stacked_names else tensor
        for name, tensor in constants.tensors.items()
    }
    return Stack(tensors, constants.stacked_names)
