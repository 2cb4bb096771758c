"""The settings of a machine are chosen by its capabilities, and can be overridden."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import time
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from vitfleet.config.schema import MachineConfig
from vitfleet.errors import ConfigError, UserError
from vitfleet.training.execution import cpu_bf16
from vitfleet.training.execution import settings as machine
from vitfleet.training.execution.memory_budget import (
    CAPTURED_FRACTION,
    CONTEXT_BYTES,
    GPU_SHARE_VARIABLE,
    MemoryBudget,
    captured_bytes_limit,
    is_out_of_memory,
    limit_to_share,
    memory_fraction,
)
from vitfleet.training.execution.settings import (
    MAX_WORKERS,
    gpu_memory_bytes,
    resolve_machine_config,
    set_up_execution,
    thread_limit,
)


@pytest.mark.parametrize(
    ("has_bf16", "width", "expected"), [(True, 256, True), (True, 64, False), (False, 256, False)], ids=str
)
def test_cpu_uses_bf16_where_it_is_supported_and_the_model_is_wide(
    has_bf16: bool, width: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: has_bf16)
    assert set_up_execution(MachineConfig(device="cpu"), width).bf16 is expected
    assert set_up_execution(MachineConfig(device="cpu", precision="bf16"), width).bf16
    assert not set_up_execution(MachineConfig(device="cpu", precision="fp32"), width).bf16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a product is tried in a forked process")
def test_a_cpu_whose_matrix_instructions_fail_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal_instruction() -> int:
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGILL)
        return 0

    monkeypatch.setattr(cpu_bf16, "has_matrix_unit", lambda: True)
    monkeypatch.setattr(cpu_bf16, "multiply", illegal_instruction)
    cpu_bf16.product_runs.cache_clear()
    try:
        assert not set_up_execution(MachineConfig(device="cpu"), 256).bf16
        with pytest.raises(ConfigError, match=r"machine\.precision = 'bf16'.*announces.*set it to fp32"):
            set_up_execution(MachineConfig(device="cpu", precision="bf16"), 256)
    finally:
        cpu_bf16.product_runs.cache_clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a product is tried in a forked process")
def test_a_product_in_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise KeyboardInterrupt

    try:
        # Where this fails, the tests' set-up has chosen other instructions than this CPU has.
        assert cpu_bf16.product_runs()
        monkeypatch.setattr(cpu_bf16, "multiply", fail)
        cpu_bf16.product_runs.cache_clear()
        assert not cpu_bf16.product_runs(), "an error of the child ends the child"
        monkeypatch.setattr(cpu_bf16, "multiply", lambda: time.sleep(60))
        monkeypatch.setattr(cpu_bf16, "CHECK_SECONDS", 0.05)
        cpu_bf16.product_runs.cache_clear()
        assert cpu_bf16.product_runs(), "a slow child was not killed by an instruction"
        monkeypatch.setattr(os, "fork", lambda: raise_os_error())
        cpu_bf16.product_runs.cache_clear()
        assert cpu_bf16.product_runs(), "nothing is known without a child"
    finally:
        cpu_bf16.product_runs.cache_clear()


def raise_os_error() -> int:
    raise OSError


def test_cpu_does_not_stack_clients_by_default() -> None:
    default = set_up_execution(MachineConfig(device="cpu"))
    assert (default.stack_size, default.graphs, default.compile) == (1, False, False)
    assert set_up_execution(MachineConfig(device="cpu", stack_size=7)).stack_size == 7


@pytest.mark.parametrize(("compile", "expected"), [(True, True), (False, False), ("auto", False)])
def test_auto_compiles_on_a_gpu_only(compile: bool | Literal["auto"], expected: bool) -> None:
    config = MachineConfig(device="cpu", compile=compile)
    chosen = set_up_execution(config)
    assert chosen.compile is expected
    assert resolve_machine_config(config, chosen).compile is expected


def test_cpu_trains_one_client_per_thread_as_memory_allows() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with thread_limit(1):
        assert set_up_execution(MachineConfig(device="cpu", threads=1)).workers == 1
        assert set_up_execution(MachineConfig(device="cpu", threads=3), client_bytes=1).workers == 3
        assert set_up_execution(MachineConfig(device="cpu", threads=3), client_bytes=memory // 4).workers == 2
        assert set_up_execution(MachineConfig(device="cpu", threads=3), client_bytes=memory).workers == 1
        assert set_up_execution(MachineConfig(device="cpu", threads=MAX_WORKERS + 1)).workers == MAX_WORKERS
        assert set_up_execution(MachineConfig(device="cpu", threads=3, workers=2)).workers == 2


def test_thread_limit_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    with thread_limit(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_runs_that_share_a_gpu_have_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    total, limits = 100 * 2**30, []
    properties = SimpleNamespace(total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: limits.append(fraction))
    gpu = torch.device("cuda", 0)
    limit_to_share(gpu)
    assert not limits, "alone, a run may take all of it"
    monkeypatch.setenv(GPU_SHARE_VARIABLE, "0.25")
    limit_to_share(gpu)
    assert limits == [0.25 - CONTEXT_BYTES / total]

    # 20 of 100 GiB are free, and 4 of those that this process has reserved are not in use: its limit allows less.
    statistics = {"reserved_bytes": 8 * 2**30, "allocated_bytes": 4 * 2**30}
    nested = {name: {"all": {"current": value}} for name, value in statistics.items()}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, total))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: nested)
    budget = MemoryBudget()
    budget.bytes_per_client = 2**30
    assert budget.max_clients(100, gpu) == int(0.8 * (25 - 0.5 - 4))
    assert gpu_memory_bytes(gpu) == int(24.5 * 2**30)
    assert captured_bytes_limit(gpu) == CAPTURED_FRACTION * 24.5 * 2**30
    assert captured_bytes_limit(torch.device("cpu")) == math.inf
    monkeypatch.delenv(GPU_SHARE_VARIABLE)
    assert budget.max_clients(100, gpu) == int(0.8 * (20 + 8 - 4))


@pytest.mark.parametrize(("share", "words"), [("half", "must be a number"), ("0.01", "too little of 8 GiB; run fewer")])
def test_a_share_of_a_gpu_that_is_no_use_is_refused(share: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_SHARE_VARIABLE, share)
    with pytest.raises(UserError, match=words):
        memory_fraction(8 * 2**30)


@pytest.mark.parametrize(
    "message", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "MPS backend out of memory"]
)
def test_errors_that_say_that_memory_is_full(message: str) -> None:
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    later = RuntimeError("capture_end: the capture was invalidated")
    later.__context__ = RuntimeError(message)
    assert is_out_of_memory(later)
