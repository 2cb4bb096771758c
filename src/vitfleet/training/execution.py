"""Which execution path the trainings of a process took."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, TypeAlias

from vitfleet.models.net import Stacking
from vitfleet.training.engine import StepEngine

RunnerName: TypeAlias = Literal["eager", "cuda graph"]
RunnerSummary: TypeAlias = RunnerName | Literal["mixed", "none"]


@dataclass(frozen=True)
class ExecutionSummary:
    """The execution path of all trainings so far.

    Attributes
    ----------
    clients, server
        How the steps of the clients' trainings and of the server's own were run: one operation after the other
        ("eager"), replayed from a CUDA graph, both ("mixed"), or not at all ("none").
    compiled
        Whether the model was compiled.
    kernels
        Whether the project's own Triton kernels were enabled.
    largest_stack
        Most clients that were stacked in one training; 1 where no clients were stacked, 0 where none was trained.
    captured_steps
        CUDA graphs that were captured.
    stacking
        How clients were stacked: see :attr:`vitfleet.models.net.Net.stacking`; "none" where they were not.
    repeated_clients
        Clients that were trained again with plain steps, because captured ones had a non-finite loss or weight.
    """

    clients: RunnerSummary = "none"
    server: RunnerSummary = "none"
    compiled: bool = False
    kernels: bool = False
    largest_stack: int = 0
    captured_steps: int = 0
    stacking: Stacking = "none"
    repeated_clients: int = 0

    def __str__(self) -> str:
        words: list[str] = [self.clients]
        if self.server != "none":
            words = [f"clients {self.clients}, server {self.server}"]
        if self.largest_stack > 1:
            words.append(f"stacked {self.largest_stack} clients" + (" with vmap" if self.stacking == "vmap" else ""))
        if self.captured_steps:
            words.append(f"captured {self.captured_steps} steps")
        if self.repeated_clients:
            words.append(f"repeated {self.repeated_clients} clients without capture")
        if self.compiled:
            words.append("compiled")
        if self.kernels:
            words.append("own kernels")
        return ", ".join(words)


@dataclass
class ExecutionLog:
    """Collects an :class:`ExecutionSummary`. Several threads may train at the same time."""

    _lock: Lock = field(default_factory=Lock)
    _client_runners: set[RunnerName] = field(default_factory=set)
    _server_runners: set[RunnerName] = field(default_factory=set)
    _compiled: bool = False
    _kernels: bool = False
    _largest_stack: int = 0
    _captured_steps: int = 0
    _stacking: Stacking = "none"
    _repeated_clients: int = 0
    _diverged: bool = False

    def add_training(self, runner: RunnerName, engine: StepEngine, clients: int, server: bool) -> None:
        """Record a training that took at least one step: of some clients, or of the server."""
        with self._lock:
            (self._server_runners if server else self._client_runners).add(runner)
            self._compiled |= engine.compiled
            self._kernels |= engine.machine.kernels
            self._largest_stack = max(self._largest_stack, clients)
            self._stacking = engine.net.stacking if clients > 1 else self._stacking

    def add_captured_step(self) -> None:
        """Record that a step was captured in a CUDA graph."""
        with self._lock:
            self._captured_steps += 1

    def add_repeated_client(self, diverged: bool) -> None:
        """Record that a client was trained again without captured steps, and whether it diverged again."""
        with self._lock:
            self._repeated_clients += 1
            self._diverged |= diverged

    @property
    def diverged(self) -> bool:
        """Whether a client that was trained again diverged again."""
        with self._lock:
            return self._diverged

    def summary(self) -> ExecutionSummary:
        """Return what was recorded so far."""
        with self._lock:
            return ExecutionSummary(
                _summarize(self._client_runners),
                _summarize(self._server_runners),
                self._compiled,
                self._kernels,
                self._largest_stack,
                self._captured_steps,
                self._stacking,
                self._repeated_clients,
            )


def _summarize(runners: set[RunnerName]) -> RunnerSummary:
    if len(runners) > 1:
        return "mixed"
    return next(iter(runners), "none")
