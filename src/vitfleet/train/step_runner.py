"""How a cohort takes its steps: one after the other as they are, or captured in CUDA graphs and replayed."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vitfleet.data.batches import Batch, EpochBatches
from vitfleet.train.cohort import Cohort
from vitfleet.train.cohort_inputs import ClientFit, CohortInputs
from vitfleet.train.engine import StepEngine
from vitfleet.train.execution import ExecutionLog, RunnerName
from vitfleet.train.warmup import WarmupTimer

KEPT = 10  # captured courses that are kept for another cohort of their form
LONG = 8  # steps of an epoch that is worth captures with fewer clients
AHEAD = 32  # steps whose batches lie ready for a captured step; an epoch of any length is laid there part by part


class StepRunner(Protocol):
    """A cohort on its way."""

    cohort: Cohort

    @property
    def name(self) -> RunnerName:
        """How it takes steps."""
        ...

    def epoch(self, epoch_batches: EpochBatches, epoch: int) -> None:
        """Take an epoch's steps."""
        ...


@dataclass(frozen=True)
class StepKind:
    """What tells one captured step from another.

    Attributes
    ----------
    refresh
        Whether it chooses its references anew.
    clients
        How many clients compute it, the first so many.
    """

    refresh: bool
    clients: int


def step_kinds(cohort: Cohort, epoch_batches: EpochBatches, captured: bool) -> list[StepKind]:
    """Return the kind of each of an epoch's steps."""
    selector = cohort.objective.selector
    clients = clients_per_step(epoch_batches.active_clients, captured, cohort.engine.compiled)
    return [
        # Counted within the epoch, so that company changes nothing.
        StepKind(selector is None or step % selector.every == 0, count)
        for step, count in enumerate(clients)
    ]


def clients_per_step(active: Sequence[int], captured: bool, compiled: bool) -> list[int]:
    """Return how many clients compute each step of an epoch, given how many have it; ever fewer have.

    Those that have it. But every number of clients is captured by itself: so it is one of a few, and in an epoch of
    only a few steps it is all of them. Compiling takes too long to do it again for another number.
    """
    if captured and not compiled and len(active) >= LONG:
        return [min(active[0], _rounded_up(needed)) for needed in active]
    return [active[0]] * len(active) if captured or compiled else list(active)


