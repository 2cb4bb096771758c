"""FedViT's keys that leave the paper's text, each held against a client's rounds by hand with quadprog."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, Samples, close, farthest, integrated, memory_of, most_obtuse
from torch import Tensor

from conftest import MakeContext, MakeShard, MakeTrainer
from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.continual.gradients.fedvit import FedVit, FedVitParams
from vitfleet.models.net import Net
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1, 1])
EPOCHS = 3
TASK_OF_ROUND = (0, 1, 1, 2)
VARIANTS: dict[str, dict[str, object]] = {
    "defaults": {},
    "margin": {"margin": 0.5, "k": 10},
    "all": {"integrate": "all", "k": 10},
    "all, without head epochs": {"integrate": "all", "head_epochs": 0},
    "angle": {"task_ranking": "angle"},
    "no tuning in the first round": {"tune_first_round": False},
    "tuning integrated": {"tune_integrated": True, "k": 10},
    "shared heads": {"heads": "shared"},
    "everything": {
        "margin": 0.5,
        "integrate": "all",
        "task_ranking": "angle",
        "tune_first_round": False,
        "tune_integrated": True,
        "heads": "shared",
    },
}


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    return replace(make_trainer(epochs=EPOCHS, **PLAIN_SGD), class_to_task=TASKS)


def make_fedvit(make_context: MakeContext, **params: object) -> FedVit:
    context = make_context(num_tasks=3, epochs=EPOCHS, **PLAIN_SGD)
    return FedVit(FedVitParams.model_validate({"name": "fedvit", "k": 1, "stored_share": 0.3, **params}), context)


def shard_bounds(task_index: int) -> tuple[int, int]:
    return 12 * task_index, 12 * task_index + 12


@dataclass(frozen=True)
class PlayedRound:
    """A client's round: its state and model before it, and its update."""

    round: int
    task_index: int
    received: Tensors
    state: State | None
    update: ClientUpdate


def play(method: FedVit, trainer: Trainer, net: Net, make_shard: MakeShard) -> list[PlayedRound]:
    """Play rounds of one client: one in the first and the last task, two in the second."""
    random = torch.Generator().manual_seed(5)
    base, initial = method.initial_broadcast(net.initial_weights()).tensors, method.initial_state(net.initial_weights())
    state: State | None = None
    played: list[PlayedRound] = []
    for position, task_index in enumerate(TASK_OF_ROUND):
        round, shard, scale = position + 1, make_shard(*shard_bounds(task_index)), 0.1 if position else 0.0
        sent = {name: one + scale * torch.randn(one.shape, generator=random) for name, one in initial.tensors.items()}
        job = ClientRoundInput(round, 0, Message(sent), base, state, shard, task_index)
        update = run_update(method.client_update(job), trainer, shard, RngContext(0, round, 0))
        head = base if state is None else method.parts.head.take(state.tensors)
        played.append(PlayedRound(round, task_index, {**head, **sent}, state, update))
        state = update.client_state
    return played


@dataclass
class ByHand:
    """FedViT's round by hand; counts the integrated steps that a constraint changed, and those that changed heads."""

    method: FedVit
    hand: Hand
    changed: int = 0
    changed_heads: int = 0

    def chosen(self, gradient: Tensor, weights: Tensors, stored: list[Samples], names: list[str]) -> list[Tensor]:
        rows = [self.hand.gradient(weights, samples, names) for samples in stored]
        choose = most_obtuse if self.method.params.task_ranking == "angle" else farthest
        return choose(gradient, rows, self.method.params.k) if len(rows) > self.method.params.k else rows

    def tune(self, weights: Tensors, state: State, stored: list[Samples]) -> Tensors:
        body, params = list(self.method.parts.body), self.method.params
        before = {**weights, **self.method.parts.body.take(state.tensors)}

        def rotated(after: Tensor, weights: Tensors, batch: Samples) -> Tensor:
            rows = self.chosen(after, weights, stored, body) if params.tune_integrated else []
            g_b = self.hand.gradient(before, batch, body)
            applied = integrated(g_b, [*rows, after], [*[params.margin] * len(rows), 0.0])
            assert params.margin or all(float(row @ applied) > -1e-4 for row in [*rows, after])
            return applied

        return self.hand.train(weights, body, params.tune_epochs, rotated)

    def integrate(self, weights: Tensors, stored: list[Samples]) -> Tensors:
        parts, params = self.method.parts, self.method.params
        names = list(parts.whole if params.integrate == "all" else parts.body)
        is_head = torch.cat([torch.full((weights[name].numel(),), name in parts.head) for name in names])

        def restored(gradient: Tensor, weights: Tensors, batch: Samples) -> Tensor:
            if not stored:
                return gradient
            rows = self.chosen(gradient, weights, stored, names)
            applied = integrated(gradient, rows, params.margin)
            assert all(float(row @ applied) > -1e-4 for row in rows), "G g' ≥ 0"
            self.changed += int(not torch.equal(applied, gradient))
            self.changed_heads += int(not torch.equal(applied[is_head], gradient[is_head]))
            return applied

        return self.hand.train(weights, names, EPOCHS - params.head_epochs, restored)


@pytest.mark.usefixtures("checked_angles")
@pytest.mark.parametrize("variant", VARIANTS)
def test_four_rounds_as_by_hand(
    variant: str, make_context: MakeContext, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    method = make_fedvit(make_context, **VARIANTS[variant])
    params, changed, changed_heads = method.params, 0, 0
    for played in play(method, trainer, tiny_net, make_shard):
        by_hand = ByHand(
            method, Hand(tiny_net, TASKS, make_shard(*shard_bounds(played.task_index)), round=played.round)
        )
        weights: Tensors = dict(played.received)
        stored = memory_of(played.state, played.task_index) if played.task_index else []
        is_first = played.round in (1, 2, 4)
        if played.state is not None and (params.tune_first_round or not is_first):
            weights = by_hand.tune(weights, played.state, stored)
        weights = by_hand.hand.train(weights, list(method.parts.head), params.head_epochs)
        weights = by_hand.integrate(weights, stored)
        close(played.update.model_weights, weights)
        sent = method.parts.whole if params.heads == "shared" else method.parts.body
        assert set(played.update.message.tensors) == set(sent)
        assert ("tuning_integrated" in played.update.message.numbers) == (
            played.state is not None and (params.tune_first_round or not is_first)
        )
        assert played.update.message.numbers.get("rotated", 0) == by_hand.changed
        assert not played.update.message.numbers.get("unsolved")
        assert not played.update.message.numbers.get("tuning_unsolved")
        changed, changed_heads = changed + by_hand.changed, changed_heads + by_hand.changed_heads
    assert changed, "some steps were integrated"
    assert bool(changed_heads) == (params.integrate == "all")


def test_without_head_epochs_and_stored_tasks_all_trains_body_and_head_together(
    make_context: MakeContext, trainer: Trainer, tiny_net: Net, make_shard: MakeShard
) -> None:
    """FedPer's round: what `integrate = "all"` does in the first task."""
    first, *_ = play(make_fedvit(make_context, integrate="all", head_epochs=0), trainer, tiny_net, make_shard)
    hand = Hand(tiny_net, TASKS, make_shard(0, 12), round=1)
    close(first.update.model_weights, hand.train(first.received, list(tiny_net.parts.whole), EPOCHS))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("method.margin=-0.1", "method.margin"),
        ("method.integrate=head", "method.integrate"),
        ("method.task_ranking=cosine", "method.task_ranking"),
        ("method.heads=global", "method.heads"),
    ],
)
def test_other_values_are_rejected(key: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_config("fedvit-digits", [key])
