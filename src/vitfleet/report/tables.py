"""Tables for the terminal: summaries, comparisons, costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from vitfleet.config.registry import METHODS, method_label
from vitfleet.report.metric_format import format_number, metric_text, metric_title, shown_numbers
from vitfleet.report.units import format_bytes, format_count, format_seconds, format_target
from vitfleet.run.compare import ComparisonResult, ComparisonRow
from vitfleet.training.execution import ExecutionSummary

_CONTINUAL_ROWS = {
    "average_accuracy": "average accuracy over all tasks",
    "forgetting": "forgetting",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
}


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
        "training, per sample": f"{client['train_gflops']:.3g} GFLOPs",
    }
    if client.get("peak_memory_bytes"):
        rows["peak training memory of a client"] = format_bytes(client["peak_memory_bytes"])
    if total.get("virtual_seconds") is not None:
        rows["virtual time on the simulated devices"] = format_seconds(total["virtual_seconds"])
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
        table.add_row(name, str(value))
    return table


def comparison_tables(comparison: ComparisonResult) -> list[Table]:
    """Return the accuracies of a comparison, one row per configuration; those that learned tasks in their own table."""
    on_tasks = [row for row in comparison.rows if row.has_tasks]
    others = [row for row in comparison.rows if not row.has_tasks]
    tables = [accuracy_table(others, comparison.target)] if others else []
    return [*tables, continual_table(on_tasks)] if on_tasks else tables


def accuracy_table(rows: Sequence[ComparisonRow], target: float | None) -> Table:
    """Return the accuracies of configurations without tasks, and when they reached the target."""
    virtual = _has_virtual_time(rows)
    split = _eval_splits(rows)
    caption = f"accuracy: common {split} set · local: clients' own models on their own {split} images"
    headings = ["accuracy", "local"]
    if target is not None:
        percent = format_target(target)
        until = f"until {percent} accuracy"
        caption += f" · {until}: rounds, bytes of all clients{', virtual time' if virtual else ''}"
        headings += [f"rounds to {percent}", "bytes", *(["virtual"] if virtual else [])]
    table = plain_table(caption, headings)
    for row in rows:
        cells = [_percent(row, "accuracy", "global", 100), _percent(row, "accuracy", "local", 100)]
        if target is not None:
            cells += [
                _mean(row, "to_target", "rounds", "{:.3g}".format),
                _mean(row, "to_target", "bytes", format_bytes),
            ]
            cells += [_mean(row, "to_target", "virtual_seconds", format_seconds)] if virtual else []
        table.add_row(row.label, *cells)
    return table


def comparison_metrics_tables(rows: Sequence[ComparisonRow]) -> list[Table]:
    """Return a table of the numbers of each configured metric, one row per configuration."""
    keys: dict[str, dict[str, None]] = {}
    for metrics in (summary.get("metrics", {}) for row in rows for summary in row.summaries):
        for metric, values in metrics.items():
            keys.setdefault(metric, {}).update(dict.fromkeys(shown_numbers(metric, values)))
    tables = []
    for metric, shown in keys.items():
        if shown:
            tables.append(plain_table(None, [key.replace("_", " ") for key in shown]))
            tables[-1].title, tables[-1].title_justify = metric_title(metric), "left"
            for row in rows:
                tables[-1].add_row(row.label, *(_metric_cell(row, metric, key) for key in shown))
    return tables


def _metric_cell(row: ComparisonRow, metric: str, key: str) -> str:
    mean = row.mean(f"metrics.{metric}", key)
    return "–" if mean is None else format_number(metric, key, mean, row.spread(f"metrics.{metric}", key))


def comparison_costs_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return the costs of a comparison, one row per configuration."""
    virtual = _has_virtual_time(rows)
    caption = (
        "upload, download: per client and round · trained: parameters · GFLOPs: per sample · memory: peak of a client"
    )
    if virtual:
        caption += " · virtual: time of the run on the simulated devices"
    headings = ["upload", "download", "trained", "GFLOPs", "memory", *(["virtual"] if virtual else []), "time"]
    table = plain_table(caption, headings)
    for row in rows:
        table.add_row(
            row.label,
            _mean(row, "message", "up_bytes", format_bytes),
            _mean(row, "message", "down_bytes", format_bytes),
            _mean(row, "client", "trainable_params", format_count),
            _mean(row, "client", "train_gflops", "{:.2g}".format),
            _mean(row, "client", "peak_memory_bytes", format_bytes),
            *([_mean(row, "total", "virtual_seconds", format_seconds)] if virtual else []),
            _mean(row, "total", "seconds", "{:.0f} s".format),
        )
    return table


