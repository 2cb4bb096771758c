"""Stacked clients are trained as each would be alone: the same draws, the same steps, the same weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from clients_alone import assert_close, check_stacked, make_group, random_weights, stored_to_draw
from torch import Tensor

from conftest import CLASSES, DIGITS_BODY, MakeConfig, MakeShard, MakeTrainer, long_but
from emulated_graphs import set_up_with_graphs
from vitfleet.config import registry
from vitfleet.config.schema import AugmentConfig, ModelConfig
from vitfleet.data.batches import draw_epoch
from vitfleet.data.images import ImageSet
from vitfleet.message import State, Tensors
from vitfleet.methods.continual.replay.experience_replay import REPLAY, DarkExperienceStep
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run import setup
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView, cross_entropy_step

ALL_AUGMENTATIONS = AugmentConfig(crop=0.25, flip=True, brightness=0.4)


@pytest.mark.parametrize("train", [{}, {"optimizer": "sgd"}, {"max_grad_norm": 0.1}, {"mask_ratio": 0.5}], ids=str)
def test_stacked_clients_train_the_whole_model_as_each_alone(
    train: dict[str, object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=8, **train)
    whole = tiny_net.parts.whole
    trainings = [LocalTraining(weights, whole, 2, score_samples=True) for weights in random_weights(tiny_net)]
    check_stacked(trainer, trainings, make_shard)


@pytest.mark.parametrize("part", ["head", "bias", "one layer", "lora", "prompts"])
def test_stacked_clients_share_frozen_weights(part: str, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    def adapt(vit: torch.nn.Module) -> None:
        if part == "lora":
            add_lora(vit, 2, 4.0, ("q", "v", "fc1"))
        if part == "prompts":
            add_prompts(vit, 3, deep=True)

    net = build_model(ModelConfig(dim=16, depth=2, heads=2, patch_size=4), CLASSES, 1, 8, 0, adapt)
    parts = net.parts
    selection = {
        "head": parts.head,
        "bias": parts.union(parts.biases, parts.head),
        "one layer": parts.union(parts.blocks[1], parts.head),
        "lora": parts.union(parts.lora, parts.head),
        "prompts": parts.union(parts.prompts, parts.head),
    }[part]
    weights = random_weights(net)
    # All clients have the same frozen weights.
    trainings = [LocalTraining({**weights[0], **selection.take(trained)}, selection, 2) for trained in weights]
    check_stacked(replace(make_trainer(batch_size=8), net=net), trainings, make_shard)


def one_block_step(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch, depth=1)


def test_stacked_clients_train_a_model_of_fewer_blocks(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    parts = tiny_net.parts
    trainable = parts.union(parts.blocks[0], parts.head)
    trainings = [LocalTraining(weights, trainable, 1, one_block_step) for weights in random_weights(tiny_net)]
    check_stacked(make_trainer(batch_size=8), trainings, make_shard)


def infinite_loss(outputs: Outputs) -> Tensor:
    """Return a cross-entropy that is infinite in every step that has a certain sample."""
    poisoned = ((outputs.positions == outputs.constants["poisoned"]) & (outputs.sample_weight > 0)).any()
    return torch.where(poisoned, torch.inf, cross_entropy(outputs))


def step_of_infinite_loss(view: StepView, batch: Samples) -> Tensors:
    return view.grad(infinite_loss, batch)


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_before_the_first_non_finite_loss_are_counted(
    graphs: bool, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(batch_size=4, lr=1e-6)
    trainer = replace(trainer, machine=replace(trainer.machine, graphs=graphs))
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 2, step_of_infinite_loss)
    poisoned = [5, 99, 20, 99]
    trainings = [replace(training, constants={"poisoned": torch.tensor(position)}) for position in poisoned]
    group = make_group(trainings, make_shard)
    for results in (trainer.train_together(group), [trainer.train_together([member])[0] for member in group]):
        for member, result, position in zip(group, results, poisoned, strict=True):
            order = draw_epoch(7, 3, member.rng.client, 0, len(member), 8, AugmentConfig(), 4, 4).order
            first = order.tolist().index(position) // 4 if position in order else result.steps
            assert (int(result.finite_steps), result.steps) == (first, 2 * -(-len(member) // 4))
            assert bool(result.loss.isfinite()) == (position == 99)


def anchored_loss(outputs: Outputs) -> Tensor:
    """Return the cross-entropy, plus the squared distance to the constants."""
    distances = [(weight - outputs.constants[name]).square().sum() for name, weight in outputs.weights.items()]
    return cross_entropy(outputs) + 0.1 * torch.stack(distances).sum()


def anchored_step(view: StepView, batch: Samples) -> Tensors:
    return view.grad(anchored_loss, batch)


@pytest.mark.parametrize("shared", [True, False])
def test_constants_are_shared_by_stacked_clients_or_their_own(
    shared: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    weights = random_weights(tiny_net)
    anchors = [weights[0]] * len(weights) if shared else weights[::-1]
    trainings = [
        LocalTraining(start, tiny_net.parts.whole, 2, anchored_step, constants=anchor)
        for start, anchor in zip(weights, anchors, strict=True)
    ]
    check_stacked(make_trainer(batch_size=8), trainings, make_shard)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mask_ratio", [0.0, 0.5])
def test_stacked_clients_draw_stored_samples_of_their_own(
    known: bool,
    mask_ratio: float,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=8, mask_ratio=mask_ratio, optimizer="sgd")
    trainer = replace(trainer, class_to_task=torch.tensor([0, 0, 1, 1, 1]) if known else None)
    trainings = [
        LocalTraining(
            start,
            tiny_net.parts.whole,
            2,
            DarkExperienceStep(0.5, 0.5, 2),
            sets={REPLAY: stored_to_draw(tiny_images, client)},
        )
        for client, start in enumerate(random_weights(tiny_net))
    ]
    without = [replace(training, step=cross_entropy_step, sets={}) for training in trainings]
    results = check_stacked(trainer, trainings, make_shard)
    others = check_stacked(trainer, without, make_shard)
    for result, other in zip(results, others, strict=True):
        assert float(result.loss) > float(other.loss), "the replayed samples are part of the loss"


METHODS = {
    "fedavg": (),
    "closed-form": (*DIGITS_BODY, "method.dtype=fp64"),
    "fedprox": ("method.mu=0.5",),
    "apfl": (),
    "standalone": (),
    "transfl": ("method.k=1",),
    "fed-full": (),
    "fed-head": (),
    "fed-bias": (),
    "fed-prompt": ("method.prompts=2",),
    "fed-prompt, shallow": ("method.prompts=2", "method.deep=false"),
    "fed-lora": ("method.rank=2",),
    "fedbfpt": ("method.local_layers=2", "model.depth=3"),
    "eftvit": ("method.local_layers=1", "train.mask_ratio=0.5", "method.feature_dtype=fp32"),
    "fedper": (),
    "fedrep": (),
    "gem": ("method.margin=0.5",),
    "a-gem": (),
    "ewc": ("method.penalty_weight=10",),
    "mas": ("method.penalty_weight=0.1",),
    "fedweit": (),
    "fedvit": ("method.k=1", "method.head_epochs=1"),
    "fedvit, reused": ("method.recompute_references=2", "method.head_epochs=1"),
    "fedvit, composed": ("method.body_mask_ratio=0.5", "method.send_layers=1", "method.head_epochs=1"),
    "fedknow": ("method.k=1", "method.recompute_references=2"),
    "er": (),
    "der++": (),
    "dytox": (),
    "bcn": (),
    "lvt": (),
    "analytic": (*DIGITS_BODY, "method.dtype=fp64"),
    "joint": (),
}
TASKS = ("data.tasks={count=3, classes=2, per_client=[1, 2], rounds_per_task=1, share=[0.4, 0.6]}", "rounds=3")


def test_every_method_is_among_them() -> None:
    built_in = {entry.name for entry in registry.METHODS if entry.origin.built_in}
    assert {method.split(",")[0] for method in METHODS} == built_in


#: Their steps, and what they keep, are those of others.
LIKE_OTHERS = (
    "fed-full",
    "fed-head",
    "fed-bias",
    "fed-prompt, shallow",
    "standalone",
    "fedper",
    "a-gem",
    "mas",
    "joint",
)


@pytest.mark.parametrize("method", long_but(METHODS, *(method for method in METHODS if method not in LIKE_OTHERS)))
def test_every_method_has_the_same_result_stacked_and_captured(
    method: str, captured: list[object], tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds; where there are tasks, the steps of the last one use what was kept of the earlier ones."""
    name = method.split(",")[0]
    tasks = TASKS if registry.METHODS[name].target.needs_tasks else ()
    common = ("fleet.per_round=6", "train.epochs=2", "train.optimizer=sgd", "train.lr=0.01", "train.batch_size=8")
    outcomes = []
    for stack_size, graphs in ((1, False), (4, False), (4, True)):
        monkeypatch.setattr(setup, "set_up_execution", partial(set_up_with_graphs, graphs))
        config = tiny_config(
            f"method.name={name}", *METHODS[method], *tasks, f"machine.stack_size={stack_size}", *common
        )
        context = open_run(config, tmp_path / f"{stack_size}-{graphs}")
        state = load_state(context)
        for round in range(1, 4):
            state, record = run_round(context, state, round)
            assert not [entry.failure for entry in record.clients if entry.failure]
        outcomes.append(state_tensors(context, state.server))
    assert captured
    assert_close(outcomes[1], outcomes[0])
    assert_close(outcomes[2], outcomes[0])


def state_tensors(context: RunContext, server: State) -> dict[str, Tensor]:
    """Return the tensors of the server, of its parts and of all clients."""
    states = {f"client-{client}": context.fleet.client_state(client) for client in range(6)} | dict(server.parts)
    return {**server.tensors} | {
        f"{key}.{name}": tensor for key, state in states.items() if state for name, tensor in state.tensors.items()
    }
