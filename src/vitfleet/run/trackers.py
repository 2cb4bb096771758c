"""Where a run's curves are shown: TensorBoard by default, Weights & Biases and MLflow where asked for.

All of them are told the same of every round, and nothing that the records do not hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError
from vitfleet.files import write_atomically
from vitfleet.run.folder import identity
from vitfleet.run.records import RoundRecord


class Tracker(Protocol):
    """Somebody who draws curves."""

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Take a round's scalars."""
        ...

    def close(self) -> None:
        """Be done."""
        ...


def scalars_of(record: RoundRecord) -> dict[str, float]:
    """Return what is drawn of a round."""
    scalars: dict[str, float | None] = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/gflops": sum(entry.gflops or 0.0 for entry in record.clients),
        "bytes/up_total": record.total_up_bytes,
        "bytes/down_total": record.total_down_bytes,
        "clients/left_out": sum(entry.failure is not None for entry in record.clients),
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
        }
    return {name: value for name, value in scalars.items() if value is not None}


class Trackers:
    """A run's trackers together."""

    def __init__(self, config: Config, folder: Path, next_round: int) -> None:
        self._trackers = [
            made
            for name in config.machine.trackers
            if (made := _TRACKERS[name](config, folder, next_round)) is not None
        ]

    def add(self, record: RoundRecord) -> None:
        """Tell every tracker of a round."""
        scalars = scalars_of(record)
        for tracker in self._trackers:
            tracker.add(scalars, record.round)

    def close(self) -> None:
        """Close them all."""
        for tracker in self._trackers:
            tracker.close()


class TensorBoard:
    """Event files in the run's folder; on resume the steps after the checkpoint are taken back."""

    def __init__(self, folder: Path, next_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = next_round if next_round > 1 else None
        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=purge)

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run of the folder's name; where it goes is W&B's own settings' to say (``WANDB_MODE``, …)."""

    def __init__(self, module: Any, config: Config, folder: Path) -> None:
        self._run = module.init(
            project="vitfleet",
            name=folder.resolve().name,
            id=identity(folder),  # other folders may have the same name
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Log a step; one that is known already (a run that goes on) is left as it is."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """An MLflow run of the folder's name; where it goes is MLflow's own settings' to say (``MLFLOW_TRACKING_URI``)."""

    def __init__(self, module: Any, config: Config, folder: Path) -> None:
        self._mlflow = module
        module.set_experiment("vitfleet")
        started = folder / "mlflow-run"
        if started.exists():  # a run that goes on
            module.start_run(run_id=started.read_text())
        else:
            run = module.start_run(run_name=folder.resolve().name)
            write_atomically(started, run.info.run_id.encode())
        module.log_params({"method": config.method.name, "data": config.data.name, "seed": config.seed})
        module.log_dict(config.model_dump(mode="json"), "config.json")

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Log a step."""
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _tensorboard(config: Config, folder: Path, next_round: int) -> Tracker | None:
    try:
        return TensorBoard(folder, next_round)
    except ImportError:  # an extra, and on by default: the records hold everything the curves do
        return None


def _asked_for(name: str, kind: Callable[[Any, Config, Path], Tracker], config: Config, folder: Path) -> Tracker:
    try:
        module = importlib.import_module(name)
    except ImportError:
        remedy = f"is not installed; pip install 'vitfleet[{name}]'"
        raise ConfigError("machine.trackers", name, remedy) from None
    try:
        return kind(module, config, folder)
    except Exception as error:  # whatever of its own it raises: no login, no connection
        remedy = f"does not start ({error}); mend its own settings, or leave it out"
        raise ConfigError("machine.trackers", name, remedy) from error


_TRACKERS: Mapping[str, Callable[[Config, Path, int], Tracker | None]] = {
    "tensorboard": _tensorboard,
    "wandb": lambda config, folder, next_round: _asked_for("wandb", WeightsAndBiases, config, folder),
    "mlflow": lambda config, folder, next_round: _asked_for("mlflow", MLflow, config, folder),
}
