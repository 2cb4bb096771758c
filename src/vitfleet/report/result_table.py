"""A table of results for a paper: mean ± standard deviation over seeds, as LaTeX, Markdown or CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitfleet.config.registry import method_label
from vitfleet.errors import UserError
from vitfleet.report.comparable import COMPARABLE_NOTE, best_rows, comparable_rows
from vitfleet.report.runs import RunData, RunGroup, eval_splits, read_groups
from vitfleet.report.significance import PairedTest, paired_t_test
from vitfleet.report.units import format_target
from vitfleet.run.compare import cost_to_target

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes
    ----------
    read
        The value of a finished run, or ``None``; the second argument is the target accuracy.
    digits
        Digits after the decimal point.
    best
        Whether the highest or the lowest value is the best one.
    significant
        Costs of small models are far below one: more digits are shown until the smallest mean has this many.
    """

    title: str
    read: Callable[[RunData, float | None], float | None]
    digits: int
    best: Literal["highest", "lowest"]
    significant: int = 0


def _summary(*path: str, scale: float = 1.0) -> Callable[[RunData, float | None], float | None]:
    def read(run: RunData, target: float | None) -> float | None:
        value: Any = run.summary
        for key in path:
            value = (value or {}).get(key)
        return None if value is None else scale * float(value)

    return read


def _to_target(key: str, scale: float = 1.0) -> Callable[[RunData, float | None], float | None]:
    def read(run: RunData, target: float | None) -> float | None:
        value = cost_to_target(run.path, target)[key]
        return None if value is None else scale * float(value)

    return read


COLUMNS: Mapping[str, Column] = {
    "accuracy": Column("accuracy, %", _summary("accuracy", "global", scale=100), 1, "highest"),
    "local": Column("local accuracy, %", _summary("accuracy", "local", scale=100), 1, "highest"),
    "best": Column("best accuracy, %", _summary("accuracy", "best", scale=100), 1, "highest"),
    "average": Column("average accuracy, %", _summary("continual", "average_accuracy"), 1, "highest"),
    "forgetting": Column("forgetting, points", _summary("continual", "forgetting"), 1, "lowest"),
    "rounds": Column("rounds to target", _to_target("rounds"), 0, "lowest"),
    "traffic": Column("MiB to target", _to_target("bytes", scale=1 / MEBIBYTE), 1, "lowest"),
    "upload": Column("upload, MiB", _summary("message", "up_bytes", scale=1 / MEBIBYTE), 2, "lowest", 2),
    "download": Column("download, MiB", _summary("message", "down_bytes", scale=1 / MEBIBYTE), 2, "lowest", 2),
    "gflops": Column("GFLOPs per sample", _summary("client", "train_gflops"), 2, "lowest", 2),
    "memory": Column("memory, MiB", _summary("client", "peak_memory_bytes", scale=1 / MEBIBYTE), 0, "lowest", 2),
    "trained": Column("trained, M", _summary("client", "trainable_params", scale=1e-6), 2, "lowest", 2),
}
_CONTINUAL = ("average", "forgetting", "upload", "gflops")
_USUAL = ("accuracy", "local", "upload", "gflops")


@dataclass(frozen=True)
class Cell:
    """The values of one column for the runs of one row, by seed."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; ``None`` without values."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation (divided by n − 1); ``None`` for a single seed."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class ResultTable:
    """Rows of configurations, columns of results.

    Attributes
    ----------
    cells
        For each row the cells in the order of the columns.
    tests
        For each row its test against the row ``versus``, on the first column; empty without ``versus``.
    comparable
        A number for each row: a best mean is one among the rows of the same number.
    note
        What the numbers are: for the caption.
    """

    columns: Sequence[Column]
    cells: Mapping[str, Sequence[Cell]]
    tests: Mapping[str, PairedTest | None]
    comparable: Sequence[int]
    note: str

    def to_latex(self) -> str:
        """Return a ``tabular`` with rules of the package booktabs; the best mean of each column is bold."""
        body = [[_tex(cell) for cell in row] for row in self._texts(r"\textbf{%s}", r" $\pm$ ")]
        header, *rows = body
        lines = [
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            *(f"% {line}" for line in self.note.splitlines()),
        ]
        return "\n".join(lines) + "\n"

    def to_markdown(self) -> str:
        """Return a Markdown table; the best mean of each column is bold."""
        header, *rows = self._texts("**%s**", " ± ")
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{self.note}\n"

    def to_csv(self) -> str:
        """Return one line per row, with mean, standard deviation and n of every column, not rounded."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        parts = [f"{column.title}: {part}" for column in self.columns for part in ("mean", "standard deviation", "n")]
        writer.writerow(["name", *parts, *(["p"] if self.tests else [])])
        for name, cells in self.cells.items():
            values = [value for cell in cells for value in (cell.mean, cell.deviation, len(cell.values))]
            test = self.tests.get(name)
            writer.writerow([name, *values, *([test.p if test else None] if self.tests else [])])
        return text.getvalue()

    def to_text(self, format: str) -> str:
        """Return the table as ``tex``, ``md`` or ``csv``."""
        formats = {"tex": self.to_latex, "md": self.to_markdown, "csv": self.to_csv}
        if format not in formats:
            raise UserError(f"--to {format}: must be {', '.join(formats)}")
        return formats[format]()

    def _texts(self, bold: str, plus_minus: str) -> list[list[str]]:
        """Return the header and the rows as texts."""
        means = [[row[i].mean for row in self.cells.values()] for i in range(len(self.columns))]
        columns = [_with_digits(column, values) for column, values in zip(self.columns, means, strict=True)]
        best = [self._best(column, values) for column, values in zip(columns, means, strict=True)]
        texts = [["", *(column.title for column in self.columns), *(["p"] if self.tests else [])]]
        for index, (name, row) in enumerate(self.cells.items()):
            line = [name]
            for column, cell, winners in zip(columns, row, best, strict=True):
                text = _number(cell, column, plus_minus)
                line.append(bold % text if index in winners else text)
            if self.tests:
                test = self.tests.get(name)
                line.append("–" if test is None else f"{test.p:.3f}")
            texts.append(line)
        return texts

    def _best(self, column: Column, means: Sequence[float | None]) -> frozenset[int]:
        """Return the rows with a best mean as it is printed: values that print the same are equal."""
        printed = [None if mean is None else float(_rounded(mean, column)) for mean in means]
        return best_rows(printed, self.comparable, highest=column.best == "highest")


