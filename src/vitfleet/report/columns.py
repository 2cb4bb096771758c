"""The columns of all tables of results: what each number is, where it is in a summary, and how it is printed.

``vitfleet table``, the terminal, the page and the CSV files choose from these. A configured metric is a column too; its
parameter table declares which of its values are shown, and how.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vitfleet.config.base import MetricParams
from vitfleet.config.registry import METRICS
from vitfleet.report.runs import RunData, RunGroup
from vitfleet.report.units import BYTES, COUNT, GFLOPS, NUMBER, PERCENT, ROUNDS, SECONDS, UNKNOWN, Unit, format_target
from vitfleet.run.output.summary import MeanStd, mean_std, seed_values
from vitfleet.run.records import UNAVAILABLE

COMPARABLE_NOTE = "bold: the best of the rows that have the same data, partition, tasks and evaluation images"


@dataclass(frozen=True)
class Column:
    """A number of a run's summary, as a column of tables."""

    name: str  # for --columns, and the heading where there is little room
    title: str  # the heading, without the unit
    unit: Unit
    path: tuple[str, ...]  # in a summary: the names of tables, and the key
    best: Literal["highest", "lowest"] | None
    meaning: str  # {split} stands for the images that were measured on, {target} for the target accuracy

    @property
    def heading(self) -> str:
        """The heading of a column whose cells are all in its unit: ``upload, MiB``."""
        return self.unit.heading(self.title)

    def described(self, split: str, target: float | None) -> Column:
        """Return the column with the images that were measured on, and the target, in its texts."""
        goal = "target" if target is None else format_target(target)
        changed = {"accuracy": ("accuracy", f"{split} accuracy"), "to_target": ("target", goal)}.get(self.path[0])
        title = self.title.replace(*changed) if changed else self.title
        return replace(self, title=title, meaning=self.meaning.format(split=split, target=goal))

    def mean_std(self, summaries: Iterable[Mapping[str, Any]]) -> MeanStd | None:
        """Return the number over the seeds of a configuration, from its summaries; ``None`` if it is not known.

        Bytes, durations and operations have no standard deviation here: there is no room, and most do not vary. A table
        for a paper has all of them.
        """
        found = mean_std(seed_values(summaries, self.path))
        return found if found is None or self.unit in (PERCENT, ROUNDS, NUMBER) else MeanStd(found.mean, None)


_TO_TARGET = "until {target} accuracy on the common images, all clients; no value where a seed did not reach it"
_PER_ROUND = "per client and round"
_DECLARED = (
    Column("accuracy", "accuracy", PERCENT, ("accuracy", "global"), "highest",
           "on the common {split} set, after the last round"),
    Column("local", "local accuracy", PERCENT, ("accuracy", "local"), "highest",
           "clients' own models on their own {split} images, mean over clients"),
    Column("best", "best accuracy", PERCENT, ("accuracy", "best"), "highest",
           "the highest after any round, on the common {split} set"),
    Column("average", "average accuracy", PERCENT, ("continual", "average_accuracy"), "highest",
           "clients' own models on their own {split} images of all tasks, after the last one; of common tasks the "
           "server's, on all {split} images"),
    Column("incremental", "average incremental accuracy", PERCENT, ("continual", "incremental_accuracy"), "highest",
           "mean of the server's accuracy on all classes so far, after each task"),
    Column("told", "accuracy with known task", PERCENT, ("continual", "with_task", "average_accuracy"), "highest",
           "the server's model is told the task of each image"),
    Column("forgetting", "forgetting", PERCENT, ("continual", "forgetting"), "lowest",
           "mean loss of accuracy on earlier tasks"),
    Column("backward", "backward transfer", PERCENT, ("continual", "backward_transfer"), "highest",
           "effect of later tasks on earlier ones"),
    Column("forward", "forward transfer", PERCENT, ("continual", "forward_transfer"), "highest",
           "effect of earlier tasks on later ones"),
    Column("rounds", "rounds to target", ROUNDS, ("to_target", "rounds"), "lowest", _TO_TARGET),
    Column("traffic", "traffic to target", replace(BYTES, digits=1), ("to_target", "bytes"), "lowest", _TO_TARGET),
    Column("clock", "virtual time to target", SECONDS, ("to_target", "virtual_seconds"), "lowest", _TO_TARGET),
    Column("upload", "upload", BYTES, ("message", "up_bytes"), "lowest", _PER_ROUND),
    Column("download", "download", BYTES, ("message", "down_bytes"), "lowest", _PER_ROUND),
    Column("trained", "trained parameters", COUNT, ("client", "trainable_params"), "lowest", "of a client's model"),
    Column("gflops", "GFLOPs per image", GFLOPS, ("client", "train_gflops"), "lowest",
           "of an image seen in training, all passes"),
    Column("work", "GFLOPs per round", GFLOPS, ("client", "round_gflops"), "lowest",
           "of a client, all passes"),
    Column("memory", "memory", replace(BYTES, digits=0), ("client", "peak_memory_bytes"), "lowest",
           "peak of a client's training"),
    Column("virtual", "virtual time", SECONDS, ("total", "virtual_seconds"), "lowest",
           "of the run on the simulated devices"),
    Column("time", "time", SECONDS, ("total", "seconds"), "lowest", "of the run on this machine"),
)  # fmt: skip
COLUMNS: Mapping[str, Column] = {column.name: column for column in _DECLARED}


