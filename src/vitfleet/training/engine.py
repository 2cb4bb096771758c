"""Everything the computation of a training step depends on, apart from the tensors of the clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import TrainConfig
from vitfleet.data.preprocess import CompiledPreprocess, Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import BatchStatistics, Net
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.samples import Samples, mask_other_tasks
from vitfleet.training.views.frozen import FrozenPart, images_needed

# Keys of the table `train` that no step depends on: they decide how many steps there are and at which learning rate,
# and the learning rate is a tensor that is set before a training begins. Views are samples of the batch.
SCHEDULE_KEYS = frozenset({"epochs", "lr", "schedule", "warmup_rounds", "cached_views"})


class ModelOutputs(NamedTuple):
    """What a forward pass returns."""

    logits: Tensor
    auxiliary: Tensor | None = None  # outputs besides logits, if the model has any
    features: Tensor | None = None  # the tokens at the split, if there is one
    representation: Tensor | None = None  # the input of the head, if it was asked for

    def narrow(self, axis: int, start: int, count: int) -> ModelOutputs:
        """Return the outputs of some of the samples."""
        return ModelOutputs(*(None if tensor is None else tensor.narrow(axis, start, count) for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class StepEngine:
    """The model, the configuration and the machine with which steps are computed."""

    net: Net
    preprocess: Preprocess  # from stored pixels to the model's input
    config: TrainConfig
    machine: ExecutionSettings
    class_to_task: Tensor | None  # the task of each class, [classes], where the task of an image is known
    parts_at_once: int  # parts of a set of stored samples whose gradients are computed together
    frozen_part: FrozenPart | None = None  # what has made the views of samples that come as these

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled. Only models with uniform blocks are."""
        return self.machine.compile and self.net.functional is not None

    @cached_property
    def _training_net(self) -> Net:
        """The net with the forward pass of training: evaluation has other shapes and is never compiled."""
        functional = self.net.functional
        if functional is None:
            return self.net
        machine = self.machine
        settings = {"compile_blocks": machine.compile, "short_attention": machine.kernels}
        return replace(self.net, functional=functional.with_settings(**settings))

    @cached_property
    def _training_preprocess(self) -> Preprocess | CompiledPreprocess:
        return CompiledPreprocess(self.preprocess) if self.compiled else self.preprocess

    def forward(
        self,
        weights: Tensors,
        samples: Samples,
        split: int | None = None,
        depth: int | None = None,
        batch_norms: tuple[str, ...] = (),
        perturbation: Tensor | None = None,
        representation: bool = False,
    ) -> ModelOutputs:
        """Pass stored images, or features, through the model: see :class:`~vitfleet.training.passes.PassOptions`.

        The ``batch_norms`` normalise with these samples and update their running statistics. The ``perturbation`` is
        added to the model's input.
        """
        net, features = self._training_net, None
        with self.machine.autocast():
            if samples.views is not None:
                if perturbation is not None:
                    raise images_needed("changes its input")
                if depth is not None:
                    raise images_needed("leaves layers out")
                return self._forward_from_views(weights, samples.views, split, representation)
            if samples.features is not None:
                assert split is not None
                features = self._kept_tokens(samples.features, samples.keep)
                outputs = net.forward_from(weights, features, split)
            elif split is not None:
                features = net.forward_to(weights, self._inputs(samples, perturbation), samples.keep, split)
                outputs = net.forward_from(weights, features, split)
            elif representation:
                inputs = self._inputs(samples, perturbation)
                outputs, pooled = net.outputs_and_representation(weights, inputs, samples.keep, depth)
                return ModelOutputs(*net.split_outputs(outputs), representation=pooled)
            else:
                statistics = BatchStatistics(batch_norms, samples.sample_weight > 0) if batch_norms else None
                inputs = self._inputs(samples, perturbation)
                outputs = net.outputs(weights, inputs, samples.keep, depth, statistics)
        return ModelOutputs(*net.split_outputs(outputs), features=features)

    def _forward_from_views(
        self, weights: Tensors, views: Tensor, split: int | None, representation: bool
    ) -> ModelOutputs:
        """Pass what the frozen part has computed through the rest of the model."""
        assert self.frozen_part is not None
        net, entered = self._training_net, self.frozen_part.split
        if split not in (None, entered) or (representation and entered is not None):
            raise images_needed("asks for tokens of other layers")
        if entered is None:
            head_input = net.head_input(weights, views)
            outputs = net.logits_of(weights, head_input)
            return ModelOutputs(*net.split_outputs(outputs), representation=head_input if representation else None)
        outputs = net.forward_from(weights, views, entered)
        return ModelOutputs(*net.split_outputs(outputs), features=None if split is None else views)

    def features(self, weights: Tensors, samples: Samples, split: int | None) -> Tensor:
        """Return the tokens that enter the block ``split``, or what the head sees, of stored images.

        What comes after it is not computed.
        """
        if samples.views is not None:
            assert self.frozen_part is not None
            if split != self.frozen_part.split:
                raise images_needed("asks for tokens of other layers")
            return samples.views
        net = self._training_net
        with self.machine.autocast():
            inputs = self._inputs(samples, None)
            if split is None:
                return net.representation(weights, inputs, samples.keep)
            return net.forward_to(weights, inputs, samples.keep, split)

    def _inputs(self, samples: Samples, perturbation: Tensor | None) -> Tensor:
        """Return the model's input of stored images, augmented as the samples say."""
        assert samples.images is not None
        inputs = self._training_preprocess(samples.images, samples)
        return inputs if perturbation is None else inputs + perturbation

    def _kept_tokens(self, features: Tensor, keep: Tensor | None) -> Tensor:
        """Return the prefix tokens, which are always kept, and the kept patch tokens."""
        if keep is None:
            return features
        prefix = self.net.num_prefix_tokens
        index = (keep + prefix).unsqueeze(-1).expand(*keep.shape, features.shape[-1])
        return torch.cat([features[..., :prefix, :], features.gather(-2, index)], dim=-2)

    def sample_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, in the shape of ``labels``."""
        logits = mask_other_tasks(logits, labels, self.class_to_task).float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").reshape(labels.shape)

    def for_training(self, config: TrainConfig, frozen_part: FrozenPart | None) -> StepEngine:
        """Return the engine with other settings; a compiled model is shared."""
        if config == self.config and frozen_part == self.frozen_part:
            return self
        engine = replace(self, config=config, frozen_part=frozen_part)
        for name in ("_training_net", "_training_preprocess"):
            engine.__dict__[name] = getattr(self, name)  # fills the cached property
        return engine

    def computes_like(self, other: StepEngine) -> bool:
        """Whether a step of this engine, captured once, is also a step of the other.

        Every setting counts unless it is known not to matter: a new key of the configuration is compared until it is
        listed in ``SCHEDULE_KEYS``.
        """
        return self is other or (
            self.net is other.net
            and self.preprocess is other.preprocess
            and self.machine == other.machine
            and self.class_to_task is other.class_to_task
            and self.parts_at_once == other.parts_at_once
            and self.frozen_part == other.frozen_part
            and self._step_settings() == other._step_settings()
        )

    def _step_settings(self) -> dict[str, object]:
        return self.config.model_dump(exclude=set(SCHEDULE_KEYS))
