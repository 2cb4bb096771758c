"""What a run computes with is chosen by what the machine does well, and can be overridden."""

from __future__ import annotations

import pytest

from vitfleet.config.schema import MachineConfig
from vitfleet.train import machine
from vitfleet.train.machine import set_up


@pytest.mark.parametrize(
    ("has_bf16", "width", "wanted"), [(True, 256, True), (True, 64, False), (False, 256, False)], ids=str
)
def test_a_cpu_uses_bf16_where_it_gains_by_it(
    has_bf16: bool, width: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_cpu_has_bf16", lambda: has_bf16)
    assert set_up(MachineConfig(device="cpu"), width).bf16 is wanted
    assert set_up(MachineConfig(device="cpu", precision="bf16"), width).bf16
    assert not set_up(MachineConfig(device="cpu", precision="fp32"), width).bf16


def test_a_cpu_trains_one_client_after_the_other_unless_told_otherwise() -> None:
    plain = set_up(MachineConfig(device="cpu"))
    assert (plain.cohort, plain.graphs, plain.compile) == (1, False, False)
    assert set_up(MachineConfig(device="cpu", cohort=7)).cohort == 7
