"""The best trial of each configuration of a finished sweep, by its accuracy on held-out training images."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import COMPARISON_FILE
from vitfleet.run.comparison.manifest import ComparedRun, read_members
from vitfleet.run.output.summary import is_finished, read_summary
from vitfleet.run.records import read_records

MIN_RANGE = 3  # numbers that must have been tried for the smallest and the largest of them to be the edges of a range


@dataclass(frozen=True)
class BestTrial:
    """The best of the trials of one configuration, which differ in swept values only.

    Attributes
    ----------
    name
        What they are called without these values, for example the method's name.
    config
        The configuration of the best trial, with the seed of one of its runs.
    accuracy
        Its accuracy on held-out training images, 0…1, the mean over the seeds.
    trials
        Number of trials; runs with different seeds are one.
    values
        The keys that were swept, with the values of the best trial.
    at_edge
        Those of them whose value is the smallest or the largest of several numbers that were tried.
    tied
        Whether another trial was as good.
    """

    name: str
    config: Config
    accuracy: float
    trials: int
    values: Mapping[str, Any]
    at_edge: tuple[str, ...]
    tied: bool

    def as_tree(self) -> dict[str, Any]:
        """Return everything but the configuration as plain values."""
        return {key: value for key, value in vars(self).items() if key != "config"}


@dataclass(frozen=True)
class _Trial:
    """One configuration, and the accuracy of each of its runs."""

    member: ComparedRun
    accuracies: list[float] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)


def best_trials(path: str | Path) -> list[BestTrial]:
    """Return the best trial of each configuration of a finished comparison with a sweep and held-out images.

    A setting that was chosen on test images would make the final accuracy too good.
    """
    path = Path(path)
    if not (path / COMPARISON_FILE).is_file():
        raise UserError(f"{path}: contains no comparison (there is no {COMPARISON_FILE} in it)")
    groups: dict[str, dict[str, _Trial]] = {}
    for member in read_members(path):
        _check(path, member)
        trials = groups.setdefault(member.group, {})
        trials.setdefault(member.name, _Trial(member)).accuracies.append(_accuracy(path, member))
    return [_best(name, list(trials.values())) for name, trials in groups.items()]


def _check(path: Path, member: ComparedRun) -> None:
    """Reject a run that cannot be a trial."""
    if not member.swept:
        raise UserError(f"{path}: nothing was swept in it; repeat it with a sweep, for example -s train.lr=1e-3,3e-3")
    if "data.validation" in member.swept:
        raise UserError(f"{path}: data.validation was swept, so its runs were measured on different images")
    if member.config.data.eval_split != "validation":
        raise UserError(
            f"{path}: its accuracies are those of the test images, on which nothing may be chosen; repeat it with "
            "-o data.validation=0.1"
        )
    if not is_finished(member.folder(path)):
        raise UserError(f"{path}: {member.name} is not finished; `vitfleet resume {path}` resumes the comparison")


def _accuracy(path: Path, member: ComparedRun) -> float:
    """Return the accuracy of a run that tells which trial is better; −∞ if its training diverged."""
    summary = read_summary(member.folder(path))
    accuracy, continual = summary["accuracy"], summary.get("continual")
    if continual:
        found = continual["average_accuracy"]
    else:
        found = accuracy["local"] if accuracy["global"] is None else accuracy["global"]
    if found is None:
        raise UserError(f"{path}: {member.name} has no accuracy; see eval.every and eval.clients")
    # Clients that only compute features have no loss either.
    diverged = not math.isfinite(found) or (summary["loss"]["train"] is None and _last_round_failed(path, member))
    return -math.inf if diverged else float(found)


def _last_round_failed(path: Path, member: ComparedRun) -> bool:
    """Whether no update of a run's last round was used."""
    last_round = deque(read_records(member.folder(path)), maxlen=1)
    return all(client.failure is not None for record in last_round for client in record.clients)


def _best(name: str, trials: Sequence[_Trial]) -> BestTrial:
    best = max(trials, key=lambda trial: trial.accuracy)  # the first of several
    if best.accuracy == -math.inf:
        raise UserError(f"{name}: training diverged with every value that was tried; try others")
    values = best.member.swept
    at_edge = tuple(key for key in values if _is_at_edge(values[key], [trial.member.swept[key] for trial in trials]))
    tied = sum(trial.accuracy == best.accuracy for trial in trials) > 1
    return BestTrial(name, best.member.config, best.accuracy, len(trials), values, at_edge, tied)


def _is_at_edge(value: Any, tried: Sequence[Any]) -> bool:
    """Whether a value is the smallest or the largest of several numbers."""
    numbers = {number for number in tried if isinstance(number, int | float) and not isinstance(number, bool)}
    return len(numbers) >= MIN_RANGE and value in (min(numbers), max(numbers))
