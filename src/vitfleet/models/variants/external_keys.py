"""A ViT whose attention has learned external keys instead of keys of its input, and two classifiers (LVT).

In every block a token j has a key K_j and, per head, a bias b_j. They do not depend on the image: they are weights,
``[tokens, width]`` and ``[heads, tokens]``, without a batch axis. Queries and values are those of the input x:

    attention(x) = softmax(Q(x) Kᵀ/√d + b) V(x)

Of a masked image only the keys of the kept tokens are used. ``head.weight`` and ``head.bias`` are the accumulation
classifier, which gives the model's logits; the outputs of the injection classifier are auxiliary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitfleet.message import Tensors
from vitfleet.models.families.vit import require_plain_vit
from vitfleet.models.forward.functional_vit import FORWARD_PASS, FunctionalViT
from vitfleet.models.forward.stacked_ops import linear
from vitfleet.models.parts import ModelParts, Selection

INJECTION_WEIGHT, INJECTION_BIAS = "head.injection_weight", "head.injection_bias"
_STD = 0.02


class DualHead(nn.Module):
    """The accumulation classifier and the injection classifier."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.injection_weight = nn.Parameter(nn.init.trunc_normal_(torch.empty_like(head.weight), std=_STD))
        self.injection_bias = nn.Parameter(torch.zeros(head.out_features))


def add_external_keys(vit: Any) -> None:
    """Turn a plain ViT into one with external keys and two classifiers; queries and values keep their weights."""
    require_plain_vit(vit, "have external keys")
    width, num_tokens = vit.embed_dim, vit.num_prefix_tokens + vit.patch_embed.num_patches
    for block in vit.blocks:
        attention = block.attn
        qv = nn.Linear(width, 2 * width, bias=attention.qkv.bias is not None)
        for target, source in zip(qv.parameters(), attention.qkv.parameters(), strict=True):
            query, _, value = source.detach().chunk(3)
            target.data = torch.cat([query, value])
        del attention.qkv
        attention.qv = qv
        # As large as the keys of normalised tokens in a new ViT.
        key = nn.init.trunc_normal_(torch.empty(num_tokens, width), std=_STD * width**0.5)
        attention.register_parameter("key", nn.Parameter(key))
        attention.register_parameter("key_bias", nn.Parameter(torch.zeros(attention.num_heads, num_tokens)))
    vit.head = DualHead(vit.head)
    setattr(vit, FORWARD_PASS, ExternalKeyViT)


def external_keys(parts: ModelParts) -> Selection:
    """Return the external keys and their biases."""
    return parts.select(name for name in parts.shapes if name.split(".")[-1] in ("key", "key_bias"))


class ExternalKeyViT(FunctionalViT):
    """The forward pass of a ViT with external keys. Its auxiliary outputs are those of the injection classifier."""

    @property
    def num_classes(self) -> int:
        """How many of its outputs are logits."""
        return len(self.vit.head.weight)

    def __call__(
        self, weights: Tensors, inputs: Tensor, keep: Tensor | None, start: int, stop: int | None, depth: int | None
    ) -> Tensor:
        """Return the outputs, or the tokens that enter a block; see :class:`FunctionalViT`."""
        if keep is not None:
            weights = {**weights, **self._kept_keys(weights, keep)}
        return super().__call__(weights, inputs, keep, start, stop, depth)

    def _kept_keys(self, weights: Tensors, keep: Tensor) -> dict[str, Tensor]:
        """Return the keys and biases of the kept tokens, which have a batch axis: ``[…, batch, tokens, …]``."""
        prefix = self.vit.num_prefix_tokens
        always = torch.arange(prefix, device=keep.device).expand(*keep.shape[:-1], prefix)
        index = torch.cat([always, keep + prefix], dim=-1)
        client = torch.arange(index.shape[0], device=keep.device)[:, None, None]
        kept: dict[str, Tensor] = {}
        for block in range(len(self.vit.blocks)):
            key, bias = f"blocks.{block}.attn.key", f"blocks.{block}.attn.key_bias"
            for name, of_tokens in ((key, weights[key]), (bias, weights[bias].mT)):
                kept[name] = of_tokens[index] if of_tokens.dim() == 2 else of_tokens[client, index]
        return kept

    def _attention(self, weights: Tensors, path: str, module: Any, tokens: Tensor) -> Tensor:
        """Return the attention of the tokens to the external keys."""
        heads = module.num_heads
        projected = self._linear(weights, f"{path}.qv", tokens)
        queries, values = projected.reshape(*tokens.shape[:-1], 2, heads, -1).unbind(-3)
        queries = self._norm(weights, f"{path}.q_norm", module.q_norm, queries) * module.scale
        keys, bias = weights[f"{path}.key"], weights[f"{path}.key_bias"]
        keys = self._norm(weights, f"{path}.k_norm", module.k_norm, keys.reshape(*keys.shape[:-1], heads, -1))
        if keys.dim() == queries.dim():  # of a masked image: every image has its own
            scores = torch.einsum("...bnhc,...bmhc->...bhnm", queries, keys)
            bias = bias.mT.unsqueeze(-2)
        else:
            scores = torch.einsum("...bnhc,...mhc->...bhnm", queries, keys)
            bias = bias.unsqueeze(-2).unsqueeze(-4)
        attention = (scores.float() + bias).softmax(dim=-1).to(values.dtype)
        outputs = torch.einsum("...bhnm,...bmhc->...bnhc", attention, values).flatten(-2)
        return self._linear(weights, f"{path}.proj", self._norm(weights, f"{path}.norm", module.norm, outputs))

    def head(self, weights: Tensors, tokens: Tensor) -> Tensor:
        """Return the outputs of both classifiers."""
        pooled = self.pool(weights, tokens)
        accumulated = self._linear(weights, "head", pooled)
        injected = linear(pooled, weights["head.injection_weight"], weights["head.injection_bias"])
        return torch.cat([accumulated, injected], dim=-1)
