"""CUDA graphs without a GPU, for tests of captured steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from vitfleet.config.schema import MachineConfig
from vitfleet.training.capture.runner import CaptureSpace, CudaGraphRunner, StepKind
from vitfleet.training.execution.settings import ExecutionSettings, set_up_execution


@dataclass(frozen=True)
class EmulatedGraph:
    """Runs a captured step again."""

    runner: CudaGraphRunner
    kind: StepKind

    def replay(self) -> None:
        self.runner._step(self.kind)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraphRunner]:
    """Emulate CUDA graphs on a CPU; return the list to which every capture appends its runner."""
    runners: list[CudaGraphRunner] = []

    def capture(runner: CudaGraphRunner, kind: StepKind) -> EmulatedGraph:
        runners.append(runner)
        return EmulatedGraph(runner, kind)

    monkeypatch.setattr(CudaGraphRunner, "_capture", capture)
    monkeypatch.setattr(CudaGraphRunner, "_warm_up", CudaGraphRunner._step)
    monkeypatch.setattr(CaptureSpace, "create", lambda: CaptureSpace(object(), object()))
    return runners


def set_up_with_graphs(graphs: bool, config: MachineConfig, width: int = 0, client_bytes: int = 0) -> ExecutionSettings:
    """Set up the machine of a run that captures its steps, or not."""
    return replace(set_up_execution(config, width, client_bytes), graphs=graphs)
