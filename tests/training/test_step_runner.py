"""Captured steps are reused for other groups of the same shapes; CUDA graphs are emulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import MakeConfig, MakeShard, MakeTrainer
from emulated_graphs import set_up_with_graphs
from vitfleet.data.images import ImageSet, Shard
from vitfleet.errors import UserError
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.run import setup
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run
from vitfleet.training.capture.runner import CaptureSpace, CudaGraphRunner, StepKind, clients_per_step
from vitfleet.training.local_training import LocalResult, LocalTraining, SampleSet
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.client_stack import ClientStack
from vitfleet.training.stacking.inputs import ClientTraining, RngContext, stack_inputs
from vitfleet.training.step import StepView
from vitfleet.training.trainer import Trainer


def make_parts(images: ImageSet, sizes: tuple[int, ...]) -> SampleSet:
    index = torch.arange(len(sizes) * 24).view(-1, 24) % len(images)
    return SampleSet(images.images[index], images.labels[index], sizes)


def add_part_gradients(view: StepView, batch: Samples) -> Tensors:
    rows = view.part_grads(cross_entropy, view.parts("memory"))
    summed: Tensors = view.map(lambda rows: {name: tensor.sum(0) for name, tensor in rows.items()}, rows)
    return {name: gradient + summed[name] for name, gradient in view.grad(cross_entropy, batch).items()}


def replaying_step(view: StepView, batch: Samples) -> Tensors:
    return view.grad(lambda own, drawn: cross_entropy(own) + cross_entropy(drawn), batch, view.drawn("replay"))


def assert_same_results(actual: Sequence[LocalResult], expected: Sequence[LocalResult]) -> None:
    for result, reference in zip(actual, expected, strict=True):
        assert result.steps == reference.steps
        for name in result.weights:
            torch.testing.assert_close(result.weights[name], reference.weights[name], rtol=1e-5, atol=1e-6)


def test_captured_step_draws_the_stored_samples_of_another_group(
    tiny_net: Net,
    tiny_images: ImageSet,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 2, replaying_step)
    for round, sizes in ((1, (3, 17)), (2, (30, 9))):
        sets = [
            SampleSet(tiny_images.images[None, :size], tiny_images.labels[None, :size], (size,), draws=2)
            for size in sizes
        ]
        trainings = [replace(training, sets={"replay": stored}) for stored in sets]
        group = [
            ClientTraining(training, make_shard(0, 30 - 9 * client), RngContext(7, round, client))
            for client, training in enumerate(trainings)
        ]
        assert_same_results(graphed.train_together(group), eager.train_together(group))
    assert len(set(map(id, captured))) == 1, "buffers of any size up to the common padding"
    assert [kind.num_clients for kind in captured[0].graphs] == [2, 1], "half of the clients have the last steps"


def test_captured_step_serves_another_group(
    tiny_net: Net, captured: list[CudaGraphRunner], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    returned: list[tuple[torch.Tensor, torch.Tensor]] = []
    for round, ends in ((1, (20, 11)), (2, (40, 33))):  # three steps per epoch, then five
        training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 2)
        group = [
            ClientTraining(training, make_shard(0, end), RngContext(7, round, client))
            for client, end in enumerate(ends)
        ]
        results = graphed.train_together(group)
        assert_same_results(results, eager.train_together(group))
        heads = [result.weights["head.weight"] for result in results]
        returned += [(head, head.clone()) for head in heads]
    assert len(captured) == 1, "an epoch may be of any length"
    assert all(torch.equal(now, then) for now, then in returned), "a later training does not change returned weights"


@pytest.mark.parametrize("scored_first", [True, False])
def test_reused_steps_score_samples_where_it_is_asked_for(
    scored_first: bool,
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    for scored in (scored_first, not scored_first):
        training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1, score_samples=scored)
        result, reference = (
            trainer.train(training, make_shard(0, 20), RngContext(7, 1, 0)) for trainer in (graphed, eager)
        )
        assert len(result.sample_losses) == (20 if scored else 0)
        torch.testing.assert_close(result.sample_losses, reference.sample_losses, rtol=1e-5, atol=1e-6)
        assert result.sample_logits.shape == reference.sample_logits.shape
    assert len(captured) == 1


def with_train(trainer: Trainer, **keys: object) -> Trainer:
    return replace(trainer, config=trainer.config.model_copy(update=keys))


def with_machine(trainer: Trainer, **settings: Any) -> Trainer:
    return replace(trainer, machine=replace(trainer.machine, **settings))


def with_dtype(trainer: Trainer, dtype: torch.dtype) -> Trainer:
    preprocess = trainer.preprocess
    return replace(
        trainer, preprocess=replace(preprocess, mean=preprocess.mean.to(dtype), std=preprocess.std.to(dtype))
    )


def with_other_normalisation(trainer: Trainer) -> Trainer:
    preprocess = trainer.preprocess
    return replace(trainer, preprocess=replace(preprocess, mean=preprocess.mean + 0.3))


def with_other_net(trainer: Trainer) -> Trainer:
    return replace(trainer, net=trainer.net.with_unfused_attention())


OTHER_SETTINGS: dict[str, Callable[[Trainer], Trainer]] = {
    "max_grad_norm": lambda trainer: with_train(trainer, max_grad_norm=0.01),
    "weight decay": lambda trainer: with_train(trainer, weight_decay=2.0),
    "momentum": lambda trainer: with_train(trainer, momentum=0.0),
    "optimizer": lambda trainer: with_train(trainer, optimizer="adamw"),
    "precision": lambda trainer: with_machine(trainer, bf16=True),
    "tasks of the classes": lambda trainer: replace(trainer, class_to_task=torch.tensor([0, 0, 1, 1, 1])),
    "parts at once": lambda trainer: replace(trainer, parts_at_once=2),
    "preprocessing": with_other_normalisation,
    "net": with_other_net,
}


@pytest.mark.parametrize("setting", OTHER_SETTINGS)
@pytest.mark.parametrize("clients", [1, 2])
def test_captured_step_is_not_replayed_under_another_configuration(
    setting: str,
    clients: int,
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    # In double precision, because the gradient of a key's bias is all rounding errors, and AdamW scales it up. bfloat16
    # needs single precision: autocast leaves double alone.
    dtype = torch.float32 if setting == "precision" else torch.float64
    eager = with_dtype(make_trainer(batch_size=8, optimizer="sgd", lr=0.05), dtype)
    graphed = with_machine(eager, graphs=True)
    weights = {name: tensor.to(dtype) for name, tensor in tiny_net.initial_weights().items()}
    training = LocalTraining(weights, tiny_net.parts.whole, 2)
    group = [ClientTraining(training, make_shard(0, 20), RngContext(7, 1, client)) for client in range(clients)]
    change = OTHER_SETTINGS[setting]
    assert_same_results(graphed.train_together(group), eager.train_together(group))
    other = change(graphed)
    assert other.runners is graphed.runners
    changed = change(eager)
    assert_same_results(other.train_together(group), changed.train_together(group))
    assert len(captured) == 2
    assert_same_results(graphed.train_together(group), eager.train_together(group))
    assert len(captured) == 2, "both captures are kept, and each serves its own configuration"


@pytest.mark.parametrize("keys", [{"lr": 0.2}, {"epochs": 5}, {"schedule": "constant"}, {"warmup_rounds": 3}], ids=str)
def test_captured_step_serves_another_learning_rate(
    keys: dict[str, object],
    tiny_net: Net,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = with_machine(eager, graphs=True)
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 2)
    group = [ClientTraining(training, make_shard(0, 20), RngContext(7, 3, 0))]
    assert_same_results(graphed.train_together(group), eager.train_together(group))
    assert_same_results(
        with_train(graphed, **keys).train_together(group), with_train(eager, **keys).train_together(group)
    )
    assert len(captured) == 1


def test_captured_step_is_not_replayed_on_other_labels(
    tiny_net: Net, tiny_images: ImageSet, captured: list[CudaGraphRunner], make_trainer: MakeTrainer
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = with_machine(eager, graphs=True)
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 2)
    for images in (tiny_images, replace(tiny_images, labels=tiny_images.labels.flip(0))):
        group = [ClientTraining(training, Shard(images, torch.arange(20)), RngContext(7, 1, 0))]
        assert_same_results(graphed.train_together(group), eager.train_together(group))
    assert len(captured) == 2


@pytest.mark.parametrize("clients", [1, 2])
def test_captured_step_does_not_write_into_frozen_inputs(
    clients: int, tiny_net: Net, captured: list[CudaGraphRunner], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """Frozen tensors belong to the state of a client or of the server, which is used again."""
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    inputs: list[dict[str, torch.Tensor]] = []
    for round in range(3):
        weights = {name: tensor + 0.1 * round for name, tensor in tiny_net.initial_weights().items()}
        constants = {"anchor": torch.full((3,), float(round))}
        inputs += [weights, constants]
        training = LocalTraining(weights, tiny_net.parts.head, 1, constants=constants)
        group = [ClientTraining(training, make_shard(0, 20), RngContext(7, round, client)) for client in range(clients)]
        before = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in inputs]
        assert_same_results(graphed.train_together(group), eager.train_together(group))
        for now, then in zip(inputs, before, strict=True):
            assert all(torch.equal(now[name], then[name]) for name in then)
    assert len(captured) == 1


def test_captured_step_serves_slightly_smaller_memories(
    tiny_net: Net,
    tiny_images: ImageSet,
    captured: list[CudaGraphRunner],
    make_trainer: MakeTrainer,
    make_shard: MakeShard,
) -> None:
    eager = make_trainer(batch_size=8, optimizer="sgd", lr=0.05)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True), parts_at_once=4)
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1, add_part_gradients)

    def train(*sizes: tuple[int, ...]) -> int:
        trainings = [replace(training, sets={"memory": make_parts(tiny_images, part_sizes)}) for part_sizes in sizes]
        group = [
            ClientTraining(training, make_shard(client, 20), RngContext(7, 1, client))
            for client, training in enumerate(trainings)
        ]
        assert_same_results(graphed.train_together(group), eager.train_together(group))
        return len(captured)

    assert train((18, 12, 6), (17, 9, 2)) == 1  # computed as 24, 16, 8
    assert train((20, 10, 8), (3, 2, 1)) == 1
    assert train((20, 6, 6), (18, 8, 1)) == 1  # 24, 8, 8 would suffice
    assert train((24, 20, 6), (18, 8, 1)) == 2  # 24, 24, 8 is larger
    assert train((24, 1, 1), (24, 1, 1)) == 2  # the first one serves again
    assert train((8, 1, 1), (7, 1, 1)) == 3  # too much padding


def test_captured_steps_leave_out_clients_that_have_none(
    tiny_net: Net, captured: list[CudaGraphRunner], make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    eager = make_trainer(batch_size=1, optimizer="sgd", lr=0.01)
    graphed = replace(eager, machine=replace(eager.machine, graphs=True))
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 2)
    sizes = (3, 40, 2, 20, 4, 12, 1)  # forty steps are loaded in two chunks
    group = [
        ClientTraining(training, make_shard(0, size), RngContext(7, 1, client)) for client, size in enumerate(sizes)
    ]
    results = graphed.train_together(group)
    alone = [eager.train(member.training, member.shard, member.rng) for member in group]
    assert_same_results(results, alone)
    assert [result.steps for result in results] == [2 * size for size in sizes]
    assert {kind.num_clients for kind in captured[0].graphs} == {7, 6, 4, 3, 2, 1}, "five clients are rounded up to six"


@pytest.mark.parametrize("fails", [False, True])
def test_the_stream_waits_for_a_warm_up_that_fails_too(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are free for the next training: what it has begun must be finished before."""
    waits: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.name, other.name))

    def step(runner: CudaGraphRunner, kind: StepKind) -> None:
        waits.append(("step", ""))
        if fails:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(CudaGraphRunner, "_step", step)
    runner = object.__new__(CudaGraphRunner)
    runner.space = CaptureSpace(object(), Stream("capture"))
    with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
        runner._warm_up(StepKind(None, 1))
    assert waits == [("capture", "current"), ("step", ""), ("current", "capture")]


