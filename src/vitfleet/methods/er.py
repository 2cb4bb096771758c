"""ER: Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019 (experience replay).

A step minimises the cross-entropy ℓ of its batch B and of as many samples B_M drawn from the memory M of earlier tasks
(algorithm 1 there): mean over B of ℓ + mean over B_M of ℓ. The paper takes the mean over B ∪ B_M, which is half of this
sum. Here the terms are added, as in DER++, so that the batch counts as much as in the first task.

Decisions: see :mod:`vitfleet.methods.replay_method`. The body is shared; heads are local by default.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.registry import register_method
from vitfleet.methods.replay_method import ReplayMethod, ReplayParams
from vitfleet.training.objective import Loss, Step, cross_entropy


class ErParams(ReplayParams):
    """Every step also trains on stored samples of earlier tasks (experience replay)."""


def replay_loss(step: Step) -> Tensor:
    """Return the cross-entropy of the batch, plus that of the replayed samples."""
    replayed = step.replayed
    if replayed is None:
        return cross_entropy(step)
    losses = F.cross_entropy(replayed.logits.float(), replayed.labels, reduction="none")
    return cross_entropy(step) + torch.dot(losses, replayed.sample_weight)


@register_method("er", ErParams, title="ER")
class ExperienceReplay(ReplayMethod[ErParams]):
    """Experience replay."""

    def loss(self) -> Loss:
        """Return the cross-entropy of batch and replayed samples."""
        return replay_loss
