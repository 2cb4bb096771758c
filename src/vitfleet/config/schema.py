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
from vitfleet.config.head import HeadConfig, HeadSolver
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
    def defends(self) -> bool:
        """Whether the server clips what devices send: in a simulation they are our own code, and nobody lies."""
        chosen = self.aggregate.defence
        return chosen == "clip" or (chosen == "auto" and self.fleet.kind == "flower")

    @property
    def kept_rounds(self) -> int | None:
        """Rounds of a task, if the models at the end of each are kept; else ``None``."""
        tasks = self.data.tasks
        return tasks.rounds_per_task if tasks and tasks.keep_models else None

    @property
    def task_known(self) -> bool:
        """Whether an image's task is known, so that predictions are among the task's classes only."""
        return self.data.tasks is not None and self.data.tasks.scenario == "task"

    @property
    def is_incremental(self) -> bool:
        """Whether tasks are common to all clients and the server's model is evaluated after each."""
        return self.data.tasks is not None and self.data.tasks.partitioned

    def begins_task(self, round: int) -> bool:
        """Return whether a round is the first of a task."""
        return self.data.tasks is not None and (round - 1) % self.data.tasks.rounds_per_task == 0

    def task_index(self, round: int) -> int:
        """Return the index of the task that is learned in a round; 0 without a task stream."""
        return self.data.tasks.task_index(round) if self.data.tasks else 0

    def of_last_head(self) -> Config | None:
        """Return the configuration of the model that ends the run, where ``head.last`` gives it another head."""
        if self.head.last is None:
            return None
        return self.model_copy(update={"head": HeadConfig(**self.head.last.model_dump(), solve_last=True)})

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
    def _views_are_kept_without_tasks(self) -> Config:
        if self.train.cached_views and self.data.tasks is not None:
            raise ConfigError("train.cached_views", self.train.cached_views, "is for runs without data.tasks")
        return self

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
    def _rule_suits_the_fleet(self) -> Config:
        """Reject a rule that cannot do its work with the replies of a round: it would protect from nothing."""
        aggregate, replies = self.aggregate, self.fleet.per_round
        if replies < aggregate.least_replies:
            remedy = f"needs {aggregate.least_replies} replies, and fleet.per_round = {replies}; choose another rule"
            raise ConfigError("aggregate.rule", aggregate.rule, remedy)
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
        if self.data.tasks is not None and not self.is_incremental:
            remedy = (
                "needs tasks that are those of all clients: data.tasks.order = common, data.tasks.partitioned = true"
            )
            raise ConfigError(key, value, remedy)
        if self.data.tasks is not None and head.is_solved_again:
            raise ConfigError(
                "head.solve_last",
                head.solve_last,
                "must be left out with data.tasks, as head.solve_every: images of earlier tasks are gone",
            )
        _check_asks_once("head", head)
        if head.solve_every is not None and isinstance(self.fleet.schedule, BufferedSchedule):
            remedy = "needs rounds that end for all clients; choose another fleet.schedule.kind, or head.solve_last"
            raise ConfigError("head.solve_every", head.solve_every, remedy)
        return self

    @model_validator(mode="after")
    def _last_head_can_be_solved(self) -> Config:
        """Check the table ``[head.last]``."""
        head, method = self.head, METHODS[self.method.name].target
        if head.last is None:
            return self
        if not head.solve_last:
            raise ConfigError("head.solve_last", False, "must be true with head.last, which says how it is solved")
        _check_asks_once("head.last", head.last)
        if not method.takes_last_head(self.method):
            remedy = f"with {self.method.name} clients have heads of their own; leave the table head.last out"
            raise ConfigError("head.last.features", head.last.features, remedy)
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
        if head.standardize == "data":
            raise ConfigError(key, head.own_weight, "must be 1 with standardize = data")
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


def _check_asks_once(table: str, solver: HeadSolver) -> None:
    """Refuse a solver in the table ``[head]`` that would ask clients twice."""
    if solver.regularization == "held-out":
        remedy = "asks clients twice; choose auto or a number in this table"
        raise ConfigError(f"{table}.regularization", solver.regularization, remedy)
    if solver.asks_twice:
        remedy = f"asks clients twice with {table}.send = sums; choose {table}.send = features"
        raise ConfigError(f"{table}.standardize", solver.standardize, remedy)


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
