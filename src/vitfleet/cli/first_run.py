"""``vitfleet run`` without a configuration: what TransFL, EFTViT and FedViT gain against FedAvg, on embedded digits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vitfleet.cli.base import console, print_text, reserve_stdout, with_data_dir
from vitfleet.cli.compare import check_single_process, run_new_comparison

PRESETS = ("start-fedavg", "start-transfl", "start-eftvit")
TASK_PRESETS = ("start-fedavg-tasks", "start-fedvit")
FITTED = ("rounds", "data", "model", "method", "fleet")  # what the task presets are fitted to
MAX_JOBS = 2  # runs at a time: more would wait for the longest one anyway


def first_run(
    overrides: Sequence[str],
    plugins: Sequence[Path],
    seed: int | None,
    out: Path | None,
    data_dir: str | None,
    yes: bool,
    as_json: bool,
    command: Sequence[str],
) -> None:
    """Compare the methods, and FedViT with FedAvg on a sequence of tasks, and say what each gained."""
    from vitfleet.api.comparison import create
    from vitfleet.report.console.results import gain_sentences

    check_single_process()
    reserve_stdout(as_json)
    keys = with_data_dir(data_dir, list(overrides))
    has_changed = any(key.partition(".")[0] in FITTED and key != "data.dir" for key in keys)
    presets = PRESETS if has_changed else (*PRESETS, *TASK_PRESETS)
    comparison, _ = create(presets, seeds=[seed or 0], overrides=keys, plugins=plugins, out=out, command=command)
    # Each run is on one core: so small a model gains nothing from more.
    jobs = min(MAX_JOBS, os.cpu_count() or 1)
    run_new_comparison(comparison, yes, as_json, jobs, figure_files=False)
    print_text(console, "")
    for sentence in gain_sentences(comparison.result.rows):
        print_text(console, sentence)
