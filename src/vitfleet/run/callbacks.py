"""Callbacks: code that follows a run round by round, and may stop it. Two are built in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vitfleet.config.base import CallbackParams
from vitfleet.config.registry import CALLBACKS, METRICS, register_callback
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError
from vitfleet.files import BEST_MODEL_FILE
from vitfleet.run.context import RunContext
from vitfleet.run.output.model_file import model_round, write_run_model
from vitfleet.run.records import UNAVAILABLE, RoundRecord
from vitfleet.run.state import RunState

# The numbers of a round's record that can be watched, besides those of metrics.
_MONITORED = (
    *("accuracy.global", "accuracy.local", "accuracy.loss", "loss", "total_up_bytes", "total_down_bytes"),
    *("virtual_seconds", "task.average_accuracy", "task.forgetting", "task.backward_transfer", "task.forward_transfer"),
    "task.incremental_accuracy",
)


@dataclass(frozen=True)
class StopRun:
    """Returned by a callback to stop a run after the current round."""

    reason: str


class Callback:
    """Base class of callbacks; a subclass overrides the methods that it needs.

    A registered callback is constructed as ``MyCallback(params)``. A resumed run must end like one that was
    never interrupted, so a callback with state of its own recomputes it from the records in :meth:`restore`.
    """

    def restore(self, run_folder: Path, records: Iterable[RoundRecord]) -> None:
        """Recompute the callback's state from the rounds before a resume. Called before :meth:`on_run_start`."""

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        """Handle the start of the run, before its first round or the first one after a resume."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> StopRun | None:
        """Handle the end of a round, before its checkpoint.

        Returns
        -------
        StopRun | None
            A :class:`StopRun` ends the run: its checkpoint is written and the run counts as finished.
        """
        return None

    def summary_entries(self) -> Mapping[str, Any]:
        """Return entries to add to the run's summary."""
        return {}

    def on_run_end(self, state: RunState, summary: Mapping[str, Any]) -> None:
        """Handle the end of the run, after its summary is written."""


def make_callbacks(config: Config) -> list[Callback]:
    """Return the callbacks of the configuration's table ``callbacks``."""
    return [CALLBACKS[name].target(params) for name, params in config.callbacks.items()]


def check_monitored(key: str, name: str, config: Config) -> None:
    """Raise an error if no record of a run has a number of this dotted name: the ``key`` would have no effect."""
    table, _, value = name.partition(".")
    metric = value.partition(".")[0]
    if table != "metrics" and name not in _MONITORED:
        known = ", ".join([*_MONITORED, "metrics.NAME.VALUE"])
        raise ConfigError(key, name, f"must be a number of a round's record: {known}")
    if table == "task" and config.data.tasks is None:
        raise ConfigError(key, name, "needs tasks (data.tasks); without them accuracy.global, for example")
    if table == "metrics" and metric not in METRICS:
        raise ConfigError(key, name, f"there is no metric {metric!r}; there are {', '.join(METRICS.names())}")
    if table == "metrics" and (metric not in config.metrics or config.metrics[metric].every == "end"):
        raise ConfigError(key, name, f"is not measured during the run; add -o metrics.{metric}.every=1")


def monitored_value(record: RoundRecord, name: str) -> float | None:
    """Return a number of a round's record by its dotted name; ``None`` if it was not measured in this round."""
    table, _, value = name.rpartition(".")
    if table.startswith("metrics."):
        measured = record.metrics.get(table.removeprefix("metrics."))
        if measured is None or UNAVAILABLE in measured:
            return None
        numbers = {key: number for key, number in measured.items() if number is None or isinstance(number, int | float)}
        if value not in numbers:
            raise UserError(f"monitor = {name!r}: the metric has the numbers {', '.join(numbers)}")
        number = numbers[value]
    else:
        parent = getattr(record, table) if table else record
        number = None if parent is None else getattr(parent, "global_" if value == "global" else value)
    return None if number is None else float(number)


@dataclass
class Best:
    """The best value so far and its round; both ``None`` before the first."""

    mode: Literal["max", "min"]
    min_delta: float = 0.0
    value: float | None = None
    round: int | None = None

    def update(self, value: float, round: int) -> bool:
        """Take in a round's value; return whether it is an improvement."""
        sign = 1 if self.mode == "max" else -1
        if self.value is not None and sign * (value - self.value) <= self.min_delta:
            return False
        self.value, self.round = value, round
        return True


