"""FedSAM: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022.

FedAvg whose clients look for flat minima (Caldarola et al., ECCV 2022, do the same): each minimises max F_k(w + ε) over
‖ε‖ ≤ ρ. On every batch ξ the worst ε is found to first order, and the weights follow the gradient there:

    ε̂ = ρ ∇F_k(w; ξ) / ‖∇F_k(w; ξ)‖,    w ← w − η ∇F_k(w + ε̂; ξ).

A step takes two passes instead of one. With ρ = 0 it is FedAvg. The norm is that of all weights together, as in SAM
(Foret et al., 2021); the reported loss is that at w.

    vitfleet run digits --plugin fedsam.py -o method.name=fedsam -o method.rho=0.05
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field

from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.message import Tensors
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import Step, StepView

MIN_NORM = 1e-12  # of a gradient; that of a batch of padding is zero


class FedSamParams(MethodParams):
    """FedAvg with sharpness-aware steps on the client (Qu et al., 2022)."""

    rho: float = Field(0.05, ge=0, description="radius ρ in which the loss is to be low; 0: FedAvg")


@register_method("fedsam", FedSamParams, title="FedSAM")
class FedSam(WeightAveraging[FedSamParams]):
    """FedAvg with another step."""

    @property
    def step(self) -> Step:
        """The client's step."""
        return SharpnessAwareStep(self.params.rho)


@dataclass(frozen=True)
class SharpnessAwareStep:
    """Follows the gradient at w + ρ g/‖g‖."""

    rho: float

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return ∇F_k(w + ε̂; ξ)."""
        gradient = view.grad(cross_entropy, batch)
        worst = view.map(self.ascend, view.weights, gradient)
        return view.grad(cross_entropy, batch, at=worst)

    def ascend(self, w: Tensors, gradient: Tensors) -> Tensors:
        """Return w + ε̂ of one client."""
        norm = torch.stack([torch.linalg.vector_norm(tensor) for tensor in gradient.values()]).norm()
        scale = self.rho / norm.clamp(min=MIN_NORM)
        return {name: weight + scale * gradient[name] for name, weight in w.items()}
