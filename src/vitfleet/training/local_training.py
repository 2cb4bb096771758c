"""A training that a method asks for, and its result.

The client half of a method yields :class:`LocalTraining` values and is sent back a :class:`LocalResult` for each. What
is computed in a step is the method's own function: see :mod:`vitfleet.training.step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from vitfleet.config.schema import TrainConfig
from vitfleet.data.features import FeatureSet
from vitfleet.message import Tensors
from vitfleet.models.parts import Selection
from vitfleet.training.step import Step, check_step, cross_entropy_step
from vitfleet.training.views.frozen import VIEWS, CachedViews


@dataclass(frozen=True)
class SampleSet:
    """Stored samples that a step uses besides its batch, in parts: one part per earlier task, for example."""

    images: Tensor  # uint8 [parts, samples, channels, height, width], padded to the largest part
    labels: Tensor  # [parts, samples]
    # The number of samples of each part, known on the host, in falling order: so the parts of several clients at one
    # position have similar sizes, and little padding is computed.
    sizes: tuple[int, ...]
    # How many samples every step draws per sample of its batch: uniformly over the first part, with replacement, with
    # an augmentation and a mask of their own. 0: a step takes whole parts.
    draws: int = 0
    # Positions of the patches that are kept of each image, [parts, samples, kept]; None: images are whole. Drawn
    # samples are masked as the batch is.
    keep: Tensor | None = None
    stored: Tensors = field(
        default_factory=dict
    )  # of every sample, [parts, samples, …], such as an earlier model's logits

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[Tensor, Tensor] | None]) -> SampleSet:
        """Return a set of images and labels of each part, the largest part first; ``None``: a part without samples.

        At least one part has samples.
        """
        ordered = sorted(parts, key=lambda part: 0 if part is None else -len(part[1]))
        sizes = tuple(0 if part is None else len(part[1]) for part in ordered)
        assert ordered[0] is not None
        like_images, like_labels = ordered[0]
        images = like_images.new_zeros(len(sizes), sizes[0], *like_images.shape[1:])
        labels = like_labels.new_zeros(len(sizes), sizes[0], dtype=torch.long)
        for row, part in enumerate(ordered):
            if part is not None:
                images[row, : len(part[1])] = part[0]
                labels[row, : len(part[1])] = part[1].long()
        return cls(images, labels, sizes)

    def sample_weight(self) -> Tensor:
        """Return the weight of each sample in the mean over its part, ``[parts, samples]``; 0 for padding."""
        weight = torch.zeros(self.labels.shape, device=self.labels.device)
        for row, size in enumerate(self.sizes):
            if size:
                weight[row, :size] = 1 / size
        return weight

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        keep = {} if self.keep is None else {"keep": self.keep}
        return {"images": self.images, "labels": self.labels, **keep, **self.stored}

    def with_tensors(self, tensors: Tensors) -> SampleSet:
        """Return a set of other tensors, which have the same names."""
        stored = {name: tensors[name] for name in self.stored}
        return replace(
            self, images=tensors["images"], labels=tensors["labels"], keep=tensors.get("keep"), stored=stored
        )


@dataclass(frozen=True)
class LocalTraining:
    """A training that a method asks for.

    Clients whose trainings are equal in everything but the values of tensors are trained together. ``step`` is compared
    by value: a function of a module or an instance of a frozen dataclass, never a closure.

    Attributes
    ----------
    weights
        All weights of the model, those that train and those that do not, and whatever else trains.
    trainable
        The names of those that train; ``step`` returns their gradients. All others have no gradient and no optimiser
        state. They need not be weights of the model: another model beside it has names with a prefix that ends in
        ``/``, and ``train.max_grad_norm`` then applies to each model for itself.
    epochs
        Passes over the client's samples.
    step
        What is computed in every step: see :mod:`vitfleet.training.step`.
    constants
        Tensors that do not change during the training, such as an anchor or another model. A tensor that is the same
        object for all clients is held once.
    kept
        Tensors that steps change (sums, counters, recordings), with their initial values. Their final values are in the
        result. Between clients their shapes may differ: stacked ones are padded with zeros at their ends, and cut back.
        In a dry run the final values are zeros on the CPU, because methods read them; all other tensors have no values.
    scratch
        The same for tensors that nobody needs afterwards. Only shape and type count, so they may be meta tensors.
    sets
        Stored samples by name; those that are drawn from use their name in the random addresses.
    random
        Names of the random numbers that steps draw themselves (:meth:`~vitfleet.training.step.StepView.normal`), each a
        purpose of its own: see :func:`vitfleet.randomness.own_purpose`.
    features
        Tokens to train on instead of the client's images.
    views
        What the frozen part of the model makes of the client's images, to train on instead; the trainer sets it
        (``train.cached_views``).
    train
        The training settings, where they differ from the table ``[train]``.
    augment
        Whether images are augmented as configured.
    score_samples
        Whether to compute the logits and the loss of every sample under the trained weights at the end.
    """

    weights: Tensors
    trainable: Selection
    epochs: int
    step: Step = cross_entropy_step
    constants: Tensors = field(default_factory=dict)
    kept: Tensors = field(default_factory=dict)
    scratch: Tensors = field(default_factory=dict)
    sets: dict[str, SampleSet] = field(default_factory=dict)
    random: tuple[str, ...] = ()
    features: FeatureSet | None = None
    views: CachedViews | None = None
    train: TrainConfig | None = None
    augment: bool = True
    score_samples: bool = False

    def __post_init__(self) -> None:
        check_step(self.step)
        of_sets = {f"{name}{use}" for name in self.drawn_sets() for use in ("", "-augment", "-mask")}
        if taken := of_sets.intersection(self.random):
            raise ValueError(
                f"random numbers {min(taken)!r}: the name is taken by draws from a set; choose another one"
            )

    def drawn_sets(self) -> dict[str, SampleSet]:
        """Return the sets that steps draw from."""
        return {name: samples for name, samples in self.sets.items() if samples.draws}

    def tensor_groups(self) -> dict[str, Tensors]:
        """Return the tensors by the name of their group; those of a set are under ``sets.NAME``."""
        return {
            "weights": self.weights,
            "constants": self.constants,
            "kept": self.kept,
            "scratch": self.scratch,
            "views": {} if self.views is None else {VIEWS: self.views.values},
            **{f"sets.{name}": samples.tensors() for name, samples in self.sets.items()},
        }

    def with_tensor_groups(self, groups: Mapping[str, Tensors]) -> LocalTraining:
        """Return the training with other tensors, in the groups of :meth:`tensor_groups`."""
        sets = {name: samples.with_tensors(groups[f"sets.{name}"]) for name, samples in self.sets.items()}
        views = None if self.views is None else replace(self.views, values=groups["views"][VIEWS])
        own = {field.name: groups[field.name] for field in fields(self) if field.name in groups}
        return replace(self, **{**own, "views": views}, sets=sets)  # type: ignore[arg-type]

    def stacks_with(self, other: LocalTraining) -> bool:
        """Whether a client with the other training can be stacked with this one's."""
        return self.features is None and other.features is None and self._form() == other._form()

    def _form(self) -> tuple[object, ...]:
        """Return what must be equal for trainings to be stacked: all but the values of tensors."""
        settings = (self.trainable, self.step, self.epochs, self.random, self.train, self.augment, self.score_samples)
        draws = {name: samples.draws for name, samples in self.sets.items()}
        views = None if self.views is None else (self.views.part, self.views.count)
        return *settings, draws, views, {name: tensors.keys() for name, tensors in self.tensor_groups().items()}


@dataclass(frozen=True)
class LocalResult:
    """Result of a :class:`LocalTraining`."""

    weights: Tensors  # what trained, and the buffers of the selection, in new tensors; without samples as they were
    loss: Tensor  # mean over all samples and epochs, a scalar on the device; 0 where no step had a loss
    samples: int  # of the client
    steps: int  # that it took
    kept: Tensors  # the final values of the kept tensors
    # Cross-entropy of each of the client's samples under the trained weights, without augmentation or masking, in the
    # order of the shard, [samples]; empty unless it was requested.
    sample_losses: Tensor
    finite_steps: Tensor  # before the first whose loss was not finite, a scalar on the device; all if there was none
    sample_logits: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # of these losses, [samples, classes]
