"""Experiment trackers: TensorBoard by default, Weights & Biases and MLflow where configured.

All of them receive the same scalars every round, and nothing that the records do not hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from vitfleet.config.base import TrackerParams
from vitfleet.config.registry import TRACKERS, register_tracker
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError, how_to_install
from vitfleet.files import write_atomically
from vitfleet.run.output.folder import run_id
from vitfleet.run.records import RoundRecord, metric_scalars


class Tracker(Protocol):
    """Shows a run's curves. A registered class is constructed as ``Tracker(params, config, folder, next_round)``."""

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Take a round's scalars."""

    def close(self) -> None:
        """Write what is buffered and close."""


def scalars_of(record: RoundRecord) -> dict[str, float]:
    """Return what is drawn of a round."""
    scalars: dict[str, float | None] = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/gflops": sum(entry.gflops or 0.0 for entry in record.asked_clients),
        "bytes/up_total": record.total_up_bytes,
        "bytes/down_total": record.total_down_bytes,
        "clients/failed": sum(entry.failure is not None for entry in record.asked_clients),
        "virtual_seconds": record.virtual_seconds,
    }
    if record.accuracy is not None:
        scalars |= {
            "accuracy/global": record.accuracy.global_,
            "accuracy/local": record.accuracy.local,
            "test/loss": record.accuracy.loss,
        }
    if record.task is not None:
        scalars |= {
            "continual/average_accuracy": record.task.average_accuracy,
            "continual/forgetting": record.task.forgetting,
            "continual/incremental_accuracy": record.task.incremental_accuracy,
        }
    scalars |= {f"metrics/{name}": value for name, value in metric_scalars(record.metrics).items()}
    return {name: value for name, value in scalars.items() if value is not None}


class MissingPackageError(Exception):
    """A tracker's own package is not installed."""


class Trackers:
    """The trackers of a run."""

    def __init__(self, config: Config, folder: Path, next_round: int) -> None:
        made = (make_tracker(name, params, config, folder, next_round) for name, params in config.trackers.items())
        self._trackers = [tracker for tracker in made if tracker is not None]

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Send a round's scalars to every tracker."""
        for tracker in self._trackers:
            tracker.add(scalars, step)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._trackers:
            tracker.close()


def make_tracker(name: str, params: TrackerParams, config: Config, folder: Path, next_round: int) -> Tracker | None:
    """Start a tracker; ``None`` for one that is on by default and not installed.

    A ``ConfigError`` says that its package is missing, or that it does not start (no login, no connection).
    """
    entry = TRACKERS[name]
    try:
        tracker: Tracker = entry.target(params, config, folder, next_round)
    except MissingPackageError as error:
        if getattr(entry.target, "optional", False):
            return None
        raise ConfigError("trackers", name, f"is not installed; {how_to_install(str(error))}") from None
    except UserError:
        raise
    except Exception as error:  # every tracker raises exceptions of its own
        raise ConfigError(
            "trackers", name, f"does not start ({error}); fix its own settings, or leave it out"
        ) from error
    return tracker


@register_tracker("tensorboard", TrackerParams)
class TensorBoard:
    """Event files in the run's folder; on resume the steps after the checkpoint are discarded."""

    #: On by default and an extra: a run without it is complete, because the records hold every scalar.
    optional = True

    def __init__(self, params: TrackerParams, config: Config, folder: Path, next_round: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingPackageError("sim") from None
        purge = next_round if next_round > 1 else None
        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=purge)

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbParams(TrackerParams):
    """Weights & Biases."""

    project: str = Field("vitfleet", description="the project that the run belongs to")


@register_tracker("wandb", WandbParams)
class WeightsAndBiases:
    """A W&B run named after the folder; W&B's own settings (``WANDB_MODE``, …) decide where it goes."""

    def __init__(self, params: WandbParams, config: Config, folder: Path, next_round: int) -> None:
        self._run = _import("wandb").init(
            project=params.project,
            name=folder.resolve().name,
            id=run_id(folder),  # other folders may have the same name
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Log a step; one that was logged before the run was resumed stays as it is."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflowParams(TrackerParams):
    """MLflow."""

    experiment: str = Field("vitfleet", description="the experiment that the run belongs to")


@register_tracker("mlflow", MLflowParams)
class MLflow:
    """An MLflow run named after the folder; MLflow's own settings (``MLFLOW_TRACKING_URI``) decide where it goes."""

    def __init__(self, params: MLflowParams, config: Config, folder: Path, next_round: int) -> None:
        self._mlflow = _import("mlflow")
        self._mlflow.set_experiment(params.experiment)
        started = folder / "mlflow-run"
        if started.exists():  # a resumed run
            self._mlflow.start_run(run_id=started.read_text())
        else:
            run = self._mlflow.start_run(run_name=folder.resolve().name)
            write_atomically(started, run.info.run_id.encode())
        self._mlflow.log_params({"method": config.method.name, "data": config.data.name, "seed": config.seed})
        self._mlflow.log_dict(config.model_dump(mode="json"), "config.json")

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Log a step."""
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingPackageError(name) from None
