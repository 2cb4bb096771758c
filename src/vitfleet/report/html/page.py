"""Reports: one self-contained HTML page that opens without a network, its figures as files, and a live page."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitfleet import __version__
from vitfleet.config.run_title import run_title
from vitfleet.files import COMPARISON_FILE, make_folder, write_atomically
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.columns import COLUMNS, COMPARABLE_NOTE, Column, best_rows, comparable_rows, metric_columns
from vitfleet.report.console.results import gain_sentences
from vitfleet.report.figures.curves import comparison_figures
from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.folder import can_draw
from vitfleet.report.figures.runs import configuration_figures, partition_figures
from vitfleet.report.figures.types import Figure, to_json
from vitfleet.report.runs import RunGroup, all_finished, eval_splits, read_groups
from vitfleet.run.comparison.manifest import member_folders, read_target
from vitfleet.run.comparison.results import read_comparison
from vitfleet.run.output.folder import next_free_folder
from vitfleet.run.output.summary import is_finished

PAGE = "report.html"
FIGURES = "figures"
REFRESH_SECONDS = 5
MAX_NAMES_LENGTH = 60
# The columns of the page's two tables, as far as a configuration has values for them.
# Metrics come after these.
RESULT_COLUMNS = ("accuracy", "local", "rounds", "traffic", "average", "incremental", "forgetting", "told")
COST_COLUMNS = ("upload", "download", "trained", "gflops", "work", "memory", "virtual", "time")
MAX_VERDICTS = 8  # configurations that are described in a sentence each
SCRIPTS = ("page_svg.js", "page_charts.js", "page_values.js", "page.js")


def report_folder(paths: Sequence[Path], out: Path | None) -> Path:
    """Return the folder of a report: ``out``, or the run's or comparison's own, or for several a new one in runs/."""
    if out is not None:
        return out
    return paths[0] if len(paths) == 1 else next_free_folder(Path("runs"), "report")


def write_report(
    paths: Sequence[Path],
    out: Path | None = None,
    progress: Progress = NO_PROGRESS,
    target: float | None = None,
    figure_files: bool = True,
) -> Path:
    """Write the report of runs and comparisons: the page, whose path is returned, and figures as SVG, PDF and PNG.

    The page has the rounds and the traffic to a target accuracy; by default that is the comparison's own. It does not
    need the ``figure_files``, which take longer than the page.
    """
    groups = read_groups(paths)
    figures = report_figures(groups)
    folder = make_folder(report_folder(paths, out))
    write_atomically(folder / PAGE, render(groups, figures, target=_target(paths, target)).encode())
    if figure_files and can_draw():
        (folder / FIGURES).mkdir(exist_ok=True)
        shared = compared_names(groups)  # figures of one configuration have its name already
        drawn = [(figure, shared if name == "curves" else "") for name in figures for figure in figures[name]]
        with progress.task("figures", len(drawn)) as advance:
            for figure, names in drawn:
                draw_files(figure, folder / FIGURES, names)
                advance(1)
    return folder / PAGE


def watch_report(
    paths: Sequence[Path],
    out: Path | None = None,
    announce: Callable[[Path], None] = lambda page: None,
    wait: Callable[[float], None] = time.sleep,
    target: float | None = None,
) -> Path:
    """Update the page every few seconds until all its runs are finished, then write the whole report.

    ``announce`` is called once with the path of the page, ``wait`` with the seconds between two updates.
    """
    folder = make_folder(report_folder(paths, out))
    announced = False
    while not all_finished(groups := read_groups(paths)):
        page = render(groups, report_figures(groups), live=True, target=_target(paths, target))
        write_atomically(folder / PAGE, page.encode())
        if not announced:
            announce(folder / PAGE)
            announced = True
        wait(REFRESH_SECONDS)
    return write_report(paths, folder, target=target)


def _target(paths: Sequence[Path], chosen: float | None) -> float | None:
    """Return the accuracy to reach: the chosen one, or that of a comparison; ``None``: there is none yet."""
    if chosen is not None or len(paths) != 1 or not (paths[0] / COMPARISON_FILE).is_file():
        return chosen
    finished = all(is_finished(folder) for _, folder in member_folders(paths[0]))
    return read_comparison(paths[0]).target if finished else read_target(paths[0])


def report_figures(groups: Sequence[RunGroup]) -> dict[str, list[Figure]]:
    """Return the figures of a report by the section of the page that shows them."""
    sections: dict[str, list[Figure]] = {
        "curves": [*comparison_figures(groups)],
        "partitions": partition_figures(groups),
    }
    used: set[str] = set()
    for index, group in enumerate(groups):
        name = file_name(group.label)
        prefix = name if name not in used else f"{name}-{index + 1}"
        used.add(prefix)
        sections[section_id(index)] = configuration_figures(group, prefix)
    return sections


def file_name(label: str) -> str:
    """Return a configuration's label as the beginning or end of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "configuration"


