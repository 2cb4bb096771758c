"""Call a module as a function of its weights, for one client or for several stacked with ``torch.vmap``.

``torch.vmap`` turns an operation on weights that differ between clients into one batched operation. Three are folded
here instead. Fused attention: it would loop over the clients. Linear layers: under autocast it would add the bias in
float32. Convolutions: it would make them grouped ones, and with few channels one batched product is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitfleet.models.forward.stacked_ops import attention, linear


def call_module(
    module: nn.Module, weights: Mapping[str, Tensor], stacked: frozenset[str], images: Tensor, keep: Tensor | None
) -> Tensor:
    """Return a module's logits of images; of several clients, with a leading axis of clients.

    Weights have their names in the module; those that are ``stacked`` have that axis too. ``keep`` holds the positions
    of the kept patches.
    """

    def call(weights: Mapping[str, Tensor], images: Tensor, keep: Tensor | None) -> Tensor:
        return cast(Tensor, functional_call(module, dict(weights), (images, keep), tie_weights=False))

    if images.dim() == 4:
        return call(weights, images, keep)
    if not stacked:  # clients that share all weights are one batch
        logits = call(weights, images.flatten(0, 1), None if keep is None else keep.flatten(0, 1))
        return _unfold_clients(logits, images.shape[0])
    in_dims = {name: 0 if name in stacked else None for name in weights}

    def call_folded(weights: Mapping[str, Tensor], images: Tensor, keep: Tensor | None) -> Tensor:
        with FoldClients():
            return call(weights, images, keep)

    vmapped = torch.vmap(call_folded, in_dims=(in_dims, 0, None if keep is None else 0))
    return vmapped(dict(weights), images, keep)


class FoldClients(TorchFunctionMode):
    """Inside ``torch.vmap``: fold the axis of clients of some operations into an axis that they have."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention, linear layers and convolutions; leave any other operation to ``torch.vmap``."""
        return FOLDED.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    if dropout_p or is_causal or options:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
        )
    if attn_mask is None and query.dim() == 4:
        return cast(Tensor, _FoldedAttention.apply(query, key, value, scale))  # type: ignore[no-untyped-call]
    return attention(query, key, value, attn_mask, scale)


class _Folded(torch.autograd.Function):
    """An operation with a rule of its own inside ``torch.vmap``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved: only ``vmap`` runs, and autograd records its operations."""


class _FoldedAttention(_Folded):
    """Fused attention, which has no weights: all clients are one batch."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, scale = inputs
        query, key, value = (
            _clients_first(tensor, axis, info.batch_size).flatten(0, 1)
            for tensor, axis in zip(tensors, in_dims, strict=False)
        )
        return _unfold_clients(F.scaled_dot_product_attention(query, key, value, scale=scale), info.batch_size), 0


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return cast(Tensor, _FoldedLinear.apply(inputs, weight, bias))  # type: ignore[no-untyped-call]


class _FoldedLinear(_Folded):
    """A linear layer: one batch where clients share the weight, else one batched product."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(inputs, weight, bias)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        rows = _clients_first(inputs, in_dims[0], info.batch_size)
        own_weight = weight if in_dims[1] is None else weight.movedim(in_dims[1], 0)
        own_bias = bias if bias is None or in_dims[2] is None else bias.movedim(in_dims[2], 0)
        if rows.dim() > 2:
            return linear(rows, own_weight, own_bias), 0
        return linear(rows.unsqueeze(-2), own_weight, own_bias).squeeze(-2), 0


def _conv2d(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str):
        return F.conv2d(inputs, weight, bias, stride, padding, dilation, groups)
    options = (_pair(stride), _pair(padding), _pair(dilation), groups)
    maps = cast(Tensor, _FoldedConvolution.apply(inputs, weight, options))  # type: ignore[no-untyped-call]
    return maps if bias is None else maps + bias.to(maps.dtype).view(-1, 1, 1)


class _FoldedConvolution(_Folded):
    """A convolution: one batch where clients share the kernel, else one batched product, or grouped as it is."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, options: Any) -> Tensor:
        return F.conv2d(inputs, weight, None, *options)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, weight: Tensor, options: Any
    ) -> tuple[Tensor, int]:
        images = _clients_first(inputs, in_dims[0], info.batch_size)
        if in_dims[1] is None:
            return _unfold_clients(F.conv2d(images.flatten(0, 1), weight, None, *options), len(images)), 0
        kernels = weight.movedim(in_dims[1], 0)
        stride, padding, dilation, groups = options
        if groups > 1:
            channels = images.transpose(0, 1).flatten(1, 2)
            maps = F.conv2d(channels, kernels.flatten(0, 1), None, stride, padding, dilation, groups * len(kernels))
            return maps.reshape(len(maps), len(kernels), -1, *maps.shape[2:]), 1
        size = kernels.shape[-2:]
        # [clients · batch, inputs, positions]
        columns = F.unfold(images.flatten(0, 1), size, dilation, padding, stride)
        product = linear(_unfold_clients(columns, len(images)).mT, kernels.flatten(2), None).mT
        height = (images.shape[-2] + 2 * padding[0] - dilation[0] * (size[0] - 1) - 1) // stride[0] + 1
        return product.reshape(*product.shape[:-1], height, -1), 0


FOLDED: dict[Any, Any] = {F.linear: _linear, F.scaled_dot_product_attention: _attention, F.conv2d: _conv2d}


def _clients_first(tensor: Tensor, axis: int | None, clients: int) -> Tensor:
    return tensor.expand(clients, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def _unfold_clients(tensor: Tensor, clients: int) -> Tensor:
    return tensor.reshape(clients, -1, *tensor.shape[1:])


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
