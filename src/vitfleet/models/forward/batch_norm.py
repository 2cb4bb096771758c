"""Batch norm of one client or of several: padding does not count, and the caller says whether statistics are updated.

Running statistics are weights of the model: they are sent and averaged with the parameters of their part, weighted by
samples. In a training step a batch norm whose part trains normalises with its batch and updates them in place. Any
other one normalises with the running statistics and changes nothing: where its part is frozen, in evaluation, for
stored samples, and for the gradients of single images.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

MASK_NAME = "sample_mask"
DEFAULT_MOMENTUM = 0.1


class MaskedBatchNorm(nn.Module):
    """A batch norm whose statistics are those of the samples in a mask.

    The names of its weights are those of torch's module. A batch with fewer than two values per channel, such as an
    empty one, is normalised with the running statistics and does not change them.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    # Which samples of the batch count, `[batch]`; `None`: the running statistics are used. A call of the model sets it
    # (`torch.func.functional_call`); it is never stored.
    sample_mask: Tensor | None

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.eps = norm.eps
        self.momentum = DEFAULT_MOMENTUM if norm.momentum is None else norm.momentum
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer(MASK_NAME, None, persistent=False)
        # timm's batch norms may end with an activation.
        self.act = getattr(norm, "act", None) or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise each channel, the second axis."""
        values = inputs.to(self.running_mean.dtype)
        mean, variance = self._statistics(values)
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        channels = (1, -1, *(1,) * (inputs.dim() - 2))
        outputs = values * scale.view(channels) + shift.view(channels)
        activated: Tensor = self.act(outputs.to(inputs.dtype))
        return activated

    def _statistics(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance to normalise with; with a mask, update the running ones."""
        if self.sample_mask is None:
            return self.running_mean, self.running_var
        # Some families put an image's tokens on the axis of the batch, one image after the other.
        rows = values.shape[0] // self.sample_mask.shape[0]
        mask = self.sample_mask.to(values.dtype).unsqueeze(-1).expand(-1, rows).reshape(-1)
        weight = mask.view(-1, *(1,) * (values.dim() - 1))
        axes = [axis for axis in range(values.dim()) if axis != 1]
        count = mask.sum() * (values[0, 0].numel() if values.dim() > 2 else 1)
        total = count.clamp(min=1)
        mean = (values * weight).sum(axes) / total
        centred = values - mean.view(1, -1, *(1,) * (values.dim() - 2))
        variance = (centred.square() * weight).sum(axes) / total
        enough = count > 1
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.copy_(torch.where(enough, torch.lerp(running, value, self.momentum), running))
        return torch.where(enough, mean, self.running_mean), torch.where(enough, variance, self.running_var)


def replace_batch_norms(vit: nn.Module) -> tuple[str, ...]:
    """Replace all batch norms of a model, and return their module paths."""
    found = [
        (path, module)
        for path, module in vit.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    for path, module in found:
        parent, _, attribute = path.rpartition(".")
        setattr(vit.get_submodule(parent), attribute, MaskedBatchNorm(module))
    return tuple(path for path, _ in found)


def statistics_names(path: str) -> tuple[str, str]:
    """Return the names of the running statistics of a batch norm."""
    return f"{path}.running_mean", f"{path}.running_var"


def trained_batch_norms(paths: Collection[str], selected: Collection[str]) -> tuple[str, ...]:
    """Return the batch norms whose running statistics are among the selected weights."""
    return tuple(path for path in paths if all(name in selected for name in statistics_names(path)))
