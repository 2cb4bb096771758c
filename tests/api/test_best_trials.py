"""The values of a sweep that are best on held-out training images, and a comparison with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from vitfleet.api.best_trials import best_trials
from vitfleet.api.comparison import Comparison, compare, create
from vitfleet.api.request import ComparisonRequest
from vitfleet.config.schema import Config
from vitfleet.errors import UserError

RATES = {"train.lr": [1e-3, 2e-3, 4e-3]}
HELD_OUT = {"data.validation": 0.2, "rounds": 3}


def finish(comparison: Comparison, accuracies: dict[str, float | None], kind: str = "global") -> None:
    """Write the summary of each run, with its accuracy by the name of its folder."""
    for member in comparison.members:
        folder = member.folder(comparison.path)
        folder.mkdir()
        accuracy = {"global": None, "local": None, kind: accuracies[folder.name]}
        summary = {"accuracy": accuracy, "loss": {"train": 1.0}, "continual": None}
        (folder / "summary.json").write_text(json.dumps(summary))


def search(path: Path, **arguments: Any) -> Comparison:
    """Create the comparison of two methods with three rates each."""
    arguments = {"methods": ["fedavg", "fed-head"], "sweep": RATES, "overrides": HELD_OUT, **arguments}
    return create(ComparisonRequest("digits", out=path, **arguments))[0]


def rates(comparison: Comparison) -> dict[tuple[str, int], float]:
    return {(member.name, member.config.seed): member.config.train.lr for member in comparison.members}


def without_seed(config: Config) -> dict[str, Any]:
    tree = config.model_dump(exclude={"seed"})
    return {**tree, "data": {**tree["data"], "validation": None}}


def test_each_method_gets_its_best_value(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search")
    names = [f"{method}-lr={rate}-s0" for method in ("fedavg", "fed-head") for rate in (0.001, 0.002, 0.004)]
    finish(comparison, dict(zip(names, [0.5, 0.7, 0.6, 0.2, 0.3, 0.4], strict=True)))
    average, head = comparison.best_trials()
    assert (average.name, average.trials, average.accuracy, average.values) == ("fedavg", 3, 0.7, {"train.lr": 2e-3})
    assert (head.name, head.trials, head.accuracy, head.values) == ("fed-head", 3, 0.4, {"train.lr": 4e-3})
    assert not average.at_edge
    assert head.at_edge == ("train.lr",)  # a larger one may be better still

    assert not average.tied
    assert not head.tied

    final, _ = create(
        ComparisonRequest(best_of=comparison.path, seeds=[0, 1], overrides={"rounds": 9}, out=tmp_path / "final")
    )
    assert rates(final) == {("fedavg", 0): 2e-3, ("fed-head", 0): 4e-3, ("fedavg", 1): 2e-3, ("fed-head", 1): 4e-3}
    for member in final.members:
        assert member.config.data.eval_split == "test"
        assert member.config.rounds == 9
        origin = (average if member.name == "fedavg" else head).config.model_copy(update={"rounds": 9})
        assert without_seed(member.config) == without_seed(origin)
    origin_of_values = final.best_of
    assert origin_of_values is not None
    assert origin_of_values["comparison"] == str(comparison.path)
    assert [trial["accuracy"] for trial in origin_of_values["trials"]] == [0.7, 0.4]
    assert comparison.best_of is None


@pytest.mark.parametrize("key", ["train.lr", "data.validation"])
def test_what_was_chosen_cannot_be_overridden(key: str, tmp_path: Path) -> None:
    comparison = search(tmp_path / "search")
    finish(comparison, {member.folder(comparison.path).name: 0.5 for member in comparison.members})
    assert all(best.tied for best in comparison.best_trials())
    with pytest.raises(UserError, match=f"{key}: is set by the best trial of fedavg; leave it out"):
        create(ComparisonRequest(best_of=comparison.path, overrides={key: 0.1}, out=tmp_path / "final"))


def test_a_trial_that_diverged_is_not_chosen(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search", methods=())
    names = [member.folder(comparison.path).name for member in comparison.members]
    finish(comparison, dict(zip(names, [0.1, 0.9, float("nan")], strict=True)))
    path = comparison.path / names[1] / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "loss": {"train": None}}))  # no update of the last round was used
    (best,) = comparison.best_trials()
    assert best.values == {"train.lr": 1e-3}
    path = comparison.path / names[0] / "summary.json"
    path.write_text(json.dumps({**summary, "loss": {"train": None}}))
    with pytest.raises(UserError, match="diverged with every value"):
        comparison.best_trials()


def test_a_trial_whose_clients_train_nothing_has_not_diverged(tmp_path: Path) -> None:
    keys = {"method.local_rounds": 0, "method.train_head": False, "machine.threads": 1}
    comparison = compare(
        "eftvit-digits", sweep={"train.lr": [1e-3, 1e-5]}, overrides={**HELD_OUT, **keys}, out=tmp_path
    )
    losses = [json.loads(path.read_text())["loss"]["train"] for path in sorted(tmp_path.glob("*/summary.json"))]
    assert losses == [None, None]
    (best,) = comparison.best_trials()
    assert best.values == {"train.lr": 1e-3}


def test_two_values_have_no_edge(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search", methods=(), sweep={"train.lr": [1e-3, 2e-3]})
    names = [member.folder(comparison.path).name for member in comparison.members]
    finish(comparison, dict(zip(names, [0.1, 0.9], strict=True)))
    assert comparison.best_trials()[0].at_edge == ()


@pytest.mark.parametrize("sweep", [{}, {"data.validation": [0.1, 0.2]}])
def test_a_comparison_without_a_sweep_on_the_same_images_is_rejected(sweep: dict[str, Any], tmp_path: Path) -> None:
    comparison = search(tmp_path / "search", sweep=sweep)
    finish(comparison, {member.folder(comparison.path).name: 0.5 for member in comparison.members})
    with pytest.raises(UserError, match="data.validation was swept" if sweep else "nothing was swept in it"):
        comparison.best_trials()


def test_a_comparison_of_an_older_version_is_rejected(tmp_path: Path) -> None:
    """It does not say what was swept: each of its runs would be a method of its own, measured on the test images."""
    comparison = search(tmp_path / "search")
    finish(comparison, {member.folder(comparison.path).name: 0.5 for member in comparison.members})
    manifest = comparison.path / "compare.json"
    tree = json.loads(manifest.read_text())
    for member in tree["members"]:
        del member["group"], member["swept"]
    manifest.write_text(json.dumps(tree))
    with pytest.raises(UserError, match="nothing was swept in it"):
        comparison.best_trials()


@pytest.mark.usefixtures("without_figure_files")
def test_the_command_prints_what_was_best(vitfleet: Command, tmp_path: Path) -> None:
    swept = [
        "-s",
        "train.lr=1e-9,1e-8,3e-3",
        "-o",
        "data.validation=0.2",
        "-o",
        "rounds=3",
        "-o",
        "data.limit=500",
        "--out",
        "search",
    ]
    result = vitfleet(tmp_path, "compare", "digits", "--method", "fedavg", *swept)
    assert result.returncode == 0, result.stderr
    final = vitfleet(tmp_path, "compare", "--best-of", "search", "--out", "final")
    assert final.returncode == 0, final.stderr
    assert re.search(r"FedAvg: train\.lr = 0\.003 \(best of 3 trials, [\d.]+% on held-out images\)", final.stdout)
    assert "note: FedAvg: train.lr is at the edge of what was tried; try a wider range" in final.stderr
    assert {member.config.data.eval_split for member in Comparison(tmp_path / "final").members} == {"test"}
    wrong = vitfleet(tmp_path, "compare", "digits", "--best-of", "search", "--out", "other")
    assert wrong.returncode == 2
    assert "leave them out" in wrong.stderr
    assert "held-out" not in wrong.stdout


def test_the_mean_over_seeds_decides(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search", methods=(), seeds=[0, 1], sweep={"train.lr": [1e-3, 2e-3]})
    accuracies: dict[str, float | None] = {
        "digits-lr=0.001-s0": 0.9,
        "digits-lr=0.001-s1": 0.1,
        "digits-lr=0.002-s0": 0.6,
        "digits-lr=0.002-s1": 0.6,
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
    request = ComparisonRequest(
        "fedvit-digits", sweep={"method.margin": [0.0, 0.5]}, overrides=["data.validation=0.2"], out=tmp_path / "search"
    )
    comparison, _ = create(request)
    for member, reached in zip(comparison.members, (0.7, 0.8), strict=True):
        folder = member.folder(comparison.path)
        folder.mkdir()
        accuracy = {"global": None, "local": 0.9}
        summary = {"accuracy": accuracy, "loss": {"train": 1.0}, "continual": {"average_accuracy": reached}}
        (folder / "summary.json").write_text(json.dumps(summary))
    (best,) = best_trials(comparison.path)
    assert best.values == {"method.margin": 0.5}
    assert best.accuracy == pytest.approx(0.8)


def test_nothing_is_chosen_on_test_images(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search", overrides={"rounds": 3})
    finish(comparison, {member.folder(comparison.path).name: 0.5 for member in comparison.members})
    with pytest.raises(UserError, match=r"those of the test images.*-o data\.validation=0\.1"):
        create(ComparisonRequest(best_of=comparison.path, out=tmp_path / "final"))
    assert not (tmp_path / "final").exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    comparison = search(tmp_path / "search")
    with pytest.raises(UserError, match=r"fedavg lr=0\.001 is not finished; `vitfleet resume .*search`"):
        comparison.best_trials()
    finish(comparison, {member.folder(comparison.path).name: None for member in comparison.members})
    with pytest.raises(UserError, match="has no accuracy"):
        comparison.best_trials()
    with pytest.raises(UserError, match="contains no comparison"):
        compare(best_of=tmp_path / "nothing")
    with pytest.raises(UserError, match="leave them out"):
        compare("digits", best_of=comparison.path)
