"""Comparisons through the public API: variants, sweeps, the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitfleet
from vitfleet.api.request import combinations, variants
from vitfleet.cli.compare import parse_sweep
from vitfleet.errors import UserError

SMALL: dict[str, Any] = {"rounds": 1, "fleet.clients": 4, "fleet.per_round": 2, "data.limit": 200, "train.epochs": 1}


def test_sweep_has_every_combination() -> None:
    assert combinations({}) == [("", {})]
    assert combinations(parse_sweep(["method.k=1,2", "train.lr=1e-3, 1e-4"])) == [
        ("k=1 lr=0.001", {"method.k": 1, "train.lr": 1e-3}),
        ("k=1 lr=0.0001", {"method.k": 1, "train.lr": 1e-4}),
        ("k=2 lr=0.001", {"method.k": 2, "train.lr": 1e-3}),
        ("k=2 lr=0.0001", {"method.k": 2, "train.lr": 1e-4}),
    ]
    with pytest.raises(UserError, match="has no values"):
        combinations({"method.k": []})


@pytest.mark.parametrize("wrong", ["k", "=1,2", "method.k=1,,2", "method.k="])
def test_sweep_of_another_form_is_rejected(wrong: str) -> None:
    with pytest.raises(UserError, match="must look like key=value,value"):
        parse_sweep([wrong])


def test_variants_name_methods_and_their_own_keys() -> None:
    assert variants([]) == [("", {})]
    assert variants(["fedavg", "fed-full train.lr=3e-4 train.mask_ratio=0", {"name": "fedprox", "mu": 0.1}]) == [
        ("fedavg", {"method.name": "fedavg"}),
        ("fed-full", {"method.name": "fed-full", "train.lr": 3e-4, "train.mask_ratio": 0}),
        ("fedprox", {"method.name": "fedprox", "method.mu": 0.1}),
    ]
    assert variants(["fedprox mu=0.1"]) == [("fedprox", {"method.name": "fedprox", "method.mu": 0.1})]
    several = variants(["fedvit", "fedvit method.tune_epochs=0", "gem"])
    assert [name for name, _ in several] == ["fedvit", "fedvit tune_epochs=0", "gem"]


@pytest.mark.parametrize("wrong", ["train.lr=1", "fedavg lr", ""])
def test_variant_of_another_form_is_rejected(wrong: str) -> None:
    with pytest.raises(UserError, match="must be a method's name, and key=value after it"):
        variants([wrong])


@pytest.mark.usefixtures("without_figure_files")
def test_table_has_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    comparison = vitfleet.compare(
        "digits", methods=["fedavg", "standalone"], seeds=[0, 1], overrides=SMALL, out=tmp_path / "both"
    )
    table = comparison.table.set_index("name")
    assert list(table.index) == ["fedavg", "standalone"]
    assert (table["runs"] == 2).all()
    accuracies = [run.summary["accuracy"]["global"] for run in comparison.runs if run.config.method.name == "fedavg"]
    assert table.loc["fedavg", "accuracy.global.mean"] == pytest.approx(sum(accuracies) / 2)
    assert table.loc["fedavg", "accuracy.global.std"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    assert comparison.report().is_file()
    assert "fedavg, standalone" in repr(vitfleet.load_comparison(tmp_path / "both"))


@pytest.mark.usefixtures("without_figure_files")
def test_table_is_a_list_of_rows_without_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = vitfleet.train("digits", overrides=SMALL, out=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [row["round"] for row in run.records] == [1]
    assert {row["client"] for row in run.clients} <= set(range(4))


@pytest.mark.parametrize(("jobs", "says"), [(0, "must be at least 1"), (2, "must be 1 with data from Python")])
def test_impossible_jobs_leave_no_folder(jobs: int, says: str, tmp_path: Path) -> None:
    data = (np.zeros((20, 1, 8, 8), np.uint8), np.arange(20) % 2)
    with pytest.raises(UserError, match=rf"jobs = {jobs}: {says}"):
        vitfleet.compare("digits", data=data, jobs=jobs, out=tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_nothing_to_compare_is_rejected() -> None:
    with pytest.raises(UserError, match="name at least one configuration"):
        vitfleet.compare([])
