"""The configuration of a whole run.

Bounds that a table can check by itself are checked here; those that need the data or the built model (more clients than
samples, a timm model's depth) are checked where these are known, with the same kind of error.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from vitfleet.config.base import (
    AggregationParams,
    CallbackParams,
    MethodParams,
    MetricParams,
    ServerOptimizerParams,
    Table,
    TrackerParams,
)
from vitfleet.config.data import AugmentConfig, DataConfig, TasksConfig
from vitfleet.config.fleet import BufferedSchedule, FleetConfig
from vitfleet.config.head import HeadConfig
from vitfleet.config.registry import (
    AGGREGATIONS,
    CALLBACKS,
    METHODS,
    METRICS,
    SERVER_OPTIMIZERS,
    TRACKERS,
    Parameters,
)
from vitfleet.config.train import EvalConfig, MachineConfig, ModelConfig, TrainConfig
from vitfleet.errors import ConfigError


class Config(Table):
    """A whole run."""

    plugins: tuple[str, ...] = Field(
        (), strict=False, description="files of your own methods, data sets, metrics, … to load first"
    )
    metrics: Annotated[dict[str, MetricParams], Parameters(METRICS)] = Field(
        {}, description="what is measured besides accuracy and loss"
    )
    callbacks: Annotated[dict[str, CallbackParams], Parameters(CALLBACKS)] = Field({}, description="called every round")
    trackers: Annotated[dict[str, TrackerParams], Parameters(TRACKERS)] = Field(
        default_factory=lambda: {"tensorboard": TRACKERS.make_params("tensorboard")},
        description="where curves are shown",
    )
    title: str = Field("", description="one line for `vitfleet presets` and the report")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of every random draw")
    rounds: int = Field(10, ge=1, le=10**6, description="rounds of the run; with data.tasks it follows from the tasks")
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = ModelConfig()
    method: Annotated[MethodParams, Parameters(METHODS)] = Field(default_factory=lambda: METHODS.make_params("fedavg"))
    head: HeadConfig = HeadConfig()
    train: TrainConfig = TrainConfig()
    fleet: FleetConfig = FleetConfig()
    aggregate: Annotated[AggregationParams, Parameters(AGGREGATIONS, default="mean")] = Field(
        default_factory=lambda: AGGREGATIONS.make_params("mean")
    )
    server: Annotated[ServerOptimizerParams, Parameters(SERVER_OPTIMIZERS, default="sgd")] = Field(
        default_factory=lambda: SERVER_OPTIMIZERS.make_params("sgd")
    )
    eval: EvalConfig = EvalConfig()
    machine: MachineConfig = MachineConfig()

    @property
    def schedule_rounds(self) -> int:
        """Rounds of the learning-rate schedule: those of a task, or all."""
        return self.data.tasks.rounds_per_task if self.data.tasks else self.rounds

    @property
    def num_tasks(self) -> int:
        """Number of tasks that every client learns; 1 without a task stream."""
        return self.data.tasks.count if self.data.tasks else 1

    @property
    def kept_rounds(self) -> int | None:
        """Rounds of a task, if the models at the end of each are kept; else ``None``."""
        tasks = self.data.tasks
        return tasks.rounds_per_task if tasks and tasks.keep_models else None

    @property
    def task_known(self) -> bool:
        """Whether an image's task is known, so that predictions are among the task's classes only."""
        return self.data.tasks is not None and self.data.tasks.scenario == "task"

    def task_index(self, round: int) -> int:
        """Return the index of the task that is learned in a round; 0 without a task stream."""
        return self.data.tasks.task_index(round) if self.data.tasks else 0

    @model_validator(mode="before")
    @classmethod
    def _rounds_of_tasks(cls, tree: Any) -> Any:
        """Derive the rounds of a run with tasks from the tasks, where they are left out."""
        data = tree.get("data") if isinstance(tree, dict) and "rounds" not in tree else None
        try:
            tasks = DataConfig.model_validate(data or {}).tasks
        except ValidationError:  # it is reported where the table itself is validated
            return tree
        return {**tree, "rounds": tasks.rounds} if tasks else tree

    @model_validator(mode="after")
    def _rounds_suit_the_tasks(self) -> Config:
        tasks = self.data.tasks
        if tasks is not None and self.rounds != tasks.rounds:
            raise ValueError(
                f"rounds = {self.rounds}: must be {tasks.rounds}, data.tasks.count × data.tasks.rounds_per_task, "
                "or be left out"
            )
        return self

    @model_validator(mode="after")
    def _keys_suit_the_fleet(self) -> Config:
        """Check what depends on where clients run: remote ones have images of their own and store one earlier state."""
        is_remote, data = self.fleet.kind == "flower", self.data
        if is_remote and self.machine.checkpoint_every != 1:
            raise ValueError(
                f"machine.checkpoint_every = {self.machine.checkpoint_every}: must be 1 with fleet.kind = flower"
            )
        if is_remote and data.validation:  # whoever owns the images has split them
            raise ValueError(
                f"data.validation = {data.validation}: must be 0 with fleet.kind = flower, where clients have "
                "their own images; choose settings with fleet.kind = simulation"
            )
        if not is_remote and data.test_only:
            raise ValueError("data.test_only = true: needs fleet.kind = flower, where clients have their own images")
        return self

    @model_validator(mode="after")
    def _components_fit(self) -> Config:
        """Let the method and the metrics check their parameters before any data is read."""
        METHODS[self.method.name].target.check_config(self.method, self)
        for params in self.metrics.values():
            params.check_config(self)
        return self

    @model_validator(mode="after")
    def _head_can_be_solved(self) -> Config:
        """Check the table ``[head]`` against the method, the tasks and the schedule."""
        head = self.head
        if not head.is_solved:
            return self
        key, value = head.reason
        if not METHODS[self.method.name].target.takes_head(self.method):
            raise ConfigError(key, value, f"with {self.method.name} as configured the server has no head to be solved")
        if self.data.tasks is not None:
            raise ConfigError(key, value, "is for runs without data.tasks")
        if head.regularization == "held-out":
            raise ConfigError(
                "head.regularization", head.regularization, "asks clients twice; choose auto or a number in this table"
            )
        if head.solve_every is not None and isinstance(self.fleet.schedule, BufferedSchedule):
            remedy = "needs rounds that end for all clients; choose another fleet.schedule.kind, or head.solve_last"
            raise ConfigError("head.solve_every", head.solve_every, remedy)
        return self

    @model_validator(mode="after")
    def _clients_have_heads(self) -> Config:
        """Check that heads stay on the clients where each is to be solved for its own client."""
        head, key = self.head, "head.own_weight"
        if head.own_weight == 1:
            return self
        if not (head.is_solved and METHODS[self.method.name].target.keeps_heads(self.method)):
            raise ConfigError(
                key, head.own_weight, "must be 1: it is for solved heads that stay on the clients (fedper)"
            )
        if head.solver == "means-covariance":
            raise ConfigError(key, head.own_weight, "must be 1 with means-covariance: its sums cannot be weighted")
        return self

    @model_validator(mode="after")
    def _server_optimizer_has_effect(self) -> Config:
        """Reject a server optimiser with a method whose server averages no weights."""
        if self.server.takes_aggregate or METHODS[self.method.name].target.averages_weights(self.method):
            return self
        is_rate = self.server.optimizer == "sgd"
        key, value = ("server.lr", self.server.lr) if is_rate else ("server.optimizer", self.server.optimizer)
        raise ConfigError(
            key,
            value,
            f"has no effect: with {self.method.name} as configured the server averages no weights; leave the table "
            "[server] out",
        )


__all__ = [
    "AggregationParams",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FleetConfig",
    "HeadConfig",
    "MachineConfig",
    "ModelConfig",
    "TasksConfig",
    "TrainConfig",
]
