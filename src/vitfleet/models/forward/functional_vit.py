"""The forward pass of a plain ViT as a function of its weights, for one client or for several stacked.

A module, ours or timm's, defines the architecture and the names of the weights. The forward pass is written here as
tensor operations, so that it can be split at a block, masked and stacked. A weight is shared by all clients or has a
leading axis of clients. Tokens are ``[batch, tokens, width]`` or ``[clients, batch, tokens, width]``. `torch.func`
could stack the module itself, but fused attention has no batching rule and falls back to a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vitfleet.message import Tensors, with_prefix
from vitfleet.models.adapters import LowRankLinear
from vitfleet.models.forward.stacked_ops import (
    attention,
    broadcast_channels,
    insert_prompts,
    kept_patches,
    layer_norm,
    linear,
    patchify,
)
from vitfleet.models.parts import LORA_PREFIX, PROMPTS_NAME

#: Attribute of an architecture whose forward pass is another subclass of :class:`FunctionalViT`.
FORWARD_PASS = "forward_pass"


class BlockOutput(NamedTuple):
    """The tokens after a block, and how many prompts are among them."""

    tokens: Tensor
    num_prompts: int


class FunctionalViT:
    """The forward pass of one plain ViT.

    The weights of its module, the architecture, are not used. ``short_attention`` is vitfleet's Triton kernel for few
    tokens in bfloat16; it needs a GPU.
    """

    #: How many of the last blocks the head sees.
    head_blocks = 1

    def __init__(
        self, vit: Any, compile_blocks: bool = False, fused_attention: bool = True, short_attention: bool = False
    ) -> None:
        self.vit = vit
        self.settings: dict[str, Any] = {
            "compile_blocks": compile_blocks,
            "fused_attention": fused_attention,
            "short_attention": short_attention,
        }
        self.fused_attention = fused_attention
        # Imported only if it is used: the module needs Triton.
        self.kernel: Any = import_module("vitfleet.models.forward.short_attention") if short_attention else None
        # All blocks of a plain ViT have the same structure, so one compiled block serves them all: compiling it takes
        # seconds, compiling the whole model would take minutes.
        self.first_block = vit.blocks[0]
        modules = self.first_block.named_modules()
        self.low_rank = {path: module for path, module in modules if isinstance(module, LowRankLinear)}
        self.block_weight_dims = {name: weight.dim() for name, weight in self.first_block.named_parameters()}
        self._compiled_block: Any = torch.compile(self._run_block, dynamic=False) if compile_blocks else None
        self.prefix_names = [
            name for name in ("cls_token", "dist_token", "reg_token") if getattr(vit, name, None) is not None
        ]
        self.has_prompts: bool = getattr(vit, PROMPTS_NAME, None) is not None

    @property
    def num_classes(self) -> int | None:
        """How many of its outputs are logits, where it has more: the others are for the loss. ``None``: all of them."""
        return None

    @property
    def stackable(self) -> bool:
        """Whether weights may have a leading axis of clients."""
        return self.vit.attn_pool is None

    def with_settings(self, vit: Any = None, **settings: bool) -> FunctionalViT:
        """Return this forward pass with some settings changed, or for another module."""
        return type(self)(self.vit if vit is None else vit, **{**self.settings, **settings})

    def __call__(
        self, weights: Tensors, inputs: Tensor, keep: Tensor | None, start: int, stop: int | None, depth: int | None
    ) -> Tensor:
        """Return logits, or with a ``stop`` the tokens that enter that block.

        ``inputs`` are images or, if ``start`` is not 0, the tokens that enter block ``start``. ``keep`` holds the
        positions of the patches that are kept, ``[…, batch, kept]``: the others are never embedded. With a ``depth``
        only so many blocks are used.
        """
        outputs = self._run(weights, inputs, keep, start, stop, depth)
        return outputs[-1].tokens if stop is not None else self.head(weights, self._final_tokens(weights, outputs))

    def with_representation(
        self, weights: Tensors, images: Tensor, keep: Tensor | None, depth: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return logits, and the pooled tokens of which they are computed."""
        tokens = self._final_tokens(weights, self._run(weights, images, keep, 0, None, depth))
        return self.head(weights, tokens), self.pool(weights, tokens)

    def representation(self, weights: Tensors, images: Tensor, keep: Tensor | None) -> Tensor:
        """Return the pooled tokens of which logits are computed; the head's weights are not needed."""
        return self.pool(weights, self._final_tokens(weights, self._run(weights, images, keep, 0, None, None)))

    def _run(
        self, weights: Tensors, inputs: Tensor, keep: Tensor | None, start: int, stop: int | None, depth: int | None
    ) -> list[BlockOutput]:
        """Run blocks; return what the last ``head_blocks`` of them return, or what entered where none is run."""
        vit = self.vit
        last = len(vit.blocks) if depth is None else depth
        tokens = inputs if start else self._norm(weights, "norm_pre", vit.norm_pre, self.embed(weights, inputs, keep))
        num_prompts = 0
        outputs = [BlockOutput(tokens, num_prompts)]
        for index in range(start, last if stop is None else stop):
            if self.has_prompts:
                # [blocks, prompts, width], after the axis of clients if they have their own
                prompts = weights[PROMPTS_NAME].unbind(-3)
                if index < len(prompts):
                    tokens = insert_prompts(tokens, prompts[index], vit.num_prefix_tokens, num_replaced=num_prompts)
                    num_prompts = prompts[index].shape[-2]
            tokens = self.block(weights, index, tokens)
            outputs = [*outputs, BlockOutput(tokens, num_prompts)][-self.head_blocks :]
        return outputs

    def _final_tokens(self, weights: Tensors, outputs: Sequence[BlockOutput]) -> Tensor:
        """Return the normalised tokens that the head sees: those of the last block without prompts."""
        tokens, num_prompts = outputs[-1]
        return self._without_prompts(self._norm(weights, "norm", self.vit.norm, tokens), num_prompts)

    def _without_prompts(self, tokens: Tensor, num_prompts: int) -> Tensor:
        if not num_prompts:
            return tokens
        prefix = self.vit.num_prefix_tokens
        return torch.cat([tokens[..., :prefix, :], tokens[..., prefix + num_prompts :, :]], dim=-2)

    def embed(self, weights: Tensors, images: Tensor, keep: Tensor | None) -> Tensor:
        """Embed the kept patches of images with their positions, after the prefix tokens."""
        prefix = [weights[name] for name in self.prefix_names]
        positions = self.positions(weights)
        prefix_positions = 0 if self.vit.no_embed_class else sum(token.shape[-2] for token in prefix)
        patch_positions = positions[..., prefix_positions:, :]
        if keep is not None:
            if patch_positions.dim() == 3:
                patch_positions = patch_positions[0][keep]
            else:
                client = torch.arange(keep.shape[0], device=keep.device)[:, None, None]
                patch_positions = patch_positions[:, 0][client, keep]
        tokens = self.embed_patches(weights, images, keep) + patch_positions
        if not prefix:
            return tokens
        prefix_tokens = torch.cat(prefix, dim=-2)
        if prefix_positions:
            prefix_tokens = prefix_tokens + positions[..., :prefix_positions, :]
        return torch.cat([prefix_tokens.expand(*tokens.shape[:-2], -1, -1), tokens], dim=-2)

    def embed_patches(self, weights: Tensors, images: Tensor, keep: Tensor | None) -> Tensor:
        """Embed the kept patches of images, without positions."""
        kernel = weights["patch_embed.proj.weight"]
        size = kernel.shape[-1]
        patches = patchify(images, size) if keep is None else kept_patches(images, size, keep)
        embedded = linear(patches, kernel.flatten(-3), weights.get("patch_embed.proj.bias"))
        return self._norm(weights, "patch_embed.norm", self.vit.patch_embed.norm, embedded)

    def positions(self, weights: Tensors) -> Tensor:
        """Return the position embeddings."""
        return weights["pos_embed"]

    def block(self, weights: Tensors, index: int, tokens: Tensor) -> Tensor:
        """Run one transformer block."""
        block_weights = {name: weights[f"blocks.{index}.{name}"] for name in self.block_weight_dims}
        run = self._run_block if self._compiled_block is None else self._run_compiled
        return run(block_weights, tokens)

    def _run_compiled(self, weights: Tensors, tokens: Tensor) -> Tensor:
        """Run the compiled block, which is compiled once for any number of clients.

        It is compiled anew only where the computation differs: whether its weights train, and whether clients share
        them. Clients that share all of them are one batch.
        """
        stacked = [weight for name, weight in weights.items() if weight.dim() > self.block_weight_dims[name]]
        inputs = tokens if stacked else tokens.flatten(0, -3)
        for tensor in (inputs, *stacked):
            if tensor.shape[0] > 1:  # torch always compiles a size of 1 separately
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        outputs: Tensor = self._compiled_block(weights, inputs)
        return outputs.reshape(tokens.shape)

    def _run_block(self, weights: Tensors, tokens: Tensor) -> Tensor:
        """Run a block whose weights have names relative to it."""
        block = self.first_block
        normed = self._norm(weights, "norm1", block.norm1, tokens)
        tokens = tokens + layer_scale(weights, "ls1", self._attention(weights, "attn", block.attn, normed))
        normed = self._norm(weights, "norm2", block.norm2, tokens)
        hidden = block.mlp.act(self._linear(weights, "mlp.fc1", normed))
        hidden = self._norm(weights, "mlp.norm", block.mlp.norm, hidden)
        return tokens + layer_scale(weights, "ls2", self._linear(weights, "mlp.fc2", hidden))

    def head(self, weights: Tensors, tokens: Tensor) -> Tensor:
        """Pool the tokens of the last block and return logits."""
        if "dist_token" in self.prefix_names:
            both = (self._linear(weights, name, tokens[..., i, :]) for i, name in enumerate(("head", "head_dist")))
            return sum(both, start=torch.zeros((), device=tokens.device)) / 2
        return self._linear(weights, "head", self.pool(weights, tokens))

    @property
    def representation_width(self) -> int | None:
        """Length of what :meth:`representation` returns, where it is not the input of the linear layer."""
        return None

    def head_input(self, weights: Tensors, representation: Tensor) -> Tensor:
        """Return the input of the head's linear layer, given what :meth:`representation` returns."""
        return representation

    def pool(self, weights: Tensors, tokens: Tensor) -> Tensor:
        """Return the input of the classifier, ``[…, batch, width]``."""
        vit = self.vit
        if vit.attn_pool is None and vit.global_pool == "token":
            pooled = tokens[..., 0, :]
        else:
            pool_tokens = tokens[..., 0 if vit.pool_include_prefix else vit.num_prefix_tokens :, :]
            pooled = pool_tokens.mean(dim=-2) if vit.attn_pool is None else self._attention_pool(weights, pool_tokens)
        return self._norm(weights, "fc_norm", vit.fc_norm, pooled)

    def _attention_pool(self, weights: Tensors, tokens: Tensor) -> Tensor:
        pooled: Tensor = functional_call(self.vit.attn_pool, with_prefix(weights, "attn_pool."), tokens)
        return pooled

    def _attention(self, weights: Tensors, path: str, module: Any, tokens: Tensor) -> Tensor:
        *batch, count, _ = tokens.shape
        qkv = self._linear(weights, f"{path}.qkv", tokens)
        qkv = qkv.reshape(*batch, count, 3, module.num_heads, module.head_dim)
        # Attention has no weights: the axis of clients is folded into the batch, and one kernel serves them all.
        if self._kernel_applies(module, qkv):
            outputs = self.kernel.short_attention(qkv.flatten(0, -5))
        else:
            queries, keys, values = qkv.unbind(-3)
            queries = self._norm(weights, f"{path}.q_norm", module.q_norm, queries)
            keys = self._norm(weights, f"{path}.k_norm", module.k_norm, keys)
            q, k, v = (part.reshape(-1, count, *part.shape[-2:]).transpose(1, 2) for part in (queries, keys, values))
            outputs = F.scaled_dot_product_attention(q, k, v) if self.fused_attention else attention(q, k, v)
            outputs = outputs.transpose(1, 2)
        outputs = self._norm(weights, f"{path}.norm", module.norm, outputs.reshape(*batch, count, -1))
        return self._linear(weights, f"{path}.proj", outputs)

    def _kernel_applies(self, module: Any, qkv: Tensor) -> bool:
        if self.kernel is None or qkv.dtype != torch.bfloat16:
            return False
        without_norms = isinstance(module.q_norm, nn.Identity) and isinstance(module.k_norm, nn.Identity)
        return without_norms and bool(self.kernel.is_supported(qkv.shape[-4], qkv.shape[-1]))

    def _linear(self, weights: Tensors, path: str, inputs: Tensor) -> Tensor:
        outputs = linear(inputs, weights[f"{path}.weight"], weights.get(f"{path}.bias"))
        layer = self.low_rank.get(path)
        if layer is None:
            return outputs
        slices = list(outputs.chunk(layer.num_slices, dim=-1))
        for name, target in layer.targets.items():
            low_rank = linear(inputs, weights[f"{path}.{LORA_PREFIX}a_{name}"], None)
            update = linear(low_rank, weights[f"{path}.{LORA_PREFIX}b_{name}"], None)
            slices[target.slice] = slices[target.slice] + layer.scale * update
        return torch.cat(slices, dim=-1)

    def _norm(self, weights: Tensors, path: str, module: Any, inputs: Tensor) -> Tensor:
        if isinstance(module, nn.Identity):
            return inputs
        return layer_norm(inputs, weights[f"{path}.weight"], weights.get(f"{path}.bias"), module.eps)


def layer_scale(weights: Tensors, path: str, inputs: Tensor) -> Tensor:
    """Scale the channels of a block's residual, if the block has such weights."""
    scale = weights.get(f"{path}.gamma")
    return inputs if scale is None else inputs * broadcast_channels(scale, inputs)
