"""What kinds of device a fleet has, and how long a round takes on each.

Figures are of public data sheets and measurements, named beside each profile. How much of its peak a device reaches
when it trains a ViT is *calibrated* on three of them and taken for the others of their kind:

* Processors: High-Performance Linpack runs at 8 GFLOP/s in double precision on a Raspberry Pi 4B (Feiereisen, 2022,
  feiereisen.net), so at about 16 in single precision; a ViT's training step reaches 0.55 to 0.78 of the speed of a
  large matrix product on a processor (``benchmarks/utilisation.py``); 0.6 is taken.
* Jetson GPUs: FedViT (section 5.2) reports rounds 6.5 times as long when Raspberry Pis join a fleet whose slowest
  device was a Jetson Nano. A Nano then reaches 6.5 × 9.6 = 62 of its 236 GFLOP/s: 0.26. A Jetson's peak is cores × 2 ×
  the highest clock that its own power modes offer (Nano 921 MHz, TX2 1.30 GHz, Xavier NX 1.10 GHz, AGX 1.377 GHz).
  Tables of chips list what the same chip would do at clocks that no mode of the module has: 750 GFLOP/s for the TX2
  (1,465 MHz), 1,058 for the NX (1,377 MHz, the AGX's).
* Server GPU: full training of a ViT-B/16, eager, batch 256, ran at 0.36 of the measured matrix-product peak of an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitfleet.config.fleet import DeviceName
from vitfleet.randomness import Address, Purpose

GIB = 2**30
MEGABYTE = 1e6
# What the system, Python and torch hold before any training: measured as about 0.5 GiB, with some room.
RESERVED_BYTES = int(0.6 * GIB)


@dataclass(frozen=True)
class HardwareProfile:
    """A kind of device.

    Attributes
    ----------
    title
        What it is called.
    peak_gflops
        Its largest rate in the precision it trains in.
    utilisation
        The share of it that training a ViT reaches.
    memory_bytes
        Its memory; on a Jetson, processor and GPU share it.
    up, down
        Its line, bytes a second.
    source
        Where the figures are from.
    """

    title: str
    peak_gflops: float
    utilisation: float
    memory_bytes: int
    upload_rate: float
    download_rate: float
    source: str

    @property
    def gflops(self) -> float:
        """The rate at which it trains."""
        return self.peak_gflops * self.utilisation

    def holds(self, training_bytes: int) -> bool:
        """Whether a training fits into its memory beside the system."""
        return training_bytes + RESERVED_BYTES <= self.memory_bytes


_PROCESSOR, _JETSON, _SERVER = 0.6, 0.26, 0.36
_LINPACK = "High-Performance Linpack, see above"
_FEDVIT = 1 * MEGABYTE  # FedViT gives every client 1 MB/s, both ways

HARDWARE_PROFILES: Mapping[DeviceName, HardwareProfile] = {
    "nano": HardwareProfile(
        "Jetson Nano", 236, _JETSON, 4 * GIB, _FEDVIT, _FEDVIT,
        "NVIDIA: 128 Maxwell cores at 921 MHz, 2 FLOP a cycle (472 GFLOPS FP16, half of it FP32)",
    ),
    "tx2": HardwareProfile(
        "Jetson TX2", 667, _JETSON, 8 * GIB, _FEDVIT, _FEDVIT,
        "NVIDIA: 256 Pascal cores at 1.30 GHz (mode Max-N), 2 FLOP a cycle (1.33 TFLOPS FP16, half of it FP32)",
    ),
    "nx": HardwareProfile(
        "Jetson Xavier NX", 845, _JETSON, 16 * GIB, _FEDVIT, _FEDVIT,
        "NVIDIA: 384 Volta cores at 1.1 GHz, the module's highest clock, 2 FLOP a cycle",
    ),
    "agx": HardwareProfile(
        "Jetson AGX Xavier", 1410, _JETSON, 32 * GIB, _FEDVIT, _FEDVIT,
        "NVIDIA: 512 Volta cores at 1.377 GHz, 2 FLOP a cycle",
    ),
    "pi4-2gb": HardwareProfile("Raspberry Pi 4B, 2 GB", 16, _PROCESSOR, 2 * GIB, _FEDVIT, _FEDVIT, _LINPACK),
    "pi4-4gb": HardwareProfile("Raspberry Pi 4B, 4 GB", 16, _PROCESSOR, 4 * GIB, _FEDVIT, _FEDVIT, _LINPACK),
    "pi4-8gb": HardwareProfile("Raspberry Pi 4B, 8 GB", 16, _PROCESSOR, 8 * GIB, _FEDVIT, _FEDVIT, _LINPACK),
    "phone": HardwareProfile(
        "phone", 90, _PROCESSOR, 8 * GIB, 2 * MEGABYTE, 6 * MEGABYTE,
        "four Cortex-A76 class cores at 2.8 GHz, 8 FLOP a cycle; line: a usual mobile connection, 16 and 48 Mbit/s",
    ),
    "laptop": HardwareProfile(
        "laptop", 768, _PROCESSOR, 16 * GIB, 2.5 * MEGABYTE, 12.5 * MEGABYTE,
        "eight AVX2 cores at 3 GHz, 32 FLOP a cycle; line: a usual home connection, 20 and 100 Mbit/s",
    ),
    "server-gpu": HardwareProfile(
        "server GPU", 312_000, _SERVER, 80 * GIB, 125 * MEGABYTE, 125 * MEGABYTE,
        "NVIDIA A100: 312 TFLOPS bfloat16, 80 GB; line: 1 Gbit/s",
    ),
}  # fmt: skip


def assign_hardware(mix: Mapping[DeviceName, int], clients: int, seed: int) -> list[DeviceName]:
    """Give every client a device, in the proportions of a mix, shuffled.

    A mix of 2, 2, 8 and 8 over 100 clients is 10, 10, 40 and 40; what is left over by rounding goes to the kinds that
    lost most by it.
    """
    total = sum(mix.values())
    exact = {name: clients * count / total for name, count in mix.items()}
    dealt = {name: int(share) for name, share in exact.items()}
    rest = sorted(mix, key=lambda name: dealt[name] - exact[name])[: clients - sum(dealt.values())]
    ordered = [name for name in mix for _ in range(dealt[name] + (name in rest))]
    order = Address(seed, Purpose.HARDWARE_PROFILES).generator().permutation(clients)
    return [ordered[place] for place in order]


@dataclass(frozen=True)
class RoundWorkload:
    """What one client's part in a round is made of, in bytes and operations."""

    down_bytes: int
    flops: int
    up_bytes: int


def workload_seconds(device: HardwareProfile, workload: RoundWorkload, bandwidth: float | None = None) -> float:
    """Return how long a device takes to receive, train and send.

    Parameters
    ----------
    bandwidth
        Bytes a second, up and down, in place of the device's own line.
    """
    receiving = workload.down_bytes / (bandwidth or device.download_rate)
    sending = workload.up_bytes / (bandwidth or device.upload_rate)
    return receiving + workload.flops / (device.gflops * 1e9) + sending
