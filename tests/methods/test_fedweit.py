"""A client of FedWEIT: the composed weight and the whole loss by hand, what it sends, the model of each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, close
from fedweit_clients import CLASS_TASKS, make_fedweit, random_sparse, sigmoid, tasks_of, update_of
from torch import Tensor

from conftest import NO_IMAGES, MakeContext, MakeShard, MakeTrainer
from vitfleet.costs.cost_model import CostModel
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.message import Message, Numbers, State, Tensors, with_prefix
from vitfleet.methods.continual.fedweit import DecomposedStep, FedWeit, FedWeitParams, TaskWeights
from vitfleet.methods.continual.sparse_weights import densify
from vitfleet.models.net import Net


@pytest.fixture
def method(make_context: MakeContext) -> FedWeit:
    return make_fedweit(make_context)


def test_defaults_are_those_of_the_paper() -> None:
    params = FedWeitParams()
    assert (params.sparsity_weight, params.drift_weight) == (1e-3, 100)


def test_the_matrices_of_the_blocks_are_decomposed(method: FedWeit, tiny_net: Net) -> None:
    layers = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"
    assert list(method.decomposed) == [f"blocks.{block}.{layer}.weight" for block in range(2) for layer in layers]


def test_the_composed_weight_is_the_formula() -> None:
    random = torch.Generator().manual_seed(0)
    base, adaptive = torch.randn(3, 4, generator=random), torch.randn(3, 4, generator=random)
    mask, attention = torch.randn(3, generator=random), torch.randn(2, generator=random)
    others = torch.randn(2, 3, 4, generator=random)
    trained = {"w": base, "mask.w": mask, "adaptive.w": adaptive, "attention.w": attention}
    (composed,) = DecomposedStep(("w",), 0.0, 0.0, 2, 0).compose(trained, {"knowledge.w": others}).values()
    for unit in range(3):
        for column in range(4):
            expected = float(base[unit, column]) * float(sigmoid(mask[unit])) + float(adaptive[unit, column])
            expected += sum(float(attention[c]) * float(others[c, unit, column]) for c in range(2))
            assert float(composed[unit, column]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    (without,) = DecomposedStep(("w",), 0.0, 0.0, 0, 0).compose(trained, {}).values()
    torch.testing.assert_close(without, sigmoid(mask)[:, None] * base + adaptive)
    weights = TaskWeights({"w": mask}, {"w": adaptive}, {"w": torch.einsum("c,cij->ij", attention, others)})
    torch.testing.assert_close(weights.compose({"w": base})["w"], composed)


def test_a_round_with_earlier_tasks_and_other_clients_is_that_of_autograd_by_hand(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Every term of the loss, by every tensor that trains, over all steps of two rounds of the third task."""
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=CLASS_TASKS)
    initial, shard = tiny_net.initial_weights(), make_shard(0, 10)
    base, body = tiny_net.parts.head.take(initial), tiny_net.parts.body.take(initial)
    vectors = [random_sparse(method, seed) for seed in (1, 2, 3)]
    knowledge: dict[str, Tensor] = {}
    for row, vector in enumerate(vectors):
        knowledge |= vector.tensors(f"knowledge.{row:04d}.")
    state, history = None, []
    for round in (1, 3):  # one round in each of the first two tasks
        update = update_of(method, trainer, shard, Message(body), base, state, round)
        state = update.client_state
        history.append(tasks_of(method, update))
        body = {name: tensor + 0.01 for name, tensor in tiny_net.parts.body.take(update.message.tensors).items()}
    first = update_of(method, trainer, shard, Message({**body, **knowledge}), base, state, 5)
    second = update_of(method, trainer, shard, Message(body), base, first.client_state, 6)

    names = list(method.decomposed)
    targets, masks = [], []
    for tasks in history:
        assert tasks.latest is not None
        latest = tasks.latest
        masks.append(latest.mask)
        targets.append({n: sigmoid(latest.mask[n])[:, None] * tasks.model[n] + latest.adaptive[n] for n in names})
    assert history[1].latest is not None
    past = [history[1].past[0].adaptive, history[1].latest.adaptive]
    model = {**history[1].model, **body}
    others = densify(vectors, method.shapes)
    now: dict[str, Tensor] = {
        **model,
        **{f"m {n}": torch.zeros(model[n].shape[0]) for n in names},
        **{f"A {n}": model[n] / 3 for n in names},
        **{f"α {n}": torch.zeros(3) for n in names},
        **{f"A{i} {n}": past[i][n] for i in range(2) for n in names},
    }
    for round, update in ((5, first), (6, second)):
        hand = Hand(tiny_net, CLASS_TASKS, shard, round)
        now = {**now, **body}
        for batch in hand.batches(2):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in now.items()}
            theta = {name: leaves[name] for name in model}
            loss = torch.zeros(())
            for n in names:
                added = torch.stack([leaves[f"α {n}"][c] * others[n][c] for c in range(3)]).sum(dim=0)
                theta[n] = leaves[n] * sigmoid(leaves[f"m {n}"])[:, None] + leaves[f"A {n}"] + added
                loss = loss + 0.01 * (leaves[f"A {n}"].abs().sum() + sigmoid(leaves[f"m {n}"]).abs().sum())
                for i in range(2):
                    loss = loss + 0.01 * leaves[f"A{i} {n}"].abs().sum()
                    restored = leaves[n] * sigmoid(masks[i][n])[:, None] + leaves[f"A{i} {n}"]
                    loss = loss + 0.5 / 2 * (restored - targets[i][n]).square().sum()
            loss = loss + hand.losses(theta, batch).mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            now = {name: now[name] - 0.1 * gradient for name, gradient in zip(now, gradients, strict=True)}
        found = tasks_of(method, update)
        assert found.latest is not None
        close(found.model, {name: now[name] for name in model})
        close(found.latest.mask, {n: now[f"m {n}"] for n in names})
        close(found.latest.adaptive, {n: now[f"A {n}"] for n in names})
        close({n: tensor[:3] for n, tensor in found.latest.attention.items()}, {n: now[f"α {n}"] for n in names})
        assert all(not tensor[3:].any() for tensor in found.latest.attention.values()), "padding is never trained"
        for i in range(2):
            close(found.past[i].adaptive, {n: now[f"A{i} {n}"] for n in names})
            close(found.past[i].target, targets[i])
        transfer = {n: torch.einsum("c,cij->ij", now[f"α {n}"], others[n][:3]) for n in names}
        close(found.latest.transfer, transfer)
        assert any(tensor.abs().max() > 1e-4 for tensor in transfer.values())
        expected = {n: sigmoid(now[f"m {n}"])[:, None] * now[n] + now[f"A {n}"] + transfer[n] for n in names}
        close(update.model_weights, {**{name: now[name] for name in model}, **expected})
        assert update.message.numbers["past_tasks"] == 2
        assert update.message.numbers["adaptive_received"] == 3


