"""Whole runs with a server optimiser: what it changes, what stays, what is sent, and how it is resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitfleet as api
from conftest import Command, InterruptAfter, MakeConfig, long_but
from vitfleet.config.keys import every_key
from vitfleet.config.registry import METHODS, SERVER_OPTIMIZERS
from vitfleet.config.schema import Config
from vitfleet.costs.estimate import estimate_run
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.flower.server.fleet import make_run_spec
from vitfleet.run.callbacks import Callback
from vitfleet.run.context import RunContext
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState

TASKS = ("data.tasks.count=2", "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=1")
OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "fedbfpt": ("method.local_layers=2",),
    "transfl": ("method.k=1",),
    "eftvit": ("method.local_layers=1",),
    "fed-prompt": ("method.prompts=2",),
    "fedrep": ("train.epochs=2",),
}
BATCH_NORM = (
    "model.name=levit",
    "model.params={dims = [16, 24], depths = [1, 1], heads = [2, 2], key_dim = 8, stem_stride = 8}",
    "model.image_size=32",
    "model.depth=null",
    "model.patch_size=null",
)
NOT_AVERAGING = {"standalone", "eftvit", "closed-form", "analytic"}
AVERAGING = {name: () for name in METHODS.names() if name not in NOT_AVERAGING} | {
    "fedavg with batch norm": BATCH_NORM,
    "fedavg with the median": ("aggregate.rule=median",),
    "eftvit with averages": ("method.average_local=1",),
    "ewc with shared heads": ("method.heads=shared",),
}
ADAM = ("server.optimizer=adam", "server.lr=0.02")


def adam_step(weight: Tensor, change: Tensor) -> Tensor:
    """Return the weights after the first step of FedAdam with the keys :data:`ADAM`."""
    square = 0.99 * 1e-6 + 0.01 * change.square()
    return weight + 0.02 * 0.1 * change / (square.sqrt() + 1e-3)


class States(Callback):
    """Keeps the state before the first round and after every round."""

    def __init__(self) -> None:
        self.states: list[RunState] = []

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        self.states.append(state)

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        self.states.append(state)


def run(config: Config, folder: Path) -> list[RunState]:
    states = States()
    run_rounds(open_run(config, folder), callbacks=[states])
    return states.states


def keys_of(method: str) -> tuple[str, ...]:
    rounds = (*TASKS, "rounds=2", "train.epochs=2") if METHODS[method].target.needs_tasks else ("rounds=1",)
    return (f"method.name={method}", *rounds, *OVERRIDES.get(method, ()))


def written(folder: Path) -> Mapping[str, bytes]:
    """Return the files that must not depend on interruptions."""
    paths = [folder / "records.jsonl", *folder.glob("*.safetensors"), *folder.glob("checkpoint/*.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def compared(before: RunState, plain: RunState, optimized: RunState) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    assert plain.server.tensors.keys() == optimized.server.tensors.keys()
    for name, aggregate in plain.server.tensors.items():
        yield name, before.server.tensors[name], aggregate, optimized.server.tensors[name]


#: Parts of the model, other weights than the model's, tasks, and what aggregations do besides.
DIFFERENT = ("transfl", "apfl", "fed-prompt", "fedbfpt", "fedvit", "fedweit", "dytox")


@pytest.mark.parametrize("name", long_but(AVERAGING, *DIFFERENT, *(name for name in AVERAGING if " with " in name)))
def test_the_first_round_is_a_step_along_the_aggregated_change(
    name: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """For every method: parameters that clients sent follow Adam, all else is as without an optimiser."""
    keys = (*keys_of(name.split()[0]), *AVERAGING[name])
    config = tiny_config(*keys, *ADAM)
    parameters = open_run(config, tmp_path / "adam").net.parts.parameters
    optimized, plain = run(config, tmp_path / "adam"), run(tiny_config(*keys), tmp_path / "plain")
    moments = optimized[1].moments.tensors
    for key, before, aggregate, after in compared(optimized[0], plain[1], optimized[1]):
        if f"{key}/mean" not in moments:
            assert torch.equal(after, aggregate), key
            assert key not in parameters or torch.equal(aggregate, before) or name.startswith("eftvit"), key
            continue
        assert key in parameters
        torch.testing.assert_close(after, adam_step(before, aggregate - before), rtol=1e-5, atol=1e-7)
    assert moments
    first, expected = (next(iter(read_records(tmp_path / name))) for name in ("adam", "plain"))
    assert (first.total_up_bytes, first.total_down_bytes) == (expected.total_up_bytes, expected.total_down_bytes)


def test_sgd_of_rate_1_writes_the_bytes_of_a_run_without_the_table(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run(tiny_config("server.optimizer=sgd", "server.lr=1.0"), tmp_path / "sgd")
    run(tiny_config(), tmp_path / "plain")
    assert written(tmp_path / "sgd") == written(tmp_path / "plain")
    assert not any("moments" in name for name in written(tmp_path / "sgd"))


def test_layers_that_no_client_sent_keep_their_weights_and_moments(tiny_config: MakeConfig, tmp_path: Path) -> None:
    keys = ("method.name=transfl", "method.k=1", "model.depth=4", "fleet.per_round=2", "rounds=6")
    states = run(tiny_config(*keys, "server.optimizer=momentum"), tmp_path)
    kept = 0
    for before, after in pairwise(states):
        updated = after.server.numbers["updated"]
        assert isinstance(updated, list)
        for layer in range(4):
            is_sent = updated[layer] == after.round
            for name in [name for name in after.server.tensors if name.startswith(f"blocks.{layer}.")]:
                key = f"{name}/velocity"
                is_same = after.server.tensors[name] is before.server.tensors[name]
                assert is_same != is_sent
                if not is_sent:
                    assert after.moments.tensors.get(key) is before.moments.tensors.get(key)
                    kept += key in before.moments.tensors
    assert kept, "no layer rested after it had moved"


def test_no_message_has_a_moment(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Every message of every round is as large as without an optimiser, and has the same tensors."""
    run(tiny_config(*ADAM), tmp_path / "adam")
    run(tiny_config(), tmp_path / "plain")
    for one, other in zip(*(read_records(tmp_path / name) for name in ("adam", "plain")), strict=True):
        assert [(entry.client, entry.up_bytes, entry.down_bytes) for entry in one.clients] == [
            (entry.client, entry.up_bytes, entry.down_bytes) for entry in other.clients
        ]
    context = open_run(tiny_config(*ADAM), tmp_path / "adam")
    state = context.checkpoints.load(torch.device("cpu"))
    assert state is not None
    assert state.moments.tensors
    message = context.method.message_to_client(state.server, 4, 0, None)
    assert set(message.tensors) == set(context.net.parts.shapes)
    assert not state.server.parts


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi", "adagrad"])
@pytest.mark.parametrize("every", [1, 2])
def test_an_interrupted_run_ends_with_the_same_weights_and_moments(
    optimizer: str, every: int, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config("rounds=4", f"server.optimizer={optimizer}", f"machine.checkpoint_every={every}")
    run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_run(config, tmp_path / "parts"), callbacks=[InterruptAfter(3)])
    run(config, tmp_path / "parts")
    whole = written(tmp_path / "whole")
    assert written(tmp_path / "parts") == whole
    assert "checkpoint/moments-round-000004.safetensors" in whole


