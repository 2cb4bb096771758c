"""What a run computes on: the device, the precision, and whether results are deterministic."""

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
from vitfleet.training.execution.compiler_barriers import add_compiler_barriers
from vitfleet.training.execution.cpu_bf16 import bf16_runs, cpu_has_bf16
from vitfleet.training.execution.memory_budget import limit_to_share, memory_fraction

MIN_BF16_WIDTH = 128  # numbers per token; on a CPU, conversions cost narrower models more than they gain
DEFAULT_STACK_SIZE = 32  # clients stacked on a GPU
MAX_COMPILED_BLOCKS = 128
MAX_WORKERS = 8  # clients trained in parallel on a CPU by default: with many cores, memory is scarcer than cores


@dataclass(frozen=True)
class ExecutionSettings:
    """A device, and how it is used."""

    device: torch.device
    bf16: bool  # whether matrix products are computed in bfloat16
    graphs: bool = False  # whether steps are captured in CUDA graphs
    kernels: bool = False  # whether the project's own Triton kernels are used; Triton comes with torch for GPUs
    compile: bool = False  # whether the model is compiled
    stack_size: int = 1  # the most clients that are stacked in one training
    # Clients that are trained in parallel on a CPU, with an equal number of threads each. The operations of a small
    # model are too short to be worth several threads.
    workers: int = 1

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which matrix products use bfloat16 if that is enabled. Weights and sums stay float32."""
        # Converted weights are not cached: each is used once per step, and a captured step must not read a stale one.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)


def set_up_execution(config: MachineConfig, width: int = 0, client_bytes: int = 0) -> ExecutionSettings:
    """Apply a configuration to this process, and return its machine.

    ``width`` is the embedding dimension of the model that will be trained. Clients trained in parallel on a CPU get at
    most half the memory together: one takes roughly ``client_bytes``; 0: unknown.
    """
    device = _find_device(config.device)
    cuda = device.type == "cuda"
    compiles = cuda if config.compile == "auto" else config.compile
    if compiles:
        # One block is compiled for each combination of what trains and what clients share: more than torch's 8.
        torch._dynamo.config.recompile_limit = MAX_COMPILED_BLOCKS
        if cuda:
            add_compiler_barriers()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        # cuBLAS reads it when it is initialised, which is always after this.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    if device.index is not None:
        torch.cuda.set_device(device)  # streams and captures use the current device
    if cuda:
        limit_to_share(device)
        torch.set_float32_matmul_precision("high" if not config.deterministic else "highest")
        # The thread of the first backward pass warns once and then sets the context: the user need not do anything.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    return ExecutionSettings(
        device,
        bf16=_uses_bf16(config.precision, device, width),
        graphs=cuda and config.graphs,
        kernels=cuda and config.kernels and find_spec("triton") is not None,
        compile=compiles,
        stack_size=config.stack_size or (DEFAULT_STACK_SIZE if cuda else 1),
        workers=1 if cuda else config.workers or _default_workers(client_bytes),
    )


def resolve_machine_config(config: MachineConfig, machine: ExecutionSettings) -> MachineConfig:
    """Return the configuration with all automatic choices filled in, so that a resumed run computes the same."""
    precision: Literal["bf16", "fp32"] = "bf16" if machine.bf16 else "fp32"
    return config.model_copy(
        update={
            # A device that was chosen without an index is chosen again in the same way.
            "device": config.device if config.device == str(machine.device) else machine.device.type,
            "precision": precision,
            "threads": torch.get_num_threads(),
            "stack_size": machine.stack_size,
            "workers": machine.workers,
            "kernels": machine.kernels,
            "compile": machine.compile,
        }
    )


def _uses_bf16(precision: str, device: torch.device, width: int) -> bool:
    """Return whether matrix products are computed in bfloat16."""
    cuda = device.type == "cuda"
    if precision == "auto":
        return torch.cuda.is_bf16_supported() if cuda else width >= MIN_BF16_WIDTH and cpu_has_bf16()
    if precision == "bf16" and not cuda and not bf16_runs():
        remedy = "set it to fp32, or the environment variable ONEDNN_MAX_CPU_ISA to AVX512_CORE_BF16"
        cause = "this CPU announces matrix instructions that it does not execute, which would end the process"
        raise ConfigError("machine.precision", precision, f"{cause}; {remedy}")
    return precision == "bf16"


def _default_workers(client_bytes: int) -> int:
    most = min(torch.get_num_threads(), MAX_WORKERS)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(most, memory // 2 // client_bytes)) if client_bytes else most


@contextmanager
def thread_limit(threads: int) -> Iterator[None]:
    """Limit torch to a number of threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gpu_memory_bytes(device: torch.device) -> int:
    """Return the part of a GPU's memory that this process may use; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(memory_fraction(total) * total)


def normalize_device(device: torch.device) -> torch.device:
    """Return a device with its index.

    Tensors on the GPU have an index: without it, ``cuda`` and the ``cuda:0`` of a tensor are not equal.
    """
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return normalize_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = normalize_device(torch.device(name))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("machine.device", name, f"cannot be used here ({reason}); try auto or cpu") from None
    return device
