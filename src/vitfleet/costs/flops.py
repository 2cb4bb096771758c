"""Floating-point operations of a training, counted on its own steps with tensors that have shapes but no values.

A step is run once for every kind of step. Its passes through the model are not executed: what one sample costs in a
pass is counted by torch's counter, once for all passes of the same weights. What a step computes besides (projections,
sorts, the optimiser) is not counted: it is of the size of the weights, far less than a pass of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.batches import Batch
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.training.engine import ModelOutputs
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.passes import ClientModels, Pass, PassOptions
from vitfleet.training.samples import Loss, Outputs, Parts, Samples
from vitfleet.training.stacking.client_stack import ClientStack
from vitfleet.training.stacking.inputs import ClientTraining, RngContext, part_widths, stack_inputs
from vitfleet.training.step import StepView, kind_of_step
from vitfleet.training.trainer import Trainer, preprocess_for

META = torch.device("meta")
BATCH = "batch"  # the origin of samples that are neither drawn from a set nor parts of one

MAX_STEPS = 4096  # of an epoch, that are counted one by one: kinds of steps recur


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per sample; a multiply-add counts as two."""

    forward: int  # forward passes: masked, through the layers that are computed
    # Forward and backward passes. A frozen layer still propagates the gradient, but needs none for its weights. Where
    # nothing trains, only the forward passes.
    training: int


@dataclass(frozen=True)
class StepPasses:
    """What the passes of one kind of step cost."""

    per_sample: Flops  # operations per sample of the batch, drawn samples included
    # Operations per sample of a set's parts: for each of the first so many parts of a set, by name and number
    per_part: Mapping[tuple[str, int], int]

    def total(self, batch_size: int, widths: Mapping[str, Sequence[int]]) -> int:
        """Return the operations of a step with so many samples, and parts of these widths."""
        of_parts = (flops * sum(widths[name][:parts]) for (name, parts), flops in self.per_part.items())
        return batch_size * self.per_sample.training + sum(of_parts)


class FlopCounter:
    """Counts the operations of trainings of one model; what was counted once is known.

    The values of the model's weights are not used. ``counted`` was counted before, for models of the same shapes; new
    counts are added.
    """

    def __init__(self, net: Net, train: TrainConfig, counted: dict[Hashable, Any] | None = None) -> None:
        self.net = net.with_constants_on("meta")
        self.train = train
        self.counted: dict[Hashable, Any] = {} if counted is None else counted

    def training(self, training: LocalTraining, samples: int) -> int:
        """Count the operations of a training on so many samples."""
        train = training.train or self.train
        widths = {name: part_widths([stored]) for name, stored in training.sets.items()}
        steps = -(-samples // train.batch_size)
        if steps > MAX_STEPS:  # a client's word: no count of it may take for ever
            samples, scale = MAX_STEPS * train.batch_size, samples / (MAX_STEPS * train.batch_size)
            return round(scale * self.training(training, samples))
        total = 0
        for index in range(steps):
            size = min(train.batch_size, samples - index * train.batch_size)
            total += self.step(training, kind_of_step(training.step, index)).total(size, widths)
        scores = samples * self.evaluation if training.score_samples else 0
        return training.epochs * total + scores

    def step(self, training: LocalTraining, kind: Hashable = None, masked: bool = True) -> StepPasses:
        """Count the operations of one kind of step; without ``masked``, of one with whole images."""
        train = training.train or self.train
        train = train if masked else train.model_copy(update={"mask_ratio": 0.0})
        weights, constants = (
            frozenset((name, tensor.shape) for name, tensor in tensors.items())
            for tensors in (training.weights, training.constants)
        )
        sets = tuple((name, len(stored), stored.draws, stored.keep is None) for name, stored in training.sets.items())
        features = None if training.features is None else training.features.num_tokens
        views = None if training.views is None else (training.views.part, training.views.values.shape[1:])
        key = (
            self.net.part_paths.functional, weights, training.trainable, training.step, kind, sets, features, views,
            train.mask_ratio, constants,
        )  # fmt: skip
        if key not in self.counted:
            self.counted[key] = self._count_step(training, train, kind)
        found: StepPasses = self.counted[key]
        return found

    @cached_property
    def evaluation(self) -> int:
        """The operations of the forward pass of a whole image."""
        return self.step(LocalTraining(shapes_of(self.net), self.net.parts.whole, 1), masked=False).per_sample.forward

    def _count_step(self, training: LocalTraining, train: TrainConfig, kind: Hashable) -> StepPasses:
        stack, batch = meta_stack(self.net, training, train, size=1)
        with torch.no_grad():
            view = _CountingView(stack, CountedModels.of(stack, self.counted), batch, kind)
            training.step(view, view.batch)
        return view.models.passes(training.sets)


def shapes_of(net: Net) -> dict[str, Tensor]:
    """Return a model's weights as meta tensors."""
    return {name: torch.empty(shape, device="meta") for name, shape in net.parts.shapes.items()}


def full_flops(net: Net) -> Flops:
    """Count the operations of full training on an unmasked image, the reference for comparisons."""
    return FlopCounter(net, TrainConfig()).step(LocalTraining(shapes_of(net), net.parts.whole, 1)).per_sample


def meta_stack(net: Net, training: LocalTraining, train: TrainConfig, size: int) -> tuple[ClientStack, Batch]:
    """Return a client on tensors without values, and a batch of so many of its samples."""

    def empty_like(tensors: Tensors) -> dict[str, Tensor]:
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}

    # Of each part of a set one sample: what parts cost is counted per sample.
    sets = {name: _with_one_sample(stored) for name, stored in training.sets.items()}
    groups = replace(training, sets=sets).tensor_groups()
    training = replace(training, sets=sets).with_tensor_groups(
        {name: empty_like(tensors) for name, tensors in groups.items()}
    )
    machine = ExecutionSettings(torch.device("cpu"), bf16=False)  # autocast knows no meta device
    trainer = Trainer(net, preprocess_for(net, META), train, AugmentConfig(), 1, machine, parts_at_once=1)
    side = stored_side(net, training)
    pixels = torch.empty(size, len(net.mean), side, side, dtype=torch.uint8, device="meta")
    indices = torch.empty(size, dtype=torch.long, device="meta")
    shard = Shard(ImageSet(pixels, indices), indices)
    group = [ClientTraining(training, shard, RngContext(0, 1, 0))]
    stack = ClientStack(trainer.engine_for(training), group, stack_inputs(group, META))
    return stack, empty_batch(net, training, train, size, "meta")


