"""What a method specifies of a training.

A method states an objective and never writes the training loop. Everything in an objective is a pure function of
tensors. The trainer can therefore run one client or several stacked clients, eagerly or captured in a CUDA graph,
without any difference to the method. Objectives are compared by value: clients with equal objectives can be trained
together, so what differs between clients belongs in the tensors of a :class:`Fit`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import TrainConfig
from vitfleet.data.features import FeatureSet
from vitfleet.message import Tensors
from vitfleet.models.parts import Selection
from vitfleet.training.memories import EpisodicMemory, ReplayBuffer, Teachers


class ReplayedSamples(NamedTuple):
    """The stored samples that one client replays in a step.

    Attributes
    ----------
    logits, labels
        The model's outputs, ``[replayed, classes]``, and the true classes, ``[replayed]``. Where the task of an image
        is known, the logits of other tasks are −∞, as those of the batch are.
    sample_weight
        Weight of each sample in their mean, ``[replayed]``. They sum to one; padding has weight 0.
    targets
        What was stored with the samples: see :class:`~vitfleet.training.memories.ReplayBuffer`.
    """

    logits: Tensor
    labels: Tensor
    sample_weight: Tensor
    targets: Tensors


@dataclass(frozen=True)
class Step:
    """One client's step, the argument of an objective's functions.

    Attributes
    ----------
    logits, labels
        The model's outputs, ``[batch, classes]``, and the true classes, ``[batch]``.
    sample_weight
        Weight of each sample in the batch's mean, ``[batch]``. They sum to one; padding has weight 0.
    weights
        The weights that train, before the step.
    constants
        Tensors that the method fixed for this training, such as an anchor or an importance.
    positions
        Positions of the samples in the client's shard, ``[batch]``.
    epoch
        The number of the epoch, from 0, a scalar.
    features
        The tokens at the objective's split, if it has one, ``[batch, tokens, width]``.
    replayed
        Samples of the fit's replay buffer, if it has one: ``ReplayBuffer.replays`` per sample of the batch, in the
        batch's order.
    auxiliary
        The model's outputs besides logits, if it has any, of the batch and then of the replayed samples.
    """

    logits: Tensor
    labels: Tensor
    sample_weight: Tensor
    weights: Tensors
    constants: Tensors
    positions: Tensor
    epoch: Tensor
    features: Tensor | None = None
    replayed: ReplayedSamples | None = None
    auxiliary: Tensor | None = None


Loss: TypeAlias = Callable[[Step], Tensor]


@dataclass(frozen=True)
class ReferenceGradients:
    """Gradients with which a gradient transform compares the gradient of the step.

    Attributes
    ----------
    gradients
        One row per reference, for each weight that trains, ``[references, …]``.
    present
        Which references exist, ``[references]``. The rows of the others are zero.
    """

    gradients: Tensors
    present: Tensor


class GradientTransform(Protocol):
    """Turns the gradients of a step into those that the optimiser applies.

    It is written for one client, to be lifted over stacked clients: its operations may not depend on values of tensors.
    """

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of its counters. Each is summed over the steps and becomes a scalar of ``FitResult.observed``."""
        ...

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients to apply, and the counters of this step."""
        ...


class ReferenceSelector(Protocol):
    """Selects the parts of a memory that are used as references, where there are more than ``k``."""

    @property
    def k(self) -> int:
        """How many parts are selected."""
        ...

    @property
    def every(self) -> int:
        """The number of steps of an epoch after which parts are selected again."""
        ...

    def __call__(self, gradients: Tensors, references: ReferenceGradients) -> Tensor:
        """Return the indices of the ``k`` selected references, in any order, given the gradients of all of them."""
        ...


class Observer(Protocol):
    """Accumulates statistics of the gradients of a training, on the device, without synchronising with the host."""

    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Return the state after one more step; it may be changed in place.

        A sample of weight 0 is padding, and so is a step in which all weights are 0: it must not change the state.
        """
        ...


class SampleObserver(ABC):
    """An observer of the gradient of each sample: there is one row per sample, of whole images.

    A training with it changes no weight.
    """

    @abstractmethod
    def __call__(self, observer_state: Tensors, gradients: Tensors, step: Step) -> Tensors:
        """Return the state after one more step: see :class:`Observer`."""


