"""Hardware profiles of client devices, and the duration of a round on each.

The figures come from public data sheets and measurements, cited in each profile. The fraction of its peak that a device
reaches while training a ViT is *calibrated* on three devices and used for all others of the same kind:

* Processors: High-Performance Linpack runs at 8 GFLOP/s in double precision on a Raspberry Pi 4B (Feiereisen, 2022,
  feiereisen.net), so at about 16 in single precision; a ViT's training step reaches 0.55 to 0.78 of the speed of a
  large matrix product on a processor (``benchmarks/utilisation.py``); 0.6 is used.
* Jetson GPUs: FedViT (section 5.2) reports rounds 6.5 times as long when Raspberry Pis join a fleet whose slowest
  device was a Jetson Nano. A Nano then reaches 6.5 × 9.6 = 62 of its 236 GFLOP/s: 0.26. A Jetson's peak is cores × 2 ×
  the highest clock that its own power modes offer (Nano 921 MHz, TX2 1.30 GHz, Xavier NX 1.10 GHz, AGX 1.377 GHz;
  for the Orin modules, the data sheet's highest GPU clock).
  Tables of chips list the peak at clocks that no power mode of the module offers: 750 GFLOP/s for the TX2 (1,465 MHz),
  1,058 for the NX (1,377 MHz, the AGX's).
* Server GPU: full training of a ViT-B/16, eager, batch 256, ran at 0.36 of the measured matrix-product peak of an H200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitfleet.config.fleet import DeviceName
from vitfleet.errors import UserError
from vitfleet.randomness import Address, Purpose

GIB = 2**30
MEGABYTE = 1e6
# Memory of the operating system, Python and torch before any training: measured as about 0.5 GiB, plus a margin.
RESERVED_BYTES = int(0.6 * GIB)


@dataclass(frozen=True)
class HardwareProfile:
    """A type of device."""

    title: str  # for display
    peak_gflops: float  # peak rate in the precision used for training
    utilisation: float  # fraction of the peak rate that training a ViT reaches
    memory_bytes: int  # total memory; on a Jetson, processor and GPU share it
    # Network rates in bytes per second
    upload_rate: float
    download_rate: float
    source: str

    @property
    def gflops(self) -> float:
        """Rate reached in training, in GFLOP/s."""
        return self.peak_gflops * self.utilisation

    def holds(self, training_bytes: int) -> bool:
        """Return whether a training fits into the memory that the system leaves free."""
        return training_bytes + RESERVED_BYTES <= self.memory_bytes


_CPU_USE, _JETSON_USE, _SERVER_USE = 0.6, 0.26, 0.36  # utilisation: fraction of the peak rate, see above
_LINPACK = "High-Performance Linpack, see above"
_FEDVIT_RATE = 1 * MEGABYTE  # FedViT gives every client 1 MB/s in both directions

HARDWARE_PROFILES: Mapping[DeviceName, HardwareProfile] = {
    "nano": HardwareProfile(
        "Jetson Nano", 236, _JETSON_USE, 4 * GIB, _FEDVIT_RATE, _FEDVIT_RATE,
        "NVIDIA: 128 Maxwell cores at 921 MHz, 2 FLOP per cycle (472 GFLOPS FP16, half of it FP32)",
    ),
    "tx2": HardwareProfile(
        "Jetson TX2", 667, _JETSON_USE, 8 * GIB, _FEDVIT_RATE, _FEDVIT_RATE,
        "NVIDIA: 256 Pascal cores at 1.30 GHz (mode Max-N), 2 FLOP per cycle (1.33 TFLOPS FP16, half of it FP32)",
    ),
    "nx": HardwareProfile(
        "Jetson Xavier NX", 845, _JETSON_USE, 16 * GIB, _FEDVIT_RATE, _FEDVIT_RATE,
        "NVIDIA: 384 Volta cores at 1.1 GHz, the module's highest clock, 2 FLOP per cycle",
    ),
    "agx": HardwareProfile(
        "Jetson AGX Xavier", 1410, _JETSON_USE, 32 * GIB, _FEDVIT_RATE, _FEDVIT_RATE,
        "NVIDIA: 512 Volta cores at 1.377 GHz, 2 FLOP per cycle",
    ),
    "orin-nano": HardwareProfile(
        "Jetson Orin Nano", 1280, _JETSON_USE, 8 * GIB, _FEDVIT_RATE, _FEDVIT_RATE,
        "NVIDIA: 1024 Ampere cores at 625 MHz, 2 FLOP per cycle",
    ),
    "orin-nx": HardwareProfile(
        "Jetson Orin NX", 1880, _JETSON_USE, 16 * GIB, _FEDVIT_RATE, _FEDVIT_RATE,
        "NVIDIA: 1024 Ampere cores at 918 MHz, 2 FLOP per cycle",
    ),
    "orin-agx": HardwareProfile(
        "Jetson AGX Orin", 5325, _JETSON_USE, 64 * GIB, _FEDVIT_RATE, _FEDVIT_RATE,
        "NVIDIA: 2048 Ampere cores at 1.3 GHz, 2 FLOP per cycle",
    ),
    "pi4-2gb": HardwareProfile("Raspberry Pi 4B, 2 GB", 16, _CPU_USE, 2 * GIB, _FEDVIT_RATE, _FEDVIT_RATE, _LINPACK),
    "pi4-4gb": HardwareProfile("Raspberry Pi 4B, 4 GB", 16, _CPU_USE, 4 * GIB, _FEDVIT_RATE, _FEDVIT_RATE, _LINPACK),
    "pi4-8gb": HardwareProfile("Raspberry Pi 4B, 8 GB", 16, _CPU_USE, 8 * GIB, _FEDVIT_RATE, _FEDVIT_RATE, _LINPACK),
    "phone": HardwareProfile(
        "phone", 90, _CPU_USE, 8 * GIB, 2 * MEGABYTE, 6 * MEGABYTE,
        "four Cortex-A76 class cores at 2.8 GHz, 8 FLOP per cycle; network: usual mobile connection, 16 and 48 Mbit/s",
    ),
    "laptop": HardwareProfile(
        "laptop", 768, _CPU_USE, 16 * GIB, 2.5 * MEGABYTE, 12.5 * MEGABYTE,
        "eight AVX2 cores at 3 GHz, 32 FLOP per cycle; network: usual home connection, 20 and 100 Mbit/s",
    ),
    "server-gpu": HardwareProfile(
        "server GPU", 312_000, _SERVER_USE, 80 * GIB, 125 * MEGABYTE, 125 * MEGABYTE,
        "NVIDIA A100: 312 TFLOPS bfloat16, 80 GB; network: 1 Gbit/s",
    ),
}  # fmt: skip


def select_devices(names: Sequence[str]) -> list[DeviceName]:
    """Return the devices of these names; a name's beginning selects all that begin with it, as ``pi4``."""
    selected: dict[DeviceName, None] = {}
    for name in names:
        found = [device for device in HARDWARE_PROFILES if name in (device, device.split("-")[0])]
        if not found:
            raise UserError(f"--device {name}: no such device; there are {', '.join(HARDWARE_PROFILES)}")
        selected |= dict.fromkeys(found)
    return list(selected)


