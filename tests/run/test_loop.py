"""Whole tiny runs: one seed writes the same bytes, interrupted or not; a failing client does not stop the others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import InterruptAfter, MakeConfig
from vitfleet.config.schema import Config, TrainConfig
from vitfleet.fleet.simulation import SimulatedFleet
from vitfleet.message import State
from vitfleet.progress import Advance
from vitfleet.run.callbacks import Callback
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.round_plan import choose_clients
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.training.local_training import LocalResult
from vitfleet.training.optimizers.optimizer import learning_rate
from vitfleet.training.stacking.inputs import ClientTraining
from vitfleet.training.trainer import Trainer
from vitfleet.wire import decode


def run(config: Config, folder: Path, interrupt_after: int | None = None) -> tuple[RunContext, RunState]:
    """Run a configuration, either completely or until the record of a round is written."""
    folder.mkdir(exist_ok=True)
    context = open_run(config, folder)
    callbacks = [] if interrupt_after is None else [InterruptAfter(interrupt_after)]
    return context, run_rounds(context, callbacks=callbacks).state


class Rounds(Callback):
    """Lists the rounds that are run."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        assert state.round == record.round
        self.rounds.append(record.round)


def written(folder: Path) -> Mapping[str, bytes]:
    """Return the files that must not depend on interruptions: records, model and states."""
    paths = [folder / "records.jsonl", *folder.glob("*.safetensors"), *folder.glob("checkpoint/*.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def named(method: str) -> list[str]:
    """Return the overrides that choose a method for a model of two layers."""
    return [f"method.name={method}", *(["method.k=1"] if method == "transfl" else [])]


METHODS = pytest.mark.parametrize("method", ["fedavg", "standalone", "transfl"])


@METHODS
def test_runs_of_one_seed_write_the_same_bytes(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(*named(method))
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        run(config.model_copy(update={"seed": seed}), tmp_path / name)
    first, second, other = (written(tmp_path / name) for name in ("first", "second", "other"))
    assert first == second
    assert len(first["records.jsonl"].splitlines()) == 3
    assert first["records.jsonl"] != other["records.jsonl"]
    assert first["model.safetensors"] != other["model.safetensors"]
    if method == "standalone":
        assert sum("client-" in name for name in first) >= 3


@METHODS
@pytest.mark.parametrize(("every", "interrupted"), [(1, 2), (2, 1), (2, 2), (2, 3)])
def test_a_run_interrupted_before_a_checkpoint_ends_like_an_undisturbed_one(
    method: str, every: int, interrupted: int, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config(*named(method), f"machine.checkpoint_every={every}")
    run(config, tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", interrupted)
    assert len(list(read_records(tmp_path / "stopped"))) == interrupted
    context = open_run(config, tmp_path / "stopped")
    state = load_state(context)
    assert state.round == interrupted - 1 - (interrupted - 1) % every
    assert state.last_seen.keys() == state.client_metrics.keys()
    repeated = Rounds()
    run_rounds(context, state, [repeated])
    assert repeated.rounds == list(range(state.round + 1, 4))
    assert written(tmp_path / "stopped") == written(tmp_path / "undisturbed")


def interrupt_training(patch: pytest.MonkeyPatch, at: int) -> None:
    """Interrupt the at-th training of this process."""
    count = 0
    train_group = Trainer.train_together

    def interrupted(self: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return train_group(self, group)

    patch.setattr(Trainer, "train_together", interrupted)


@METHODS
def test_a_run_interrupted_repeatedly_within_rounds_ends_like_an_undisturbed_one(
    method: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config(*named(method), "machine.checkpoint_every=2", "rounds=4")
    run(config, tmp_path / "undisturbed")
    for at in (2, 4, 6, 8, 5, 3):  # three trainings per round: before, at and after the first checkpoint
        with pytest.MonkeyPatch.context() as patch:
            interrupt_training(patch, at)
            with pytest.raises(KeyboardInterrupt):
                run(config, tmp_path / "stopped")
    run(config, tmp_path / "stopped")
    assert written(tmp_path / "stopped") == written(tmp_path / "undisturbed")


def test_run_rounds_of_a_finished_run_changes_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config(), tmp_path / "run")
    before = written(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()  # killed between the last checkpoint and the model
    run(tiny_config(), tmp_path / "run")
    assert written(tmp_path / "run") == before


def test_records_match_the_configuration_and_the_partition(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("train.warmup_rounds=1")
    context, _ = run(config, tmp_path / "run")
    records = list(read_records(tmp_path / "run"))
    up = down = 0
    for round, record in enumerate(records, start=1):
        assert record.round == round
        assert record.lr == learning_rate(config.train, round, 3)
        assert [entry.client for entry in record.clients] == choose_clients(config, round)
        samples = {entry.client: entry.numbers["samples"] for entry in record.clients}
        assert samples == {client: len(context.partition.train.for_client(client)) for client in samples}
        up += sum(entry.up_bytes for entry in record.clients)
        down += sum(entry.down_bytes for entry in record.clients)
        assert (record.total_up_bytes, record.total_down_bytes) == (up, down)
        assert all(entry.up_bytes > 4 * context.params for entry in record.clients)
        weighted = [(float(str(n["samples"])), float(str(n["loss"]))) for n in (e.numbers for e in record.clients)]
        mean = sum(samples * loss for samples, loss in weighted) / sum(samples for samples, _ in weighted)
        assert record.loss == pytest.approx(mean)
        assert record.accuracy is not None
        local = [entry.accuracy for entry in record.clients if entry.accuracy is not None]
        assert record.accuracy.local == pytest.approx(sum(local) / len(local))


def test_the_model_file_holds_the_server_weights_and_metadata(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context, state = run(tiny_config(), tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    tensors = load_file(path)
    assert set(tensors) == set(context.net.parts.shapes)
    assert all(torch.equal(tensors[name], state.server.tensors[name]) for name in tensors)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    about = json.loads(metadata["vitfleet"]) if "vitfleet" in metadata else metadata
    assert str(about["rounds"]) == "3"


def test_choose_clients_draws_without_replacement_and_anew_each_round(tiny_config: MakeConfig) -> None:
    config = tiny_config("fleet.clients=50", "fleet.per_round=10")
    draws = [tuple(choose_clients(config, round)) for round in range(1, 21)]
    assert all(len(set(draw)) == 10 and draw == tuple(sorted(draw)) for draw in draws)
    assert all(0 <= client < 50 for draw in draws for client in draw)
    assert len(set(draws)) > 15
    assert choose_clients(config.model_copy(update={"seed": 9}), 1) != list(draws[0])


def test_accuracy_is_measured_every_n_rounds_and_in_the_last(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config("rounds=5", "eval.every=2"), tmp_path / "run")
    measured = [record.round for record in read_records(tmp_path / "run") if record.accuracy is not None]
    assert measured == [2, 4, 5]
    for record in read_records(tmp_path / "run"):
        assert all((entry.tested is not None) == (record.round in measured) for entry in record.clients)


def test_evaluation_does_not_change_the_training(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config("eval.every=1"), tmp_path / "often")
    run(tiny_config("eval.every=3"), tmp_path / "once")
    often, once = (written(tmp_path / name)["model.safetensors"] for name in ("often", "once"))
    assert often == once


DIVERGING = TrainConfig(optimizer="sgd", momentum=0.9, lr=1e30, batch_size=4, epochs=1)


def make_client_diverge(patch: pytest.MonkeyPatch, client: int, config: TrainConfig) -> None:
    train_group = Trainer.train_together

    def train(self: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
        return train_group(replace(self, config=config) if group[0].rng.client == client else self, group)

    patch.setattr(Trainer, "train_together", train)


def test_a_diverged_client_is_recorded_as_failed_and_the_round_continues(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("data.partition.kind=iid", "fleet.per_round=6")
    make_client_diverge(monkeypatch, 4, DIVERGING)
    context, state = run(config, tmp_path / "run")
    for record in read_records(tmp_path / "run"):
        (bad,) = (entry for entry in record.clients if entry.failure is not None)
        assert bad.client == 4
        assert bad.failure is not None
        assert re.fullmatch(
            rf"training diverged: non-finite loss \((nan|inf)\) at client 4, round {record.round}, step \d+",
            bad.failure,
        )
        assert record.loss is not None
        assert math.isfinite(record.loss)
        assert record.accuracy is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.server.tensors.values())
    assert 4 not in state.last_seen
    summary = run_rounds(context).summary
    assert (summary["total"]["failures"], summary["total"]["participations"]) == (3, 18)


def test_the_aggregate_is_as_if_a_diverged_client_was_not_chosen(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("data.partition.kind=iid", "fleet.per_round=6", "rounds=1")
    with monkeypatch.context() as patch:
        make_client_diverge(patch, 4, DIVERGING)
        _, diverged = run(config, tmp_path / "diverged")
    (tmp_path / "alone").mkdir()
    context = open_run(config, tmp_path / "alone")
    monkeypatch.setattr("vitfleet.run.round_plan.choose_clients", lambda config, round: [0, 1, 2, 3, 5])
    alone = run_rounds(context).state.server
    assert all(torch.equal(diverged.server.tensors[name], tensor) for name, tensor in alone.tensors.items())


@METHODS
def test_a_run_in_which_all_clients_diverge_finishes(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    diverging = "train.optimizer=sgd", "train.lr=1e30", "train.batch_size=4", "data.partition.kind=iid"
    run(tiny_config(*diverging, *named(method)), tmp_path / "run")
    records = list(read_records(tmp_path / "run"))
    assert len(records) == 3
    assert all(entry.failure is not None for record in records for entry in record.clients)
    assert all(record.loss is None for record in records)


def test_a_client_whose_last_step_diverged_is_rejected(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is one step: its loss is still finite, only the weights are not."""
    one_step = TrainConfig(optimizer="sgd", momentum=0, lr=1e30, weight_decay=1e30, batch_size=1000)
    make_client_diverge(monkeypatch, 4, one_step)
    _, state = run(tiny_config("data.partition.kind=iid", "fleet.per_round=6"), tmp_path / "run")
    failed = {entry.client for record in read_records(tmp_path / "run") for entry in record.clients if entry.failure}
    assert failed == {4}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.server.tensors.values())


def test_a_model_that_overflows_in_evaluation_is_recorded(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """One step per client, so that every loss and every weight is finite, but the logits are not."""
    diverging = (
        "train.optimizer=sgd",
        "train.momentum=0",
        "train.lr=1e25",
        "train.batch_size=1000",
        "train.weight_decay=0",
    )
    run(tiny_config(*diverging, "data.partition.kind=iid", "rounds=1"), tmp_path / "run")
    assert len(list(read_records(tmp_path / "run"))) == 1


@METHODS
def test_clients_without_images_contribute_nothing(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(
        *named(method), "data.partition.beta=0.001", "fleet.clients=100", "fleet.per_round=2", "rounds=8"
    )
    context, _ = run(config, tmp_path / "run")
    sizes = context.partition.train.sizes()
    assert (sizes == 0).sum() > 50
    records = list(read_records(tmp_path / "run"))
    assert len(records) == 8
    without_images = [record for record in records if all(sizes[entry.client] == 0 for entry in record.clients)]
    assert without_images
    assert all(record.loss is None for record in without_images)
    assert all(record.loss is not None for record in records if record not in without_images)
    tested = context.partition.test.sizes()
    for record in records:
        assert record.accuracy is not None
        assert [entry.tested for entry in record.clients] == [tested[entry.client] for entry in record.clients]
        assert (record.accuracy.local is None) == all(not entry.tested for entry in record.clients)
    assert any(record.accuracy is not None and record.accuracy.local is None for record in records)


def test_a_round_of_clients_without_images_does_not_change_the_model(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("data.partition.beta=0.001", "fleet.clients=100", "rounds=1")
    (tmp_path / "run").mkdir()
    context = open_run(config, tmp_path / "run")
    empty = [client for client in range(100) if len(context.partition.train.for_client(client)) == 0][:3]
    monkeypatch.setattr("vitfleet.run.round_plan.choose_clients", lambda config, round: empty)
    server = run_rounds(context).state.server
    initial = context.net.initial_weights()
    assert all(torch.equal(server.tensors[name], initial[name]) for name in initial)


def test_a_resumed_run_uses_the_machine_settings_it_began_with(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("machine.threads=null", "machine.device=auto", "machine.precision=auto")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", interrupt_after=1)
    before = json.loads((tmp_path / "run" / "machine.json").read_text())
    assert (before["device"], before["precision"], before["threads"]) == ("cpu", "fp32", torch.get_num_threads())
    changed = {**before, "threads": before["threads"] + 1, "precision": "bf16"}
    (tmp_path / "run" / "machine.json").write_text(json.dumps(changed))
    context = open_run(config, tmp_path / "run")
    try:
        assert torch.get_num_threads() == before["threads"] + 1
        assert context.machine.bf16
    finally:
        torch.set_num_threads(before["threads"])


def test_client_states_are_not_kept_in_memory_after_a_checkpoint(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context, _ = run(tiny_config("method.name=standalone"), tmp_path / "run")
    assert isinstance(context.fleet, SimulatedFleet)
    assert not context.fleet.changed_states()
    manifest = context.checkpoints.latest
    assert manifest is not None
    for client, name in manifest.clients.items():
        client_state = context.fleet.client_state(client)
        assert client_state is not None
        written = decode(State, (tmp_path / "run" / "checkpoint" / name).read_bytes())
        assert all(torch.equal(client_state.tensors[key], tensor) for key, tensor in written.tensors.items())


def test_run_rounds_shows_the_progress_of_a_round(tiny_config: MakeConfig, tmp_path: Path) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.done: dict[str, int] = {}

        @contextmanager
        def task(self, label: str, total: int) -> Iterator[Advance]:
            self.done[label] = 0

            def advance(units: int) -> None:
                self.done[label] += units

            yield advance

    def shown(name: str, *overrides: str) -> dict[str, int]:
        progress = Recorder()
        context = open_run(tiny_config("rounds=1", f"method.name={name}", *overrides), tmp_path / name)
        run_rounds(context, progress=progress)
        return progress.done

    assert shown("fedavg") == {"round 1: clients": 3, "round 1: evaluation": 1}
    eftvit = shown("eftvit", "method.local_layers=1")
    assert set(eftvit) == {"round 1: clients", "round 1: the server trains", "round 1: evaluation"}
    (line,) = (tmp_path / "eftvit" / "timings.jsonl").read_text().splitlines()
    assert json.loads(line)["warm_up_seconds"] == 0  # nothing is compiled or captured here