class CompanionRule(Protocol):
    """How a second set of weights, the companion, is trained beside the weights that train, on the same batches.

    Both steps on a batch start from the weights before it: the companion's loss may depend on the weights that train,
    which never depend on the companion. Each has its own optimiser, with the same settings. The functions are written
    as a gradient transform's are.
    """

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of its counters. Each is summed over the steps and becomes a scalar of ``FitResult.observed``."""
        ...

    def evaluated_weights(self, companion: Tensors, step: Step) -> Tensors:
        """Return the weights at which the companion's loss is computed.

        Parameters
        ----------
        companion
            The companion's values of the weights that train, before the step.
        step
            The step of the weights that train.
        """
        ...

    def companion_gradients(self, gradients: Tensors, companion: Tensors, step: Step) -> tuple[Tensors, Tensors]:
        """Return the gradients to apply to the companion, and the counters of this step.

        Parameters
        ----------
        gradients
            Those of the objective's loss at the evaluated weights.
        """
        ...


def cross_entropy(step: Step) -> Tensor:
    """Return the mean cross-entropy of the batch."""
    losses = F.cross_entropy(step.logits.float(), step.labels, reduction="none")
    return torch.dot(losses, step.sample_weight)


def mask_other_tasks(logits: Tensor, labels: Tensor, class_tasks: Tensor | None) -> Tensor:
    """Return logits in which the classes of all tasks but the sample's own are −∞.

    Parameters
    ----------
    class_tasks
        The task of each class, ``[classes]``; ``None``: nothing is masked.
    """
    if class_tasks is None:
        return logits
    return logits.masked_fill(class_tasks != class_tasks[labels].unsqueeze(-1), -torch.inf)


@dataclass(frozen=True)
class Objective:
    """What a client optimises.

    Attributes
    ----------
    trainable
        The weights that train, or a :class:`~vitfleet.training.composition.ComposedSelection` of tensors that the
        weights are composed of. All others have no gradient and no optimiser state. Empty, with a split: nothing
        trains, and the model is computed only up to the split, for an observer of the features.
    loss
        What is minimised.
    transform
        Turns the gradients of a step into those that are applied; ``None``: they are applied as they are.
    selector
        Selects the parts of the memory that the transform sees; ``None``: all parts.
    restore_every
        The number of steps of an epoch after which the gradients of the memory are computed again. Between them those
        computed last are used, and no parts are selected.
    reference_dtype
        The type in which the gradients of the memory are stored; ``None``: that of the weights.
    mask_memory
        Whether images of the memory are masked as those of a step are, each in one way during the whole training.
    observer
        Accumulates statistics of the gradients, before they are transformed.
    depth
        Number of blocks of the client's model; ``None``: all blocks.
    split
        The block before which the model is split: its input tokens are the step's features.
    augment
        Whether images are augmented as configured.
    companion
        How the fit's companion weights are trained; ``None``: there are none.
    """

    trainable: Selection
    loss: Loss = cross_entropy
    transform: GradientTransform | None = None
    selector: ReferenceSelector | None = None
    restore_every: int = 1
    reference_dtype: torch.dtype | None = None
    mask_memory: bool = False
    observer: Observer | None = None
    depth: int | None = None
    split: int | None = None
    augment: bool = True
    companion: CompanionRule | None = None

    @property
    def features_only(self) -> bool:
        """Whether nothing trains and only the features at the split are computed."""
        return self.split is not None and not len(self.trainable)

    def reference_work(self, step: int) -> tuple[bool, bool]:
        """Return whether a step of an epoch selects parts of the memory, and whether it computes their gradients."""
        restore = step % self.restore_every == 0
        return restore and (self.selector is None or step % self.selector.every == 0), restore


@dataclass(frozen=True)
class Fit:
    """A training that a method requests.

    Attributes
    ----------
    weights
        All weights of the model, those that train and those that do not.
    constants
        Tensors that the loss and the transform can use.
    observer_state
        The initial state of the objective's observer. Its shapes may differ between clients: in a stacked training
        they are padded with zeros at their ends, and cut back afterwards.
    features
        Tokens that enter the model at the objective's split, to train on instead of images.
    train
        The training settings, where they differ from the table ``[train]``.
    memory
        Stored samples, or models of earlier tasks. Their gradients at the current weights are references of the
        transform.
    replay
        Stored samples that are replayed in the steps: the loss sees them as ``Step.replayed``.
    reference_weights
        Other values of the weights that train. The gradient of the step's loss at these values is the last reference
        of the transform.
    companion_weights
        The initial values of the objective's companion: of all weights in its selection, buffers included.
    score_samples
        Whether to compute the logits and the loss of every sample under the trained weights at the end.
    """

    weights: Tensors
    objective: Objective
    epochs: int
    constants: Tensors = field(default_factory=dict)
    observer_state: Tensors = field(default_factory=dict)
    features: FeatureSet | None = None
    memory: EpisodicMemory | Teachers | None = None
    reference_weights: Tensors | None = None
    companion_weights: Tensors | None = None
    score_samples: bool = False
    train: TrainConfig | None = None
    replay: ReplayBuffer | None = None


@dataclass(frozen=True)
class FitResult:
    """Result of a :class:`Fit`.

    Attributes
    ----------
    weights
        The trained weights and the buffers of the selection, in new tensors.
    loss
        Mean training loss over all samples and epochs, a scalar on the device; 0 where nothing trained.
    samples, steps
        Number of the client's samples, and of the optimiser steps it took.
    observed
        The final state of the objective's observer, and the counters of its transform and its companion.
    sample_losses
        Cross-entropy of each of the client's samples under the trained weights, without augmentation or masking, in
        the order of the shard, ``[samples]``; empty unless it was requested.
    finite_steps
        Number of steps before the first whose loss was not finite, a scalar on the device; all steps if there was none.
    sample_logits
        The logits from which these losses were computed, ``[samples, classes]``, of all classes.
    companion_weights
        The trained companion, in new tensors; empty where there is none.
    """

    weights: Tensors
    loss: Tensor
    samples: int
    steps: int
    observed: Tensors
    sample_losses: Tensor
    finite_steps: Tensor
    sample_logits: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    companion_weights: Tensors = field(default_factory=dict)