def stored_side(net: Net, training: LocalTraining) -> int:
    """Return the pixels per side of a client's images as they are stored, which pass with its stored samples."""
    sides = [samples.images.shape[-1] for samples in training.sets.values()]
    return int(sides[0]) if sides else net.image_size


def _with_one_sample(stored: SampleSet) -> SampleSet:
    first = {name: tensor[:, :1] for name, tensor in stored.tensors().items()}
    return replace(stored.with_tensors(first), sizes=(1,) * len(stored.sizes))


def empty_batch(net: Net, training: LocalTraining, train: TrainConfig, size: int, device: str) -> Batch:
    """Return the tables of a batch, without values."""
    sees_images = training.features is None and training.views is None
    kept = net.num_kept_patches(train.mask_ratio) if train.mask_ratio and sees_images else 0

    def empty(*shape: int) -> Batch:
        indices = torch.empty(shape, dtype=torch.long, device=device)
        return Batch(
            image_indices=indices,
            shard_positions=indices,
            sample_weight=torch.empty(shape, device=device),
            active=torch.empty((), device=device),
            keep=torch.empty(*shape, kept, dtype=torch.long, device=device) if kept else None,
        )

    drawn = {name: empty(size, stored.draws) for name, stored in training.drawn_sets().items()}
    keys = {name: torch.empty((), dtype=torch.long, device=device) for name in training.random}
    batch = replace(empty(size), drawn=drawn, keys=keys)
    if training.views is not None:
        return replace(batch, rows=batch.image_indices)
    if training.features is None:
        return batch
    values = torch.empty(size, training.features.num_tokens, net.embed_dim, device=device)
    return replace(batch, features=values, labels=torch.empty(size, dtype=torch.long, device=device))


class _CountingView(StepView):
    """A view whose passes are counted; it says of which samples they are."""

    def __init__(self, stack: ClientStack, models: CountedModels, batch: Batch, kind: Hashable) -> None:
        super().__init__(stack, models, batch, kind)
        self.models = models
        models.origins[id(self.batch.labels)] = BATCH

    def drawn(self, name: str) -> Samples:
        samples = super().drawn(name)
        self.models.origins[id(samples.labels)] = name
        return samples

    def parts(self, name: str, selected: Tensor | None = None) -> Parts:
        found = super().parts(name, selected)
        self.models.part_origins[id(found.samples)] = name, len(found.widths)
        return found

    def part_grads(
        self, loss: Loss, parts: Parts, dtype: torch.dtype | None = None, **options: Unpack[PassOptions]
    ) -> dict[str, Tensor]:
        return self.models.count_parts(parts, dtype, **options)

    def per_sample_grad(self, loss: Loss, samples: Samples, **options: Unpack[PassOptions]) -> dict[str, Tensor]:
        gradients = self.models.value_and_grad(loss, [samples], **options).gradients
        return {name: gradient[None] for name, gradient in gradients.items()}


