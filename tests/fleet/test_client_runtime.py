"""One client's round: RNG contexts, evaluation, divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from conftest import MakeContext, MakeFleet, MakeShard, MakeTrainer
from vitfleet.fleet.base import ClientTask, EvalReply, EvalResult, Request
from vitfleet.fleet.client_runtime import divergence
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientGenerator, ClientRoundInput, ClientUpdate
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.base import train_metrics
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.trainer import Trainer


class ThreeTrainings(FedAvg):
    """Trains three times in one round."""

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        weights = job.message.tensors
        for epochs in (2, 1, 3):
            result = yield LocalTraining(weights, self.trainable, epochs)
            weights = result.weights
        return ClientUpdate(
            message=Message(weights, {"samples": result.samples, "loss": float(result.loss)}), model_weights=weights
        )


def test_later_trainings_of_a_round_draw_from_later_epochs(
    tiny_net: Net,
    make_context: MakeContext,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
    make_fleet: MakeFleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rngs: list[RngContext] = []
    train_together = Trainer.train_together

    def record(self: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
        rngs.extend(member.rng for member in group)
        return train_together(self, group)

    monkeypatch.setattr(Trainer, "train_together", record)
    method = ThreeTrainings(FedAvgParams(), make_context())
    fleet = make_fleet(method, make_trainer(), lambda client: make_shard(0, 10), seed=5)
    message = Message(tiny_net.initial_weights())
    list(fleet.train([Request(4, 1, message), Request(4, 2, message)]))
    assert rngs == [RngContext(5, 4, client, first_epoch=first) for client in (1, 2) for first in (0, 2, 3)]


def test_reply_has_an_evaluation_of_the_trained_model_where_requested(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    evaluated: dict[int, Tensors] = {}

    def evaluate_tasks(weights: Tensors, tasks: Sequence[ClientTask]) -> list[EvalResult]:
        evaluated.update({task.client: weights for task in tasks})
        return [EvalResult(3, 4)] * len(tasks)

    fleet = make_fleet(FedAvg(FedAvgParams(), make_context()), make_trainer(), lambda client: make_shard(0, 4))
    fleet.runtime = replace(fleet.runtime, evaluate_tasks=evaluate_tasks)
    message = Message(tiny_net.initial_weights())
    with_evaluation, without = fleet.train([Request(1, 5, message, evaluate=True), Request(1, 6, message)])
    assert (with_evaluation.evaluation, without.evaluation) == (EvalResult(3, 4), None)
    assert list(evaluated) == [5]
    update = with_evaluation.message
    assert update is not None
    assert all(torch.equal(evaluated[5][name], update.tensors[name]) for name in tiny_net.parts.shapes)


def test_evaluate_returns_each_clients_tasks_in_order(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(FedAvg(FedAvgParams(), make_context()), make_trainer(), lambda client: make_shard(0, 4))

    def evaluate_tasks(weights: Tensors, tasks: Sequence[ClientTask]) -> list[EvalResult]:
        return [EvalResult(task.client, 10 + task.task_index) for task in tasks]

    runtime = replace(fleet.runtime, evaluate_tasks=evaluate_tasks)
    replies = runtime.evaluate(State(tiny_net.initial_weights()), {}, None, [3, 1], num_tasks=2)
    assert replies == [
        EvalReply(3, (EvalResult(3, 10), EvalResult(3, 11))),
        EvalReply(1, (EvalResult(1, 10), EvalResult(1, 11))),
    ]


FINITE, NOT_FINITE = torch.ones(3), torch.tensor([1.0, float("inf")])


@pytest.mark.parametrize(
    ("loss", "sent", "stored", "reason"),
    [
        (0.5, FINITE, FINITE, None),
        (float("nan"), FINITE, FINITE, "training diverged: non-finite loss (nan) at client 7, round 3, step 5"),
        (0.5, NOT_FINITE, FINITE, "training diverged: non-finite weights at client 7, after round 3"),
        (0.5, FINITE, NOT_FINITE, "training diverged: non-finite weights at client 7, after round 3"),
    ],
)
def test_divergence_checks_loss_message_and_state(
    loss: float, sent: torch.Tensor, stored: torch.Tensor, reason: str | None
) -> None:
    result = LocalResult({}, torch.tensor(loss), 6, 9, {}, torch.empty(0), finite_steps=torch.tensor(4.0))
    update = ClientUpdate(Message({"w": sent}, train_metrics(result)), {}, State({"w": stored}))
    assert divergence(update, client=7, round=3) == reason
