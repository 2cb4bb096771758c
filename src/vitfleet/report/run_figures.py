"""Which figures a report holds: the curves of all configurations, and what is peculiar to one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from vitfleet.methods.median_sampling import threshold_of
from vitfleet.report.figure_types import Bars, Figure, Heat, Lines, Picture, Series, Spans, View
from vitfleet.report.partition_plot import LABELLED_CLIENTS, by_dominant_class, condense
from vitfleet.report.runs import Group, RunView, devices_of
from vitfleet.run.records import RoundRecord

MEGABYTE = 1e6
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
CLIENT_ROWS = 200  # a figure has no more rows than this: in a larger fleet neighbours are averaged

Reading = Callable[[RoundRecord], float | None]


def common_figures(groups: Sequence[Group]) -> list[Figure]:
    """Return the figures that compare the configurations."""
    figures: list[Figure] = []
    axes = _axes(groups)

    def curves(id: str, title: str, label: str, value: Reading, percent: bool = False, note: str = "") -> None:
        views = [view for axis in axes if (view := _view(groups, axis, value)) is not None]
        if views:
            figures.append(Lines(id, title, label, views, percent, note))

    curves("accuracy", "Accuracy on the common test set", "accuracy", _global, percent=True)
    curves("learned", "Average accuracy on the tasks learned", "accuracy", _learned, percent=True)
    curves("forgetting", "Forgetting of tasks learned before", "share", _forgotten, percent=True)
    curves("local", "Accuracy of clients' own models at home", "accuracy", _local, percent=True)
    curves("test-loss", "Loss on the common test set", "cross-entropy", _test_loss)
    curves("train-loss", "Training loss of the clients", "loss", lambda record: record.loss)
    for id, title, value in (("up", "Bytes up, a round", _up), ("down", "Bytes down, a round", _down)):
        view = _view(groups, _ROUNDS, value)
        if view is not None:
            note = "All of a round's clients together. The first contact with a client brings it the initial model."
            figures.append(Lines(f"bytes-{id}", title, "MB", [view], note=note if id == "down" else ""))
    return figures


def detail_figures(group: Group, id: str) -> list[Figure]:
    """Return the figures of one configuration, from its first seed."""
    run = group.runs[0]
    made = (_sent, _heads, _labels, _patches, _tasks, _forgetting, _timeline)
    return [figure for make in made if (figure := make(run, id)) is not None]


def partitions(groups: Sequence[Group]) -> list[Figure]:
    """Return who holds what: one figure for every way in which the images were dealt."""
    figures: dict[str, Figure] = {}
    for group in groups:
        for run in group.runs:
            if run.partition is None or (key := run.partition["sha256"]) in figures:
                continue
            counts = np.asarray(run.partition["counts"], dtype=np.int64)
            clients = len(counts)
            named = clients <= LABELLED_CLIENTS
            rows = counts if named else condense(counts[by_dominant_class(counts)], CLIENT_ROWS)
            averaged = "; a row is the mean of neighbours" if len(rows) < clients else ""
            figures[key] = Heat(
                id=f"partition-{len(figures) + 1}",
                title=f"Images of each class on each client, seed {run.seed}",
                values=rows.tolist(),
                row_label="client",
                column_label="class",
                rows=[str(client) for client in range(clients)] if named else [],
                columns=run.partition["classes"],
                note="" if named else f"{clients:,} clients, sorted by their dominant class{averaged}.",
            )
    return list(figures.values())


def _global(record: RoundRecord) -> float | None:
    return record.accuracy.global_ if record.accuracy else None


def _local(record: RoundRecord) -> float | None:
    return record.accuracy.local if record.accuracy else None


def _learned(record: RoundRecord) -> float | None:
    return record.task.average_accuracy if record.task else None


def _forgotten(record: RoundRecord) -> float | None:
    return record.task.forgetting if record.task else None


def _test_loss(record: RoundRecord) -> float | None:
    return record.accuracy.loss if record.accuracy else None


def _up(record: RoundRecord) -> float:
    return sum(entry.up_bytes for entry in record.clients) / MEGABYTE


def _down(record: RoundRecord) -> float:
    return sum(entry.down_bytes for entry in record.clients) / MEGABYTE


def _megabytes(record: RoundRecord) -> float:
    return (record.total_up_bytes + record.total_down_bytes) / MEGABYTE


Axis = tuple[str, str, Reading]
_ROUNDS: Axis = ("rounds", "round", lambda record: record.round)


def _axes(groups: Sequence[Group]) -> list[Axis]:
    seconds, unit = _clock_unit([run for group in groups for run in group.runs])

    def clock(record: RoundRecord) -> float | None:
        return None if record.virtual_seconds is None else record.virtual_seconds / seconds

    return [
        _ROUNDS,
        ("megabytes", "MB up and down, all clients", _megabytes),
        ("virtual time", f"virtual {unit}", clock),
    ]


def _clock_unit(runs: Sequence[RunView]) -> tuple[float, str]:
    """Return the unit in which the longest of these runs reads well."""
    longest = max((record.virtual_seconds or 0.0 for run in runs for record in run.records), default=0.0)
    return next((size, name) for size, name in _UNITS if longest >= 3 * size or size == 1)


def _view(groups: Sequence[Group], axis: Axis, value: Reading) -> View | None:
    """Return every configuration's curve over an axis; ``None`` where no run has both."""
    name, label, place = axis
    series = [one for style, group in enumerate(groups) if (one := _curve(group, style, place, value)) is not None]
    return View(name, label, series) if series else None


