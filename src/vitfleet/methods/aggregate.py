"""Streaming aggregation."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import Gathering, RefusalError


def check_weights(sent: Tensors, known: Tensors) -> None:
    """Refuse weights that are not the model's, or not finite: one of them would ruin everybody's mean."""
    for name, tensor in sent.items():
        if name not in known:
            raise RefusalError(f"it sent {name!r}, which the model does not have")
        if tensor.shape != known[name].shape or tensor.dtype != known[name].dtype:
            found, wanted = (f"{one.dtype} {tuple(one.shape)}" for one in (tensor, known[name]))
            raise RefusalError(f"it sent {name!r} as {found}, not {wanted}")
    tensors = list(sent.values())
    if tensors and not bool(torch.stack(torch._foreach_norm(tensors, float("inf"))).isfinite().all()):
        raise RefusalError("it sent weights that are not finite")


class WeightedMean(Gathering):
    """The sample-weighted mean of each tensor over the clients that sent it; a tensor nobody sent stays.

    Only a running sum is held, in float64: the mean of equal weights is those weights, whatever their number.
    """

    def __init__(self, server: State) -> None:
        self.server = server
        self.sums: dict[str, Tensor] = {}
        self.shares: dict[str, float] = {}

    def add(self, client: int, up: Message) -> None:
        """Fold in one client's weights by its samples; a client without samples has no say."""
        samples = up.numbers.get("samples")
        if not isinstance(samples, int) or samples < 0:
            raise RefusalError(f"it says it has {samples} samples")
        if not samples:
            return
        check_weights(up.tensors, self.server.tensors)
        for name, tensor in up.tensors.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
                self.shares[name] = 0
            self.sums[name].add_(tensor, alpha=samples)
            self.shares[name] += samples

    def finish(self) -> State:
        """Return the server's state with the means in it."""
        means = {
            name: (total / self.shares[name]).to(self.server.tensors[name].dtype) for name, total in self.sums.items()
        }
        return State({**self.server.tensors, **means}, self.server.numbers)