def assign_hardware(mix: Mapping[DeviceName, int], clients: int, seed: int) -> list[DeviceName]:
    """Assign a device to every client, in the proportions of a mix, in shuffled order.

    A mix of 2, 2, 8 and 8 over 100 clients becomes 10, 10, 40 and 40. Clients left over by rounding down go to the
    devices with the largest remainders.
    """
    total = sum(mix.values())
    exact = {name: clients * count / total for name, count in mix.items()}
    counts = {name: int(quota) for name, quota in exact.items()}
    rounded_up = sorted(mix, key=lambda name: counts[name] - exact[name])[: clients - sum(counts.values())]
    ordered = [name for name in mix for _ in range(counts[name] + (name in rounded_up))]
    order = Address(seed, Purpose.HARDWARE_PROFILES).generator().permutation(clients)
    return [ordered[position] for position in order]


@dataclass(frozen=True)
class RoundWorkload:
    """One client's work in a round: bytes received, floating-point operations, bytes sent."""

    down_bytes: int
    flops: int
    up_bytes: int


def workload_seconds(device: HardwareProfile, workload: RoundWorkload, bandwidth: float | None = None) -> float:
    """Return the seconds that a device takes to receive, train and send.

    ``bandwidth`` is in bytes per second in both directions, instead of the device's own rates.
    """
    receiving = workload.down_bytes / (bandwidth or device.download_rate)
    sending = workload.up_bytes / (bandwidth or device.upload_rate)
    return receiving + workload.flops / (device.gflops * 1e9) + sending
