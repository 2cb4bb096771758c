"""Comparing several configurations, methods, sweeps and seeds on the same shards."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitfleet.api.best_trials import BestTrial, best_trials
from vitfleet.api.request import ComparisonRequest, ConfigSource, as_data_set, final_members, members_of
from vitfleet.api.run import Row, Run, as_frame, check_estimate, discard_unstarted, run_in
from vitfleet.config.load import Overrides, parse_overrides
from vitfleet.config.schema import DataConfig
from vitfleet.costs.dataset_size import DatasetSize
from vitfleet.costs.estimate import RunEstimate, combine, estimate_run, mean_estimate
from vitfleet.data.image_cache import shared_images
from vitfleet.data.images import DataSet
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.files import COMPARISON_FILE, CONFIG_FILE, OUTPUT_FILE
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.html.page import write_report
from vitfleet.run.callbacks import Callback
from vitfleet.run.comparison import manifest
from vitfleet.run.comparison.jobs import JobResult, run_jobs
from vitfleet.run.comparison.manifest import ComparedRun
from vitfleet.run.comparison.results import ComparisonResult, read_comparison
from vitfleet.run.output.folder import RunFolder, create_run_folder, open_run_folder
from vitfleet.run.output.summary import flatten, is_finished, mean_std

MAX_ESTIMATED = 8  # configurations of a comparison that are estimated


class Comparison:
    """A comparison, finished or not, in its folder.

    Parameters
    ----------
    path
        The comparison's folder; every run has one below it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / COMPARISON_FILE).is_file():
            raise UserError(f"{self.path}: holds no comparison (there is no {COMPARISON_FILE} in it)")

    def __repr__(self) -> str:
        names = list(dict.fromkeys(member.name for member in manifest.read_members(self.path)))
        return f"Comparison({str(self.path)!r}, {', '.join(names)})"

    @property
    def members(self) -> list[ComparedRun]:
        """The runs that are compared, with their configurations."""
        return manifest.read_members(self.path)

    @property
    def runs(self) -> list[Run]:
        """The runs that were started, in the order of the comparison."""
        folders = [member.folder(self.path) for member in self.members]
        return [Run(folder) for folder in folders if (folder / CONFIG_FILE).is_file()]

    @property
    def result(self) -> ComparisonResult:
        """The summaries of all runs, grouped by configuration; also written as ``compare.csv``."""
        return read_comparison(self.path)

    @property
    def table(self) -> Any:
        """One row per configuration: mean and standard deviation of every number of the summaries over the seeds.

        A DataFrame where pandas is installed, else a list of rows.
        """
        return as_frame(_mean_row(row.name, row.summaries) for row in self.result.rows)

    @property
    def best_of(self) -> dict[str, Any] | None:
        """Where the values of its configurations were chosen, and how good they were; ``None`` if they were given."""
        return manifest.read_best_of(self.path)

    def best_trials(self) -> list[BestTrial]:
        """Return the best trial of each swept configuration, by accuracy on held-out images (``data.validation``)."""
        return best_trials(self.path)

    def resume(
        self,
        *,
        jobs: int = 1,
        data: Any = None,
        callbacks: Sequence[Callback] = (),
        progress: Progress = NO_PROGRESS,
        on_job_end: Callable[[JobResult], None] | None = None,
    ) -> Comparison:
        """Run what is left of the comparison.

        Parameters
        ----------
        jobs
            Runs at a time, each a process of its own.
        on_job_end
            Called with each run that has ended, where there are several at a time.
        """
        _check_jobs(jobs, data)
        left, images = self.left, as_data_set(data)
        with shared_images(member.config.data for member in left if images is None) as common:
            if jobs > 1:
                _decode(common, progress)
                self._run_jobs(left, jobs, progress, on_job_end)
            else:
                self._run_in_turn(left, images, callbacks, progress)
        return self

    @property
    def left(self) -> list[ComparedRun]:
        """The runs that are not finished."""
        return [member for member in self.members if not is_finished(member.folder(self.path))]

    def estimate(self, data: Any = None) -> list[RunEstimate] | None:
        """Estimate each run that is left, see :func:`vitfleet.costs.estimate.estimate_run`.

        Configurations that differ only in their seed are estimated once, and only the first few in all: the others are
        taken for the mean of these. ``None`` if the sizes of a data set are not known before it is loaded.
        """
        images, known = as_data_set(data), dict[str, RunEstimate]()
        size = None if images is None else DatasetSize.of(images)
        keys = [member.config.model_copy(update={"seed": 0}).model_dump_json() for member in self.left]
        for member, key in zip(self.left, keys, strict=True):
            if key in known or len(known) == MAX_ESTIMATED:
                continue
            estimate = estimate_run(member.config, size)
            if estimate is None:
                return None
            known[key] = estimate
        return [known.get(key) or mean_estimate(list(known.values())) for key in keys]

    def _run_in_turn(
        self, members: Sequence[ComparedRun], data: DataSet | None, callbacks: Sequence[Callback], progress: Progress
    ) -> None:
        for member in members:
            folder = self._open(member)
            try:
                run_in(folder, data, callbacks, progress)
            except Exception:
                discard_unstarted(folder)
                raise
            finally:
                folder.release()

    def _run_jobs(
        self,
        members: Sequence[ComparedRun],
        jobs: int,
        progress: Progress,
        on_job_end: Callable[[JobResult], None] | None,
    ) -> None:
        for member in members:
            self._open(member).release()
        failed = []
        with closing(run_jobs([member.folder(self.path) for member in members], jobs, progress)) as ended:
            for job in ended:
                failed += [job] if job.code else []
                if on_job_end is not None:
                    on_job_end(job)
        if failed:
            first = failed[0].folder / OUTPUT_FILE
            raise UserError(f"{len(failed)} of {len(members)} runs failed; {first} has the reason of the first")

    def _open(self, member: ComparedRun) -> RunFolder:
        folder = member.folder(self.path)
        if (folder / CONFIG_FILE).exists():
            return open_run_folder(folder)
        return create_run_folder(member.config, folder, member.name, shlex.split(manifest.read_command(self.path)))

    def report(self, progress: Progress = NO_PROGRESS, figure_files: bool = True) -> Path:
        """Write the comparison's report, an HTML page, and its figures as files too; return the page's path."""
        return write_report([self.path], progress=progress, figure_files=figure_files)


