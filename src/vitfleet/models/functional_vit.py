"""A plain ViT as a function of its weights, for one client or for many at once.

timm's module says what the model is made of and how its weights are called; its forward pass is written here as plain
tensor operations, so that it can be cut, masked, and stacked. Every weight may come as it is, shared by all, or with
a leading axis of clients; tokens are ``[batch, tokens, width]``, or ``[clients, batch, tokens, width]``. Where a weight
is shared, the clients' tokens pass through it as one batch; where each client has its own, as one batched product.
`torch.func` could stack timm's own module, but fused attention has no rule for it and falls back to a loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vitfleet.message import Tensors
from vitfleet.models.adapters import LowRankLinear
from vitfleet.models.anatomy import LORA, PROMPTS


class FunctionalViT:
    """The forward pass of one plain ViT.

    Parameters
    ----------
    vit
        What the model is made of; its own weights are not looked at.
    compiled
        Whether to compile its layers.
    fused
        Whether attention is torch's fused kernel, or written out.
    short
        Whether attention over few tokens, in bfloat16, is our own kernel, which needs a GPU.
    """

    def __init__(self, vit: Any, compiled: bool = False, fused: bool = True, short: bool = False) -> None:
        self.vit = vit
        self.fused = fused
        self.kernel: Any = import_module("vitfleet.models.attention") if short else None  # only then: it needs Triton
        # All layers of a plain ViT are made alike: what holds for the first, holds for every one, and so does what was
        # compiled for it. That takes seconds, where the whole model would take minutes.
        self.first = vit.blocks[0]
        self.names = [name for name, _ in self.first.named_parameters()]
        self.low_rank = {path: one for path, one in self.first.named_modules() if isinstance(one, LowRankLinear)}
        self.layer = torch.compile(self._layer, dynamic=False) if compiled else self._layer
        self.prefix = [
            name for name in ("cls_token", "dist_token", "reg_token") if getattr(vit, name, None) is not None
        ]
        self.prompts: bool = getattr(vit, PROMPTS, None) is not None

    def __call__(
        self, weights: Tensors, inputs: Tensor, keep: Tensor | None, start: int, stop: int | None, depth: int | None
    ) -> Tensor:
        """Return logits, or the tokens on the way to them.

        Parameters
        ----------
        inputs
            Images; where ``start`` is not 0, the tokens that enter that block.
        keep
            Positions of the patches that are kept, ``[…, batch, kept]``; the others are never embedded.
        start, stop
            Run the blocks from ``start`` to before ``stop``; with a ``stop``, return the tokens that leave there.
        depth
            Blocks of the model, where it is not all of them: the others are left out.
        """
        vit = self.vit
        last = len(vit.blocks) if depth is None else depth
        tokens = inputs if start else self._norm(weights, "norm_pre", vit.norm_pre, self.embed(weights, inputs, keep))
        added = 0
        for place in range(start, last if stop is None else stop):
            if self.prompts:
                # [layers, prompts, width], with the clients' axis before it where they have their own
                prompts = weights[PROMPTS].unbind(-3)
                if place < len(prompts):
                    tokens = put_prompts(tokens, prompts[place], vit.num_prefix_tokens, replace=added)
                    added = prompts[place].shape[-2]
            tokens = self.block(weights, place, tokens)
        if stop is not None:
            return tokens
        tokens = self._norm(weights, "norm", vit.norm, tokens)
        if added:
            prefix = vit.num_prefix_tokens
            tokens = torch.cat([tokens[..., :prefix, :], tokens[..., prefix + added :, :]], dim=-2)
        return self.head(weights, tokens)

    def embed(self, weights: Tensors, images: Tensor, keep: Tensor | None) -> Tensor:
        """Cut images into patches, leave the dropped out, embed the others with their own positions, add tokens."""
        vit = self.vit
        kernel = weights["patch_embed.proj.weight"]
        patches = cut(images, kernel.shape[-1])
        prefix = [weights[name] for name in self.prefix]
        positions = weights["pos_embed"]
        own = 0 if vit.no_embed_class else sum(token.shape[-2] for token in prefix)
        places = positions[..., own:, :]
        if keep is not None:
            patches = patches.gather(-2, keep.unsqueeze(-1).expand(*keep.shape, patches.shape[-1]))
            if places.dim() == 3:
                places = places[0][keep]
            else:
                client = torch.arange(keep.shape[0], device=keep.device)[:, None, None]
                places = places[:, 0][client, keep]
        rows = affine(patches, kernel.flatten(-3), weights.get("patch_embed.proj.bias"))
        tokens = self._norm(weights, "patch_embed.norm", vit.patch_embed.norm, rows) + places
        if not prefix:
            return tokens
        head = torch.cat(prefix, dim=-2)
        if own:
            head = head + positions[..., :own, :]
        return torch.cat([head.expand(*tokens.shape[:-2], -1, -1), tokens], dim=-2)

    def block(self, weights: Tensors, place: int, tokens: Tensor) -> Tensor:
        """Run one transformer layer."""
        return self.layer({name: weights[f"blocks.{place}.{name}"] for name in self.names}, tokens)

    def _layer(self, own: Tensors, tokens: Tensor) -> Tensor:
        block = self.first
        normed = self._norm(own, "norm1", block.norm1, tokens)
        tokens = tokens + _scaled(own, "ls1", self._attend(own, "attn", block.attn, normed))
        normed = self._norm(own, "norm2", block.norm2, tokens)
        hidden = block.mlp.act(self._linear(own, "mlp.fc1", normed))
        hidden = self._norm(own, "mlp.norm", block.mlp.norm, hidden)
        return tokens + _scaled(own, "ls2", self._linear(own, "mlp.fc2", hidden))

    def head(self, weights: Tensors, tokens: Tensor) -> Tensor:
        """Return the logits of the last tokens."""
        vit = self.vit
        if "dist_token" in self.prefix:
            both = (self._linear(weights, name, tokens[..., i, :]) for i, name in enumerate(("head", "head_dist")))
            return sum(both, start=torch.zeros((), device=tokens.device)) / 2
        if vit.attn_pool is not None:
            own = {
                name.removeprefix("attn_pool."): one for name, one in weights.items() if name.startswith("attn_pool.")
            }
            pooled = functional_call(
                vit.attn_pool, own, tokens[..., 0 if vit.pool_include_prefix else vit.num_prefix_tokens :, :]
            )
        elif vit.global_pool == "token":
            pooled = tokens[..., 0, :]
        else:
            pooled = tokens[..., 0 if vit.pool_include_prefix else vit.num_prefix_tokens :, :].mean(dim=-2)
        return self._linear(weights, "head", self._norm(weights, "fc_norm", vit.fc_norm, pooled))

    def _attend(self, weights: Tensors, path: str, attention: Any, tokens: Tensor) -> Tensor:
        *batch, count, _ = tokens.shape
        qkv = self._linear(weights, f"{path}.qkv", tokens)
        qkv = qkv.reshape(*batch, count, 3, attention.num_heads, attention.head_dim)
        # Attention has no weights: the clients' axis is folded into the batch, and one kernel serves them all.
        if self._suits_kernel(attention, qkv):
            mixed = self.kernel.attend(qkv.flatten(0, -5))
        else:
            queries, keys, values = qkv.unbind(-3)
            queries = self._norm(weights, f"{path}.q_norm", attention.q_norm, queries)
            keys = self._norm(weights, f"{path}.k_norm", attention.k_norm, keys)
            q, k, v = (one.reshape(-1, count, *one.shape[-2:]).transpose(1, 2) for one in (queries, keys, values))
            mixed = F.scaled_dot_product_attention(q, k, v) if self.fused else mix(q, k, v)
            mixed = mixed.transpose(1, 2)
        mixed = self._norm(weights, f"{path}.norm", attention.norm, mixed.reshape(*batch, count, -1))
        return self._linear(weights, f"{path}.proj", mixed)

    def _suits_kernel(self, attention: Any, qkv: Tensor) -> bool:
        if self.kernel is None or qkv.dtype != torch.bfloat16:
            return False
        plain = isinstance(attention.q_norm, nn.Identity) and isinstance(attention.k_norm, nn.Identity)
        return plain and bool(self.kernel.suits(qkv.shape[-4], qkv.shape[-1]))

    def _linear(self, weights: Tensors, path: str, inputs: Tensor) -> Tensor:
        outputs = affine(inputs, weights[f"{path}.weight"], weights.get(f"{path}.bias"))
        layer = self.low_rank.get(path)
        if layer is None:
            return outputs
        parts = list(outputs.chunk(layer.slices, dim=-1))
        for factor, target in layer.targets.items():
            low = affine(inputs, weights[f"{path}.{LORA}a_{factor}"], None)
            update = affine(low, weights[f"{path}.{LORA}b_{factor}"], None)
            parts[target.slice] = parts[target.slice] + layer.scale * update
        return torch.cat(parts, dim=-1)

    def _norm(self, weights: Tensors, path: str, norm: Any, inputs: Tensor) -> Tensor:
        if isinstance(norm, nn.Identity):
            return inputs
        weight, bias = weights[f"{path}.weight"], weights.get(f"{path}.bias")
        if weight.dim() == 1 and (bias is None or bias.dim() == 1):
            return F.layer_norm(inputs, weight.shape, weight, bias, norm.eps)
        normed = F.layer_norm(inputs, weight.shape[-1:], eps=norm.eps) * spread(weight, inputs)
        return normed if bias is None else normed + spread(bias, inputs)


def mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mix values by how well queries and keys agree; all ``[batch, heads, tokens, width]``."""
    agreement: Tensor = (queries * queries.shape[-1] ** -0.5) @ keys.mT
    return agreement.softmax(dim=-1) @ values