def metric_params(metric: str) -> type[MetricParams]:
    """Return a metric's parameter table; that of any metric if its plug-in is not loaded."""
    entry = METRICS.get(metric)
    params: type[MetricParams] = entry.params if entry is not None else MetricParams  # type: ignore[assignment]
    return params


def metric_title(metric: str, key: str = "") -> str:
    """Return the name of a metric, or of one of its values, in words: ``local accuracy worst 10 percent``."""
    return " ".join(name.replace("_", " ") for name in (metric, key) if name)


def metric_unit(metric: str, key: str) -> Unit:
    """Return how a value of a metric is printed."""
    return PERCENT if key in metric_params(metric).fractions else NUMBER


def shown_values(metric: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a metric that tables show."""
    shown = metric_params(metric).shown
    return {
        key: value
        for key, value in values.items()
        if key != UNAVAILABLE and (key in shown if shown else isinstance(value, int | float))
    }


def shown_numbers(metric: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values that tables show."""
    return {key: value for key, value in shown_values(metric, values).items() if isinstance(value, int | float)}


def metric_text(metric: str, values: Mapping[str, Any]) -> str:
    """Return a metric's values in one line; the reason if it could not be measured."""
    if UNAVAILABLE in values:
        return f"not measured: {values[UNAVAILABLE]}"
    parts = []
    for key, value in shown_values(metric, values).items():
        if isinstance(value, int | float):
            number = metric_unit(metric, key).spread(MeanStd(value, None), with_name=True)
            parts.append(f"{key.replace('_', ' ')} {number}")
        elif value:
            parts.append("; ".join(map(str, value)) if isinstance(value, list) else str(value))
    return ", ".join(parts) or UNKNOWN


def columns_of(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """Return every column that a table of runs may have, by name: ``metrics.NAME.VALUE`` for those of metrics."""
    measured = {
        (metric, key)
        for summary in summaries
        for metric, values in summary.get("metrics", {}).items()
        for key, value in values.items()
        if isinstance(value, int | float)
    }
    of_metrics = [
        Column(".".join(path), metric_title(*path[1:]), metric_unit(*path[1:]), path, None, "after the last round")
        for path in [("metrics", *names) for names in sorted(measured)]
    ]
    return {**COLUMNS, **{column.name: column for column in of_metrics}}


def metric_columns(summaries: Iterable[Mapping[str, Any]]) -> list[Column]:
    """Return the numbers of the metrics that runs were configured with."""
    shown: dict[tuple[str, str], None] = {}
    for summary in summaries:
        for metric, values in summary.get("metrics", {}).items():
            shown |= dict.fromkeys((metric, key) for key in shown_numbers(metric, values))
    meaning = "after the last round"
    return [
        Column(key.replace("_", " "), metric_title(metric, key), unit, ("metrics", metric, key), None, meaning)
        for metric, key in shown
        for unit in [metric_unit(metric, key)]
    ]


# Keys that change how a run trains or what it keeps, but not the images that its accuracies are measured on.
_TRAINING_KEYS = ("augment", "dir")
_TASK_TRAINING_KEYS = ("rounds_per_task", "keep_models")


def comparable_rows(groups: Sequence[RunGroup]) -> list[int]:
    """Return a number for each row; rows with the same number were measured on the same images in the same way."""
    keys = [_evaluation(group.runs[0]) for group in groups]
    return [keys.index(key) for key in keys]


def _evaluation(run: RunData) -> str:
    data: dict[str, Any] = {key: value for key, value in run.config["data"].items() if key not in _TRAINING_KEYS}
    if tasks := data.get("tasks"):
        data["tasks"] = {key: value for key, value in tasks.items() if key not in _TASK_TRAINING_KEYS}
    fleet = run.config["fleet"]
    return json.dumps([data, fleet["clients"], fleet.get("held_out", 0.0), fleet["kind"]], sort_keys=True)


def best_rows(
    best: Literal["highest", "lowest"] | None, means: Sequence[float | None], unit: Unit, comparable: Sequence[int]
) -> frozenset[int]:
    """Return the rows with the best mean among those that are comparable with them, see :func:`comparable_rows`.

    Means that print the same are equal: all rows that share the best one are returned, and none where all have it.
    """
    found: set[int] = set()
    for number in set(comparable) if best else ():
        known = {row: mean for row, mean in enumerate(means) if comparable[row] == number and mean is not None}
        texts = {row: unit.text(mean) for row, mean in known.items()}
        if len(set(texts.values())) > 1:
            winner = unit.text((max if best == "highest" else min)(known.values()))
            found |= {row for row, text in texts.items() if text == winner}
    return frozenset(found)
