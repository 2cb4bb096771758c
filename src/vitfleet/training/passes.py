"""Forward and backward passes of one client's model, or of several stacked clients' models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vitfleet.message import Tensors
from vitfleet.models.forward.batch_norm import statistics_names
from vitfleet.training.engine import ModelOutputs, StepEngine
from vitfleet.training.samples import Loss, Outputs, Samples, mask_other_tasks
from vitfleet.training.stacking.stack import Stack, vmap_over_clients
from vitfleet.training.views.frozen import images_needed

#: Returns the model's weights, composed of what trains and of the constants.
Compose: TypeAlias = Callable[[Tensors, Tensors], Tensors]
PERTURBATION = "perturbation"
Mapped = TypeVar("Mapped")


class PassOptions(TypedDict, total=False):
    """How samples pass through a model."""

    # Other values of some weights, of the model before or of another one; all others are those of the training.
    # Gradients are then with respect to what trains among these.
    at: Tensors | None
    compose: Compose | None  # composes weights of the model from what trains
    depth: int | None  # number of blocks of the model; by default all blocks
    split: int | None  # the block whose input tokens are `Outputs.features`; features enter the model there
    representation: bool  # whether `Outputs.representation` is returned; only of a plain ViT
    # Further arguments of the loss, of each client: outputs of another model, for example. A loss sees tensors of the
    # view in no other way.
    given: tuple[Any, ...]
    all_classes: bool  # whether logits of classes of other tasks stay as they are, where an image's task is known


class Pass(NamedTuple):
    """A forward and a backward pass."""

    gradients: dict[str, Tensor]  # of each client's loss, with respect to what trains
    losses: Tensor  # the loss of each client
    outputs: tuple[Outputs, ...]  # for each group of samples
    input_gradient: Tensor | None = None  # with respect to the perturbation of the images, if it was asked for


@dataclass(frozen=True)
class ClientModels:
    """The models of one or several clients: every pass of a step goes through here.

    What a :class:`~vitfleet.training.step.StepView` offers under the same name is explained there.
    """

    engine: StepEngine
    weights: Stack  # all of them, those that train and those that do not
    leaves: Tensors  # what trains, by name
    constants: Stack  # of the clients' trainings; losses see them
    epoch: Tensor  # its number, from 0, a scalar on the device
    stacked: bool  # whether tensors have a leading axis of clients
    batch_norms: tuple[str, ...] = ()  # those whose running statistics train
    shows_weights: bool = True  # whether losses see the weights

    @property
    def axis(self) -> int:
        """The axis of a batch's samples."""
        return 1 if self.stacked else 0

    @cached_property
    def shared(self) -> frozenset[int]:
        """The identities of tensors that all clients share: they have no axis of clients."""
        groups = (self.weights, self.constants)
        tensors = [
            tensor for group in groups for name, tensor in group.tensors.items() if name not in group.stacked_names
        ]
        return frozenset(map(id, (*tensors, self.epoch, self.engine.class_to_task)))

    def map(self, function: Callable[..., Mapped], *arguments: Any) -> Mapped:
        """Return a function of one client's tensors, applied to each client's."""
        return vmap_over_clients(function, arguments, self.shared) if self.stacked else function(*arguments)

    def value_and_grad(
        self,
        loss: Loss,
        groups: Sequence[Samples],
        statistics: Tensors | None = None,
        perturbation: Tensor | None = None,
        input_gradient: bool = False,
        **options: Unpack[PassOptions],
    ) -> Pass:
        """Pass groups of samples forward and backward together.

        With ``statistics`` batch norms normalise with these samples and update these running statistics in place;
        without, they use those that they have.
        """
        leaves = self._leaves(options.get("at"))
        with torch.enable_grad():
            if perturbation is not None and input_gradient:
                perturbation = perturbation.detach().requires_grad_()
            outputs = self.forward(groups, leaves, statistics, perturbation, **options)
            losses = self.map(loss, *outputs, *options.get("given", ()))
            wanted = {**leaves, PERTURBATION: perturbation} if perturbation is not None and input_gradient else leaves
            gradients = client_gradients(losses, wanted)
        return Pass(gradients, losses.detach(), outputs, gradients.pop(PERTURBATION, None))

    def input_grad(
        self, loss: Loss, groups: Sequence[Samples], perturbation: Tensor, **options: Unpack[PassOptions]
    ) -> Tensor:
        """Return the gradient with respect to a perturbation of the images alone."""
        at = options.get("at") or {}
        fixed = {name: at.get(name, leaf).detach() for name, leaf in self.leaves.items()}
        with torch.enable_grad():
            perturbation = perturbation.detach().requires_grad_()
            outputs = self.forward(groups, fixed, None, perturbation, **options)
            losses = self.map(loss, *outputs, *options.get("given", ()))
            return client_gradients(losses, {PERTURBATION: perturbation})[PERTURBATION]

    def grad_of_each(
        self, loss: Loss, groups: Sequence[Samples], each: Iterable[tuple[Any, ...]], **options: Unpack[PassOptions]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the gradient of a loss for each of several further arguments, which are taken one by one.

        A compiled model passes the samples forward for each: its backward pass frees what the next one would need.
        """
        leaves, compiled = self._leaves(options.get("at")), self.engine.compiled
        outputs: tuple[Outputs, ...] = ()
        remaining = iter(each)
        current = next(remaining, None)
        while current is not None:
            with torch.enable_grad():
                if compiled or not outputs:
                    outputs = self.forward(groups, leaves, None, **options)
                losses = self.map(loss, *outputs, *current)
            current = next(remaining, None)
            with torch.enable_grad():
                gradients = client_gradients(losses, leaves, retain_graph=current is not None and not compiled)
            yield gradients

    def part_grads(
        self, loss: Loss, parts: Samples, dtype: torch.dtype | None = None, **options: Unpack[PassOptions]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradient ``[parts, …]`` and the loss ``[parts]`` of each part of ``[parts, samples, …]``.

        The parts become clients of one forward pass.
        """
        count = parts.sample_weight.shape[self.axis]
        if count == 1:
            only = parts.map(lambda tensor: tensor.select(self.axis, 0))
            single = replace(self, shows_weights=False).value_and_grad(loss, [only], **options)
            rows = {name: gradient.unsqueeze(self.axis) for name, gradient in single.gradients.items()}
            return rows, single.losses.unsqueeze(-1)
        repeated = self._repeat(count, dtype, options.get("at"))
        flat = parts.map(lambda tensor: tensor.flatten(0, 1) if self.stacked else tensor)

        def repeat(tensor: Tensor) -> Tensor:
            """Give every part an argument of its client's loss."""
            if id(tensor) in repeated.shared:
                return tensor
            return tensor.repeat_interleave(count, dim=0) if self.stacked else tensor.expand(count, *tensor.shape)

        at_own = options.copy()
        at_own["at"] = None
        at_own["given"] = tree_map_only(Tensor, repeat, options.get("given", ()))
        computed = repeated.value_and_grad(loss, [flat], **at_own)
        shapes = {name: leaf.shape for name, leaf in self.leaves.items()}
        gradients = {
            name: gradient.reshape(*shapes[name][: self.axis], count, *shapes[name][self.axis :])
            for name, gradient in computed.gradients.items()
        }
        return gradients, computed.losses.reshape(parts.sample_weight.shape[:-1])

    def forward(
        self,
        groups: Sequence[Samples],
        leaves: Tensors,
        statistics: Tensors | None = None,
        perturbation: Tensor | None = None,
        **options: Unpack[PassOptions],
    ) -> tuple[Outputs, ...]:
        """Pass groups of samples through the models together, and return the outputs for each group."""
        samples, axis, net = groups[0], self.axis, self.engine.net
        for other in groups[1:]:
            samples = samples.append(other, axis)
        at, compose, part = options.get("at") or {}, options.get("compose"), self.engine.frozen_part
        if samples.views is not None and part is not None and (compose or at.keys() & set(part.names)):
            raise images_needed("passes it through a model with other weights in these layers")
        weights = {**self.weights.tensors, **at, **leaves, **(statistics or {})}
        if compose:
            composed = self.map(compose, dict(leaves), self.constants.tensors)
            weights = {**{name: weights[name] for name in net.parts.shapes if name in weights}, **composed}
        computed = self.engine.forward(
            weights,
            samples,
            options.get("split"),
            options.get("depth"),
            () if statistics is None else self.batch_norms,
            perturbation,
            options.get("representation", False),
        )
        if not options.get("all_classes", False):
            logits = mask_other_tasks(computed.logits, samples.labels, self.engine.class_to_task)
            computed = computed._replace(logits=logits)
        if len(groups) == 1:
            return (self.outputs(samples, computed, leaves),)
        sizes = [group.labels.shape[axis] for group in groups]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(
            self.outputs(group, computed.narrow(axis, start, size), leaves)
            for group, start, size in zip(groups, starts, sizes, strict=True)
        )

    def features(self, samples: Samples, split: int | None) -> Outputs:
        """Return the tokens that enter a block, or the input of the head; what comes after it is not computed."""
        features = self.engine.features(self.weights.tensors, samples, split)
        empty = features.new_empty(*samples.labels.shape, 0)
        return self.outputs(samples, ModelOutputs(empty, features=features), {})

    def outputs(self, samples: Samples, computed: ModelOutputs, leaves: Tensors) -> Outputs:
        """Return what a loss sees of some samples."""
        return Outputs(
            computed.logits,
            samples.labels,
            samples.sample_weight,
            samples.positions,
            dict(leaves) if self.shows_weights else {},
            self.constants.tensors,
            self.epoch,
            computed.features,
            computed.representation,
            computed.auxiliary,
            samples.stored,
        )

    def own_statistics(self) -> dict[str, Tensor]:
        """Return the running statistics of the batch norms that train."""
        names = [name for path in self.batch_norms for name in statistics_names(path)]
        return {name: self.weights.tensors[name] for name in names}

    def _leaves(self, at: Tensors | None) -> Tensors:
        """Return what a gradient is taken of: what trains of the clients' own models, or what is given of it.

        Given values become leaves of a graph of their own. Those that clients share are repeated for each.
        """
        if at is None:
            return {name: leaf for name, leaf in self.leaves.items() if "/" not in name}
        return {
            name: at[name].detach().expand(leaf.shape).contiguous().requires_grad_()
            for name, leaf in self.leaves.items()
            if name in at
        }

    def _repeat(self, parts: int, dtype: torch.dtype | None, at: Tensors | None) -> ClientModels:
        """Return the models of every client several times, as clients of their own; ``dtype`` is of their gradients."""
        axis, engine = self.axis, self.engine

        def repeat(tensor: Tensor) -> Tensor:
            """Give every part the tensor of its client."""
            repeated = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], parts, *tensor.shape[axis:])
            return repeated.flatten(0, 1) if self.stacked else repeated

        def repeat_leaf(leaf: Tensor) -> Tensor:
            """Repeat a weight that trains. Matrices are not copied: see :mod:`vitfleet.models.forward.stacked_ops`."""
            if leaf.dim() - axis != 2 or engine.net.stacking != "tensor operations" or engine.compiled:
                return repeat(leaf).contiguous()
            matrices = leaf if self.stacked else leaf.unsqueeze(0)
            if dtype == torch.bfloat16 and engine.machine.bf16 and matrices.dtype == torch.float32:
                # Products convert them to it anyway, and then the gradients need no conversion.
                matrices = matrices.to(dtype)
            return matrices.unsqueeze(1).expand(-1, parts, -1, -1)

        leaves = {name: repeat_leaf(leaf.detach()).requires_grad_() for name, leaf in self._leaves(at).items()}
        frozen = {
            name: tensor if not self.stacked or id(tensor) in self.shared else repeat(tensor)
            for name, tensor in {**self.weights.tensors, **(at or {})}.items()
            if name not in leaves
        }
        weights = Stack({**frozen, **leaves}, frozenset({**frozen, **leaves}))
        stacked_constants = self.constants.stacked_names
        constants = {
            name: tensor.repeat_interleave(parts, dim=0) if name in stacked_constants else tensor
            for name, tensor in self.constants.tensors.items()
        }
        return ClientModels(
            engine, weights, leaves, Stack(constants, stacked_constants), self.epoch, stacked=True, shows_weights=False
        )


def client_gradients(losses: Tensor, leaves: Tensors, retain_graph: bool = False) -> dict[str, Tensor]:
    """Return the gradient of each client's loss with respect to that client's weights.

    One backward pass serves all clients, because no client's loss depends on the weights of another.
    """
    gradients = torch.autograd.grad(
        losses.sum(), list(leaves.values()), retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )
    # A fused optimiser reads memory in order, and batched matrix products leave their gradients transposed.
    return {name: gradient.contiguous() for name, gradient in zip(leaves, gradients, strict=True)}
