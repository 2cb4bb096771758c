"""The sums from which a head is solved: of every class n and Σφ, of all images Σφφᵀ.

They add up: the sums of clients are those of all their images, whoever has which. So they can be added in any order,
joined later, and subtracted again. In memory they are float64.

A message has only the classes that a client has, and of the symmetric matrix the upper triangle. What is sent in fewer
bits is not Σφφᵀ itself, of which large means would take most digits, but the scatter of a client's images about its own
class means; with these the server has Σφφᵀ again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitfleet.message import Tensors, label_dtype
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.variants.wide_head import MIN_DEVIATION

CLASSES, COUNTS, CLASS_SUMS, SCATTER = "classes", "counts", "class_sums", "scatter"  # the tensors of a message
FEATURES, LABELS = "features", "labels"  # the tensors of a message of features
MOMENTS, SQUARES = "moments", "squares"  # those of a message by which features are standardised
GRAM = "gram"  # a state has it in place of the scatter
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
#: What a client's rounding may change in the scatter, beside its largest variance: more is a sign of wrong sums.
_ROUNDING = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2}
#: The same beside the largest square: the scatter is a difference of two sums of squares in float64.
_CANCELLATION = 1e-9
ROWS = 4096  # images whose features are float64 at once


@dataclass(frozen=True)
class Sums:
    """Sums over some images, in float64.

    Attributes
    ----------
    counts
        Images of each class, ``[classes]``.
    class_sums
        Σφ of each class, ``[classes, features]``.
    gram
        Σφφᵀ of all images, ``[features, features]``; ``None`` where only means are used.
    """

    counts: Tensor
    class_sums: Tensor
    gram: Tensor | None = None

    @classmethod
    def zeros(cls, num_classes: int, width: int, second_order: bool = True, device: torch.device | None = None) -> Sums:
        """Return the sums over no images."""

        def empty(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(empty(num_classes), empty(num_classes, width), empty(width, width) if second_order else None)

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, num_classes: int, second_order: bool = True) -> Sums:
        """Return the sums over images with these features, ``[images, features]``, and labels."""
        sums = cls.zeros(num_classes, features.shape[1], second_order, features.device)
        for start in range(0, len(labels), ROWS):
            sums.add_(features[start : start + ROWS], labels[start : start + ROWS])
        return sums

    def add_(self, features: Tensor, labels: Tensor) -> None:
        """Add images, in place."""
        rows = features.double()
        self.counts.index_add_(0, labels, rows.new_ones(len(rows)))
        self.class_sums.index_add_(0, labels, rows)
        if self.gram is not None:
            self.gram.addmm_(rows.T, rows)

    def __add__(self, other: Sums) -> Sums:
        gram = None if self.gram is None or other.gram is None else self.gram + other.gram
        return Sums(self.counts + other.counts, self.class_sums + other.class_sums, gram)

    def __sub__(self, other: Sums) -> Sums:
        gram = None if self.gram is None or other.gram is None else self.gram - other.gram
        return Sums(self.counts - other.counts, self.class_sums - other.class_sums, gram)

    def times(self, factor: float) -> Sums:
        """Return the sums of images that count so often."""
        gram = None if self.gram is None else self.gram * factor
        return Sums(self.counts * factor, self.class_sums * factor, gram)

    @property
    def samples(self) -> Tensor:
        """Number of images, a scalar."""
        return self.counts.sum()

    @property
    def class_means(self) -> Tensor:
        """The mean features of each class; zeros for a class without images."""
        return self.class_sums / self.counts.clamp(min=1)[:, None]

    def scatter(self) -> Tensor:
        """Return Σ(φ − μ)(φ − μ)ᵀ, with the mean μ of the image's class."""
        assert self.gram is not None
        means = self.class_means
        return torch.addmm(self.gram, (means * self.counts[:, None]).T, means, alpha=-1)

    def with_scatter(self, scatter: Tensor) -> Sums:
        """Return these sums with the Σφφᵀ that belongs to a scatter."""
        means = self.class_means
        return replace(self, gram=torch.addmm(scatter, (means * self.counts[:, None]).T, means))

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums as a state keeps them: of the matrix the upper triangle."""
        gram = {} if self.gram is None else {GRAM: pack_triangle(self.gram)}
        return {COUNTS: self.counts, CLASS_SUMS: self.class_sums, **gram}

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> Sums:
        """Return the sums of what :meth:`tensors` returned."""
        sums, packed = cls(tensors[COUNTS], tensors[CLASS_SUMS]), tensors.get(GRAM)
        return sums if packed is None else replace(sums, gram=unpack_triangle(packed, sums.class_sums.shape[1]))

    def message(self, classes: Tensor, dtype: str) -> dict[str, Tensor]:
        """Return the tensors that a client sends.

        Parameters
        ----------
        classes
            The classes that the client has, in rising order, on the CPU.
        dtype
            The type in which the matrix is sent. Sums of classes have float32 at least: they are few.
        """
        index = classes.to(self.counts.device)
        rows = self.class_sums[index].to(torch.promote_types(DTYPES[dtype], torch.float32))
        sent = {
            CLASSES: classes.to(label_dtype(len(self.counts))),
            COUNTS: self.counts[index].to(torch.int32),
            CLASS_SUMS: rows,
        }
        return sent if self.gram is None else {**sent, SCATTER: pack_triangle(self.scatter()).to(DTYPES[dtype])}


def received_sums(
    tensors: Tensors, num_classes: int, width: int, second_order: bool, dtype: str, device: torch.device
) -> Sums:
    """Return the sums that a client sent, if they can be sums of features.

    Raises
    ------
    RejectedUpdateError
        Says what is wrong with them.
    """
    rows = _length(tensors, CLASSES)
    expected = {
        CLASSES: (label_dtype(num_classes), (rows,)),
        COUNTS: (torch.int32, (rows,)),
        CLASS_SUMS: (torch.promote_types(DTYPES[dtype], torch.float32), (rows, width)),
    }
    if second_order:
        expected[SCATTER] = DTYPES[dtype], (triangle_size(width),)
    tensors = _checked(tensors, expected, device)
    classes, counts = tensors[CLASSES].long(), tensors[COUNTS]
    if rows and (int(classes.min()) < 0 or int(classes.max()) >= num_classes or bool((classes.diff() < 1).any())):
        raise RejectedUpdateError(f"its classes are not between 0 and {num_classes - 1}, each once, in rising order")
    if rows and int(counts.min()) < 1:
        raise RejectedUpdateError("it counts no image of a class whose sum it sends")
    sums = Sums.zeros(num_classes, width, second_order=False, device=device)
    sums.counts[classes] = counts.double()
    sums.class_sums[classes] = tensors[CLASS_SUMS].double()
    if not second_order:
        return sums
    scatter = unpack_triangle(tensors[SCATTER].double(), width)
    squares = (sums.class_means.square() * sums.counts[:, None]).sum(dim=0)
    _check_scatter(scatter, squares, _ROUNDING[dtype])
    return sums.with_scatter(scatter)


def received_features(tensors: Tensors, num_classes: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the features and the labels that a client sent; raises as :func:`received_sums` does."""
    rows = _length(tensors, LABELS)
    expected = {FEATURES: (torch.float16, (rows, width)), LABELS: (label_dtype(num_classes), (rows,))}
    tensors = _checked(tensors, expected, device)
    labels = tensors[LABELS].long()
    if rows and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        raise RejectedUpdateError(f"its labels are not all between 0 and {num_classes - 1}")
    return tensors[FEATURES], labels


