"""The settings of a machine are chosen by its capabilities, and can be overridden."""

from __future__ import annotations

import os
import signal
from typing import Literal

import pytest
import torch

from vitfleet.config.schema import MachineConfig
from vitfleet.errors import ConfigError
from vitfleet.training import cpu_bf16, machine
from vitfleet.training.machine import MAX_WORKERS, resolve_machine_config, set_up_machine, thread_limit


@pytest.mark.parametrize(
    ("has_bf16", "width", "expected"), [(True, 256, True), (True, 64, False), (False, 256, False)], ids=str
)
def test_cpu_uses_bf16_where_it_is_supported_and_the_model_is_wide(
    has_bf16: bool, width: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: has_bf16)
    assert set_up_machine(MachineConfig(device="cpu"), width).bf16 is expected
    assert set_up_machine(MachineConfig(device="cpu", precision="bf16"), width).bf16
    assert not set_up_machine(MachineConfig(device="cpu", precision="fp32"), width).bf16


def test_a_cpu_whose_matrix_instructions_fail_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal_instruction() -> None:
        os.kill(os.getpid(), signal.SIGILL)

    monkeypatch.setattr(cpu_bf16, "has_matrix_unit", lambda: True)
    monkeypatch.setattr(cpu_bf16, "multiply_and_exit", illegal_instruction)
    cpu_bf16.product_runs.cache_clear()
    try:
        assert not set_up_machine(MachineConfig(device="cpu"), 256).bf16
        with pytest.raises(ConfigError, match=r"machine\.precision = 'bf16'.*announces.*set it to fp32"):
            set_up_machine(MachineConfig(device="cpu", precision="bf16"), 256)
    finally:
        cpu_bf16.product_runs.cache_clear()


def test_a_product_in_a_child_process_runs_or_is_found_not_to() -> None:
    # Where this fails, the tests' set-up has chosen other instructions than this CPU has.
    assert cpu_bf16.product_runs()


def test_cpu_does_not_stack_clients_by_default() -> None:
    default = set_up_machine(MachineConfig(device="cpu"))
    assert (default.cohort, default.graphs, default.compile) == (1, False, False)
    assert set_up_machine(MachineConfig(device="cpu", cohort=7)).cohort == 7


@pytest.mark.parametrize(("compile", "expected"), [(True, True), (False, False), ("auto", False)])
def test_auto_compiles_on_a_gpu_only(compile: bool | Literal["auto"], expected: bool) -> None:
    config = MachineConfig(device="cpu", compile=compile)
    chosen = set_up_machine(config)
    assert chosen.compile is expected
    assert resolve_machine_config(config, chosen).compile is expected


def test_cpu_trains_one_client_per_thread_as_memory_allows() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with thread_limit(1):
        assert set_up_machine(MachineConfig(device="cpu", threads=1)).workers == 1
        assert set_up_machine(MachineConfig(device="cpu", threads=3), client_bytes=1).workers == 3
        assert set_up_machine(MachineConfig(device="cpu", threads=3), client_bytes=memory // 4).workers == 2
        assert set_up_machine(MachineConfig(device="cpu", threads=3), client_bytes=memory).workers == 1
        assert set_up_machine(MachineConfig(device="cpu", threads=MAX_WORKERS + 1)).workers == MAX_WORKERS
        assert set_up_machine(MachineConfig(device="cpu", threads=3, workers=2)).workers == 2


def test_thread_limit_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    with thread_limit(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