def _curve(group: Group, style: int, place: Reading, value: Reading) -> Series | None:
    """Average a configuration's seeds round by round; the band is one standard deviation to each side."""
    at: dict[int, list[tuple[float, float]]] = {}
    for run in group.runs:
        for record in run.records:
            where, reached = place(record), value(record)
            if where is not None and reached is not None:
                at.setdefault(record.round, []).append((where, reached))
    if not at:
        return None
    # While runs go on, some are ahead: a mean over fewer seeds would jump where one of them ends.
    full = max(len(points) for points in at.values())
    points = [found for _, found in sorted(at.items()) if len(found) == full]
    x = [statistics.mean(one[0] for one in found) for found in points]
    y = [statistics.mean(one[1] for one in found) for found in points]
    if full < 2:
        return Series(group.label, style, x, y)
    spread = [statistics.stdev(one[1] for one in found) for found in points]
    low, high = ([mean + sign * by for mean, by in zip(y, spread, strict=True)] for sign in (-1, 1))
    return Series(group.label, style, x, y, low, high)


def _sent(run: RunView, id: str) -> Figure | None:
    maps = run.layers
    if maps is None:
        return None
    return Heat(
        id=f"{id}-layers",
        title="Share of the round's clients that sent a layer",
        values=maps.chosen.tolist(),
        row_label="layer",
        column_label="round",
        rows=[str(layer + 1) for layer in range(len(maps.chosen))],
        columns=[str(round) for round in maps.rounds],
        percent=True,
    )


def _heads(run: RunView, id: str) -> Figure | None:
    maps = run.layers
    if maps is None or maps.heads is None:
        return None
    return Heat(
        id=f"{id}-heads",
        title="Mean |gradient| of every head, largest = 1",
        values=(maps.heads / maps.heads.max()).tolist(),
        row_label="layer",
        column_label="head",
        rows=[str(layer + 1) for layer in range(maps.heads.shape[0])],
        columns=[str(head + 1) for head in range(maps.heads.shape[1])],
        warm=True,
    )


def _labels(run: RunView, id: str) -> Figure | None:
    """EFTViT: a client's labels as they are, and as many of every class as it sends."""
    method = run.config["method"]
    if method["name"] != "eftvit" or run.partition is None:
        return None
    counts = np.asarray(run.partition["counts"], dtype=np.int64)
    # The busiest client shows most: at strong heterogeneity many hold a class or two.
    client = int(counts.sum(axis=1).argmax())
    before = counts[client]
    target = threshold_of(before[before > 0], method["threshold"])
    return Bars(
        id=f"{id}-labels",
        title=f"Labels of client {client} before and after sampling",
        label="samples",
        column_label="class",
        names=run.partition["classes"],
        series=[("its images", before.tolist()), ("its features, sent", np.where(before > 0, target, 0).tolist())],
        note=f"Every class that it holds is brought to {target}, the {method['threshold']:.0%} quantile of its counts.",
    )


def _patches(run: RunView, id: str) -> Figure | None:
    if run.patches is None:
        return None
    kept = 1 - run.config["train"]["mask_ratio"]
    return Picture(f"{id}-patches", f"What a client sees: {kept:.0%} of the patches, others at every step", run.patches)


def _tasks(run: RunView, id: str) -> Figure | None:
    """Return the accuracy on every task after every task, if the run learned task after task."""
    continual = (run.summary or {}).get("continual")
    if not continual:
        return None
    matrix = continual["matrix"]
    return Heat(
        id=f"{id}-tasks",
        title="Accuracy on each task, after each task",
        values=[[None if one is None else one / 100 for one in row] for row in matrix],
        row_label="after task",
        column_label="on task",
        rows=[str(task + 1) for task in range(len(matrix))],
        columns=[str(task + 1) for task in range(len(matrix[0]))],
        percent=True,
        note="Mean over clients, each on its own order of tasks; right of the diagonal a task that is yet to come.",
    )


def _forgetting(run: RunView, id: str) -> Figure | None:
    """Return average accuracy and forgetting after every task."""
    learned = [record.task for record in run.records if record.task]
    if not learned:
        return None
    after = [one.task for one in learned]
    series = [
        Series("average accuracy", 0, after, [one.average_accuracy for one in learned]),
        Series("forgetting", 1, after, [one.forgetting for one in learned]),
    ]
    return Lines(
        f"{id}-forgetting", "Average accuracy and forgetting", "share", [View("tasks", "tasks learned", series)], True
    )


def _timeline(run: RunView, id: str) -> Figure | None:
    """Who trained when, by the virtual clock."""
    spans: list[tuple[int, float, float, bool]] = []
    clients = sorted({entry.client for record in run.records for entry in record.clients if entry.ended is not None})
    if not clients:
        return None
    seconds, unit = _clock_unit([run])
    place = {client: row for row, client in enumerate(clients)}
    for record in run.records:
        for entry in record.clients:
            if entry.began is not None and entry.ended is not None:
                when = entry.began / seconds, entry.ended / seconds
                spans.append((place[entry.client], *when, entry.failure is None))
    devices = devices_of(run)
    names = [f"{client} {devices[client]}" if devices else str(client) for client in clients]
    note = "Receiving, training and sending; pale: the answer was not used."
    return Spans(f"{id}-timeline", "Who was busy when", f"virtual {unit}", names, spans, note)
