"""A vision transformer as a pure function of its weights, with token dropping."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.models.forward.batch_norm import MASK_NAME, replace_batch_norms, trained_batch_norms
from vitfleet.models.forward.functional_vit import FunctionalViT
from vitfleet.models.forward.module_call import call_module
from vitfleet.models.forward.stacked_ops import linear
from vitfleet.models.parts import KeptForward, ModelParts, PartPaths, find_parts, part_paths_of

#: How several clients are stacked: by tensor operations of ours, by ``torch.vmap`` over the module, or not at all.
Stacking: TypeAlias = Literal["tensor operations", "vmap", "none"]


@dataclass(frozen=True)
class BatchStatistics:
    """The batch norms that normalise with their batch, and the samples that count."""

    batch_norms: tuple[str, ...]  # module paths; running statistics are updated in place, in the weights of the call
    sample_mask: Tensor  # which samples are not padding, `[…, batch]`


class ModuleWrapper(nn.Module):
    """A model under the attribute ``vit``, with its forward pass on some of an image's patches if it has one.

    It is always in training mode: nothing of a model is random, batch norms are told what to do in every call, and
    some families keep values that they derived from their weights in evaluation mode.
    """

    def __init__(self, vit: nn.Module, forward_kept: KeptForward | None) -> None:
        super().__init__()
        self.vit = vit
        self.forward_kept = forward_kept
        self.train()

    def train(self, mode: bool = True) -> ModuleWrapper:
        """Stay in training mode."""
        return super().train(True)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return logits of images, or of the patches at the positions ``keep`` alone."""
        if keep is None:
            return cast(Tensor, self.vit(images))
        assert self.forward_kept is not None
        return self.forward_kept(self.vit, images, keep)


