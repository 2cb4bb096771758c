"""The numbers that methods declare are those that their clients report."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import MakeContext
from vitfleet.config.registry import METHODS
from vitfleet.costs.cost_model import CostModel
from vitfleet.message import Numbers
from vitfleet.methods import ClientMetric, make_method, reduce_client_metrics
from vitfleet.models.net import Net

COMMON = {"samples", "loss"}  # every method's clients report these
FEW_LAYERS = {
    "transfl": {"k": 1},
    "eftvit": {"local_layers": 1},
    "fedbfpt": {"local_layers": 2},
    "fedvit": {"send_layers": 1},
}
TRAINS_NOTHING = {"closed-form", "analytic"}  # there is no loss
# They need more in the model than the tiny one has, and report nothing more.
ADAPTED = {"fed-prompt", "fed-lora", "dytox"}


def test_reduce_client_metrics_follows_the_declared_reduction() -> None:
    metrics = (
        ClientMetric("steps", "steps", "sum"),
        ClientMetric("bytes", "bytes", "max"),
        ClientMetric("rate", "rate", "mean"),
        ClientMetric("layers", "layers"),
    )
    reported: list[Numbers] = [
        {"steps": 2, "bytes": 7, "rate": 0.5, "layers": [1]},
        {"steps": 3, "bytes": 4, "rate": 1.0},
        {},
    ]
    assert reduce_client_metrics(metrics, reported) == {"steps": 5, "bytes": 7, "rate": 0.75}


def test_reduce_client_metrics_leaves_out_what_no_client_reported() -> None:
    metrics = (ClientMetric("steps", "steps", "sum"),)
    assert reduce_client_metrics(metrics, [{"samples": 3}, {"steps": [1, 2]}]) == {}


@pytest.mark.parametrize("name", [name for name in METHODS.names() if name not in ADAPTED])
def test_clients_report_what_their_method_declares(name: str, tiny_net: Net, make_context: MakeContext) -> None:
    context = make_context(num_tasks=2, epochs=2)
    method = make_method(METHODS.make_params(name, **FEW_LAYERS.get(name, {})), context)
    labels = np.arange(20) % 5
    update = CostModel(method, tiny_net, context.train).late_round([labels, labels]).update
    common = COMMON - {"loss"} if name in TRAINS_NOTHING else COMMON
    assert set(update.message.numbers) == common | {metric.name for metric in method.client_metrics}
