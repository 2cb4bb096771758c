from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from vitfleet.config.fleet import DeviceName
from vitfleet.costs.hardware_profiles import GIB, HARDWARE_PROFILES, RoundWorkload, assign_hardware, workload_seconds

PAPER: dict[DeviceName, int] = {"agx": 2, "tx2": 2, "nx": 8, "nano": 8}


def test_every_device_that_can_be_named_has_a_profile_with_its_source() -> None:
    assert set(HARDWARE_PROFILES) == set(get_args(DeviceName))
    assert all(device.source for device in HARDWARE_PROFILES.values())


def test_the_papers_fleet_is_dealt_as_it_is() -> None:
    assert Counter(assign_hardware(PAPER, 20, seed=0)) == PAPER
    assert Counter(assign_hardware({**PAPER, "pi4-4gb": 10}, 30, seed=0)) == {**PAPER, "pi4-4gb": 10}


def test_a_mix_is_kept_in_proportion_and_shuffled_by_the_seed() -> None:
    dealt = assign_hardware(PAPER, 103, seed=0)
    assert len(dealt) == 103
    counts = Counter(dealt)
    assert all(abs(counts[name] - 103 * share / 20) < 1 for name, share in PAPER.items())
    assert dealt == assign_hardware(PAPER, 103, seed=0)
    assert dealt != assign_hardware(PAPER, 103, seed=1)
    assert dealt != sorted(dealt)


def test_a_trip_is_receiving_training_and_sending() -> None:
    nano = HARDWARE_PROFILES["nano"]
    rate = nano.peak_gflops * nano.utilisation * 1e9
    workload = RoundWorkload(down_bytes=3_000_000, flops=int(10 * rate), up_bytes=2_000_000)
    assert workload_seconds(nano, workload) == pytest.approx(3 + 10 + 2)
    assert workload_seconds(nano, workload, bandwidth=100_000) == pytest.approx(30 + 10 + 20)


def test_a_raspberry_is_as_much_slower_than_a_nano_as_fedvit_reports() -> None:
    assert HARDWARE_PROFILES["nano"].gflops / HARDWARE_PROFILES["pi4-4gb"].gflops == pytest.approx(6.5, rel=0.02)


def test_the_system_needs_memory_too() -> None:
    assert HARDWARE_PROFILES["pi4-2gb"].holds(int(1.3 * GIB))
    assert not HARDWARE_PROFILES["pi4-2gb"].holds(int(1.5 * GIB))
