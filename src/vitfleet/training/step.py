"""A training step as a function: what a method writes, and what it sees.

A step is a function ``step(view, batch)`` that returns the gradients to apply, by the names of what trains, or nothing
(``{}``) where it changes no weight. FedAvg's is one line::

    def cross_entropy_step(view, batch):
        return view.grad(cross_entropy, batch)

What it returns is clipped (``train.max_grad_norm``) and given to the client's optimiser. It is written for one client.
The engine runs it for one client or for several that are stacked, eagerly or captured in a CUDA graph, without any
difference to the method. So it holds to four rules:

- Tensors that come from the view are handles: they may have a leading axis of clients, or, if all clients share them,
  none. They are combined by :meth:`StepView.map`, whose function sees the tensors of one client.
- Nothing depends on the *value* of a tensor on the host: no ``if``, no ``float(…)``, no ``.item()``, no boolean index.
- A sample of weight 0 is padding, and so is a whole batch of such samples: a sum over samples has weights, and what is
  divided by a number of samples, or by a norm, has a least divisor.
- The step itself is compared by value, so that clients with the same step are trained together: it is a function of a
  module, or an instance of a frozen dataclass whose fields are settings, never a closure or a lambda. Tensors are not
  its fields: they are constants.

A step whose work differs from step to step (rank the stored tasks at every tenth, say) has a method ``kind(index)``: it
returns the kind of the step with this number in its epoch, any value that can be hashed, and ``view.kind`` is that
value. Every kind is captured once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

import torch
from torch import Tensor

from vitfleet.data.batches import Batch
from vitfleet.data.features import dequantize
from vitfleet.message import Tensors
from vitfleet.training.passes import ClientModels, Pass, PassOptions
from vitfleet.training.random_numbers import normal_numbers
from vitfleet.training.samples import Loss, Outputs, Parts, Samples, cross_entropy
from vitfleet.training.stacking.stack import rows_at
from vitfleet.training.views.frozen import VIEWS, images_needed

if TYPE_CHECKING:
    from vitfleet.training.stacking.client_stack import ClientStack

Mapped = TypeVar("Mapped")
SET_TENSORS = frozenset({"images", "labels", "sample_weight", "keep"})


class Step(Protocol):
    """A step: see the module's text."""

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        ...


def cross_entropy_step(view: StepView, batch: Samples) -> Tensors:
    """Return the gradient of the batch's mean cross-entropy."""
    return view.grad(cross_entropy, batch)


def check_step(step: object) -> None:
    """Refuse what is not compared by value: made anew for every training, it would neither stack nor be captured once.

    Raises
    ------
    TypeError
        The step, or a function or an object among its fields, is a closure, a partial function, or has no hash.
    """
    try:
        hash(step)
        reason = None if _compared_by_value(step) else "no two of it are equal, so no clients would train together"
    except TypeError as error:
        reason = str(error)
    if reason is not None:
        remedy = "write it as a function of a module, or as a frozen dataclass whose fields can be hashed"
        raise TypeError(f"step {step!r}: {remedy} ({reason})")


def _compared_by_value(part: object) -> bool:
    if isinstance(part, FunctionType):
        return "<locals>" not in part.__qualname__  # a function in a function is another one in every call
    if not callable(part) or isinstance(part, type | BuiltinFunctionType):
        return True
    if is_dataclass(part) and not all(_compared_by_value(getattr(part, field.name)) for field in fields(part)):
        return False
    return type(part).__eq__ is not object.__eq__


def kind_of_step(step: Step, index: int) -> Hashable:
    """Return the kind of the step with this number in its epoch; ``None`` where all are of one kind."""
    kind = getattr(step, "kind", None)
    return None if kind is None else kind(index)


