"""What a run computes with is chosen by what the machine does well, and can be overridden."""

from __future__ import annotations

import os

import pytest
import torch

from vitfleet.config.schema import MachineConfig
from vitfleet.training import machine
from vitfleet.training.machine import WORKERS, set_up_machine, thread_limit


@pytest.mark.parametrize(
    ("has_bf16", "width", "wanted"), [(True, 256, True), (True, 64, False), (False, 256, False)], ids=str
)
def test_a_cpu_uses_bf16_where_it_gains_by_it(
    has_bf16: bool, width: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_cpu_has_bf16", lambda: has_bf16)
    assert set_up_machine(MachineConfig(device="cpu"), width).bf16 is wanted
    assert set_up_machine(MachineConfig(device="cpu", precision="bf16"), width).bf16
    assert not set_up_machine(MachineConfig(device="cpu", precision="fp32"), width).bf16


def test_a_cpu_trains_one_client_after_the_other_unless_told_otherwise() -> None:
    plain = set_up_machine(MachineConfig(device="cpu"))
    assert (plain.cohort, plain.graphs, plain.compile) == (1, False, False)
    assert set_up_machine(MachineConfig(device="cpu", cohort=7)).cohort == 7


def test_a_cpu_trains_a_client_a_thread_where_memory_allows() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with thread_limit(1):
        assert set_up_machine(MachineConfig(device="cpu", threads=1)).workers == 1
        assert set_up_machine(MachineConfig(device="cpu", threads=3), client_bytes=1).workers == 3
        assert set_up_machine(MachineConfig(device="cpu", threads=3), client_bytes=memory // 4).workers == 2
        assert set_up_machine(MachineConfig(device="cpu", threads=3), client_bytes=memory).workers == 1
        assert set_up_machine(MachineConfig(device="cpu", threads=WORKERS + 1)).workers == WORKERS
        assert set_up_machine(MachineConfig(device="cpu", threads=3, workers=2)).workers == 2


def test_threads_are_limited_for_a_while() -> None:
    before = torch.get_num_threads()
    with thread_limit(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
