"""A ViT with task tokens (DyTox): its last block is a task-attention block, and every task has a token and a head.

The blocks before the last one are the encoder: self-attention over the patches, without a class token. In the last
block the only queries are the task tokens. Each attends to the patches and to itself, never to another task's token
(equations 3 to 6 of DyTox), so a token's output does not depend on how many tasks there are. A task's head is a norm
and a linear layer on the output of its token.

Tokens and heads of all tasks are allocated when the model is built, so shapes never change; ``head.grown`` says which
of them exist. The task that is learned now differs from client to client. So that all clients train the same tensors,
and those of other tasks have neither gradient nor weight decay, the token and the head that train are tensors of their
own (``head.new_…``). They replace those of the task that ``head.current`` marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.errors import ConfigError
from vitfleet.message import Tensors, with_prefix
from vitfleet.models.families.vit import require_plain_vit
from vitfleet.models.forward.functional_vit import FORWARD_PASS, FunctionalViT, layer_scale
from vitfleet.models.forward.stacked_ops import layer_norm, linear

CURRENT, GROWN = "head.current", "head.grown"
#: The tensors of all tasks, ``[tasks, …]``, and those of the task that is learned now.
PER_TASK = {
    f"head.{name}": f"head.new_{name}" for name in ("token", "norm_weight", "norm_bias", "class_weight", "class_bias")
}
DIVERGENCE = tuple(
    f"head.divergence_{name}" for name in ("norm_weight", "norm_bias", "class_weight", "class_bias")
)  # its outputs: an old class, then each class of the current task
TOKEN, NEW_TOKEN = "head.token", "head.new_token"
TEACHER = "teacher."  # prefix of the body of an earlier model, if the weights have one
NOT_GROWN = -1e4  # added to the logits of a task without a head; finite, so that losses are
_NORM_EPS = 1e-6
_STD = 0.02


class TaskHeads(nn.Module):
    """The tokens and heads of all tasks, the ones in training, and the divergence head.

    ``class_to_task`` is the task of each class, −1 for a class that belongs to none.
    """

    class_slots: Tensor

    def __init__(self, embed_dim: int, class_to_task: Sequence[int]) -> None:
        super().__init__()
        tasks = max(class_to_task) + 1
        classes = [[label for label, task in enumerate(class_to_task) if task == index] for index in range(tasks)]
        width = max(len(of_task) for of_task in classes)
        slots = {
            label: task * width + place for task, of_task in enumerate(classes) for place, label in enumerate(of_task)
        }
        ordered = [slots.get(label, tasks * width) for label in range(len(class_to_task))]
        self.register_buffer("class_slots", torch.tensor(ordered), persistent=False)
        self.register_buffer("current", torch.zeros(tasks))
        self.register_buffer("grown", torch.zeros(tasks))
        self.token = _random(tasks, embed_dim)
        self.new_token = _random(embed_dim)
        for prefix, lead, outputs in (("", (tasks,), width), ("new_", (), width), ("divergence_", (), width + 1)):
            self.register_parameter(f"{prefix}norm_weight", nn.Parameter(torch.ones(*lead, embed_dim)))
            self.register_parameter(f"{prefix}norm_bias", nn.Parameter(torch.zeros(*lead, embed_dim)))
            self.register_parameter(f"{prefix}class_weight", _random(*lead, outputs, embed_dim))
            self.register_parameter(f"{prefix}class_bias", nn.Parameter(torch.zeros(*lead, outputs)))


def _random(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=_STD))


def add_task_tokens(vit: Any, class_to_task: Sequence[int]) -> None:
    """Turn a plain ViT into one with task tokens: without class token, its last block a task-attention block."""
    require_plain_vit(vit, "take task tokens")
    if len(vit.blocks) < 2:
        raise ConfigError("model.depth", len(vit.blocks), "must be at least 2: the last block is the task attention")
    prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
    vit.pos_embed = nn.Parameter(vit.pos_embed[:, prefix:].detach().clone())
    vit.cls_token = vit.reg_token = None
    vit.num_prefix_tokens = 0
    vit.norm, vit.fc_norm = nn.Identity(), nn.Identity()
    vit.head = TaskHeads(vit.embed_dim, class_to_task)
    setattr(vit, FORWARD_PASS, TaskTokenViT)


class AuxiliaryOutputs(NamedTuple):
    """What the model returns besides its logits where the weights have a teacher."""

    divergence: Tensor  # of the divergence head on the token in training: an old class, then each class of the task
    logits: Tensor  # of all classes, of any task
    teacher_logits: Tensor  # the same of the teacher


def split_auxiliary(auxiliary: Tensor, num_classes: int) -> AuxiliaryOutputs:
    """Return the parts of the model's auxiliary outputs."""
    num_divergence = auxiliary.shape[-1] - 2 * num_classes
    return AuxiliaryOutputs(*torch.split(auxiliary, [num_divergence, num_classes, num_classes], dim=-1))


