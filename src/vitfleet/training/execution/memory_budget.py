"""How many clients fit in a device's memory, estimated from the clients trained before."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitfleet.config.schema import TrainConfig
from vitfleet.errors import UserError, shown
from vitfleet.models.net import Net

FLOAT_BYTES = 4
WEIGHT_COPIES = 5  # as received, as trained, gradients, and AdamW's two moments
SAVED_PER_TOKEN_NUMBER = 16  # numbers that a layer saves for the backward pass per number in a token, roughly

USABLE_FRACTION = 0.8  # of the free memory: the allocator leaves gaps
GPU_SHARE_VARIABLE = "VITFLEET_GPU_SHARE"  # the share of a GPU's memory for each of several runs at a time
# How errors that are not of torch's own class say that memory is full.
FULL_MEMORY = ("error: out of memory", "backend out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "[CUDA]: out of memory")
CAPTURED_FRACTION = 0.5  # of the memory of a run: no more of it is kept for the tensors of captured steps
VIEWS_FRACTION = 0.25  # of the memory of a run: no more of it is kept for cached views
CONTEXT_BYTES = 2**29  # of a GPU's memory that a process takes in addition to what torch allocates, roughly


class MemoryBudget:
    """The GPU memory that the training of one client takes, as measured. There is no limit on a CPU."""

    def __init__(self) -> None:
        self.bytes_per_client = 0.0
        # How many clients may run their updates together, with the tensors that a method makes for each.
        self.max_together: float = math.inf

    def max_clients(self, wanted: int, device: torch.device) -> int:
        """Return how many clients may be trained at once: at least one, and at most ``wanted``."""
        if device.type != "cuda" or not self.bytes_per_client:
            return wanted
        free, total = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved but not allocated is available to it.
        free += _allocator_bytes(device, "reserved_bytes", "current")
        allocated = _allocator_bytes(device, "allocated_bytes", "current")
        free = min(free, int(memory_fraction(total) * total)) - allocated
        return max(1, min(wanted, int(USABLE_FRACTION * free / self.bytes_per_client)))

    @contextmanager
    def measure(self, num_clients: int, device: torch.device) -> Iterator[None]:
        """Measure the memory that the training of a group takes."""
        if device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = _allocator_bytes(device, "allocated_bytes", "current")
        yield
        taken = _allocator_bytes(device, "allocated_bytes", "peak") - before
        self.bytes_per_client = max(self.bytes_per_client, taken / num_clients)


def limit_to_share(device: torch.device) -> None:
    """Limit this process to its share of a GPU's memory, where several runs share the GPU."""
    fraction = memory_fraction(torch.cuda.get_device_properties(device).total_memory)
    if fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def memory_fraction(total: int) -> float:
    """Return the fraction of a GPU's memory, ``total`` bytes, that torch may allocate in this process."""
    text = os.environ.get(GPU_SHARE_VARIABLE, "1")
    try:
        share = float(text)
    except ValueError:
        raise UserError(f"{GPU_SHARE_VARIABLE} = {shown(text)}: must be a number between 0 and 1") from None
    if share >= 1:
        return 1.0
    fraction = share - CONTEXT_BYTES / total
    if fraction * total < CONTEXT_BYTES:
        remedy = "run fewer at a time (--jobs)"
        raise UserError(f"{GPU_SHARE_VARIABLE} = {text}: is too little of {total / 2**30:.0f} GiB; {remedy}")
    return fraction


def captured_bytes_limit(device: torch.device) -> float:
    """Return how much memory the tensors of captured steps may take; there is no limit on a CPU."""
    if device.type != "cuda":
        return math.inf
    total = torch.cuda.get_device_properties(device).total_memory
    return CAPTURED_FRACTION * memory_fraction(total) * total


def views_bytes_limit(device: torch.device) -> float:
    """Return how much memory cached views may take, of a GPU or of the machine."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return VIEWS_FRACTION * memory_fraction(total) * total
    return VIEWS_FRACTION * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that a GPU's memory is full.

    Torch's allocator has an error of its own; CUDA, its libraries and other devices have general ones. After a failed
    capture the first error is the context of another one.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or any(phrase in text for phrase in FULL_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _allocator_bytes(device: torch.device, statistic: str, moment: str) -> int:
    """Read a statistic of torch's allocator.

    ``torch.cuda.memory_allocated`` takes ten times as long, and this is called every round.
    """
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats[statistic]["all"][moment]) if stats else 0


def estimate_client_bytes(net: Net, train: TrainConfig, images_per_step: int) -> int:
    """Return roughly what the training of one client takes if the whole model trains.

    ``vitfleet.costs.memory`` measures it exactly, and takes longer.
    """
    parts = net.parts
    # Where tokens are merged from stage to stage, roughly their number in the middle.
    tokens = net.num_prefix_tokens + net.num_kept_patches(train.mask_ratio) or (net.image_size // 8) ** 2
    token_numbers = images_per_step * tokens * net.embed_dim * len(parts.blocks)
    parameters = parts.count_parameters(parts.whole)
    return FLOAT_BYTES * (WEIGHT_COPIES * parameters + SAVED_PER_TOKEN_NUMBER * token_numbers)
