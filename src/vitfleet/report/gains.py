"""What a method gains and loses against another, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from vitfleet.run.compare import ComparisonRow

FEDAVG = "fedavg"  # the method that the others save something against
WORTH_SAYING = 0.9  # a cost above this share of the other's is not mentioned


def gain_sentences(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return a sentence about each row: against the first of the rows, or the first of those that learned tasks."""
    first = {row.has_tasks: row for row in reversed(rows)}
    return [(kept_sentence if row.has_tasks else gain_sentence)(row, first[row.has_tasks]) for row in rows]


def kept_sentence(row: ComparisonRow, reference: ComparisonRow) -> str:
    """Return what a row still knows after the last of its tasks, against the row of another method."""
    accuracy, forgotten = row.mean("continual", "average_accuracy"), row.mean("continual", "forgetting")
    text = f"{row.label}: {accuracy:.1f}% accuracy over all tasks after the last one; {_forgotten(forgotten)}"
    if row is reference:
        return f"{text}."
    return f"{text}, {reference.label} {_forgotten(reference.mean('continual', 'forgetting'))}."


def _forgotten(points: float | None) -> str:
    return "with one task there is nothing to forget" if points is None else f"forgets {max(0.0, points):.0f} points"


def gain_sentence(row: ComparisonRow, reference: ComparisonRow) -> str:
    """Return the accuracy of a row and what it saves, against the row of another method."""
    accuracy, other = row.mean("accuracy", "global"), reference.mean("accuracy", "global")
    if accuracy is None or other is None:
        return f"{row.label}: not evaluated."
    if row is reference:
        sent = "; every client sends the whole model" if row.name == FEDAVG else ""
        return f"{row.label}: {accuracy:.1%} accuracy{sent}."
    difference = round(100 * (accuracy - other), 1)
    compared = f"{abs(difference):.1f} points {'more' if difference > 0 else 'less'} than {reference.label}"
    if not difference:
        compared = f"as much as {reference.label}"
    savings = [_saving(row, reference, *cost) for cost in (("message", "up_bytes"), ("client", "train_gflops"))]
    named = [
        f"{share:.0%} of its {what}"
        for share, what in zip(savings, ("upload", "operations on the client"), strict=True)
        if share is not None and share < WORTH_SAYING
    ]
    return f"{row.label}: {accuracy:.1%} accuracy, {compared}" + (f", with {' and '.join(named)}." if named else ".")


def _saving(row: ComparisonRow, reference: ComparisonRow, table: str, key: str) -> float | None:
    cost, other = row.mean(table, key), reference.mean(table, key)
    return cost / other if cost is not None and other else None