def test_the_buffered_schedule_is_optimized_and_resumed(tiny_config: MakeConfig, tmp_path: Path) -> None:
    keys = ("fleet.devices={agx=1, nano=2}", "fleet.schedule.kind=buffered", "fleet.schedule.concurrency=2")
    config = tiny_config(*keys, "fleet.clients=8", "fleet.per_round=2", "rounds=5", "server.optimizer=yogi")
    states = run(config, tmp_path / "whole")
    assert states[-1].in_flight.past_states
    assert not any(past.parts for past in states[-1].in_flight.past_states.values())
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_run(config, tmp_path / "parts"), callbacks=[InterruptAfter(4)])
    run(config, tmp_path / "parts")
    assert written(tmp_path / "parts") == written(tmp_path / "whole")


def test_features_on_disk_stay_beside_the_moments(tiny_config: MakeConfig, tmp_path: Path) -> None:
    keys = (*keys_of("eftvit"), "method.store_on=disk", "method.average_local=2", "rounds=5", *ADAM)
    config = tiny_config(*keys)
    states = run(config, tmp_path / "whole")
    assert not states[1].moments.tensors  # the first round averages nothing
    assert states[3].moments is states[2].moments
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_run(config, tmp_path / "parts"), callbacks=[InterruptAfter(4)])
    run(config, tmp_path / "parts")
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    assert "checkpoint/moments-round-000004.safetensors" in written(tmp_path / "whole")


