"""Trainings on cached views: each way gives what the frozen layers, computed by hand, say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from clients_alone import assert_same_results, in_double, make_group, random_weights, train_alone, with_machine
from torch import Tensor
from torch.nn import functional as F

from conftest import CLASSES, SIDE, MakeShard, MakeTrainer
from vitfleet.config.schema import AugmentConfig, ModelConfig
from vitfleet.data.batches import draw_epoch, draw_views
from vitfleet.data.images import Shard
from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.models.adapters import add_lora, add_prompts
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import Step, StepView, cross_entropy_step
from vitfleet.training.trainer import Trainer
from vitfleet.training.views.cache import ViewStore
from vitfleet.training.views.frozen import find_frozen_part

AUGMENT = AugmentConfig(crop=0.25, flip=True, brightness=0.4)
VIEWS = 3


def step_at_the_split(view: StepView, batch: Samples) -> Tensors:
    """Take the gradient as EFTViT's clients do, whose features are the tokens at the split."""
    return view.grad(cross_entropy, batch, split=1)


def head_training(net: Net, weights: Tensors, step: Step = cross_entropy_step) -> LocalTraining:
    return LocalTraining(weights, net.parts.head, 5, step)


def with_views(trainer: Trainer, changing: Iterable[str], views: int = VIEWS) -> Trainer:
    """Return a trainer that keeps views, where these weights change from round to round."""
    parts = trainer.net.parts
    part = find_frozen_part(parts, set(parts.shapes) - set(changing))
    assert part is not None
    config = trainer.config.model_copy(update={"cached_views": views})
    return replace(trainer, config=config, frozen_part=part, view_store=ViewStore())


def after(net: Net, first: int) -> list[str]:
    """Return the names of the weights of the blocks from this one on, of the norm and of the head."""
    return list(net.parts.union(*net.parts.blocks[first:], net.parts.norm, net.parts.head))


# What is frozen


def test_the_frozen_part_ends_where_the_first_weight_changes(tiny_net: Net) -> None:
    parts = tiny_net.parts

    def split_without(*changing: str) -> tuple[int | None] | None:
        part = find_frozen_part(parts, set(parts.shapes) - set(changing))
        return None if part is None else (part.split,)

    assert split_without() == split_without(*parts.head) == (None,)
    assert split_without(*parts.norm) == (2,)
    assert split_without(*parts.blocks[1], *parts.head) == (1,)
    assert split_without(parts.blocks[1].names[3]) == (1,)
    assert split_without(*parts.blocks[0]) is None
    assert split_without("cls_token") is None
    assert split_without(*parts.whole) is None


def test_the_frozen_part_has_all_that_its_tokens_depend_on(tiny_net: Net) -> None:
    parts = tiny_net.parts
    part = find_frozen_part(parts, set(parts.shapes) - set(after(tiny_net, 1)))
    assert part is not None
    assert set(part.names) == {*parts.embed, *parts.blocks[0]}
    body = find_frozen_part(parts, parts.body)
    assert body is not None
    assert set(body.names) == set(parts.body)


@pytest.mark.parametrize("adapt", [lambda vit: add_lora(vit, 2, 4.0, ("q",)), lambda vit: add_prompts(vit, 3, False)])
def test_no_part_is_frozen_before_prompts_and_low_rank_factors(adapt: object) -> None:
    net = build_model(ModelConfig(dim=16, depth=2, heads=2, patch_size=4), CLASSES, 1, SIDE, 0, adapt)  # type: ignore[arg-type]
    parts = net.parts
    assert find_frozen_part(parts, set(parts.body) - set(parts.union(parts.prompts, parts.lora))) is None


# What a training on views computes


def logits_by_hand(net: Net, weights: Tensors, trainer: Trainer, shard: Shard, client: int, view: int) -> list[Tensor]:
    """Return the head's input of every image of a shard in one view: that of an epoch of round 0."""
    kept = net.num_kept_patches(trainer.config.mask_ratio)
    draws = draw_epoch(7, 0, client, view, len(shard), SIDE, AUGMENT, net.num_patches, kept)
    assert draws.shift is not None
    assert draws.flip is not None
    assert draws.brightness is not None
    inputs: list[Tensor] = [torch.empty(0)] * len(shard)
    for row, position in enumerate(draws.order):
        shift, flip, brightness = (
            torch.from_numpy(drawn[row : row + 1]) for drawn in (draws.shift, draws.flip, draws.brightness)
        )
        sample = Samples(torch.zeros(1), torch.ones(1), torch.zeros(1), shift=shift, flip=flip, brightness=brightness)
        pixels = trainer.preprocess(shard.images.images[shard.index[position]][None], sample)
        noise = None if draws.mask_noise is None else torch.from_numpy(draws.mask_noise[row])
        keep = None if noise is None else noise.argsort(stable=True)[:kept][None]
        inputs[position] = net.representation(weights, pixels, keep)[0]
    return inputs


