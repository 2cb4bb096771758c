"""The whole fleet in one process."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import torch

from vitfleet.data.images import Shard
from vitfleet.fleet.base import Exam, Marks, Reply, Request, Verdict
from vitfleet.fleet.near import Near
from vitfleet.message import State, Tensors, all_finite
from vitfleet.methods.base import Answer, Job, Method
from vitfleet.pack import in_one_piece
from vitfleet.train.drive import Half, drive_together
from vitfleet.train.given import Place
from vitfleet.train.machine import limited
from vitfleet.train.trainer import Trainer

AHEAD = 4  # so many requests a worker are looked at for the largest; replies that are early wait in memory
NEARLY_ALL = 0.9  # of a piece of memory: less of it is copied, so that the rest can go

#: A client and a stage of its stream of tasks.
Stage = tuple[int, int]


class InlineFleet:
    """Clients that are trained here, as many at once as the machine's cohort, on shards of one resident data set.

    Parameters
    ----------
    shard
        Returns a client's images at a stage of its stream of tasks (0 where there is none).
    judge
        Tries a model out on the test images of clients' stages.
    base
        What every client was given once; one copy serves all.
    stored
        Reads a client's state as the last checkpoint has it. Only what has changed since is held in memory.
    near
        Bytes of the training device's memory in which clients' states may stay for their next round.
    """

    def __init__(
        self,
        method: Method[Any],
        trainer: Trainer,
        seed: int,
        shard: Callable[[int, int], Shard],
        judge: Callable[[Tensors, list[Stage]], list[Verdict]],
        base: Tensors,
        stored: Callable[[int], State | None],
        near: int = 0,
    ) -> None:
        self.method = method
        self.trainer = trainer
        self.seed = seed
        self.shard = shard
        self.judge = judge
        self.base = base
        self.stored = stored
        self._near = Near(near)
        self._offered: dict[int, State | None] = {}
        self._changed: dict[int, State | None] = {}

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train one cohort after the other, each as its turn comes; or clients side by side."""
        machine = self.trainer.machine
        if machine.workers > 1 and machine.cohort == 1 and self.trainer.net.stackable:
            yield from self._side_by_side(requests)
            return
        asked = iter(requests)
        while cohort := list(islice(asked, machine.cohort)):
            answers = drive_together([self._half(request) for request in cohort], self.trainer)
            for request, answer in zip(cohort, answers, strict=True):
                reply = self._reply(request, answer)
                if reply.up is not None:
                    self.offer(request.client, answer.own)
                yield reply

    def _side_by_side(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train each client on a thread of its own; of those that come next, the largest first.

        Threads of Python do: a training is nearly all tensor operations, during which others may run. They share
        nothing but what they read; a module that is run with its weights put into it could not be shared.
        """
        workers = self.trainer.machine.workers
        each = max(1, torch.get_num_threads() // workers)
        largest_first = chain.from_iterable(
            sorted(some, key=lambda one: -len(self.shard(one.client, one.stage)))
            for some in in_windows(requests, AHEAD * workers)
        )
        with limited(each), ThreadPoolExecutor(workers) as pool:

            def start(request: Request) -> Future[tuple[Reply, State | None]]:
                return pool.submit(self._alone, each, request, self._half(request))

            waiting = deque(start(one) for one in islice(largest_first, 2 * workers))
            while waiting:
                reply, own = waiting.popleft().result()
                waiting.extend(start(one) for one in islice(largest_first, 1))
                if reply.up is not None:
                    self.offer(reply.client, own)
                yield reply

    def _alone(self, threads: int, request: Request, half: Half[Answer]) -> tuple[Reply, State | None]:
        torch.set_num_threads(threads)  # each thread of Python counts its own
        (answer,) = drive_together([half], self.trainer)
        return self._reply(request, answer), answer.own

    def _reply(self, request: Request, answer: Answer) -> Reply:
        failure = diverged(answer)
        if failure is not None:
            return Reply(request.client, None, failure=failure)
        here = [(request.client, request.stage)]
        return Reply(request.client, answer.up, self.judge(answer.model, here)[0] if request.evaluate else None)

    def offer(self, client: int, own: State | None) -> None:
        """Take in what a client would keep, until it is settled whether its reply counts."""
        self._offered[client] = own

    def offered(self, client: int) -> State | None:
        """Return what a client would keep."""
        return self._offered[client]

    def settle(self, taken: Collection[int]) -> None:
        """Let the clients whose replies were used keep what they would keep."""
        for client, own in self._offered.items():
            if client in taken and (own is not None or self.own(client) is not None):
                self._changed[client] = None if own is None else on_its_own(own)
                self._near.put(client, self._changed[client])
        self._offered.clear()

    def examine(self, exam: Exam) -> Iterator[Marks]:
        """Try each client's model out; those that keep nothing have one model between them, which is asked once."""
        stages = range(exam.stages)
        everybody = [(client, stage) for client in exam.since for stage in stages]
        shared: dict[Stage, Verdict] = {}
        for client, since in exam.since.items():
            own = None if since is None else self.own(client)
            here = [(client, stage) for stage in stages]
            if own is not None:
                yield Marks(client, tuple(self.judge(self.method.model(exam.server, self.base, own), here)))
                continue
            if not shared:
                verdicts = self.judge(self.method.model(exam.server, self.base, None), everybody)
                shared = dict(zip(everybody, verdicts, strict=True))
            yield Marks(client, tuple(shared[place] for place in here))

    def _half(self, request: Request) -> Half[Answer]:
        shard = self.shard(request.client, request.stage)
        own = self.own(request.client)
        job = Job(request.round, request.client, request.down, self.base, own, shard, request.stage)
        return Half(self.method.work(job), shard, Place(self.seed, request.round, request.client))

    def own(self, client: int) -> State | None:
        """Return a client's own state, on the training device."""
        near = self._near.get(client)
        if near is not None:
            return near
        state = self._changed[client] if client in self._changed else self.stored(client)
        if state is None:
            return None
        device = self.trainer.machine.device
        state = State({name: tensor.to(device) for name, tensor in state.tensors.items()}, state.numbers)
        self._near.put(client, state)
        return state

    def changed(self) -> Mapping[int, State | None]:
        """Hand over the states that changed since the last call, for a checkpoint to keep."""
        changes = dict(sorted(self._changed.items()))
        self._changed.clear()
        return changes


def in_windows(requests: Iterable[Request], size: int) -> Iterator[list[Request]]:
    """Yield so many requests at a time."""
    asked = iter(requests)
    while window := list(islice(asked, size)):
        yield window


def on_its_own(state: State) -> State:
    """Return a state that holds no more memory than it needs: what a client keeps may lie among what it does not."""
    needed: Counter[int] = Counter()
    for tensor in state.tensors.values():
        needed[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    among = {
        name: tensor
        for name, tensor in state.tensors.items()
        if needed[tensor.untyped_storage().data_ptr()] < NEARLY_ALL * tensor.untyped_storage().nbytes()
    }
    return State({**state.tensors, **in_one_piece(among)}, state.numbers)


def diverged(answer: Answer) -> str | None:
    """Say why a client has nothing worth sending or keeping; ``None`` if its training went well.

    A loss is taken before its step, so the weights are looked at too: the last step may be the one that blew up.
    """
    loss = answer.up.numbers["loss"]
    if not isinstance(loss, float) or not math.isfinite(loss):
        return f"its training diverged: the loss is {loss}"
    kept = answer.own.tensors.values() if answer.own else ()
    # What is both sent and kept is looked at once.
    if not all_finite({id(tensor): tensor for tensor in (*answer.up.tensors.values(), *kept)}.values()):
        return "its training diverged: its weights are not finite"
    return None
