from __future__ import annotations

import pytest

from conftest import MakeConfig
from vitfleet.config import load_config
from vitfleet.config.registry import DATASETS, METHODS
from vitfleet.costs.report import KNOWN_IMAGES, cost_reports
from vitfleet.errors import UserError


def test_every_method_that_suits_the_model_is_costed_the_own_one_first() -> None:
    sheets = list(cost_reports(load_config("digits", ["method.name=fed-head"])))
    # FEDBFPT wants six layers by default, the digits' model has four; some methods want tasks.
    assert {sheet.method for sheet in sheets} == set(METHODS.names()) - {"fedbfpt", "gem", "a-gem", "fedvit"}
    assert sheets[0].method == "fed-head"
    costs = {sheet.method: sheet for sheet in sheets}
    assert costs["fed-full"].train_ratio_to_full == 1
    assert costs["eftvit"].mask_ratio == 0.75
    assert costs["fed-full"].mask_ratio == 0
    assert costs["fed-head"].up_bytes < costs["transfl"].up_bytes < costs["fedavg"].up_bytes
    assert costs["standalone"].down_bytes == 0
    for sheet in sheets:
        assert sum(sheet.memory.values()) == sheet.peak_memory_bytes
        assert sheet.samples > 0
        assert 0 < sheet.trainable_params <= sheet.params


def test_eftvit_of_the_paper() -> None:
    (sheet,) = cost_reports(load_config("eftvit-cifar100"), ["eftvit"])
    assert sheet.forward_gmac == pytest.approx(4.322, rel=0.005)
    assert sheet.train_ratio_to_full == pytest.approx(5.63, abs=0.05)
    assert sheet.devices["pi4-2gb"]["fits_memory"]
    (full,) = cost_reports(load_config("eftvit-cifar100"), ["fed-full"])
    assert not full.devices["pi4-4gb"]["fits_memory"]
    assert full.devices["pi4-4gb"]["megabytes_a_day"] == 0
    assert full.forward_gmac == pytest.approx(17.563, rel=0.005)
    ratio = full.devices["nano"]["round_seconds"] / sheet.devices["nano"]["round_seconds"]
    assert 4 < ratio < 6  # a round is training and sending


def test_a_configuration_of_tasks_is_costed_by_one_task() -> None:
    (sheet,) = cost_reports(load_config("fedvit-cifar100"), ["fedvit"])
    assert sheet.up_bytes == pytest.approx(4 * 2_691_648, rel=0.01)  # the body travels, the head does not
    assert 100 < sheet.samples < 500


def test_sizes_of_every_named_set_are_known() -> None:
    assert set(KNOWN_IMAGES) == {entry.name for entry in DATASETS if entry.origin.built_in}


def test_an_unknown_method_is_said(tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match="--method fedsgd: no such method"):
        list(cost_reports(tiny_config(), ["fedsgd"]))
