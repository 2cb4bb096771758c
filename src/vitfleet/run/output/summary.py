"""``summary.json``: the figures of a whole run, computed from its records, and numbers over the seeds of several.

Accuracies, forgetting and transfer are fractions, 0…1; sizes are in bytes, durations in seconds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import SUMMARY_FILE, read_json, write_atomically
from vitfleet.methods import method_class, reduce_client_metrics
from vitfleet.run.records import (
    Accuracy,
    HeadRecord,
    MetricValues,
    RoundRecord,
    TaskRecord,
    read_records,
    read_seconds,
)

_NO_ROUND = RoundRecord(0, 0.0, None, None, [], 0, 0)


@dataclass
class _HeadTotals:
    """How often the head was solved, and what that took all clients together: the table ``head`` of a summary."""

    times: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    gflops: float = 0.0

    def add(self, record: HeadRecord) -> None:
        """Add one time."""
        self.times += 1
        self.up_bytes += sum(client.up_bytes for client in record.clients)
        self.down_bytes += sum(client.down_bytes for client in record.clients)
        self.gflops += sum(client.gflops or 0.0 for client in record.clients)


@dataclass
class _Totals:
    """Figures accumulated over a run's records."""

    last: RoundRecord = _NO_ROUND
    participations: int = 0  # clients that were part of a round, counted once per round
    # How many of them failed, and the reason of the last failure
    failures: int = 0
    last_failure: str | None = None
    train_gflops: float = 0.0
    accuracy: Accuracy | None = None  # the last one measured
    best_accuracy: float | None = None  # the best global one
    local_accuracy: dict[int, float] = field(default_factory=dict)  # of each client, the last one
    task: TaskRecord | None = None
    metrics: dict[str, MetricValues] = field(default_factory=dict)  # the last values of each metric
    head: _HeadTotals = field(default_factory=_HeadTotals)  # what solving the head took

    @classmethod
    def of(cls, records: Iterable[RoundRecord]) -> _Totals:
        """Return the figures of these rounds."""
        totals = cls()
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: RoundRecord) -> None:
        """Add the next round."""
        failures = [client.failure for client in record.clients if client.failure is not None]
        self.last = record
        self.participations += len(record.clients)
        if record.head is not None:
            self.head.add(record.head)
        self.failures += len(failures)
        self.last_failure = failures[0] if failures else self.last_failure
        self.train_gflops += sum(client.gflops or 0.0 for client in record.asked_clients)
        self.local_accuracy |= record.local_accuracies
        self.task = record.task or self.task
        self.metrics |= record.metrics
        if record.accuracy is not None:
            self.accuracy = record.accuracy
            if record.accuracy.global_ is not None:
                self.best_accuracy = max(self.best_accuracy or 0.0, record.accuracy.global_)

    def accuracies(self) -> dict[str, Any]:
        """Return the table ``accuracy`` of a summary."""
        local = self.local_accuracy
        return {
            "global": self.accuracy.global_ if self.accuracy else None,
            "local": sum(local.values()) / len(local) if local else None,
            "local_clients": len(local),
            "best": self.best_accuracy,
        }

    def message(self) -> dict[str, float]:
        """Return the table ``message``: bytes per client and round, without those of solving the head."""
        count = max(1, self.participations)
        return {
            "up_bytes": (self.last.total_up_bytes - self.head.up_bytes) / count,
            "down_bytes": (self.last.total_down_bytes - self.head.down_bytes) / count,
        }


def write_summary(
    folder: Path, config: Config, costs: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Summarise a run from its records, with more entries; write ``summary.json`` and return it."""
    totals = _Totals.of(read_records(folder))
    last = totals.last
    reported = (client.numbers for record in read_records(folder) for client in record.clients)
    loss = totals.accuracy.loss if totals.accuracy else None
    summary: dict[str, Any] = {
        "method": config.method.name,
        "seed": config.seed,
        "rounds": last.round,
        "defence": "clip" if config.defends else "off",
        "eval_split": config.data.eval_split,
        "accuracy": totals.accuracies(),
        "loss": {"train": last.loss, config.data.eval_split: loss},
        "message": totals.message(),
        "total": {
            "up_bytes": last.total_up_bytes,
            "down_bytes": last.total_down_bytes,
            "seconds": read_seconds(folder),
            "warm_up_seconds": read_seconds(folder, "warm_up_seconds"),
            "virtual_seconds": last.virtual_seconds,
            "train_gflops": totals.train_gflops,
            "participations": totals.participations,
            "failures": totals.failures,
            "failure": totals.last_failure,
        },
        "client": {**costs, "round_gflops": totals.train_gflops / max(1, totals.participations)},
        "client_metrics": reduce_client_metrics(method_class(config.method).client_metrics, reported),
        "metrics": totals.metrics,
        **({"head": asdict(totals.head)} if totals.head.times else {}),
        **(more or {}),
    }
    write_atomically(folder / SUMMARY_FILE, json.dumps(summary, indent=2).encode())
    return summary


def summary_so_far(records: Iterable[RoundRecord]) -> dict[str, Any]:
    """Return the parts of a summary that follow from the rounds so far of an unfinished run."""
    totals = _Totals.of(records)
    task = totals.task
    continual = task and {"average_accuracy": task.average_accuracy, "forgetting": task.forgetting}
    if continual and task and task.incremental_accuracy is not None:
        continual["incremental_accuracy"] = task.incremental_accuracy
    return {
        "finished": False,
        "accuracy": totals.accuracies(),
        "continual": continual,
        "message": totals.message(),
        "total": {"virtual_seconds": totals.last.virtual_seconds},
        "metrics": totals.metrics,
    }


def cost_to_target(records: Iterable[RoundRecord], target: float | None) -> dict[str, float | None]:
    """Return the rounds, bytes and virtual seconds until a run reached a global accuracy; ``None``: it did not."""
    for record in records:
        accuracy = record.accuracy.global_ if record.accuracy else None
        if target is not None and accuracy is not None and accuracy >= target:
            total_bytes = record.total_up_bytes + record.total_down_bytes
            return {"rounds": record.round, "bytes": total_bytes, "virtual_seconds": record.virtual_seconds}
    return {"rounds": None, "bytes": None, "virtual_seconds": None}


def is_finished(folder: Path) -> bool:
    """Return whether a run has no rounds left."""
    return (folder / SUMMARY_FILE).is_file()


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a run, which must be finished."""
    if not is_finished(folder):
        raise UserError(f"{folder}: the run is not finished; resume it with `vitfleet resume {folder}`")
    summary: dict[str, Any] = read_json(folder / SUMMARY_FILE)
    return summary


class MeanStd(NamedTuple):
    """A mean, and the sample standard deviation (divided by n − 1); ``None`` for a single value."""

    mean: float
    std: float | None


def mean_std(values: Iterable[float]) -> MeanStd | None:
    """Return the mean of some values and their standard deviation; ``None`` without values."""
    known = list(values)
    if not known:
        return None
    return MeanStd(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def seed_values(summaries: Iterable[Mapping[str, Any]], path: Sequence[str]) -> list[float]:
    """Return a number of the summaries of runs that differ in their seed, by its path: ``("accuracy", "global")``.

    The list is empty where a run does not have it: a mean over only the seeds that reached a target would flatter. A
    run that is not finished may lack what is known at its end.
    """
    values = []
    for summary in summaries:
        value: Any = summary
        for key in path:
            value = (value or {}).get(key)
        if value is not None:
            values.append(value)
        elif summary.get("finished", True) or path[0] == "to_target":
            return []
    return values


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
