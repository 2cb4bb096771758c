"""Streaming aggregation."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfleet.message import Message, State
from vitfleet.methods.base import Gathering


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
        samples = up.numbers["samples"]
        assert isinstance(samples, int)
        if not samples:
            return
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
