"""The values of a sweep that are best on held-out training images, and a comparison with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vitfleet
from vitfleet.api.best_trials import best_trials
from vitfleet.api.comparison import Comparison, create
from vitfleet.config.schema import Config
from vitfleet.errors import UserError

RATES = {"train.lr": [1e-3, 2e-3, 4e-3]}
HELD_OUT = {"data.validation": 0.2, "rounds": 3}


def finish(comparison: Comparison, accuracies: dict[str, float | None], kind: str = "global") -> None:
    """Write the summary of each run, with its accuracy by the name of its folder."""
    for member in comparison.members:
        folder = member.folder(comparison.path)
        folder.mkdir()
        summary: dict[str, Any] = {"accuracy": {"global": None, "local": None, kind: accuracies[folder.name]}}
        (folder / "summary.json").write_text(json.dumps(summary))


def search(path: Path, **arguments: Any) -> Comparison:
    """Create the comparison of two methods with three rates each."""
    arguments = {"methods": ["fedavg", "fed-head"], "sweep": RATES, "overrides": HELD_OUT, **arguments}
    return create("digits", out=path, **arguments)[0]


def rates(comparison: Comparison) -> dict[tuple[str, int], float]:
    return {(member.name, member.config.seed): member.config.train.lr for member in comparison.members}


def without_seed(config: Config) -> dict[str, Any]:
    tree = config.model_dump(exclude={"seed"})
    return {**tree, "data": {**tree["data"], "validation": None}}


def test_each_method_gets_its_best_value(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search")
    names = [f"{method} lr={rate}-s0" for method in ("fedavg", "fed-head") for rate in (0.001, 0.002, 0.004)]
    finish(comparison, dict(zip(names, [0.5, 0.7, 0.6, 0.2, 0.3, 0.4], strict=True)))
    average, head = comparison.best_trials()
    assert (average.name, average.trials, average.accuracy, average.values) == ("fedavg", 3, 0.7, {"train.lr": 2e-3})
    assert (head.name, head.trials, head.accuracy, head.values) == ("fed-head", 3, 0.4, {"train.lr": 4e-3})
    assert not average.at_edge
    assert head.at_edge == ("train.lr",)  # a larger one may be better still

    final, _ = create(best_of=comparison.path, seeds=[0, 1], overrides={"rounds": 9}, out=tmp_path / "final")
    assert rates(final) == {("fedavg", 0): 2e-3, ("fed-head", 0): 4e-3, ("fedavg", 1): 2e-3, ("fed-head", 1): 4e-3}
    for member in final.members:
        assert member.config.data.eval_split == "test"
        assert member.config.rounds == 9
        origin = (average if member.name == "fedavg" else head).config.model_copy(update={"rounds": 9})
        assert without_seed(member.config) == without_seed(origin)


def test_the_mean_over_seeds_decides(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search", methods=(), seeds=[0, 1], sweep={"train.lr": [1e-3, 2e-3]})
    accuracies: dict[str, float | None] = {
        "digits lr=0.001-s0": 0.9,
        "digits lr=0.001-s1": 0.1,
        "digits lr=0.002-s0": 0.6,
        "digits lr=0.002-s1": 0.6,
    }
    finish(comparison, accuracies)
    (best,) = best_trials(comparison.path)
    assert (best.values, best.trials) == ({"train.lr": 2e-3}, 2)
    assert best.accuracy == pytest.approx(0.6)


def test_variants_of_a_method_are_not_trials_of_each_other(tmp_path: Path) -> None:
    methods = ["fedprox mu=0.1", "fedprox mu=1.0"]
    comparison = search(tmp_path / "search", methods=methods, sweep={"train.optimizer": ["sgd", "adamw"]})
    names = [member.folder(comparison.path).name for member in comparison.members]
    finish(comparison, dict(zip(names, [0.1, 0.2, 0.4, 0.3], strict=True)), kind="local")  # no global model
    found = {best.name: best for best in best_trials(comparison.path)}
    assert {name: best.values for name, best in found.items()} == {
        "fedprox mu=0.1": {"train.optimizer": "adamw"},
        "fedprox mu=1.0": {"train.optimizer": "sgd"},
    }
    assert not any(best.at_edge for best in found.values())  # words have no order


def test_methods_on_tasks_are_judged_after_all_tasks(tmp_path: Path) -> None:
    comparison, _ = create(
        "fedvit-digits", sweep={"method.margin": [0.0, 0.5]}, overrides=["data.validation=0.2"], out=tmp_path / "search"
    )
    for member, reached in zip(comparison.members, (70.0, 80.0), strict=True):
        folder = member.folder(comparison.path)
        folder.mkdir()
        summary = {"accuracy": {"global": None, "local": 0.9}, "continual": {"average_accuracy": reached}}
        (folder / "summary.json").write_text(json.dumps(summary))
    (best,) = best_trials(comparison.path)
    assert best.values == {"method.margin": 0.5}
    assert best.accuracy == pytest.approx(0.8)


def test_nothing_is_chosen_on_test_images(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search", overrides={"rounds": 3})
    finish(comparison, {member.folder(comparison.path).name: 0.5 for member in comparison.members})
    with pytest.raises(UserError, match=r"those of the test images.*-o data\.validation=0\.1"):
        create(best_of=comparison.path, out=tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search")
    with pytest.raises(UserError, match=r"fedavg lr=0\.001 is not finished; `vitfleet resume .*search`"):
        comparison.best_trials()
    finish(comparison, {member.folder(comparison.path).name: None for member in comparison.members})
    with pytest.raises(UserError, match="has no accuracy"):
        comparison.best_trials()
    with pytest.raises(UserError, match="holds no comparison"):
        vitfleet.compare(best_of=tmp_path / "nothing")
    with pytest.raises(UserError, match="brings its own configurations"):
        vitfleet.compare("digits", best_of=comparison.path)