def _rounded_up(count: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is not less."""
    half = 1 << max(0, (count - 1).bit_length() - 1)
    return next(one for one in (half, 3 * half // 2, 2 * half) if one >= count)


class EagerRunner:
    """Takes every step as it is."""

    name: RunnerName = "eager"

    def __init__(self, cohort: Cohort, warmup: WarmupTimer) -> None:
        self.cohort = cohort
        self.warmup = warmup
        self.some = cohort

    def epoch(self, epoch_batches: EpochBatches, epoch: int) -> None:
        """Take an epoch's steps."""
        cohort = self.cohort
        now = torch.tensor(epoch, device=cohort.engine.machine.device)
        for place, kind in enumerate(step_kinds(cohort, epoch_batches, captured=False)):
            if kind.clients != self.some.clients:
                self.some = cohort.first(kind.clients)
            batch = epoch_batches.batch(place, kind.clients if cohort.many else None)
            with self._first(batch) if cohort.engine.compiled else nullcontext():
                self.some.take_step(
                    batch, now, kind.refresh, all_active=kind.clients == epoch_batches.active_clients[place]
                )

    def _first(self, batch: Batch) -> AbstractContextManager[None]:
        """Show that a step is compiled, where it is the first of its form."""
        objective = self.cohort.objective
        form = objective.trainable, objective.depth, objective.split, batch.image_indices.shape
        return self.warmup.once("compiling the model", form)


class CudaGraphRunner:
    """Captures a step in a CUDA graph and replays it.

    Parameters
    ----------
    visits
        An epoch like those that will come, of any length.
    """

    name: RunnerName = "cuda graph"

    def __init__(
        self, cohort: Cohort, epoch_batches: EpochBatches, pool: Any, warmup: WarmupTimer, execution: ExecutionLog
    ) -> None:
        self.execution = execution
        self.cohort = cohort
        self.warmup = warmup
        self.pool = pool
        self.tables = epoch_batches.stacked.map(lambda rows: rows.new_empty(AHEAD, *rows.shape[1:]))
        device = cohort.engine.machine.device
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)
        self.now = torch.zeros((), dtype=torch.long, device=device)
        self.captured: dict[StepKind, torch.cuda.CUDAGraph] = {}

    def epoch(self, epoch_batches: EpochBatches, epoch: int) -> None:
        """Take an epoch's steps; the first of its kind as it is, which warms up what a capture must find warm."""
        self.now.fill_(epoch)
        for place, kind in enumerate(step_kinds(self.cohort, epoch_batches, captured=True)):
            if place % AHEAD == 0:
                self._lay_ready(epoch_batches, place)
            if kind in self.captured:
                self.captured[kind].replay()
            else:
                compiling = "compiling the model and " if self.cohort.engine.compiled else ""
                with self.warmup.making(f"{compiling}capturing a step"):
                    self._warm_up(kind)
                    self.captured[kind] = self._capture(kind)
                self.execution.add_captured_step()

    def _lay_ready(self, epoch_batches: EpochBatches, start: int) -> None:
        """Lay the batches of the next steps where a captured step takes them from, once the ones before are taken."""
        for table, rows in zip(self.tables.tensors(), epoch_batches.stacked.tensors(), strict=True):
            some = rows[start : start + AHEAD]
            table[: len(some)].copy_(some)
        self.cursor.zero_()

    def _capture(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # A graph that nobody needs any more must not be taken apart by a garbage collection in the middle of this.
        collecting = gc.isenabled()
        gc.disable()
        try:
            # Only this thread's calls can disturb it: another waits for a checkpoint to leave the device.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self._step(kind)
        finally:
            if collecting:
                gc.enable()
        return graph

    def serves(
        self, engine: StepEngine, group: Sequence[ClientFit], given: CohortInputs, epoch_batches: EpochBatches
    ) -> bool:
        """Whether the captured steps are also those of another group, once its tensors are copied in."""
        cohort = self.cohort
        return (
            cohort.engine.computes_like(engine)
            and cohort.objective == group[0].fit.objective
            and cohort.many == (len(group) > 1)
            and cohort.images.images is group[0].shard.images.images
            and cohort.images.labels is group[0].shard.images.labels
            and cohort.features is None
            and group[0].fit.features is None
            and [one.shape[1:] for one in self.tables.tensors()]
            == [one.shape[1:] for one in epoch_batches.stacked.tensors()]
            and cohort.given.form() == given.form()
            and cohort.given.covers(given)
        )

    def _warm_up(self, kind: StepKind) -> None:
        """Take a step on a stream of its own, as a capture does."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(kind)
        torch.cuda.current_stream().wait_stream(stream)

    def _step(self, kind: StepKind) -> None:
        batch = self.tables.map(lambda table: table.index_select(0, self.cursor).squeeze(0))
        if self.cohort.many:
            batch = batch.map(lambda one: one[: kind.clients])
        self.cohort.first(kind.clients).take_step(batch, self.now, kind.refresh, all_active=False)
        self.cursor += 1


class RunnerCache:
    """Finds a course for a group: a captured one of its form, or a new one."""

    def __init__(self) -> None:
        self.warmup = WarmupTimer()
        self.execution = ExecutionLog()
        self.kept: list[CudaGraphRunner] = []
        self.pool: Any = None  # a handle, opaque

    def graph(
        self,
        engine: StepEngine,
        group: Sequence[ClientFit],
        given: CohortInputs,
        rate: float,
        epoch_batches: EpochBatches,
    ) -> StepRunner:
        """Return a graph course that is ready to start."""
        for course in self.kept:
            if course.serves(engine, group, given, epoch_batches):
                course.cohort.restart(given, rate)
                self.kept.remove(course)
                self.kept.append(course)  # the one used last goes last
                return course
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        # Later groups are written into this one's tensors.
        cohort = Cohort(engine, group, given.apart(engine.net.anatomy.trainable(group[0].fit.objective.trainable)))
        cohort.restart(None, rate)
        course = CudaGraphRunner(cohort, epoch_batches, self.pool, self.warmup, self.execution)
        self.kept = [*self.kept[-(KEPT - 1) :], course]
        return course

    def plain(self, engine: StepEngine, group: Sequence[ClientFit], given: CohortInputs, rate: float) -> StepRunner:
        """Return a course without graphs that is ready to start."""
        cohort = Cohort(engine, group, given)
        cohort.restart(None, rate)
        return EagerRunner(cohort, self.warmup)

    def clear(self) -> None:
        """Let all captured ones go."""
        self.kept.clear()
        self.pool = None
