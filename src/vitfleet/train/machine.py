"""What a run computes on: the device, its precision, its determinism."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from vitfleet.config.schema import MachineConfig
from vitfleet.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """A device and the precision of the heavy arithmetic on it."""

    device: torch.device
    bf16: bool

    def autocast(self) -> AbstractContextManager[object]:
        """Compute what is safe in bfloat16, where that is on; weights and sums stay in float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)


def set_up(config: MachineConfig) -> Machine:
    """Prepare this process as the configuration says and return its machine."""
    device = _device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        # Read when cuBLAS starts, which is after this in every way a run begins.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if not config.deterministic else "highest")
    bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    return Machine(device, bf16)


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
