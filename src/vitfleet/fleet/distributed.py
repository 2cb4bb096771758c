"""One run on several processes started by torchrun: each trains some of a round's clients, all receive all replies.

Every rank runs the same rounds with the same server state. Replies are exchanged in their wire format and aggregated in
the order of the requests, so the result does not depend on the number of ranks. Only the first rank writes files.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from vitfleet.fleet.base import EvalResult, FleetWrapper, Reply, Request
from vitfleet.fleet.simulation import SimulatedFleet
from vitfleet.message import Message, Payload, State
from vitfleet.wire import PayloadType, decode, encode

# A rank may train for long before it communicates. torchrun ends all ranks when one of them dies.
COLLECTIVE_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, and the rank of this one."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Return the source rank's data on every rank; the data of other ranks is ignored."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, source)
        if not int(length):
            return b""
        if self.rank == source:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), source)
            return data
        received = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(received, source)
        return received.numpy().tobytes()

    def broadcast_payload(
        self, kind: type[PayloadType], payload: Payload | None, device: torch.device, source: int = 0
    ) -> PayloadType | None:
        """Return the source rank's message or state on every rank, on ``device``; ``None`` if the source has none."""
        data = encode(payload) if payload is not None and self.rank == source else b""
        received = self.broadcast(data, source)
        if not received:
            return None
        return decode(kind, received).to(device)

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Run a block on the first rank, then on the others, which can read what the first one has written."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()


SINGLE_PROCESS = ProcessGroup(0, 1)


@contextmanager
def join_process_group() -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started. Each uses its own GPU if there are enough."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield SINGLE_PROCESS
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # This module's default arguments keep the group that exists when it is first imported, which torch.compile does.
    # The group's threads would then outlive it and, now and then, abort the process while Python ends.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield ProcessGroup(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


@dataclass
class DistributedFleet(FleetWrapper[SimulatedFleet]):
    """A simulated fleet whose clients are trained by several ranks. Every rank has every client's state."""

    processes: ProcessGroup

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train this rank's clients, then exchange replies with the other ranks, in the order of the requests."""
        all_requests = list(requests)
        sizes = [len(self.inner.shard(request.client, request.task_index)) for request in all_requests]
        owners = assign_ranks(sizes, self.processes.size)
        owned = list(zip(all_requests, owners, strict=True))
        assigned = [request for request, owner in owned if owner == self.processes.rank]
        replies = {reply.client: reply for reply in self.inner.train(assigned)}
        for request, owner in owned:
            yield self._share_reply(request.client, owner, replies.pop(request.client, None))

    def _share_reply(self, client: int, owner: int, reply: Reply | None) -> Reply:
        """Return a client's reply on every rank and stage its new state there; only the owner passes the reply."""
        header = ""
        if reply is not None:
            evaluation = reply.evaluation and asdict(reply.evaluation)
            header = json.dumps({"failure": reply.failure, "evaluation": evaluation})
        received = json.loads(self.processes.broadcast(header.encode(), owner))
        if received["failure"] is not None:
            return Reply(client, None, failure=received["failure"])
        device = self.inner.device
        message = self.processes.broadcast_payload(Message, reply.message if reply else None, device, owner)
        staged = self.inner.staged_state(client) if reply else None
        client_state = self.processes.broadcast_payload(State, staged, device, owner)
        if reply is None:
            self.inner.stage_state(client, client_state)
        counts = received["evaluation"]
        return Reply(client, message, None if counts is None else EvalResult(**counts))


def assign_ranks(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each client: largest client first, each to the rank with the least work so far."""
    loads = [0] * num_ranks
    ranks = [0] * len(sizes)
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        rank = loads.index(min(loads))
        ranks[position] = rank
        loads[rank] += max(1, sizes[position])
    return ranks
