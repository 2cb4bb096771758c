"""Results in the terminal: the summary of a run, the tables of a comparison, and what methods gain in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rich.table import Table

from vitfleet.config.registry import METHODS, method_label
from vitfleet.report.columns import COLUMNS, Column, metric_columns, metric_text, metric_title
from vitfleet.report.units import UNKNOWN, format_bytes, format_fraction, format_seconds, format_target, format_times
from vitfleet.run.comparison.results import ComparisonResult, ComparisonRow
from vitfleet.run.output.summary import seed_values
from vitfleet.training.capture.path import ExecutionSummary

_TASK_COLUMNS = ("average", "forgetting", "backward", "forward")
_COMMON_TASK_COLUMNS = ("average", "incremental", "forgetting", "backward", "told")
_HEADINGS = {
    "average": "accuracy",
    "work": "GFLOPs",
    "rounds": "rounds to {}",
    "traffic": "traffic",
    "clock": "clock",
}
_FEDAVG = "fedavg"  # the method that the others save something against
_CLEAR_LOSS = 1.0  # points of accuracy
_WORTH_SAYING = 0.9  # a cost above this share of the other's is not mentioned


def summary_table(summary: dict[str, Any], title: str) -> Table:
    """Return the summary of a run."""
    message, total, client = (summary[key] for key in ("message", "total", "client"))
    warm_up = total.get("warm_up_seconds")
    rows = {
        "method": method_label(summary["method"]),
        "rounds": f"{summary['rounds']} in {total['seconds']:.1f} s"
        + (f", of which {warm_up:.1f} s warm-up" if warm_up else ""),
        **_accuracy_rows(summary),
        **{
            f"metric: {metric_title(name)}": metric_text(name, values)
            for name, values in summary.get("metrics", {}).items()
        },
        **_client_metric_rows(summary),
        "upload per client and round": format_bytes(message["up_bytes"]),
        "download per client and round": format_bytes(message["down_bytes"]),
        "total upload, download": f"{format_bytes(total['up_bytes'])}, {format_bytes(total['down_bytes'])}",
        "parameters, of which trained": f"{client['params']:,}, {client['trainable_params']:,}",
        "training, per image": f"{client['train_gflops']:.3g} GFLOPs",
    }
    if client.get("round_gflops"):
        rows["training, per client and round"] = f"{client['round_gflops']:.3g} GFLOPs"
    if client.get("peak_memory_bytes"):
        rows["peak training memory of a client"] = format_bytes(client["peak_memory_bytes"])
    if total.get("virtual_seconds") is not None:
        rows["virtual time on the simulated devices"] = format_seconds(total["virtual_seconds"])
    if head := summary.get("head"):
        rows["head solved"] = (
            f"{format_times(head['times'])}, {head['gflops']:,.3g} GFLOPs, {format_bytes(head['up_bytes'])} up, "
            f"{format_bytes(head['down_bytes'])} down"
        )
    if summary.get("defence", "off") != "off":
        rows["defence against devices that lie"] = summary["defence"]
    if total["failures"]:
        rows["unused client updates"] = f"{total['failures']} of {total['participations']}"
    if (execution := summary.get("execution")) and execution["clients"] != "none":
        rows["execution of training steps"] = str(ExecutionSummary(**execution))
    if stopped := summary.get("stopped"):
        rows["stopped early"] = f"after round {stopped['round']}: {stopped['reason']}"
    if best := summary.get("best_model"):
        rows["best model"] = f"{best['monitor']} {best['value']:.4g} in round {best['round']}"
    table = Table(title=title or None, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _accuracy_rows(summary: dict[str, Any]) -> dict[str, str]:
    accuracy, continual = summary["accuracy"], summary.get("continual")
    split = summary.get("eval_split", "test")
    if continual is not None:
        columns = [COLUMNS[name] for name in _task_columns([summary])]
        measured = {column.title: found[0] for column in columns if (found := seed_values([summary], column.path))}
        rows = {title: f"{100 * value:.2f} %" for title, value in measured.items()}
        return rows if split == "test" else {"accuracy measured on": f"{split} images", **rows}
    rows = dict.fromkeys((f"{split} accuracy", f"local {split} accuracy"), UNKNOWN)
    if accuracy["global"] is not None:
        rows[f"{split} accuracy"] = f"{accuracy['global']:.2%} (best {accuracy['best']:.2%})"
    if accuracy["local"] is not None:
        rows[f"local {split} accuracy"] = f"{accuracy['local']:.2%}, mean over {accuracy['local_clients']} clients"
    if model := summary.get("server_model"):
        text = f"{model['accuracy']:.2%}, with the mean of {model['averaged_clients']} clients' parts"
        rows[f"{split} accuracy of model.safetensors"] = text
    return rows


def _task_columns(summaries: Iterable[dict[str, Any]]) -> Sequence[str]:
    """Return the columns of runs on tasks: those of the server's model, where tasks are common to all clients."""
    are_common = any("incremental_accuracy" in (summary.get("continual") or {}) for summary in summaries)
    return _COMMON_TASK_COLUMNS if are_common else _TASK_COLUMNS


