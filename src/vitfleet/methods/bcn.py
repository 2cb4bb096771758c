"""BCN: Raghavan and Balaprakash, "Formalizing the Generalization-Forgetting Trade-off in Continual Learning", 2021.

Balanced continual learning (arXiv 2109.14035; FedViT's paper calls it BCN), inside federated averaging. A step is a
game of two players on samples x of earlier tasks: one perturbs them to raise their loss J (lack of generalisation), the
other moves a copy of the weights θ to lower it (forgetting). θ then descends along the gradient of

    H = β J_new + J(x, θ) + [J(x′, θ) − J(x, θ)] + [J(x, θ′) − J(x, θ)].

See :mod:`vitfleet.training.game`. Decisions:

- x′ = x + ε g/‖g‖ with the gradient g of each image's loss, in the model's normalised input; θ′ = θ − η ∇J(x, θ).
- x′ − x and θ′ − θ are constants when H is differentiated: ∇H = β∇J_new + ∇J(x′, θ) + ∇J(x, θ′) − ∇J(x, θ). (The
  authors' code does not differentiate J(x, θ′) at all. With one step each the memory's gradients then cancel.)
- Defaults are the authors' for CIFAR-100: β = 0.99, ε = 1e-3, η = 1e-5, one step each, as many samples of the memory as
  of the batch. The samples are those of earlier tasks; the authors' code draws from the batch too.
- In a client's first task there is no memory: it minimises J_new.
- What is stored, and how samples are drawn: :mod:`vitfleet.methods.replay_method`. The body is shared; heads are local
  by default.
"""

from __future__ import annotations

from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.methods.replay_method import ReplayMethod, ReplayParams
from vitfleet.training.game import SequentialGame
from vitfleet.training.objective import Loss, cross_entropy


class BcnParams(ReplayParams):
    """Two players perturb stored samples and weights; the step balances them (balanced continual learning, BCN)."""

    beta: float = Field(0.99, ge=0, description="weight β of the batch's loss")
    epsilon: float = Field(
        1e-3, ge=0, description="length ε of a step that perturbs a stored sample, in the model's normalised input"
    )
    ascent_steps: int = Field(1, ge=1, le=100, description="steps that perturb the stored samples of a training step")
    descent_rate: float = Field(1e-5, ge=0, description="learning rate η of the copy of the weights")
    descent_steps: int = Field(1, ge=1, le=100, description="steps of the copy of the weights in a training step")


@register_method("bcn", BcnParams, title="BCN")
class Bcn(ReplayMethod[BcnParams]):
    """Balanced continual learning."""

    def loss(self) -> Loss:
        """Return H."""
        params = self.params
        return SequentialGame(
            cross_entropy,
            params.beta,
            params.epsilon,
            params.ascent_steps,
            params.descent_rate,
            params.descent_steps,
        )
