"""The records of a run: one line of JSON per round.

``records.jsonl`` holds nothing that depends on the wall clock, so that two runs of one seed, or a run and the same run
killed and resumed, write the same bytes. Durations go to ``timings.jsonl``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from vitfleet.errors import UserError
from vitfleet.files import RECORDS_FILE, TIMINGS_FILE, parse_json
from vitfleet.message import Number, Numbers

#: A number, a text, or a list (of lists) of numbers or texts; ``None`` stands for what could not be measured.
MetricValue: TypeAlias = "float | str | Sequence[MetricValue] | None"
#: The values of one metric after one round, by name.
MetricValues: TypeAlias = Mapping[str, MetricValue]
#: The only value of a metric that cannot be measured in a run: the reason.
UNAVAILABLE = "unavailable"


@dataclass(frozen=True)
class ClientRecord:
    """One client's part in a round.

    Attributes
    ----------
    down_bytes, up_bytes
        Size of the messages to and from the client.
    numbers
        The numbers in the client's update, such as ``samples`` and ``loss``; empty if it was not used.
    correct, tested
        In rounds that are evaluated: how many of its own test images the client's model predicted correctly, and how
        many there are.
    failure
        Why the update was not used; ``None`` if it was.
    gflops
        Operations of the training, forward and backward, in billions.
    began, ended
        Start and end on the virtual clock, in seconds since the run began; ``None`` if the fleet has no devices.
    counted
        With how many samples the update counted, if these are fewer than the client reported.
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
    counted: int | None = None

    @property
    def accuracy(self) -> float | None:
        """Local test accuracy, 0…1; ``None`` if it was not measured or the client has no test images."""
        return self.correct / self.tested if self.tested and self.correct is not None else None

    def rejected(self, reason: str | None) -> ClientRecord:
        """Return the record as a failure for this reason; as it is without one, or if it is one already."""
        if reason is None or self.failure is not None:
            return self
        return replace(self, numbers={}, correct=None, tested=None, gflops=None, failure=reason)


@dataclass(frozen=True)
class Accuracy:
    """Test accuracies, 0…1.

    Attributes
    ----------
    global_
        Accuracy of the global model on the common test set; without a global model, the mean over the models of
        ``models`` clients. ``None`` if those are on remote clients, and in a run of tasks, which has ``task`` in its
        records instead.
    loss
        Mean cross-entropy on the common test set; ``None`` if it is not finite.
    models
        Number of models that were evaluated.
    local
        Local test accuracy: the mean over the round's clients, each with the model it has just trained on its own
        test images; ``None`` if none of them has any.
    """

    global_: float | None
    loss: float | None
    models: int
    local: float | None


@dataclass(frozen=True)
class TaskScores:
    """How well the server's model does on the tasks so far, 0…1: see :mod:`vitfleet.run.evaluate.incremental`.

    Attributes
    ----------
    accuracies
        On the test images of the first, second, … task; ``None`` for a task without any.
    average_accuracy
        On the test images of all of them.
    incremental_accuracy
        The mean of that after each task.
    """

    accuracies: list[float | None]
    average_accuracy: float | None
    incremental_accuracy: float | None
    forgetting: float | None = None
    backward_transfer: float | None = None


@dataclass(frozen=True)
class TaskRecord:
    """Accuracies of all clients' models after a task was learned, 0…1; of the server's, where tasks are common to all.

    Attributes
    ----------
    task
        Number of tasks learned so far, m.
    matrix
        Of the server's model one row, of the tasks learned. Else for each client a_{m,1}, a_{m,2}, … on its own test
        images of its first, second, … task: those learned, and the next one, which is not; ``None`` if the client has
        no test images of the task, or failed to evaluate.
    initial
        The same for the untrained model and all tasks; in the record of the first task only.
    average_accuracy, forgetting, backward_transfer, forward_transfer
        Means over clients: see :mod:`vitfleet.run.evaluate.continual`. After one task there is only the first.
    failures
        Why clients failed to evaluate.
    incremental_accuracy, with_task
        Of the server's model only: the mean of its average accuracies so far, and how well it does where it is told the
        task of an image, if it is not told otherwise.
    """

    task: int
    matrix: list[list[float | None]]
    initial: list[list[float | None]] | None
    average_accuracy: float | None
    forgetting: float | None = None
    backward_transfer: float | None = None
    forward_transfer: float | None = None
    failures: dict[str, str] = field(default_factory=dict)
    incremental_accuracy: float | None = None
    with_task: TaskScores | None = None


@dataclass(frozen=True)
class HeadRecord:
    """How the head was solved (``[head]``): in round 0 at the start, in a later round after its aggregation.

    In a run on tasks it is solved at the beginning of each task's first round, before clients train.

    Attributes
    ----------
    clients
        Every client that was asked, in ascending order.
    solution
        What was chosen: regularisation, temperature.
    accuracy_before
        With the head before it was solved, in rounds that are evaluated.
    """

    clients: list[ClientRecord]
    solution: Numbers = field(default_factory=dict)
    accuracy_before: Accuracy | None = None


