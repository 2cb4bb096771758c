"""How a stack runs its steps: eagerly, or captured in CUDA graphs and replayed."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from vitfleet.data.batches import Batch, EpochBatches
from vitfleet.errors import UserError
from vitfleet.training.capture.path import ExecutionLog, RunnerName, WarmupTimer
from vitfleet.training.engine import StepEngine
from vitfleet.training.execution.memory_budget import is_out_of_memory
from vitfleet.training.stacking.client_stack import ClientStack
from vitfleet.training.stacking.inputs import ClientTraining, StackInputs
from vitfleet.training.step import kind_of_step

# A capture takes some tenths of a second. Epochs of at least so many steps are worth it for steps of half of the
# clients, and for steps of any number of clients.
HALVED_EPOCH = 4
LONG_EPOCH = 8
BUFFERED_STEPS = 32  # steps whose batches a captured step can read; a longer epoch is loaded chunk by chunk
BUFFERED_BYTES = 1 << 28  # but fewer steps if their batches are larger than this, as those of features are


@dataclass(frozen=True)
class CaptureSpace:
    """The memory pool of captured steps, and the CUDA stream on which they are warmed up and captured.

    No two of the steps run at the same time, so they share the pool. Torch keeps one cuBLAS workspace per stream and
    handle, whose address captured steps contain. Some versions of torch (2.13 is one) free it when any graph that was
    captured on the stream is destroyed (https://github.com/pytorch/pytorch/issues/193402). So all graphs of a stream
    are dropped together. (Torch has 32 streams and hands them out in turn: two trainers of one process have different
    ones unless many are made.)
    """

    pool: Any  # an opaque handle
    stream: Any

    @classmethod
    def create(cls) -> CaptureSpace:
        """Return a pool and a stream of their own, on the current device."""
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream())  # type: ignore[no-untyped-call]


class StepKind(NamedTuple):
    """What distinguishes one captured step from another."""

    kind: Hashable  # what the method distinguishes: see `vitfleet.training.step`
    num_clients: int  # how many clients compute the step; they are always the first ones


def step_kinds(stack: ClientStack, epoch_batches: EpochBatches, captured: bool) -> list[StepKind]:
    """Return the kind of each step of an epoch."""
    # Torch compiles a size of 1 separately, which takes seconds: the last client is accompanied by another one.
    min_clients = 2 if stack.engine.compiled else 1
    num_clients = clients_per_step(epoch_batches.active_clients, captured, min_clients)
    # Counted within the epoch, so that the result does not depend on which clients are trained together.
    return [StepKind(kind_of_step(stack.training.step, index), count) for index, count in enumerate(num_clients)]


def clients_per_step(active_clients: Sequence[int], captured: bool, min_clients: int = 1) -> list[int]:
    """Return how many clients compute each step of an epoch.

    Eagerly, it is the number of clients that have the step. A captured step needs a capture per number of clients: so
    the number is rounded up to one of a few, and is at least ``min_clients`` if there are so many. In a shorter epoch
    it is all clients or half of them, in a very short one always all. ``active_clients`` never grows.
    """
    if not captured:
        return list(active_clients)
    all_clients = active_clients[0]
    if len(active_clients) >= LONG_EPOCH:
        return [min(all_clients, max(min_clients, _round_up(count))) for count in active_clients]
    half = (
        min(all_clients, max(min_clients, (all_clients + 1) // 2))
        if len(active_clients) >= HALVED_EPOCH
        else all_clients
    )
    return [half if count <= half else all_clients for count in active_clients]


def _round_up(count: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is at least ``count``."""
    half = 1 << max(0, (count - 1).bit_length() - 1)
    return next(rounded for rounded in (half, 3 * half // 2, 2 * half) if rounded >= count)


def _table_form(tables: Batch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return what two tables of batches must share to be read by the same captured step, whatever their length."""
    return {name: (table.shape[1:], table.dtype) for name, table in tables.named_tensors()}


class EagerRunner:
    """Runs every step eagerly."""

    name: RunnerName = "eager"

    def __init__(self, stack: ClientStack, warmup: WarmupTimer) -> None:
        self.stack = stack
        self.warmup = warmup
        self._active_stack = stack

    def run_epoch(self, epoch_batches: EpochBatches, epoch: int) -> None:
        """Run the steps of an epoch."""
        stack = self.stack
        epoch_number = torch.tensor(epoch, device=stack.engine.machine.device)
        for step, kind in enumerate(step_kinds(stack, epoch_batches, captured=False)):
            if kind.num_clients != self._active_stack.num_clients:
                self._active_stack = stack.first(kind.num_clients)
            batch = epoch_batches.batch(step, kind.num_clients if stack.stacked else None)
            all_active = kind.num_clients == epoch_batches.active_clients[step]
            with self._time_compilation(batch) if stack.engine.compiled else nullcontext():
                self._active_stack.take_step(batch, epoch_number, kind.kind, all_active)

    def _time_compilation(self, batch: Batch) -> AbstractContextManager[None]:
        """Time a step if it is the first of its kind: then it compiles the model."""
        training = self.stack.training
        kind = training.trainable, repr(training.step), batch.image_indices.dim()
        return self.warmup.time_first("compiling the model", kind)


class CudaGraphRunner:
    """Captures each kind of step in a CUDA graph and replays it.

    A captured step reads its batch from tables at a position that it advances itself: a replay needs no other call.
    The batches of later epochs have the shape of those given here.
    """

    name: RunnerName = "cuda graph"

    def __init__(
        self,
        stack: ClientStack,
        epoch_batches: EpochBatches,
        space: CaptureSpace,
        warmup: WarmupTimer,
        execution: ExecutionLog,
    ) -> None:
        self.stack = stack
        self.space = space
        self.warmup = warmup
        self.execution = execution
        example = epoch_batches.chunk(0, 1)
        step_bytes = sum(table.nbytes for table in example.tensors())
        self.buffered_steps = max(1, min(BUFFERED_STEPS, BUFFERED_BYTES // step_bytes))
        self.tables = example.map(lambda table: table.new_empty(self.buffered_steps, *table.shape[1:]))
        device = stack.engine.machine.device
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.epoch_number = torch.zeros((), dtype=torch.long, device=device)
        self.graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}

    @property
    def num_bytes(self) -> int:
        """The memory of the tensors that captured steps read and write, without those that they allocate."""
        return self.stack.num_bytes + sum(table.nbytes for table in self.tables.tensors())

    def run_epoch(self, epoch_batches: EpochBatches, epoch: int) -> None:
        """Run the steps of an epoch; the first of a kind eagerly, as the warm-up that a capture needs."""
        self.epoch_number.fill_(epoch)
        for step, kind in enumerate(step_kinds(self.stack, epoch_batches, captured=True)):
            if step % self.buffered_steps == 0:
                self._load_batches(epoch_batches, step)
            if kind in self.graphs:
                self.graphs[kind].replay()
            else:
                compiling = "compiling the model and " if self.stack.engine.compiled else ""
                with self.warmup.time(f"{compiling}capturing a step"):
                    self._warm_up(kind)
                    self.graphs[kind] = self._capture(kind)
                self.execution.add_captured_step()

    def _load_batches(self, epoch_batches: EpochBatches, start: int) -> None:
        """Copy the batches of the next steps into the tables, after the steps before have read theirs."""
        chunk = epoch_batches.chunk(start, start + self.buffered_steps)
        for table, rows in zip(self.tables.tensors(), chunk.tensors(), strict=True):
            table[: len(rows)].copy_(rows)
        self.position.zero_()

    def _capture(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # A garbage collection during the capture could destroy an old graph, which would break the capture.
        collecting = gc.isenabled()
        gc.disable()
        try:
            # Only calls of this thread can break the capture: another thread may be copying a checkpoint to the host.
            space = self.space
            with torch.cuda.graph(graph, pool=space.pool, stream=space.stream, capture_error_mode="thread_local"):
                self._step(kind)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that cannot be ended leaves its own stream behind
            if is_out_of_memory(error):  # the trainer continues with fewer clients
                raise
            remedy = "a step of this model cannot be captured; set it to false"
            raise UserError(f"machine.graphs = true: {remedy} ({error})") from error
        finally:
            if collecting:
                gc.enable()
        return graph

    def serves(
        self, engine: StepEngine, group: Sequence[ClientTraining], inputs: StackInputs, epoch_batches: EpochBatches
    ) -> bool:
        """Whether the captured steps are also those of another group, once its tensors are copied in."""
        stack, training, images = self.stack, group[0].training, group[0].shard.images
        return (
            stack.engine.computes_like(engine)
            and stack.training.trainable == training.trainable
            and stack.training.step == training.step
            and stack.training.augment == training.augment
            and stack.stacked == (len(group) > 1)
            and stack.images.images is images.images
            and stack.images.labels is images.labels
            and _table_form(self.tables) == _table_form(epoch_batches.chunk(0, 1))
            and stack.inputs.signature() == inputs.signature()
            and stack.inputs.covers(inputs)
        )

    def _warm_up(self, kind: StepKind) -> None:
        """Run a step on the stream of the capture."""
        stream = self.space.stream
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self._step(kind)
        finally:
            # Also where memory is full: what has begun uses tensors that the current stream hands out again then.
            torch.cuda.current_stream().wait_stream(stream)

    def _step(self, kind: StepKind) -> None:
        batch = self.tables.map(lambda table: table.index_select(0, self.position).squeeze(0))
        if self.stack.stacked:
            batch = batch.map(lambda tensor: tensor[: kind.num_clients])
        stack = self.stack.first(kind.num_clients)
        stack.take_step(batch, self.epoch_number, kind.kind, all_active=False)
        self.position += 1


StepRunner: TypeAlias = EagerRunner | CudaGraphRunner
