"""``vitfleet run`` without a configuration: what TransFL and EFTViT gain against FedAvg, on embedded digits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitfleet.cli.base import console, print_text, reserve_stdout, with_data_dir
from vitfleet.cli.compare import check_single_process, run_comparison

PRESETS = ("start-fedavg", "start-transfl", "start-eftvit")


def first_run(
    overrides: Sequence[str],
    plugins: Sequence[Path],
    seed: int | None,
    out: Path | None,
    data_dir: str | None,
    as_json: bool,
    command: Sequence[str],
) -> None:
    """Compare the three methods and say what each gained."""
    from vitfleet.api.comparison import create
    from vitfleet.report.gains import gain_sentence

    check_single_process()
    reserve_stdout(as_json)
    keys = with_data_dir(data_dir, list(overrides))
    comparison, _ = create(PRESETS, seeds=[seed or 0], overrides=keys, plugins=plugins, out=out, command=command)
    run_comparison(comparison, as_json)
    rows = comparison.result.rows
    print_text(console, "")
    for row in rows:
        print_text(console, gain_sentence(row, rows[0]))
