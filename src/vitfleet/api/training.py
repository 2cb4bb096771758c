"""What every run goes through, whichever command or function asks for it: its estimate, its folder, its rounds."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitfleet.api.request import ConfigSource, MethodSource, RunRequest, source_name
from vitfleet.config.load import Overrides, read_config
from vitfleet.costs.estimate import RunEstimate, available
from vitfleet.costs.report import CostReport, cost_reports
from vitfleet.data.images import DataSet
from vitfleet.errors import UserError
from vitfleet.files import CONFIG_FILE
from vitfleet.fleet.distributed import join_process_group
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.report.console.costs import estimate_line, too_much
from vitfleet.report.figures.folder import draw_results, draw_setup
from vitfleet.run.callbacks import Callback
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import RunFolder, create_run_folder
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run
from vitfleet.training.execution.memory_budget import GPU_SHARE_VARIABLE, is_out_of_memory

log = logging.getLogger(__name__)


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
