"""The configuration of a whole run.

Bounds that a table can check by itself are checked here; those that need the data or the built model (more clients than
samples, a timm model's depth) are checked where these are known, with the same kind of error.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from vitfleet.config.base import AggregationParams, CallbackParams, MethodParams, MetricParams, Table, TrackerParams
from vitfleet.config.data import AugmentConfig, DataConfig, TasksConfig
from vitfleet.config.fleet import FleetConfig
from vitfleet.config.registry import AGGREGATIONS, CALLBACKS, METHODS, METRICS, TRACKERS, ByName, OneOf, on_change
from vitfleet.config.train import EvalConfig, MachineConfig, ModelConfig, TrainConfig


class Config(Table):
    """A whole run."""

    model_config = ConfigDict(defer_build=True)  # until the registries are complete

    title: str = Field("", description="one line for `vitfleet presets` and the report")
    seed: int = Field(0, ge=0, description="addresses every draw of the run")
    rounds: int = Field(
        10, ge=1, description="rounds of the whole run; the schedule runs over them (data.tasks: follows from it)"
    )
    plugins: tuple[str, ...] = Field(
        (), strict=False, description="files of your own methods, data sets, metrics, … to load first"
    )
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = ModelConfig()
    method: Annotated[MethodParams, OneOf(METHODS)] = Field(default_factory=lambda: METHODS.make_params("fedavg"))
    train: TrainConfig = TrainConfig()
    fleet: FleetConfig = FleetConfig()
    aggregate: Annotated[AggregationParams, OneOf(AGGREGATIONS, default="mean")] = Field(
        default_factory=lambda: AGGREGATIONS.make_params("mean")
    )
    eval: EvalConfig = EvalConfig()
    metrics: Annotated[dict[str, MetricParams], ByName(METRICS)] = Field({}, description="what else is measured")
    callbacks: Annotated[dict[str, CallbackParams], ByName(CALLBACKS)] = Field({}, description="called every round")
    trackers: Annotated[dict[str, TrackerParams], ByName(TRACKERS)] = Field(
        default_factory=lambda: {"tensorboard": TRACKERS.make_params("tensorboard")},
        description="where curves are shown",
    )
    machine: MachineConfig = MachineConfig()

    @property
    def schedule_rounds(self) -> int:
        """Rounds over which the learning rate's schedule runs: those of a task, or all."""
        return self.data.tasks.rounds_per_task if self.data.tasks else self.rounds

    @property
    def num_tasks(self) -> int:
        """Tasks that every client learns, one after the other; 1 where there are none."""
        return self.data.tasks.count if self.data.tasks else 1

    @property
    def task_known(self) -> bool:
        """Whether a model is told an image's task, so that only the task's classes can win."""
        return self.data.tasks is not None and self.data.tasks.incremental == "task"

    def task_index(self, round: int) -> int:
        """Return how many tasks lie behind a client in a round; 0 where there are none."""
        return self.data.tasks.task_index(round) if self.data.tasks else 0

    @model_validator(mode="before")
    @classmethod
    def _rounds_of_tasks(cls, tree: Any) -> Any:
        """Let the rounds of a run of tasks follow from them, where they are left out."""
        data = tree.get("data") if isinstance(tree, dict) and "rounds" not in tree else None
        try:
            tasks = DataConfig.model_validate(data or {}).tasks
        except ValidationError:  # it will be complained of in its own place
            return tree
        return {**tree, "rounds": tasks.rounds} if tasks else tree

    @model_validator(mode="after")
    def _tasks_fit(self) -> Config:
        tasks = self.data.tasks
        if tasks is None:
            return self
        if self.rounds != tasks.rounds:
            raise ValueError(
                f"rounds = {self.rounds}: must be {tasks.rounds}, data.tasks.count × data.tasks.rounds_per_task, "
                "or be left out"
            )
        return self

    @model_validator(mode="after")
    def _devices_can_follow(self) -> Config:
        """Let a server go back one round at most: a device keeps what it had before a round and after it."""
        if self.fleet.kind == "flower" and self.machine.checkpoint_every != 1:
            raise ValueError(
                f"machine.checkpoint_every = {self.machine.checkpoint_every}: must be 1 with fleet.kind = flower"
            )
        return self

    @model_validator(mode="after")
    def _method_fits(self) -> Config:
        """Let the method check its parameters before any data is read."""
        METHODS[self.method.name].target.check_config(self.method, self)
        return self


@on_change
def _rebuild() -> None:
    """Build the tables again: their unions hold every registered component."""
    for table in (DataConfig, Config):
        if table.__pydantic_complete__:
            table.model_rebuild(force=True)


__all__ = [
    "AggregationParams",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FleetConfig",
    "MachineConfig",
    "ModelConfig",
    "TasksConfig",
    "TrainConfig",
]
