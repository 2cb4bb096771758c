"""Metrics of a run on a Flower fleet: clients evaluate their own models; the server never sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback import defended, export_images
from test_flower_fleet import flower, run_on_grid

from conftest import TINY, MakeConfig
from vitfleet.config import load_config
from vitfleet.run.clients import held_out_clients
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run

METRICS = "metrics={local_accuracy={every=1, share=0.7}, held_out_clients={}, per_class={}, confusion={every=2}}"


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_metrics_on_flower_equal_those_of_one_process(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = defended(tiny_config(f"method.name={method}", "fleet.held_out=0.3", METRICS, "eval.clients=0"))
    export_images(config, tmp_path / "data")
    run_rounds(open_run(config, tmp_path / "simulation"))
    run_on_grid(flower(config), tmp_path / "flower")
    simulation, remote = ((tmp_path / name / "records.jsonl").read_bytes() for name in ("simulation", "flower"))
    assert simulation == remote
    records = list(read_records(tmp_path / "flower"))
    assert set(records[-1].metrics) == {"local_accuracy", "held_out_clients", "per_class", "confusion"}
    assert records[-1].metrics["held_out_clients"]["clients"] == 2
    trained = {client.client for record in records for client in record.clients}
    assert not trained & set(held_out_clients(config))


PLUGIN = """
from vitfleet.config.base import MetricParams
from vitfleet.config.registry import register_metric


@register_metric("size_of_models", MetricParams)
def size_of_models(params, context):
    return {"tensors": sum(len(context.client_weights(client)) for client in context.training_clients)}
"""


def test_a_metric_of_clients_models_is_unavailable_on_flower(tmp_path: Path) -> None:
    plugin = tmp_path / "sizes.py"
    plugin.write_text(PLUGIN)
    config = load_config("digits", [*TINY, "metrics={size_of_models={}, per_class={}}"], plugins=[plugin])
    export_images(config, tmp_path / "data")
    run_on_grid(flower(config), tmp_path / "flower")
    metrics = list(read_records(tmp_path / "flower"))[-1].metrics
    reason = "it needs the clients' models, which stay on the clients' machines"
    assert metrics["size_of_models"] == {"unavailable": reason}
    assert "accuracy" in metrics["per_class"]
    run_rounds(open_run(config, tmp_path / "simulation"))
    assert list(read_records(tmp_path / "simulation"))[-1].metrics["size_of_models"]["tensors"]
