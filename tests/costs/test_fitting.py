"""What would fit into a device that cannot hold a training, and how the costs are printed."""

from __future__ import annotations

from typing import get_args

import pytest
from rich.console import Console

from vitfleet.config import load_config
from vitfleet.config.fleet import DeviceName
from vitfleet.costs.fitting import find_remedies, largest_batch
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, select_devices
from vitfleet.costs.report import cost_reports, training_bytes
from vitfleet.errors import UserError
from vitfleet.report.console.costs import MAX_DEVICE_COLUMNS, print_costs

BIG_VIT = ["model.dim=512", "model.depth=2", "model.image_size=128", "model.patch_size=8", "train.batch_size=96"]


def test_largest_batch_is_on_the_line_between_one_image_and_the_whole_batch() -> None:
    assert largest_batch(100, 100 + 31 * 10, 32, free=255) == 16  # 100 + 15 · 10 = 250
    assert largest_batch(100, 410, 32, free=100) == 1
    assert largest_batch(100, 410, 32, free=99) is None
    assert largest_batch(100, 410, 32, free=1000) == 32
    assert largest_batch(None, 410, 32, free=1000) is None


def test_every_remedy_fits_and_the_configuration_as_it_is_does_not() -> None:
    """Each suggested change is made, and the memory of that training is computed anew."""
    config = load_config("digits", BIG_VIT)
    reports = list(cost_reports(config, ["fedavg", "fed-head"]))
    (remedy,) = find_remedies(config, reports, ["pi4-2gb", "orin-agx"])
    assert remedy.device == "pi4-2gb"
    holds = HARDWARE_PROFILES["pi4-2gb"].holds
    assert not holds(training_bytes(config))
    assert remedy.batch_size is not None
    assert 1 < remedy.batch_size < 96
    assert holds(training_bytes(load_config("digits", [*BIG_VIT, f"train.batch_size={remedy.batch_size}"])))
    assert not holds(training_bytes(load_config("digits", [*BIG_VIT, f"train.batch_size={2 * remedy.batch_size}"])))
    assert remedy.mask_ratio is not None
    assert holds(training_bytes(load_config("digits", [*BIG_VIT, f"train.mask_ratio={remedy.mask_ratio}"])))
    assert remedy.methods == ("fed-head",)


def test_devices_are_selected_by_name_or_by_its_beginning() -> None:
    assert select_devices(["nano", "pi4"]) == ["nano", "pi4-2gb", "pi4-4gb", "pi4-8gb"]
    assert select_devices(["orin"]) == ["orin-nano", "orin-nx", "orin-agx"]
    assert select_devices(list(HARDWARE_PROFILES)) == list(get_args(DeviceName))
    with pytest.raises(UserError, match="--device pi5: no such device; there are nano, tx2"):
        select_devices(["pi5"])


def test_costs_are_printed_in_80_columns_and_every_column_is_explained() -> None:
    config = load_config("digits", BIG_VIT)
    devices = select_devices(["pi4", "nano", "orin"])
    assert len(devices) == MAX_DEVICE_COLUMNS
    reports = list(cost_reports(config, ["fedavg", "fed-head"]))
    console = Console(width=80, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as printed:
        print_costs(console, reports, devices, find_remedies(config, reports, devices))
    text = printed.get()
    assert "…" not in text  # nothing is cut off
    headings = ("GMACs", "GFLOPs", "ratio", "trained", "memory", "upload", "download", "once", "training", "per round")
    for heading in headings:
        assert len([line for line in text.splitlines() if heading in line]) >= 2, f"{heading} is not explained"
    assert "fedavg does not fit into: Raspberry Pi 4B, 2 GB. Each of these would:" in text
    assert "  another method: fed-head" in text