def _client_metric_rows(summary: dict[str, Any]) -> dict[str, str]:
    """Return a row for each number that the method's clients report; a warning only if it is not zero."""
    values = summary.get("client_metrics", {})
    declared = METHODS[summary["method"]].target.client_metrics if values else ()
    return {
        metric.description: f"{values[metric.name]:,}{' (warning)' if metric.warning else ''}"
        for metric in declared
        if metric.name in values and (values[metric.name] or not metric.warning)
    }


def comparison_tables(comparison: ComparisonResult) -> list[Table]:
    """Return the accuracies of a comparison, one row per configuration; those that learned tasks in their own table."""
    on_tasks = [row for row in comparison.rows if row.has_tasks]
    others = [row for row in comparison.rows if not row.has_tasks]
    to_target = () if comparison.target is None else ("rounds", "traffic", "clock")
    tables = []
    if others:
        tables.append(_results(others, ("accuracy", "local", *to_target), comparison.target))
    if on_tasks:
        tables.append(_results(on_tasks, _task_columns(summary for row in on_tasks for summary in row.summaries)))
    return tables


def comparison_costs_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return the costs of a comparison, one row per configuration."""
    return _results(rows, ("upload", "download", "trained", "work", "memory", "virtual", "time"))


def _results(rows: Sequence[ComparisonRow], names: Iterable[str], target: float | None = None) -> Table:
    """Return a table of results with the meaning of its columns below."""
    split = " or ".join(sorted({summary.get("eval_split", "test") for row in rows for summary in row.summaries}))
    simulated = any(row.mean("total", "virtual_seconds") is not None for row in rows)
    columns = [
        COLUMNS[name].described(split, target) for name in names if simulated or name not in ("virtual", "clock")
    ]
    headings = [_HEADINGS.get(column.name, column.name) for column in columns]
    headings = [heading.format("" if target is None else format_target(target)) for heading in headings]
    meanings: dict[str, list[str]] = {}
    for column, heading in zip(columns, headings, strict=True):
        meanings.setdefault(column.meaning, []).append(heading)
    caption = " · ".join(f"{', '.join(shared)}: {meaning}" for meaning, shared in meanings.items())
    return _filled(plain_table(headings, caption=caption), rows, columns)


def comparison_metrics_tables(rows: Sequence[ComparisonRow]) -> list[Table]:
    """Return a table of the numbers of each configured metric, one row per configuration."""
    by_metric: dict[str, list[Column]] = {}
    for column in metric_columns(summary for row in rows for summary in row.summaries):
        by_metric.setdefault(column.path[1], []).append(column)
    tables = []
    for metric, columns in by_metric.items():
        table = plain_table([column.name for column in columns], title=metric_title(metric))
        tables.append(_filled(table, rows, columns))
    return tables


def _filled(table: Table, rows: Sequence[ComparisonRow], columns: Sequence[Column]) -> Table:
    for row in rows:
        cells = (column.unit.spread(column.mean_std(row.summaries), with_name=True) for column in columns)
        table.add_row(row.label, *cells)
    return table


def plain_table(
    headings: Sequence[str], *, names: str = "", padding: int = 1, title: str | None = None, caption: str | None = None
) -> Table:
    """Return an empty table with a first column for names, under the heading ``names``."""
    table = Table(box=None, padding=(0, padding, 0, 0), title=title, caption=caption)
    table.title_justify = table.caption_justify = "left"
    table.add_column(names, no_wrap=True, style="bold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


class Compared(Protocol):
    """A configuration with its results: of a comparison, or of a report."""

    @property
    def name(self) -> str:
        """The method's name, perhaps with what else distinguishes it."""

    @property
    def label(self) -> str:
        """The name in tables."""

    @property
    def has_tasks(self) -> bool:
        """Whether its runs learn one task after the other."""

    def mean(self, *path: str) -> float | None:
        """Return the mean of a number over the seeds."""


