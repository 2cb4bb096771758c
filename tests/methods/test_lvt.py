"""LVT: attention, loss and penalty by hand, the memory by confidence, and which keys are sent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import PLAIN_SGD, close
from torch import Tensor
from torch.nn import functional as F

from conftest import CLASSES, MakeShard, MakeTrainer, context_of
from vitfleet.config import load_config
from vitfleet.config.schema import ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.errors import UserError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate, adapt_model
from vitfleet.methods.continual.replay.experience_replay import REPLAY
from vitfleet.methods.continual.replay.lvt import Lvt, LvtParams
from vitfleet.methods.continual.stored_samples import read_memory
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.randomness import Address, Purpose
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.driver import PendingUpdate, run_update, run_updates
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])
CLIENT, HEADS, WIDTH, TOKENS = 2, 2, 16, 5
ALPHA, BETA, GAMMA, RATE, DECAY, TEMPERATURE = 0.7, 0.6, 3.0, 0.8, 0.5, 2.0


@pytest.fixture
def net() -> Net:
    adapt = partial(adapt_model, LvtParams())
    return build_model(ModelConfig(dim=WIDTH, depth=2, heads=HEADS, patch_size=4), CLASSES, 1, 8, 0, adapt)


def random_weights(net: Net, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    initial = net.initial_weights().items()
    return {name: tensor + 0.2 * torch.randn(tensor.shape, generator=random) for name, tensor in initial}


def normalised(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.5) / 0.5


def norm(weights: Tensors, path: str, tokens: Tensor) -> Tensor:
    return F.layer_norm(tokens, (WIDTH,), weights[f"{path}.weight"], weights[f"{path}.bias"], 1e-6)


def attention(weights: Tensors, path: str, tokens: Tensor, kept: list[int]) -> Tensor:
    """Return the attention of one image's tokens, head by head, with the keys of the tokens at these positions."""
    projected = tokens @ weights[f"{path}.qv.weight"].T + weights[f"{path}.qv.bias"]
    heads = []
    for head in range(HEADS):
        part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        queries, values = projected[:, :WIDTH][:, part], projected[:, WIDTH:][:, part]
        scores = queries @ weights[f"{path}.key"][kept][:, part].T / (WIDTH // HEADS) ** 0.5
        shares = (scores + weights[f"{path}.key_bias"][head, kept]).exp()
        heads.append(shares / shares.sum(dim=1, keepdim=True) @ values)
    return torch.cat(heads, dim=1) @ weights[f"{path}.proj.weight"].T + weights[f"{path}.proj.bias"]


def forward(weights: Tensors, pixels: Tensor, keep: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs of the accumulation and of the injection classifier, image by image."""
    kept = list(range(TOKENS)) if keep is None else [0, *(position + 1 for position in keep)]
    pooled = []
    for image in normalised(pixels):
        patches = F.conv2d(image, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=4)
        tokens = torch.cat([weights["cls_token"][0], patches.flatten(1).T]) + weights["pos_embed"][0]
        tokens = tokens[kept]
        for block in ("blocks.0", "blocks.1"):
            tokens = tokens + attention(weights, f"{block}.attn", norm(weights, f"{block}.norm1", tokens), kept)
            hidden = norm(weights, f"{block}.norm2", tokens) @ weights[f"{block}.mlp.fc1.weight"].T
            hidden = F.gelu(hidden + weights[f"{block}.mlp.fc1.bias"])
            tokens = tokens + hidden @ weights[f"{block}.mlp.fc2.weight"].T + weights[f"{block}.mlp.fc2.bias"]
        pooled.append(norm(weights, "norm", tokens)[0])
    features = torch.stack(pooled)
    accumulated = features @ weights["head.weight"].T + weights["head.bias"]
    return accumulated, features @ weights["head.injection_weight"].T + weights["head.injection_bias"]


def test_attention_as_by_hand(net: Net, tiny_images: ImageSet) -> None:
    weights, pixels = random_weights(net, 1), tiny_images.images[:3]
    accumulated, injected = forward(weights, pixels)
    torch.testing.assert_close(net(weights, normalised(pixels)), accumulated, rtol=1e-4, atol=1e-5)
    outputs = net.outputs(weights, normalised(pixels))
    torch.testing.assert_close(outputs[:, CLASSES:], injected, rtol=1e-4, atol=1e-5)
    keep = torch.tensor([[3, 1]] * 3)
    masked, _ = forward(weights, pixels, [3, 1])
    torch.testing.assert_close(net(weights, normalised(pixels), keep), masked, rtol=1e-4, atol=1e-5)


def test_keys_have_no_batch_axis_and_queries_and_values_keep_their_weights(net: Net) -> None:
    plain = build_model(ModelConfig(dim=WIDTH, depth=2, heads=HEADS, patch_size=4), CLASSES, 1, 8, 0)
    weights, of_plain = net.initial_weights(), plain.initial_weights()
    for block in ("blocks.0.attn", "blocks.1.attn"):
        assert weights[f"{block}.key"].shape == (TOKENS, WIDTH)
        assert weights[f"{block}.key_bias"].shape == (HEADS, TOKENS)
        query, _, value = of_plain[f"{block}.qkv.weight"].chunk(3)
        assert torch.equal(weights[f"{block}.qv.weight"], torch.cat([query, value]))
        assert f"{block}.qkv.weight" not in weights
    assert torch.equal(weights["head.weight"], of_plain["head.weight"])


def test_stacked_forward_is_each_clients_own(net: Net, tiny_images: ImageSet) -> None:
    clients = [random_weights(net, seed) for seed in range(3)]
    images = normalised(tiny_images.images[:6]).view(3, 2, 1, 8, 8)
    keep = torch.tensor([[[0, 3], [1, 2]], [[2, 3], [0, 1]], [[3, 1], [2, 0]]])
    for shared in ((), ("blocks.0.attn.key", "blocks.1.attn.key_bias"), tuple(net.parts.body)):
        own = [{**weights, **{name: clients[0][name] for name in shared}} for weights in clients]
        stacked = {name: own[0][name] if name in shared else torch.stack([w[name] for w in own]) for name in own[0]}
        for kept in (None, keep):
            together = net.outputs(stacked, images, kept)
            for client, weights in enumerate(own):
                alone = net.outputs(weights, images[client], None if kept is None else kept[client])
                torch.testing.assert_close(together[client], alone)


def test_wrong_settings_are_refused() -> None:
    adapt = partial(adapt_model, LvtParams())
    with pytest.raises(UserError, match=r"model\.name: a SwinTransformer cannot have external keys; choose a plain"):
        build_model(ModelConfig(name="swin_tiny_patch4_window7_224"), CLASSES, 3, 224, 0, adapt)
    keys = ["method.name=lvt", "method.keys=local", "method.heads=shared"]
    with pytest.raises(UserError, match=r"method\.keys = 'local': must be \"shared\" where method\.heads is"):
        load_config("fedvit-digits", keys)


def make_lvt(net: Net, **params: object) -> Lvt:
    context = context_of(net, {"epochs": 2, **PLAIN_SGD}, num_tasks=2)
    table: dict[str, Any] = {"stored_share": 0.3, "alpha": ALPHA, "beta": BETA, "gamma": GAMMA, "accumulation": RATE}
    return Lvt(LvtParams.model_validate({**table, "accumulation_decay": DECAY, **params}), context)


def task_shard(make_shard: MakeShard, task: int) -> Shard:
    whole = make_shard(0, 40)
    return Shard(whole.images, torch.nonzero(TASKS[whole.labels] == task).flatten()[:6])


def run_client(
    method: Lvt, trainer: Trainer, shard: Shard, task_index: int, own: State | None, round: int
) -> ClientUpdate:
    initial = trainer.net.initial_weights()
    message, base = Message(method.initial_state(initial).tensors), method.initial_broadcast(initial).tensors
    job = ClientRoundInput(round, CLIENT, message, base, own, shard, task_index)
    return run_update(method.client_update(job), trainer, shard, RngContext(0, round, CLIENT))


def candidates(label: int, known: bool) -> Tensor:
    return torch.nonzero(TASKS[label] == TASKS if known else TASKS >= 0).flatten()


def entropy(logits: Tensor, labels: Tensor, known: bool) -> Tensor:
    """Return the mean of −log of each true class's probability."""
    losses = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        losses.append(row[candidates(label, known)].logsumexp(dim=0) - row[label])
    return torch.stack(losses).mean()


def divergence(logits: Tensor, stored: Tensor, labels: Tensor, known: bool) -> Tensor:
    divergences = []
    for row, target, label in zip(logits, stored, labels.tolist(), strict=True):
        of_task = candidates(label, known)
        p, q = ((of[of_task] / TEMPERATURE).softmax(dim=0) for of in (target, row))
        divergences.append((p * (p / q).log()).sum())
    return torch.stack(divergences).mean()


def train_by_hand(
    weights: Tensors,
    shard: Shard,
    round: int,
    own: State | None,
    previous: dict[str, tuple[Tensor, Tensor]],
    known: bool,
) -> dict[str, Tensor]:
    """Train all weights; ``own`` has the memory of the first task, ``previous`` the keys with their gradients."""
    now = {name: tensor.clone() for name, tensor in weights.items()}
    pixels, labels = shard.images.images[shard.index], shard.labels
    memory = None if own is None else read_memory(own.tensors)[0]
    for epoch in range(2):
        order = Address(0, Purpose.ORDER, round, CLIENT, epoch).generator().permutation(len(labels))
        stored = 1 if memory is None else len(memory)
        drawn = Address(0, REPLAY, round, CLIENT, epoch).generator().integers(stored, size=(len(labels), 1))
        for start in range(0, len(labels), 4):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in now.items()}
            part = torch.from_numpy(order[start : start + 4])
            accumulated, injected = forward(leaves, pixels[part])
            loss = entropy(injected, labels[part], known)
            loss = loss + RATE * (1 if memory is None else DECAY) * entropy(accumulated, labels[part], known)
            if memory is not None:
                assert memory.logits is not None
                rows = torch.from_numpy(drawn[start : start + 4, 0])
                replayed, _ = forward(leaves, memory.images[rows])
                loss = loss + ALPHA * entropy(replayed, memory.labels[rows].long(), known)
                loss = loss + BETA * divergence(replayed, memory.logits[rows], memory.labels[rows].long(), known)
            for name, (key, gradient) in previous.items():
                loss = loss + GAMMA * (gradient * (leaves[name] - key)).abs().sum()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            now = {name: now[name] - 0.1 * one for name, one in zip(leaves, gradients, strict=True)}
    return now


@pytest.mark.parametrize("known", [True, False])
def test_two_tasks_as_by_hand(known: bool, net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    """The weights after a first task and two rounds of a second, and the keys and gradients of the penalty."""
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net, class_to_task=TASKS if known else None)
    method, initial = make_lvt(net), net.initial_weights()
    keys = [name for name in initial if name.endswith(("key", "key_bias"))]
    own: State | None = None
    previous: dict[str, tuple[Tensor, Tensor]] = {}
    for task, round in ((1, 1), (0, 2), (0, 3)):
        shard, task_index = task_shard(make_shard, task), int(round > 1)
        if round == 2:
            assert own is not None
            previous = {name: (own.tensors[name], own.tensors[f"latest_gradients.{name}"]) for name in keys}
        head = net.parts.head.take(initial if own is None else own.tensors)
        received = {**head, **net.parts.body.take(initial)}
        expected = train_by_hand(received, shard, round, own, previous, known)
        update = run_client(method, trainer, shard, task_index, own, round)
        close(update.model_weights, expected)
        assert set(update.message.tensors) == set(net.parts.body)
        assert update.message.numbers["penalized"] == task_index
        own = update.client_state
        assert own is not None
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in update.model_weights.items()}
        _, injected = forward(leaves, shard.images.images[shard.index])
        gradients = torch.autograd.grad(entropy(injected, shard.labels, known), [leaves[name] for name in keys])
        for name, gradient in zip(keys, gradients, strict=True):
            torch.testing.assert_close(own.tensors[f"latest_gradients.{name}"], gradient, rtol=1e-3, atol=1e-6)