def result_table(
    paths: Sequence[str | Path],
    columns: Sequence[str] = (),
    *,
    target: float | None = None,
    versus: str | None = None,
) -> ResultTable:
    """Return the table of runs and comparisons; runs that differ only in their seed are one row.

    Parameters
    ----------
    columns
        Names from ``COLUMNS``; default: accuracies, upload and operations.
    target
        The accuracy, 0…1, of the columns ``rounds`` and ``traffic``.
    versus
        A row's name: every other row is tested against it, paired by seed.
    """
    groups = read_groups([Path(path) for path in paths])
    if unfinished := [str(run.path) for group in groups for run in group.runs if run.summary is None]:
        raise UserError(f"{unfinished[0]}: the run is not finished; resume it with `vitfleet resume {unfinished[0]}`")
    chosen = _choose_columns(groups, columns, target)
    cells = {group.label: [_cell(group, column, target) for column in chosen] for group in groups}
    reference = None if versus is None else _row(cells, versus)
    comparable = comparable_rows(groups)
    tests = {} if reference is None else _tests(cells, reference, dict(zip(cells, comparable, strict=True)))
    return ResultTable(chosen, cells, tests, comparable, _note(groups, chosen, target, reference))


def _row(cells: Mapping[str, object], name: str) -> str:
    """Return the row that a user means: by its name, or by that of its method."""
    found = next((row for row in (name, method_label(name)) if row in cells), None)
    if found is None:
        raise UserError(f"versus {name}: is no row of the table; its rows are {', '.join(cells)}")
    return found


def _choose_columns(groups: Sequence[RunGroup], names: Sequence[str], target: float | None) -> list[Column]:
    if unknown := [name for name in names if name not in COLUMNS]:
        raise UserError(f"columns {unknown[0]}: there is no such column; there are {', '.join(COLUMNS)}")
    continual = all("continual" in (run.summary or {}) for group in groups for run in group.runs)
    usual = _CONTINUAL if continual else _USUAL if target is None else (*_USUAL, "rounds", "traffic")
    chosen = list(names) or list(usual)
    if target is None and (needing := [name for name in chosen if name in ("rounds", "traffic")]):
        raise UserError(f"columns {needing[0]}: needs a target accuracy, such as --target 0.8")
    return [COLUMNS[name] for name in chosen]


def _cell(group: RunGroup, column: Column, target: float | None) -> Cell:
    values = {run.seed: column.read(run, target) for run in group.runs}
    known = {seed: value for seed, value in values.items() if value is not None}
    # A mean over only the seeds that reached a target would flatter the method.
    return Cell(known if len(known) == len(group.runs) else {})


def _tests(
    cells: Mapping[str, Sequence[Cell]], versus: str, comparable: Mapping[str, int]
) -> dict[str, PairedTest | None]:
    other = cells[versus][0].values
    # Runs of the same seed are pairs only if they share the images and the partition.
    paired = {name for name in cells if name != versus and comparable[name] == comparable[versus]}
    return {name: paired_t_test(row[0].values, other) if name in paired else None for name, row in cells.items()}


def _note(groups: Sequence[RunGroup], columns: Sequence[Column], target: float | None, versus: str | None) -> str:
    counts = sorted({len(group.runs) for group in groups})
    seeds = " or ".join(map(str, counts))
    spread = "Mean ± standard deviation (divided by n − 1)" if max(counts) > 1 else "Single runs"
    lines = [f"{spread}, n = {seeds} seed{'s' if max(counts) > 1 else ''}; measured on {eval_splits(groups)} images."]
    if len(set(comparable_rows(groups))) > 1:
        lines.append(f"{COMPARABLE_NOTE[0].upper()}{COMPARABLE_NOTE[1:]}.")
    if target is not None:
        lines.append(f"Target: {format_target(target)} accuracy; without an entry where a seed did not reach it.")
    if versus is not None:
        measured = columns[0].title.split(",")[0]
        lines.append(
            f"p: two-sided paired t-test of {measured} against {versus} over the seeds that both have; it assumes "
            "normally distributed differences and is not corrected for several comparisons."
        )
    return "\n".join(lines)


def _with_digits(column: Column, means: Sequence[float | None]) -> Column:
    """Return the column with as many digits as its smallest mean needs."""
    if not column.significant:
        return column
    smallest = min((abs(mean) for mean in means if mean), default=1.0)
    return replace(column, digits=max(column.digits, column.significant - 1 - math.floor(math.log10(smallest))))


def _rounded(value: float | None, column: Column) -> str:
    return "–" if value is None else f"{value:.{column.digits}f}"


def _number(cell: Cell, column: Column, plus_minus: str) -> str:
    text = _rounded(cell.mean, column)
    return text if cell.deviation is None else f"{text}{plus_minus}{_rounded(cell.deviation, column)}"


def _tex(text: str) -> str:
    for character in "%_&#":
        text = text.replace(character, "\\" + character)
    return text.replace("–", "--")
