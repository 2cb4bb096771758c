"""A fleet of simulated clients that train in this process."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice

import torch

from vitfleet.data.images import Shard
from vitfleet.fleet.base import EvalReply, EvalRequest, Reply, Request
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.message import State, Tensors
from vitfleet.methods.base import ClientUpdate
from vitfleet.packing import pack_tensors
from vitfleet.training.driver import PendingUpdate
from vitfleet.training.execution.settings import thread_limit

# Requests per worker thread that are sorted by size together. Early replies wait in memory, so the window is small.
SORT_WINDOW = 4
MIN_USED_FRACTION = 0.9  # of a storage: tensors that use less of theirs are copied, so that the rest can be freed


class SimulatedFleet:
    """Clients that train in this process, stacked or in worker threads, on shards of one data set.

    ``shard`` returns a client's training images of a task. All clients share one copy of the tensors of the initial
    broadcast. ``stored_state`` reads a client's state from the last checkpoint: the fleet holds only states that
    changed since then, and ``cache_bytes`` of others on the training device, for the clients' next round.
    """

    def __init__(
        self,
        runtime: ClientRuntime,
        shard: Callable[[int, int], Shard],
        base_weights: Tensors,
        stored_state: Callable[[int], State | None],
        cache_bytes: int = 0,
    ) -> None:
        self.runtime = runtime
        self.shard = shard
        self.base_weights = base_weights
        self.stored_state = stored_state
        self._cache = StateCache(cache_bytes)
        self._staged: dict[int, State | None] = {}
        self._changed: dict[int, State | None] = {}

    @property
    def device(self) -> torch.device:
        """The training device."""
        return self.runtime.trainer.machine.device

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train stacked clients, or each in a worker thread. Clients start only as replies are consumed."""
        machine = self.runtime.trainer.machine
        # A module that holds its weights while it runs cannot be shared between threads.
        threaded = machine.workers > 1 and machine.stack_size == 1 and self.runtime.trainer.net.thread_safe
        for reply, client_state in self._train_in_threads(requests) if threaded else self._train_stacked(requests):
            if reply.message is not None:
                self.stage_state(reply.client, client_state)
            yield reply

    def _train_stacked(self, requests: Iterable[Request]) -> Iterator[tuple[Reply, State | None]]:
        for group in batched(requests, self.runtime.trainer.machine.stack_size):
            for reply, update in self.runtime.train(group, self._pending_update):
                yield reply, update.client_state

    def _train_in_threads(self, requests: Iterable[Request]) -> Iterator[tuple[Reply, State | None]]:
        """Train each client in a thread of its own, larger clients first within a window of requests.

        Python threads suffice: training is almost only tensor operations, which release the interpreter lock. The
        threads share only what they read.
        """
        workers = self.runtime.trainer.machine.workers
        threads = max(1, torch.get_num_threads() // workers)
        largest_first = chain.from_iterable(
            sorted(window, key=lambda request: -len(self.shard(request.client, request.task_index)))
            for window in batched(requests, SORT_WINDOW * workers)
        )
        with thread_limit(threads), ThreadPoolExecutor(workers) as pool:

            def submit(request: Request) -> Future[tuple[Reply, State | None]]:
                return pool.submit(self._train_client, threads, request, self._pending_update(request))

            pending = deque(submit(request) for request in islice(largest_first, 2 * workers))
            while pending:
                result = pending.popleft().result()
                pending.extend(submit(request) for request in islice(largest_first, 1))
                yield result

    def _train_client(
        self, threads: int, request: Request, pending: PendingUpdate[ClientUpdate]
    ) -> tuple[Reply, State | None]:
        torch.set_num_threads(threads)  # the setting is per Python thread
        # There are threads only on a CPU, where no step is captured: nothing is trained twice.
        ((reply, update),) = self.runtime.train([request], lambda _: pending)
        return reply, update.client_state

    def _pending_update(self, request: Request) -> PendingUpdate[ClientUpdate]:
        shard = self.shard(request.client, request.task_index)
        return self.runtime.pending_update(request, self.base_weights, self.client_state(request.client), shard)

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Evaluate each client's model. Clients without a state share one model, which is evaluated once for all."""
        server, num_tasks = eval_request.server, eval_request.num_tasks
        runtime = self.runtime.for_kind("last-head" if eval_request.last_head else "round")
        shared: dict[int, EvalReply] = {}
        for client, last_round in eval_request.last_round.items():
            client_state = None if last_round is None else self.client_state(client)
            if client_state is not None:
                yield from runtime.evaluate(server, self.base_weights, client_state, [client], num_tasks)
                continue
            if not shared:
                replies = runtime.evaluate(server, self.base_weights, None, list(eval_request.last_round), num_tasks)
                shared = {reply.client: reply for reply in replies}
            yield shared[client]

    def stage_state(self, client: int, client_state: State | None) -> None:
        """Hold a client's new state until :meth:`commit` decides whether its reply counts."""
        self._staged[client] = client_state

    def staged_state(self, client: int) -> State | None:
        """Return a client's new state of the round in progress."""
        return self._staged[client]

    def commit(self, accepted: Collection[int]) -> None:
        """Replace the states of the clients whose replies the server accepted; drop all other new states."""
        for client, new in self._staged.items():
            if client in accepted and (new is not None or self.client_state(client) is not None):
                self._changed[client] = None if new is None else compact(new)
                self._cache.put(client, self._changed[client])
        self._staged.clear()

    def client_state(self, client: int) -> State | None:
        """Return a client's state, on the training device."""
        cached = self._cache.get(client)
        if cached is not None:
            return cached
        state = self._changed[client] if client in self._changed else self.stored_state(client)
        if state is None:
            return None
        state = state.to(self.device)
        self._cache.put(client, state)
        return state

    def changed_states(self) -> Mapping[int, State | None]:
        """Return the states that changed since the last call, and release them: the checkpoint has them from now on."""
        changes = dict(sorted(self._changed.items()))
        self._changed.clear()
        return changes


class StateCache:
    """Least-recently-used cache of client states, limited in bytes. Reading a state from disk takes longer.

    A state is never modified, only replaced. A cached state equals the one in the last checkpoint.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._used_bytes = 0
        self._states: OrderedDict[int, State] = OrderedDict()

    def get(self, client: int) -> State | None:
        """Return a client's state if it is cached."""
        state = self._states.get(client)
        if state is not None:
            self._states.move_to_end(client)
        return state

    def put(self, client: int, state: State | None) -> None:
        """Replace a client's cached state; ``None`` removes it."""
        replaced = self._states.pop(client, None)
        self._used_bytes -= 0 if replaced is None else replaced.num_bytes
        if state is None or not 0 < state.num_bytes <= self.max_bytes:
            return
        self._states[client] = state
        self._used_bytes += state.num_bytes
        while self._used_bytes > self.max_bytes:
            _, oldest = self._states.popitem(last=False)
            self._used_bytes -= oldest.num_bytes


def batched(requests: Iterable[Request], size: int) -> Iterator[list[Request]]:
    """Yield lists of ``size`` requests; the last one may be shorter."""
    remaining = iter(requests)
    while batch := list(islice(remaining, size)):
        yield batch


def compact(state: State) -> State:
    """Copy tensors that are small views of large storages, so that the state does not keep unused memory alive."""
    used_bytes: Counter[int] = Counter()
    for tensor in state.tensors.values():
        used_bytes[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    views = {
        name: tensor
        for name, tensor in state.tensors.items()
        if used_bytes[tensor.untyped_storage().data_ptr()] < MIN_USED_FRACTION * tensor.untyped_storage().nbytes()
    }
    return State({**state.tensors, **pack_tensors(views)}, state.numbers)
