"""Global and local accuracy against a count by hand with timm's own module."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from conftest import MakeContext
from vitfleet.config.schema import EvalConfig, ModelConfig
from vitfleet.data.images import ImageSet
from vitfleet.data.partitions.client_indices import ClientIndices
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.message import State, Tensors
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.personal.standalone import Standalone, StandaloneParams
from vitfleet.methods.split.eftvit import EftVit, EftVitParams
from vitfleet.models.forward.functional_vit import FunctionalViT
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.evaluate.accuracy import FleetEvaluator, GlobalEvaluation
from vitfleet.training.evaluator import MAX_STACKED_MODELS, STACKED_BATCHES, Evaluator
from vitfleet.training.execution.settings import ExecutionSettings
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
        machine=ExecutionSettings(cpu, bf16=False),
        config=EvalConfig(batch_size=7),
        seed=0,
    )


def random_weights(net: Net, seed: int) -> dict[str, Tensor]:
    """Return random weights, large enough that predictions differ between images."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * 0.5 for name, shape in net.parts.shapes.items()}


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
    head = {name: weights[name] for name in tiny_net.parts.head}
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


def test_evaluate_global_evaluates_the_same_few_clients_in_every_round(
    evaluator: FleetEvaluator, tiny_net: Net, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    base = random_weights(tiny_net, 3)
    _, client_state = client_models(tiny_net)
    measured = by_client(tiny_net, tiny_images, base)
    pairs = [np.mean([measured[client][1] for client in pair]) for pair in itertools.combinations(measured, 2)]
    few = replace(evaluator, config=EvalConfig(clients=2))
    losses = []
    for seed in range(8):
        seeded = replace(few, seed=seed)
        evaluation = seeded.evaluate_global(method, 1, State(), base, client_state)
        assert evaluation.models == 2
        assert any(evaluation.loss == pytest.approx(pair, rel=1e-5) for pair in pairs)
        for round in (2, 50):
            assert seeded.evaluate_global(method, round, State(), base, client_state) == evaluation
        losses.append(evaluation.loss)
    assert len(set(losses)) > 2


@pytest.mark.parametrize("limit", [None, CLIENTS, 100])
def test_evaluate_global_with_a_large_limit_evaluates_all_clients(
    limit: int | None, evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    unlimited = replace(evaluator, config=EvalConfig(clients=limit))
    assert unlimited.evaluate_global(method, 1, State(), random_weights(tiny_net, 3), no_state).models == CLIENTS


# Stacked models


def stacked(evaluator: FleetEvaluator, stack_size: int = 3) -> FleetEvaluator:
    return replace(evaluator, machine=replace(evaluator.machine, stack_size=stack_size))


def assert_equal_evaluations(one: GlobalEvaluation, other: GlobalEvaluation) -> None:
    assert one.accuracy == pytest.approx(other.accuracy, abs=1e-7)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.models == other.models


class SpyForward:
    """Records the inputs of a net's forward passes."""

    stackable = True
    num_classes: int | None = None

    def __init__(self, net: Net) -> None:
        assert net.functional is not None
        self.functional = net.functional
        self.shapes: list[torch.Size] = []
        self.stacked_names: set[str] = set()
        self.net = replace(net, functional=cast(FunctionalViT, self))

    def __call__(self, weights: Tensors, images: Tensor, *more: Any) -> Tensor:
        self.shapes.append(images.shape)
        self.stacked_names |= {name for name, shape in self.net.parts.shapes.items() if weights[name].shape != shape}
        return self.functional(weights, images, *more)


@pytest.mark.parametrize("stack_size", [2, 3, 5, 100])
@pytest.mark.parametrize("class_to_task", [None, torch.tensor([0, 0, 1, 1, 1])], ids=["all classes", "tasks"])
def test_stacked_models_are_evaluated_as_one_after_the_other(
    stack_size: int, class_to_task: Tensor | None, evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    arguments = (method, 1, State(), random_weights(tiny_net, 3), client_models(tiny_net)[1])
    alone = replace(evaluator, class_to_task=class_to_task)
    spy = SpyForward(tiny_net)
    together = stacked(replace(alone, net=spy.net), stack_size)
    assert_equal_evaluations(together.evaluate_global(*arguments), alone.evaluate_global(*arguments))
    assert any(len(shape) == 5 for shape in spy.shapes)


def test_stacked_models_share_the_global_module(
    evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = EftVit(EftVitParams(local_layers=1), make_context())
    server = State(method.parts.union(method.global_module, method.parts.head).take(random_weights(tiny_net, 1)))
    base = method.local_module.take(random_weights(tiny_net, 3))
    states = {client: State(method.local_module.take(random_weights(tiny_net, 10 + client))) for client in (0, 1, 3)}
    spy = SpyForward(tiny_net)
    together = stacked(replace(evaluator, net=spy.net)).evaluate_global(method, 1, server, base, states.get)
    assert_equal_evaluations(together, evaluator.evaluate_global(method, 1, server, base, states.get))
    assert spy.stacked_names == set(method.local_module)
    assert {shape[0] for shape in spy.shapes if len(shape) == 5} == {3}  # the initial model, once, is the fourth


def test_clients_without_a_state_share_one_evaluation(
    evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    method = Standalone(StandaloneParams(), make_context())
    base = random_weights(tiny_net, 3)
    spy = SpyForward(tiny_net)
    together = stacked(replace(evaluator, net=spy.net)).evaluate_global(method, 1, State(), base, no_state)
    assert together == evaluator.evaluate_global(method, 1, State(), base, no_state)
    assert together.models == CLIENTS
    assert sum(shape[0] for shape in spy.shapes) == len(evaluator.test)


def test_memory_of_a_forward_pass_does_not_grow_with_the_clients(
    evaluator: FleetEvaluator, tiny_net: Net, make_context: MakeContext
) -> None:
    clients = 30
    fleet = ClientIndices.from_owners(np.zeros(40, dtype=np.int64), clients)
    spy = SpyForward(tiny_net)
    many = stacked(replace(evaluator, net=spy.net, client_indices=fleet), stack_size=clients)
    loaded: list[int] = []

    def client_state(client: int) -> State | None:
        loaded.append(client)
        assert len(loaded) <= MAX_STACKED_MODELS + sum(shape[0] for shape in spy.shapes)
        return State(random_weights(tiny_net, client))

    many.evaluate_global(Standalone(StandaloneParams(), make_context()), 1, State(), {}, client_state)
    assert max(shape[0] for shape in spy.shapes) == MAX_STACKED_MODELS
    assert max(shape[0] * shape[1] for shape in spy.shapes) <= STACKED_BATCHES * evaluator.config.batch_size


@pytest.mark.parametrize("copies", [1, 3])
def test_equal_models_are_evaluated_once(copies: int, evaluator: FleetEvaluator, tiny_net: Net) -> None:
    weights = random_weights(tiny_net, 1)
    spy = SpyForward(tiny_net)
    single = Evaluator(spy.net, evaluator.preprocess, replace(evaluator.machine, stack_size=8), batch_size=7)
    correct, losses = single.evaluate_models([dict(weights) for _ in range(copies)], evaluator.test)
    expected_correct, expected_losses = evaluator.evaluate(weights)
    assert torch.equal(correct, expected_correct.expand(copies, -1))
    assert torch.equal(losses, expected_losses.expand(copies, -1))
    assert sum(shape[0] for shape in spy.shapes) == len(evaluator.test)


@pytest.mark.parametrize("stacked", [True, False])
def test_other_families_are_evaluated_as_one_after_the_other(
    stacked: bool, evaluator: FleetEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(name="cait_xxs24_224", image_size=8, patch_size=4, depth=1)
    net = build_model(config, 5, 1, 8, seed=0)
    assert net.stacking == "vmap"
    if not stacked:
        monkeypatch.setitem(net.__dict__, "stacking", "none")
    models = [random_weights(net, seed) for seed in range(3)]
    preprocess = preprocess_for(net, torch.device("cpu"))
    other = Evaluator(net, preprocess, replace(evaluator.machine, stack_size=8), batch_size=16)
    assert other.models_at_once == (8 if stacked else 1)
    correct, losses = other.evaluate_models(models, evaluator.test)
    for index, weights in enumerate(models):
        expected = other.evaluate(weights, evaluator.test)
        assert torch.equal(correct[index], expected[0])
        torch.testing.assert_close(losses[index], expected[1])
