"""Kernels compiled for a GPU wait between storing a tensor and reading it back; the code is written without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from vitfleet.config.schema import MachineConfig
from vitfleet.training.execution import settings as machine
from vitfleet.training.execution.compiler_barriers import BARRIER, CACHE_TAG, add_compiler_barriers

H200 = {
    "multi_processor_count": 132,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the compiler write code for a GPU that is not there, and restore what the tests change in it."""
    properties = DeviceProperties(type="cuda", index=0, cc=90, **H200)
    monkeypatch.setattr(DeviceProperties, "create", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(minor=0, **H200))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("torch._inductor.scheduler.has_triton", lambda: True)
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "")
    monkeypatch.setattr(TritonKernel, "load", TritonKernel.load)
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag="mine"):
        yield


def kernels(function: Callable[[Tensor], tuple[Tensor, ...]], shape: tuple[int, ...]) -> list[str]:
    """Return the Triton kernels of a function of one tensor on a GPU."""
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        inputs = torch.empty(shape, device="cuda")
        graph = GraphLowering(make_fx(function)(inputs), example_inputs=[inputs])
        for handler in (V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(MagicMock())):
            stack.enter_context(handler)
        graph.run(inputs)
        code = graph.codegen()[0].value
    return re.findall(r"def triton_.*?'''", code, re.DOTALL)


def read_backs(kernel: str) -> list[str]:
    """Return what lies between storing a tensor and reading it back, for each tensor of a kernel."""
    pattern = r"(?=(tl\.store\((\w+) .*?tl\.load\(\2 ))"  # the parts overlap
    return [match.group(1) for match in re.finditer(pattern, kernel, re.DOTALL)]


def normalise(inputs: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor that is stored in a first loop, for its sum, and read back in a second one."""
    numerator = inputs.exp()
    return numerator, numerator / numerator.sum(-1, keepdim=True)


def normalise_twice(inputs: Tensor) -> tuple[Tensor, ...]:
    numerator, ratio = normalise(inputs)
    logits = ratio + inputs
    return numerator, logits, logits / logits.sum(-1, keepdim=True)


def use_several_times(inputs: Tensor) -> tuple[Tensor, ...]:
    numerator, ratio = normalise(inputs)
    total = numerator.sum(-1, keepdim=True)
    return numerator, ratio, numerator * total, (numerator + 1).sin() * total


@pytest.mark.parametrize(("function", "barriers"), [(normalise, 1), (normalise_twice, 2), (use_several_times, 1)])
def test_a_tensor_is_read_back_after_a_barrier(
    function: Callable[[Tensor], tuple[Tensor, ...]], barriers: int, compiler: None
) -> None:
    shape = 64, 8192  # too long for one block of a kernel: it loops
    before = [part for kernel in kernels(function, shape) for part in read_backs(kernel)]
    assert before  # else this test shows nothing: the compiler writes other code
    assert BARRIER not in "".join(before), "this version of torch writes the barrier: compiler_barriers.py can go"
    add_compiler_barriers()
    written = kernels(function, shape)
    after = [part for kernel in written for part in read_backs(kernel)]
    assert len(after) == len(before)
    for part in after:
        # Between the two loops, not in the second one.
        assert re.search(rf"^    {re.escape(BARRIER)}$.*^    for ", part, re.DOTALL | re.MULTILINE), part
    assert "".join(written).count(BARRIER) == barriers


def test_a_kernel_that_reads_nothing_back_is_unchanged(compiler: None) -> None:
    shape = 64, 256  # fits in one block
    before = kernels(normalise, shape)
    add_compiler_barriers()
    assert kernels(normalise, shape) == before
    assert BARRIER not in "".join(before)


def test_barriers_are_added_once_and_separate_the_cache(compiler: None) -> None:
    add_compiler_barriers()
    load = TritonKernel.load
    add_compiler_barriers()
    assert TritonKernel.load is load
    assert torch.compiler.config.cache_key_tag == f"mine{CACHE_TAG}"


@pytest.mark.parametrize(("compiles", "expected"), [(True, 1), (False, 0)])
def test_a_machine_with_a_gpu_that_compiles_has_barriers(
    compiles: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(machine, "add_compiler_barriers", lambda: calls.append(None))
    monkeypatch.setattr(machine, "_find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "limit_to_share", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with torch._dynamo.config.patch(recompile_limit=8):
        machine.set_up_execution(MachineConfig(compile=compiles, precision="fp32", kernels=False))
    assert len(calls) == expected
