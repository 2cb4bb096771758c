"""Random generators by address.

Every draw of a run comes from a generator made for one address: (seed, purpose, round, client, epoch). No generator is
shared. The numbers therefore do not depend on the order in which clients are trained, on how many are trained together,
on the machine that trains them, or on interruptions of the run.

Numbers are drawn on the host with NumPy's Philox and copied to the training device: a CPU and a GPU get the same
numbers, and the numbers of a whole epoch need one copy instead of one per step.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import StrEnum
from hashlib import blake2b

import numpy as np


class Purpose(StrEnum):
    """What a draw is for. Two purposes never share numbers."""

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
    MEMORY_MASK = "memory-mask"
    FISHER_LABELS = "fisher-labels"
    HARDWARE_PROFILES = "devices"
    HELD_OUT_CLIENTS = "unseen-clients"  # the text is part of the address: another one would draw other clients
    METRIC_CLIENTS = "metric-clients"
    HEAD_PROJECTION = "head-projection"
    HELD_OUT_IMAGES = "held-out-images"
    CACHED_VIEWS = "cached-views"


def own_purpose(name: str) -> str:
    """Return the purpose of a method's own draws, which is their name, unless it is one of vitfleet's own."""
    if name in set(Purpose):
        raise ValueError(f"random numbers {name!r}: the name is taken by draws of vitfleet's own; choose another one")
    return name


@dataclass(frozen=True)
class Address:
    """The address of a draw in a run; −1 for a level that does not apply."""

    seed: int
    purpose: str  # one of Purpose, or a method's own, see own_purpose
    round: int = -1
    client: int = -1
    epoch: int = -1

    def key(self) -> int:
        """Return a 128-bit hash of the address."""
        text = "|".join(str(part) for part in astuple(self))
        return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")

    def generator(self) -> np.random.Generator:
        """Return a generator that depends only on the address."""
        return np.random.Generator(np.random.Philox(key=self.key()))

    def torch_seed(self) -> int:
        """Return a seed for torch's generators, of 63 bits as torch requires."""
        return self.key() & (2**63 - 1)
