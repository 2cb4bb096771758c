"""What a method's clients send: the declarations of the numbers that they report, and how an update's form is checked.

Generic code (the summary, the terminal, the report) reads the declarations instead of knowing any method's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vitfleet.errors import shown
from vitfleet.message import Number, Numbers, Tensors

if TYPE_CHECKING:
    from vitfleet.methods.base import Method

Reduction: TypeAlias = Literal["sum", "mean", "max"]
#: What a client may report: a whole number ≥ 0, any number, a list of either, samples of each task, the index of a task
#: (−1: of none), rising indices of tasks, or any of these.
Form: TypeAlias = Literal["count", "number", "counts", "numbers", "task counts", "task", "tasks", "any"]
REDUCTIONS: Mapping[Reduction, Callable[[list[int | float]], int | float]] = {"sum": sum, "mean": fmean, "max": max}

MAX_TASK_COUNT = 2**31  # fewer samples of a task are plausible
MAX_NUMBER = 2**53  # the largest up to which a float represents every integer
MAX_LIST_LENGTH = 65536
MAX_NAMES = 100
MAX_NAME_LENGTH = 100  # characters
SHOWN = 80  # characters of a wrong value in a reason: it is written into the records


class RejectedUpdateError(Exception):
    """A client's update cannot be used. The message is the reason."""


@dataclass(frozen=True)
class ClientMetric:
    """A number, or a list of numbers, that clients report with their updates."""

    name: str  # its key among the numbers of a client's message and in the records
    description: str  # the label of its row in a table
    reduction: Reduction | None = None  # of all clients and rounds, to the run's summary; None: it is not summarised
    warning: bool = False  # whether a summarised value other than zero is one; zero is then not worth a row in a table
    form: Form = "any"  # an update that reports anything else is rejected
    least: float | None = None  # the smallest number, of a list each; an update that reports a smaller one is rejected
    most: float | None = None  # the largest one


def reduce_client_metrics(metrics: Sequence[ClientMetric], reported: Iterable[Numbers]) -> dict[str, int | float]:
    """Return the summarised value of every metric that was reported at least once, in the order of declaration.

    ``reported`` are the numbers of every client's update, over all rounds.
    """
    values: dict[str, list[int | float]] = {metric.name: [] for metric in metrics if metric.reduction is not None}
    for numbers in reported:
        for name, column in values.items():
            value = numbers.get(name)
            if isinstance(value, int | float):
                column.append(value)
    return {
        metric.name: REDUCTIONS[metric.reduction](values[metric.name])
        for metric in metrics
        if metric.reduction is not None and values[metric.name]
    }


def check_shapes(received: Tensors, expected: Tensors) -> None:
    """Reject tensors that are not all of the expected ones and no others, each with the expected shape."""
    check_complete(received, expected)
    for name, tensor in received.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}; expected: {tuple(expected[name].shape)}"
            raise RejectedUpdateError(f"its weight {name!r} has the shape {shapes}")


def check_complete(received: Iterable[str], expected: Iterable[str]) -> None:
    """Reject names of tensors that are not all of the expected ones and no others."""
    given, wanted = set(received), list(expected)
    if missing := [name for name in wanted if name not in given]:
        raise RejectedUpdateError(f"its weight {missing[0]!r} is missing")
    if unknown := sorted(given.difference(wanted)):
        raise RejectedUpdateError(f"its weight {unknown[0]!r} is not part of the model")


def check_types(received: Tensors, known: Tensors) -> None:
    """Reject tensors whose type is another one than that of a known tensor with this name."""
    for name, tensor in received.items():
        if name in known and tensor.dtype != known[name].dtype:
            raise RejectedUpdateError(f"its weight {name!r} has the type {tensor.dtype}; expected: {known[name].dtype}")


