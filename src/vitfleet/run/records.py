"""What a run writes down: one line a round, curves, and a summary.

``records.jsonl`` holds nothing that depends on the clock, so that two runs of one seed, or one run and the
same run killed and resumed, write the same bytes. Seconds go to ``timings.jsonl``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vitfleet.errors import UserError
from vitfleet.message import Number


@dataclass(frozen=True)
class ClientRecord:
    """One client's part in a round.

    Attributes
    ----------
    numbers
        What its message said of itself.
    right, tested
        Its own model on its own test images, in rounds that are evaluated.
    gflops
        Operations of its training, forward and backward, in billions.
    began, ended
        When it was asked and when its answer was in, in virtual seconds since the run began, where the fleet has
        devices.
    """

    client: int
    down_bytes: int
    up_bytes: int
    numbers: dict[str, Number] = field(default_factory=dict)
    correct: int | None = None
    tested: int | None = None
    failure: str | None = None
    gflops: float | None = None
    began: float | None = None
    ended: float | None = None

    @property
    def accuracy(self) -> float | None:
        """Share of its own test images named rightly; ``None`` if it has none or was not asked."""
        return self.correct / self.tested if self.tested and self.correct is not None else None


@dataclass(frozen=True)
class Accuracy:
    """Shares of test images named rightly, 0…1.

    Attributes
    ----------
    global_
        On the common test set: the server's model, or the mean over ``models`` clients' where it has none.
        ``None`` where nobody may look at those, and in a run of tasks: there the record's ``learned`` counts.
    loss
        Mean cross-entropy there; ``None`` where it is not finite.
    models
        How many models that is.
    local
        Mean over the round's clients of the model each has just trained, on its own test images; ``None`` if
        none of them has any.
    """

    global_: float | None
    loss: float | None
    models: int
    local: float | None


@dataclass(frozen=True)
class TaskRecord:
    """How every client's model does once a task is learned; shares 0…1.

    Attributes
    ----------
    task
        Tasks learned so far, m.
    matrix
        For each client a_{m,1}, a_{m,2}, … on its own test images of its first, second, … task: those learned, and the
        next one, which is not; ``None`` where it has no test images, or did not answer.
    initial
        The same for the untrained model, of all tasks; kept with the first task only.
    average_accuracy, forgetting, backward_transfer, forward_transfer
        Means over the clients: see :mod:`vitfleet.run.continual`. Only the first is known after one task.
    failures
        Clients that did not answer, and why.
    """

    task: int
    matrix: list[list[float | None]]
    initial: list[list[float | None]] | None
    average_accuracy: float | None
    forgetting: float | None = None
    backward_transfer: float | None = None
    forward_transfer: float | None = None
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRecord:
    """One round. ``loss`` is the mean training loss, weighted by samples; totals run from round 1.

    ``learned`` is there in the last round of a task, ``virtual_seconds``, the virtual clock at the round's end, where
    the fleet has devices.
    """

    round: int
    lr: float
    loss: float | None
    accuracy: Accuracy | None
    clients: list[ClientRecord]
    total_up_bytes: int
    total_down_bytes: int
    task: TaskRecord | None = None
    virtual_seconds: float | None = None

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> RoundRecord:
        """Read back a line."""
        tree = json.loads(line)
        accuracy = tree.pop("accuracy")
        clients = [ClientRecord(**client) for client in tree.pop("clients")]
        learned = tree.pop("task", None)
        return cls(
            **tree,
            accuracy=Accuracy(**accuracy) if accuracy else None,
            clients=clients,
            task=TaskRecord(**learned) if learned else None,
        )


class LineFile:
    """A file of lines that is only ever appended to, and cut back to a checkpoint's length on resume."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        self.path = path
        self._file = path.open("ab")
        if length is not None:
            if self._file.tell() < length:
                raise UserError(f"{path}: is shorter than its checkpoint says; it was changed from outside")
            self._file.truncate(length)
            self._file.seek(length)

    def append(self, line: str) -> int:
        """Append a line and return the file's length with it, on disk."""
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def length(self) -> int:
        """Return the file's length."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(folder: Path) -> Iterator[RoundRecord]:
    """Yield a run's records, one at a time; a last line cut short by a crash is left out."""
    path = folder / "records.jsonl"
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield RoundRecord.parse(line)


def read_seconds(folder: Path, which: str = "seconds") -> float:
    """Return the seconds a run's rounds took, all its sessions together.

    Parameters
    ----------
    which
        ``seconds``, or ``warm_up_seconds``: those of them in which steps were compiled or captured.
    """
    path = folder / "timings.jsonl"
    if not path.exists():
        return 0.0
    with path.open() as file:
        return sum(float(json.loads(line).get(which, 0.0)) for line in file if line.endswith("\n"))


@dataclass(frozen=True)
class ClientCosts:
    """What a client holds and does: its model's parameters, those that train, a sample's operations, its memory."""

    params: int
    trainable_params: int
    forward_gflops: float
    train_gflops: float
    peak_memory_bytes: int | None = None
