"""A run in its folder: its records, summary and models, and how it is trained and resumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from vitfleet.api.request import ConfigSource, MethodSource, RunRequest, as_data_set
from vitfleet.api.training import check_estimate, create_run, discard_unstarted, run_in
from vitfleet.config.load import Overrides
from vitfleet.config.schema import Config
from vitfleet.costs.dataset_size import DatasetSize
from vitfleet.costs.estimate import estimate_run
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.files import CONFIG_FILE
from vitfleet.inference.classifier import Classifier
from vitfleet.inference.stored_models import StoredModels
from vitfleet.inference.task_matrix import TaskMatrix, recompute_matrix
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.callbacks import Callback
from vitfleet.run.output.folder import add_rounds, open_run_folder, read_run_config
from vitfleet.run.output.summary import flatten, is_finished, read_summary
from vitfleet.run.records import ClientRecord, RoundRecord, read_records

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
        return as_frame(
            {"round": record.round, **_client_row(client)}
            for record in read_records(self.path)
            for client in record.clients
        )

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
        from vitfleet.report.html.page import write_report

        return write_report([self.path]).page


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


def _client_row(client: ClientRecord) -> dict[str, Any]:
    tree = asdict(client)
    numbers = tree.pop("numbers")
    return {**tree, "accuracy": client.accuracy, **numbers}


def as_frame(rows: Iterable[Row]) -> Any:
    """Return a DataFrame of the rows, or the rows themselves where pandas is not installed."""
    listed = list(rows)
    try:
        import pandas as pd
    except ImportError:
        return listed
    return pd.DataFrame(listed)
