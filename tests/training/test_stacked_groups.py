"""Which clients are trained together, and what happens where their memory does not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fits_alone import SHARDS, assert_close, make_buffer, make_group

from conftest import MakeShard, MakeTrainer
from vitfleet.config.schema import TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.models.net import Net
from vitfleet.training.driver import group_fits
from vitfleet.training.local_training import ReplayBuffer
from vitfleet.training.stack_inputs import ClientFit, RngContext
from vitfleet.training.step import Fit, FitResult, Objective
from vitfleet.training.trainer import Trainer


def test_group_fits(tiny_net: Net, make_trainer: MakeTrainer, tiny_images: ImageSet) -> None:
    def client(size: int, epochs: int = 1, depth: int | None = None, replay: ReplayBuffer | None = None) -> ClientFit:
        objective = Objective(tiny_net.anatomy.head, depth=depth)
        shard = Shard(tiny_images, torch.arange(size))
        fit = Fit(tiny_net.initial_weights(), objective, epochs, replay=replay)
        return ClientFit(fit, shard, RngContext(0, 1, 0))

    def grouped(*fits: ClientFit, batch: int = 8) -> list[list[int]]:
        grouped_fits = group_fits(list(enumerate(fits)), make_trainer(batch_size=batch))
        return sorted(sorted(index for index, _ in group) for group in grouped_fits)

    assert grouped(client(40), client(30), client(20)) == [[0, 1, 2]]
    unequal = client(40), client(10), client(30), client(9)
    assert grouped(*unequal, batch=1) == [[0, 1, 2, 3]]  # smaller clients are left out of the last steps
    assert grouped(client(40), client(10), client(30), batch=64) == [[0, 1, 2]]  # one step each
    assert grouped(client(40), client(40, epochs=2), client(40, depth=1)) == [[0], [1], [2]]
    masked = client(40)
    masked = replace(masked, fit=replace(masked.fit, train=TrainConfig(mask_ratio=0.5)))
    assert grouped(client(40), masked) == [[0], [1]]  # other settings
    assert grouped(client(0), client(8), client(0)) == [[0], [1], [2]]  # clients without samples are not stacked
    stored, more = make_buffer(tiny_images, 0), make_buffer(tiny_images, 1)
    assert grouped(client(8), client(8, replay=stored), client(8, replay=more)) == [[0], [1, 2]]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")], ids=str)
def test_fit_cohort_halves_a_group_that_is_out_of_memory(
    error: RuntimeError,
    tiny_net: Net,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(batch_size=8, optimizer="sgd")
    whole_fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.whole), 1)
    group = make_group([whole_fit] * len(SHARDS), make_shard)
    fit, sizes = Trainer._fit, []

    def fit_at_most_two(self: Trainer, group: Sequence[ClientFit]) -> list[FitResult]:
        sizes.append(len(group))
        if len(group) > 2:
            raise error
        return fit(self, group)

    monkeypatch.setattr(Trainer, "_fit", fit_at_most_two)
    results = trainer.fit_cohort(group)
    assert sizes == [4, 2, 2]
    for client_fit, result in zip(group, results, strict=True):
        alone = trainer.fit(client_fit.fit, client_fit.shard, client_fit.rng)
        assert_close(result.weights, alone.weights)
    monkeypatch.setattr(trainer.memory_budget, "max_clients", lambda wanted, device: min(wanted, 1))
    sizes.clear()
    trainer.fit_cohort(group)
    assert sizes == [1, 1, 1, 1]  # at most as many as the budget allows


def test_fit_raises_if_a_single_client_is_out_of_memory(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: Trainer, group: Sequence[ClientFit]) -> list[FitResult]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Trainer, "_fit", out_of_memory)
    fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.whole), 1)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer().fit(fit, make_shard(0, 8), RngContext(0, 1, 0))