def check_names(numbers: Numbers, expected: Numbers, method: Method[Any]) -> None:
    """Reject numbers that the method does not declare and that no honest client (``expected``) reports."""
    known = {"samples", "loss", *expected, *(metric.name for metric in method.client_metrics)}
    if unknown := [name for name in numbers if name not in known]:
        raise RejectedUpdateError(f"it reports a number {shown(unknown[0], SHOWN)}; no honest client does")


def parse_numbers(numbers: Numbers, method: Method[Any]) -> dict[str, Number]:
    """Return a client's numbers, or reject the update: the reason names the number and what the method allows."""
    check_numbers(numbers)
    for metric in method.client_metrics:
        if metric.name in numbers:
            _check_form(metric, numbers[metric.name], method.context.num_tasks)
    return dict(numbers)


def check_numbers(numbers: Numbers) -> None:
    """Reject numbers that no correct client of any method sends: they enter sums and the records."""
    if len(numbers) > MAX_NAMES or any(len(name) > MAX_NAME_LENGTH for name in numbers):
        raise RejectedUpdateError(
            f"it reports {len(numbers)} numbers; at most {MAX_NAMES} are allowed, with names of {MAX_NAME_LENGTH} "
            "characters"
        )
    loss = numbers.get("loss", 0.0)  # a client that trains nothing has none
    samples = numbers.get("samples")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise RejectedUpdateError(f"its loss is {shown(loss, SHOWN)}, not a finite number")
    if not _is_count(samples):
        raise RejectedUpdateError(f"its number of samples is {shown(samples, SHOWN)}, not an integer ≥ 0")
    for name, value in numbers.items():
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_LIST_LENGTH:
            raise RejectedUpdateError(
                f"its list {name!r} has {len(items)} numbers; at most {MAX_LIST_LENGTH} are allowed"
            )
        if not all(_is_number(item) for item in items):
            raise RejectedUpdateError(f"its {name!r} has a value that is no number between ±{MAX_NUMBER}")


def _check_form(metric: ClientMetric, value: Number, num_tasks: int) -> None:
    """Reject a value that does not have the form that its method declares."""
    form, is_list = metric.form, isinstance(value, list)
    if form == "any":
        return
    items = value if isinstance(value, list) else [value]
    if form == "task":
        if value not in range(-1, num_tasks) or not isinstance(value, int):
            raise RejectedUpdateError(f"its {metric.name!r} is {shown(value, SHOWN)}; expected: of {num_tasks} tasks")
        return
    if is_list != form.endswith("s") or not (form.startswith("number") or all(map(_is_count, items))):
        forms = {"count": "a whole number ≥ 0", "number": "a number", "numbers": "a list of numbers"}
        expected = forms.get(form, "a list of whole numbers ≥ 0")
        raise RejectedUpdateError(f"its {metric.name!r} is {shown(value, SHOWN)}; expected: {expected}")
    least, most = metric.least, metric.most
    if any((least is not None and item < least) or (most is not None and item > most) for item in items):
        limits = [f"{word} {bound:g}" for word, bound in (("at least", least), ("at most", most)) if bound is not None]
        raise RejectedUpdateError(f"its {metric.name!r} is {shown(value, SHOWN)}; expected: {', '.join(limits)}")
    if form == "tasks" and any(task not in range(num_tasks) for task in items):
        raise RejectedUpdateError(f"its {metric.name!r} is {shown(value, SHOWN)}; expected: of {num_tasks} tasks")
    if form == "tasks" and items != sorted(set(items)):
        raise RejectedUpdateError(f"its {metric.name!r} is {shown(value, SHOWN)}; expected: rising indices")
    if form == "task counts" and (len(items) > num_tasks or any(count >= MAX_TASK_COUNT for count in items)):
        raise RejectedUpdateError(
            f"its {metric.name!r} has {len(items)} tasks, the most samples are {min(max(items), MAX_TASK_COUNT)}; "
            f"expected: at most {num_tasks} tasks and fewer than {MAX_TASK_COUNT} samples of each"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_count(value: object) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0
