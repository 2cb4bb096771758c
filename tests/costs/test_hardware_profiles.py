from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from vitfleet.config.fleet import DeviceName
from vitfleet.costs.hardware_profiles import GIB, HARDWARE_PROFILES, RoundWorkload, assign_hardware, workload_seconds

FEDVIT_MIX: dict[DeviceName, int] = {"agx": 2, "tx2": 2, "nx": 8, "nano": 8}


def test_every_device_name_has_a_profile_with_a_source() -> None:
    assert set(HARDWARE_PROFILES) == set(get_args(DeviceName))
    assert all(device.source for device in HARDWARE_PROFILES.values())


def test_assign_hardware_keeps_a_mix_of_the_fleets_size() -> None:
    assert Counter(assign_hardware(FEDVIT_MIX, 20, seed=0)) == FEDVIT_MIX
    assert Counter(assign_hardware({**FEDVIT_MIX, "pi4-4gb": 10}, 30, seed=0)) == {**FEDVIT_MIX, "pi4-4gb": 10}


def test_assign_hardware_keeps_proportions_and_shuffles_by_seed() -> None:
    assigned = assign_hardware(FEDVIT_MIX, 103, seed=0)
    assert len(assigned) == 103
    counts = Counter(assigned)
    assert all(abs(counts[name] - 103 * count / 20) < 1 for name, count in FEDVIT_MIX.items())
    assert assigned == assign_hardware(FEDVIT_MIX, 103, seed=0)
    assert assigned != assign_hardware(FEDVIT_MIX, 103, seed=1)
    assert assigned != sorted(assigned)


def test_workload_seconds_adds_receiving_training_and_sending() -> None:
    nano = HARDWARE_PROFILES["nano"]
    rate = nano.peak_gflops * nano.utilisation * 1e9
    workload = RoundWorkload(down_bytes=3_000_000, flops=int(10 * rate), up_bytes=2_000_000)
    assert workload_seconds(nano, workload) == pytest.approx(3 + 10 + 2)
    assert workload_seconds(nano, workload, bandwidth=100_000) == pytest.approx(30 + 10 + 20)


def test_raspberry_pi_is_slower_than_nano_by_the_factor_in_fedvit() -> None:
    assert HARDWARE_PROFILES["nano"].gflops / HARDWARE_PROFILES["pi4-4gb"].gflops == pytest.approx(6.5, rel=0.02)


def test_holds_reserves_memory_for_the_system() -> None:
    assert HARDWARE_PROFILES["pi4-2gb"].holds(int(1.3 * GIB))
    assert not HARDWARE_PROFILES["pi4-2gb"].holds(int(1.5 * GIB))
