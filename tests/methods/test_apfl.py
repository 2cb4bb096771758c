"""APFL: w is FedAvg's bit for bit, v follows the gradient of the mixed model, α its derivative."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from by_hand import PLAIN_SGD, Hand, close

from conftest import NO_IMAGES, InterruptAfter, MakeConfig, MakeContext, MakeShard, MakeTrainer
from vitfleet.data.images import Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.errors import UserError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientRoundInput, ClientUpdate
from vitfleet.methods.personal.apfl import Apfl, ApflParams, mix
from vitfleet.models.net import Net
from vitfleet.run.context import load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer

ONE_TASK = torch.zeros(5, dtype=torch.long)
ONE_STEP: dict[str, object] = {**PLAIN_SGD, "batch_size": 64}


def client_round(
    method: Apfl, trainer: Trainer, shard: Shard, received: Tensors, state: State | None = None
) -> ClientUpdate:
    """Run a client's round on the weights it receives."""
    job = ClientRoundInput(2, 0, Message(received), {}, state, shard)
    return run_update(method.client_update(job), trainer, shard, RngContext(0, 2, 0))


def moved(weights: Tensors, seed: int = 0, scale: float = 0.1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: weight + scale * torch.randn(weight.shape, generator=random) for name, weight in weights.items()}


def alpha_of(update: ClientUpdate) -> float:
    assert update.client_state is not None
    alpha = update.client_state.numbers["alpha"]
    assert isinstance(alpha, float)
    assert update.message.numbers["alpha"] == alpha
    return alpha


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_first_steps_of_v_and_w_as_by_autograd(
    alpha: float, tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """v is a leaf of f(αv + (1 − α)w), and autograd differentiates by it."""
    w, shard = tiny_net.initial_weights(), make_shard(0, 12)
    v = moved(w)
    update = client_round(
        Apfl(ApflParams(), make_context(epochs=1, **ONE_STEP)),
        make_trainer(epochs=1, **ONE_STEP),
        shard,
        w,
        State(v, {"alpha": alpha}),
    )
    hand = Hand(tiny_net, ONE_TASK, shard, round=2)
    batch = shard.images.images[shard.index], shard.labels
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in v.items()}
    mixed = {name: alpha * leaves[name] + (1 - alpha) * w[name] for name in w}
    gradients = torch.autograd.grad(hand.losses(mixed, batch).mean(), list(leaves.values()))
    expected_v = {name: v[name] - 0.1 * gradient for name, gradient in zip(v, gradients, strict=True)}
    assert update.client_state is not None
    close(update.client_state.tensors, expected_v)
    gradient = hand.gradient(w, batch, list(w))
    parts = torch.split(gradient, [tensor.numel() for tensor in w.values()])
    expected_w = {name: w[name] - 0.1 * part.reshape(w[name].shape) for name, part in zip(w, parts, strict=True)}
    close(update.message.tensors, expected_w)
    assert set(update.client_state.tensors) == set(update.message.tensors) == set(tiny_net.parts.whole)
    new_alpha = alpha_of(update)
    close(update.model_weights, {n: new_alpha * expected_v[n] + (1 - new_alpha) * expected_w[n] for n in w})