def continual_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return a comparison of runs on task streams: accuracy, forgetting, transfer, costs."""
    caption = (
        "accuracy: mean over all tasks after the last one, clients' own models and "
        f"{_eval_splits(rows)} images · "
        "backward, forward: transfer · upload, download: per client and round"
    )
    headings = ["accuracy", "forgetting", "backward", "forward", "upload", "download", "time"]
    table = plain_table(caption, headings)
    for row in rows:
        table.add_row(
            row.label,
            *(_percent(row, "continual", key, 1) for key in _CONTINUAL_ROWS),
            _mean(row, "message", "up_bytes", format_bytes),
            _mean(row, "message", "down_bytes", format_bytes),
            _mean(row, "total", "seconds", "{:.0f} s".format),
        )
    return table


def plain_table(caption: str | None, headings: Sequence[str], padding: int = 1) -> Table:
    """Return an empty table with a first column for names."""
    table = Table(box=None, padding=(0, padding, 0, 0), caption=caption, caption_justify="left")
    table.add_column("", no_wrap=True, style="bold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _eval_splits(rows: Sequence[ComparisonRow]) -> str:
    """Return what accuracies were measured on: ``test``, ``validation``, or both."""
    return " or ".join(sorted({summary.get("eval_split", "test") for row in rows for summary in row.summaries}))


def _has_virtual_time(rows: Sequence[ComparisonRow]) -> bool:
    return any(row.mean("total", "virtual_seconds") is not None for row in rows)


def _mean(row: ComparisonRow, table: str, key: str, format: Callable[[float], str]) -> str:
    mean = row.mean(table, key)
    return "–" if mean is None else format(mean)


def _percent(row: ComparisonRow, table: str, key: str, scale: float) -> str:
    """Return mean and standard deviation over the seeds in percent; ``scale`` is 100 for fractions, 1 for percent."""
    mean, deviation = row.mean(table, key), row.spread(table, key)
    if mean is None:
        return "–"
    return f"{scale * mean:.1f}{'' if deviation is None else f' ± {scale * deviation:.1f}'} %"


def _accuracy_rows(summary: dict[str, Any]) -> dict[str, str]:
    """Return the accuracy rows of a summary; those of a task stream are in percent already."""
    accuracy, continual = summary["accuracy"], summary.get("continual")
    split = summary.get("eval_split", "test")
    if continual is None:
        unknown = "–"
        common = accuracy["global"]
        local = accuracy["local"]
        rows = {
            f"{split} accuracy": unknown if common is None else f"{common:.2%} (best {accuracy['best']:.2%})",
            f"local {split} accuracy": unknown
            if local is None
            else f"{local:.2%}, mean over {accuracy['local_clients']} clients",
        }
        if model := summary.get("server_model"):
            text = f"{model['accuracy']:.2%}, with the mean of {model['averaged_clients']} clients' parts"
            rows[f"{split} accuracy of model.safetensors"] = text
        return rows
    rows = {title: f"{continual[key]:.2f} %" for key, title in _CONTINUAL_ROWS.items() if continual[key] is not None}
    return rows if split == "test" else {"accuracy measured on": f"{split} images", **rows}


def _client_metric_rows(summary: dict[str, Any]) -> dict[str, str]:
    """Return a row for each number that the method's clients report; a warning only if it is not zero."""
    values = summary.get("client_metrics", {})
    declared = METHODS[summary["method"]].target.client_metrics if values else ()
    return {
        metric.description: f"{values[metric.name]:,}{' (warning)' if metric.warning else ''}"
        for metric in declared
        if metric.name in values and (values[metric.name] or not metric.warning)
    }
