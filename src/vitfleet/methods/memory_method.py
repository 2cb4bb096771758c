"""The frame of methods whose clients store samples of the tasks they have learned: GEM, A-GEM and FedViT."""

from __future__ import annotations

from typing import TypeVar

from vitfleet.message import Numbers, Tensors
from vitfleet.methods import episodic_memory
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.methods.episodic_memory import MemoryParams
from vitfleet.methods.projection_metrics import projection_metrics
from vitfleet.methods.shared_body import SharedBody

Params = TypeVar("Params", bound=MemoryParams)

MEMORY_METRICS = (
    ClientMetric("memory_bytes", "bytes of stored samples, largest client", "max"),
    ClientMetric("stored", "samples stored of each task"),
)


class MemoryMethod(SharedBody[Params]):
    """Body shared, heads local; every client has an episodic memory."""

    needs_tasks = True
    client_metrics = (*projection_metrics(), *MEMORY_METRICS)

    def client_state_shapes(self, reported: Numbers, channels: int, side: int) -> Tensors:
        """Return the shapes of the stored samples."""
        return episodic_memory.imagine(reported, channels, side, self.params, self.context.num_tasks)

    def num_stored_samples(self, reported: Numbers) -> int:
        """Return how many samples a client has stored, over all tasks."""
        return episodic_memory.stored_samples(reported)
