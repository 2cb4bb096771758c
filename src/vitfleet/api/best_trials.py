"""The best trial of each configuration of a finished sweep, by its accuracy on held-out training images."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitfleet.api.frames import flatten
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.files import read_json
from vitfleet.run.compare import MANIFEST, ComparedRun, read_members


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
        Those of them whose value is the smallest or the largest number that was tried.
    """

    name: str
    config: Config
    accuracy: float
    trials: int
    values: Mapping[str, Any]
    at_edge: tuple[str, ...]


@dataclass(frozen=True)
class _Trial:
    """One configuration, without its seed as a flat table, and the accuracy of each of its runs."""

    config: Config
    keys: Mapping[str, Any]
    accuracies: list[float]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)


def best_trials(path: str | Path) -> list[BestTrial]:
    """Return the best trial of each configuration of a comparison.

    Raises
    ------
    UserError
        If there is no comparison, if a run is not finished, or if accuracies are those of test images: a setting that
        was chosen on them makes the final accuracy too good.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path}: holds no comparison (there is no {MANIFEST} in it)")
    groups: dict[str, dict[str, _Trial]] = {}
    for member in read_members(path):
        accuracy = _validation_accuracy(path, member)
        config = member.config.model_copy(update={"seed": 0})
        trial = _Trial(member.config, flatten(config.model_dump(mode="json")), [])
        group = groups.setdefault(member.group or member.name, {})
        group.setdefault(config.model_dump_json(), trial).accuracies.append(accuracy)
    return [_best(name, list(trials.values())) for name, trials in groups.items()]


def _validation_accuracy(path: Path, member: ComparedRun) -> float:
    """Return the accuracy of a run that tells which trial is better."""
    if member.config.data.eval_split != "validation":
        raise UserError(
            f"{path}: its accuracies are those of the test images, on which nothing may be chosen; repeat it with "
            "-o data.validation=0.1"
        )
    summary_path = member.folder(path) / "summary.json"
    if not summary_path.is_file():
        raise UserError(f"{path}: {member.name} is not finished; `vitfleet resume {path}` resumes the comparison")
    summary = read_json(summary_path)
    if "continual" in summary:
        found = summary["continual"]["average_accuracy"] / 100
    else:
        accuracy = summary["accuracy"]
        found = accuracy["local"] if accuracy["global"] is None else accuracy["global"]
    if found is None:
        raise UserError(f"{path}: {member.name} has no accuracy; see eval.every and eval.clients")
    return float(found)


def _best(name: str, trials: Sequence[_Trial]) -> BestTrial:
    best = max(trials, key=lambda trial: trial.accuracy)  # the first of several
    differing = [key for key in best.keys if any(trial.keys.get(key) != best.keys[key] for trial in trials)]
    values = {key: best.keys[key] for key in differing}
    return BestTrial(
        name,
        best.config,
        best.accuracy,
        len(trials),
        values,
        tuple(key for key in values if _at_edge(key, best, trials)),
    )


def _at_edge(key: str, best: _Trial, trials: Sequence[_Trial]) -> bool:
    """Whether a trial has the smallest or the largest of the numbers that were tried for a key."""
    tried = [trial.keys.get(key) for trial in trials]
    numbers = [value for value in tried if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(tried) and best.keys[key] in (min(numbers), max(numbers))
