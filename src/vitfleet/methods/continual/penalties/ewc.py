"""EWC: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", 2017, inside federated averaging.

A client minimises L(θ) + Σ_i λ/2 Σ_j F_i,j (θ_j − θ*_i,j)² (equation 3), one penalty per task i that it has learned.
F_i is the diagonal of the Fisher information of task i at θ*_i: the mean over the task's images of the *squared
gradient of each image's* log-likelihood. (The square of a batch's mean gradient is not that.)

The Fisher information is an expectation over the model's own distribution p_θ(y|x), so the label of each image is
drawn from the model's prediction (``fisher_labels = "model"``, the default). With ``"data"`` it is the image's true
label: the empirical Fisher, which many implementations use.

Quadratic penalties add up to a quadratic: F₁(θ − a₁)² + F₂(θ − a₂)² = F(θ − a)² + F₁F₂/F·(a₁ − a₂)² with F = F₁ + F₂
and a = (F₁a₁ + F₂a₂)/F. So one penalty per task, as in the paper, needs the memory of one.

The body is shared; heads are local unless ``heads = "shared"``. When F is computed:
:mod:`~vitfleet.methods.continual.penalties.quadratic_penalty`.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.registry import register_method
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientRoundInput
from vitfleet.methods.continual.penalties.quadratic_penalty import (
    ImportanceStep,
    Penalty,
    PenaltyParams,
    QuadraticPenalty,
)
from vitfleet.randomness import Address, Purpose
from vitfleet.training.samples import Outputs, cross_entropy

_UNIFORM = "uniform"


class EwcParams(PenaltyParams):
    """Elastic weight consolidation: important weights stay near their values after earlier tasks (EWC)."""

    penalty_weight: float = Field(40000.0, ge=0, description="weight λ of the penalty λ/2·Σ F (θ − θ*)²")
    fisher_labels: Literal["model", "data"] = Field(
        "model", description="labels of the Fisher information: drawn from the model's prediction, or the true ones"
    )


@register_method("ewc", EwcParams, title="EWC")
class Ewc(QuadraticPenalty[EwcParams]):
    """Elastic weight consolidation."""

    factor = 0.5

    def importance_step(self) -> ImportanceStep:
        """Return the step that measures the diagonal of the Fisher information."""
        return ImportanceStep(drawn_label_loss if self.draws_labels else cross_entropy, "square")

    def importance_constants(self, job: ClientRoundInput) -> Tensors:
        """Return one uniform number per sample of the client's shard, from which its label is drawn, if labels are.

        There are more of them, a power of two, so that captured steps can be reused for shards of other sizes.
        """
        if not self.draws_labels:
            return {}
        rng = Address(self.context.seed, Purpose.FISHER_LABELS, job.round, job.client).generator()
        count = 1 << max(0, len(job.shard) - 1).bit_length()
        return {_UNIFORM: torch.from_numpy(rng.random(count)).to(self.context.device)}

    @property
    def draws_labels(self) -> bool:
        """Whether the labels of the Fisher information are drawn from the model's predictions."""
        return self.params.fisher_labels == "model"

    def consolidate(self, penalty: Penalty | None, importance: Tensors, anchor: Tensors) -> Penalty:
        """Add a task's penalty to the sum; the result has the same values and gradients as the sum."""
        if penalty is None:
            return Penalty(importance, anchor, next(iter(importance.values())).new_zeros(()))
        offset = penalty.offset
        merged: dict[str, Tensor] = {}
        sums = {name: penalty.importance[name] + added for name, added in importance.items()}
        for name, added in importance.items():
            # Where no task needs a weight, its anchor has no effect.
            share = torch.where(sums[name] > 0, added / sums[name], 0)
            distance = anchor[name] - penalty.anchor[name]
            merged[name] = penalty.anchor[name] + share * distance
            offset = offset + (penalty.importance[name] * share * distance.square()).sum()
        return Penalty(sums, merged, offset)


def drawn_label_loss(outputs: Outputs) -> Tensor:
    """Return the mean cross-entropy of labels that are drawn from the model's own predictions.

    A label is the class in whose part of [0, 1) the sample's uniform number is.
    """
    logits = outputs.logits.float()
    with torch.no_grad():
        cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
        uniform = outputs.constants[_UNIFORM][outputs.positions] * cumulative[..., -1]
        labels = (cumulative <= uniform.unsqueeze(-1)).sum(dim=-1)
    return torch.dot(F.cross_entropy(logits, labels, reduction="none"), outputs.sample_weight)
