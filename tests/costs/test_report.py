from __future__ import annotations

import pytest

from conftest import MakeConfig
from vitfleet.config import load_config
from vitfleet.config.registry import DATASETS, METHODS
from vitfleet.costs.dataset_size import DATASET_SIZES
from vitfleet.costs.report import cost_reports
from vitfleet.errors import UserError


def test_cost_reports_yields_configured_method_first_then_all_supported() -> None:
    reports = list(cost_reports(load_config("digits", ["method.name=fed-head", "model.weights=digits"])))
    # FEDBFPT needs six layers by default, the model for digits has four.
    need_tasks = {entry.name for entry in METHODS if entry.target.needs_tasks}
    assert {"gem", "fedvit", "ewc"} < need_tasks
    assert {report.method for report in reports} == set(METHODS.names()) - {"fedbfpt"} - need_tasks
    assert reports[0].method == "fed-head"
    costs = {report.method: report for report in reports}
    assert costs["fed-full"].train_ratio_to_full == 1
    assert costs["eftvit"].mask_ratio == 0.75
    assert costs["fed-full"].mask_ratio == 0
    assert costs["fed-head"].up_bytes < costs["transfl"].up_bytes < costs["fedavg"].up_bytes
    assert costs["standalone"].down_bytes == 0
    for report in reports:
        assert sum(report.memory.values()) == report.peak_memory_bytes
        assert report.samples > 0
        assert report.trainable_params <= report.params
        assert (report.trainable_params == 0) == (report.method == "closed-form")


def test_eftvit_cost_report_matches_the_paper() -> None:
    (report,) = cost_reports(load_config("eftvit-cifar100"), ["eftvit"])
    assert report.forward_gmac == pytest.approx(4.322, rel=0.005)
    assert report.train_ratio_to_full == pytest.approx(5.63, abs=0.05)
    assert report.devices["pi4-2gb"]["fits_memory"]
    (full,) = cost_reports(load_config("eftvit-cifar100"), ["fed-full"])
    assert not full.devices["pi4-4gb"]["fits_memory"]
    assert full.devices["pi4-4gb"]["megabytes_a_day"] == 0
    assert full.forward_gmac == pytest.approx(17.563, rel=0.005)
    ratio = full.devices["nano"]["round_seconds"] / report.devices["nano"]["round_seconds"]
    assert 4 < ratio < 6  # a round also includes communication, which is not proportional to the operations


def test_cost_report_with_tasks_describes_one_task() -> None:
    (report,) = cost_reports(load_config("fedvit-cifar100"), ["fedvit"])
    assert report.up_bytes == pytest.approx(4 * 2_691_648, rel=0.01)  # the body is sent, the head is not
    assert 100 < report.samples < 500


def test_dataset_sizes_cover_every_built_in_data_set() -> None:
    assert set(DATASET_SIZES) == {entry.name for entry in DATASETS if entry.origin.built_in}


def test_cost_reports_rejects_unknown_method(tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match="--method fedsgd: no such method"):
        list(cost_reports(tiny_config(), ["fedsgd"]))
