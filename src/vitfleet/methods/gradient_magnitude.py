"""TransFL's gradient statistics, measured on the device during training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.message import Tensors
from vitfleet.models.parts import ModelParts, Selection
from vitfleet.training.objective import Step


@dataclass(frozen=True)
class GradientMagnitude:
    """Observer that sums G_ℓ (equation 1) of every layer, and of every attention head (figure 2), over the steps.

    The weights of a head are its rows of the query-key-value projection and its columns of the output projection.

    Attributes
    ----------
    statistic
        ``mean-abs``: the mean absolute gradient; ``rms``: the root mean square.
    """

    parts: ModelParts
    statistic: str

    def initial_state(self, device: torch.device) -> Tensors:
        """Return zeros: ``layers`` ``[depth]``, and ``heads`` ``[depth, heads]`` with plain self-attention."""
        observer_state = {"layers": torch.zeros(self.parts.depth, device=device)}
        if self.parts.attention:
            heads = self.parts.attention[0].heads
            observer_state["heads"] = torch.zeros(self.parts.depth, heads, device=device)
        return observer_state

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Add the magnitudes of one step."""
        blocks = [self.parts.trainable(block) for block in self.parts.blocks]
        layers = torch.stack([self._layer_magnitude(gradients, block) for block in blocks])
        sums = {"layers": observer_state["layers"] + layers}
        if self.parts.attention:
            heads = torch.stack(
                [
                    head_magnitudes(gradients[attention.qkv], gradients[attention.projection], attention.heads)
                    for attention in self.parts.attention
                ]
            )
            sums["heads"] = observer_state["heads"] + heads
        return sums

    def _layer_magnitude(self, gradients: Tensors, block: Selection) -> Tensor:
        block_gradients = [gradients[name] for name in block]
        count = self.parts.count_parameters(block)
        if self.statistic == "rms":
            norms = torch.stack([torch.linalg.vector_norm(gradient, 2) for gradient in block_gradients])
            return (norms.square().sum() / count).sqrt()
        return torch.stack([torch.linalg.vector_norm(gradient, 1) for gradient in block_gradients]).sum() / count


def head_magnitudes(qkv: Tensor, projection: Tensor, heads: int) -> Tensor:
    """Return the mean absolute gradient of each attention head, ``[heads]``.

    Parameters
    ----------
    qkv, projection
        Gradients of the query-key-value and of the output projection's weights.
    """
    width = projection.shape[1]
    rows = qkv.abs().view(3, heads, -1, qkv.shape[1]).sum(dim=(0, 2, 3))
    columns = projection.abs().view(projection.shape[0], heads, -1).sum(dim=(0, 2))
    return (rows + columns) / ((3 * qkv.shape[1] + projection.shape[0]) * width // heads)