def test_the_samples_of_highest_confidence_are_stored(
    net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net, class_to_task=TASKS)
    shard = task_shard(make_shard, 1)
    update = run_client(make_lvt(net), trainer, shard, 0, None, 1)
    assert update.client_state is not None
    stored = read_memory(update.client_state.tensors)[0]
    logits, _ = forward(update.model_weights, shard.images.images[shard.index])
    confidence = logits[:, TASKS == 1].softmax(dim=1)[torch.arange(len(shard)), shard.labels - 2]
    for label in sorted(set(shard.labels.tolist())):
        of_class = torch.nonzero(shard.labels == label).flatten()
        best = of_class[confidence[of_class].argmax()]
        position = torch.nonzero(stored.labels == label).flatten()[0]
        assert torch.equal(stored.images[position], shard.images.images[shard.index[best]])
        assert stored.logits is not None
        torch.testing.assert_close(stored.logits[position], logits[best], rtol=1e-4, atol=1e-5)


def test_local_keys_stay_on_the_client(net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net)
    method = make_lvt(net, keys="local")
    first = run_client(method, trainer, task_shard(make_shard, 1), 0, None, 1)
    keys = {name for name in net.parts.body if name.endswith(("key", "key_bias"))}
    assert len(keys) == 4
    assert set(first.message.tensors) == set(net.parts.body) - keys
    assert set(method.initial_broadcast(net.initial_weights()).tensors) == {*net.parts.head, *keys}
    still = replace(trainer, config=trainer.config.model_copy(update={"lr": 0.0}))
    second = run_client(method, still, task_shard(make_shard, 1), 0, first.client_state, 2)
    for name in net.parts.body:
        assert torch.equal(second.model_weights[name], first.model_weights[name]) == (name in keys), name