@pytest.mark.parametrize("mask_ratio", [0.0, 0.5])
def test_a_head_on_views_trains_as_by_hand(
    mask_ratio: float, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """The oracle computes every view by itself, draws which one an epoch has, and follows the gradient of the head."""
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1, "schedule": "constant"}
    plain = in_double(make_trainer(AUGMENT, batch_size=8, mask_ratio=mask_ratio, **settings))
    trainer, shard, client, round = with_views(plain, tiny_net.parts.head), make_shard(3, 14), 4, 2
    weights = random_weights(tiny_net, 1)[0]
    result = trainer.train(head_training(tiny_net, weights), shard, RngContext(7, round, client))

    views = [logits_by_hand(tiny_net, weights, trainer, shard, client, view) for view in range(VIEWS)]
    head, bias = (weights[name].clone().requires_grad_() for name in tiny_net.linear_head)
    for epoch in range(5):
        chosen = draw_views(7, round, client, epoch, len(shard), VIEWS)
        order = draw_epoch(7, round, client, epoch, len(shard), SIDE, AugmentConfig(), 0, 0).order
        for start in range(0, len(order), 8):
            batch = order[start : start + 8]
            inputs = torch.stack([views[chosen[position]][position] for position in batch])
            loss = F.cross_entropy(F.linear(inputs, head, bias), shard.labels[torch.from_numpy(batch)])
            steps = torch.autograd.grad(loss, [head, bias])
            with torch.no_grad():
                head -= 0.1 * steps[0]
                bias -= 0.1 * steps[1]
    torch.testing.assert_close(result.weights[tiny_net.linear_head[0]], head.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(result.weights[tiny_net.linear_head[1]], bias.detach(), rtol=1e-6, atol=1e-7)


def test_every_image_has_each_view_once_in_as_many_epochs() -> None:
    drawn = torch.stack([torch.from_numpy(draw_views(0, 2, 5, epoch, 30, 4)) for epoch in range(8)])
    assert (drawn[:4].sort(dim=0).values == torch.arange(4)[:, None]).all()
    assert (drawn[4:].sort(dim=0).values == torch.arange(4)[:, None]).all()
    assert not torch.equal(drawn[:4], drawn[4:])
    assert len(torch.unique(drawn[0])) == 4  # not the same view of all images
    assert not torch.equal(drawn[0], torch.from_numpy(draw_views(0, 3, 5, 0, 30, 4)))


@pytest.mark.parametrize("step", [cross_entropy_step, step_at_the_split])
def test_one_view_of_unchanged_images_gives_the_same_bytes(
    step: Step, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """The last batch of eleven images is not full: the frozen layers see other batches than when views are computed."""
    plain, shard, rng = make_trainer(batch_size=4), make_shard(3, 14), RngContext(7, 2, 4)
    changing = list(tiny_net.parts.head) if step is cross_entropy_step else after(tiny_net, 1)
    for count in (1, 4):
        trainer = with_views(plain, changing, count)
        training = head_training(tiny_net, tiny_net.initial_weights(), step)
        expected, found = plain.train(training, shard, rng), trainer.train(training, shard, rng)
        for name, tensor in expected.weights.items():
            assert torch.equal(found.weights[name], tensor)
        assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("mask_ratio", [0.0, 0.5])
@pytest.mark.parametrize("step", [cross_entropy_step, step_at_the_split])
def test_views_do_not_depend_on_who_is_trained_together(
    step: Step,
    mask_ratio: float,
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    """Alone or stacked, eagerly or captured, with views that are kept or computed anew."""
    changing = list(tiny_net.parts.head) if step is cross_entropy_step else after(tiny_net, 1)
    trainer = with_views(in_double(make_trainer(AUGMENT, batch_size=8, mask_ratio=mask_ratio)), changing)
    weights = random_weights(tiny_net)
    own = [{**weights[0], **tiny_net.parts.head.take(head)} for head in weights]
    group = make_group([head_training(tiny_net, tensors, step) for tensors in own], make_shard)
    graphed = replace(with_machine(trainer, graphs=True), view_store=ViewStore())
    alone = train_alone(trainer, group)
    assert_same_results(trainer.train_together(group), alone)  # the views are kept
    assert_same_results(replace(trainer, view_store=ViewStore()).train_together(group), alone)
    assert_same_results(graphed.train_together(group), alone)
    later = make_group([head_training(tiny_net, tensors, step) for tensors in own[:2]], make_shard, round=4)
    known = len(captured)
    assert_same_results(graphed.train_together(later[:1]), train_alone(trainer, later[:1]))
    assert_same_results(graphed.train_together(group), alone)
    assert len(captured) > known  # of a single client


# What is kept


class CountingStore(ViewStore):
    """Counts what is computed."""

    def __init__(self, max_bytes: float = 1e9) -> None:
        super().__init__(max_bytes)
        self.computed = 0

    def save(self, version: str, shard: Shard, values: Tensor) -> None:
        self.computed += 1
        super().save(version, shard, values)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def trainer(tiny_net: Net, make_trainer: MakeTrainer, store: CountingStore) -> Trainer:
    return replace(with_views(make_trainer(AUGMENT), tiny_net.parts.head), view_store=store)


def train(trainer: Trainer, shard: Shard, weights: Tensors, round: int = 1, client: int = 0) -> LocalResult:
    return trainer.train(head_training(trainer.net, weights), shard, RngContext(0, round, client))


def test_views_are_computed_once_per_client_body_and_images(
    trainer: Trainer, store: CountingStore, tiny_net: Net, make_shard: MakeShard
) -> None:
    weights = tiny_net.initial_weights()
    first = train(trainer, make_shard(0, 9), weights)
    train(trainer, make_shard(0, 9), {**weights, **first.weights}, round=2)  # another head
    train(trainer, make_shard(0, 9), {name: tensor.clone() for name, tensor in weights.items()}, round=3)
    assert store.computed == 1
    train(trainer, make_shard(0, 9), weights, client=1)  # other augmentations
    train(trainer, make_shard(0, 8), weights)
    changed = {**weights, "norm.bias": weights["norm.bias"] + 1}
    train(trainer, make_shard(0, 9), changed)
    assert store.computed == 4
    replace(trainer, view_store=ViewStore())
    anew = train(replace(trainer, view_store=ViewStore()), make_shard(0, 9), changed, round=5)
    kept = train(trainer, make_shard(0, 9), changed, round=5)
    assert store.computed == 4
    assert all(torch.equal(anew.weights[name], kept.weights[name]) for name in kept.weights)


def test_views_beyond_the_limit_are_dropped_and_computed_again(
    trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    of_one = VIEWS * 9 * tiny_net.embed_dim * 4
    store = CountingStore(2 * of_one)
    trainer, weights = replace(trainer, view_store=store), tiny_net.initial_weights()
    first = train(trainer, make_shard(0, 9), weights, client=0)
    train(trainer, make_shard(0, 9), weights, client=1)
    train(trainer, make_shard(0, 9), weights, client=0)
    assert store.computed == 2
    train(trainer, make_shard(0, 9), weights, client=2)  # in the place of client 1's
    again = train(trainer, make_shard(0, 9), weights, client=0)
    assert store.computed == 3
    train(trainer, make_shard(0, 9), weights, client=1)
    assert store.computed == 4
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in first.weights)


def test_a_training_of_frozen_layers_sees_images(
    trainer: Trainer, store: CountingStore, tiny_net: Net, make_shard: MakeShard
) -> None:
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1)
    trainer.train_together([ClientTraining(training, make_shard(0, 9), RngContext(0, 1, 0))])
    assert not store.computed


# What a step may not do


def perturbs(view: StepView, batch: Samples) -> Tensors:
    return view.value_and_grad(cross_entropy, batch, perturbation=view.zero_perturbation(batch)).gradients


def changes_the_body(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch, at={**view.weights, "norm.bias": view.all_weights["norm.bias"]})


def looks_inside(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch, split=1)


def skips_layers(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch, depth=1)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (perturbs, "changes its input"),
        (changes_the_body, "passes it through a model with other weights in these layers"),
        (looks_inside, "asks for tokens of other layers"),
        (skips_layers, "leaves layers out"),
    ],
)
def test_a_step_that_needs_images_is_refused(
    step: Step, problem: str, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    training = head_training(tiny_net, tiny_net.initial_weights(), step)
    with pytest.raises(UserError) as refused:
        trainer.train(training, make_shard(0, 9), RngContext(0, 1, 0))
    assert str(refused.value) == (
        f"train.cached_views: must be 0, because the method's step {problem}: that needs the images themselves"
    )
