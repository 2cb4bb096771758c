"""FedWEIT's decomposed weights: θ_t = B ⊙ σ(m_t) + A_t + Σ_c α_c A_c, their loss, and how they are named.

The tensors of a decomposed weight have the weight's name with a prefix; B has the name itself. Shapes, for a weight of
the shape ``[units, …]``:

======================== ======================= ==========================================================
tensor                   shape                   what it is
======================== ======================= ==========================================================
``mask.``                ``[units]``             m_t; σ(m_t) is the share of B that each output unit uses
``adaptive.``            ``[units, …]``          A_t
``attention.``           ``[others]``            α_c, one per other client
``past_adaptive.``       ``[tasks, units, …]``   A_i of the tasks before this one
``knowledge.``           ``[others, units, …]``  A_c of other clients, constant
``past_mask.``           ``[tasks, units]``      m_i of the tasks before this one, constant
``target.``              ``[tasks, units, …]``   θ_i*, B ⊙ σ(m_i) + A_i when task i was trained last, constant
======================== ======================= ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.models.parts import ModelParts, Selection
from vitfleet.training.composition import ComposedSelection
from vitfleet.training.objective import Objective, Step, cross_entropy

MASK, ADAPTIVE, ATTENTION, PAST_ADAPTIVE = "mask.", "adaptive.", "attention.", "past_adaptive."
KNOWLEDGE, PAST_MASK, TARGET = "knowledge.", "past_mask.", "target."


def decomposed_weights(parts: ModelParts) -> Selection:
    """Return the weights that are decomposed: the matrices and kernels of all blocks."""
    blocks = parts.trainable(parts.union(*parts.blocks))
    return parts.select(name for name in blocks if len(parts.shapes[name]) >= 2)


def masked(base: Tensor, mask: Tensor) -> Tensor:
    """Return B ⊙ σ(m). The mask may have leading axes, of tasks, that the base weights do not have."""
    return base * mask.sigmoid().reshape(*mask.shape, *[1] * (base.dim() - 1))


def transferred(attention: Tensor, knowledge: Tensor) -> Tensor:
    """Return Σ_c α_c A_c."""
    weighted: Tensor = torch.tensordot(attention, knowledge, dims=1)
    return weighted


@dataclass(frozen=True)
class Decomposition:
    """Composes θ_t = B ⊙ σ(m_t) + A_t + Σ_c α_c A_c.

    Attributes
    ----------
    names
        The decomposed weights.
    others
        The number of other clients whose adaptive weights are used, with padding.
    """

    names: tuple[str, ...]
    others: int

    def __call__(self, trained: Tensors, constants: Tensors) -> Tensors:
        """Return θ_t."""
        composed: dict[str, Tensor] = {}
        for name in self.names:
            weight = masked(trained[name], trained[MASK + name]) + trained[ADAPTIVE + name]
            if self.others:
                weight = weight + transferred(trained[ATTENTION + name], constants[KNOWLEDGE + name])
            composed[name] = weight
        return composed


@dataclass(frozen=True)
class DecompositionLoss:
    """Cross-entropy + λ₁ (Σ_{i≤t} ‖A_i‖₁ + ‖σ(m_t)‖₁) + λ₂/2 Σ_{i<t} ‖B ⊙ σ(m_i) + A_i − θ_i*‖².

    Attributes
    ----------
    names
        The decomposed weights.
    sparsity, drift
        λ₁ and λ₂.
    past_tasks
        The number of tasks before this one.
    """

    names: tuple[str, ...]
    sparsity: float
    drift: float
    past_tasks: int

    def __call__(self, step: Step) -> Tensor:
        """Return the loss of a step."""
        trained, constants = step.weights, step.constants
        sizes: list[Tensor] = []
        drifts: list[Tensor] = []
        for name in self.names:
            sizes += [trained[ADAPTIVE + name].abs().sum(), trained[MASK + name].sigmoid().sum()]
            if self.past_tasks:
                past = trained[PAST_ADAPTIVE + name]
                sizes.append(past.abs().sum())
                restored = masked(trained[name], constants[PAST_MASK + name]) + past
                drifts.append((restored - constants[TARGET + name]).square().sum())
        loss = cross_entropy(step) + self.sparsity * torch.stack(sizes).sum()
        return loss + 0.5 * self.drift * torch.stack(drifts).sum() if drifts else loss


def decomposed_objective(
    whole: Selection, decomposed: Selection, sparsity: float, drift: float, others: int, past_tasks: int
) -> Objective:
    """Return the objective of a task.

    Parameters
    ----------
    whole
        All weights of the model. Those that are decomposed are B, the others are trained as they are.
    others, past_tasks
        How many other clients' adaptive weights, and earlier tasks of the client, there are.
    """
    prefixes = [MASK, ADAPTIVE, *([ATTENTION] if others else []), *([PAST_ADAPTIVE] if past_tasks else [])]
    names = (*whole, *(prefix + name for prefix in prefixes for name in decomposed))
    selection = ComposedSelection(names, Decomposition(decomposed.names, others))
    return Objective(selection, DecompositionLoss(decomposed.names, sparsity, drift, past_tasks))
