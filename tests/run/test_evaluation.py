"""Global and local accuracy, held against a count by hand on timm's own module."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from conftest import MakeContext
from vitfleet.config.schema import EvalConfig
from vitfleet.data.images import ImageSet
from vitfleet.data.partition import ClientIndices
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.message import State, Tensors
from vitfleet.methods.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.standalone import Standalone, StandaloneParams
from vitfleet.models.net import Net
from vitfleet.run.evaluation import FleetEvaluator
from vitfleet.training.machine import Machine
from vitfleet.training.trainer import preprocess_for

# 40 test images: client 1 has none, the others unequally many, none of them neighbours.
OWNERS = np.array(([0, 2, 3, 0, 4, 0, 3, 0, 0, 3] * 4), dtype=np.int64)
CLIENTS = 5


@pytest.fixture
def evaluator(tiny_net: Net, tiny_images: ImageSet) -> FleetEvaluator:
    cpu = torch.device("cpu")
    return FleetEvaluator(
        net=tiny_net,
        preprocess=preprocess_for(tiny_net, cpu),
        test=tiny_images,
        deal=ClientIndices.from_owners(OWNERS, CLIENTS),
        machine=Machine(cpu, bf16=False),
        config=EvalConfig(batch_size=7),
        seed=0,
    )


def scatter(net: Net, seed: int) -> dict[str, Tensor]:
    """Weights so far from zero that the model tells classes apart, each seed its own way."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * 0.5 for name, shape in net.anatomy.shapes.items()}


def answers(net: Net, weights: Tensors, images: ImageSet) -> tuple[NDArray[np.bool_], float]:
    """Return which images are named rightly, and the mean cross-entropy."""
    module = copy.deepcopy(net.module.vit)
    module.load_state_dict(dict(weights))
    with torch.no_grad():
        logits = module.eval()((images.images.float() / 255 - 0.5) / 0.5)
    return (logits.argmax(1) == images.labels).numpy(), F.cross_entropy(logits, images.labels).item()


def nobody(client: int) -> State | None:
    return None


def test_the_servers_model_is_measured_on_the_common_test_set(
    evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    weights = scatter(tiny_net, 1)
    correct, expected = answers(tiny_net, weights, tiny_images)
    assert 0 < correct.mean() < 1
    method = FedAvg(FedAvgParams(), make_context())
    owned, own = own_models(tiny_net)  # of no matter: the server has a model
    share, loss, models = evaluator.evaluate_global(method, 1, State(weights), {}, own)
    assert owned
    assert share == pytest.approx(correct.mean())
    assert loss == pytest.approx(expected, rel=1e-5)
    assert models == 1


def test_what_never_travels_comes_from_the_base(
    evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = FedAvg(FedAvgParams(), make_context())
    weights = scatter(tiny_net, 1)
    head = {name: weights[name] for name in tiny_net.anatomy.head}
    body = {name: tensor for name, tensor in weights.items() if name not in head}
    whole = evaluator.evaluate_global(method, 1, State(weights), {}, nobody)
    assert evaluator.evaluate_global(method, 1, State(head), body, nobody) == whole


def test_the_batch_size_changes_nothing(evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext) -> None:
    method = FedAvg(FedAvgParams(), make_context())
    server = State(scatter(tiny_net, 1))
    small = evaluator.evaluate_global(method, 1, server, {}, nobody)
    large = replace(evaluator, config=EvalConfig(batch_size=1000)).evaluate_global(method, 1, server, {}, nobody)
    assert small[0] == pytest.approx(large[0], rel=1e-6)
    assert small[1] == pytest.approx(large[1], rel=1e-6)


@pytest.mark.parametrize("client", range(CLIENTS))
def test_a_client_is_judged_on_its_own_test_images(
    client: int, evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet
) -> None:
    weights = scatter(tiny_net, 20)
    correct, _ = answers(tiny_net, weights, tiny_images)
    mine = np.equal(OWNERS, client)
    assert evaluator.evaluate_clients(weights, [ClientTask(client, 0)]) == [
        EvalResult(int(correct[mine].sum()), int(mine.sum()))
    ]


def test_the_judge_tells_clients_apart(evaluator: FleetEvaluator, tiny_net: Net) -> None:
    evaluations = evaluator.evaluate_clients(
        scatter(tiny_net, 20), [ClientTask(client, 0) for client in range(CLIENTS)]
    )
    assert evaluations[1] == EvalResult(0, 0)
    assert len({evaluation.correct for evaluation in evaluations}) > 2


def own_models(net: Net) -> tuple[dict[int, State], Callable[[int], State | None]]:
    owned = {client: State(scatter(net, 10 + client)) for client in (0, 1, 3, 4)}  # client 2 never trained
    return owned, owned.get


def by_client(net: Net, images: ImageSet, base: Tensors) -> dict[int, tuple[float, float]]:
    """Return each client's own model's accuracy and loss on the common test set."""
    owned, _ = own_models(net)
    measured = {}
    for client in range(CLIENTS):
        correct, loss = answers(net, owned[client].tensors if client in owned else base, images)
        measured[client] = (float(correct.mean()), loss)
    return measured


def test_where_the_server_has_no_model_the_clients_stand_for_it(
    evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    base = scatter(tiny_net, 3)
    measured = by_client(tiny_net, tiny_images, base).values()
    method = Standalone(StandaloneParams(), make_context())
    share, loss, models = evaluator.evaluate_global(method, 1, State(), base, own_models(tiny_net)[1])
    assert share == pytest.approx(np.mean([share for share, _ in measured]))
    assert loss == pytest.approx(np.mean([loss for _, loss in measured]), rel=1e-5)
    assert models == CLIENTS


def test_a_sample_of_the_clients_is_drawn_anew_each_time_and_its_size_recorded(
    evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    base = scatter(tiny_net, 3)
    _, own = own_models(tiny_net)
    measured = by_client(tiny_net, tiny_images, base)
    pairs = [np.mean([measured[client][1] for client in pair]) for pair in itertools.combinations(measured, 2)]
    few = replace(evaluator, config=EvalConfig(clients=2))
    losses = []
    for round in range(1, 9):
        figures = few.evaluate_global(method, round, State(), base, own)
        assert figures[2] == 2
        assert any(figures[1] == pytest.approx(pair, rel=1e-5) for pair in pairs)
        assert few.evaluate_global(method, round, State(), base, own) == figures
        losses.append(figures[1])
    assert len(set(losses)) > 2


@pytest.mark.parametrize("limit", [None, CLIENTS, 100])
def test_a_limit_that_does_not_bind_measures_everybody(
    limit: int | None, evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    everybody = replace(evaluator, config=EvalConfig(clients=limit))
    assert everybody.evaluate_global(method, 1, State(), scatter(tiny_net, 3), nobody)[2] == CLIENTS