def test_a_round_of_many_steps_as_by_hand(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """The gradient of v's step is at v̄ with the w before the same step."""
    w, shard = tiny_net.initial_weights(), make_shard(0, 10)
    v = moved(w)
    start = State(v, {"alpha": 0.3})
    method = Apfl(ApflParams(alpha_lr=0.01), make_context(epochs=3, **PLAIN_SGD))
    update = client_round(method, make_trainer(epochs=3, **PLAIN_SGD), shard, w, start)
    hand, names, derivatives = Hand(tiny_net, ONE_TASK, shard, round=2), list(w), []

    def flat(weights: Tensors) -> torch.Tensor:
        return torch.cat([weights[name].flatten() for name in names])

    def shaped(vector: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = torch.split(vector, [w[name].numel() for name in names])
        return {name: part.reshape(w[name].shape) for name, part in zip(names, parts, strict=True)}

    now_w, now_v = flat(w), flat(v)
    for batch in hand.batches(3):
        of_mixed = hand.gradient(shaped(0.3 * now_v + 0.7 * now_w), batch, names)
        derivatives.append(float(torch.dot(now_v - now_w, of_mixed)))
        now_w, now_v = now_w - 0.1 * hand.gradient(shaped(now_w), batch, names), now_v - 0.1 * 0.3 * of_mixed
    close(update.message.tensors, shaped(now_w))
    assert update.client_state is not None
    close(update.client_state.tensors, shaped(now_v))
    assert len(derivatives) == 9
    assert alpha_of(update) == pytest.approx(0.3 - 0.01 * sum(derivatives) / 9, abs=1e-5)


def test_the_step_of_alpha_is_the_derivative_by_finite_differences(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    w = {name: tensor.double() for name, tensor in tiny_net.initial_weights().items()}
    v = {name: tensor.double() for name, tensor in moved(w).items()}
    shard = make_shard(0, 12)
    trainer = make_trainer(epochs=1, **ONE_STEP)
    mean, std = trainer.preprocess.mean.double(), trainer.preprocess.std.double()
    trainer = replace(trainer, preprocess=Preprocess(trainer.preprocess.image_size, mean, std))
    method = Apfl(ApflParams(alpha_lr=0.01), make_context(epochs=1, **ONE_STEP))
    update = client_round(method, trainer, shard, w, State(v, {"alpha": 0.4}))

    def loss(alpha: float) -> float:
        pixels = (shard.images.images[shard.index].double() / 255 - 0.5) / 0.5
        logits = torch.func.functional_call(tiny_net.module.vit, mix(w, v, alpha), pixels)
        return float(torch.nn.functional.cross_entropy(logits, shard.labels))

    derivative = (loss(0.4 + 1e-5) - loss(0.4 - 1e-5)) / 2e-5
    assert abs(derivative) > 1e-3
    assert (0.4 - alpha_of(update)) / 0.01 == pytest.approx(derivative, rel=1e-4)


@pytest.mark.parametrize("rate", [1e6, 0.0])
def test_alpha_stays_between_zero_and_one(
    rate: float, tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    context, trainer = make_context(epochs=1, **ONE_STEP), make_trainer(epochs=1, **ONE_STEP)
    w = tiny_net.initial_weights()
    alphas = {
        alpha_of(
            client_round(
                Apfl(ApflParams(alpha_lr=rate), context), trainer, make_shard(0, 12), w, State(v, {"alpha": 0.5})
            )
        )
        for v in (moved(w), {name: 2 * w[name] - tensor for name, tensor in moved(w).items()})
    }
    assert alphas <= {0.0, 1.0} if rate else alphas == {0.5}


def test_alpha_is_kept_if_it_is_not_learned(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    method = Apfl(ApflParams(alpha=0.25, learn_alpha=False), make_context(epochs=2, **PLAIN_SGD))
    update = client_round(method, make_trainer(epochs=2, **PLAIN_SGD), make_shard(0, 12), tiny_net.initial_weights())
    assert alpha_of(update) == 0.25


def test_a_client_without_images_keeps_its_state_and_sends_no_weights(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer
) -> None:
    w = tiny_net.initial_weights()
    v = moved(w)
    update = client_round(Apfl(ApflParams(), make_context()), make_trainer(), NO_IMAGES, w, State(v, {"alpha": 0.7}))
    assert not update.message.tensors
    assert alpha_of(update) == 0.7
    assert update.client_state is not None
    assert all(torch.equal(update.client_state.tensors[name], v[name]) for name in v)


def test_the_model_of_a_client_mixes_its_v_with_the_servers_w(tiny_net: Net, make_context: MakeContext) -> None:
    method = Apfl(ApflParams(), make_context())
    w = tiny_net.initial_weights()
    v = moved(w)
    assert all(torch.equal(method.model_weights(State(w), {}, None)[name], w[name]) for name in w)
    mixed = method.model_weights(State(w), {}, State(v, {"alpha": 0.25}))
    close(mixed, {name: 0.25 * v[name] + 0.75 * w[name] for name in w})


@pytest.mark.parametrize("keys", [(), ("train.optimizer=sgd", "train.max_grad_norm=0.5", "train.lr=0.05")], ids=str)
def test_in_a_run_w_is_fedavgs_bit_for_bit(keys: tuple[str, ...], tiny_config: MakeConfig, tmp_path: Path) -> None:
    states = []
    for name in ("fedavg", "apfl"):
        context = open_run(tiny_config(f"method.name={name}", "train.epochs=2", *keys), tmp_path / name)
        states.append(run_rounds(context).state.server.tensors)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    fedavg, apfl = ([record.accuracy for record in read_records(tmp_path / name)] for name in ("fedavg", "apfl"))
    assert [a.global_ for a in fedavg if a] == [a.global_ for a in apfl if a], "the global model is w"
    alphas = [entry.numbers["alpha"] for record in read_records(tmp_path / "apfl") for entry in record.clients]
    assert len(set(map(str, alphas))) > 1
    assert "alpha" in run_rounds(context).summary["client_metrics"]


def test_an_interrupted_run_resumes_bit_for_bit(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("method.name=apfl", "rounds=4")
    run_rounds(open_run(config, tmp_path / "undisturbed"))
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_run(config, tmp_path / "interrupted"), callbacks=[InterruptAfter(3)])
    resumed = open_run(config, tmp_path / "interrupted")
    run_rounds(resumed, load_state(resumed))
    records = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("undisturbed", "interrupted")]
    assert records[0] == records[1]


def test_alpha_outside_zero_and_one_is_rejected(tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"method\.alpha = 1\.5"):
        tiny_config("method.name=apfl", "method.alpha=1.5")
