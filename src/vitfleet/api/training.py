"""Training one configuration, and resuming a run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfleet.api.configuration import ConfigSource, MethodSource, make_config, source_name
from vitfleet.api.consent import check_estimate
from vitfleet.config.load import Overrides, read_config
from vitfleet.costs.dataset_size import DatasetSize
from vitfleet.costs.estimate import estimate_run
from vitfleet.data.images import DataSet
from vitfleet.errors import UserError
from vitfleet.files import CONFIG_FILE
from vitfleet.fleet.distributed import join_process_group
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.figures.folder import draw_results, draw_setup
from vitfleet.run.callbacks import Callback
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import RunFolder, create_run_folder
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run
from vitfleet.training.execution.memory_budget import GPU_SHARE_VARIABLE, is_out_of_memory

if TYPE_CHECKING:
    from vitfleet.api.run import Run


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
    from vitfleet.api.run import Run

    folder, images = create_run(
        config, method=method, data=data, seed=seed, overrides=overrides, plugins=plugins, out=out, command=command
    )
    _run_new(folder, images, callbacks, progress, force)
    return Run(folder.path)


def _run_new(
    folder: RunFolder, data: DataSet | None, callbacks: Sequence[Callback], progress: Progress, force: bool
) -> None:
    """Run what was just created, if it fits; remove its folder if it could not be set up."""
    try:
        estimate = estimate_run(folder.config(), None if data is None else DatasetSize.of(data))
        check_estimate(estimate, folder.path, force)
        run_in(folder, data, callbacks, progress)
    except UserError:
        discard_unstarted(folder)
        raise
    finally:
        folder.release()


def create_run(
    config: ConfigSource,
    *,
    method: MethodSource | None = None,
    data: Any = None,
    seed: int | None = None,
    overrides: Overrides = (),
    plugins: Iterable[str | Path] = (),
    out: str | Path | None = None,
    command: Sequence[str] = (),
) -> tuple[RunFolder, DataSet | None]:
    """Create the folder of a new run without training it: see :func:`train`.

    Returns
    -------
    tuple
        The folder, locked by this process, and the data set if it was passed as an object.
    """
    resolved, images = make_config(config, method=method, data=data, seed=seed, overrides=overrides, plugins=plugins)
    folder = create_run_folder(
        resolved, None if out is None else Path(out), source_name(config), list(command) or _command()
    )
    return folder, images


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
    """Run the remaining rounds of the run in a folder and return its summary.

    Parameters
    ----------
    data
        The data set of a run that was started with data from Python.
    """
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
