"""Floating-point operations per sample of a training, counted by torch on tensors that have shapes but no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitfleet.costs.dry_run import shapes_of
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.composition import composition_of
from vitfleet.training.objective import Objective


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per sample; a multiply-add counts as two.

    Attributes
    ----------
    forward
        Forward pass of a training step: masked, through the layers of the client's model.
    training
        Forward and backward pass. A frozen layer still propagates the gradient, but needs none for its weights. Where
        nothing trains, only the forward pass.
    """

    forward: int
    training: int


def full_flops(net: Net) -> Flops:
    """Count the operations of full training on an unmasked image, the reference for comparisons."""
    meta_net = net.with_constants_on("meta")
    return count_flops(meta_net, Objective(net.parts.whole), shapes_of(net), 0.0)


def count_flops(net: Net, objective: Objective, weights: Tensors, mask_ratio: float) -> Flops:
    """Count the operations per sample under an objective.

    Where weights are composed, the operations of the composition are not counted: they are few, and per step.
    """
    trainable = net.parts.select(net.parts.trainable(objective.trainable))
    weights = forward_weights(net, objective, weights)
    leaves = {name: torch.empty_like(weights[name], device="meta", requires_grad=True) for name in trainable}
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    images = torch.empty(1, len(net.mean), net.image_size, net.image_size, device="meta")
    keep = torch.empty(1, net.num_kept_patches(mask_ratio), dtype=torch.long, device="meta") if mask_ratio else None
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        outputs = forward(net, objective, {**blank, **leaves}, images, keep)
        forward_flops = counter.get_total_flops()
        # Not torch.autograd.grad: in it the counter fails where a module is called with a weight, as in timm's TNT.
        if leaves:
            outputs.sum().backward()  # type: ignore[no-untyped-call]
        return Flops(forward_flops, counter.get_total_flops())


def _convolution_backward_flops(
    grad_output: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *arguments: Any, **options: Any
) -> int:
    """Count the operations of a convolution's backward pass by shapes.

    Each of its two products takes as many as the forward pass. torch's own formula for the gradient of the weight
    ignores groups, and counts a depthwise convolution as often as it has channels.
    """
    needs_inputs, needs_weight, _ = arguments[-1]
    return 2 * prod(grad_output) * prod(weight[1:]) * (int(needs_inputs) + int(needs_weight))


def forward_weights(net: Net, objective: Objective, weights: Tensors) -> Tensors:
    """Return the weights that a forward pass reads: a model may have more than its own, such as a teacher's.

    Where the objective composes the model's weights, the others are what they are composed of.
    """
    is_composed = composition_of(objective.trainable) is not None
    return net.parts.select(weights).take(weights) if is_composed else weights


def forward(
    net: Net, objective: Objective, weights: Tensors, images: torch.Tensor, keep: torch.Tensor | None
) -> torch.Tensor:
    """Run an objective's forward pass: return logits, or the features at the split if it ends there."""
    if objective.split is None:
        return net.outputs(weights, images, keep, objective.depth)
    features = net.forward_to(weights, images, keep, objective.split)
    return features if objective.features_only else net.forward_from(weights, features, objective.split)
