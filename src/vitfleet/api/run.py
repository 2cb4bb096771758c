"""A run in its folder: its records, summary and models, what it costs, and how it is trained and resumed."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from vitfleet.api.request import ConfigSource, MethodSource, RunRequest, as_data_set, source_name
from vitfleet.config.load import Overrides, read_config
from vitfleet.config.schema import Config
from vitfleet.costs.dataset_size import DatasetSize
from vitfleet.costs.estimate import RunEstimate, available, estimate_run
from vitfleet.costs.report import CostReport, cost_reports
from vitfleet.data.images import DataSet
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.files import CONFIG_FILE
from vitfleet.fleet.distributed import join_process_group
from vitfleet.inference.classifier import Classifier
from vitfleet.inference.stored_models import StoredModels
from vitfleet.inference.task_matrix import TaskMatrix, recompute_matrix
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.console.costs import estimate_line, too_much
from vitfleet.report.figures.folder import draw_results, draw_setup
from vitfleet.report.html.page import write_report
from vitfleet.run.callbacks import Callback
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import RunFolder, add_rounds, create_run_folder, open_run_folder, read_run_config
from vitfleet.run.output.summary import flatten, is_finished, read_summary
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.setup import open_run
from vitfleet.training.execution.memory_budget import GPU_SHARE_VARIABLE, is_out_of_memory

log = logging.getLogger(__name__)
Row = dict[str, Any]


class Run:
    """A run, finished or not, in its folder.

    Parameters
    ----------
    path
        The run's folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / CONFIG_FILE).is_file():
            raise UserError(f"{self.path}: holds no run (there is no {CONFIG_FILE} in it)")

    def __repr__(self) -> str:
        state = "finished" if self.finished else f"{len(list(read_records(self.path)))} rounds so far"
        return f"Run({str(self.path)!r}, method={self.config.method.name!r}, {state})"

    @cached_property
    def config(self) -> Config:
        """The run's resolved configuration."""
        return read_run_config(self.path)

    @property
    def finished(self) -> bool:
        """Whether the run has no rounds left."""
        return is_finished(self.path)

    @property
    def records(self) -> Any:
        """One row per round: loss, accuracy, bytes, metrics. A DataFrame with pandas installed, else a list of rows."""
        return as_frame(_round_row(record) for record in read_records(self.path))

    @property
    def clients(self) -> Any:
        """One row per client and round: bytes, samples, local accuracy, failures. A DataFrame, or a list of rows."""
        rows = []
        for record in read_records(self.path):
            for client in record.clients:
                tree = asdict(client)
                numbers = tree.pop("numbers")
                rows.append({"round": record.round, **tree, "accuracy": client.accuracy, **numbers})
        return as_frame(rows)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary: final accuracies, bytes, costs.

        Raises
        ------
        UserError
            The run is not finished.
        """
        return read_summary(self.path)

    def model(self, client: int | None = None) -> Classifier:
        """Return the trained model as a ``torch.nn.Module`` ready for inference.

        Parameters
        ----------
        client
            A client's own model: its own parts with the shared ones; of a client that never took part, the initial
            parts with the shared ones. ``None``: the server's model; what the server does not have (EFTViT's local
            modules, local heads) is the mean over the clients that have trained.
        """
        return StoredModels.open(self.path, self.config).classifier(client)

    def task_matrix(self, *, data: Any = None, progress: Progress = NO_PROGRESS) -> TaskMatrix:
        """Compute the accuracies after each task, and forgetting, again from the models that were kept.

        The run must have been trained with ``data.tasks.keep_models``.

        Parameters
        ----------
        data
            The data set of a run that was started with data from Python: the same again.
        """
        images = as_data_set(data)
        loaded = load_dataset(self.config.data, progress) if images is None else images
        return recompute_matrix(self.path, self.config, loaded, progress)

    def resume(
        self,
        *,
        rounds: int | None = None,
        data: Any = None,
        callbacks: Sequence[Callback] = (),
        progress: Progress = NO_PROGRESS,
    ) -> Run:
        """Run the remaining rounds; the run ends as if it had never been interrupted.

        Parameters
        ----------
        rounds
            Give the run this many rounds in all, more than it had, even if it is finished.
        data
            The data set of a run that was started with data from Python: the same again.
        """
        folder = open_run_folder(self.path)
        try:
            if rounds is not None:
                add_rounds(folder, rounds)
                self.__dict__.pop("config", None)  # read again
            run_in(folder, as_data_set(data), callbacks, progress)
        finally:
            folder.release()
        return self

    def report(self) -> Path:
        """Write the run's report, an HTML page with its figures, and return its path."""
        return write_report([self.path])


def train(
    config: ConfigSource = "digits",
    *,
    method: MethodSource | None = None,
    data: Any = None,
    seed: int | None = None,
    overrides: Overrides = (),
    plugins: Iterable[str | Path] = (),
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = NO_PROGRESS,
    force: bool = False,
    command: Sequence[str] = (),
) -> Run:
    """Train one configuration and return the finished run.

    Parameters
    ----------
    config
        A preset's name (``vitfleet presets`` lists them), the path of a TOML or JSON file, a tree of keys, or a
        configuration.
    method
        A method's name, its registered class, its parameter table, or ``{"name": "fedprox", "mu": 0.1}``.
    data
        A registered data set's name, a folder or parquet file, ``hf:owner/name`` on the Hugging Face hub, a
        ``datasets.Dataset``, or tensors: ``(images, labels)`` or ``{"train": (images, labels), "test": …}``.
    seed
        The seed of every random draw.
    overrides
        Further keys, by dotted name: ``{"train.lr": 1e-3, "rounds": 20}``, or texts as given to ``-o``.
    plugins
        Python files that register methods, data sets, metrics, … of your own.
    out
        The run's folder; by default the next free one in ``runs/``.
    callbacks
        Called every round; they may stop the run. See :class:`vitfleet.run.callbacks.Callback`.
    progress
        Shows the progress of long work.
    force
        Start it even if it would take days, or more memory or disk than is free. What it is estimated to take is
        logged at the level INFO.
    command
        What is recorded as the command that started the run.

    Examples
    --------
    >>> run = vitfleet.train("digits", method="fedprox", overrides={"rounds": 3, "method.mu": 0.1})
    >>> run.summary["accuracy"]["global"]
    """
    folder, images = create_run(RunRequest(config, method, data, seed, overrides, plugins, out, command))
    try:
        estimate = estimate_run(folder.config(), None if images is None else DatasetSize.of(images))
        check_estimate(estimate, folder.path, force)
        run_in(folder, images, callbacks, progress)
    except UserError:
        discard_unstarted(folder)
        raise
    finally:
        folder.release()
    return Run(folder.path)


