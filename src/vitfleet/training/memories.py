"""What clients keep of earlier tasks, as the inputs of a training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from vitfleet.message import Tensors


@dataclass(frozen=True)
class EpisodicMemory:
    """Stored samples of earlier tasks, in parts. Each part gives one reference gradient at the current weights.

    Attributes
    ----------
    images, labels
        uint8 ``[parts, samples, channels, height, width]`` and ``[parts, samples]``, padded to the largest part.
    sample_weight
        Weight of each sample in the mean loss of its part, ``[parts, samples]``; 0 for padding.
    sizes
        The number of samples of each part, known on the host. The parts are sorted by falling size: so the parts of
        several clients at one position have similar sizes, and little padding is computed.
    """

    images: Tensor
    labels: Tensor
    sample_weight: Tensor
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {"images": self.images, "labels": self.labels, "sample_weight": self.sample_weight}

    def with_tensors(self, tensors: Tensors) -> EpisodicMemory:
        """Return a memory of other tensors, which have the same names."""
        return EpisodicMemory(**tensors, sizes=self.sizes)


@dataclass(frozen=True)
class ReplayBuffer:
    """Stored samples, of which every step draws some at random and passes them through the model with its batch.

    Replayed samples are augmented and masked as those of the batch are, with random numbers of their own.

    Attributes
    ----------
    images, labels
        uint8 ``[samples, channels, height, width]`` and ``[samples]``; at least one sample.
    replays
        How many stored samples are drawn per sample of the batch: uniformly, with replacement.
    targets
        Further tensors of every sample, ``[samples, …]``, such as the logits of an earlier model.
    """

    images: Tensor
    labels: Tensor
    replays: int = 1
    targets: Tensors = field(default_factory=dict)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {"images": self.images, "labels": self.labels, **self.targets}

    def with_tensors(self, tensors: Tensors) -> ReplayBuffer:
        """Return a buffer of other tensors, which have the same names."""
        return replace(
            self,
            images=tensors["images"],
            labels=tensors["labels"],
            targets={name: tensors[name] for name in self.targets},
        )


@dataclass(frozen=True)
class Teachers:
    """Models of earlier tasks of which some weights were kept; the others are zero.

    Each gives one reference gradient at the current weights: that of the distillation of its predictions for the images
    of the step.

    Attributes
    ----------
    values, indices
        The kept weights, ``[teachers, kept]``, and their positions in the vector of all parameters of the model, in the
        model's order.
    labels
        A class of each teacher's task, ``[teachers]``. Where the task of an image is known, the classes of this task
        are compared, else all.
    temperatures
        The temperature of each distillation, ``[teachers]``.
    present
        Which teachers exist, ``[teachers]``.
    """

    values: Tensor
    indices: Tensor
    labels: Tensor
    temperatures: Tensor
    present: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_tensors(self, tensors: Tensors) -> Teachers:
        """Return teachers of other tensors, which have the same names."""
        return Teachers(**tensors)
