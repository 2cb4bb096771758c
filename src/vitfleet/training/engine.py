"""Everything the computation of a training step depends on, apart from the tensors of the clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import TrainConfig
from vitfleet.data.batches import Batch
from vitfleet.data.preprocess import CompiledPreprocess, Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import BatchStatistics, Net
from vitfleet.training.machine import Machine
from vitfleet.training.objective import mask_other_tasks

# Keys of the table `train` that no step depends on: they decide how many steps there are and at which learning rate,
# and the learning rate is a tensor that is set before a training begins.
SCHEDULE_KEYS = frozenset({"epochs", "lr", "schedule", "warmup_rounds"})


@dataclass(frozen=True, eq=False)
class StepEngine:
    """The model, the configuration and the machine with which steps are computed.

    Attributes
    ----------
    preprocess
        From stored pixels to the model's input.
    class_tasks
        The task of each class, ``[classes]``, where the task of an image is known; else ``None``.
    parts_at_once
        Number of parts of an episodic memory whose gradients are computed together.
    """

    net: Net
    preprocess: Preprocess
    config: TrainConfig
    machine: Machine
    class_tasks: Tensor | None
    parts_at_once: int

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
        images: Tensor,
        batch: Batch | None,
        split: int | None,
        depth: int | None,
        keep: Tensor | None = None,
        batch_norms: tuple[str, ...] = (),
        perturbation: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the model's outputs for stored images, and the features at the split if there is one.

        Parameters
        ----------
        batch
            How each image is augmented and masked; ``None``: not at all.
        split
            The block whose input tokens are returned as features.
        depth
            Number of blocks of the client's model; ``None``: all.
        keep
            Without a batch: positions of the patches that are kept, ``[…, batch, kept]``; ``None``: all.
        batch_norms
            With a batch: the batch norms that normalise with it and update their running statistics.
        perturbation
            What is added to the model's input; ``None``: nothing.
        """
        statistics = None if batch is None or not batch_norms else BatchStatistics(batch_norms, batch.sample_weight > 0)
        keep = keep if batch is None else batch.keep
        net = self._training_net
        with self.machine.autocast():
            inputs = self._training_preprocess(images, batch)
            if perturbation is not None:
                inputs = inputs + perturbation
            if split is None:
                return net.outputs(weights, inputs, keep, depth, statistics), None
            features = net.forward_to(weights, inputs, keep, split)
            return net.forward_from(weights, features, split), features

    def features(self, weights: Tensors, images: Tensor, batch: Batch, split: int) -> Tensor:
        """Return the tokens that enter the block ``split``, for stored images; the blocks after it are not computed."""
        with self.machine.autocast():
            inputs = self._training_preprocess(images, batch)
            return self._training_net.forward_to(weights, inputs, batch.keep, split)

    def forward_features(self, weights: Tensors, features: Tensor, keep: Tensor | None, split: int) -> Tensor:
        """Return the logits of tokens that enter the block ``split``.

        Parameters
        ----------
        keep
            Positions of the patch tokens that are kept, ``[…, batch, kept]``; ``None``: all. Prefix tokens always are.
        """
        if keep is not None:
            prefix = self.net.num_prefix_tokens
            index = (keep + prefix).unsqueeze(-1).expand(*keep.shape, features.shape[-1])
            features = torch.cat([features[..., :prefix, :], features.gather(-2, index)], dim=-2)
        with self.machine.autocast():
            return self._training_net.forward_from(weights, features, split)

    def sample_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, in the shape of ``labels``."""
        logits = mask_other_tasks(logits, labels, self.class_tasks).float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").reshape(labels.shape)

    def with_config(self, config: TrainConfig) -> StepEngine:
        """Return the engine with other settings; a compiled model is shared."""
        if config == self.config:
            return self
        engine = replace(self, config=config)
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
            and self.class_tasks is other.class_tasks
            and self.parts_at_once == other.parts_at_once
            and self._step_settings() == other._step_settings()
        )

    def _step_settings(self) -> dict[str, object]:
        return self.config.model_dump(exclude=set(SCHEDULE_KEYS))
