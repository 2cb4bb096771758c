"""Simulated hardware: how long each client's round takes on its device, and which clients have enough memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.fleet import DeviceName
from vitfleet.config.schema import Config, FleetConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.hardware_profiles import (
    HARDWARE_PROFILES,
    MEGABYTE,
    RoundWorkload,
    assign_hardware,
    workload_seconds,
)
from vitfleet.files import write_atomically
from vitfleet.message import Numbers


@dataclass(frozen=True)
class VirtualFleet:
    """The devices that the clients of a simulation have.

    Attributes
    ----------
    devices
        The device of each client.
    memory_bytes
        Memory that a client needs to train.
    labels
        Returns the labels of a client's training images in a round.
    """

    config: FleetConfig
    devices: Sequence[DeviceName]
    memory_bytes: int
    cost_model: CostModel
    labels: Callable[[int, int], NDArray[np.int64]]

    def seconds(
        self, round: int, task_index: int, client: int, down_bytes: int, client_metrics: Numbers | None
    ) -> float:
        """Return how long a client takes to receive, train and send, computed from costs alone.

        Parameters
        ----------
        client_metrics
            The numbers in the client's last update; ``None`` if it has not sent one yet.
        """
        labels = self.labels(client, round)
        dry_run_result = self.cost_model.dry_run(round, client, labels, task_index, client_metrics)
        flops = self.cost_model.round_flops(dry_run_result, len(labels))
        workload = RoundWorkload(down_bytes, flops, self.cost_model.up_bytes(dry_run_result))
        bandwidth = None if self.config.bandwidth is None else self.config.bandwidth * MEGABYTE
        return workload_seconds(HARDWARE_PROFILES[self.devices[client]], workload, bandwidth)

    def failure_reason(self, client: int) -> str | None:
        """Return why a client can never train; ``None`` if it can."""
        device = HARDWARE_PROFILES[self.devices[client]]
        if device.holds(self.memory_bytes):
            return None
        return f"out of memory: training needs {self.memory_bytes / 2**30:.2f} GiB, the device is a {device.title}"

    @property
    def usable_clients(self) -> list[int]:
        """The clients that can train."""
        return [client for client in range(len(self.devices)) if self.failure_reason(client) is None]

    def write(self, folder: Path) -> None:
        """Write ``devices.json``: each client's device, and the clients without enough memory."""
        out_of_memory = sorted(set(range(len(self.devices))) - set(self.usable_clients))
        tree = {"clients": list(self.devices), "peak_memory_bytes": self.memory_bytes, "out_of_memory": out_of_memory}
        write_atomically(folder / "devices.json", json.dumps(tree).encode())


def make_virtual_fleet(
    config: Config,
    memory_bytes: Callable[[], int],
    cost_model: CostModel,
    labels: Callable[[int, int], NDArray[np.int64]],
) -> VirtualFleet | None:
    """Return the devices that a configuration gives its clients; ``None`` if it gives them none."""
    fleet = config.fleet
    if not fleet.devices:
        return None
    devices = assign_hardware(fleet.devices, fleet.clients, config.seed)
    return VirtualFleet(fleet, devices, memory_bytes(), cost_model, labels)