@dataclass(frozen=True)
class Net:
    """A model architecture. Its weights are an argument of every call."""

    module: ModuleWrapper
    part_paths: PartPaths  # where its family keeps its parts
    parts: ModelParts  # the names of its weights, by part
    functional: FunctionalViT | None  # the forward pass as tensor operations; `None`: the module is called instead
    batch_norms: tuple[str, ...]  # module paths
    num_prefix_tokens: int  # tokens before the patches: class token, registers
    embed_dim: int  # width of a token
    image_size: int  # height and width of the input in pixels
    mean: tuple[float, ...]  # with std: the normalisation of pixels in 0…1
    std: tuple[float, ...]

    @property
    def num_patches(self) -> int:
        """Patches per image; 0 for a family whose tokens cannot be dropped."""
        return self.part_paths.num_patches

    @property
    def stackable(self) -> bool:
        """Whether weights may have a leading axis of clients."""
        return self.stacking != "none"

    @cached_property
    def stacking(self) -> Stacking:
        """How several clients are stacked; a module is tried on two clients without values."""
        if self.functional is not None:
            return "tensor operations" if self.functional.stackable else "none"
        net = self.with_constants_on("meta")
        empty = partial(torch.empty, dtype=next(self.module.parameters()).dtype, device="meta")
        weights = {name: empty(2, *shape) for name, shape in self.parts.shapes.items()}
        images = empty(2, 2, len(self.mean), self.image_size, self.image_size)
        mask = torch.ones(2, 2, dtype=torch.bool, device="meta")
        try:
            net(weights, images, statistics=BatchStatistics(self.batch_norms, mask))
        except (RuntimeError, TypeError, ValueError):  # whatever an operation that cannot be lifted raises
            return "none"
        return "vmap"

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may call it. A module holds the weights of a call while it runs."""
        return self.functional is not None and self.functional.stackable

    def trained_batch_norms(self, selected: Collection[str]) -> tuple[str, ...]:
        """Return the batch norms whose running statistics are among the selected weights."""
        return trained_batch_norms(self.batch_norms, frozenset(selected)) if self.batch_norms else ()

    def __call__(
        self,
        weights: Tensors,
        images: Tensor,
        keep: Tensor | None = None,
        depth: int | None = None,
        statistics: BatchStatistics | None = None,
    ) -> Tensor:
        """Return logits; see :meth:`outputs`."""
        return self.split_outputs(self.outputs(weights, images, keep, depth, statistics))[0]

    def outputs(
        self,
        weights: Tensors,
        images: Tensor,
        keep: Tensor | None = None,
        depth: int | None = None,
        statistics: BatchStatistics | None = None,
    ) -> Tensor:
        """Return logits, and after them the outputs that only the loss of a training needs, if the model has any.

        Parameters
        ----------
        images
            ``[batch, …]``, or ``[clients, batch, …]`` where weights have a leading axis of clients.
        keep
            Positions of the patches that are kept; the others are never embedded.
        depth
            Number of blocks to use, if not all of them; the last ones are skipped.
        statistics
            The batch norms that train; all others use their running statistics.
        """
        skipped = self.parts.blocks[depth:] if depth is not None else ()
        needed = self.parts.shapes.keys() - {name for block in skipped for name in block}
        if missing := needed - weights.keys():
            raise KeyError(f"{len(missing)} of the model's weights are missing, {min(missing)} among them")
        if self.functional is not None:
            return self.functional(weights, images, keep, 0, None, depth)
        shapes = self.parts.shapes
        given = {f"vit.{name}": weights[name] for name in shapes}
        stacked = {f"vit.{name}" for name, shape in shapes.items() if weights[name].dim() > len(shape)}
        if statistics is not None:
            masks = {f"vit.{path}.{MASK_NAME}": statistics.sample_mask for path in statistics.batch_norms}
            given |= masks
            stacked |= set(masks) if images.dim() > 4 else set()
        return call_module(self.module, given, frozenset(stacked), images, keep)

    def outputs_and_representation(
        self, weights: Tensors, images: Tensor, keep: Tensor | None, depth: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the input of the head, ``[…, batch, width]``. Only for a plain ViT."""
        if self.functional is None:
            family = type(self.module.vit).__name__
            raise UserError(f"a representation is known of plain ViTs only, not of a {family}; choose model.name = vit")
        return self.functional.with_representation(weights, images, keep, depth)

    def representation(self, weights: Tensors, images: Tensor, keep: Tensor | None) -> Tensor:
        """Return what the head sees, ``[…, batch, width]``; the head's own weights are not needed.

        It is the input of the head's linear layer, of a head that sees more before that is standardised.

        A family without a forward pass of ours returns it as the logits of a head that is the identity.
        """
        if self.functional is not None:
            return self.functional.representation(weights, images, keep)
        (weight, bias), width = self.linear_head, self.head_width
        identity = torch.eye(width, device=images.device), torch.zeros(width, device=images.device)
        return self.outputs({**weights, weight: identity[0], bias: identity[1]}, images, keep)

    def head_input(self, weights: Tensors, representation: Tensor) -> Tensor:
        """Return the input of the head's linear layer, given what the head sees."""
        return representation if self.functional is None else self.functional.head_input(weights, representation)

    def logits_of(self, weights: Tensors, head_input: Tensor) -> Tensor:
        """Return the logits of a head that is one linear layer, given its input."""
        weight, bias = self.linear_head
        return linear(head_input, weights[weight], weights[bias])

    @property
    def linear_head(self) -> tuple[str, str]:
        """The names of the weight and the bias of a head that is one linear layer.

        Raises
        ------
        UserError
            The head is something else: two layers in distilled models, or one after a batch norm.
        """
        trained = [name for name in self.parts.head if name in self.parts.parameters]
        names = [name for kind in ("weight", "bias") for name in trained if name.split(".")[-1] == kind]
        if len(names) != 2:
            family = type(self.module.vit).__name__
            raise UserError(f"model.name: the head of a {family} is not one linear layer; choose another model, as vit")
        return names[0], names[1]

    @property
    def head_width(self) -> int:
        """Length of the input of a head that is one linear layer."""
        return self.parts.shapes[self.linear_head[0]][1]

    @property
    def representation_width(self) -> int:
        """Length of what the head sees."""
        own = None if self.functional is None else self.functional.representation_width
        return own or self.head_width

    def split_outputs(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits among the model's outputs, and the other outputs; ``None`` if there are no others."""
        num_classes = None if self.functional is None else self.functional.num_classes
        if num_classes is None or outputs.shape[-1] == num_classes:
            return outputs, None
        return outputs[..., :num_classes], outputs[..., num_classes:]

    def forward_to(self, weights: Tensors, images: Tensor, keep: Tensor | None, block: int) -> Tensor:
        """Return the tokens that enter a block. Only for a model with uniform blocks."""
        assert self.functional is not None
        return self.functional(weights, images, keep, 0, block, None)

    def forward_from(self, weights: Tensors, tokens: Tensor, block: int) -> Tensor:
        """Return the logits of tokens that enter a block. Only for a model with uniform blocks."""
        assert self.functional is not None
        return self.functional(weights, tokens, None, block, None, None)

    def initial_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights with which the architecture was built."""
        state = self.module.vit.state_dict()
        return {name: state[name].detach().clone() for name in self.parts.shapes}

    def drop_weights(self) -> None:
        """Free the initial weights. A client of a real fleet receives its weights in messages."""
        for path, module in self.module.vit.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if (f"{path}.{name}" if path else name) in self.parts.shapes:
                    setattr(module, name, nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))

    def to(self, device: torch.device) -> Net:
        """Move the architecture's constants (index tables of some families) to a device."""
        self.module.to(device)
        return self

    def with_unfused_attention(self) -> Net:
        """Return this architecture without the fused attention kernel."""
        if self.functional is None:
            return self
        return replace(self, functional=self.functional.with_settings(fused_attention=False))

    def with_constants_on(self, device: str) -> Net:
        """Return a copy whose buffers (index tables of some families) are on another device.

        The parameters are shared, not copied: weights are an argument of every call. A buffer without values, of a
        model that was built for its shapes alone, becomes zeros.
        """
        shared = {id(weight): weight for weight in self.module.parameters()}
        module = copy.deepcopy(self.module, shared)
        for submodule in module.modules():
            for name, constant in submodule.named_buffers(recurse=False):
                has_values = not constant.is_meta
                moved = constant.to(device) if has_values else torch.zeros_like(constant, device=device)
                submodule._buffers[name] = moved
        functional = None if self.functional is None else self.functional.with_settings(vit=module.vit)
        return replace(self, module=module, functional=functional)

    def num_kept_patches(self, mask_ratio: float) -> int:
        """Return how many patches a mask keeps. The number is the same for every image, so that shapes are static."""
        if mask_ratio == 0:
            return self.num_patches
        if not self.num_patches:
            family = type(self.module.vit).__name__
            raise UserError(
                f"train.mask_ratio, or the method's own mask ratio = {mask_ratio}: must be 0, "
                f"a {family} has no tokens that can be dropped"
            )
        return num_kept(self.num_patches, mask_ratio)


def num_kept(count: int, dropped: float) -> int:
    """Return how many of ``count`` tokens remain if a fraction is dropped: at least one.

    Rounded as in the papers: of 196 patches, a ratio of 0.75 keeps 49 and 0.60 keeps 78.
    """
    return max(1, int(count * (1 - dropped) + 1e-6))


def make_net(vit: Any, image_size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Net:
    """Return a model as a :class:`Net`; a ``TypeError`` if it has no transformer blocks in a known place."""
    part_paths = part_paths_of(vit)
    batch_norms = replace_batch_norms(vit)
    return Net(
        module=ModuleWrapper(vit, part_paths.forward_kept),
        part_paths=part_paths,
        parts=find_parts(vit, part_paths),
        functional=None if part_paths.functional is None else cast(FunctionalViT, part_paths.functional(vit)),
        batch_norms=batch_norms,
        num_prefix_tokens=0 if part_paths.functional is None else vit.num_prefix_tokens,
        embed_dim=vit.num_features,
        image_size=image_size,
        mean=mean,
        std=std,
    )
