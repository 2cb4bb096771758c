from __future__ import annotations

from pathlib import Path

import pytest

from conftest import MakeConfig
from vitfleet.config import load_config
from vitfleet.config.plugins import load_file
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


FEDBFPT = ["method.name=fedbfpt", "method.local_layers=3", "method.keep_last=1"]


def test_more_passes_are_more_operations_per_image_and_per_round() -> None:
    """MOON's step passes each image through two more models; FEDBFPT measures the features' mean by two more passes."""
    load_file(Path(__file__).parents[2] / "examples" / "methods" / "moon.py")
    fedavg, moon = cost_reports(load_config("digits"), ["fedavg", "moon"])
    assert moon.train_gflops == pytest.approx(fedavg.train_gflops * 5 / 3, rel=0.01)
    assert moon.round_gflops == pytest.approx(fedavg.round_gflops * 5 / 3, rel=0.01)
    (plain,) = cost_reports(load_config("digits", FEDBFPT), ["fedbfpt"])
    (centred,) = cost_reports(load_config("digits", [*FEDBFPT, "method.center_features=true"]), ["fedbfpt"])
    assert centred.train_gflops > plain.train_gflops
    assert centred.round_gflops > plain.round_gflops
    for report in (plain, centred):
        assert report.round_gflops == pytest.approx(3 * report.samples * report.train_gflops)  # train.epochs = 3


COMBINES = """
from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.message import Message
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.methods.base import ClientUpdate, train_metrics
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.step import cross_entropy_step
import torch


@register_method("combines", MethodParams)
class Combines(WeightAveraging[MethodParams]):
    def client_update(self, job):
        received = {**job.base_weights, **job.message.tensors}
        kept = {name: torch.zeros_like(received[name]) for name in self.trainable.names}
        result = yield LocalTraining(received, self.trainable, 1, cross_entropy_step, kept=kept)
        weights = {name: weight + result.kept[name] for name, weight in result.weights.items()}
        return ClientUpdate(Message(weights, train_metrics(result)), weights)
"""


def test_a_plugin_that_mixes_what_has_values_with_what_has_none_is_told_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "combines.py").write_text(COMBINES)
    load_file(tmp_path / "combines.py")
    with pytest.raises(UserError, match=r"method combines: .*kept\.to\(weight\.device\)") as refused:
        list(cost_reports(load_config("digits"), ["combines"]))
    assert "\n" not in str(refused.value)
