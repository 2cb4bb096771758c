"""DyTox written out by hand: image by image, task by task, on timm's own blocks and with plain softmaxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from vitfleet.message import Tensors
from vitfleet.models.net import Net


def normalised(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.5) / 0.5


def task_embedding(net: Net, weights: Tensors, image: Tensor, token: Tensor) -> Tensor:
    """Return what the task-attention block makes of one token and one image."""
    vit: Any = net.module.vit
    patch = vit.patch_embed.proj.kernel_size[0]
    embedded = F.conv2d(
        image.unsqueeze(0), weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=patch
    )
    tokens = embedded.flatten(2).mT + weights["pos_embed"]
    last = len(vit.blocks) - 1
    for index in range(last):
        prefix = f"blocks.{index}."
        own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
        tokens = functional_call(vit.blocks[index], own, (tokens,))
    block = {
        name.removeprefix(f"blocks.{last}."): weights[name] for name in weights if name.startswith(f"blocks.{last}.")
    }
    width, heads = len(token), vit.blocks[last].attn.num_heads
    z = torch.cat([token.unsqueeze(0), tokens[0]])
    normed = F.layer_norm(z, (width,), block["norm1.weight"], block["norm1.bias"], 1e-6)
    w_q, w_k, w_v = torch.split(block["attn.qkv.weight"], width)
    b_q, b_k, b_v = torch.split(block["attn.qkv.bias"], width)
    attended = []
    for head in range(heads):
        part = slice(head * width // heads, (head + 1) * width // heads)
        q = w_q[part] @ normed[0] + b_q[part]
        k, v = normed @ w_k[part].T + b_k[part], normed @ w_v[part].T + b_v[part]
        attention = torch.exp(k @ q / (width // heads) ** 0.5)
        attended.append((attention / attention.sum()) @ v)
    token = token + block["attn.proj.weight"] @ torch.cat(attended) + block["attn.proj.bias"]
    normed = F.layer_norm(token, (width,), block["norm2.weight"], block["norm2.bias"], 1e-6)
    hidden = F.gelu(block["mlp.fc1.weight"] @ normed + block["mlp.fc1.bias"])
    return token + block["mlp.fc2.weight"] @ hidden + block["mlp.fc2.bias"]


def task_tensors(weights: Tensors, task: int, current: int | None) -> dict[str, Tensor]:
    """Return the token and the head of a task: those in training for the current one."""
    names = ("token", "norm_weight", "norm_bias", "class_weight", "class_bias")
    if task == current:
        return {name: weights[f"head.new_{name}"] for name in names}
    return {name: weights[f"head.{name}"][task] for name in names}


def forward(net: Net, weights: Tensors, pixels: Tensor, tasks: list[int], current: int | None) -> tuple[Tensor, Tensor]:
    """Return the logits of all classes as if every task had a head, and the divergence head's outputs."""
    logits, divergence = [], []
    for image in normalised(pixels):
        row = torch.empty(len(tasks))
        for task in sorted(set(tasks) - {-1}):
            own = task_tensors(weights, task, current)
            embedding = task_embedding(net, weights, image, own["token"])
            normed = F.layer_norm(embedding, embedding.shape, own["norm_weight"], own["norm_bias"], 1e-6)
            classes = [label for label, of in enumerate(tasks) if of == task]
            row[classes] = (own["class_weight"] @ normed + own["class_bias"])[: len(classes)]
            if task == current:
                scale, shift = (weights[f"head.divergence_{name}"] for name in ("norm_weight", "norm_bias"))
                normed = F.layer_norm(embedding, embedding.shape, scale, shift, 1e-6)
                divergence.append(
                    weights["head.divergence_class_weight"] @ normed + weights["head.divergence_class_bias"]
                )
        logits.append(row)
    return torch.stack(logits), torch.stack(divergence) if divergence else torch.empty(0)


def binary_cross_entropy(logits: Tensor, targets: list[bool]) -> Tensor:
    """Return the mean over the classes of −log σ(±z)."""
    signs = torch.tensor([1.0 if target else -1.0 for target in targets])
    return torch.log1p(torch.exp(-signs * logits)).mean()


def kullback_leibler(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the sum over classes of p log(p/q)."""
    p, q = teacher.exp() / teacher.exp().sum(), student.exp() / student.exp().sum()
    return (p * (p / q).log()).sum()
