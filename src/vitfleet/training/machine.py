"""What a run computes on: the device, its precision, its determinism."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from vitfleet.config.schema import MachineConfig
from vitfleet.errors import ConfigError

BF16_WIDTH = 128  # on a CPU, narrower models lose more by converting than they gain by multiplying
COHORT = 32  # clients at once on a GPU, where nothing else is said
WORKERS = 8  # clients side by side on a CPU, at most: with many cores, memory is scarcer than they


@dataclass(frozen=True)
class Machine:
    """A device, the precision of the heavy arithmetic on it, and how it is driven.

    Attributes
    ----------
    graphs
        Whether steps are captured in CUDA graphs.
    kernels
        Whether there are kernels of our own, which are written in Triton: it comes with torch where that has a GPU.
    compile
        Whether the model is compiled.
    cohort
        Clients that are trained at once, stacked, at most.
    workers
        Clients that are trained side by side on a CPU, each on its share of the threads. A small model's operations are
        too short to be worth sharing.
    """

    device: torch.device
    bf16: bool
    graphs: bool = False
    kernels: bool = False
    compile: bool = False
    cohort: int = 1
    workers: int = 1

    def autocast(self) -> AbstractContextManager[object]:
        """Compute what is safe in bfloat16, where that is on; weights and sums stay in float32."""
        # Its cache of converted weights outlives neither a captured step nor a weight's only use.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)


def set_up_machine(config: MachineConfig, width: int = 0, client_bytes: int = 0) -> Machine:
    """Prepare this process as the configuration says and return its machine.

    Parameters
    ----------
    width
        The numbers in a token of the model that will be trained.
    client_bytes
        What a client's training takes, roughly: those side by side shall have half the memory at most.
    """
    device = _device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        # Read when cuBLAS starts, which is after this in every way a run begins.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    if device.index is not None:
        torch.cuda.set_device(device)  # streams and captures are those of the current one
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if not config.deterministic else "highest")
        # Said once by the thread of the first backward pass, which then sets the context: nothing for a user to do.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    cuda = device.type == "cuda"
    gains = torch.cuda.is_bf16_supported() if cuda else width >= BF16_WIDTH and _cpu_has_bf16()
    bf16 = config.precision == "bf16" or (config.precision == "auto" and gains)
    return Machine(
        device,
        bf16,
        graphs=cuda and config.graphs,
        kernels=cuda and config.kernels and find_spec("triton") is not None,
        compile=config.compile,
        cohort=config.cohort or (COHORT if cuda else 1),
        workers=1 if cuda else config.workers or _workers(client_bytes),
    )


def resolve_machine_config(config: MachineConfig, machine: Machine) -> MachineConfig:
    """Return the configuration with what was left to the machine filled in, so that a resumed run computes alike."""
    precision: Literal["bf16", "fp32"] = "bf16" if machine.bf16 else "fp32"
    return config.model_copy(
        update={
            "device": str(machine.device),
            "precision": precision,
            "threads": torch.get_num_threads(),
            "cohort": machine.cohort,
            "workers": machine.workers,
            "kernels": machine.kernels,
        }
    )


def _workers(client_bytes: int) -> int:
    most = min(torch.get_num_threads(), WORKERS)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(most, memory // 2 // client_bytes)) if client_bytes else most


@contextmanager
def thread_limit(threads: int) -> Iterator[None]:
    """Compute with so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies in bfloat16 itself; others imitate it, slowly."""
    asks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(ask is not None and bool(ask()) for ask in asks)


def gpu_memory_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's own memory; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("machine.device", name, f"cannot be used here ({reason}); try auto or cpu") from None
    return device
