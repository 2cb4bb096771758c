"""DER++: Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple Baseline", 2020.

The memory M holds samples x with their labels y and the model's logits z when they were stored. A step minimises
(equation 6 there, h_θ are the logits)

    ℓ(y, h_θ(x)) on the batch + α E_{(x', z') ~ M} ‖z' − h_θ(x')‖² + β E_{(x'', y'') ~ M} ℓ(y'', h_θ(x''))

The two terms draw their samples independently, as the paper's algorithm 2 does. β = 0 is DER.

Decisions: the squared distance is the mean over the classes, as in the authors' code, to which the defaults α = 0.1
and β = 0.5 belong (their choice for CIFAR-10 with 200 samples). Logits are stored at the end of a client's round, under
the model that it has just trained, of the image without augmentation. Those of the current task are replaced in every
round; what remains is from the client's last round in the task. Where the task of an image is known, only the logits of
the stored sample's own task are compared, and the mean is over these. For all else see
:mod:`vitfleet.methods.replay_method`. The body is shared; heads are local by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.registry import register_method
from vitfleet.methods.replay_method import ReplayMethod, ReplayParams
from vitfleet.training.objective import Loss, ReplayedSamples, Step, cross_entropy


class DerPlusPlusParams(ReplayParams):
    """Experience replay that also keeps the logits of the stored samples (DER++)."""

    alpha: float = Field(0.1, ge=0, description="weight α of the squared distance to the stored logits")
    beta: float = Field(0.5, ge=0, description="weight β of the cross-entropy of replayed samples; 0: DER")


@dataclass(frozen=True)
class DarkExperienceLoss:
    """The loss of DER++. Of each batch sample's replayed samples, the first are for α, the last for β.

    Attributes
    ----------
    replays
        Samples per sample of the batch that each of the two terms draws.
    """

    alpha: float
    beta: float
    replays: int

    def __call__(self, step: Step) -> Tensor:
        """Return the loss of a step."""
        loss, replayed = cross_entropy(step), step.replayed
        if replayed is None:
            return loss
        # The replayed samples of a batch sample are neighbours, and the terms with a weight share them equally.
        terms = [weight for weight in (self.alpha, self.beta) if weight]
        drawn = len(terms) * self.replays
        place = torch.arange(replayed.labels.shape[0], device=replayed.labels.device) % drawn
        if self.alpha:
            loss = loss + self.alpha * torch.dot(
                logit_distances(replayed), _share(replayed, place < self.replays, terms)
            )
        if self.beta:
            losses = F.cross_entropy(replayed.logits.float(), replayed.labels, reduction="none")
            loss = loss + self.beta * torch.dot(losses, _share(replayed, place >= drawn - self.replays, terms))
        return loss


def logit_distances(replayed: ReplayedSamples) -> Tensor:
    """Return the mean squared distance of each sample's logits to the stored ones, over the classes of its task."""
    compared = replayed.logits > -torch.inf
    difference = torch.where(compared, replayed.logits.float() - replayed.targets["logits"], 0.0)
    return difference.square().sum(dim=-1) / compared.sum(dim=-1)


def _share(replayed: ReplayedSamples, selected: Tensor, terms: list[float]) -> Tensor:
    """Return the sample weights of one term's samples; they sum to one, as those of all samples do."""
    return replayed.sample_weight * selected * len(terms)


@register_method("der++", DerPlusPlusParams, title="DER++")
class DerPlusPlus(ReplayMethod[DerPlusPlusParams]):
    """Dark experience replay with labels."""

    stores_logits = True

    @property
    def replays(self) -> int:
        """How many stored samples a step replays: each term with a weight draws its own."""
        return self.params.replays * sum(weight > 0 for weight in (self.params.alpha, self.params.beta))

    def loss(self) -> Loss:
        """Return the loss with α and β."""
        return DarkExperienceLoss(self.params.alpha, self.params.beta, self.params.replays)
