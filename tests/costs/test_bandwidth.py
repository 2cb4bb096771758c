"""The benchmark of bandwidths: minutes and bytes of a run follow from its records."""

from __future__ import annotations

from pathlib import Path

import pytest

from bandwidth import HARDWARE, MeasuredRun, make_figures, measure
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, assign_hardware
from vitfleet.report.units import MEBIBYTE
from vitfleet.run.records import ClientRecord, RoundRecord, TaskRecord


def make_record(round: int, clients: list[ClientRecord], total: int, task: TaskRecord | None = None) -> RoundRecord:
    return RoundRecord(round, 0.1, 1.0, None, clients, total, 2 * total, task)


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    entries = [
        ClientRecord(0, 3_000_000, 1_000_000, {}, gflops=40.0),
        ClientRecord(1, 1_000_000, 1_000_000, {}, gflops=20.0),
    ]
    task = TaskRecord(1, [], None, None, None, None, None, {})
    run = MeasuredRun(2, 0, [make_record(1, entries, 10_000_000), make_record(2, entries[1:], 20_000_000, task)])
    speeds = [HARDWARE_PROFILES[name].gflops for name in assign_hardware(HARDWARE, 2, 0)]
    alone = [4.0 / 0.5 + 40 / speeds[0], 2.0 / 0.5 + 20 / speeds[1]]
    assert run.minutes(0.5) == pytest.approx((max(alone) + alone[1]) / 60)
    assert run.mebibytes_by_task() == [60_000_000 / MEBIBYTE]


@pytest.mark.long
def test_figures_are_of_the_methods_own_runs(tmp_path: Path) -> None:
    small = ["data.tasks.count=2", "data.tasks.rounds_per_task=1", "train.epochs=2", "model.dim=16", "model.depth=2"]
    runs = {
        name: [measure(method, 3, "fedvit-digits", [*small, "model.patch_size=4"], tmp_path / method)]
        for name, method in {"FedViT": "fedvit", "FedWEIT": "fedweit"}.items()
    }
    _, by_clients, by_tasks = make_figures(runs, 0)
    for curve in by_tasks.views[0].curves:
        (run,) = runs[curve.name]
        records = [entry for record in run.records for entry in record.clients]
        total = sum(entry.up_bytes + entry.down_bytes for entry in records)
        assert curve.y[-1] == pytest.approx(total / MEBIBYTE)
        assert len(curve.y) == 2
    fedvit, fedweit = (curve.y[0] or 0.0 for curve in by_clients.views[0].curves)
    assert 0 < fedvit < fedweit
