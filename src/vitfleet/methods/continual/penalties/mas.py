"""MAS: Aljundi et al., "Memory Aware Synapses: Learning what (not) to forget", 2018, inside federated averaging.

A client minimises L(θ) + λ Σ_j Ω_j (θ_j − θ*_j)² (equation 4). Ω_j = 1/N Σ_k |∂‖f(x_k; θ)‖²/∂θ_j| (equations 2 and 3)
is the mean over the task's images of the *absolute gradient of each image's* squared output norm. Labels are not used.
Over tasks Ω is summed. θ* are the weights after the latest task that was learned before: unlike EWC there is one
anchor, not one per task.

f are the logits of the task's own classes where the task of an image is known, else all logits.

The body is shared; heads are local unless ``heads = "shared"``. When Ω is computed:
:mod:`~vitfleet.methods.continual.penalties.quadratic_penalty`.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.continual.penalties.quadratic_penalty import (
    ImportanceStep,
    Penalty,
    PenaltyParams,
    QuadraticPenalty,
)
from vitfleet.training.samples import Outputs


class MasParams(PenaltyParams):
    """Memory aware synapses: weights on which the outputs depend stay near their values (MAS)."""

    penalty_weight: float = Field(100.0, ge=0, description="weight λ of the penalty λ·Σ Ω (θ − θ*)²")


@register_method("mas", MasParams, title="MAS")
class Mas(QuadraticPenalty[MasParams]):
    """Memory aware synapses."""

    factor = 1.0

    def importance_step(self) -> ImportanceStep:
        """Return the step that measures how much the outputs depend on each weight."""
        return ImportanceStep(squared_output_norm, "absolute")

    def consolidate(self, penalty: Penalty | None, importance: Tensors, anchor: Tensors) -> Penalty:
        """Sum the importance over tasks; the weights after the latest task are the anchor."""
        offset = next(iter(importance.values())).new_zeros(())
        if penalty is None:
            return Penalty(importance, anchor, offset)
        return Penalty({name: penalty.importance[name] + added for name, added in importance.items()}, anchor, offset)


def squared_output_norm(outputs: Outputs) -> Tensor:
    """Return the mean of ‖f(x)‖² over the batch. The logits of other tasks' classes are −∞ and do not count."""
    logits = outputs.logits.float()
    own = torch.where(logits == -torch.inf, 0, logits)
    return torch.dot(own.square().sum(dim=-1), outputs.sample_weight)