class StepView:
    """What a step sees of a client: its model, its tensors, its stored samples.

    Attributes
    ----------
    batch
        The samples of the step.
    kind
        The kind of this step, if the step's function distinguishes any.
    epoch
        The number of the epoch, from 0, a scalar on the device.
    weights, all_weights
        What trains, before the step: the parameters of ``LocalTraining.trainable``, without running statistics. And
        all weights of the training, with these.
    constants
        Tensors that do not change during the training, by name: see ``LocalTraining.constants``.
    class_to_task
        The task of each class, ``[classes]``, where the task of an image is known; else ``None``.
    kept, scratch
        The tensors that steps change, by :meth:`keep`.
    loss_sum
        The loss that is reported, summed over the batch's samples: that of the first gradient that the step takes of
        its batch, unless :meth:`report` says otherwise. ``None``: none so far.
    """

    def __init__(
        self, stack: ClientStack, models: ClientModels, batch: Batch, kind: Hashable = None, all_active: bool = True
    ) -> None:
        self._stack = stack
        self._models = models
        self._tables = batch
        self._all_active = all_active
        self._statistics_updated = False
        self.kind = kind
        self.epoch = models.epoch
        self.weights = models.leaves
        self.all_weights = models.weights.tensors
        self.class_to_task = models.engine.class_to_task
        self.constants = stack.inputs.constants.tensors
        self.kept = stack.inputs.kept.tensors
        self.scratch = stack.inputs.scratch.tensors
        self.loss_sum: Tensor | None = None
        self.batch = self._own_samples()

    def _own_samples(self) -> Samples:
        tables, images = self._tables, self._stack.images
        if tables.rows is not None:
            views = rows_at(self._stack.inputs.views.tensors[VIEWS], tables.rows, self._models.stacked)
            labels = images.labels[tables.image_indices]
            return Samples(labels, tables.sample_weight, tables.shard_positions, views=views)
        if tables.features is None:
            indices = tables.image_indices
            return _samples(tables, images.images[indices], images.labels[indices], {})
        assert tables.labels is not None
        features = dequantize(tables.features, tables.scales)
        weight, positions = tables.sample_weight, tables.shard_positions
        return Samples(tables.labels.long(), weight, positions, features=features, keep=tables.keep)

    # Samples

    def drawn(self, name: str) -> Samples:
        """Return the stored samples of a set that this step draws; see ``SampleSet.draws``."""
        axis = self._models.axis
        tables = self._tables.drawn[name].map(
            lambda table: table.flatten(axis, axis + 1) if table.dim() > axis else table
        )
        rows = {
            key: rows_at(tensor.select(axis, 0), tables.image_indices, self._models.stacked)
            for key, tensor in self._stack.inputs.sets[name].tensors.items()
        }
        images, labels = rows.pop("images"), rows.pop("labels")
        return _samples(tables, images, labels, rows)

    def parts(self, name: str, selected: Tensor | None = None) -> Parts:
        """Return the parts of a set of stored samples, or of each client the selected ones.

        Parameters
        ----------
        selected
            Indices of the parts, ``[selected]``, rising: parts are sorted by falling size, so the i-th selected one is
            no larger than the i-th of all.
        """
        tensors, widths = self._stack.inputs.sets[name].tensors, self._stack.inputs.widths[name]
        if selected is not None:
            widths = widths[: selected.shape[-1]]
            tensors = {key: self.map(torch.index_select, tensor, 0, selected) for key, tensor in tensors.items()}
        weight = tensors["sample_weight"]
        positions = torch.arange(weight.shape[-1], device=weight.device).expand(weight.shape)
        stored = {key: tensor for key, tensor in tensors.items() if key not in SET_TENSORS}
        samples = Samples(
            tensors["labels"], weight, positions, tensors["images"], keep=tensors.get("keep"), stored=stored
        )
        return Parts(samples, widths, weight.sum(dim=-1) > 0)

    # Passes through the model

    def grad(self, loss: Loss, *groups: Samples, **options: Unpack[PassOptions]) -> dict[str, Tensor]:
        """Return the gradient of a loss of some samples with respect to what trains; see :meth:`value_and_grad`."""
        return self.value_and_grad(loss, *groups, **options).gradients

    def value_and_grad(
        self,
        loss: Loss,
        *groups: Samples,
        perturbation: Tensor | None = None,
        input_gradient: bool = False,
        **options: Unpack[PassOptions],
    ) -> Pass:
        """Pass groups of samples forward and backward, all groups together.

        Batch norms normalise with the client's own batch, and use their running statistics for other samples. The first
        pass of the batch at the client's own weights updates its running statistics.

        Parameters
        ----------
        loss
            Of one client: ``loss(outputs of each group, …, given, …)``.
        perturbation
            What is added to the model's input.
        input_gradient
            Whether the gradient with respect to the perturbation is returned too.
        options
            See :class:`~vitfleet.training.passes.PassOptions`.
        """
        statistics = self._statistics(options.get("at")) if groups[0] is self.batch else None
        computed = self._models.value_and_grad(loss, groups, statistics, perturbation, input_gradient, **options)
        if groups[0] is self.batch and self.loss_sum is None:
            self.report_mean(computed.losses)
        return computed

    def input_grad(self, loss: Loss, *groups: Samples, perturbation: Tensor, **options: Unpack[PassOptions]) -> Tensor:
        """Return the gradient of a loss with respect to a perturbation of the images alone."""
        return self._models.input_grad(loss, groups, perturbation, **options)

    def grad_of_each(
        self, loss: Loss, *groups: Samples, each: Iterable[tuple[Any, ...]], **options: Unpack[PassOptions]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the gradient of a loss for each of several further arguments; the samples pass forward once for all."""
        return self._models.grad_of_each(loss, groups, each, **options)

    def per_sample_grad(self, loss: Loss, samples: Samples, **options: Unpack[PassOptions]) -> dict[str, Tensor]:
        """Return the gradient of each sample's loss, ``[batch, …]``; that of padding is zero.

        The loss is one that weighs samples, as :func:`~vitfleet.training.samples.cross_entropy` does: each sample has
        the weight 1. Batch norms use their running statistics. All gradients are held at once: they take the memory of
        what trains, times the batch.
        """
        present = samples.sample_weight > 0
        single = replace(samples, sample_weight=present.to(samples.sample_weight.dtype))
        axis, count = self._models.axis, present.shape[-1]
        each = single.map(lambda tensor: tensor.unsqueeze(axis + 1))
        longest = count if self._models.engine.net.stackable else 1
        chunks, losses = [], []
        for start in range(0, count, longest):
            of_chunk, its_losses = self._models.part_grads(loss, each.map(_narrow(axis, start, longest, 1)), **options)
            chunks.append(of_chunk)
            losses.append(its_losses)
        if samples is self.batch and self.loss_sum is None:
            self.report((torch.cat(losses, dim=-1) * present).sum(dim=-1))
        return _join(chunks, axis)

    def part_grads(
        self, loss: Loss, parts: Parts, dtype: torch.dtype | None = None, **options: Unpack[PassOptions]
    ) -> dict[str, Tensor]:
        """Return the gradient of each part's loss, ``[parts, …]``; that of a part without samples is zero.

        Parameters
        ----------
        dtype
            The type in which the gradients are held; by default that of the weights.
        """
        axis, engine = self._models.axis, self._models.engine
        longest = engine.parts_at_once if engine.net.stackable else 1
        chunks: list[dict[str, Tensor]] = []
        for start, count, width in _runs_of_equal_width(parts.widths, longest):
            chunk = parts.samples.map(_narrow(axis, start, count, width))
            gradients, _ = self._models.part_grads(loss, chunk, dtype, **options)
            chunks.append({name: rows.to(dtype or rows.dtype) for name, rows in gradients.items()})
        return _join(chunks, axis)

    def forward(self, *groups: Samples, **options: Unpack[PassOptions]) -> tuple[Outputs, ...]:
        """Return the model's outputs for each group, without gradients, as a tuple: of one group, a tuple of one.

        Batch norms use their running statistics.
        """
        at = options.get("at") or {}
        return self._models.forward(
            groups, {name: at.get(name, leaf) for name, leaf in self.weights.items()}, None, **options
        )

    def features(self, samples: Samples, split: int | None = None) -> Outputs:
        """Return the tokens that enter block ``split``, or without a block what the head sees, as ``features``.

        What comes after it is not computed, so logits are empty. The input of the head is known of any model with one
        linear head.
        """
        return self._models.features(samples, split)

    def zero_perturbation(self, samples: Samples) -> Tensor:
        """Return zeros in the shape and the type of the model's input."""
        if samples.images is None:
            raise images_needed("changes its input")
        preprocess = self._models.engine.preprocess
        shape = (*samples.images.shape[:-2], preprocess.image_size, preprocess.image_size)
        return torch.zeros(shape, dtype=preprocess.mean.dtype, device=samples.images.device)

    # What a client computes itself

    def map(self, function: Callable[..., Mapped], *arguments: Any) -> Mapped:
        """Return a function of one client's tensors, applied to each client's.

        Arguments and result are tensors, or tuples, dictionaries, :class:`Samples` or :class:`Outputs` of tensors;
        other arguments are passed as they are. The function's operations may not depend on values of tensors. Every
        tensor that it needs is an argument: one that it sees by other ways may have an axis of clients.
        """
        return self._models.map(function, *arguments)

    def keep(self, updated: Tensors) -> None:
        """Change kept or scratch tensors, given by name.

        A client that does not have this step keeps what it has, unless a tensor was changed in place: then the function
        that changed it has to leave padding out.
        """
        active = self._tables.active
        for name, value in updated.items():
            target = self.kept[name] if name in self.kept else self.scratch[name]
            if value.untyped_storage()._cdata == target.untyped_storage()._cdata:
                continue
            if self._all_active:
                target.copy_(value)
            else:
                takes_step = active.reshape([*active.shape, *[1] * (target.dim() - active.dim())]) > 0
                torch.where(takes_step, value.to(target.dtype), target, out=target)

    def count(self, numbers: Tensors) -> None:
        """Add tensors of each client to kept ones of the same names and shapes: numbers, or gradients."""
        self.keep({name: self.kept[name] + number for name, number in numbers.items()})

    def normal(self, name: str, like: Tensors) -> dict[str, Tensor]:
        """Return standard normal numbers in the shapes of some tensors, from the client's own random address.

        Parameters
        ----------
        name
            One of ``LocalTraining.random``. Every step has numbers of its own, the same at every call.
        like
            Tensors of each client, such as ``view.weights`` or gradients; the numbers are float32.
        """
        axis, shared = self._models.axis, self._models.shared
        shapes = {key: tensor.shape[0 if id(tensor) in shared else axis :] for key, tensor in like.items()}
        return self.map(lambda key: normal_numbers(key, shapes), self._tables.keys[name])

    def report(self, loss_sum: Tensor) -> None:
        """Set the loss that is reported for this step, summed over the batch's samples, of each client."""
        self.loss_sum = loss_sum.detach()

    def report_mean(self, losses: Tensor) -> None:
        """Set the loss that is reported for this step, the mean over the batch's samples, of each client."""
        self.report(losses * (self._tables.sample_weight > 0).sum(dim=-1))

    def _statistics(self, at: Tensors | None) -> dict[str, Tensor]:
        """Return the running statistics that a pass of the batch writes: the client's own once, then copies of them.

        Those that come with other weights, of a model beside the client's, are updated in place.
        """
        own = self._models.own_statistics()
        if at is None and not self._statistics_updated:
            self._statistics_updated = True
            return own
        given = at or {}
        return {name: given[name] if name in given else tensor.clone() for name, tensor in own.items()}


def _samples(tables: Batch, images: Tensor, labels: Tensor, stored: Tensors) -> Samples:
    """Return the samples of a batch's tables."""
    augmentation = {name: getattr(tables, name) for name in ("shift", "flip", "brightness", "keep")}
    return Samples(labels, tables.sample_weight, tables.shard_positions, images, **augmentation, stored=stored)


def _narrow(axis: int, start: int, count: int, width: int) -> Callable[[Tensor], Tensor]:
    """Return a function that takes some parts, and so many samples of each."""
    return lambda tensor: tensor.narrow(axis, start, count).narrow(axis + 1, 0, width)


def _join(chunks: Sequence[dict[str, Tensor]], axis: int) -> dict[str, Tensor]:
    """Return the gradients of all parts; a single chunk is not copied: gradients are hundreds of megabytes."""
    if len(chunks) == 1:
        return chunks[0]
    return {name: torch.cat([chunk[name] for chunk in chunks], dim=axis) for name in chunks[0]}


def _runs_of_equal_width(widths: Sequence[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield the start, the length and the width of runs of parts of one width, at most ``longest`` parts each."""
    start = 0
    while start < len(widths):
        end = next((part for part in range(start, len(widths)) if widths[part] != widths[start]), len(widths))
        count = min(longest, end - start)
        yield start, count, widths[start]
        start += count