@dataclass(frozen=True)
class RoundRecord:
    """One round; round 0 is a start with a solved head, before any client trains.

    Attributes
    ----------
    lr
        The learning rate.
    loss
        The mean training loss, weighted by samples.
    accuracy
        In rounds that are evaluated (``eval.every``).
    clients
        Every client of the round, in ascending order.
    total_up_bytes, total_down_bytes
        Bytes of all messages so far.
    task
        In the last round of a task.
    virtual_seconds
        The virtual clock at the end of the round; ``None`` if the fleet has no devices.
    metrics
        The values of the metrics that were measured after the round, by name.
    head
        In rounds in which the head was solved. ``accuracy`` is with the new head.
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
    metrics: Mapping[str, MetricValues] = field(default_factory=dict)
    head: HeadRecord | None = None

    @property
    def asked_clients(self) -> list[ClientRecord]:
        """The clients of the round, and then those that were asked for what the head is solved from."""
        return [*self.clients, *(self.head.clients if self.head else [])]

    @property
    def local_accuracies(self) -> dict[int, float]:
        """Local test accuracy of each client of the round for which it was measured."""
        return {client.client: client.accuracy for client in self.clients if client.accuracy is not None}

    def line(self) -> str:
        """Return the record as one line of JSON."""
        tree = asdict(self)
        if self.head is None:
            del tree["head"]
        if self.task is not None and self.task.incremental_accuracy is None:
            del tree["task"]["incremental_accuracy"], tree["task"]["with_task"]
        for client in tree["clients"]:
            if client["counted"] is None:
                del client["counted"]
        return json.dumps(tree, separators=(",", ":"), allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> RoundRecord:
        """Return the record that a line holds."""
        tree = parse_json(line)
        accuracy = _accuracy(tree.pop("accuracy"))
        clients = [ClientRecord(**client) for client in tree.pop("clients")]
        task, head = tree.pop("task", None), tree.pop("head", None)
        return cls(
            **tree,
            accuracy=accuracy,
            clients=clients,
            task=_task_record(**task) if task else None,
            head=_head_record(**head) if head else None,
        )


def _accuracy(tree: dict[str, Any] | None) -> Accuracy | None:
    return Accuracy(**tree) if tree else None


def _task_record(with_task: dict[str, Any] | None = None, **others: Any) -> TaskRecord:
    return TaskRecord(**others, with_task=TaskScores(**with_task) if with_task else None)


def _head_record(clients: list[dict[str, Any]], accuracy_before: dict[str, Any] | None, **others: Any) -> HeadRecord:
    return HeadRecord(
        [ClientRecord(**client) for client in clients], accuracy_before=_accuracy(accuracy_before), **others
    )


def metric_scalars(metrics: Mapping[str, MetricValues]) -> dict[str, float]:
    """Return the numbers among the values of metrics, by ``metric/value``."""
    return {
        f"{name}/{key}": value
        for name, values in metrics.items()
        for key, value in values.items()
        if isinstance(value, int | float)
    }


class LineFile:
    """A file to which lines are appended, and which is truncated to a checkpoint's length on resume."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        self.path = path
        self._file = path.open("ab")
        self._last_line = 0  # where it begins
        if length is not None:
            if self._file.tell() < length:
                raise UserError(f"{path}: is shorter than at its last checkpoint; it was modified from outside")
            self._file.truncate(length)
            self._file.seek(length)

    def append(self, line: str) -> int:
        """Append a line, flush it to disk and return the file's length."""
        self._last_line = self._file.tell()
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def replace_last(self, line: str) -> None:
        """Replace the line that was appended last."""
        self._file.truncate(self._last_line)
        self._file.seek(self._last_line)
        self.append(line)

    def length(self) -> int:
        """Return the file's length."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(folder: Path) -> Iterator[RoundRecord]:
    """Yield a run's records, one at a time; a last line that a crash cut short is skipped."""
    path = folder / RECORDS_FILE
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield RoundRecord.parse(line.decode())
            except (ValueError, LookupError, TypeError, AttributeError):
                raise UserError(f"{path}: line {number} is damaged; restore the file from a copy") from None


def read_seconds(folder: Path, which: str = "seconds") -> float:
    """Return the duration of all rounds of a run in seconds, over all sessions.

    ``warm_up_seconds`` are the part in which steps were compiled or captured.
    """
    path = folder / TIMINGS_FILE
    if not path.exists():
        return 0.0
    with path.open("rb") as file:
        lines = [line for line in file if line.endswith(b"\n")]
    try:
        return sum(float(parse_json(line).get(which, 0.0)) for line in lines)
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{path}: is damaged; restore it from a copy, or remove it") from None