def test_a_client_sends_its_base_weights_and_the_sparse_adaptive_weights(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    initial = tiny_net.initial_weights()
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=CLASS_TASKS)
    body = tiny_net.parts.body.take(initial)
    update = update_of(method, trainer, make_shard(0, 10), Message(body), tiny_net.parts.head.take(initial))
    tasks = tasks_of(method, update)
    assert tasks.latest is not None
    adaptive = torch.cat([tasks.latest.adaptive[name].flatten() for name in method.decomposed])
    sent = with_prefix(update.message.tensors, "adaptive.")
    assert torch.equal(sent["indices"].long(), (adaptive.abs() > 0.01).nonzero().flatten())
    assert torch.equal(sent["values"], adaptive[adaptive.abs() > 0.01])
    kept = int((adaptive.abs() > 0.01).sum())
    assert 0 < kept < len(adaptive)
    assert update.message.numbers["adaptive_kept"] == kept
    assert update.message.num_bytes == 4 * sum(tensor.numel() for tensor in body.values()) + 8 * kept
    assert update.message.tensors.keys() - {"adaptive.values", "adaptive.indices"} == body.keys()
    assert all(torch.equal(update.message.tensors[name], tasks.model[name]) for name in body)


def test_a_client_without_images_keeps_its_state_and_sends_no_weights(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    initial, trainer = tiny_net.initial_weights(), make_trainer(epochs=2, **PLAIN_SGD)
    message, base = Message(tiny_net.parts.body.take(initial)), tiny_net.parts.head.take(initial)
    trained = update_of(method, trainer, make_shard(0, 10), message, base)
    for state, latest in ((None, -1), (trained.client_state, 0)):
        update = update_of(method, trainer, NO_IMAGES, message, base, state, round=3)
        assert not update.message.tensors
        assert update.message.numbers["latest_task"] == latest
        assert update.client_state is not None
        before = initial if state is None else state.tensors
        assert update.client_state.tensors.keys() == before.keys()
        assert all(torch.equal(update.client_state.tensors[name], before[name]) for name in before)
    close(update.model_weights, trained.model_weights)


def test_every_task_is_evaluated_with_its_own_mask_and_adaptive_weights(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), class_to_task=CLASS_TASKS)
    initial = tiny_net.initial_weights()
    body, base = tiny_net.parts.body.take(initial), tiny_net.parts.head.take(initial)
    sparse = random_sparse(method, 1).tensors("knowledge.0000.")
    state, learned = None, []
    for round in (1, 3, 7):  # the client takes no part in the third task
        message = Message({**body, **(sparse if round > 1 else {})})
        update = update_of(method, trainer, make_shard(round, 10 + round), message, base, state, round)
        state = update.client_state
        learned.append(tasks_of(method, update))
        body = {name: tensor + 0.01 for name, tensor in tiny_net.parts.body.take(update.message.tensors).items()}
    final, evaluated = learned[-1], []

    def evaluate(weights: Tensors, tasks: Sequence[ClientTask]) -> list[EvalResult]:
        evaluated.append((dict(weights), list(tasks)))
        return [EvalResult(task.task_index, 10) for task in tasks]

    (reply,) = ClientRuntime(method, trainer, 0, evaluate).evaluate(State(body), base, state, [5], 5)
    assert [result.correct for result in reply.evaluations] == [0, 1, 2, 3, 4]
    assert [tasks for _, tasks in evaluated] == [[ClientTask(5, task_index)] for task_index in range(5)]
    assert list(final.past) == [0, 1]
    for task_index, snapshot in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 2)):  # a task that was never trained: the latest
        then, weights = learned[snapshot], evaluated[task_index][0]
        assert then.latest is not None
        assert final.latest is not None
        now = final.past.get(task_index, final.latest)
        for name in method.decomposed:
            assert torch.equal(now.mask[name], then.latest.mask[name]), "masks of earlier tasks are constant"
            expected = sigmoid(now.mask[name])[:, None] * final.model[name] + now.adaptive[name]
            expected = expected + (now.transfer[name] if snapshot else 0)
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)
        for name in set(initial) - set(method.decomposed):
            assert torch.equal(weights[name], then.model[name]), "all other weights are those of its last training"
    assert not torch.equal(learned[0].model["head.weight"], final.model["head.weight"])
    current = method.model_weights(State(body), base, state)
    assert all(torch.equal(current[name], evaluated[3][0][name]) for name in current)
    stranger = method.task_weights(State(body), base, None, 0)
    assert all(torch.equal(stranger[name], {**base, **body}[name]) for name in initial)


