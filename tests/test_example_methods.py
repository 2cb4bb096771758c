"""The example methods: one file each, outside the package, trained in every way in which built-in methods are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from loopback import LocalClients, defended, export_images
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import vitfleet
from conftest import CLASSES, Command, InterruptAfter, MakeShard, MakeTrainer
from digests import digest
from emulated_graphs import set_up_with_graphs
from vitfleet.config import load_config
from vitfleet.config.load import from_tree
from vitfleet.config.plugins import load_plugins
from vitfleet.config.registry import METHODS
from vitfleet.data.images import Shard
from vitfleet.errors import ConfigError
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.message import Message, State, Tensors, with_prefix
from vitfleet.methods import ClientRoundInput, ClientUpdate, Method, MethodContext, make_method
from vitfleet.models.net import Net
from vitfleet.run import setup
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.driver import run_update
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.passes import ClientModels
from vitfleet.training.samples import Outputs, Samples
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import StepView
from vitfleet.training.trainer import Trainer

FOLDER = Path(__file__).parents[1] / "examples" / "methods"
#: Each example with keys that make it differ from FedAvg, and with those of which it is FedAvg.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "moon": {"method.mu": 5.0},
    "fedsam": {"method.rho": 0.1},
    "dp-sgd": {"method.clip": 0.5, "method.noise": 0.5},
    "scaffold": {},
}
AS_FEDAVG: Mapping[str, Mapping[str, Any]] = {
    "moon": {"method.mu": 0.0},
    "fedsam": {"method.rho": 0.0},
    "dp-sgd": {"method.clip": None, "method.noise": 0.0},
    "scaffold": {"rounds": 1},  # its control variates are zero at first
}
#: Clients of unequal size, whose last batches are smaller than others, so that stacked and captured steps have padding.
TINY: Mapping[str, Any] = {
    "rounds": 2,
    "data.limit": 200,
    "data.augment.flip": True,
    "data.augment.crop": 0.1,
    "model.dim": 16,
    "model.depth": 2,
    "model.heads": 2,
    "model.patch_size": 4,
    "train.epochs": 2,
    "train.mask_ratio": 0.25,
    "fleet.clients": 4,
    "fleet.per_round": 3,
    "fleet.devices": {},
    "machine.device": "cpu",
    "machine.precision": "fp32",
    "machine.workers": 1,
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "alone": {},
    "stacked": {"machine.stack_size": 3},
    "captured": {},
    "captured, stacked": {"machine.stack_size": 3},
}
#: AdamW divides by the size of a gradient, and so would the rounding errors in which these ways differ.
SGD = {"train.optimizer": "sgd", "train.lr": 0.05}
PLACE = RngContext(0, 1, 0)


def file_of(name: str) -> Path:
    return FOLDER / f"{name.replace('-', '_')}.py"


def plugins_of(name: str) -> list[Path]:
    return [file_of(name)] if name in EXAMPLES else []


def train(name: str, out: Path, keys: Mapping[str, Any], *more: Mapping[str, Any], **options: Any) -> vitfleet.Run:
    overrides = {key: value for changes in (TINY, keys, *more) for key, value in changes.items()}
    return vitfleet.train("digits", method=name, plugins=plugins_of(name), overrides=overrides, out=out, **options)


def weights_of(run: vitfleet.Run) -> dict[str, Tensor]:
    assert run.summary["total"]["failures"] == 0
    return load_file(run.path / "model.safetensors")


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assert_close(left: Tensors, right: Tensors, atol: float = 1e-5) -> None:
    torch.testing.assert_close(dict(left), dict(right), rtol=1e-4, atol=atol)


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


# In every way of execution


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_plugin_of_a_configuration_file(name: str, vitfleet: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        f'rounds = 1\nplugins = ["{file_of(name)}"]\n[data]\nname = "digits"\nlimit = 100\n[method]\nname = "{name}"\n'
        "[model]\ndim = 16\ndepth = 2\npatch_size = 4\n[fleet]\nclients = 2\nper_round = 2\n"
    )
    done = vitfleet(tmp_path, "run", "mine.toml", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert f'"{name}"' in (tmp_path / "run" / "config.json").read_text()


@pytest.fixture(scope="module")
def fedavg_weights() -> dict[str, Tensors]:
    """Return where the weights of FedAvg are kept, by its keys and the way of execution: several tests need them."""
    return {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", AS_FEDAVG)
def test_the_special_case_is_fedavg_bit_for_bit(
    name: str,
    way: str,
    fedavg_weights: dict[str, Tensors],
    tmp_path: Path,
    captured: list[CudaGraphRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    execute(way, monkeypatch)
    mine = train(name, tmp_path / "mine", AS_FEDAVG[name], WAYS[way])
    assert bool(captured) == ("captured" in way)
    keys = of_other_methods(AS_FEDAVG[name])
    case = f"{way} {keys}"
    if case not in fedavg_weights:
        fedavg_weights[case] = weights_of(train("fedavg", tmp_path / "fedavg", keys, WAYS[way]))
    assert equal(weights_of(mine), fedavg_weights[case])


def execute(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture the steps of later runs, if the way says so."""
    monkeypatch.setattr(setup, "gpu_memory_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(setup, "set_up_execution", partial(set_up_with_graphs, "captured" in way))


def of_other_methods(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if not key.startswith("method.")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_stacked_and_captured_steps_train_what_single_ones_do(
    name: str, tmp_path: Path, captured: list[CudaGraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {}
    for way, keys in WAYS.items():
        execute(way, monkeypatch)
        run = train(name, tmp_path / way, EXAMPLES[name], keys, SGD)
        execution = run.summary["execution"]
        assert execution["clients"] == ("cuda graph" if "captured" in way else "eager")
        assert execution["largest_stack"] == (3 if "stacked" in way else 1)
        weights[way] = weights_of(run)
        assert_close(weights[way], weights["alone"])
    fedavg = train("fedavg", tmp_path / "fedavg", SGD)
    assert not equal(weights_of(fedavg), weights["alone"]), "its keys have an effect"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_interrupted_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    keys = {**EXAMPLES[name], "rounds": 3, "fleet.per_round": 2}
    whole = train(name, tmp_path / "whole", keys)
    with pytest.raises(KeyboardInterrupt):
        train(name, tmp_path / "interrupted", keys, callbacks=[InterruptAfter(2)])
    resumed = vitfleet.load_run(tmp_path / "interrupted").resume()
    assert digest(resumed.path) == digest(whole.path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_flowers_clients_train_the_same_bits(name: str, tmp_path: Path) -> None:
    overrides = {**TINY, "method.name": name, **EXAMPLES[name], "eval.clients": 0}
    config = load_config("digits", overrides, plugins=plugins_of(name))
    export_images(config, tmp_path / "data")
    simulation = run_rounds(open_run(defended(config), tmp_path / "simulation")).state.server
    remote = config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})
    clients = LocalClients(remote, tmp_path / "data", tmp_path / "state")
    flower = run_rounds(open_run(remote, tmp_path / "flower", make_fleet=fleet_factory(clients.grid()))).state.server
    assert equal(flower.tensors, simulation.tensors)
    simulation_records, flower_records = (
        (tmp_path / way / "records.jsonl").read_bytes() for way in ("simulation", "flower")
    )
    assert simulation_records == flower_records
    assert b'"failure":null' in simulation_records
    assert b'"failure":"' not in simulation_records


def test_costs_count_the_passes_of_a_step() -> None:
    def costs(name: str) -> tuple[float, float]:
        """Return the operations per image of all passes, and of the forward passes."""
        (report,) = vitfleet.cost("digits", method=name, methods=[name], plugins=plugins_of(name), overrides=TINY)
        return report.train_gflops, 2 * report.forward_gmac

    both, forward = costs("fedavg")
    assert costs("fedsam") == pytest.approx((2 * both, 2 * forward)), "two passes forward and backward"
    assert costs("moon") == pytest.approx((both + 2 * forward, 3 * forward)), "three passes forward, one backward"
    assert costs("dp-sgd") == pytest.approx((both, forward))
    assert costs("scaffold") == pytest.approx((both, forward))


# By hand, on a model of two layers


def method_of(name: str, net: Net, table: Mapping[str, object] | None = None, **tables: Any) -> Method[Any]:
    """Return a method as a run makes it."""
    load_plugins([file_of(name)])
    config = from_tree({"method": {"name": name, **(table or {})}, **tables})
    return make_method(config.method, MethodContext(config, net, CLASSES, torch.device("cpu")))


def module_of(name: str) -> ModuleType:
    load_plugins([file_of(name)])
    return sys.modules[METHODS[name].target.__module__]


def one_update(
    method: Method[Any],
    trainer: Trainer,
    shard: Shard,
    server: State,
    own: State | None = None,
    place: RngContext = PLACE,
) -> ClientUpdate:
    """Run one client's round."""
    message = method.message_to_client(server, place.round, place.client, None)
    job = ClientRoundInput(place.round, place.client, message, {}, own, shard)
    return run_update(method.client_update(job), trainer, shard, place)


def gradient_by_hand(
    net: Net,
    trainer: Trainer,
    weights: Tensors,
    shard: Shard,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, Tensor]:
    """Return the gradient of the loss of all images of a client, as one batch."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    images = trainer.preprocess(shard.images.images[shard.index])
    value = loss(net(leaves, images), shard.images.labels[shard.index])
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def descend(weights: Tensors, gradient: Tensors, rate: float) -> dict[str, Tensor]:
    return {name: weight - rate * gradient[name] for name, weight in weights.items()}


def weighted_mean(values: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    share = torch.tensor(weights) / sum(weights)
    return {name: torch.tensordot(share, torch.stack([value[name] for value in values]), 1) for name in values[0]}


def norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


@pytest.fixture
def sgd(make_trainer: MakeTrainer) -> Trainer:
    """Return a trainer whose steps are one rate times the gradient of one batch of all images."""
    return make_trainer(batch_size=64, optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant")


def test_moon_contrasts_representations() -> None:
    z, z_glob, z_prev = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]), torch.ones(3, 2), torch.zeros(3, 2)
    z_prev[:, 0] = torch.tensor([3.0, 5.0, 1.0])
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [4.0, 4.0]]), torch.tensor([0, 0, 1])
    weight = torch.tensor([0.5, 0.5, 0.0])  # the last sample is padding
    outputs = Outputs(logits, labels, weight, labels, {}, {}, torch.tensor(0), representation=z)
    step = module_of("moon").ContrastiveStep(mu=3.0, temperature=0.5)
    near = math.exp(math.sqrt(0.5) / 0.5)  # both images' similarity with z_glob is the cosine of 45°
    contrastive = [-math.log(near / (near + math.exp(similarity / 0.5))) for similarity in (1.0, 0.0)]
    supervised = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(1))]
    expected = sum(supervised) / 2 + 3.0 * sum(contrastive) / 2
    assert float(step.loss(outputs, z_glob, z_prev)) == pytest.approx(expected)


def test_moon_step_by_hand(tiny_net: Net, sgd: Trainer, make_shard: MakeShard) -> None:
    """The representations of the received and of the previous model are those of the client's own images."""
    shard, rate, mu, temperature = make_shard(0, 12), sgd.config.lr, 4.0, 0.5
    received = tiny_net.initial_weights()
    random = torch.Generator().manual_seed(1)
    previous = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=random) for name, tensor in received.items()}
    images, labels = sgd.preprocess(shard.images.images[shard.index]), shard.images.labels[shard.index]

    def look(weights: Tensors) -> tuple[Tensor, Tensor]:
        return tiny_net.outputs_and_representation(weights, images, None, None)

    def step(weights: Tensors) -> tuple[dict[str, Tensor], float]:
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        logits, z = look(leaves)
        near, far = (
            torch.exp(F.cosine_similarity(z, look(other)[1].detach(), dim=1) / temperature)
            for other in (received, previous)
        )
        loss = F.cross_entropy(logits, labels) - mu * (near / (near + far)).log().mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return descend(weights, dict(zip(leaves, gradients, strict=True)), rate), float(loss.detach())

    method = method_of("moon", tiny_net, {"mu": mu, "temperature": temperature}, train={"epochs": 2})
    update = one_update(method, sgd, shard, State(received), State(previous))
    after_one, first = step(received)
    after_two, second = step(after_one)
    assert_close(update.message.tensors, after_two)
    assert update.message.numbers["loss"] == pytest.approx((first + second) / 2)
    assert update.client_state is not None
    assert equal(update.client_state.tensors, update.message.tensors), "the trained model is the next previous one"


def test_moon_begins_with_the_received_model_as_the_previous_one(
    tiny_net: Net, sgd: Trainer, make_shard: MakeShard
) -> None:
    method = method_of("moon", tiny_net, {"mu": 4.0})
    shard, received = make_shard(0, 12), tiny_net.initial_weights()
    update = one_update(method, sgd, shard, State(received))
    assert_close(
        update.message.tensors, descend(received, gradient_by_hand(tiny_net, sgd, received, shard), sgd.config.lr)
    )


def test_fedsam_follows_the_gradient_at_the_worst_weights(tiny_net: Net, sgd: Trainer, make_shard: MakeShard) -> None:
    rho, shard = 0.5, make_shard(0, 12)
    weights = tiny_net.initial_weights()
    update = one_update(method_of("fedsam", tiny_net, {"rho": rho}, train={"epochs": 3}), sgd, shard, State(weights))
    for _ in range(3):
        gradient = gradient_by_hand(tiny_net, sgd, weights, shard)
        worst = {name: weight + rho / norm(gradient) * gradient[name] for name, weight in weights.items()}
        weights = descend(weights, gradient_by_hand(tiny_net, sgd, worst, shard), sgd.config.lr)
    assert_close(update.message.tensors, weights)


def test_dp_sgd_clips_the_gradient_of_every_image(tiny_net: Net, sgd: Trainer, make_shard: MakeShard) -> None:
    weights, shard = tiny_net.initial_weights(), make_shard(0, 9)
    each = [gradient_by_hand(tiny_net, sgd, weights, make_shard(image, image + 1)) for image in range(9)]
    clip = sorted(map(norm, each))[4]  # half of them are longer
    clipped = [min(1, clip / norm(gradient)) for gradient in each]
    assert 0 < sum(share < 1 for share in clipped) < 9
    scaled = [{name: share * tensor for name, tensor in g.items()} for share, g in zip(clipped, each, strict=True)]
    mean = weighted_mean(scaled, [1.0] * 9)
    update = one_update(method_of("dp-sgd", tiny_net, {"clip": clip, "noise": 0.0}), sgd, shard, State(weights))
    assert_close(update.message.tensors, descend(weights, mean, sgd.config.lr))
    images, labels = sgd.preprocess(shard.images.images[shard.index]), shard.images.labels[shard.index]
    assert update.message.numbers["loss"] == pytest.approx(float(F.cross_entropy(tiny_net(weights, images), labels)))


@pytest.mark.parametrize("images", [4, 20])
def test_dp_sgd_noise_has_the_deviation_of_the_definition(
    images: int, tiny_net: Net, sgd: Trainer, make_shard: MakeShard
) -> None:
    weights, shard = tiny_net.initial_weights(), make_shard(0, images)
    noisy, exact = (
        one_update(method_of("dp-sgd", tiny_net, {"clip": 0.5, "noise": noise}), sgd, shard, State(weights))
        for noise in (3.0, 0.0)
    )
    noise = torch.cat(
        [
            ((tensor - exact.message.tensors[name]) / sgd.config.lr).flatten()
            for name, tensor in noisy.message.tensors.items()
        ]
    )
    expected = 3.0 * 0.5 / images
    assert float(noise.std()) == pytest.approx(expected, rel=0.03)
    assert abs(float(noise.mean())) < 0.05 * expected


def test_dp_sgd_noise_is_the_clients_own(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    """It is the same alone and stacked, and differs between clients, rounds and steps."""
    trainer = make_trainer(batch_size=8, optimizer="sgd", lr=1e-3, momentum=0.0, weight_decay=0.0)
    method, weights = method_of("dp-sgd", tiny_net, {"clip": 1e-6, "noise": 1e6}), tiny_net.initial_weights()
    shards = [make_shard(0, 20), make_shard(20, 33), make_shard(33, 38)]

    def training(shard: Shard, place: RngContext) -> ClientTraining:
        job = ClientRoundInput(place.round, place.client, Message(weights), {}, None, shard)
        return ClientTraining(next(method.client_update(job)), shard, place)

    group = [training(shard, RngContext(0, 1, client)) for client, shard in enumerate(shards)]
    together = [result.weights for result in trainer.train_together(group)]
    alone = [trainer.train(member.training, member.shard, member.rng).weights for member in group]
    for mine, other in zip(together, alone, strict=True):
        assert_close(mine, other, atol=1e-8)
    for place in (RngContext(0, 1, 1), RngContext(0, 2, 0), RngContext(1, 1, 0)):
        other = trainer.train(training(shards[0], place).training, shards[0], place).weights
        assert cosine(changes(other, weights), changes(alone[0], weights)) < 0.1
    # Of one client's three steps, the noise of each is drawn anew: their sum is as long as √3 of them, not as 3.
    lengths = (
        norm(changes(alone[0], weights)),
        norm(changes(alone[2], weights)) * 5 * math.sqrt(1 / 64 + 1 / 64 + 1 / 16),
    )
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)


def changes(after: Tensors, before: Tensors) -> dict[str, Tensor]:
    return {name: tensor - before[name] for name, tensor in after.items()}


def cosine(left: Tensors, right: Tensors) -> float:
    return sum(float((left[name] * right[name]).sum()) for name in left) / (norm(left) * norm(right))


def scaffold_round(
    method: Method[Any], trainer: Trainer, server: State, own: dict[int, State], shards: Mapping[int, Shard], round: int
) -> tuple[State, dict[int, ClientUpdate]]:
    """Run a round of these clients; their states are updated."""
    updates, aggregator = {}, method.aggregator(server, round)
    for client, shard in shards.items():
        place = RngContext(0, round, client)
        updates[client] = one_update(method, trainer, shard, server, own.get(client), place)
        aggregator.add(client, updates[client].message)
    for client, update in updates.items():
        assert update.client_state is not None
        own[client] = update.client_state
    return aggregator.finish(), updates


def test_scaffold_by_hand_over_two_rounds(tiny_net: Net, sgd: Trainer, make_shard: MakeShard) -> None:
    """Every client takes part; a step is a batch of all its images, so that the gradients are known."""
    rate, steps = sgd.config.lr, 3
    method = method_of("scaffold", tiny_net, train={"epochs": steps}, fleet={"clients": 2, "per_round": 2})
    shards = {0: make_shard(0, 10), 1: make_shard(10, 40)}
    sizes = [10, 30]
    x = tiny_net.initial_weights()
    server, own = method.initial_state(x), dict[int, State]()
    zero = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    c, c_own = zero, {client: zero for client in shards}
    for round in (1, 2):
        server, updates = scaffold_round(method, sgd, server, own, shards, round)
        trained = {}
        for client, shard in shards.items():
            y = x
            for _ in range(steps):
                gradient = gradient_by_hand(tiny_net, sgd, y, shard)
                y = descend(y, {name: g - c_own[client][name] + c[name] for name, g in gradient.items()}, rate)
            trained[client] = y
            assert_close(method.trainable.take(updates[client].message.tensors), y)
            # Option II, as the paper has it.
            c_own[client] = {name: c_own[client][name] - c[name] + (x[name] - y[name]) / (steps * rate) for name in x}
            assert_close(own[client].tensors, c_own[client])
        x = weighted_mean(list(trained.values()), sizes)
        c = weighted_mean(list(c_own.values()), sizes)
        assert_close(method.model_weights(server, {}, None), x)
        assert_close(with_prefix(server.tensors, "c/"), c)
    assert norm(c) > 0.1, "the variates were not zero in the second round"


def test_the_servers_variate_is_the_mean_of_all_clients_where_some_take_part(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    trainer = make_trainer(batch_size=4)
    method = method_of("scaffold", tiny_net, fleet={"clients": 4, "per_round": 2})
    shards = {client: make_shard(10 * client, 10 * client + 10) for client in range(4)}
    server, own = method.initial_state(tiny_net.initial_weights()), dict[int, State]()
    for round, clients in enumerate([(0, 1), (1, 2), (3, 1)], start=1):
        server, _ = scaffold_round(method, trainer, server, own, {client: shards[client] for client in clients}, round)
        taken = [state.tensors for state in own.values()]
        absent = [{name: torch.zeros_like(tensor) for name, tensor in taken[0].items()}] * (4 - len(own))
        assert_close(with_prefix(server.tensors, "c/"), weighted_mean([*taken, *absent], [1.0] * 4))


def test_a_client_without_images_keeps_its_variate_and_changes_nothing(
    tiny_net: Net, sgd: Trainer, make_shard: MakeShard
) -> None:
    method = method_of("scaffold", tiny_net)
    server, own = method.initial_state(tiny_net.initial_weights()), State(tiny_net.initial_weights())
    update = one_update(method, sgd, make_shard(0, 0), server, own)
    assert not update.message.tensors
    assert update.client_state is not None
    assert equal(update.client_state.tensors, own.tensors)
    aggregator = method.aggregator(server, 1)
    aggregator.add(0, update.message)
    assert equal(aggregator.finish().tensors, server.tensors)


# Wrong configurations


def test_dp_sgd_noise_needs_a_clipping_norm() -> None:
    with pytest.raises(ConfigError, match=r"method\.noise = 0\.5: must be 0 without method\.clip"):
        load_config(
            "digits", {"method.name": "dp-sgd", "method.clip": None, "method.noise": 0.5}, plugins=plugins_of("dp-sgd")
        )


def test_moon_needs_a_plain_vit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.name = 'cvt': moon needs a plain ViT"):
        vitfleet.train(
            "digits", method="moon", plugins=plugins_of("moon"), overrides={"model.name": "cvt"}, out=tmp_path
        )


# What the examples found


def test_gradients_of_single_images_of_a_model_that_cannot_be_stacked(
    tiny_net: Net, sgd: Trainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, server = make_shard(0, 9), State(tiny_net.initial_weights())
    method = method_of("dp-sgd", tiny_net, {"clip": 0.1, "noise": 0.5})
    at_once = one_update(method, sgd, shard, server)
    counts = []
    monkeypatch.setattr(Net, "stackable", False)
    monkeypatch.setattr(ClientModels, "_repeat", lambda *_: counts.append(1))
    one_by_one = one_update(method, sgd, shard, server)
    assert not counts
    assert_close(one_by_one.message.tensors, at_once.message.tensors)
    assert one_by_one.message.numbers["loss"] == pytest.approx(at_once.message.numbers["loss"])


def test_a_step_maps_what_all_clients_share(tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard) -> None:
    """Constants, frozen weights, the epoch and the tasks of classes have no axis of clients."""
    trainer = replace(make_trainer(batch_size=64), class_to_task=torch.tensor([0, 0, 1, 1, 1]))
    shared = torch.tensor([3.0])
    trainings = [
        LocalTraining(
            tiny_net.initial_weights(),
            tiny_net.parts.head,
            2,
            count_step,
            constants={"shared": shared},
            kept={"of task 1": torch.zeros(()), "epochs": torch.zeros(()), "shared": torch.zeros(1)},
        )
        for _ in range(2)
    ]
    shards = [make_shard(0, 12), make_shard(12, 36)]
    group = [
        ClientTraining(training, shard, RngContext(0, 1, client))
        for client, (training, shard) in enumerate(zip(trainings, shards, strict=True))
    ]
    for result, shard in zip(trainer.train_together(group), shards, strict=True):
        of_task_1 = int((shard.labels >= 2).sum())
        assert {name: float(tensor) for name, tensor in result.kept.items()} == {
            "of task 1": 2 * of_task_1,
            "epochs": 0 + 1,
            "shared": 2 * 3.0,
        }


def count_step(view: StepView, batch: Samples) -> Tensors:
    view.count(view.map(counts, batch, view.class_to_task, view.epoch, view.constants["shared"]))
    return {}


def counts(batch: Samples, class_to_task: Tensor, epoch: Tensor, shared: Tensor) -> Tensors:
    of_task_1 = (class_to_task[batch.labels] == 1) & (batch.sample_weight > 0)
    return {"of task 1": of_task_1.sum(), "epochs": epoch, "shared": shared}