def test_a_round_that_is_set_aside_moves_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    states = run(tiny_config("aggregate.max_change=1e-9", "fleet.min_replies=1", *ADAM), tmp_path)
    assert all(state.server.tensors == states[0].server.tensors for state in states)
    assert not states[-1].moments.tensors


@pytest.mark.parametrize("keys", [("method.name=standalone",), keys_of("eftvit")], ids=str)
@pytest.mark.parametrize(
    ("server", "expected"),
    [("server.optimizer=adam", "server.optimizer = 'adam': has no effect: with"), ("server.lr=0.5", "server.lr = 0.5")],
)
def test_a_method_that_averages_nothing_refuses_an_optimizer(
    keys: tuple[str, ...], server: str, expected: str, tiny_config: MakeConfig
) -> None:
    assert tiny_config(*keys).server.takes_aggregate
    with pytest.raises(UserError, match=expected) as error:
        tiny_config(*keys, server)
    assert "leave the table [server] out" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("server.optimizer=adm",), "server.optimizer = 'adm': must be one of .*did you mean adam"),
        (("server.momentum=0.9",), "it belongs to server.optimizer = momentum, and server.optimizer is sgd"),
        (("server.optimizer=yogi", "server.beta2=1.0"), "server.beta2 = 1.0: must be less than 1"),
        (("server.lr=0",), "server.lr = 0: must be greater than 0"),
        (("server=adam",), "did you mean server.optimizer=adam"),
    ],
)
def test_a_wrong_key_is_one_sentence(keys: tuple[str, ...], expected: str, tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=expected):
        tiny_config(*keys)


def test_another_optimizer_drops_the_keys_of_the_one_before(tiny_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[server]\noptimizer = "momentum"\nmomentum = 0.5\nlr = 0.1\n')
    assert api.load_config(str(path), ["server.optimizer=adam"]).server == SERVER_OPTIMIZERS.make_params("adam")
    assert api.load_config(str(path), ["server.lr=0.2"]).server == SERVER_OPTIMIZERS.make_params(
        "momentum", momentum=0.5, lr=0.2
    )


def documented_optimizer() -> str:
    """Return the example of docs/extending.md."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    codes: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(code for code in codes if "server_optimizer(" in code)


def test_an_optimizer_from_a_file_is_configured_listed_and_resumed(
    vitfleet: Command, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(documented_optimizer())
    config = tiny_config(f"server.optimizer={plugin}:amsgrad", "server.lr=0.02")
    assert (config.server.optimizer, config.server.lr) == ("amsgrad", 0.02)
    states = run(config, tmp_path / "whole")
    plain = run(tiny_config("rounds=1"), tmp_path / "plain")
    for _, before, aggregate, after in compared(states[0], plain[1], states[1]):
        torch.testing.assert_close(after, adam_step(before, aggregate - before), rtol=1e-5, atol=1e-7)
    for earlier, later in pairwise(states[1:]):
        for key, tensor in later.moments.tensors.items():
            assert not key.endswith("/largest") or (tensor >= earlier.moments.tensors[key]).all()
    with pytest.raises(KeyboardInterrupt):
        run_rounds(open_run(config, tmp_path / "parts"), callbacks=[InterruptAfter(2)])
    run(config, tmp_path / "parts")
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    assert ("server.beta2", "amsgrad") in {(key.name, key.variant) for key in every_key()}
    listed = vitfleet(tmp_path, "keys", "--plugin", "mine.py").stdout
    assert "amsgrad" in listed
    # What only the server uses need not be installed on the clients, and is not sent to them.
    spec = make_run_spec(config, load_dataset(config.data), "run")
    assert not spec.plugins
    assert json.loads(spec.config)["server"] == {"optimizer": "sgd", "lr": 1.0}


def test_the_estimate_counts_the_moments(tiny_config: MakeConfig, tmp_path: Path) -> None:
    plain, adam = (estimate_run(tiny_config(*keys), speed=lambda request: 1e9) for keys in ((), ADAM))
    assert plain is not None
    assert adam is not None
    moments = adam.memory_bytes - plain.memory_bytes
    assert adam.disk_bytes - plain.disk_bytes == 2 * moments
    assert moments == 2 * 4 * open_run(tiny_config(), tmp_path).params  # two of float32 for each parameter