class EarlyStoppingParams(CallbackParams):
    """Stops a run when a value no longer improves."""

    monitor: str = Field("accuracy.global", description="the value of a round's record, such as accuracy.local or loss")
    patience: int = Field(10, ge=1, description="measurements without an improvement before the run is stopped")
    min_delta: float = Field(0.0, ge=0, description="the smallest change that counts as an improvement")
    mode: Literal["max", "min"] = Field("max", description="whether a larger or a smaller value is better")


@register_callback("early_stopping", EarlyStoppingParams)
class EarlyStopping(Callback):
    """Stops a run when a value has not improved for ``patience`` measurements.

    Rounds in which the value is not measured (``eval.every``) do not count. In Python:
    ``EarlyStopping(monitor="accuracy.local", patience=5)``.
    """

    def __init__(self, params: EarlyStoppingParams | None = None, **values: Any) -> None:
        self.params = params or EarlyStoppingParams(**values)
        self._best = Best(self.params.mode, self.params.min_delta)
        self._without_improvement = 0

    def restore(self, run_folder: Path, records: Iterable[RoundRecord]) -> None:
        """Recompute the best value so far, and how long ago it was measured."""
        for record in records:
            self._update(record)

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        """Check that the value is measured in this run."""
        check_monitored("callbacks.early_stopping.monitor", self.params.monitor, context.config)

    def on_round_end(self, state: RunState, record: RoundRecord) -> StopRun | None:
        """Stop the run if the value was measured and patience is exhausted."""
        measured = self._update(record)
        if not measured or self._without_improvement < self.params.patience:
            return None
        value, round = self._best.value, self._best.round
        return StopRun(
            f"{self.params.monitor} has not improved for {self.params.patience} measurements; "
            f"the best was {value:.4g} in round {round}"
        )

    def _update(self, record: RoundRecord) -> bool:
        """Compare a round with the best one; return whether the value was measured."""
        value = monitored_value(record, self.params.monitor)
        if value is None:
            return False
        improved = self._best.update(value, record.round)
        self._without_improvement = 0 if improved else self._without_improvement + 1
        return True


class BestModelParams(CallbackParams):
    """Keeps the model of the best round."""

    monitor: str = Field("accuracy.global", description="the value of a round's record that decides")
    mode: Literal["max", "min"] = Field("max", description="whether a larger or a smaller value is better")


@register_callback("best_model", BestModelParams)
class BestModel(Callback):
    """Writes ``best.safetensors``, in the format of ``model.safetensors``, whenever a value improves.

    The summary's entry ``best_model`` has the round and the value. In Python: ``BestModel(monitor="accuracy.global")``.
    """

    def __init__(self, params: BestModelParams | None = None, **values: Any) -> None:
        self.params = params or BestModelParams(**values)
        self._best = Best(self.params.mode)
        self._context: RunContext | None = None

    def restore(self, run_folder: Path, records: Iterable[RoundRecord]) -> None:
        """Recompute which round was the best so far."""
        last_round = 0
        for record in records:
            self._update(record)
            last_round = record.round
        path = run_folder / BEST_MODEL_FILE
        if path.exists() and model_round(path) > last_round:
            # That round is repeated, on a real fleet perhaps with another result: the next measurement replaces it.
            self._best = Best(self.params.mode)

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        """Check that the value is measured in this run, and that the method has a global model."""
        check_monitored("callbacks.best_model.monitor", self.params.monitor, context.config)
        if not context.method.has_global_model:
            method = context.config.method.name
            raise ConfigError("callbacks.best_model", self.params.monitor, f"{method} has no global model to keep")
        self._context = context

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        """Write the model if the value improved."""
        if self._update(record):
            assert self._context is not None
            context, state = self._context.at_the_end(state)
            weights = context.method.model_weights(state.server, context.base.tensors, None)
            write_run_model(context.folder / BEST_MODEL_FILE, context, weights, state.round)

    def summary_entries(self) -> Mapping[str, Any]:
        """Return the best round and its value."""
        if self._best.round is None:
            return {}
        entry = {"round": self._best.round, "monitor": self.params.monitor, "value": self._best.value}
        return {"best_model": entry}

    def _update(self, record: RoundRecord) -> bool:
        value = monitored_value(record, self.params.monitor)
        return value is not None and self._best.update(value, record.round)