def test_a_client_without_samples_keeps_its_gradients(
    net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer, method = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net), make_lvt(net)
    first = run_client(method, trainer, task_shard(make_shard, 1), 0, None, 1).client_state
    assert first is not None
    second = run_client(method, trainer, task_shard(make_shard, 7), 1, first, 2).client_state
    assert second is not None
    gradients = [name for name in first.tensors if name.startswith("latest_gradients.")]
    assert len(gradients) == 4
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in gradients)


@pytest.mark.parametrize("graphs", [False, True])
def test_clients_are_trained_together(
    graphs: bool, captured: list[CudaGraphRunner], net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """In double precision: |K − K'| and the choice of stored samples turn rounding errors into larger ones."""
    trainer = replace(make_trainer(epochs=2, **PLAIN_SGD), net=net, class_to_task=TASKS)
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))
    method, initial = make_lvt(net), {name: tensor.double() for name, tensor in net.initial_weights().items()}
    message, base = Message(method.initial_state(initial).tensors), method.initial_broadcast(initial).tensors
    states: dict[int, State | None] = {0: None, 1: None}
    for round in (1, 2):
        shards = {client: task_shard(make_shard, (client + round) % 2) for client in states}

        def pending(client: int, round: int = round, shards: dict[int, Shard] = shards) -> PendingUpdate[ClientUpdate]:
            job = ClientRoundInput(round, client, message, base, states[client], shards[client], round - 1)
            return PendingUpdate(method.client_update(job), shards[client], RngContext(0, round, client))

        alone = [run_updates([pending(client)], trainer)[0] for client in states]
        others = replace(trainer, machine=replace(trainer.machine, graphs=graphs))
        together = run_updates([pending(client) for client in states], others)
        for client, (mine, theirs) in enumerate(zip(alone, together, strict=True)):
            assert theirs.client_state is not None
            assert mine.client_state is not None
            for name, tensor in mine.client_state.tensors.items():
                torch.testing.assert_close(theirs.client_state.tensors[name], tensor, rtol=1e-6, atol=1e-12)
            states[client] = theirs.client_state
        assert others.execution_summary().largest_stack == 2
    assert bool(captured) == graphs