def compare(
    configs: ConfigSource | Sequence[ConfigSource] = (),
    *,
    best_of: str | Path | None = None,
    methods: Sequence[str | Mapping[str, Any]] = (),
    seeds: Iterable[int] = (0,),
    sweep: Mapping[str, Sequence[Any]] | None = None,
    data: Any = None,
    overrides: Overrides = (),
    plugins: Iterable[str | Path] = (),
    jobs: int = 1,
    target: float | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = NO_PROGRESS,
    force: bool = False,
    command: Sequence[str] = (),
) -> Comparison:
    """Train several configurations, one after the other or several at a time, and return the comparison.

    Parameters
    ----------
    configs
        Presets, files, trees of keys or configurations; one, or a list.
    best_of
        Instead of ``configs``: a comparison with a sweep and ``data.validation``, whose best values are run and tested.
    methods
        Train every configuration with each of these: ``"fedprox mu=0.1"`` or ``{"name": "fedprox", "mu": 0.1}``.
    seeds
        Every configuration is trained with each of them.
    sweep
        Train every configuration with each combination of these values: ``{"method.k": [1, 2, 3]}``.
    data, overrides, plugins
        As for :func:`vitfleet.train`, for every run.
    jobs
        Runs at a time, each a process of its own.
    target
        An accuracy, 0…1: when was it reached? Default: the best that all of the runs reach, if well above chance.
    out
        The comparison's folder; by default the next free one in ``runs/``.
    force
        As for :func:`vitfleet.train`, for all runs together.

    Examples
    --------
    >>> comparison = vitfleet.compare("digits", methods=["fedavg", "fedprox method.mu=0.1"], seeds=[0, 1])
    >>> comparison.table[["name", "accuracy.global.mean", "accuracy.global.std"]]
    """
    request = ComparisonRequest(
        configs, best_of, methods, seeds, sweep or {}, data, overrides, plugins, target, out, command
    )
    comparison, images = create(request)
    try:
        _check_jobs(jobs, images)
        estimates = comparison.estimate(images)
        check_estimate(combine(estimates, jobs) if estimates else None, comparison.path, force)
    except UserError:
        manifest.discard_comparison(comparison.path)
        raise
    return comparison.resume(jobs=jobs, data=images, callbacks=callbacks, progress=progress)


def create(request: ComparisonRequest) -> tuple[Comparison, DataSet | None]:
    """Create the folder of a comparison without training anything; also return data that was passed as an object."""
    images = as_data_set(request.data)
    request = replace(
        request,
        data=request.data if images is None else images,
        overrides=parse_overrides(request.overrides),
        plugins=list(request.plugins),
        seeds=list(request.seeds),
    )
    origin = None
    if request.best_of is None:
        members = members_of(request)
    elif request.sources or request.methods or request.sweep:
        raise UserError(
            f"--best-of {request.best_of}: contains configurations, methods and swept values itself; leave them out"
        )
    else:
        trials = best_trials(request.best_of)
        members = final_members(request, trials)
        origin = {"comparison": str(request.best_of), "trials": [trial.as_tree() for trial in trials]}
    command = shlex.join(request.command or ["vitfleet.compare"])
    out = None if request.out is None else Path(request.out)
    return Comparison(manifest.create_comparison(members, out, command, request.target, origin)), images


def load_comparison(path: str | Path) -> Comparison:
    """Open the comparison in a folder."""
    return Comparison(path)


def _mean_row(name: str, summaries: Sequence[dict[str, Any]]) -> Row:
    """Return one row of the table: the mean of every number over the seeds, and its standard deviation."""
    flat = [flatten(summary) for summary in summaries]
    row: Row = {"name": name, "runs": len(flat)}
    for key in dict.fromkeys(key for values in flat for key in values):
        values = [values[key] for values in flat if isinstance(values.get(key), int | float)]
        if key == "seed" or len(values) < len(flat) or any(isinstance(value, bool) for value in values):
            continue
        if (spread := mean_std(values)) is not None:
            row[f"{key}.mean"], row[f"{key}.std"] = spread
    return row


def _check_jobs(jobs: int, data: Any) -> None:
    if jobs < 1:
        raise UserError(f"jobs = {jobs}: must be at least 1")
    if jobs > 1 and data is not None:
        raise UserError(f"jobs = {jobs}: must be 1 with data from Python, which other processes do not have")


def _decode(tables: Iterable[DataConfig], progress: Progress) -> None:
    """Decode images that several runs share before their processes start: else each would decode them."""
    for table in tables:
        with suppress(UserError):  # the runs that need them end with the reason, the others do not
            load_dataset(table, progress)
