"""FedViT with TransFL's layers (``send_layers``) and with EFTViT's masks (``body_mask_ratio``)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import CLASSES, InterruptAfter, MakeContext, MakeShard, MakeTrainer
from vitfleet.config import load_config
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.memory import round_memory
from vitfleet.data.images import ImageSet, Shard
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors, with_prefix
from vitfleet.methods import ClientRoundInput, MethodContext, make_method
from vitfleet.methods.continual.gradients.fedvit import FedVit, FedVitParams
from vitfleet.methods.continual.gradients.restorer import BEFORE
from vitfleet.methods.continual.stored_samples import MEMORY, StoredSamples, memory_tensors
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.capture.runner import CudaGraphRunner
from vitfleet.training.driver import run_update
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext, stack_inputs
from vitfleet.training.step import StepView, kind_of_step

CPU = torch.device("cpu")
TINY = (
    "data.limit=800",
    "data.tasks.count=3",
    "data.tasks.rounds_per_task=2",
    "model.dim=16",
    "model.depth=2",
    "model.heads=2",
    "model.patch_size=2",
    "train.epochs=2",
    "fleet.clients=4",
    "fleet.per_round=3",
    "machine.device=cpu",
)
BOTH = ("method.send_layers=1", "method.body_mask_ratio=0.75")
FASTER = ("method.recompute_references=2", "method.reference_dtype=bf16")


def open_tiny(folder: Path, *overrides: str) -> RunContext:
    return open_run(load_config("fedvit-digits", [*TINY, *overrides]), folder)


def finish(folder: Path, *overrides: str) -> tuple[RunContext, State]:
    """Run all rounds; return the server's last state."""
    context = open_tiny(folder, *overrides)
    return context, run_rounds(context).state.server


