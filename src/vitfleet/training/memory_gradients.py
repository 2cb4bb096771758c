"""Reference gradients of a memory: one per stored task, at the current weights of each client.

Those of stored samples are computed here, those of teachers in :mod:`vitfleet.training.distillation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitfleet.data.batches import Batch
from vitfleet.data.images import ImageSet
from vitfleet.message import Tensors
from vitfleet.training.cohort_inputs import CohortInputs
from vitfleet.training.composition import composition_of
from vitfleet.training.distillation import distillation_gradients
from vitfleet.training.engine import StepEngine
from vitfleet.training.gradients import client_gradients
from vitfleet.training.objective import Objective, ReferenceGradients
from vitfleet.training.repeated_weights import by_part, repeat_weights


@dataclass(frozen=True)
class MemoryGradients:
    """Computes the gradients of the parts of one or several clients' memories.

    Attributes
    ----------
    leaves
        The weights that train; every gradient has their shapes.
    stacked
        Whether tensors have a leading axis of clients.
    selected
        Where the objective's selector has a choice: the parts that it selected last. Empty elsewhere.
    restored
        Where gradients are reused: those computed last, by name of the weight. Empty elsewhere.
    """

    engine: StepEngine
    objective: Objective
    inputs: CohortInputs
    leaves: Mapping[str, Tensor]
    stacked: bool
    selected: dict[str, Tensor]
    restored: dict[str, Tensor]

    @classmethod
    def create(
        cls,
        engine: StepEngine,
        objective: Objective,
        inputs: CohortInputs,
        leaves: Mapping[str, Tensor],
        stacked: bool,
    ) -> MemoryGradients:
        """Allocate the tensors of the selected parts and of the gradients that are reused."""
        if inputs.part_widths and composition_of(objective.trainable) is not None:
            raise ValueError("a fit has a memory and composed weights: gradients of a memory need weights that train")
        selector, axis, parts = objective.selector, 1 if stacked else 0, len(inputs.part_widths)
        k = selector.k if selector is not None and parts > selector.k else 0
        memory = inputs.memory.tensors.items() if k else ()
        selected = {name: tensor.narrow(axis, 0, k).clone() for name, tensor in memory}
        restored: dict[str, Tensor] = {}
        if objective.restore_every > 1 and parts:
            for name, leaf in leaves.items():
                shape = (*leaf.shape[:axis], k or parts, *leaf.shape[axis:])
                restored[name] = leaf.new_zeros(shape, dtype=objective.reference_dtype or leaf.dtype)
        return cls(engine, objective, inputs, leaves, stacked, selected, restored)

    @property
    def part_axis(self) -> int:
        """The axis of a memory's parts."""
        return 1 if self.stacked else 0

    def first(self, count: int, inputs: CohortInputs, leaves: Mapping[str, Tensor]) -> MemoryGradients:
        """Return the same for the first ``count`` clients, whose inputs and weights are given."""
        selected = {name: tensor[:count] for name, tensor in self.selected.items()}
        restored = {name: tensor[:count] for name, tensor in self.restored.items()}
        return replace(self, inputs=inputs, leaves=leaves, selected=selected, restored=restored)

    def compute(
        self,
        gradients: Tensors,
        refresh: bool,
        restore: bool,
        images: ImageSet | None = None,
        batch: Batch | None = None,
    ) -> ReferenceGradients | None:
        """Return the gradients of all parts, or of the selected ones; ``None`` where there is no memory.

        Parameters
        ----------
        gradients
            The gradients of the step, which a selector may compare with those of the memory.
        refresh
            Whether to select parts again. If not, those selected last are used.
        restore
            Whether to compute the gradients at the current weights. If not, those computed last are returned.
        images, batch
            The images of all clients, and the batch of the step: teachers need them.
        """
        memory = self.inputs.memory.tensors
        if not self.inputs.part_widths:
            return None
        if not restore:
            return ReferenceGradients(self.restored, _present(self.selected or memory))
        references = self._restore(gradients, refresh, images, batch)
        if self.restored:
            rows = [references.gradients[name] for name in self.restored]
            torch._foreach_copy_(list(self.restored.values()), rows)
        return references

    def _restore(
        self, gradients: Tensors, refresh: bool, images: ImageSet | None, batch: Batch | None
    ) -> ReferenceGradients:
        """Compute the gradients at the current weights."""

        def references(memory: Tensors, widths: tuple[int, ...]) -> ReferenceGradients:
            if "sample_weight" in memory:
                return ReferenceGradients(self._of_parts(memory, widths), _present(memory))
            assert images is not None
            assert batch is not None
            rows = distillation_gradients(
                self.engine, self.objective, self.inputs.weights, self.leaves, memory, images.images, batch
            )
            return ReferenceGradients(rows, _present(memory))

        selector, memory, widths = self.objective.selector, self.inputs.memory.tensors, self.inputs.part_widths
        if selector is None or len(widths) <= selector.k:
            return references(memory, widths)
        if not refresh:
            # Parts, and so selected ones, are sorted by falling size: the i-th selected is no larger than the i-th.
            return references(self.selected, widths[: selector.k])
        return self._select(gradients, references(memory, widths))

    def _select(self, gradients: Tensors, candidates: ReferenceGradients) -> ReferenceGradients:
        """Select among the gradients of all parts, and store the selected parts for the next steps."""
        selector = self.objective.selector
        assert selector is not None

        def select(gradients: Tensors, rows: Tensors, present: Tensor) -> Tensor:
            return selector(gradients, ReferenceGradients(rows, present))

        select_all = torch.vmap(select) if self.stacked else select
        index_select = torch.vmap(torch.index_select, in_dims=(0, None, 0)) if self.stacked else torch.index_select
        with torch.no_grad():
            indices = select_all(gradients, candidates.gradients, candidates.present).sort(dim=-1).values
            memory = self.inputs.memory.tensors
            selected = {name: index_select(tensor, 0, indices) for name, tensor in memory.items()}
            torch._foreach_copy_(list(self.selected.values()), list(selected.values()))
            rows = {name: index_select(rows, 0, indices) for name, rows in candidates.gradients.items()}
            return ReferenceGradients(rows, index_select(candidates.present, 0, indices))

    def _of_parts(self, memory: Tensors, widths: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the gradient of each part of stored samples, of several parts of one width at once."""
        axis, dtype = self.part_axis, self.objective.reference_dtype
        chunks: list[dict[str, Tensor]] = []
        at_once = self.engine.parts_at_once
        longest = at_once if at_once > 1 and self.engine.net.stackable else 1
        for start, count in _runs_of_equal_width(widths, longest):
            chunk = {
                name: tensor.narrow(axis, start, count).narrow(axis + 1, 0, widths[start])
                for name, tensor in memory.items()
            }
            chunks.append({name: rows.to(dtype or rows.dtype) for name, rows in self._of_chunk(chunk).items()})
        # A single chunk is not copied: gradients are hundreds of megabytes.
        return chunks[0] if len(chunks) == 1 else concatenate(chunks, axis)

    def _of_chunk(self, memory: Tensors) -> dict[str, Tensor]:
        """Return the gradients of parts of one width: several parts become clients of the same forward pass."""
        axis, stacked, weights = self.part_axis, self.stacked, self.inputs.weights
        parts = memory["sample_weight"].shape[axis]
        if parts == 1:
            part = {name: tensor.select(axis, 0) for name, tensor in memory.items()}
            gradients = self._of_part(weights.tensors, self.leaves, part)
            return {name: gradient.unsqueeze(axis) for name, gradient in gradients.items()}

        everything, leaves = repeat_weights(
            self.engine, weights, self.leaves, parts, stacked, self.objective.reference_dtype
        )
        flat_memory = {name: tensor.flatten(0, 1) if stacked else tensor for name, tensor in memory.items()}
        return by_part(self._of_part(everything, leaves, flat_memory), self.leaves, parts, stacked)

    def _of_part(self, weights: Tensors, leaves: Mapping[str, Tensor], memory: Tensors) -> dict[str, Tensor]:
        outputs, _ = self.engine.forward(
            weights, memory["images"], None, None, self.objective.depth, memory.get("keep")
        )
        logits, _ = self.engine.net.split_outputs(outputs)
        losses = self.engine.sample_losses(logits, memory["labels"])
        return client_gradients((losses * memory["sample_weight"]).sum(dim=-1), leaves)


def _present(memory: Tensors) -> Tensor:
    """Return which parts of a memory exist, ``[…, parts]``."""
    return memory["sample_weight"].sum(dim=-1) > 0 if "sample_weight" in memory else memory["present"]


def _runs_of_equal_width(widths: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of runs of parts that have the same width, at most ``longest`` parts each."""
    start = 0
    while start < len(widths):
        end = next((part for part in range(start, len(widths)) if widths[part] != widths[start]), len(widths))
        count = min(longest, end - start)
        yield start, count
        start += count


def concatenate(chunks: Sequence[Tensors], axis: int) -> dict[str, Tensor]:
    """Concatenate the tensors of each name."""
    return {name: torch.cat([chunk[name] for chunk in chunks], dim=axis) for name in chunks[0]}
