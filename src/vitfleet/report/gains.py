"""What a method gains and loses against another, in a sentence."""

from __future__ import annotations

from vitfleet.run.compare import ComparisonRow

WORTH_SAYING = 0.9  # a cost above this share of the other's is not mentioned


def gain_sentence(row: ComparisonRow, reference: ComparisonRow) -> str:
    """Return the accuracy of a row and what it saves, against the row of another method."""
    accuracy, other = row.mean("accuracy", "global"), reference.mean("accuracy", "global")
    if accuracy is None or other is None:
        return f"{row.label}: not evaluated."
    if row is reference:
        return f"{row.label}: {accuracy:.1%} accuracy; every client sends the whole model."
    difference = 100 * (accuracy - other)
    compared = f"{abs(difference):.1f} points {'more' if difference > 0 else 'less'} than {reference.label}"
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
