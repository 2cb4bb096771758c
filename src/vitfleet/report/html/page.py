"""Reports: one self-contained HTML page that opens without a network, its figures as files, and a live page."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from vitfleet import __version__
from vitfleet.config.run_title import run_title
from vitfleet.files import COMPARISON_FILE, make_folder, write_atomically
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.columns import COLUMNS, COMPARABLE_NOTE, best_rows, comparable_rows, metric_columns
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
# The columns of the page's table, as far as a configuration has values for them; metrics come after these.
TABLE_COLUMNS = (
    "accuracy", "local", "rounds", "traffic", "average", "forgetting", "upload", "download", "trained", "gflops",
    "memory", "virtual", "time",
)  # fmt: skip
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
    """Return the page; a live one reloads itself every few seconds. For ``target`` see :func:`summary_columns`."""
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
        "table": _table(groups, target),
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
    fleet = runs[0].config["fleet"]
    text = f"{', '.join(data)} · {fleet['clients']} clients, {fleet['per_round']} per round · {len(runs)} run"
    text = escape(text + ("" if len(runs) == 1 else "s"))
    if (split := eval_splits(groups)) != "test":
        text += f" · accuracy on {split} images"
    if not all_finished(groups):
        done = sum(len(run.records) for run in runs)
        planned = sum(int(run.config["rounds"]) for run in runs)
        text += f' · <span class="live">{"live: " if live else ""}{done} of {planned} rounds</span>'
    return text


@dataclass(frozen=True)
class SummaryColumn:
    """A column of the page's table."""

    heading: str
    description: str  # the tooltip of the heading
    cells: list[str]  # one per configuration
    best: frozenset[int] = frozenset()  # indices of the best configurations


def summary_columns(groups: Sequence[RunGroup], target: float | None = None) -> list[SummaryColumn]:
    """Return the columns for which at least one configuration has a value, unfinished runs with those so far.

    A target accuracy adds the rounds and the traffic after which it was reached.
    """
    summaries = [[run.summary_until(target) for run in group.runs if run.summary or run.records] for group in groups]
    finished = [run.summary for group in groups for run in group.runs if run.summary is not None]
    split, comparable = eval_splits(groups), comparable_rows(groups)
    declared = [COLUMNS[name].described(split, target) for name in TABLE_COLUMNS]
    columns = [] if all_finished(groups) else [_rounds_column(groups)]
    for column in (*declared, *metric_columns(finished)):
        spreads = [column.mean_std(of_group) for of_group in summaries]
        if any(spreads):
            means = [found and found.mean for found in spreads]
            best = best_rows(column.best, means, column.unit, comparable)
            heading = column.heading if column.unit.auto is None else column.title
            cells = [column.unit.spread(found) for found in spreads]
            columns.append(SummaryColumn(heading, column.meaning, cells, best))
    return columns


def _rounds_column(groups: Sequence[RunGroup]) -> SummaryColumn:
    done = [sum(len(run.records) for run in group.runs) for group in groups]
    planned = [sum(int(run.config["rounds"]) for run in group.runs) for group in groups]
    cells = [f"{count} of {total}" for count, total in zip(done, planned, strict=True)]
    return SummaryColumn("rounds", "finished so far, of all seeds", cells)


def _table(groups: Sequence[RunGroup], target: float | None) -> str:
    columns = summary_columns(groups, target)
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
    note = f"<p><small>{COMPARABLE_NOTE}</small></p>" if len(set(comparable_rows(groups))) > 1 else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="summary"><table>'
        f"<thead><tr><th></th>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _section(group: RunGroup, id: str) -> str:
    run = group.runs[0]
    seeds = f"seed {run.seed}"
    if len(group.runs) > 1:
        seeds = f"seeds {', '.join(str(member.seed) for member in group.runs)}; figures of seed {run.seed}"
    config = json.dumps(run.config, indent=2, ensure_ascii=False)
    command = run.about.get("command", f"vitfleet run {run.path / 'config.json'}")
    versions = ", ".join(f"{name} {version}" for name, version in run.about.get("versions", {}).items() if version)
    return (
        f'<details id="{id}-runs" open><summary>{escape(group.label)} '
        f"<small>{escape(run.config['method']['name'])}, {escape(seeds)}</small></summary>"
        f'<div class="grid" id="{id}"></div>'
        f'<p>Command ({escape(versions)}):</p><div class="reproduce"><pre>{escape(command)}</pre>'
        f'<button class="copy" type="button">copy</button></div>'
        f"<details><summary>configuration</summary><pre>{escape(config)}</pre></details></details>"
    )