def gain_sentences(rows: Sequence[Compared], alike: Sequence[int] | None = None) -> list[str]:
    """Return a sentence about each row: against the first of the rows that are ``alike``, which have the same number.

    By default those without tasks are, and those with.
    """
    numbers = [int(row.has_tasks) for row in rows] if alike is None else alike
    first = {number: row for number, row in reversed(list(zip(numbers, rows, strict=True)))}
    return [
        (kept_sentence if row.has_tasks else gain_sentence)(row, first[number])
        for number, row in zip(numbers, rows, strict=True)
    ]


def kept_sentence(row: Compared, reference: Compared) -> str:
    """Return what a row still knows after the last of its tasks, against the row of another method."""
    accuracy = format_fraction(row.mean("continual", "average_accuracy"))
    text = f"{row.label}: {accuracy} accuracy over all tasks after the last one; {_forgotten(row)}"
    return f"{text}." if row is reference else f"{text}, {reference.label} {_forgotten(reference)}."


def _forgotten(row: Compared) -> str:
    share = row.mean("continual", "forgetting")
    return (
        "with one task there is nothing to forget" if share is None else f"forgets {max(0.0, 100 * share):.0f} points"
    )


def gain_sentence(row: Compared, reference: Compared) -> str:
    """Return the accuracy of a row and what it saves, against the row of another method."""
    accuracy, other = row.mean("accuracy", "global"), reference.mean("accuracy", "global")
    if accuracy is None or other is None:
        return f"{row.label}: not evaluated."
    if row is reference:
        sent = "; every client sends the whole model" if row.name == _FEDAVG else ""
        return f"{row.label}: {accuracy:.1%} accuracy{sent}."
    difference = round(100 * (accuracy - other), 1)
    compared = f"{abs(difference):.1f} points {'more' if difference > 0 else 'less'} than {reference.label}"
    if not difference:
        compared = f"as much as {reference.label}"
    costs = {"upload": ("message", "up_bytes"), "operations on the client": ("client", "round_gflops")}
    found = {what: share for what, path in costs.items() if (share := _share(row, reference, path)) is not None}
    saved = ", with " + " and ".join(f"{share:.0%} of its {what}" for what, share in found.items()) if found else ""
    paid = ": here it pays with accuracy for what it saves" if found and difference <= -_CLEAR_LOSS else ""
    return f"{row.label}: {accuracy:.1%} accuracy, {compared}{saved}{paid}."


def _share(row: Compared, reference: Compared, path: tuple[str, str]) -> float | None:
    """Return a cost of a row as a share of the other's; ``None`` if it saves too little to be worth saying."""
    cost, other = row.mean(*path), reference.mean(*path)
    share = cost / other if cost is not None and other else 1.0
    return share if share < _WORTH_SAYING else None