def test_shapes_of_the_state_are_known_from_the_numbers_that_are_reported(
    method: FedWeit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer, initial = make_trainer(epochs=1, **PLAIN_SGD), tiny_net.initial_weights()
    body, base = tiny_net.parts.body.take(initial), tiny_net.parts.head.take(initial)
    cost_model = CostModel(method, tiny_net, method.context.train)

    def kept_shapes(reported: Numbers) -> dict[str, torch.Size]:
        kept = cost_model.kept_state(reported)
        assert kept is not None
        return {name: tensor.shape for name, tensor in kept.tensors.items() if name not in initial}

    state = None
    for round in (1, 3, 5):
        received = {
            name: t
            for row in range(5)
            for name, t in random_sparse(method, row).tensors(f"knowledge.{row:04d}.").items()
        }
        message = Message({**body, **(received if round > 1 else {})})
        update = update_of(method, trainer, make_shard(0, 10), message, base, state, round)
        state = update.client_state
        assert state is not None
        shapes = kept_shapes(update.message.numbers)
        kept = {n: t.shape for n, t in state.tensors.items() if n not in initial}
        assert shapes.keys() == kept.keys()
        own = update.message.numbers["adaptive_kept"]
        for name, shape in shapes.items():
            # Of other clients' weights only the number is known, not how sparse they are: as sparse as its own.
            assert shape == ((own,) if name.startswith("knowledge.") else kept[name]), name
    assert not kept_shapes({"latest_task": -1, "adaptive_kept": 0})