class TaskTokenViT(FunctionalViT):
    """The forward pass of a ViT with task tokens.

    Its outputs are the logits and, if the weights have a teacher, :class:`AuxiliaryOutputs`. The teacher is the body of
    an earlier model, under names with the prefix ``teacher.``; it has the same tokens and heads.
    """

    @property
    def num_classes(self) -> int:
        """How many of its outputs are logits."""
        return len(self.vit.head.class_slots)

    def __call__(
        self, weights: Tensors, inputs: Tensor, keep: Tensor | None, start: int, stop: int | None, depth: int | None
    ) -> Tensor:
        """Return the outputs, or the tokens that enter a block; see :class:`FunctionalViT`."""
        if depth is not None:
            raise ValueError("the blocks of a ViT with task tokens cannot be skipped")
        if stop is not None:
            return super().__call__(weights, inputs, keep, start, stop, None)
        embeddings = self.embeddings(weights, inputs, keep, start)
        logits = self.logits(weights, embeddings)
        teacher = with_prefix(weights, TEACHER)
        if not teacher:
            return logits
        earlier = {**weights, **teacher}
        taught = self.logits(earlier, self.embeddings(earlier, inputs, keep, start))
        return torch.cat([logits, self.divergence(weights, embeddings), logits, taught], dim=-1)

    def embeddings(self, weights: Tensors, inputs: Tensor, keep: Tensor | None, start: int) -> Tensor:
        """Return the output of each task's token, ``[…, batch, tasks, width]``."""
        last = len(self.vit.blocks) - 1
        patches = super().__call__(weights, inputs, keep, start, last, None)
        block = self.vit.blocks[last]
        own = {name: weights[f"blocks.{last}.{name}"] for name in self.block_weight_dims}
        task_tokens = _with_new(weights, TOKEN)
        task_tokens = task_tokens.expand(*patches.shape[:-3], *task_tokens.shape[-2:])
        normed, normed_patches = (self._norm(own, "norm1", block.norm1, part) for part in (task_tokens, patches))
        attended = self._task_attention(own, block.attn, normed, normed_patches)
        tokens = task_tokens.unsqueeze(-3) + layer_scale(own, "ls1", attended)
        hidden = block.mlp.act(self._linear(own, "mlp.fc1", self._norm(own, "norm2", block.norm2, tokens)))
        hidden = self._norm(own, "mlp.norm", block.mlp.norm, hidden)
        return tokens + layer_scale(own, "ls2", self._linear(own, "mlp.fc2", hidden))

    def _task_attention(self, weights: Tensors, module: Any, task_tokens: Tensor, patches: Tensor) -> Tensor:
        """Return the attention of each task token to itself and to the patches, ``[…, batch, tasks, width]``."""
        heads, width = module.num_heads, patches.shape[-1]

        def split(projected: Tensor, parts: int) -> tuple[Tensor, ...]:
            return projected.reshape(*projected.shape[:-1], parts, heads, -1).unbind(-3)

        queries, own_keys, own_values = split(self._linear(weights, "attn.qkv", task_tokens), 3)
        # Patches are never queries.
        weight, bias = weights["attn.qkv.weight"], weights.get("attn.qkv.bias")
        keys, values = split(linear(patches, weight[..., width:, :], None if bias is None else bias[..., width:]), 2)
        queries = self._norm(weights, "attn.q_norm", module.q_norm, queries) * module.scale
        own_keys, keys = (self._norm(weights, "attn.k_norm", module.k_norm, part) for part in (own_keys, keys))
        to_patches = torch.einsum("...thc,...bnhc->...bhtn", queries, keys)
        to_itself = (queries * own_keys).sum(dim=-1).mT.unsqueeze(-1).unsqueeze(-4)  # […, 1, heads, tasks, 1]
        scores = torch.cat([to_itself.expand(*to_patches.shape[:-1], 1), to_patches], dim=-1)
        attention = scores.float().softmax(dim=-1).to(values.dtype)
        outputs = torch.einsum("...bhtn,...bnhc->...bthc", attention[..., 1:], values)
        outputs = outputs + attention[..., 0].mT.unsqueeze(-1) * own_values.unsqueeze(-4)
        outputs = self._norm(weights, "attn.norm", module.norm, outputs.flatten(-2))
        return self._linear(weights, "attn.proj", outputs)

    def logits(self, weights: Tensors, embeddings: Tensor) -> Tensor:
        """Return the logits of all classes, each from the token and the head of its task."""
        normed = F.layer_norm(embeddings, embeddings.shape[-1:], eps=_NORM_EPS)
        normed = normed * _with_new(weights, "head.norm_weight").unsqueeze(-3)
        normed = normed + _with_new(weights, "head.norm_bias").unsqueeze(-3)
        by_task = torch.einsum("...btd,...tkd->...btk", normed, _with_new(weights, "head.class_weight")).float()
        by_task = by_task + _with_new(weights, "head.class_bias").unsqueeze(-3)
        missing = (1 - weights[GROWN]) * NOT_GROWN
        by_task = by_task + missing.unsqueeze(-2).unsqueeze(-1)
        by_slot = F.pad(by_task.flatten(-2), (0, 1), value=NOT_GROWN)  # the last one: classes without a task
        return by_slot[..., self.vit.head.class_slots]

    def divergence(self, weights: Tensors, embeddings: Tensor) -> Tensor:
        """Return the outputs of the divergence head on the token in training."""
        current = torch.einsum("...t,...btd->...bd", weights[CURRENT].to(embeddings.dtype), embeddings)
        norm_weight, norm_bias, weight, bias = (weights[name] for name in DIVERGENCE)
        return linear(layer_norm(current, norm_weight, norm_bias, _NORM_EPS), weight, bias).float()


def _with_new(weights: Tensors, name: str) -> Tensor:
    """Return a tensor of all tasks, in which the one in training replaces that of the current task."""
    new = weights[PER_TASK[name]]
    trailing = (1,) * (2 if name == "head.class_weight" else 1)
    is_current = weights[CURRENT] > 0
    return torch.where(
        is_current.reshape(*is_current.shape, *trailing), new.unsqueeze(-1 - len(trailing)), weights[name]
    )
