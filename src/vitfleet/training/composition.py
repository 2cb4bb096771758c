"""Models whose weights are composed of other tensors that train, such as a sum of shared and task-specific weights.

The trainer optimises the tensors of a selection. Usually they are weights of the model. With a
:class:`ComposedSelection` some of them are not, and a function composes weights of the model from them at the beginning
of every step, so that gradients pass through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vitfleet.message import Tensors
from vitfleet.models.parts import Selection


class Composition(Protocol):
    """Composes weights of the model. It is written for one client and compared by value.

    Its operations may not depend on values of tensors, so that it can be lifted over stacked clients and captured.
    """

    def __call__(self, trained: Tensors, constants: Tensors) -> Tensors:
        """Return the composed weights, by their names in the model.

        Parameters
        ----------
        trained
            All tensors that train.
        constants
            The constants of the fit.
        """
        ...


@dataclass(frozen=True)
class ComposedSelection(Selection):
    """Tensors that train and the composition of the model's weights from them.

    It is used as ``Objective.trainable``. The initial values of all its tensors are in ``Fit.weights``, also of those
    that are not weights of the model.
    """

    composition: Composition


def composition_of(trainable: Selection) -> Composition | None:
    """Return the composition of the model's weights; ``None`` where the weights themselves train."""
    return trainable.composition if isinstance(trainable, ComposedSelection) else None