def client_tensors(context: RunContext) -> dict[str, Tensor]:
    return {
        f"{client}.{name}": tensor
        for client in range(context.config.fleet.clients)
        if (state := context.fleet.client_state(client))
        for name, tensor in state.tensors.items()
    }


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert not [name for name in actual if not torch.equal(actual[name], expected[name])]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunContext, State]:
    """Return a finished run of FedViT without layers and masks, and the server's last state."""
    return finish(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("key", ["send_layers=2", "body_mask_ratio=0.0"])
def test_all_layers_or_no_mask_is_plain_fedvit(key: str, plain_run: tuple[RunContext, State], tmp_path: Path) -> None:
    plain, plain_server = plain_run
    composed, server = finish(tmp_path / "composed", f"method.{key}")
    assert_equal(dict(server.tensors), dict(plain_server.tensors))
    assert_equal(client_tensors(composed), client_tensors(plain))
    matrices = [[record.task.matrix for record in read_records(run.folder) if record.task] for run in (plain, composed)]
    assert matrices[0] == matrices[1]


# Layers


def test_a_client_sends_its_layers_and_all_that_is_no_layer_and_the_server_changes_no_other(tmp_path: Path) -> None:
    context = open_tiny(tmp_path, "method.send_layers=1")
    parts, state = context.net.parts, load_state(context)
    others = parts.union(parts.embed, parts.norm)
    for round in range(1, 5):
        before = state.server
        state, record = run_round(context, state, round)
        sent_layers: set[int] = set()
        for entry in record.clients:
            gradients, layers = entry.numbers["gradients"], entry.numbers["layers"]
            assert isinstance(layers, list)
            layer = int(np.argmax(gradients))
            assert layers == [layer]
            sent_layers.add(layer)
            parameters = sum(parts.count_parameters(part) for part in (others, parts.blocks[layer]))
            assert 0 < entry.up_bytes - 4 * parameters < 4000  # names and numbers
        changed = {name for name in parts.body if not torch.equal(state.server.tensors[name], before.tensors[name])}
        expected = set(parts.union(others, *(parts.blocks[layer] for layer in sent_layers)))
        assert changed <= expected
        assert {name for name in expected if "weight" in name} <= changed
        assert state.server.numbers["updated"] == [
            round if layer in sent_layers else before.numbers["updated"][layer]  # type: ignore[index]
            for layer in range(2)
        ]


@pytest.fixture
def sharing(make_context: MakeContext) -> FedVit:
    context = make_context(num_tasks=3, epochs=2, batch_size=8)
    return FedVit(FedVitParams(send_layers=1, head_epochs=1), context)


def test_a_client_receives_what_has_changed_and_keeps_its_other_layers(
    sharing: FedVit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    parts, initial = tiny_net.parts, tiny_net.initial_weights()
    server = replace(sharing.initial_state(initial), numbers={"updated": [1, 4]})
    assert set(sharing.message_to_client(server, 5, 0, last_round=None).tensors) == set(parts.body)
    message = sharing.message_to_client(server, 5, 0, last_round=3)
    assert set(message.tensors) == {*parts.embed, *parts.norm, *parts.blocks[1]}
    own = State({name: tensor + 1 for name, tensor in initial.items()})
    job = ClientRoundInput(5, 0, message, sharing.initial_broadcast(initial).tensors, own, make_shard(0, 12), 0)
    tuning = next(sharing.client_update(job))
    before = with_prefix(tuning.constants, BEFORE)
    for name in parts.body:
        assert torch.equal(tuning.weights[name], initial[name] + (name in parts.blocks[0])), name
        assert torch.equal(before[name], initial[name] + 1), "as before the aggregation"
    assert all(torch.equal(tuning.weights[name], initial[name] + 1) for name in parts.head)
    answer = run_update(
        sharing.client_update(job), make_trainer(epochs=2, batch_size=8), job.shard, RngContext(0, 5, 0)
    )
    assert not set(answer.message.tensors) & set(parts.head)
    assert answer.client_state is not None
    assert set(answer.client_state.tensors) >= set(parts.whole)


def test_gradients_are_ranked_before_they_are_integrated(
    sharing: FedVit, tiny_net: Net, tiny_images: ImageSet, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """With stored tasks that rotate the gradient of a step, its layers' magnitudes are those without them."""
    trainer, weights, shard = make_trainer(batch_size=64), tiny_net.initial_weights(), make_shard(0, 12)
    opposed = SampleSet(tiny_images.images[None, :12], (tiny_images.labels[None, :12] + 1) % CLASSES, (12,))
    plain, integrated = (
        trainer.train(sharing.integrated_training(weights, memory), shard, RngContext(0, 1, 0))
        for memory in (None, opposed)
    )
    assert plain.steps == integrated.steps == 1
    assert int(integrated.kept["rotated"]) == 1
    assert torch.equal(integrated.kept["layers"], plain.kept["layers"])
    assert torch.equal(integrated.kept["heads"], plain.kept["heads"])


def test_a_client_without_images_sends_no_layer(
    sharing: FedVit, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    initial = tiny_net.initial_weights()
    message = sharing.message_to_client(sharing.initial_state(initial), 1, 0, None)
    shard = make_shard(0, 0)
    job = ClientRoundInput(1, 0, message, sharing.initial_broadcast(initial).tensors, None, shard, 0)
    answer = run_update(sharing.client_update(job), make_trainer(epochs=2), shard, RngContext(0, 1, 0))
    assert not answer.message.tensors
    assert "layers" not in answer.message.numbers


def test_more_layers_than_the_model_has_are_refused(make_context: MakeContext) -> None:
    with pytest.raises(ConfigError, match=r"method\.send_layers = 3: must be between 1 and 2"):
        FedVit(FedVitParams(send_layers=3), make_context())
    with pytest.raises(ConfigError, match=r"method\.send_layers = 7"):
        load_config("fedvit-cifar100", ["method.send_layers=7"])


# Masks


def test_what_is_masked_and_what_is_whole(
    make_context: MakeContext, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    context = make_context(num_tasks=3, epochs=2, batch_size=8)
    method = FedVit(FedVitParams(body_mask_ratio=0.5, head_epochs=1), context)
    initial, shard = tiny_net.initial_weights(), make_shard(0, 12)
    job = ClientRoundInput(2, 0, Message(initial), {}, State(initial), shard, 0)
    trainer, trainings = make_trainer(epochs=2, batch_size=8), method.client_update(job)
    tuning = next(trainings)
    head = trainings.send(trainer.train(tuning, shard, RngContext(0, 2, 0)))
    body = trainings.send(trainer.train(head, shard, RngContext(0, 2, 0, 1)))
    ratios = [(training.train or context.train).mask_ratio for training in (tuning, head, body)]
    assert ratios == [0.5, 0.0, 0.5]
    assert not any(training.sets for training in (tuning, head, body)), "nothing is stored yet"
    assert body.score_samples
    # Scores are those of whole images.
    result = trainer.train(body, shard, RngContext(0, 2, 0, 2))
    logits = tiny_net({**body.weights, **result.weights}, trainer.preprocess(shard.images.images[shard.index]))
    losses = torch.nn.functional.cross_entropy(logits, shard.labels, reduction="none")
    torch.testing.assert_close(result.sample_losses, losses.detach(), rtol=1e-4, atol=1e-5)


def stored(
    make_context: MakeContext, images: ImageSet, sizes: tuple[int, ...], mask_ratio: float | None, client: int = 0
) -> SampleSet:
    """Return the memory of a client that has stored so many samples of its first tasks, as it is used in a round."""
    method = FedVit(FedVitParams(body_mask_ratio=mask_ratio, head_epochs=0), make_context(num_tasks=3))
    index = torch.arange(len(sizes) * sizes[0]).view(len(sizes), -1) % len(images)
    tasks = {
        task: StoredSamples(images.images[index[task, :size]], images.labels[index[task, :size]])
        for task, size in enumerate(sizes)
    }
    state, shard = State(memory_tensors(tasks)), Shard(images, torch.arange(8))
    memory = method.memory(ClientRoundInput(1, client, Message(), {}, state, shard, len(sizes)))
    assert memory is not None
    assert memory.sizes == sizes
    return memory


def test_stored_samples_keep_as_many_patches_as_the_batch_whoever_is_stacked(
    make_context: MakeContext, tiny_net: Net, tiny_images: ImageSet, make_shard: MakeShard
) -> None:
    def training(sizes: tuple[int, ...], mask_ratio: float | None, client: int) -> ClientTraining:
        memory = stored(make_context, tiny_images, sizes, mask_ratio, client)
        training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.body, 1, sets={MEMORY: memory})
        return ClientTraining(training, make_shard(0, 8), RngContext(0, 1, client))

    group = [training(sizes, 0.5, client) for client, sizes in enumerate([(11, 3), (9, 5)])]
    together = stack_inputs(group, CPU).sets[MEMORY].tensors["keep"]
    assert together.shape == (2, 2, 16, 2)  # clients, parts, samples with padding, patches
    for client, (alone, size) in enumerate(zip(group, (11, 9), strict=True)):
        keep = stack_inputs([alone], CPU).sets[MEMORY].tensors["keep"]
        assert torch.equal(together[client, :, :size], keep[:, :size])
        assert (keep[:, :size, 0] != keep[:, :size, 1]).all()
        assert set(keep[:, :size].flatten().tolist()) == {0, 1, 2, 3}
    assert not torch.equal(together[0, 0, :9], together[1, 0, :9]), "each client's mask is its own"
    for ratio in (None, 0.0):
        assert "keep" not in stack_inputs([training((11, 3), ratio, 0)], CPU).sets[MEMORY].tensors


def add_reference(view: StepView, batch: Samples) -> Tensors:
    """Add the gradient of the first part of the memory to that of the batch."""
    added: Tensors = view.map(
        lambda gradients, rows: {name: gradient + rows[name][0] for name, gradient in gradients.items()},
        view.grad(cross_entropy, batch),
        view.part_grads(cross_entropy, view.parts(MEMORY)),
    )
    return added


def test_masked_reference_gradient_is_that_of_the_kept_patches(
    make_context: MakeContext,
    tiny_net: Net,
    tiny_images: ImageSet,
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    """One step of SGD along the sum of the gradient and a reference, compared with autograd."""
    trainer = make_trainer(optimizer="sgd", momentum=0, weight_decay=0, lr=0.1, schedule="constant", mask_ratio=0.5)
    weights, shard, rng = tiny_net.initial_weights(), make_shard(0, 12), RngContext(7, 3, 0)
    memory = stored(make_context, tiny_images, (8,), 0.5)
    training = LocalTraining(weights, tiny_net.parts.whole, 1)
    plain = trainer.train(training, shard, rng)
    result = trainer.train(replace(training, step=add_reference, sets={MEMORY: memory}), shard, rng)
    assert memory.keep is not None
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    logits = tiny_net(leaves, trainer.preprocess(memory.images[0]), memory.keep[0])
    loss = torch.nn.functional.cross_entropy(logits, memory.labels[0])
    for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        expected = plain.weights[name] - 0.1 * gradient
        torch.testing.assert_close(result.weights[name], expected, rtol=1e-5, atol=1e-6)


def test_captured_steps_follow_the_mask_of_their_training(
    make_context: MakeContext,
    tiny_net: Net,
    tiny_images: ImageSet,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    masked = eager.config.model_copy(update={"mask_ratio": 0.5})
    for round in (1, 2):
        for train in (None, masked):
            memory = stored(make_context, tiny_images, (8, 3), None if train is None else 0.5)
            whole, sets = tiny_net.parts.whole, {MEMORY: memory}
            training = LocalTraining(tiny_net.initial_weights(), whole, 1, add_reference, sets=sets, train=train)
            group = [ClientTraining(training, make_shard(0, 20), RngContext(7, round, client)) for client in range(2)]
            for result, expected in zip(graphed.train_together(group), eager.train_together(group), strict=True):
                for name, weight in result.weights.items():
                    torch.testing.assert_close(weight, expected.weights[name], rtol=1e-5, atol=1e-6)
    assert len(captured) == 2, "one for each mask, each reused in the second round"


# Both


def test_stacked_clients_end_as_each_alone(tmp_path: Path) -> None:
    outcomes = []
    for stack_size in (1, 4):
        settings = (f"machine.stack_size={stack_size}", "train.optimizer=sgd", "train.lr=0.05", "fleet.per_round=4")
        context, server = finish(tmp_path / str(stack_size), *BOTH, *settings)
        outcomes.append({**server.tensors, **client_tensors(context)})
        assert context.trainer.execution_summary().largest_stack == stack_size
    for name, tensor in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], tensor, rtol=2e-3, atol=2e-4, msg=name)


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    undisturbed, interrupted = tmp_path / "undisturbed", tmp_path / "interrupted"
    keys = (*BOTH, *FASTER)
    finish(undisturbed, *keys)
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_tiny(interrupted, *keys), callbacks=[InterruptAfter(4)])
    resumed = open_tiny(interrupted, *keys)
    state = load_state(resumed)
    assert state.round == 3
    run_rounds(resumed, state)
    names = ["records.jsonl", *(str(path.relative_to(undisturbed)) for path in undisturbed.glob("checkpoint/*.safe*"))]
    for name in names:
        assert (interrupted / name).read_bytes() == (undisturbed / name).read_bytes(), name
    summaries = [
        json.loads((folder / "summary.json").read_text())["continual"] for folder in (interrupted, undisturbed)
    ]
    assert summaries[0] == summaries[1]


# Costs of the presets


def cost_model(preset: str, *overrides: str) -> CostModel:
    config = load_config(preset, overrides)
    net = build_model(config.model, 100, 3, 32, 0)
    context = MethodContext(config, net, 100, CPU)
    return CostModel(make_method(config.method, context), net, config.train)


def test_bytes_sent_by_formula() -> None:
    dim, patch, tokens = 192, 4 * 4 * 3, 65
    layer = 12 * dim**2 + 13 * dim
    others = dim * (patch + 1) + dim + tokens * dim + 2 * dim  # patch embedding, class token, positions, final norm
    for preset, layers in (("fedvit-cifar100", 6), ("fedvit-layers-cifar100", 3)):
        message = cost_model(preset).dry_run(1, 0, np.zeros(8, dtype=np.int64)).update.message
        assert message.num_bytes == 4 * (layers * layer + others)


def test_gflops_of_a_masked_body_step_by_formula() -> None:
    """Forward operations by formula; forward and backward, with stored samples, are about a quarter."""
    dim, labels, reported = 192, np.zeros(96, dtype=np.int64), {"stored": [12] * 9}
    models: dict[int, CostModel] = {}
    heads: set[int] = set()
    bodies: list[int] = []
    for preset, patches in (("fedvit-cifar100", 64), ("fedvit-masked-cifar100", 16)):
        model = models[patches] = cost_model(preset)
        trainings = dict(
            zip(("tuning", "head", "body"), model.dry_run(95, 0, labels, 9, reported).trainings, strict=True)
        )
        flops = {
            name: model.counter.step(training, kind_of_step(training.step, 0)).per_sample
            for name, training in trainings.items()
        }
        tokens = patches + 1
        macs = 6 * (12 * tokens * dim**2 + 2 * tokens**2 * dim) + patches * 48 * dim + 100 * dim
        assert flops["body"].forward == 2 * macs
        assert flops["tuning"].forward == 2 * 2 * macs, "before and after the aggregation"
        heads.add(flops["head"].forward)
        bodies.append(flops["body"].training)
        assert len(trainings["body"].sets[MEMORY]) == 9
    assert len(heads) == 1
    assert 3.8 < bodies[0] / bodies[1] < 4.3
    whole, masked = (
        models[patches].round_flops(models[patches].dry_run(95, 0, labels, 9, reported), 96) for patches in (64, 16)
    )
    assert 3.3 < whole / masked < 4, "the head's epoch and the scores are on whole images"
    # Without stored tasks, whose gradients take most of the memory.
    memory = [round_memory(model.net, model.dry_run(1, 0, labels), model.train) for model in models.values()]
    assert memory[1].activations < 0.5 * memory[0].activations


def test_the_aggregated_body_cannot_be_evaluated_where_only_some_layers_are_sent() -> None:
    with pytest.raises(ConfigError, match=r"eval\.body = 'aggregated': must be own with method\.send_layers"):
        load_config("fedvit-digits", ["method.send_layers=1", "eval.body=aggregated"])