@dataclass(frozen=True)
class CountedModels(ClientModels):
    """The model of one client; passes are counted instead of executed."""

    # What one sample costs in a pass, and the shapes of the outputs, by all that a pass depends on
    counted: dict[Hashable, Any] = field(default_factory=dict)
    # Of which samples labels are, and of which set and how many of its parts some samples are
    origins: dict[int, str] = field(default_factory=dict)
    part_origins: dict[int, tuple[str, int]] = field(default_factory=dict)
    # What was counted so far, by origin: forward operations, and all
    per_sample: dict[str, list[Flops]] = field(default_factory=lambda: defaultdict(list))
    per_part: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def of(cls, stack: ClientStack, counted: dict[Hashable, Any]) -> CountedModels:
        """Return the model of a client, which is not stacked."""
        models = stack.models(torch.empty((), dtype=torch.long, device="meta"))
        return cls(models.engine, models.weights, models.leaves, models.constants, models.epoch, False, counted=counted)

    def passes(self, sets: Mapping[str, SampleSet]) -> StepPasses:
        """Return what was counted."""
        per_sample = [
            (1 if origin == BATCH else sets[origin].draws, flops)
            for origin, found in self.per_sample.items()
            for flops in found
        ]
        forward = sum(times * flops.forward for times, flops in per_sample)
        training = sum(times * flops.training for times, flops in per_sample)
        return StepPasses(Flops(forward, training), dict(self.per_part))

    def value_and_grad(
        self,
        loss: Loss,
        groups: Sequence[Samples],
        statistics: Tensors | None = None,
        perturbation: Tensor | None = None,
        input_gradient: bool = False,
        **options: Unpack[PassOptions],
    ) -> Pass:
        """Count a forward and a backward pass."""
        leaves = self._leaves(options.get("at"))
        flops, computed = self._pass_of_one(
            groups[0], tuple(leaves), perturbation is not None and input_gradient, options
        )
        self._add(groups, flops)
        gradients = {name: torch.empty_like(leaf) for name, leaf in leaves.items()}
        outputs = tuple(self.outputs_of_one(group, computed, leaves) for group in groups)
        of_input = torch.empty_like(perturbation) if perturbation is not None and input_gradient else None
        return Pass(gradients, groups[0].sample_weight.new_empty(()), outputs, of_input)

    def input_grad(
        self, loss: Loss, groups: Sequence[Samples], perturbation: Tensor, **options: Unpack[PassOptions]
    ) -> Tensor:
        """Count a forward pass, and a backward pass to the images."""
        flops, _ = self._pass_of_one(groups[0], (), True, options)
        self._add(groups, flops)
        return torch.empty_like(perturbation)

    def grad_of_each(
        self, loss: Loss, groups: Sequence[Samples], each: Iterable[tuple[Any, ...]], **options: Unpack[PassOptions]
    ) -> Iterator[dict[str, Tensor]]:
        """Count one forward pass, and a backward pass for each of the further arguments."""
        leaves = self._leaves(options.get("at"))
        flops, _ = self._pass_of_one(groups[0], tuple(leaves), False, options)
        self._add(groups, Flops(flops.forward, flops.forward))
        for _ in each:
            self._add(groups, Flops(0, flops.training - flops.forward))
            yield {name: torch.empty_like(leaf) for name, leaf in leaves.items()}

    def count_parts(self, parts: Parts, dtype: torch.dtype | None, **options: Unpack[PassOptions]) -> dict[str, Tensor]:
        """Count a forward and a backward pass of the samples of each part."""
        leaves = self._leaves(options.get("at"))
        first_part = parts.samples.map(lambda tensor: tensor[0])
        flops, _ = self._pass_of_one(first_part, tuple(leaves), False, options)
        self.per_part[self.part_origins[id(parts.samples)]] += flops.training
        rows = len(parts.widths)
        return {name: leaf.new_empty((rows, *leaf.shape), dtype=dtype) for name, leaf in leaves.items()}

    def forward(
        self,
        groups: Sequence[Samples],
        leaves: Tensors,
        statistics: Tensors | None = None,
        perturbation: Tensor | None = None,
        **options: Unpack[PassOptions],
    ) -> tuple[Outputs, ...]:
        """Count a forward pass."""
        flops, computed = self._pass_of_one(groups[0], (), False, options)
        self._add(groups, Flops(flops.forward, flops.forward))
        return tuple(self.outputs_of_one(group, computed, leaves) for group in groups)

    def features(self, samples: Samples, split: int | None) -> Outputs:
        """Count a forward pass up to the split, or to the head."""
        options: PassOptions = {"split": split}
        flops, computed = self._pass_of_one(samples, (), False, options, features_only=True)
        self._add([samples], flops)
        return self.outputs_of_one(samples, computed, {})

    def outputs_of_one(self, samples: Samples, computed: ModelOutputs, leaves: Tensors) -> Outputs:
        """Return what a loss sees of some samples, given the outputs of one of them."""
        count = len(samples.labels)
        expanded = [None if tensor is None else tensor.expand(count, *tensor.shape[1:]) for tensor in computed]
        return self.outputs(samples, ModelOutputs(*expanded), leaves)  # type: ignore[arg-type]

    def _add(self, groups: Sequence[Samples], flops: Flops) -> None:
        for group in groups:
            self.per_sample[self.origins.get(id(group.labels), BATCH)].append(flops)

    def _pass_of_one(
        self,
        samples: Samples,
        trained: tuple[str, ...],
        to_input: bool,
        options: PassOptions,
        features_only: bool = False,
    ) -> tuple[Flops, ModelOutputs]:
        """Return what one sample costs in a pass, and the outputs without values."""
        given = {**self.weights.tensors, **(options.get("at") or {})}
        kept = None if samples.keep is None else samples.keep.shape[-1]
        tokens = None if samples.features is None else samples.features.shape[-2]
        views = None if samples.views is None else (self.engine.frozen_part, samples.views.shape[1:])
        compose = options.get("compose")
        # A model may have more weights than its own, such as a teacher's, and then computes more.
        shapes = frozenset((name, tensor.shape) for name, tensor in given.items())
        key = (
            self.engine.net.part_paths.functional, shapes, trained, compose is not None, to_input, features_only, kept,
            tokens, views, options.get("split"), options.get("depth"), options.get("representation", False),
        )  # fmt: skip
        if key not in self.counted:
            one = samples.map(lambda tensor: tensor[:1])
            self.counted[key] = self._count(one, given, trained, to_input, options, features_only)
        found: tuple[Flops, ModelOutputs] = self.counted[key]
        return found

    def _count(
        self,
        samples: Samples,
        given: Tensors,
        trained: tuple[str, ...],
        to_input: bool,
        options: PassOptions,
        features_only: bool,
    ) -> tuple[Flops, ModelOutputs]:
        split, depth, compose = options.get("split"), options.get("depth"), options.get("compose")
        net = self.engine.net
        if compose is not None:  # what is composed trains as the weights themselves would
            given = {**given, **compose({name: given[name] for name in trained}, self.constants.tensors)}
        wanted = [name for name in trained if name in net.parts.shapes]
        leaves = {name: torch.empty_like(given[name], requires_grad=True) for name in wanted}
        weights = {**{name: torch.empty_like(tensor) for name, tensor in given.items()}, **leaves}
        # Not torch.autograd.grad: in it the counter fails where a module is called with a weight, as in timm's TNT.
        formulas = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
        size = net.image_size
        of_input = torch.empty(*samples.labels.shape, len(net.mean), size, size, device="meta", requires_grad=to_input)
        with torch.enable_grad(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            if features_only:
                computed = ModelOutputs(samples.labels.new_empty(*samples.labels.shape, 0, dtype=torch.float32))
                computed = computed._replace(features=self.engine.features(weights, samples, split))
            else:
                computed = self.engine.forward(
                    weights, samples, split, depth, (), of_input if to_input else None,
                    options.get("representation", False),
                )  # fmt: skip
            forward = counter.get_total_flops()
            if leaves or to_input:
                outputs = computed.logits if computed.auxiliary is None else torch.cat(
                    [computed.logits, computed.auxiliary], dim=-1
                )  # fmt: skip
                outputs.sum().backward()  # type: ignore[no-untyped-call]
            total = counter.get_total_flops()
        return Flops(forward, total), ModelOutputs(*(None if t is None else t.detach() for t in computed))  # type: ignore[arg-type]


def _convolution_backward_flops(
    grad_output: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *arguments: Any, **options: Any
) -> int:
    """Count the operations of a convolution's backward pass by shapes.

    Each of its two products takes as many as the forward pass. torch's own formula for the gradient of the weight
    ignores groups, and counts a depthwise convolution as often as it has channels.
    """
    needs_inputs, needs_weight, _ = arguments[-1]
    return 2 * prod(grad_output) * prod(weight[1:]) * (int(needs_inputs) + int(needs_weight))
