"""Stacked clients are trained as each would be alone: the same draws, the same steps, the same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from fits_alone import assert_close, check_against_single_fits, make_buffer, make_group, random_weights
from torch import Tensor

from conftest import CLASSES, MakeConfig, MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig, ModelConfig
from vitfleet.data.epoch_draws import draw_epoch
from vitfleet.data.images import ImageSet
from vitfleet.methods.continual.replay import DarkExperienceLoss
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.step import Fit, Objective, Step, cross_entropy

ALL_AUGMENTATIONS = AugmentConfig(crop=0.25, flip=True, brightness=0.4)


@pytest.mark.parametrize("train", [{}, {"optimizer": "sgd"}, {"clip": 0.1}, {"mask_ratio": 0.5}], ids=str)
def test_cohort_trains_the_whole_model_as_single_clients_do(
    train: dict[str, object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=8, **train)
    objective = Objective(tiny_net.anatomy.whole)
    check_against_single_fits(
        trainer, [Fit(weights, objective, 2, score_samples=True) for weights in random_weights(tiny_net)], make_shard
    )


@pytest.mark.parametrize("part", ["head", "bias", "one layer", "lora", "prompts"])
def test_cohort_shares_frozen_weights(part: str, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    def adapt(vit: torch.nn.Module) -> None:
        if part == "lora":
            add_lora(vit, 2, 4.0, ("q", "v", "fc1"))
        if part == "prompts":
            add_prompts(vit, 3, deep=True)

    net = build_model(ModelConfig(dim=16, depth=2, heads=2, patch_size=4), CLASSES, 1, 8, 0, adapt)
    anatomy = net.anatomy
    selection = {
        "head": anatomy.head,
        "bias": anatomy.union(anatomy.biases, anatomy.head),
        "one layer": anatomy.union(anatomy.blocks[1], anatomy.head),
        "lora": anatomy.union(anatomy.lora, anatomy.head),
        "prompts": anatomy.union(anatomy.prompts, anatomy.head),
    }[part]
    weights = random_weights(net)
    # All clients have the same frozen weights.
    fits = [Fit({**weights[0], **selection.take(trained)}, Objective(selection), 2) for trained in weights]
    check_against_single_fits(replace(make_trainer(batch_size=8), net=net), fits, make_shard)


def test_cohort_trains_a_model_of_fewer_blocks(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    anatomy = tiny_net.anatomy
    objective = Objective(anatomy.union(anatomy.blocks[0], anatomy.head), depth=1)
    check_against_single_fits(
        make_trainer(batch_size=8), [Fit(weights, objective, 1) for weights in random_weights(tiny_net)], make_shard
    )


@dataclass(frozen=True)
class InfiniteLoss:
    """Cross-entropy that is infinite in every step that has a certain sample."""

    def __call__(self, step: Step) -> Tensor:
        poisoned = ((step.positions == step.constants["poisoned"]) & (step.sample_weight > 0)).any()
        return torch.where(poisoned, torch.inf, cross_entropy(step))


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_before_the_first_non_finite_loss_are_counted(
    graphs: bool, captured: list[object], tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(batch_size=4, lr=1e-6)
    trainer = replace(trainer, machine=replace(trainer.machine, graphs=graphs))
    objective = Objective(tiny_net.anatomy.whole, InfiniteLoss())
    poisoned = [5, 99, 20, 99]
    fits = [
        Fit(tiny_net.initial_weights(), objective, 2, {"poisoned": torch.tensor(position)}) for position in poisoned
    ]
    group = make_group(fits, make_shard)
    for results in (trainer.fit_cohort(group), [trainer.fit_cohort([client_fit])[0] for client_fit in group]):
        for client_fit, result, position in zip(group, results, poisoned, strict=True):
            order = draw_epoch(7, 3, client_fit.rng.client, 0, len(client_fit), 8, AugmentConfig(), 4, 4).order
            first = order.tolist().index(position) // 4 if position in order else result.steps
            assert (int(result.finite_steps), result.steps) == (first, 2 * -(-len(client_fit) // 4))
            assert bool(result.loss.isfinite()) == (position == 99)


@dataclass(frozen=True)
class AnchoredLoss:
    """Cross-entropy, and the squared distance to the constants."""

    def __call__(self, step: Step) -> Tensor:
        distances = [(weight - step.constants[name]).square().sum() for name, weight in step.weights.items()]
        return cross_entropy(step) + 0.1 * torch.stack(distances).sum()


@pytest.mark.parametrize("shared", [True, False])
def test_cohort_with_shared_or_separate_constants(
    shared: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    weights = random_weights(tiny_net)
    anchors = [weights[0]] * len(weights) if shared else weights[::-1]
    objective = Objective(tiny_net.anatomy.whole, AnchoredLoss())
    fits = [Fit(start, objective, 2, anchor) for start, anchor in zip(weights, anchors, strict=True)]
    check_against_single_fits(make_trainer(batch_size=8), fits, make_shard)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mask_ratio", [0.0, 0.5])
def test_cohort_replays_the_stored_samples_of_each_client(
    known: bool,
    mask_ratio: float,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    trainer = make_trainer(ALL_AUGMENTATIONS, batch_size=8, mask_ratio=mask_ratio, optimizer="sgd")
    trainer = replace(trainer, class_tasks=torch.tensor([0, 0, 1, 1, 1]) if known else None)
    objective = Objective(tiny_net.anatomy.whole, DarkExperienceLoss(0.5, 0.5, 2))
    fits = [
        Fit(start, objective, 2, replay=make_buffer(tiny_images, client))
        for client, start in enumerate(random_weights(tiny_net))
    ]
    without = [replace(fit, replay=None) for fit in fits]
    results = check_against_single_fits(trainer, fits, make_shard)
    others = check_against_single_fits(trainer, without, make_shard)
    for result, other in zip(results, others, strict=True):
        assert float(result.loss) > float(other.loss), "the replayed samples are part of the loss"


METHODS = {
    "fedavg": (),
    "fedprox": ("method.mu=0.5",),
    "apfl": (),
    "standalone": (),
    "transfl": ("method.k=1",),
    "fed-head": (),
    "fed-bias": (),
    "fed-prompt": ("method.prompts=2",),
    "fed-prompt, shallow": ("method.prompts=2", "method.deep=false"),
    "fed-lora": ("method.rank=2",),
    "fedbfpt": ("method.local_layers=2", "model.depth=3"),
    "eftvit": ("method.local_layers=1", "train.mask_ratio=0.5", "method.feature_dtype=fp32"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_result_stacked(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    outcomes = []
    for cohort in (1, 4):
        config = tiny_config(
            f"method.name={method.split(',')[0]}",
            *METHODS[method],
            f"machine.cohort={cohort}",
            "fleet.per_round=6",
            "train.epochs=2",
            "train.optimizer=sgd",
            "train.lr=0.05",
        )
        context = open_run(config, tmp_path / str(cohort))
        state, record = run_round(context, load_state(context), 1)
        assert not [entry.failure for entry in record.clients if entry.failure]
        client_tensors = {
            f"{client}.{name}": tensor
            for client in range(6)
            if (client_state := context.fleet.client_state(client))
            for name, tensor in client_state.tensors.items()
        }
        part_tensors = {
            f"{key}.{name}": tensor for key, part in state.server.parts.items() for name, tensor in part.tensors.items()
        }
        outcomes.append({**state.server.tensors, **client_tensors, **part_tensors})
    assert_close(outcomes[1], outcomes[0])
