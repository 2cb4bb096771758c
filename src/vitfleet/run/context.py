"""Everything about a run that does not change from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.schema import Config
from vitfleet.costs.cost_model import NO_LABELS, ONE_LABEL, CostModel, DryRun
from vitfleet.costs.memory import round_memory
from vitfleet.data.images import DataSet
from vitfleet.fleet.base import Fleet
from vitfleet.fleet.distributed import ProcessGroup
from vitfleet.message import Message, Numbers, State, to_device
from vitfleet.methods import Method
from vitfleet.models.net import Net
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.clients import ClientImages, RunPartition
from vitfleet.run.evaluate.accuracy import FleetEvaluator
from vitfleet.run.head_exchange import HeadExchange
from vitfleet.run.records import read_records
from vitfleet.run.round_plan import RoundPlanner
from vitfleet.run.state import RunState
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.trainer import Trainer


@dataclass(frozen=True)
class RunContext:
    """A run, opened in its folder. :class:`vitfleet.run.state.RunState` is what changes from round to round.

    Attributes
    ----------
    images
        The images of each client; empty if the clients have their own.
    net
        The model, without weights.
    trainer
        Of the clients in this process, and of the server.
    base
        The message that every client gets once, before its first round.
    processes
        The processes that share the run.
    head
        How the head is solved; ``None`` where it never is.
    last
        The same run with the model that it ends with, where ``[head.last]`` gives that another head.
    """

    config: Config
    folder: Path
    images: ClientImages
    net: Net
    method: Method[Any]
    trainer: Trainer
    base: Message
    fleet: Fleet
    evaluator: FleetEvaluator
    checkpoints: Checkpoints
    cost_model: CostModel
    planner: RoundPlanner
    processes: ProcessGroup
    head: HeadExchange | None = None
    last: RunContext | None = None

    def at_the_end(self, state: RunState) -> tuple[RunContext, RunState]:
        """Return the run and its state with the model that it ends with, if the head of that has been solved."""
        if self.last is None or not state.last_head.tensors:
            return self, state
        return self.last, replace(
            state, server=self.last.method.with_head(state.server, state.last_head.tensors, state.round)
        )

    @property
    def data(self) -> DataSet:
        """The data set."""
        return self.images.data

    @property
    def partition(self) -> RunPartition:
        """Which images each client has."""
        return self.images.partition

    @property
    def machine(self) -> ExecutionSettings:
        """The device and precision of this process."""
        return self.trainer.machine

    @property
    def params(self) -> int:
        """Number of parameters of a client's model."""
        return self.net.parts.count_parameters(self.net.parts.whole)

    @property
    def has_remote_clients(self) -> bool:
        """Whether the clients run on machines of their own."""
        return self.config.fleet.kind != "simulation"

    @property
    def overlaps_checkpoints(self) -> bool:
        """Whether a round may begin while the previous checkpoint is still being written.

        Not if others depend on it: remote clients store one earlier round only, and other processes read its files.
        """
        return not self.has_remote_clients and self.processes.size == 1

    def labels(self, client: int, round: int) -> NDArray[np.int64]:
        """Return the labels of the images that a client trains on in a round."""
        return self.images.labels(client, round)

    def initial_server_state(self) -> State:
        """Return the server state before the first round."""
        return self.method.initial_state(to_device(self.net.initial_weights(), self.machine.device))

    def dry_run(self, round: int, client: int, previous_numbers: Numbers | None) -> DryRun:
        """Return a client's round on tensors without values: its operations, and what an honest client sends.

        ``previous_numbers`` are those in the client's update before.
        """
        task_index = self.config.task_index(round)
        # The images of remote clients are not known: one of any class stands for them.
        labels = ONE_LABEL if self.has_remote_clients else self.labels(client, round)
        return self.cost_model.dry_run(round, client, labels, task_index, previous_numbers)

    def gflops(self, dry_run_result: DryRun, numbers: Numbers) -> float | None:
        """Return the operations of a client's round, in billions; ``None`` if it does not report its samples."""
        samples = numbers.get("samples")
        return self.cost_model.round_flops(dry_run_result, samples) / 1e9 if isinstance(samples, int) else None

    def client_costs(self, client_metrics: Mapping[int, Numbers]) -> dict[str, Any]:
        """Return the costs of one client for the summary, given the numbers in each client's last update."""
        first = self.cost_model.dry_run(self.method.cost_round, 0, NO_LABELS)
        flops = self.cost_model.per_image(first)

        def kept_bytes(numbers: Numbers) -> int:
            return (self.cost_model.kept_state(numbers) or State()).num_bytes

        # Peak memory is that of the client that keeps most.
        numbers = max(client_metrics.values(), key=kept_bytes, default=None)
        last_task = self.cost_model.dry_run(self.method.cost_round, 0, NO_LABELS, self.config.num_tasks - 1, numbers)
        last_task = replace(last_task, trainings=last_task.trainings or first.trainings)
        return {
            "params": self.params,
            "trainable_params": self.net.parts.count_parameters(self.method.trainable),
            "forward_gflops": flops.forward / 1e9,  # per sample, as those of a training step
            "train_gflops": flops.training / 1e9,
            "peak_memory_bytes": round_memory(self.net, last_task, self.config.train, self.machine.bf16).total,
        }


def load_state(context: RunContext) -> RunState:
    """Return a run's state after its last checkpoint; before the first checkpoint, its initial state."""
    state = context.checkpoints.load(context.machine.device)
    if state is None:
        starts_solved = context.config.head.is_solved_first and context.config.data.tasks is None
        return RunState(context.initial_server_state(), awaits_start=starts_solved)
    return state.with_history(read_records(context.folder))
