"""Writes reports: the page, its figures as files, and a live page for unfinished runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitfleet.files import COMPARISON_FILE, make_folder, write_atomically
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.figures.files import draw_files
from vitfleet.report.figures.folder import can_draw
from vitfleet.report.html.page import REFRESH_SECONDS, compared_names, render, report_figures
from vitfleet.report.runs import all_finished, read_groups
from vitfleet.run.comparison.manifest import member_folders, read_target
from vitfleet.run.comparison.results import read_comparison
from vitfleet.run.output.folder import next_free_folder
from vitfleet.run.output.summary import is_finished

PAGE = "report.html"
FIGURES = "figures"


@dataclass(frozen=True)
class WrittenReport:
    """The files of a report: its page, and its figures (none without matplotlib)."""

    page: Path
    figures: list[Path]


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
) -> WrittenReport:
    """Write the report of runs and comparisons: the page, and every figure as SVG, PDF and PNG.

    Parameters
    ----------
    target
        An accuracy: the page has the rounds and the traffic to it; default: the comparison's own.
    figure_files
        Whether figures are written as files too, which takes longer than the page. The page does not need them.
    """
    groups = read_groups(paths)
    figures = report_figures(groups)
    folder = make_folder(report_folder(paths, out))
    write_atomically(folder / PAGE, render(groups, figures, target=_target(paths, target)).encode())
    files: list[Path] = []
    if figure_files and can_draw():
        (folder / FIGURES).mkdir(exist_ok=True)
        shared = compared_names(groups)  # figures of one configuration have its name already
        drawn = [(figure, shared if name == "curves" else "") for name in figures for figure in figures[name]]
        with progress.task("figures", len(drawn)) as advance:
            for figure, names in drawn:
                files += draw_files(figure, folder / FIGURES, names)
                advance(1)
    return WrittenReport(folder / PAGE, files)


def watch_report(
    paths: Sequence[Path],
    out: Path | None = None,
    announce: Callable[[Path], None] = lambda page: None,
    wait: Callable[[float], None] = time.sleep,
    target: float | None = None,
) -> WrittenReport:
    """Update the page every few seconds until all its runs are finished, then write the whole report.

    Parameters
    ----------
    announce
        Called once with the path of the page.
    wait
        Called with the seconds between two updates.
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
