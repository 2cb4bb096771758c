"""A table of results for a paper: mean ± standard deviation over seeds, a paired test, as LaTeX, Markdown or CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitfleet.config.registry import method_label
from vitfleet.errors import UserError, how_to_install
from vitfleet.report.columns import COMPARABLE_NOTE, Column, best_rows, columns_of, comparable_rows
from vitfleet.report.runs import RunGroup, eval_splits, read_groups
from vitfleet.report.units import UNKNOWN, Unit, format_target
from vitfleet.run.output.summary import MeanStd, mean_std, seed_values

_CONTINUAL = ("average", "forgetting", "upload", "gflops")
_INCREMENTAL = ("average", "incremental", "forgetting", "told", "upload", "gflops")
_USUAL = ("accuracy", "local", "upload", "gflops")
_TO_TARGET = ("rounds", "traffic")


@dataclass(frozen=True)
class Cell:
    """The values of one column for the runs of one row, by seed, in the column's unit."""

    values: Mapping[int, float]

    @property
    def spread(self) -> MeanStd | None:
        """The mean and the standard deviation; ``None`` without values."""
        return mean_std(self.values.values())

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; ``None`` without values."""
        return self.spread and self.spread.mean

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation (divided by n − 1); ``None`` for a single seed."""
        return self.spread and self.spread.std


@dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t-test.

    It assumes that the differences between the two methods, seed by seed, are normally distributed. Runs of the same
    seed share the partition and the initial weights, so they are pairs.
    """

    pairs: int  # seeds that both methods have
    difference: float  # the mean
    t: float  # Student's, with pairs − 1 degrees of freedom
    p: float  # two-sided


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
        header, *rows = ([_tex(cell) for cell in row] for row in self._texts(r"\textbf{%s}", r" $\pm$ "))
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
        parts = [f"{column.heading}: {part}" for column in self.columns for part in ("mean", "standard deviation", "n")]
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
        texts = [["", *(column.heading for column in self.columns)], *([name] for name in self.cells)]
        for index, column in enumerate(self.columns):
            spreads = [row[index].spread for row in self.cells.values()]
            means = [found and found.mean for found in spreads]
            unit = _printed_in(column.unit, means)
            best = best_rows(column.best, means, unit, self.comparable)
            for row, found in enumerate(spreads):
                text = unit.spread(found).replace(" ± ", plus_minus)
                texts[row + 1].append(bold % text if row in best else text)
        if self.tests:
            tests = [self.tests.get(name) for name in self.cells]
            p_values = ["p", *(UNKNOWN if test is None else f"{test.p:.3f}" for test in tests)]
            texts = [[*line, p] for line, p in zip(texts, p_values, strict=True)]
        return texts


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
        Names from ``COLUMNS``, or ``metrics.NAME.VALUE``; default: accuracies, upload and operations.
    target
        The accuracy, 0…1, of the columns ``rounds`` and ``traffic``.
    versus
        A row's name: every other row is tested against it, paired by seed.
    """
    groups = read_groups([Path(path) for path in paths])
    if unfinished := [str(run.path) for group in groups for run in group.runs if run.summary is None]:
        raise UserError(f"{unfinished[0]}: the run is not finished; resume it with `vitfleet resume {unfinished[0]}`")
    chosen = _choose_columns(groups, columns, target)
    cells = {group.label: _cells(group, chosen, target) for group in groups}
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
    known = columns_of(run.summary or {} for group in groups for run in group.runs)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"columns {unknown[0]}: there is no such column; there are {', '.join(known)}")
    continual = all("continual" in (run.summary or {}) for group in groups for run in group.runs)
    usual = _USUAL if target is None else (*_USUAL, *_TO_TARGET)
    if continual:
        incremental = any(
            "incremental_accuracy" in (run.summary or {})["continual"] for group in groups for run in group.runs
        )
        usual = _INCREMENTAL if incremental else _CONTINUAL
    chosen = [known[name] for name in names or usual]
    if target is None and (needing := [column.name for column in chosen if column.path[0] == "to_target"]):
        raise UserError(f"columns {needing[0]}: needs a target accuracy, such as --target 0.8")
    return chosen


def _cells(group: RunGroup, columns: Sequence[Column], target: float | None) -> list[Cell]:
    seeds = [run.seed for run in group.runs]
    summaries = [run.summary_until(target) for run in group.runs]
    rows = ([column.unit.scale * value for value in seed_values(summaries, column.path)] for column in columns)
    return [Cell(dict(zip(seeds, values, strict=False))) for values in rows]  # no values, or one for each seed


def paired_t_test(first: Mapping[int, float], second: Mapping[int, float]) -> PairedTest | None:
    """Test two methods by their values per seed; ``None`` with fewer than two seeds in common."""
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        return None
    differences = [first[seed] - second[seed] for seed in seeds]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return PairedTest(len(seeds), mean, math.copysign(math.inf, mean) if mean else 0.0, 0.0 if mean else 1.0)
    try:
        from scipy.stats import t as student
    except ImportError:
        raise UserError(f"a significance test needs SciPy; {how_to_install('sim')}") from None
    t = mean / (deviation / math.sqrt(len(seeds)))
    return PairedTest(len(seeds), mean, t, float(2 * student.sf(abs(t), len(seeds) - 1)))


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
        lines.append(
            f"p: two-sided paired t-test of {columns[0].title} against {versus} over the seeds that both have; it "
            "assumes normally distributed differences and is not corrected for several comparisons."
        )
    return "\n".join(lines)


def _printed_in(unit: Unit, means: Sequence[float | None]) -> Unit:
    """Return how the cells of a column are printed: in its unit, with as many digits as the smallest mean needs."""
    smallest = min((abs(mean) for mean in means if mean), default=1.0)
    digits = unit.significant - 1 - math.floor(math.log10(smallest)) if unit.significant else 0
    return replace(unit, scale=1.0, auto=None, digits=max(unit.digits, digits))


def _tex(text: str) -> str:
    for character in "%_&#":
        text = text.replace(character, "\\" + character)
    return text.replace(UNKNOWN, "--")