def test_clients_per_step() -> None:
    active = [20, 20, 19, 13, 12, 12, 12, 9, *[5] * 9, 2, 1]
    assert clients_per_step(active, captured=False) == active
    expected = [20, 20, 20, 16, 12, 12, 12, 12, *[6] * 9, 2, 1]
    assert clients_per_step(active, captured=True) == expected
    assert clients_per_step([5, 5, 2], captured=True) == [5, 5, 5], "too few steps to capture fewer clients"
    assert clients_per_step([5, 5, 4, 3, 1], captured=True) == [5, 5, 5, 3, 3], "all clients or half of them"
    assert clients_per_step([1, 1, 1, 1], captured=True) == [1, 1, 1, 1]
    assert clients_per_step(active, captured=True, min_clients=2) == [*expected[:-1], 2]
    assert clients_per_step([2, 2, 2, 1], captured=True, min_clients=2) == [2, 2, 2, 2]
    assert clients_per_step([1] * 9, captured=True, min_clients=2) == [1] * 9, "there is no other client"


@pytest.mark.parametrize("keys", [("fleet.per_round=1",), ("machine.stack_size=2", "fleet.per_round=3")], ids=str)
def test_client_states_are_not_overwritten_by_later_clients(
    keys: tuple[str, ...],
    captured: list[CudaGraphRunner],
    tiny_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FedRep freezes a client's head while its body trains, and keeps it on the device for the next round."""
    overrides = (
        "method.name=fedrep",
        "fleet.clients=3",
        "train.optimizer=sgd",
        "train.lr=0.05",
        "train.epochs=2",
        "rounds=6",
    )
    config = tiny_config(*overrides, "machine.workers=1", *keys)
    losses = []
    monkeypatch.setattr(setup, "gpu_memory_bytes", lambda device: 1 << 30)
    for graphs in (False, True):
        monkeypatch.setattr(setup, "set_up_execution", partial(set_up_with_graphs, graphs))
        run_rounds(open_run(config, tmp_path / str(graphs)))
        records = read_records(tmp_path / str(graphs))
        losses.append([entry.numbers["loss"] for record in records for entry in record.clients])
    assert captured
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_capture_that_runs_out_of_memory_is_not_called_impossible(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer then continues with fewer clients; any other error of a capture names the key to change."""
    trainer = make_trainer()
    shard = make_shard(0, 8)
    group = [
        ClientTraining(LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1), shard, RngContext(0, 1, 0))
    ]
    inputs = stack_inputs(group, trainer.machine.device)
    batches = trainer._epoch_batches(group, 0, trainer.config, 1)
    stack = ClientStack(trainer.engine, group, inputs)
    space = CaptureSpace(object(), object())
    runner = CudaGraphRunner(stack, batches, space, trainer.runners.warmup, trainer.runners.execution)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "before")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    message = "CUDA error: out of memory"
    monkeypatch.setattr(CudaGraphRunner, "_step", lambda self, kind: raise_runtime_error(message))
    with pytest.raises(RuntimeError, match="out of memory"):
        runner._capture(StepKind(None, 1))
    assert streams == ["before"]
    message = "CUDA error: operation not permitted when stream is capturing"
    with pytest.raises(UserError, match=r"machine\.graphs = true: a step of this model cannot be captured"):
        runner._capture(StepKind(None, 1))


def raise_runtime_error(message: str) -> None:
    raise RuntimeError(message)


def test_steps_are_warmed_up_and_captured_on_the_stream_of_their_trainer(
    tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(batch_size=8)
    used: list[object] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            used.append(("waits for", other))

    def capture(graph: object, pool: object, stream: object, capture_error_mode: str) -> nullcontext[None]:
        used.append((pool, stream))
        return nullcontext()

    def enter(stream: object) -> nullcontext[None]:
        used.append(stream)
        return nullcontext()

    step = CudaGraphRunner._step

    def step_unless_captured(runner: CudaGraphRunner, kind: StepKind) -> None:
        if ("pool", side) not in used:  # a capture computes nothing: the tables have no second batch
            step(runner, kind)

    main, side = Stream(), Stream()
    monkeypatch.setattr(CudaGraphRunner, "_step", step_unless_captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 1)
    graphed = replace(trainer, machine=replace(trainer.machine, graphs=True))
    graphed.train(training, make_shard(0, 8), RngContext(0, 1, 0))
    assert used == [("waits for", main), side, ("waits for", side), ("pool", side)]