def affine(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``inputs · weightᵀ + bias``, where weight and bias are shared, or each client's own."""
    if weight.dim() == 2:
        if bias is None or bias.dim() == 1:
            return F.linear(inputs, weight, bias)
        outputs = F.linear(inputs, weight)
    else:
        rows = inputs.flatten(1, -2)
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, weight = rows.to(dtype), weight.to(dtype)
        product: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
        outputs = product.reshape(*inputs.shape[:-1], weight.shape[-2])
    return outputs if bias is None else outputs + spread(bias, outputs).to(outputs.dtype)


class _Product(torch.autograd.Function):
    """``rows · weightᵀ`` of every client, whose gradient lies in memory as the weight does.

    Autograd would leave it transposed, and a fused optimiser goes through memory as it lies.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.bmm(rows, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight = ctx.needs_input_grad
        return (
            torch.bmm(gradient, weight) if wants_rows else None,
            torch.bmm(gradient.mT, rows) if wants_weight else None,
        )


def spread(vector: Tensor, inputs: Tensor) -> Tensor:
    """Return a weight of one number a channel so that it broadcasts over inputs; a client's own over its inputs."""
    return vector if vector.dim() == 1 else vector.view(vector.shape[0], *(1,) * (inputs.dim() - 2), -1)


def cut(images: Tensor, side: int) -> Tensor:
    """Cut images into patches, ``[…, patches, channels · side²]``, row by row."""
    *lead, channels, height, width = images.shape
    tiles = images.reshape(-1, channels, height // side, side, width // side, side).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(*lead, -1, channels * side * side)


def put_prompts(tokens: Tensor, prompts: Tensor, prefix: int, replace: int) -> Tensor:
    """Put prompts after the prefix tokens, in the place of the ``replace`` prompts of the block before."""
    rows = (prompts if prompts.dim() == 2 else prompts.unsqueeze(1)).expand(*tokens.shape[:-2], -1, -1)
    return torch.cat([tokens[..., :prefix, :], rows, tokens[..., prefix + replace :, :]], dim=-2)


def _scaled(weights: Tensors, path: str, inputs: Tensor) -> Tensor:
    scale = weights.get(f"{path}.gamma")
    return inputs if scale is None else inputs * spread(scale, inputs)
