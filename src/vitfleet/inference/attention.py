"""Attention rollout: which patches of an image a ViT's class token draws on.

Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020: the attention matrices of all layers, averaged
over heads and mixed with the identity for the residual connection, are multiplied.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vitfleet.inference.classifier import Classifier
from vitfleet.models.forward.functional_vit import FunctionalViT
from vitfleet.models.parts import PROMPTS_NAME


def attention_rollout(model: Classifier, images: Tensor) -> Tensor | None:
    """Return the share of each patch of images, ``[batch, rows, columns]``, summing to 1 for each image.

    ``None`` for a model whose attention is not that of a plain ViT: a pyramid, prompts, blocks of a method's own.
    """
    if type(model.net.functional) is not FunctionalViT or getattr(model.vit, PROMPTS_NAME, None) is not None:
        return None
    vit: Any = model.vit
    with torch.inference_mode():
        pixels = model.preprocess(images.to(model.mean.device))
        layers = attention_matrices(vit, pixels)
    rollout = torch.eye(layers[0].shape[-1], device=pixels.device).expand_as(layers[0])
    for attention in layers:
        mixed = 0.5 * attention + 0.5 * torch.eye(attention.shape[-1], device=attention.device)
        rollout = mixed @ rollout
    prefix: int = vit.num_prefix_tokens
    # The class token is what is classified; a model without one averages its patches.
    row = rollout[:, 0] if vit.global_pool == "token" and prefix else rollout[:, prefix:].mean(dim=1)
    patches = row[:, prefix:]
    rows, columns = vit.patch_embed.grid_size
    return (patches / patches.sum(dim=1, keepdim=True)).reshape(-1, rows, columns)


def attention_matrices(vit: Any, pixels: Tensor) -> list[Tensor]:
    """Return each block's attention ``[batch, tokens, tokens]``, averaged over heads, as its module computes it."""
    queries: list[Tensor] = []
    keys: list[Tensor] = []

    # The module passes queries and keys, [batch, heads, tokens, width], through these modules, identities where unused.
    # A hook is called with the module, its inputs and its output.
    hooks = [block.attn.q_norm.register_forward_hook(lambda *call: queries.append(call[2])) for block in vit.blocks]
    hooks += [block.attn.k_norm.register_forward_hook(lambda *call: keys.append(call[2])) for block in vit.blocks]
    try:
        vit(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1).mean(dim=1)
        for query, key in zip(queries, keys, strict=True)
    ]
