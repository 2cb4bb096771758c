"""DyTox: the forward pass and the loss by hand, what grows and what stays frozen, and which tokens are sent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import dytox_by_hand as hand
import pytest
import torch
from by_hand import PLAIN_SGD, close
from torch import Tensor

from conftest import CLASSES, MakeShard, MakeTrainer, context_of
from vitfleet.config.schema import ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.errors import UserError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate, adapt_model
from vitfleet.methods.continual.replay.dytox import DyTox, DyToxParams
from vitfleet.methods.continual.replay.experience_replay import REPLAY
from vitfleet.methods.continual.stored_samples import read_memory
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.randomness import Address, Purpose
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.driver import PendingUpdate, run_update, run_updates
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

TASKS = [1, 0, 1, 0, -1]  # the last class belongs to no task
SEED = 56  # it divides the classes like this
CLIENT = 2
PER_TASK = ("token", "norm_weight", "norm_bias", "class_weight", "class_bias")


@pytest.fixture
def net() -> Net:
    adapt = partial(adapt_model, DyToxParams(), class_to_task=TASKS)
    return build_model(ModelConfig(dim=16, depth=2, heads=2, patch_size=4), CLASSES, 1, 8, 0, adapt)


def random_weights(net: Net, seed: int, grown: list[int], current: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=random)
        for name, tensor in net.initial_weights().items()
    }
    weights["head.grown"] = torch.tensor([float(task in grown) for task in range(2)])
    weights["head.current"] = torch.tensor([float(task == current) for task in range(2)])
    return weights


def test_forward_as_by_hand(net: Net, tiny_images: ImageSet) -> None:
    weights, pixels = random_weights(net, 1, [0, 1], 1), tiny_images.images[:3]
    expected, divergence = hand.forward(net, weights, pixels, TASKS, current=1)
    logits = net(weights, hand.normalised(pixels))
    torch.testing.assert_close(logits[:, :4], expected[:, :4])
    assert (logits[:, 4] <= -1e4).all(), "a class without a task has no head"
    body = net.parts.body.take(random_weights(net, 2, [], 0))
    teacher, _ = hand.forward(net, {**weights, **body}, pixels, TASKS, current=1)
    taught = {**weights, **{f"teacher.{name}": tensor for name, tensor in body.items()}}
    outputs = net.outputs(taught, hand.normalised(pixels))
    torch.testing.assert_close(outputs[:, CLASSES : CLASSES + 3], divergence)
    torch.testing.assert_close(outputs[:, CLASSES + 3 : 2 * CLASSES + 3], logits)
    torch.testing.assert_close(outputs[:, 2 * CLASSES + 3 : -1], teacher[:, :4])
    torch.testing.assert_close(net(taught, hand.normalised(pixels)), logits)


def test_a_token_does_not_see_the_others_and_a_missing_head_has_no_say(net: Net, tiny_images: ImageSet) -> None:
    weights, images = random_weights(net, 1, [0, 1], 1), hand.normalised(tiny_images.images[:3])
    changed = {**weights, "head.new_token": weights["head.new_token"].flip(0)}
    logits, others = net(weights, images), net(changed, images)
    assert torch.equal(logits[:, [1, 3]], others[:, [1, 3]])
    assert not torch.isclose(logits[:, [0, 2]], others[:, [0, 2]]).any()
    only_first = net({**weights, "head.grown": torch.tensor([1.0, 0.0])}, images)
    assert torch.equal(only_first[:, [1, 3]], logits[:, [1, 3]])
    torch.testing.assert_close(only_first[:, [0, 2]], logits[:, [0, 2]] - 1e4, rtol=0, atol=2e-3)


def test_stacked_and_masked_forward_is_each_clients_own(net: Net, tiny_images: ImageSet) -> None:
    clients = [random_weights(net, seed, [0, 1], seed % 2) for seed in range(3)]
    body = net.parts.body.take(random_weights(net, 9, [], 0))
    clients = [{**own, **{f"teacher.{name}": tensor for name, tensor in body.items()}} for own in clients]
    images = hand.normalised(tiny_images.images[:6]).view(3, 2, 1, 8, 8)
    keep = torch.tensor([[[0, 3], [1, 2]], [[2, 3], [0, 1]], [[3, 1], [2, 0]]])
    for shared in ((), ("head.token",), ("head.new_token", "head.current"), tuple(net.parts.body)):
        own = [{**weights, **{name: clients[0][name] for name in shared}} for weights in clients]
        stacked = {
            name: tensor if name in shared or name.startswith("teacher.") else torch.stack([w[name] for w in own])
            for name, tensor in own[0].items()
        }
        together = net.outputs(stacked, images, keep)
        for client, weights in enumerate(own):
            torch.testing.assert_close(together[client], net.outputs(weights, images[client], keep[client]))


def test_models_without_the_parts_are_refused() -> None:
    adapt = partial(adapt_model, DyToxParams(), class_to_task=TASKS)
    with pytest.raises(UserError, match=r"model\.name: a SwinTransformer cannot take task tokens; choose a plain ViT"):
        build_model(ModelConfig(name="swin_tiny_patch4_window7_224"), CLASSES, 3, 224, 0, adapt)
    with pytest.raises(UserError, match=r"model\.depth = 1: must be at least 2"):
        build_model(ModelConfig(dim=16, depth=1, heads=2, patch_size=4), CLASSES, 1, 8, 0, adapt)


def make_dytox(net: Net, known: bool = True, **params: object) -> DyTox:
    tasks = {"count": 2, "classes": 2, "per_client": (1, 2), "scenario": "task" if known else "class"}
    context = context_of(net, {"epochs": 2, **PLAIN_SGD}, seed=SEED, data={"tasks": tasks})
    assert context.class_to_task == tuple(TASKS)
    return DyTox(DyToxParams.model_validate({"stored_share": 0.3, **params}), context)


def task_shard(make_shard: MakeShard, task: int) -> Shard:
    whole = make_shard(0, 40)
    labels = torch.tensor(TASKS)[whole.labels]
    return Shard(whole.images, torch.nonzero(labels == task).flatten()[:6])


def run_client(
    method: DyTox,
    trainer: Trainer,
    shard: Shard,
    task_index: int,
    own: State | None,
    round: int,
    server: State | None = None,
) -> ClientUpdate:
    initial = trainer.net.initial_weights()
    message = Message((server or method.initial_state(initial)).tensors)
    job = ClientRoundInput(round, CLIENT, message, method.initial_broadcast(initial).tensors, own, shard, task_index)
    return run_update(method.client_update(job), trainer, shard, RngContext(0, round, CLIENT))


def train_by_hand(
    net: Net, received: Tensors, shard: Shard, round: int, task: int, own: State | None, known: bool
) -> Tensors:
    """Train a task's token and head with the body and the divergence head; a teacher is in the client's state."""
    now = {name: tensor.clone() for name, tensor in received.items()}
    tasks, old = torch.tensor(TASKS), 1 - task
    groups = [torch.nonzero(tasks == old).flatten()]
    trained = [*net.parts.body, *(f"head.new_{name}" for name in PER_TASK)]
    trained += [name for name in net.parts.head if "divergence" in name]
    pixels, labels = shard.images.images[shard.index], shard.labels
    memory = None if own is None else read_memory(own.tensors).get(0)
    for epoch in range(2):
        order = Address(0, Purpose.ORDER, round, CLIENT, epoch).generator().permutation(len(labels))
        stored = 1 if memory is None else len(memory)
        drawn = Address(0, REPLAY, round, CLIENT, epoch).generator().integers(stored, size=(len(labels), 1))
        for start in range(0, len(labels), 4):
            leaves = {name: now[name].clone().requires_grad_() for name in trained}
            part = torch.from_numpy(order[start : start + 4])
            images, targets, is_old = pixels[part], labels[part], [False] * len(part)
            if memory is not None:
                rows = torch.from_numpy(drawn[start : start + 4, 0])
                images = torch.cat([images, memory.images[rows]])
                targets, is_old = torch.cat([targets, memory.labels[rows].long()]), [*is_old, *[True] * len(rows)]
            weights = {**now, **leaves}
            logits, divergence = hand.forward(net, weights, images, TASKS, task)
            losses = []
            for row, label in enumerate(targets.tolist()):
                met = tasks >= 0 if memory is not None else tasks == task
                candidates = torch.nonzero((tasks == tasks[label]) if known else met).flatten()
                losses.append(
                    hand.binary_cross_entropy(
                        logits[row, candidates], [label == other for other in candidates.tolist()]
                    )
                )
                if memory is not None:
                    assert own is not None
                    body = {name: own.tensors[f"teacher.{name}"] for name in net.parts.body}
                    taught, _ = hand.forward(net, {**weights, **body}, images[row : row + 1], TASKS, task)
                    distilled = sum(hand.kullback_leibler(taught[0, group], logits[row, group]) for group in groups)
                    new = [label == other for other in torch.nonzero(tasks == task).flatten().tolist()]
                    losses[-1] = 0.5 * losses[-1] + 0.5 * distilled / 2
                    losses[-1] = losses[-1] + 0.1 * hand.binary_cross_entropy(divergence[row], [is_old[row], *new])
            gradients = torch.autograd.grad(torch.stack(losses).mean(), list(leaves.values()), allow_unused=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                now[name] = now[name] - 0.1 * (0 if gradient is None else gradient)
    return now


@pytest.mark.parametrize("known", [True, False])
def test_two_tasks_as_by_hand(known: bool, net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    """The weights of a client after its first task, and after each of two rounds in its second."""
    class_to_task = torch.tensor(TASKS) if known else None
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net, class_to_task=class_to_task)
    method, initial = make_dytox(net, known), net.initial_weights()
    own: State | None = None
    for task_index, task, round in ((0, 1, 1), (1, 0, 2), (1, 0, 3)):
        shard = task_shard(make_shard, task)
        update = run_client(method, trainer, shard, task_index, own, round)
        assert update.client_state is not None
        received = {**(initial if own is None else own.tensors), **net.parts.body.take(initial)}
        received |= {f"head.new_{name}": received[f"head.{name}"][task] for name in PER_TASK}
        if round < 3:
            received |= {name: initial[name] for name in net.parts.head if "divergence" in name}
        else:
            assert torch.equal(update.client_state.tensors["teacher.pos_embed"], own.tensors["teacher.pos_embed"])  # type: ignore[union-attr]
        if round == 2:
            assert own is not None
            for name in net.parts.body:
                assert torch.equal(update.client_state.tensors[f"teacher.{name}"], own.tensors[name])
        with_teacher = update.client_state if task_index else None
        expected = train_by_hand(net, net.parts.whole.take(received), shard, round, task, with_teacher, known)
        close(update.model_weights, {name: expected[name] for name in method.trainable})
        assert update.message.numbers["distilled"] == task_index
        own = update.client_state


def test_a_token_and_a_head_grow_per_task_and_earlier_ones_stay_bit_for_bit(
    net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(epochs=2, batch_size=4, weight_decay=0.1), net=net)
    method, initial = make_dytox(net), net.initial_weights()
    own: State | None = None
    for number, (task_index, task, grown) in enumerate(
        ((0, 1, [0, 1]), (0, 1, [0, 1]), (1, 0, [1, 1]), (1, 0, [1, 1]))
    ):
        before = initial if own is None else own.tensors
        update = run_client(method, trainer, task_shard(make_shard, task), task_index, own, number + 1)
        weights, own = update.model_weights, update.client_state
        assert weights["head.grown"].tolist() == grown
        assert weights["head.current"].tolist() == [float(other == task) for other in range(2)]
        assert update.message.numbers["tokens"] == task_index + 1
        for name in PER_TASK:
            trained, other = weights[f"head.{name}"][task], 1 - task
            assert torch.equal(trained, weights[f"head.new_{name}"])
            assert not torch.equal(trained, before[f"head.{name}"][task])
            assert torch.equal(weights[f"head.{name}"][other], before[f"head.{name}"][other]), (
                "frozen, or not yet there"
            )
        assert set(update.message.tensors) == set(net.parts.body), "tokens and heads are local"


def test_a_client_without_samples_grows_nothing(net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    trainer, method = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net), make_dytox(net)
    first = run_client(method, trainer, task_shard(make_shard, 1), 0, None, 1).client_state
    assert first is not None
    update = run_client(method, trainer, task_shard(make_shard, 7), 1, first, 2)
    assert update.message.numbers["tokens"] == 1
    assert not update.message.tensors
    for name in net.parts.head:
        assert torch.equal(update.model_weights[name], first.tensors[name])


def test_shared_tokens_are_averaged_over_the_clients_of_their_task(
    net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer, method = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net), make_dytox(net, tokens="shared")
    server = method.initial_state(net.initial_weights())
    assert torch.equal(server.tensors["task_token.1"], net.initial_weights()["head.token"][1])
    aggregator = method.aggregator(server, 1)
    shards = [task_shard(make_shard, 1), Shard(make_shard(0, 1).images, task_shard(make_shard, 1).index[:4])]
    updates = [run_client(method, trainer, shard, 0, None, 1) for shard in shards]
    for client, update in enumerate(updates):
        assert set(update.message.tensors) == {*net.parts.body, "task_token.1"}
        aggregator.add(client, update.message)
    after = aggregator.finish()
    sent = [update.model_weights["head.token"][1].double() for update in updates]
    mean = (6 * sent[0] + 4 * sent[1]) / 10
    torch.testing.assert_close(after.tensors["task_token.1"], mean.float())
    assert torch.equal(after.tensors["task_token.0"], server.tensors["task_token.0"]), "nobody learned that task"
    # A client begins the task with the server's token: a step of size 0 keeps it.
    still = replace(trainer, config=trainer.config.model_copy(update={"lr": 0.0}))
    begun = run_client(method, still, task_shard(make_shard, 1), 0, None, 2, after)
    assert torch.equal(begun.model_weights["head.token"][1], after.tensors["task_token.1"])


@pytest.mark.parametrize("graphs", [False, True])
def test_clients_that_learn_different_tasks_are_trained_together(
    graphs: bool, captured: list[CudaGraphRunner], net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net, class_to_task=torch.tensor(TASKS))
    method = make_dytox(net)
    initial = net.initial_weights()
    message, base = Message(method.initial_state(initial).tensors), method.initial_broadcast(initial).tensors
    states: dict[int, State | None] = {0: None, 1: None}
    for task_index in (0, 1):
        shards = {client: task_shard(make_shard, (client + task_index) % 2) for client in states}

        def pending(
            client: int, round: int = task_index + 1, shards: dict[int, Shard] = shards
        ) -> PendingUpdate[ClientUpdate]:
            job = ClientRoundInput(round, client, message, base, states[client], shards[client], round - 1)
            return PendingUpdate(method.client_update(job), shards[client], RngContext(0, round, client))

        alone = [run_updates([pending(client)], trainer)[0] for client in states]
        others = replace(trainer, machine=replace(trainer.machine, graphs=graphs))
        together = run_updates([pending(client) for client in states], others)
        for client, (mine, theirs) in enumerate(zip(alone, together, strict=True)):
            close(theirs.model_weights, mine.model_weights)
            states[client] = theirs.client_state
        assert others.execution_summary().largest_stack == 2
    assert bool(captured) == graphs