def load_run(path: str | Path) -> Run:
    """Open the run in a folder.

    Examples
    --------
    >>> run = vitfleet.load_run("runs/digits-fedavg-001")
    >>> run.records[["round", "accuracy.global"]]
    """
    return Run(path)


def cost(
    config: ConfigSource,
    *,
    method: MethodSource | None = None,
    data: Any = None,
    methods: Sequence[str] = (),
    overrides: Overrides = (),
    plugins: Iterable[str | Path] = (),
    progress: Progress = NO_PROGRESS,
) -> list[CostReport]:
    """Return operations, memory and bytes per client of a configuration, under its own method and others.

    Parameters
    ----------
    methods
        The methods to compare; by default all that the model can be used with.

    Examples
    --------
    >>> reports = vitfleet.cost("eftvit-cifar100", methods=["eftvit", "fedavg"])
    >>> [(report.method, report.train_gflops) for report in reports]
    """
    resolved, _ = RunRequest(config, method, data, overrides=overrides, plugins=plugins).resolve()
    return list(cost_reports(resolved, methods, progress))


def check_estimate(estimate: RunEstimate | None, folder: Path, force: bool) -> None:
    """Log what runs in a folder will take, if it is known; without ``force``, refuse what takes days or does not fit.

    Nothing is printed: a program that wants the estimate shown sets the level of the logger ``vitfleet`` to INFO.
    """
    if estimate is None:
        return
    log.info("estimated: %s", estimate_line(estimate))
    if estimate.remark:
        log.warning("%s", estimate.remark)
    problem = too_much(estimate, available(estimate.device, folder))
    if problem is None:
        return
    if not force:
        raise UserError(f"not started: {problem}; make it smaller, or start it with force=True")
    log.warning("started with force=True: %s", problem)


def create_run(request: RunRequest) -> tuple[RunFolder, DataSet | None]:
    """Create the folder of a new run, locked by this process; also return data that was passed as an object."""
    config, images = request.resolve()
    out = None if request.out is None else Path(request.out)
    command = list(request.command) or _command()
    return create_run_folder(config, out, source_name(request.config), command), images


def discard_unstarted(folder: RunFolder) -> None:
    """Remove the folder of a run that could not be set up: its name is free again."""
    if next(read_records(folder.path), None) is None:
        folder.discard()


def run_in(
    folder: RunFolder,
    data: DataSet | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = NO_PROGRESS,
) -> dict[str, Any]:
    """Run the remaining rounds of the run in a folder, perhaps with data from Python, and return its summary."""
    with join_process_group() as processes, full_memory_as_sentence(folder.path):
        processes.broadcast(str(folder.path.resolve()).encode())
        context = open_run(folder.config(), folder.path, progress, processes=processes, data=data)
        draw_setup(context)
        result = run_rounds(context, callbacks=callbacks, progress=progress)
    draw_results(folder.path)
    return result.summary


@contextmanager
def full_memory_as_sentence(folder: Path) -> Iterator[None]:
    """Turn the error of a full GPU, which is no defect of the program, into a sentence.

    Trainings continue with fewer clients; this is for what cannot be divided.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        config = read_config(folder / CONFIG_FILE)
        remedy = "run fewer at a time (--jobs)" if GPU_SHARE_VARIABLE in os.environ else "end what else uses it"
        resumable = (folder / "checkpoint" / "checkpoint.json").exists() and config.data.fingerprint is None
        command = f", then resume with vitfleet resume {shlex.quote(str(folder))}" if resumable else ""
        less = "machine.stack_size, train.batch_size or eval.batch_size"
        raise UserError(f"the GPU's memory is full; {remedy}{command}; or start again with less {less}") from error


def _command() -> list[str]:
    """Return what is recorded as the command of a run that was started from Python."""
    script = sys.argv[0] if sys.argv and sys.argv[0] else ""
    return ["python", script] if script.endswith(".py") else ["vitfleet.train"]


def _round_row(record: RoundRecord) -> dict[str, Any]:
    tree = asdict(record)
    del tree["clients"]
    accuracy = tree.pop("accuracy") or {}
    task = tree.pop("task") or {}
    tree["clients"] = len(record.clients)
    tree["failures"] = sum(client.failure is not None for client in record.clients)
    tree["accuracy"] = {key.rstrip("_"): value for key, value in accuracy.items()}
    tree["task"] = {key: value for key, value in task.items() if not isinstance(value, list | dict)}
    return flatten(tree)


def as_frame(rows: Iterable[Row]) -> Any:
    """Return a DataFrame of the rows, or the rows themselves where pandas is not installed."""
    listed = list(rows)
    try:
        import pandas as pd
    except ImportError:
        return listed
    return pd.DataFrame(listed)
