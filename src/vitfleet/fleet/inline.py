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
from vitfleet.fleet.base import EvalReply, EvalRequest, EvalResult, Reply, Request
from vitfleet.fleet.state_cache import StateCache
from vitfleet.message import State, Tensors, all_finite
from vitfleet.methods.base import ClientJob, ClientUpdate, Method
from vitfleet.packing import pack_tensors
from vitfleet.train.cohort_driver import Participant, run_cohort
from vitfleet.train.cohort_inputs import RngContext
from vitfleet.train.machine import limited
from vitfleet.train.trainer import Trainer

AHEAD = 4  # so many requests a worker are looked at for the largest; replies that are early wait in memory
NEARLY_ALL = 0.9  # of a piece of memory: less of it is copied, so that the rest can go

#: A client and a stage of its stream of tasks.
ClientTask = tuple[int, int]


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
        judge: Callable[[Tensors, list[ClientTask]], list[EvalResult]],
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
        self._near = StateCache(near)
        self._offered: dict[int, State | None] = {}
        self._changed: dict[int, State | None] = {}

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train one cohort after the other, each as its turn comes; or clients side by side."""
        machine = self.trainer.machine
        if machine.workers > 1 and machine.cohort == 1 and self.trainer.net.stackable:
            yield from self._side_by_side(requests)
            return
        asked = iter(requests)
        while cohort := list(islice(asked, machine.cohort)):
            answers = run_cohort([self._half(request) for request in cohort], self.trainer)
            for request, answer in zip(cohort, answers, strict=True):
                reply = self._reply(request, answer)
                if reply.message is not None:
                    self.stage_state(request.client, answer.client_state)
                yield reply

    def _side_by_side(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train each client on a thread of its own; of those that come next, the largest first.

        Threads of Python do: a training is nearly all tensor operations, during which others may run. They share
        nothing but what they read; a module that is run with its weights put into it could not be shared.
        """
        workers = self.trainer.machine.workers
        each = max(1, torch.get_num_threads() // workers)
        largest_first = chain.from_iterable(
            sorted(some, key=lambda one: -len(self.shard(one.client, one.task_index)))
            for some in in_windows(requests, AHEAD * workers)
        )
        with limited(each), ThreadPoolExecutor(workers) as pool:

            def start(request: Request) -> Future[tuple[Reply, State | None]]:
                return pool.submit(self._alone, each, request, self._half(request))

            waiting = deque(start(one) for one in islice(largest_first, 2 * workers))
            while waiting:
                reply, own = waiting.popleft().result()
                waiting.extend(start(one) for one in islice(largest_first, 1))
                if reply.message is not None:
                    self.stage_state(reply.client, own)
                yield reply

    def _alone(self, threads: int, request: Request, half: Participant[ClientUpdate]) -> tuple[Reply, State | None]:
        torch.set_num_threads(threads)  # each thread of Python counts its own
        (answer,) = run_cohort([half], self.trainer)
        return self._reply(request, answer), answer.client_state

    def _reply(self, request: Request, answer: ClientUpdate) -> Reply:
        failure = diverged(answer)
        if failure is not None:
            return Reply(request.client, None, failure=failure)
        here = [(request.client, request.task_index)]
        return Reply(
            request.client, answer.message, self.judge(answer.model_weights, here)[0] if request.evaluate else None
        )

    def stage_state(self, client: int, own: State | None) -> None:
        """Take in what a client would keep, until it is settled whether its reply counts."""
        self._offered[client] = own

    def staged_state(self, client: int) -> State | None:
        """Return what a client would keep."""
        return self._offered[client]

    def commit(self, taken: Collection[int]) -> None:
        """Let the clients whose replies were used keep what they would keep."""
        for client, own in self._offered.items():
            if client in taken and (own is not None or self.client_state(client) is not None):
                self._changed[client] = None if own is None else on_its_own(own)
                self._near.put(client, self._changed[client])
        self._offered.clear()

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Try each client's model out; those that keep nothing have one model between them, which is asked once."""
        num_tasks = range(eval_request.num_tasks)
        everybody = [(client, task_index) for client in eval_request.last_round for task_index in num_tasks]
        shared: dict[ClientTask, EvalResult] = {}
        for client, last_round in eval_request.last_round.items():
            own = None if last_round is None else self.client_state(client)
            here = [(client, task_index) for task_index in num_tasks]
            if own is not None:
                yield EvalReply(
                    client, tuple(self.judge(self.method.model_weights(eval_request.server, self.base, own), here))
                )
                continue
            if not shared:
                evaluations = self.judge(self.method.model_weights(eval_request.server, self.base, None), everybody)
                shared = dict(zip(everybody, evaluations, strict=True))
            yield EvalReply(client, tuple(shared[place] for place in here))

    def _half(self, request: Request) -> Participant[ClientUpdate]:
        shard = self.shard(request.client, request.task_index)
        own = self.client_state(request.client)
        job = ClientJob(request.round, request.client, request.message, self.base, own, shard, request.task_index)
        return Participant(self.method.client_update(job), shard, RngContext(self.seed, request.round, request.client))

    def client_state(self, client: int) -> State | None:
        """Return a client's own state, on the training device."""
        near = self._near.get(client)
        if near is not None:
            return near
        state = self._changed[client] if client in self._changed else self.stored(client)
        if state is None:
            return None
        state = state.to(self.trainer.machine.device)
        self._near.put(client, state)
        return state

    def changed_states(self) -> Mapping[int, State | None]:
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
    return State({**state.tensors, **pack_tensors(among)}, state.numbers)


def diverged(answer: ClientUpdate) -> str | None:
    """Say why a client has nothing worth sending or keeping; ``None`` if its training went well.

    A loss is taken before its step, so the weights are looked at too: the last step may be the one that blew up.
    """
    loss = answer.message.numbers["loss"]
    if not isinstance(loss, float) or not math.isfinite(loss):
        return f"its training diverged: the loss is {loss}"
    kept = answer.client_state.tensors.values() if answer.client_state else ()
    # What is both sent and kept is looked at once.
    if not all_finite({id(tensor): tensor for tensor in (*answer.message.tensors.values(), *kept)}.values()):
        return "its training diverged: its weights are not finite"
    return None
