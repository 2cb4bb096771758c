"""A client's round without training, on tensors that have shapes but no values (meta tensors).

A dry run executes the method's client update. The trainings that it yields define what trains and what every step
computes; the update that it returns is the message to send. Operations, bytes and memory thus follow from the method
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import ClientRoundInput, ClientUpdate, Method
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.wire import encoded_size

NO_LABELS: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # labels of a client without images


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run of a client's round."""

    trainings: list[LocalTraining]  # the trainings that the client would run
    update: ClientUpdate  # the message it would send and the state it would keep
    # Tensors held during the whole round: received tensors, and state kept from earlier rounds
    held_tensors: list[Tensor]

    def kept_state(self) -> State | None:
        """Return the state that the client would keep, in tensors of its own: memory is counted per tensor."""
        state = self.update.client_state
        if state is None:
            return None
        copies = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in state.tensors.values()}
        return replace(state, tensors={name: copies[id(tensor)] for name, tensor in state.tensors.items()})


def dry_run(
    method: Method[Any],
    net: Net,
    image_size: int,
    labels: NDArray[np.int64],
    round: int = 1,
    client: int = 0,
    task_index: int = 0,
    client_state: State | None = None,
    blank: Tensors | None = None,
) -> DryRun:
    """Execute a client's round on meta tensors, which have shapes but no values.

    The client has images of ``image_size`` pixels with these labels, ``task_index`` tasks before this one, and the
    state of earlier rounds, as meta tensors. ``blank`` are the model's weights as meta tensors; created if not given.
    """
    blank = shapes_of(net) if blank is None else blank
    received = method.message_to_client(method.initial_state(blank), round, client, None)
    targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    pixels = torch.empty(len(targets), len(net.mean), image_size, image_size, dtype=torch.uint8, device="meta")
    shard = Shard(ImageSet(pixels, targets), torch.arange(len(targets)))
    base = method.initial_broadcast(blank).tensors
    requested = method.client_update(ClientRoundInput(round, client, received, base, client_state, shard, task_index))
    held_tensors = [
        *received.tensors.values(),
        *base.values(),
        *(client_state.tensors.values() if client_state else ()),
    ]
    trainings: list[LocalTraining] = []
    try:
        training = next(requested)
        while True:
            trainings.append(training)
            result = _blank_result(training, len(targets), method.context.num_classes, len(trainings))
            training = requested.send(result)
    except StopIteration as end:
        update: ClientUpdate = end.value
        return DryRun(trainings, update, held_tensors)


def shapes_of(net: Net) -> dict[str, Tensor]:
    """Return a model's weights as meta tensors."""
    return {name: torch.empty(shape, device="meta") for name, shape in net.parts.shapes.items()}


@lru_cache(maxsize=4096)
def _blank_weight(name: str, shape: torch.Size, training: int) -> Tensor:
    """Return a weight as a meta tensor; cached, because creating it takes longer than the rest of a dry run.

    Memory is counted per tensor: each training of a round, by its number, has tensors of its own.
    """
    return torch.empty(shape, device="meta")


def _blank_result(training: LocalTraining, samples: int, num_classes: int, number: int) -> LocalResult:
    scored, steps = samples if training.score_samples else 0, max(1, training.epochs)
    return LocalResult(
        {name: _blank_weight(name, training.weights[name].shape, number) for name in training.trainable},
        torch.zeros(()),
        samples,
        steps,
        # Methods read kept tensors on the host, so they need values: zeros.
        {name: torch.zeros_like(tensor, device="cpu") for name, tensor in training.kept.items()},
        sample_losses=torch.zeros(scored),
        finite_steps=torch.tensor(float(steps)),
        sample_logits=torch.empty(scored, num_classes, device="meta"),
    )


def message_size(message: Message) -> int:
    """Return a message's encoded size in bytes; an empty message is not sent, so its size is 0."""
    return encoded_size(message) if message.tensors or message.numbers else 0


def typical_client(sizes: Sequence[int]) -> int:
    """Return the client with the median number of samples among those with at least one; 0 if there is none."""
    order = sorted((size, client) for client, size in enumerate(sizes) if size)
    return order[(len(order) - 1) // 2][1] if order else 0
