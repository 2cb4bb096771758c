"""Copying states from a GPU to the host while the GPU continues with the next round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.message import State
from vitfleet.packing import pack_tensors

MAX_PINNED_BYTES = 1 << 30  # per checkpoint: torch does not return pinned memory to the system


@dataclass(frozen=True)
class HostCopy:
    """A copy of states from a GPU to the host.

    Attributes
    ----------
    stream
        The CUDA stream of the copy.
    pinned
        Whether the copy goes to pinned memory, which takes a tenth of the time.
    """

    stream: torch.cuda.Stream
    pinned: bool

    @classmethod
    def begin(cls, states: Iterable[State]) -> HostCopy | None:
        """Prepare to copy states as they are now; ``None`` if none of them is on a GPU."""
        on_gpu = [tensor for state in states for tensor in state.tensors.values() if tensor.is_cuda]
        if not on_gpu:
            return None
        # Torch reuses the same 32 streams per priority, and steps are captured on one of default priority.
        stream = torch.cuda.Stream(on_gpu[0].device, priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(on_gpu[0].device))
        return cls(stream, sum(tensor.nbytes for tensor in on_gpu) <= MAX_PINNED_BYTES)

    def finish(self, files: dict[str, State]) -> dict[str, State]:
        """Return the states once they are on the host."""

        def make(count: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, pin_memory=self.pinned)

        copies: dict[str, State] = {}
        with torch.cuda.stream(self.stream):
            for name, state in files.items():
                on_gpu = {key: tensor for key, tensor in state.tensors.items() if tensor.is_cuda}
                copies[name] = State({**state.tensors, **pack_tensors(on_gpu, make)}, state.numbers)
        self.stream.synchronize()
        return copies
