"""How many clients a device has room for, from what those before them took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitfleet.config.schema import TrainConfig
from vitfleet.models.net import Net

FLOAT = 4  # bytes
HELD = 5  # times the weights: as they came, those that train, their gradients, two numbers each of AdamW's
PASSED = 16  # numbers that a layer saves of each number in a token, about

SPARE = 0.8  # of the free memory is planned with: allocations do not pack without gaps


class MemoryBudget:
    """What a client's training takes of a GPU's memory, as measured; on a CPU there is no limit."""

    def __init__(self) -> None:
        self.bytes_a_client = 0.0

    def most(self, wanted: int, device: torch.device) -> int:
        """Return how many clients may be trained at once, at most as many as are wanted and at least one."""
        if device.type != "cuda" or not self.bytes_a_client:
            return wanted
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds but does not use is free to it.
        free += _bytes(device, "reserved_bytes", "current") - _bytes(device, "allocated_bytes", "current")
        return max(1, min(wanted, int(SPARE * free / self.bytes_a_client)))

    @contextmanager
    def measure(self, clients: int, device: torch.device) -> Iterator[None]:
        """Measure what a group of clients takes."""
        if device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = _bytes(device, "allocated_bytes", "current")
        yield
        taken = _bytes(device, "allocated_bytes", "peak") - before
        self.bytes_a_client = max(self.bytes_a_client, taken / clients)


def _bytes(device: torch.device, what: str, when: str) -> int:
    """Ask torch's allocator; `torch.cuda.memory_allocated` takes ten times as long, and this is asked every round."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats[what]["all"][when]) if stats else 0


def estimate_client_bytes(net: Net, train: TrainConfig) -> int:
    """Return what a client's training takes if all of the model trains, roughly (`run.memory` knows it better)."""
    anatomy = net.anatomy
    numbers = (
        train.batch_size
        * (net.num_prefix_tokens + net.num_kept_patches(train.mask_ratio))
        * net.embed_dim
        * len(anatomy.blocks)
    )
    return FLOAT * (HELD * anatomy.count_parameters(anatomy.whole) + PASSED * numbers)
