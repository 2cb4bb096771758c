"""Global and local accuracy against a count by hand with timm's own module."""

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
        client_indices=ClientIndices.from_owners(OWNERS, CLIENTS),
        machine=Machine(cpu, bf16=False),
        config=EvalConfig(batch_size=7),
        seed=0,
    )


def random_weights(net: Net, seed: int) -> dict[str, Tensor]:
    """Return random weights, large enough that predictions differ between images."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * 0.5 for name, shape in net.anatomy.shapes.items()}


def predict(net: Net, weights: Tensors, images: ImageSet) -> tuple[NDArray[np.bool_], float]:
    """Return which images are predicted correctly, and the mean cross-entropy."""
    module = copy.deepcopy(net.module.vit)
    module.load_state_dict(dict(weights))
    with torch.no_grad():
        logits = module.eval()((images.images.float() / 255 - 0.5) / 0.5)
    return (logits.argmax(1) == images.labels).numpy(), F.cross_entropy(logits, images.labels).item()


def no_state(client: int) -> State | None:
    return None


def test_evaluate_global_measures_the_global_model_on_the_common_test_set(
    evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    weights = random_weights(tiny_net, 1)
    correct, expected = predict(tiny_net, weights, tiny_images)
    assert 0 < correct.mean() < 1
    method = FedAvg(FedAvgParams(), make_context())
    _, client_state = client_models(tiny_net)  # not used: there is a global model
    accuracy, loss, models = evaluator.evaluate_global(method, 1, State(weights), {}, client_state)
    assert accuracy == pytest.approx(correct.mean())
    assert loss == pytest.approx(expected, rel=1e-5)
    assert models == 1


def test_evaluate_global_takes_missing_weights_from_the_base(
    evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = FedAvg(FedAvgParams(), make_context())
    weights = random_weights(tiny_net, 1)
    head = {name: weights[name] for name in tiny_net.anatomy.head}
    body = {name: tensor for name, tensor in weights.items() if name not in head}
    whole = evaluator.evaluate_global(method, 1, State(weights), {}, no_state)
    assert evaluator.evaluate_global(method, 1, State(head), body, no_state) == whole


def test_evaluate_global_does_not_depend_on_the_batch_size(
    evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = FedAvg(FedAvgParams(), make_context())
    server = State(random_weights(tiny_net, 1))
    small = evaluator.evaluate_global(method, 1, server, {}, no_state)
    large = replace(evaluator, config=EvalConfig(batch_size=1000)).evaluate_global(method, 1, server, {}, no_state)
    assert small.accuracy == pytest.approx(large.accuracy, rel=1e-6)
    assert small.loss == pytest.approx(large.loss, rel=1e-6)


@pytest.mark.parametrize("client", range(CLIENTS))
def test_evaluate_clients_uses_the_clients_own_test_images(
    client: int, evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet
) -> None:
    weights = random_weights(tiny_net, 20)
    correct, _ = predict(tiny_net, weights, tiny_images)
    mine = np.equal(OWNERS, client)
    assert evaluator.evaluate_clients(weights, [ClientTask(client, 0)]) == [
        EvalResult(int(correct[mine].sum()), int(mine.sum()))
    ]


def test_evaluate_clients_returns_one_result_per_client(evaluator: FleetEvaluator, tiny_net: Net) -> None:
    evaluations = evaluator.evaluate_clients(
        random_weights(tiny_net, 20), [ClientTask(client, 0) for client in range(CLIENTS)]
    )
    assert evaluations[1] == EvalResult(0, 0)
    assert len({evaluation.correct for evaluation in evaluations}) > 2


def client_models(net: Net) -> tuple[dict[int, State], Callable[[int], State | None]]:
    states = {client: State(random_weights(net, 10 + client)) for client in (0, 1, 3, 4)}  # client 2 never trained
    return states, states.get


def by_client(net: Net, images: ImageSet, base: Tensors) -> dict[int, tuple[float, float]]:
    """Return the accuracy and loss of each client's model on the common test set."""
    states, _ = client_models(net)
    measured = {}
    for client in range(CLIENTS):
        correct, loss = predict(net, states[client].tensors if client in states else base, images)
        measured[client] = (float(correct.mean()), loss)
    return measured


def test_evaluate_global_without_a_global_model_is_the_mean_over_clients(
    evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    base = random_weights(tiny_net, 3)
    measured = by_client(tiny_net, tiny_images, base).values()
    method = Standalone(StandaloneParams(), make_context())
    accuracy, loss, models = evaluator.evaluate_global(method, 1, State(), base, client_models(tiny_net)[1])
    assert accuracy == pytest.approx(np.mean([accuracy for accuracy, _ in measured]))
    assert loss == pytest.approx(np.mean([loss for _, loss in measured]), rel=1e-5)
    assert models == CLIENTS


def test_evaluate_global_draws_other_clients_each_round(
    evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    base = random_weights(tiny_net, 3)
    _, client_state = client_models(tiny_net)
    measured = by_client(tiny_net, tiny_images, base)
    pairs = [np.mean([measured[client][1] for client in pair]) for pair in itertools.combinations(measured, 2)]
    few = replace(evaluator, config=EvalConfig(clients=2))
    losses = []
    for round in range(1, 9):
        evaluation = few.evaluate_global(method, round, State(), base, client_state)
        assert evaluation.models == 2
        assert any(evaluation.loss == pytest.approx(pair, rel=1e-5) for pair in pairs)
        assert few.evaluate_global(method, round, State(), base, client_state) == evaluation
        losses.append(evaluation.loss)
    assert len(set(losses)) > 2


@pytest.mark.parametrize("limit", [None, CLIENTS, 100])
def test_evaluate_global_with_a_large_limit_evaluates_all_clients(
    limit: int | None, evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    unlimited = replace(evaluator, config=EvalConfig(clients=limit))
    assert unlimited.evaluate_global(method, 1, State(), random_weights(tiny_net, 3), no_state).models == CLIENTS
