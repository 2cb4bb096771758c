"""``summary.json``: the figures of a whole run, computed from its records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitfleet.config.schema import Config
from vitfleet.files import write_atomically
from vitfleet.methods import method_class, reduce_client_metrics
from vitfleet.run.records import (
    Accuracy,
    ClientCosts,
    MetricValues,
    RoundRecord,
    TaskRecord,
    read_records,
    read_seconds,
)


@dataclass
class _Totals:
    """Figures accumulated over a run's records.

    Attributes
    ----------
    participations
        Clients that were part of a round, counted once per round.
    failures, last_failure
        How many of them failed, and the reason of the last failure.
    accuracy
        The last one measured.
    best_accuracy
        The best global accuracy.
    local_accuracy
        Each client's last one.
    """

    rounds: int = 0
    participations: int = 0
    failures: int = 0
    last_failure: str | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    train_gflops: float = 0.0
    train_loss: float | None = None
    virtual_seconds: float | None = None
    accuracy: Accuracy | None = None
    best_accuracy: float | None = None
    local_accuracy: dict[int, float] = field(default_factory=dict)

    def add(self, record: RoundRecord) -> None:
        """Add the next round."""
        failures = [client.failure for client in record.clients if client.failure is not None]
        self.rounds = record.round
        self.participations += len(record.clients)
        self.failures += len(failures)
        self.last_failure = failures[0] if failures else self.last_failure
        self.up_bytes, self.down_bytes = record.total_up_bytes, record.total_down_bytes
        self.train_gflops += sum(client.gflops or 0.0 for client in record.clients)
        self.train_loss, self.virtual_seconds = record.loss, record.virtual_seconds
        self.local_accuracy |= {
            client.client: client.accuracy for client in record.clients if client.accuracy is not None
        }
        if record.accuracy is not None:
            self.accuracy = record.accuracy
            if record.accuracy.global_ is not None:
                self.best_accuracy = max(self.best_accuracy or 0.0, record.accuracy.global_)


def write_summary(
    folder: Path, config: Config, costs: ClientCosts, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Summarise a run from its records, write ``summary.json`` and return it.

    Parameters
    ----------
    more
        Entries to add.
    """
    totals = _Totals()
    for record in read_records(folder):
        totals.add(record)
    summary: dict[str, Any] = {
        "method": config.method.name,
        "seed": config.seed,
        "rounds": totals.rounds,
        "eval_split": config.data.eval_split,
        "accuracy": _accuracy(totals),
        "loss": {
            "train": totals.train_loss,
            config.data.eval_split: totals.accuracy.loss if totals.accuracy else None,
        },
        "message": _message(totals),
        "total": _total(totals, folder),
        "client": asdict(costs),
        "client_metrics": client_metrics(folder, config),
        "metrics": last_metrics(folder),
        **(more or {}),
    }
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2).encode())
    return summary


def summary_so_far(records: Iterable[RoundRecord]) -> dict[str, Any]:
    """Return the parts of a summary that follow from the rounds so far of an unfinished run."""
    totals, metrics = _Totals(), dict[str, MetricValues]()
    task: TaskRecord | None = None
    for record in records:
        totals.add(record)
        metrics |= record.metrics
        task = record.task or task
    return {
        "accuracy": _accuracy(totals),
        "continual": None if task is None else _percent_of_tasks(task),
        "message": _message(totals),
        "total": {"virtual_seconds": totals.virtual_seconds},
        "metrics": metrics,
    }


def _percent_of_tasks(task: TaskRecord) -> dict[str, float | None]:
    """Return accuracy and forgetting after a task, in percent as in a finished run's summary."""
    shown = {"average_accuracy": task.average_accuracy, "forgetting": task.forgetting}
    return {name: None if value is None else 100 * value for name, value in shown.items()}


def _message(totals: _Totals) -> dict[str, float]:
    """Return the bytes per client and round."""
    participations = max(1, totals.participations)
    return {"up_bytes": totals.up_bytes / participations, "down_bytes": totals.down_bytes / participations}


def last_metrics(folder: Path) -> dict[str, MetricValues]:
    """Return the last values of each metric that was measured in a run."""
    metrics: dict[str, MetricValues] = {}
    for record in read_records(folder):
        metrics |= record.metrics
    return metrics


def _accuracy(totals: _Totals) -> dict[str, Any]:
    local = totals.local_accuracy
    return {
        "global": totals.accuracy.global_ if totals.accuracy else None,
        "local": sum(local.values()) / len(local) if local else None,
        "local_clients": len(local),
        "best": totals.best_accuracy,
    }


def _total(totals: _Totals, folder: Path) -> dict[str, Any]:
    return {
        "up_bytes": totals.up_bytes,
        "down_bytes": totals.down_bytes,
        "seconds": read_seconds(folder),
        "warm_up_seconds": read_seconds(folder, "warm_up_seconds"),
        "virtual_seconds": totals.virtual_seconds,
        "train_gflops": totals.train_gflops,
        "participations": totals.participations,
        "failures": totals.failures,
        "failure": totals.last_failure,
    }


def client_metrics(folder: Path, config: Config) -> dict[str, int | float]:
    """Return the numbers that clients reported, summarised over all rounds as the method declares."""
    reported = (client.numbers for record in read_records(folder) for client in record.clients)
    return reduce_client_metrics(method_class(config.method).client_metrics, reported)
