"""Reference gradients of teachers: sparse models of earlier tasks, distilled on the images of the step.

The gradient of a teacher is that of the cross-entropy between its predictions and those of the model that trains, both
at a temperature T: −Σ_c softmax(z_teacher/T)_c · log softmax(z/T)_c, the mean over the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from vitfleet.data.batches import Batch
from vitfleet.message import Tensors
from vitfleet.training.engine import StepEngine
from vitfleet.training.gradients import client_gradients
from vitfleet.training.objective import Objective, mask_other_tasks
from vitfleet.training.stack import Stack


def distillation_gradients(
    engine: StepEngine,
    objective: Objective,
    weights: Stack,
    leaves: Mapping[str, Tensor],
    teachers: Tensors,
    images: Tensor,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return the gradient of each teacher's distillation loss, ``[…, teachers, …]`` for each weight that trains.

    Teachers are expanded one by one: only one of them is in memory as a whole model. The model that trains runs once
    for all of them, unless it is compiled: then a backward pass frees what the next one would need.

    Parameters
    ----------
    weights
        All weights of the model; those that train are ``leaves``.
    teachers
        The tensors of :class:`~vitfleet.training.memories.Teachers`; with an axis of clients, where they are stacked.
    images, batch
        All images, and the batch: which of them are those of the step, and how each is augmented and masked.
    """
    step_images = images[batch.image_indices]
    axis = teachers["labels"].dim() - 1
    model_parts = engine.net.parts
    # Running statistics are the client's; only the step's own forward pass updates them.
    buffers = {name: tensor for name, tensor in weights.tensors.items() if name not in model_parts.parameters}
    shapes = {name: model_parts.shapes[name] for name in model_parts.trainable(model_parts.whole)}
    dtype, row_dtype = next(iter(leaves.values())).dtype, objective.reference_dtype

    def logits(weights: Tensors) -> Tensor:
        outputs, _ = engine.forward({**weights, **buffers}, step_images, batch, None, objective.depth)
        return engine.net.split_outputs(outputs)[0]

    num_teachers = teachers["labels"].shape[axis]
    rows = {
        name: leaf.new_empty((*leaf.shape[:axis], num_teachers, *leaf.shape[axis:]), dtype=row_dtype or leaf.dtype)
        for name, leaf in leaves.items()
    }
    student = logits(weights.tensors)
    for index in range(num_teachers):
        teacher = {name: tensor.select(axis, index) for name, tensor in teachers.items()}
        with torch.no_grad():
            targets = logits(expand_weights(teacher["values"].to(dtype), teacher["indices"], shapes))
        labels = teacher["labels"].unsqueeze(-1).expand(batch.sample_weight.shape)
        last = index == num_teachers - 1
        losses = distillation_losses(
            mask_other_tasks(student, labels, engine.class_tasks),
            mask_other_tasks(targets, labels, engine.class_tasks),
            teacher["temperatures"].unsqueeze(-1).unsqueeze(-1),
        )
        mean_losses = (losses * batch.sample_weight).sum(dim=-1)
        for name, gradient in client_gradients(mean_losses, leaves, not (last or engine.compiled)).items():
            rows[name].select(axis, index).copy_(gradient)
        if engine.compiled and not last:
            student = logits(weights.tensors)
    return rows


def expand_weights(values: Tensor, indices: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the weights of a model of which some were kept; the others are zero.

    Parameters
    ----------
    values, indices
        The kept weights and their positions in the vector of all weights, ``[…, kept]``.
    shapes
        The shape of each weight, in the order of the vector.
    """
    sizes = [prod(shape) for shape in shapes.values()]
    flat = values.new_zeros((*values.shape[:-1], sum(sizes))).scatter(-1, indices.long(), values)
    parts = torch.split(flat, sizes, dim=-1)
    return {
        name: part.reshape(*values.shape[:-1], *shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def distillation_losses(logits: Tensor, targets: Tensor, temperature: Tensor | float) -> Tensor:
    """Return the cross-entropy between the predictions of two models for each image, both at a temperature.

    Parameters
    ----------
    logits, targets
        Of the model that learns and of its teacher, ``[…, classes]``. Classes that are −∞ in both do not count.
    """
    log_predictions = (logits.float() / temperature).log_softmax(dim=-1)
    expected = (targets.float() / temperature).softmax(dim=-1)
    return -torch.where(expected > 0, expected * log_predictions, 0).sum(dim=-1)
