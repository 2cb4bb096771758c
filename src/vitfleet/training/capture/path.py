"""Which path the trainings of a process took, and the time that compiling and capturing took, which is no training."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, TypeAlias

from vitfleet.models.net import Stacking
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.training.engine import StepEngine

RunnerName: TypeAlias = Literal["eager", "cuda graph"]
RunnerSummary: TypeAlias = RunnerName | Literal["mixed", "none"]


@dataclass(frozen=True)
class ExecutionSummary:
    """The execution path of all trainings so far."""

    # How the steps of the clients' trainings and of the server's own were run: one operation after the other ("eager"),
    # replayed from a CUDA graph, both ("mixed"), or not at all ("none").
    clients: RunnerSummary = "none"
    server: RunnerSummary = "none"
    compiled: bool = False  # whether the model was compiled
    kernels: bool = False  # whether the project's own Triton kernels were enabled
    largest_stack: int = 0  # most clients in one training; 1 where none were stacked, 0 where none was trained
    captured_steps: int = 0  # CUDA graphs that were captured
    stacking: Stacking = "none"  # how clients were stacked: see `Net.stacking`; "none" where they were not
    repeated_clients: int = 0  # trained again with plain steps: captured ones had a non-finite loss or weight

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


class ExecutionLog:
    """Keeps an :class:`ExecutionSummary` up to date. Several threads may train at the same time."""

    def __init__(self) -> None:
        self.summary = ExecutionSummary()
        self.diverged = False  # whether a client that was trained again diverged again
        self._lock = Lock()

    def add_training(self, runner: RunnerName, engine: StepEngine, clients: int, server: bool) -> None:
        """Record a training that took at least one step: of some clients, or of the server."""
        with self._lock:
            now = self.summary
            self.summary = replace(
                now,
                clients=now.clients if server else _joined(now.clients, runner),
                server=_joined(now.server, runner) if server else now.server,
                compiled=now.compiled or engine.compiled,
                kernels=now.kernels or engine.machine.kernels,
                largest_stack=max(now.largest_stack, clients),
                stacking=engine.net.stacking if clients > 1 else now.stacking,
            )

    def add_captured_step(self) -> None:
        """Record that a step was captured in a CUDA graph."""
        with self._lock:
            self.summary = replace(self.summary, captured_steps=self.summary.captured_steps + 1)

    def add_repeated_client(self, diverged: bool) -> None:
        """Record that a client was trained again without captured steps, and whether it diverged again."""
        with self._lock:
            self.summary = replace(self.summary, repeated_clients=self.summary.repeated_clients + 1)
            self.diverged |= diverged


def _joined(before: RunnerSummary, runner: RunnerName) -> RunnerSummary:
    return runner if before in ("none", runner) else "mixed"


class WarmupTimer:
    """Shows warm-ups as progress tasks, and adds up the time they take."""

    def __init__(self) -> None:
        self.progress: Progress = NO_PROGRESS  # where warm-ups are shown
        self._seconds = 0.0
        self._timed_keys: set[Hashable] = set()

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Show and time a warm-up."""
        started = time.perf_counter()
        with self.progress.task(label, 1):
            yield
        self._seconds += time.perf_counter() - started

    def time_first(self, label: str, key: Hashable) -> AbstractContextManager[None]:
        """Show and time the first warm-up of a key; do nothing for later ones."""
        if key in self._timed_keys:
            return nullcontext()
        self._timed_keys.add(key)
        return self.time(label)

    def pop_seconds(self) -> float:
        """Return the seconds of all warm-ups since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