@dataclass(frozen=True)
class Moments:
    """Sums of features and of their squares over some images, in float64, by which they are standardised."""

    sums: Tensor
    squares: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Return the sums over images with these features, ``[images, features]``."""
        rows = features.double()
        return cls(rows.sum(dim=0), rows.square().sum(dim=0))

    @classmethod
    def received(cls, tensors: Tensors, samples: int, width: int, device: torch.device) -> Moments:
        """Return what a client sent of so many images; raises as :func:`received_sums` does."""
        form = torch.float64, (width,)
        tensors = _checked(tensors, {MOMENTS: form, SQUARES: form}, device)
        least = tensors[MOMENTS].square() / max(1, samples)
        if bool((tensors[SQUARES] < (1 - _CANCELLATION) * least).any()):
            raise RejectedUpdateError("its sums of squares are smaller than its sums allow")
        return cls(tensors[MOMENTS], tensors[SQUARES])

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.sums + other.sums, self.squares + other.squares)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a message."""
        return {MOMENTS: self.sums, SQUARES: self.squares}

    def standardisation(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return what is subtracted and what it is multiplied with, of so many images."""
        mean = self.sums / samples
        variance = (self.squares / samples - mean.square()).clamp(min=MIN_DEVIATION**2)
        return mean.float(), variance.rsqrt().float()

    def size(self, samples: int) -> float:
        """Return the root mean square of the features."""
        return math.sqrt(float(self.squares.mean()) / samples)


def _length(tensors: Tensors, name: str) -> int:
    return len(tensors[name]) if name in tensors and tensors[name].dim() else 0


def _checked(
    tensors: Tensors, expected: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors of a message on a device, if they have these types and shapes, and are finite."""
    if tensors.keys() != expected.keys():
        raise RejectedUpdateError(f"its message has {sorted(tensors)}; expected: {sorted(expected)}")
    for name, tensor in tensors.items():
        if (tensor.dtype, tuple(tensor.shape)) != expected[name]:
            raise RejectedUpdateError(
                f"its {name} have the type {tensor.dtype} and the shape {tuple(tensor.shape)}; expected: "
                f"{expected[name][0]}, {expected[name][1]}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RejectedUpdateError(f"its {name} are not finite")
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _check_scatter(scatter: Tensor, squares: Tensor, rounding: float) -> None:
    """Reject a matrix that is no scatter: variances are not negative, and no covariance is larger than they allow."""
    variances = scatter.diagonal()
    allowance = rounding * variances.abs().max() + _CANCELLATION * squares.max()
    if bool((variances < -allowance).any()):
        raise RejectedUpdateError("its scatter has negative variances")
    deviations = (variances.clamp(min=0) + allowance).sqrt()
    limits = torch.outer((1 + rounding) * deviations, deviations)
    if bool((scatter > limits).any()) or bool((scatter < -limits).any()):
        raise RejectedUpdateError("its scatter has covariances that are larger than its variances allow")


def triangle_size(width: int) -> int:
    """Return how many numbers the upper triangle of a matrix has, with its diagonal."""
    return width * (width + 1) // 2


def pack_triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a matrix, row by row."""
    if matrix.is_meta:
        return matrix.new_empty(triangle_size(len(matrix)))
    return matrix.masked_select(_upper(len(matrix), matrix.device))


def unpack_triangle(packed: Tensor, width: int) -> Tensor:
    """Return the symmetric matrix with this upper triangle."""
    upper = packed.new_zeros(width, width).masked_scatter_(_upper(width, packed.device), packed)
    matrix: Tensor = upper + upper.triu(1).T
    return matrix


def _upper(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).triu()
