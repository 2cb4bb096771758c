"""Compiled training: one compilation for any number of clients, with the results of the uncompiled one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import MachineConfig
from vitfleet.data.batches import Batch
from vitfleet.data.features import Features, FeatureSet
from vitfleet.data.preprocess import CompiledPreprocess, Preprocess
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.models.parts import Selection
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.execution.settings import set_up_execution
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import StepView
from vitfleet.training.trainer import Trainer


def server_step(view: StepView, batch: Samples) -> Tensors:
    return view.grad(cross_entropy, batch, split=1)


def local_and_head(net: Net) -> Selection:
    return net.parts.union(net.parts.embed, net.parts.blocks[0], net.parts.head)


def train_clients(
    trainer: Trainer, net: Net, trainable: Selection, make_shard: MakeShard, sizes: list[int]
) -> list[Any]:
    weights = net.initial_weights()
    group = [
        ClientTraining(
            LocalTraining(
                # What clients share must be one object.
                {name: tensor + 0.01 * client if name in trainable else tensor for name, tensor in weights.items()},
                trainable,
                1,
            ),
            make_shard(0, size),
            RngContext(0, 1, client),
        )
        for client, size in enumerate(sizes)
    ]
    return trainer.train_together(group)


@pytest.mark.parametrize("whole", [True, False], ids=["all layers train", "some are frozen and shared"])
def test_a_block_is_compiled_once_for_any_number_of_clients(
    whole: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, compilations: list[int]
) -> None:
    trainer = make_trainer(batch_size=8, optimizer="sgd")
    compiled = replace(trainer, machine=replace(trainer.machine, compile=True))
    trainable = tiny_net.parts.whole if whole else local_and_head(tiny_net)
    for sizes in ([16, 16], [24, 16, 8], [16] * 5, [40, 32, 16, 16, 8, 8, 8]):
        expected = train_clients(trainer, tiny_net, trainable, make_shard, sizes)
        results = train_clients(compiled, tiny_net, trainable, make_shard, sizes)
        for left, right in zip(results, expected, strict=True):
            for name, tensor in right.weights.items():
                torch.testing.assert_close(left.weights[name], tensor, rtol=1e-4, atol=1e-5)
    # The preprocessing; one for blocks that train and one for those that do not; the last client of a group, alone, is
    # another of each.
    assert len(compilations) <= 1 + (2 if whole else 4)


def test_captured_steps_of_a_compiled_model_have_two_clients(
    tiny_net: Net,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    compilations: list[int],
    captured: list[CudaGraphRunner],
) -> None:
    """A client that has steps of its own is accompanied by one that skips them: no compilation for one client."""
    trainer = make_trainer(batch_size=4, optimizer="sgd")
    graphed = replace(trainer, machine=replace(trainer.machine, compile=True, graphs=True))
    sizes, whole = [40, 20, 8], tiny_net.parts.whole
    expected = train_clients(trainer, tiny_net, whole, make_shard, sizes)
    for left, right in zip(train_clients(graphed, tiny_net, whole, make_shard, sizes), expected, strict=True):
        assert left.steps == right.steps
        for name, tensor in right.weights.items():
            torch.testing.assert_close(left.weights[name], tensor, rtol=1e-4, atol=1e-5)
    assert {kind.num_clients for kind in captured[0].graphs} == {3, 2}
    assert len(compilations) <= 1 + 1


def test_server_and_clients_compile_once_each(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, compilations: list[int]
) -> None:
    trainer = make_trainer(batch_size=8)
    compiled = replace(trainer, machine=replace(trainer.machine, compile=True))
    server = tiny_net.parts.union(*tiny_net.parts.blocks[1:], tiny_net.parts.norm, tiny_net.parts.head)
    tokens = tiny_net.num_patches + tiny_net.num_prefix_tokens
    for samples in (16, 24, 40):
        train_clients(compiled, tiny_net, local_and_head(tiny_net), make_shard, [16, 16])
        part = Features(torch.randn(samples, tokens, tiny_net.embed_dim), torch.zeros(samples, dtype=torch.int16))
        features = FeatureSet([part], on_device=True)
        training = LocalTraining(tiny_net.initial_weights(), server, 1, server_step, features=features)
        compiled.train(training, make_shard(0, 0), RngContext(0, 1, -2))
    assert len(compilations) <= 1 + 4


def test_scoring_is_compiled_once_for_similar_numbers_of_images(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, compilations: list[int]
) -> None:
    trainer = make_trainer(batch_size=1)  # batches of one shape, whatever the number of images
    compiled = replace(trainer, machine=replace(trainer.machine, compile=True))
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1, score_samples=True)
    counts = []
    for first, second in ((12, 9), (11, 10), (10, 8)):
        group = [ClientTraining(training, make_shard(0, size), RngContext(0, 1, size)) for size in (first, second)]
        scored = compiled.train_together(group)
        counts.append(len(compilations))
        for result, expected, size in zip(scored, trainer.train_together(group), (first, second), strict=True):
            assert result.sample_losses.shape == (size,)
            torch.testing.assert_close(result.sample_losses, expected.sample_losses, rtol=1e-4, atol=1e-5)
    assert counts[0] == counts[1] == counts[2] > 0


def test_compiling_allows_a_block_for_each_combination() -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        set_up_execution(MachineConfig(device="cpu"))
        assert torch._dynamo.config.recompile_limit == 8
        set_up_execution(MachineConfig(device="cpu", compile=True))
        assert torch._dynamo.config.recompile_limit > 8


def test_preprocessing_is_compiled_once_for_any_number_of_images(compilations: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = Preprocess(16, torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.1]))
    compiled = CompiledPreprocess(plain)
    for lead in ((2, 3), (4, 2), (5,), (7, 8)):
        pixels = torch.randint(0, 256, (*lead, 3, 8, 8), dtype=torch.uint8, generator=generator)
        index = torch.zeros(lead, dtype=torch.long)
        batch = Batch(
            index,
            index,
            torch.ones(lead),
            torch.ones(lead[:-1]),
            shift=torch.randint(-2, 3, (*lead, 2), generator=generator),
            flip=torch.rand(lead, generator=generator) < 0.5,
            brightness=0.5 + torch.rand(lead, generator=generator),
        )
        torch.testing.assert_close(compiled(pixels, batch), plain(pixels, batch))
    assert len(compilations) == 1
