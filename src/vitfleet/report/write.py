"""Writes reports: the page, its figures as files, and a live page for unfinished runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.page import REFRESH_SECONDS, render, report_figures
from vitfleet.report.plotting import draw_files
from vitfleet.report.run_plots import can_draw
from vitfleet.report.runs import all_finished, read_groups
from vitfleet.run.folder import next_free_folder

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


def write_report(paths: Sequence[Path], out: Path | None = None, progress: Progress = NO_PROGRESS) -> WrittenReport:
    """Write the report of runs and comparisons: the page, and every figure as SVG, PDF and PNG."""
    groups = read_groups(paths)
    figures = report_figures(groups)
    folder = _make_folder(report_folder(paths, out))
    write_atomically(folder / PAGE, render(groups, figures).encode())
    files: list[Path] = []
    if can_draw():
        (folder / FIGURES).mkdir(exist_ok=True)
        drawn = [figure for section in figures.values() for figure in section]
        with progress.task("figures", len(drawn)) as advance:
            for figure in drawn:
                files += draw_files(figure, folder / FIGURES)
                advance(1)
    return WrittenReport(folder / PAGE, files)


def watch_report(
    paths: Sequence[Path],
    out: Path | None = None,
    announce: Callable[[Path], None] = lambda page: None,
    wait: Callable[[float], None] = time.sleep,
) -> WrittenReport:
    """Update the page every few seconds until all its runs are finished, then write the whole report.

    Parameters
    ----------
    announce
        Called once with the path of the page.
    wait
        Called with the seconds between two updates.
    """
    folder = _make_folder(report_folder(paths, out))
    announced = False
    while not all_finished(groups := read_groups(paths)):
        write_atomically(folder / PAGE, render(groups, report_figures(groups), live=True).encode())
        if not announced:
            announce(folder / PAGE)
            announced = True
        wait(REFRESH_SECONDS)
    return write_report(paths, folder)


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be created ({error.strerror})") from None
    return folder
