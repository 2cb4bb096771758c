"""The runners of a trainer: captured steps are kept and reused for later groups of the same shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vitfleet.data.batches import EpochBatches
from vitfleet.training.capture.path import ExecutionLog, WarmupTimer
from vitfleet.training.capture.runner import CaptureSpace, CudaGraphRunner, EagerRunner, StepRunner
from vitfleet.training.engine import StepEngine
from vitfleet.training.execution.memory_budget import captured_bytes_limit
from vitfleet.training.stacking.client_stack import ClientStack
from vitfleet.training.stacking.inputs import ClientTraining, StackInputs, trained_tensors

MAX_RUNNERS = 10  # with captured steps
MAX_GRAPHS = 128  # captured steps, those of dropped runners included: beyond it, the next new runner drops all


class RunnerCache:
    """Returns a runner for a group: one with captured steps that serves the group, or a new one.

    With more than ``MAX_RUNNERS``, or if the tensors of all take more than their part of the device's memory, the
    tensors of the least recently used runner are freed. Its graphs, which keep no tensors alive, are kept until all are
    dropped: see :class:`~vitfleet.training.capture.runner.CaptureSpace`.
    """

    def __init__(self) -> None:
        self.warmup = WarmupTimer()
        self.execution = ExecutionLog()
        self._runners: list[CudaGraphRunner] = []  # the least recently used first
        self._dropped_graphs: list[torch.cuda.CUDAGraph] = []
        self._space: CaptureSpace | None = None

    def graph_runner(
        self,
        engine: StepEngine,
        group: Sequence[ClientTraining],
        inputs: StackInputs,
        learning_rate: float,
        epoch_batches: EpochBatches,
    ) -> StepRunner:
        """Return a runner with CUDA graphs that is ready to start."""
        for runner in self._runners:
            if runner.serves(engine, group, inputs, epoch_batches):
                runner.stack.restart(inputs, learning_rate)
                self._runners.remove(runner)
                self._runners.append(runner)
                return runner
        if self.num_graphs >= MAX_GRAPHS:
            self.clear()
        if self._space is None:
            self._space = CaptureSpace.create()
        trainable = trained_tensors(engine.net, group[0].training.trainable)
        # The tensors of later groups are copied into those of this one.
        stack = ClientStack(engine, group, inputs.with_own_tensors(trainable))
        stack.restart(None, learning_rate)
        runner = CudaGraphRunner(stack, epoch_batches, self._space, self.warmup, self.execution)
        self._runners.append(runner)
        max_bytes = captured_bytes_limit(engine.machine.device)
        while len(self._runners) > 1 and (len(self._runners) > MAX_RUNNERS or self.num_bytes > max_bytes):
            self._dropped_graphs += self._runners.pop(0).graphs.values()
        return runner

    @property
    def num_bytes(self) -> int:
        """How much memory the tensors of all runners take, without what their steps allocate while they run."""
        return sum(runner.num_bytes for runner in self._runners)

    @property
    def num_graphs(self) -> int:
        """How many captured steps there are, those of dropped runners included."""
        return len(self._dropped_graphs) + sum(len(runner.graphs) for runner in self._runners)

    def eager_runner(
        self, engine: StepEngine, group: Sequence[ClientTraining], inputs: StackInputs, learning_rate: float
    ) -> StepRunner:
        """Return a runner without CUDA graphs that is ready to start."""
        stack = ClientStack(engine, group, inputs)
        stack.restart(None, learning_rate)
        return EagerRunner(stack, self.warmup)

    def clear(self) -> None:
        """Drop all runners and their captured steps; later ones have another pool and stream."""
        self._runners.clear()
        self._dropped_graphs.clear()
        self._space = None
