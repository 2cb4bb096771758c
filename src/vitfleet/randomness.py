"""Randomness is addressed, not consumed.

Every draw of a run comes from a generator made for one address: (seed, purpose, round, client, epoch).
Nothing is carried from one draw to the next, so the order in which clients are trained, how many are
trained together, where they live and whether the run was interrupted change nothing.

Draws are made on the host with NumPy's Philox and then moved to the training device: a CPU and a GPU
see the same numbers, and a whole epoch's draws cost one transfer instead of one per step.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import StrEnum
from hashlib import blake2b

import numpy as np


class Purpose(StrEnum):
    """What a draw is for; two purposes never share numbers."""

    INIT = "init"
    PARTITION = "partition"
    SAMPLE_CLIENTS = "sample-clients"
    EVALUATE = "evaluate"
    ORDER = "order"
    AUGMENT = "augment"
    MASK = "mask"
    LAYERS = "layers"
    RECORD = "record"
    TASKS = "tasks"
    TASK_ORDER = "task-order"
    TASK_CLASSES = "task-classes"
    TASK_SAMPLES = "task-samples"
    MEMORY = "memory"
    HARDWARE_PROFILES = "devices"
    UNSEEN_CLIENTS = "unseen-clients"
    METRIC_CLIENTS = "metric-clients"


@dataclass(frozen=True)
class Address:
    """Where in a run a draw happens; ``-1`` stands for "not at this level"."""

    seed: int
    purpose: Purpose
    round: int = -1
    client: int = -1
    epoch: int = -1

    def key(self) -> int:
        """Hash the address to 128 bits."""
        text = "|".join(str(part) for part in astuple(self))
        return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")

    def generator(self) -> np.random.Generator:
        """Return a generator that depends on the address alone."""
        return np.random.Generator(np.random.Philox(key=self.key()))

    def torch_seed(self) -> int:
        """Return a seed for torch's own initialisers (63 bits, as torch wants them)."""
        return self.key() & (2**63 - 1)