def compared_names(groups: Sequence[RunGroup]) -> str:
    """Return the end of the names of files that show all configurations: their labels, or how many there are."""
    names = "-".join(file_name(group.label) for group in groups)
    return names if len(names) <= MAX_NAMES_LENGTH else f"{len(groups)}-configurations"


def section_id(index: int) -> str:
    """Return the id of a configuration's section of the page."""
    return f"configuration-{index + 1}"


def render(
    groups: Sequence[RunGroup], figures: dict[str, list[Figure]], live: bool = False, target: float | None = None
) -> str:
    """Return the page; a live one reloads itself every few seconds. For ``target`` see :func:`result_columns`."""
    data = {
        "groups": [{"label": group.label} for group in groups],
        "figures": {section: [to_json(figure) for figure in drawn] for section, drawn in figures.items()},
    }
    assets = files("vitfleet.report.html")
    names = ", ".join(group.label for group in groups[:3]) + (" …" if len(groups) > 3 else "")
    title = run_title(groups[0].runs[0].config) if len(groups) == 1 else names
    values = {
        "refresh": f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n' if live else "",
        "title": escape(title),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "subtitle": _subtitle(groups, live),
        "verdicts": _verdicts(groups),
        "table": _table(groups, result_columns(groups, target), "results"),
        "costs": _table(groups, cost_columns(groups), "costs"),
        "note": f"<p><small>{COMPARABLE_NOTE}</small></p>" if len(set(comparable_rows(groups))) > 1 else "",
        "command": _common_command(groups),
        "configurations": "\n".join(_section(group, section_id(index)) for index, group in enumerate(groups)),
        "version": escape(__version__),
        # The data is inside a script element: nothing in it may look like the end of that element.
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        "script": "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    first, *parts = page.split("{")
    # Each value is inserted once and not scanned again: a run's name cannot refer to a placeholder of the page.
    return first + "".join(values[name] + rest for name, _, rest in (part.partition("}") for part in parts))


def _subtitle(groups: Sequence[RunGroup], live: bool) -> str:
    runs = [run for group in groups for run in group.runs]
    data = sorted({run.config["data"]["name"] for run in runs})
    labels: dict[str, list[str]] = {}
    for group in groups:
        labels.setdefault(_fleet(group.runs[0].config), []).append(group.label)
    fleets = [fleet if len(labels) == 1 else f"{fleet} ({', '.join(of)})" for fleet, of in labels.items()]
    text = escape(f"{', '.join(data)} · {' · '.join(fleets)} · {len(runs)} run{'' if len(runs) == 1 else 's'}")
    if (split := eval_splits(groups)) != "test":
        text += f" · accuracy on {split} images"
    if not all_finished(groups):
        done = sum(len(run.records) for run in runs)
        planned = sum(int(run.config["rounds"]) for run in runs)
        text += f' · <span class="live">{"live: " if live else ""}{done} of {planned} rounds</span>'
    return text


def _fleet(config: Mapping[str, Any]) -> str:
    fleet, tasks = config["fleet"], config["data"].get("tasks")
    learned = f", {tasks['count']} tasks" if tasks else ""
    return f"{fleet['clients']} clients, {fleet['per_round']} per round{learned}"


def _verdicts(groups: Sequence[RunGroup]) -> str:
    """Return what each configuration gained against the first one that is comparable with it."""
    if not all_finished(groups) or not 1 < len(groups) <= MAX_VERDICTS:
        return ""
    sentences = gain_sentences(groups, comparable_rows(groups))
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


@dataclass(frozen=True)
class SummaryColumn:
    """A column of the page's table."""

    heading: str
    description: str  # the tooltip of the heading
    cells: list[str]  # one per configuration
    best: frozenset[int] = frozenset()  # indices of the best configurations


def result_columns(groups: Sequence[RunGroup], target: float | None = None) -> list[SummaryColumn]:
    """Return the columns of accuracies and metrics; unfinished runs have the values so far.

    A target accuracy adds the rounds and the traffic after which it was reached.
    """
    finished = [run.summary for group in groups for run in group.runs if run.summary is not None]
    split = eval_splits(groups)
    declared = [COLUMNS[name].described(split, target) for name in RESULT_COLUMNS]
    rounds = [] if all_finished(groups) else [_rounds_column(groups)]
    return [*rounds, *_filled(groups, [*declared, *metric_columns(finished)], target)]


def cost_columns(groups: Sequence[RunGroup]) -> list[SummaryColumn]:
    """Return the columns of bytes, operations, memory and time."""
    return _filled(groups, [COLUMNS[name] for name in COST_COLUMNS], None)


def _filled(groups: Sequence[RunGroup], columns: Sequence[Column], target: float | None) -> list[SummaryColumn]:
    """Return the columns for which at least one configuration has a value."""
    summaries = [[run.summary_until(target) for run in group.runs if run.summary or run.records] for group in groups]
    comparable, filled = comparable_rows(groups), []
    for column in columns:
        spreads = [column.mean_std(of_group) for of_group in summaries]
        if any(spreads):
            means = [found and found.mean for found in spreads]
            best = best_rows(column.best, means, column.unit, comparable)
            heading = column.heading if column.unit.auto is None else column.title
            cells = [column.unit.spread(found) for found in spreads]
            filled.append(SummaryColumn(heading, column.meaning, cells, best))
    return filled


def _rounds_column(groups: Sequence[RunGroup]) -> SummaryColumn:
    done = [sum(len(run.records) for run in group.runs) for group in groups]
    planned = [sum(int(run.config["rounds"]) for run in group.runs) for group in groups]
    cells = [f"{count} of {total}" for count, total in zip(done, planned, strict=True)]
    return SummaryColumn("rounds", "finished so far, of all seeds", cells)


def _table(groups: Sequence[RunGroup], columns: Sequence[SummaryColumn], name: str) -> str:
    if not columns:
        return ""
    headings = "".join(
        f'<th scope="col" title="{escape(column.description)}">{escape(column.heading).replace(" %", "&nbsp;%")}</th>'
        for column in columns
    )
    rows = []
    for index, group in enumerate(groups):
        marks = [' class="best"' if index in column.best else "" for column in columns]
        cells = "".join(
            f"<td{mark}>{escape(column.cells[index])}</td>" for mark, column in zip(marks, columns, strict=True)
        )
        link = f'<a href="#{section_id(index)}-runs">{escape(group.label)}</a>'
        rows.append(f'<tr><th scope="row">{link}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>'
        f"<thead><tr><th></th>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _common_command(groups: Sequence[RunGroup]) -> str:
    """Return the command that made all runs, where one did."""
    runs = [run for group in groups for run in group.runs]
    commands = {run.about.get("command", "") for run in runs}
    if not all(run.compared for run in runs) or len(commands) > 1 or "" in commands:
        return ""
    return f"<p>All of them:</p>{_reproduce(commands.pop())}"


def _reproduce(command: str) -> str:
    return f'<div class="reproduce"><pre>{escape(command)}</pre><button class="copy" type="button">copy</button></div>'


def _section(group: RunGroup, id: str) -> str:
    run = group.runs[0]
    seeds = f"seed {run.seed}"
    if len(group.runs) > 1:
        seeds = f"seeds {', '.join(str(member.seed) for member in group.runs)}; figures of seed {run.seed}"
    config = json.dumps(run.config, indent=2, ensure_ascii=False)
    # The command of a comparison would make all of its runs.
    again = f"vitfleet run {shlex.quote(str(run.path / 'config.json'))}"
    command = again if run.compared else run.about.get("command", again)
    versions = ", ".join(f"{name} {version}" for name, version in run.about.get("versions", {}).items() if version)
    return (
        f'<details id="{id}-runs" open><summary>{escape(group.label)} '
        f"<small>{escape(run.config['method']['name'])}, {escape(seeds)}</small></summary>"
        f'<div class="grid" id="{id}"></div>'
        f"<p>Command ({escape(versions)}):</p>{_reproduce(command)}"
        f"<details><summary>configuration</summary><pre>{escape(config)}</pre></details></details>"
    )
